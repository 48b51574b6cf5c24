"""Join transports with the topology: NCCL says P2P or SHM, the link class says over which links."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from analysis.nccl.log import NcclLog

NET = "NET"  # the class of a link between hosts


def pair_class(
    pair: str,
    log: NcclLog,
    link_classes: Mapping[str, str] | None,
    gpus: Sequence[int | str] | None = None,
) -> str | None:
    """Return the link class of the connection `a->b`; None if GPUs, host or class are not known.

    GPU ids are the log's NVML indices, else those of `gpus`, the subset in rank order. Where that names hosts (`a:0`), so do the
    link classes (`a:0-1`), and ranks of two hosts have the class NET.
    """
    ranks = [int(rank) for rank in pair.split("->")]
    devices = [log.communicators[0].devices.get(rank) for rank in ranks]
    places = (
        [str(gpus[rank]) for rank in ranks] if gpus is not None and max(ranks) < len(gpus) else []
    )
    if places and ":" in places[0]:
        return _between_members(
            places, [device.nvml if device else None for device in devices], link_classes or {}
        )
    if (
        len({device.host for device in devices if device is not None and device.host is not None})
        > 1
    ):
        return None  # link classes are those of one machine
    ids: list[int] = []
    for rank, device in zip(ranks, devices, strict=True):
        if device is not None and device.nvml is not None:
            ids.append(device.nvml)
        elif gpus is not None and rank < len(gpus):
            ids.append(int(gpus[rank]))
    if len(ids) < 2 or not link_classes:
        return None
    return link_classes.get(f"{min(ids)}-{max(ids)}")


def _between_members(
    places: Sequence[str], known: Sequence[int | None], link_classes: Mapping[str, str]
) -> str | None:
    (host, _, first), (far, _, second) = (place.rpartition(":") for place in places)
    if host != far:
        return NET
    ids = [
        int(gpu) if nvml is None else nvml for gpu, nvml in zip((first, second), known, strict=True)
    ]
    return link_classes.get(f"{host}:{min(ids)}-{max(ids)}")


def describe_transport(
    log: NcclLog, link_classes: Mapping[str, str] | None, gpus: Sequence[int | str] | None = None
) -> str:
    """Describe all transports: `P2P/CUMEM over NV18`, `SHM/direct/direct, NV18 unused`.

    Several are joined by ` + `; without connections the answer is `unknown`.

    The numbers of network devices are left out (`NET/IB/GDRDMA`).
    """
    over: dict[str, set[str]] = defaultdict(set)
    for pair, words in log.transports.items():
        link = pair_class(pair, log, link_classes, gpus)
        for word in words:
            over[re.sub(r"^(NET/[^/]+)/\d+(\(\d+\))?", r"\1", word)] |= {link} if link else set()
    parts = []
    for word, links in sorted(over.items()):
        classes = "+".join(sorted(links))
        if not classes or word.startswith("NET/"):
            parts.append(word)
        elif word.startswith("P2P/") or not all(link.startswith("NV") for link in links):
            parts.append(f"{word} over {classes}")
        else:
            parts.append(f"{word}, {classes} unused")
    return " + ".join(parts) or "unknown"
