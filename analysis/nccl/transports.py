"""Join transports with the topology: NCCL says P2P or SHM, the link class says over which links."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from analysis.nccl.model import NcclLog


def pair_class(
    pair: str, log: NcclLog, link_classes: Mapping[str, str] | None, gpus: Sequence[int] | None = None
) -> str | None:
    """Return the link class of the connection `a->b`; None if GPUs, host or class are not known.

    GPU ids are the log's NVML indices, else those of `gpus`, the subset in rank order.
    """
    ranks = [int(rank) for rank in pair.split("->")]
    devices = [log.communicators[0].devices.get(rank) for rank in ranks]
    if len({device.host for device in devices if device is not None and device.host is not None}) > 1:
        return None  # link classes are those of one machine
    ids: list[int] = []
    for rank, device in zip(ranks, devices, strict=True):
        if device is not None and device.nvml is not None:
            ids.append(device.nvml)
        elif gpus is not None and rank < len(gpus):
            ids.append(gpus[rank])
    if len(ids) < 2 or not link_classes:
        return None
    return link_classes.get(f"{min(ids)}-{max(ids)}")


def describe_transport(log: NcclLog, link_classes: Mapping[str, str] | None, gpus: Sequence[int] | None = None) -> str:
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
