"""The transport, channels and bandwidth that NCCL reached, against what the wires offer.

The NCCL settings of a cell are judged by nccl_settings: here nothing was asked.
"""

from collections.abc import Iterator

from analysis.study.provenance import facts_of_hosts, gpus_of
from analysis.topology.model import nvlink_count, nvlink_gb_per_s
from analysis.validity.check import CheckOutcome, Judgement, check, list_some, unseen
from analysis.validity.nccl_settings import CHANNEL_LIMITS
from benchmarks.record import Record
from conf.schema import ValidityLimits

# Left alone, NCCL takes P2P over NVLink, and on every CPU over PIX and PXB (ncclTopoCheckP2p).
PCIE_OF_PEERS = ("PIX", "PXB")
WITHOUT_P2P = {"NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_IGNORE_DISABLED_P2P"}
# Every committed record of H200s over NV18 (NCCL 2.28, 2 to 4 GPUs) has 24 channels.
CHANNELS_OF_LINK = {"NV18": 24}
LEAST_CHANNELS = 0.5
# The ring of a reference reaches 54 to 75 % of its NVLinks in those records.
LEAST_OF_NVLINKS = 0.4


@check("suspect", "NCCL used less than the wires offer, and no setting explains it: {}")
def transport_below_wires(record: Record, _: ValidityLimits) -> Judgement:
    """NCCL used a slower path than the links allow, and no setting asked for it. One of these is
    enough: (1) SHM or NET between GPUs joined by NVLink, PIX or PXB (a finding, no doubt, if NCCL's
    log says that peer access is missing); (2) at most half of NCCL's usual channels over NV18; (3)
    one large all-reduce below 40 % of the NVLink bandwidth

    Look for what forbids peer access: ACS, IOMMU, a container without /dev/shm.
    """
    nccl = record.effective.get("nccl", {})
    if not nccl.get("transports"):
        return unseen(record)
    settings = nccl.get("settings", {}).keys() | record.cell.nccl.keys()
    unused, link_classes = [], set()
    for pair, link_class, transport in _wire_uses(record):
        link_classes.add(link_class)
        has_peer_access = nvlink_count(link_class) or link_class in PCIE_OF_PEERS
        if has_peer_access and not transport.startswith("P2P/"):
            unused.append(f"{transport} on {pair}, which {link_class} joins")
    if unused and not settings & WITHOUT_P2P:
        refusals = nccl.get("no_peer_access")
        if refusals:
            return CheckOutcome("finding", f"{list_some(unused)}; its log says: {refusals[0]}")
        return list_some(unused)
    if unused or len(link_classes) != 1 or settings & set(CHANNEL_LIMITS):
        return None
    (link_class,) = link_classes
    channels, usual = nccl["channels"].get("collective"), CHANNELS_OF_LINK.get(link_class)
    if usual and channels and channels <= LEAST_CHANNELS * usual:
        return f"{channels} channels over {link_class}, usual are {usual}"
    return _slow_ring(record, link_class)


def _wire_uses(record: Record) -> Iterator[tuple[str, str, str]]:
    """Yield pair of ranks, link class and transport of each connection of two GPUs of one host."""
    facts, places = facts_of_hosts(record), record.cell.places
    for pair, transports in record.effective.get("nccl", {}).get("transports", {}).items():
        source, target = map(int, pair.split("->"))
        if max(source, target) >= len(places):
            continue
        host, first, second = places[source].host, places[source].gpu, places[target].gpu
        if places[target].host != host or first is None or second is None:
            continue
        gpus = f"{min(first, second)}-{max(first, second)}"
        link_class = facts.get(host, {}).get("links", {}).get(gpus, "")
        for transport in transports:
            yield pair, link_class, transport


def _slow_ring(record: Record, link_class: str) -> Judgement:
    links = nvlink_count(link_class)
    gb_per_s = record.metrics.get("comm/busbw_gb_per_s")
    ratio = record.metrics.get("comm/ideal_ratio")
    if not links or not gb_per_s or not ratio or record.checks.get("reference") != "ring":
        return None
    ring_gb_per_s = gb_per_s / ratio
    for facts in facts_of_hosts(record).values():
        for gpu in gpus_of(facts):
            of_link = nvlink_gb_per_s(gpu.get("name"))
            if of_link is None:
                continue
            share = ring_gb_per_s / (links * of_link)
            if share < LEAST_OF_NVLINKS:
                offered = f"the {links * of_link:g} GB/s of {link_class}"
                return f"a ring reaches {ring_gb_per_s:.0f} GB/s, {100 * share:.0f} % of {offered}"
    return None
