"""Which wire limits cells on several hosts, in a sentence."""

from analysis.findings.links import HostWires, host_wires
from analysis.report.numbers import number
from analysis.study.estimates import Point
from analysis.study.study import Study
from analysis.text import single_line

LIMITS = 0.8  # an exchange that reaches this share of what the wire carries is limited by it
MOST = 1.1  # above it the reference was slower than the wire, and says nothing of it
WORDS = (
    "no",
    "One",
    "Two",
    "Three",
    "Four",
    "Five",
    "Six",
    "Seven",
    "Eight",
    "Nine",
    "Ten",
    "Eleven",
    "Twelve",
)


def wire(study: Study, point: Point) -> str:
    """Return how several hosts compare with one, over which network they exchange, and whether it limits; empty on one host.

    `Two hosts train 1.3 × the slowest of them alone. The network between them limits: …`
    """
    runs = next((one for one in study.runs if one.records[0].record_id in point.record_ids), None)
    found = None if runs is None else host_wires(runs)
    if runs is None or found is None:
        return ""
    many = len(runs.cell.hosts)
    spoken = WORDS[many] if many < len(WORDS) else f"{many:,}"
    said = ""
    if point.node_efficiency is not None:
        said = f"{spoken} hosts train {number(point.node_efficiency.value * many, 'ratio')} × the slowest of them alone: "
    told = _told(found)
    return (
        single_line(f"{said}{told if said else told[:1].upper() + told[1:]}.", 400) if told else ""
    )


def _told(found: HostWires) -> str:
    over = f" over {found.worded}" if found.worded else " over the network between them"
    if found.exchange_ms is None:
        return f"they exchange{over}" if found.worded else ""
    took = f"an exchange takes {number(found.exchange_ms)} ms{over}"
    rate = f" at {number(found.gb_per_s)} GB/s" if found.gb_per_s else ""
    nominal = (
        ""
        if found.nominal_gb_per_s is None
        else f"; by the driver {8 * found.nominal_gb_per_s:g} Gbit/s"
    )
    if found.share is None or found.share > MOST:
        return f"{took}{rate}{f' ({nominal[2:]})' if nominal else ''}"
    share = number(min(1.0, found.share), "share")  # up to MOST by noise
    if found.share >= LIMITS:
        return f"{took}{rate}, and this network limits it ({share} of what it carries is used{nominal})"
    return f"{took}{rate}, and this network does not limit it ({share} of what it carries is used{nominal})"
