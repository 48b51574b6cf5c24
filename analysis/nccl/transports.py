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

    GPU ids are the log's NVML indices, else those of `gpus`, the subset in rank order. Where that
    names hosts (`a:0`), so do the link classes (`a:0-1`), and ranks of two hosts have the class
    NET.
    """
    ids: list[int] = []
    member_hosts: list[str] = []  # that `gpus` names
    hosts: set[str] = set()  # that the log names
    for rank in map(int, pair.split("->")):
        nvml, gpu = None, None
        device = log.communicators[0].devices.get(rank)
        if device is not None:
            nvml = device.nvml
            if device.host is not None:
                hosts.add(device.host)
        if gpus is not None and rank < len(gpus):
            host, _, gpu = str(gpus[rank]).rpartition(":")
            member_hosts.append(host)
        if nvml is not None:
            ids.append(nvml)
        elif gpu is not None:
            ids.append(int(gpu))
    is_of_hosts = len(member_hosts) == 2 and member_hosts[0] != ""
    if is_of_hosts and member_hosts[0] != member_hosts[1]:
        return NET
    if len(hosts) > 1 and not is_of_hosts:
        return None  # link classes are those of one machine
    if len(ids) < 2 or not link_classes:
        return None
    pair_of_gpus = f"{min(ids)}-{max(ids)}"
    if is_of_hosts:
        pair_of_gpus = f"{member_hosts[0]}:{pair_of_gpus}"
    return link_classes.get(pair_of_gpus)


def describe_transport(
    log: NcclLog, link_classes: Mapping[str, str] | None, gpus: Sequence[int | str] | None = None
) -> str:
    """Describe all transports: `P2P/CUMEM over NV18`, `SHM/direct/direct, NV18 unused`.

    Several are joined by ` + `; without connections the answer is `unknown`. The numbers of network
    devices are left out (`NET/IB/GDRDMA`).
    """
    links_of: dict[str, set[str]] = defaultdict(set)
    for pair, words in log.transports.items():
        link = pair_class(pair, log, link_classes, gpus)
        for word in words:
            links = links_of[re.sub(r"^(NET/[^/]+)/\d+(\(\d+\))?", r"\1", word)]
            if link:
                links.add(link)
    parts = []
    for word, links in sorted(links_of.items()):
        classes = "+".join(sorted(links))
        if not classes or word.startswith("NET/"):
            parts.append(word)
        elif word.startswith("P2P/") or not all(link.startswith("NV") for link in links):
            parts.append(f"{word} over {classes}")
        else:
            parts.append(f"{word}, {classes} unused")
    return " + ".join(parts) or "unknown"
