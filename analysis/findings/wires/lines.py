"""What cells lose, against what their wires carry: a line for every mechanism of a study.

    lost ms per step = fixed + share · ms that the bytes of the exchange take at the measured GB/s of its wires

A mechanism is everything asked but the GPUs and NCCL's settings: a model, a strategy with its options, a batch. Only within
one does the same share of the exchange hide behind compute. GB/s are measured, and a line has those of one source alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from analysis.findings import labels
from analysis.findings.baselines import EFFICIENCY, follows_from_gpus
from analysis.findings.communication.exposed import COST, EXPOSED
from analysis.findings.model import Communication, Estimate, Point, Scaling, WireLine, WirePoint
from analysis.findings.next_run.interval import LEVEL
from analysis.findings.provenance import CONNECTIONS
from analysis.findings.runs import Runs, middle
from analysis.findings.study import Study
from analysis.findings.wires.fit import Fit, bends, fit, outliers
from analysis.findings.wires.measured import MachineLinks, transport_of
from benchmarks.record import Record

FEWEST = 4  # cells of a line
SPREAD = 1.2  # the slowest wires of a line must take this many times as long as the fastest
ALIKE = 1.1  # below this ratio two speeds are one
# Where the GB/s of a line come from, as the report words it. Of sources that know as many cells the first counts.
SOURCES = {
    "p2p": "peer copies (benchmark=p2p), in all rings that fit",
    "collectives": "all-reduce alone (benchmark=collectives)",
    "reference": "the reference that each cell measured",
    "exchange": "the exchange alone in each cell",
}
_STAGE, _RING = "reference/", "reference/ring_ms"  # what a cell measured of the wires that its strategy uses


@dataclass(frozen=True)
class _Cell:
    """One cell of a mechanism: ms on its wires by each source, and what it lost by each quantity, both where known."""

    runs: Runs
    megabytes: float  # that the exchange moves over its wires: busbw · time
    wire_ms: Mapping[str, float]
    lost_ms: Mapping[str, float]
    alone_ms: float | None  # a step of the slowest member alone


def wire_lines(
    study: Study,
    machines: Mapping[str, MachineLinks],
    scaling: Scaling,
    communication: Sequence[Communication],
    beside: Sequence[Record] = (),
) -> tuple[tuple[WireLine, ...], str]:
    """Return the lines of a study; without any, a sentence on what is missing and how to plan it.

    `beside` holds what other studies measured of the machine's links (analysis.findings.wires.beside).
    """
    mechanisms = _mechanisms(study, machines, scaling, beside)
    exposed = {one.record_ids[0]: one.exposed_ms for one in communication if one.exposed_ms is not None}
    chosen = []
    for cells in mechanisms:
        for quantity in (COST, EFFICIENCY):
            known = [cell for cell in cells if quantity in cell.lost_ms]
            source = _source(known)
            if source:
                known = [cell for cell in known if source in cell.wire_ms]
                told = _with_exposed(known, exposed) if quantity == COST else []
                if len(told) == len(known):
                    quantity, known = EXPOSED, told
                chosen.append((quantity, source, known))
    tested = sum(len(cells) for _, _, cells in chosen)
    level = 1 - (1 - LEVEL) / max(1, tested)  # all cells of all lines are one family
    lines = [_line(study, quantity, source, cells, level) for quantity, source, cells in chosen]
    found = tuple(line for line in lines if line is not None)
    return found, "" if found or not mechanisms else _missing(machines, mechanisms)


def _mechanisms(
    study: Study, machines: Mapping[str, MachineLinks], scaling: Scaling, beside: Sequence[Record]
) -> list[list[_Cell]]:
    points = {point.record_ids[0]: point for curve in scaling.curves for point in curve.points}
    alone = _collectives(study, beside)
    together: dict[Any, list[_Cell]] = defaultdict(list)
    for runs in study.timed:
        if runs.world_size == 1 or runs.strategy == "none":
            continue
        settings = [name for name in (*study.varied, *study.varied_provenance) if _is_setting(name)]
        key = runs.provenance["machine"], study.condition(runs, (*settings, *follows_from_gpus(runs)))
        machine = machines[runs.provenance["machine"]]
        together[key].append(_cell(runs, machine, alone, points.get(runs.records[0].record_id)))
    return list(together.values())


def _is_setting(name: str) -> bool:
    """Tell whether a name is one of NCCL's settings, which change the wires or their use, not the mechanism."""
    return name.startswith(("nccl.", "NCCL_")) or name == CONNECTIONS


def _cell(runs: Runs, machine: MachineLinks, alone: Mapping[Any, Sequence[float]], point: Point | None) -> _Cell:
    exchange, busbw = middle(runs.records, "comm/exchange_ms"), middle(runs.records, "comm/busbw_gb_per_s")
    megabytes = exchange * busbw if exchange and busbw else 0.0
    stages = {name for record in runs.records for name in record.metrics if name.startswith(_STAGE)}
    speeds: dict[str, float | None] = {}
    if stages <= {_RING} and transport_of(runs):  # the exchange crosses nothing but the wires between GPUs
        measured = alone.get(_collectives_key(runs.provenance["machine"], runs.records[0]))
        speeds["p2p"] = machine.measured_gb_per_s(runs.gpus, transport_of(runs))
        speeds["collectives"] = median(measured) if measured else None
    times = {source: megabytes / speed for source, speed in speeds.items() if speed and megabytes}
    reference = middle(runs.records, "comm/ideal_ms")
    if megabytes and reference:
        times["reference"] = reference
    if megabytes and exchange:
        times["exchange"] = exchange
    lost, step_alone = {}, None
    cost = middle(runs.records, COST)
    if cost is not None:
        lost[COST] = cost
    if point is not None and point.baseline is not None:
        step_alone = 1e3 * point.batch_size / point.baseline.value
        lost[EFFICIENCY] = 1e3 * point.batch_size * point.world_size / point.rate.value - step_alone
    return _Cell(runs, megabytes, times, lost, step_alone)


def _with_exposed(cells: Sequence[_Cell], exposed: Mapping[str, float]) -> list[_Cell]:
    """Return the cells whose exposed communication is known, with it beside the strategy's cost."""
    known = [(cell, exposed.get(cell.runs.records[0].record_id)) for cell in cells]
    return [replace(cell, lost_ms={**cell.lost_ms, EXPOSED: ms}) for cell, ms in known if ms is not None]


def _collectives_key(machine: str, record: Record) -> tuple[Any, ...]:
    return machine, frozenset(record.cell.members), frozenset(record.cell.nccl.items())


def _collectives(study: Study, beside: Sequence[Record]) -> dict[Any, list[float]]:
    """Return the busbw of all-reduces that ran alone, by machine, GPUs and NCCL's settings."""
    found: dict[Any, list[float]] = defaultdict(list)
    own = [(runs.provenance["machine"], record) for runs in study.runs for record in runs.records]
    machine = own[0][0] if own else ""  # `beside` is empty where there are several
    for where, record in [*own, *((machine, record) for record in beside)]:
        options, busbw = record.cell.benchmark, record.metrics.get("collectives/busbw_gb_per_s")
        if busbw and options["name"] == "collectives" and options.get("collective") == "all_reduce":
            found[_collectives_key(where, record)].append(busbw)
    return found


def _source(cells: Sequence[_Cell]) -> str | None:
    """Return the source of GB/s that knows most cells, among those whose cells are enough for a line."""
    counts = {}
    for source in SOURCES:
        times = [cell.wire_ms[source] for cell in cells if source in cell.wire_ms]
        if len(times) >= FEWEST and max(times) >= SPREAD * min(times):
            counts[source] = len(times)
    return max(counts, key=counts.__getitem__, default=None)


def _line(study: Study, quantity: str, source: str, cells: Sequence[_Cell], level: float) -> WireLine | None:
    pairs = [(cell.wire_ms[source], cell.lost_ms[quantity]) for cell in cells]
    outside = outliers(pairs, level, FEWEST)
    line = fit([pair for place, pair in enumerate(pairs) if place not in outside])
    if line is None:
        return None
    first = cells[0].runs
    points = []
    for place, (cell, (x, _)) in enumerate(zip(cells, pairs, strict=True)):
        others = line if place in outside else fit([one for at, one in enumerate(pairs) if at not in (place, *outside)])
        points.append(_point(study, quantity, source, cell, (others or line).expected(x, level), place in outside))
    alone = [cell.alone_ms for cell in cells if cell.alone_ms is not None]
    return WireLine(
        label=labels.label(study, first, ["benchmark.name", *(name for name in study.varied if _is_setting(name))]),
        strategy=first.strategy,
        key=first.key,
        quantity=quantity,
        source=source,
        # Cells of other lines share an error of one GPU.
        fixed_ms=line.fixed_estimate() if quantity == COST else Estimate(line.fixed),
        share=line.slope_estimate(),
        r_squared=line.r_squared,
        deviation_ms=line.deviation,
        points=tuple(sorted(points, key=lambda point: (point.wire_ms, point.gpus, point.label))),
        speeds=_speeds([x for x, _ in pairs]),
        bends=bends([pair for place, pair in enumerate(pairs) if place not in outside]),
        alone_ms=median(alone) if alone and quantity == EFFICIENCY else None,
    )


def _point(study: Study, quantity: str, source: str, cell: _Cell, expected: Estimate, outside: bool) -> WirePoint:
    runs, lost = cell.runs, cell.lost_ms[quantity]
    settings = [labels.worded(name, runs.request[name]) for name in study.varied if _set(runs, name)]
    verdict = ("more" if lost > expected.value else "less") if outside else ""
    return WirePoint(
        runs.gpus, runs.key, labels.BETWEEN.join([labels.gpu_ids(runs.gpus), *settings]),
        cell.megabytes / cell.wire_ms[source], cell.wire_ms[source], lost, expected, lost - expected.value, verdict,
        *_shares(cell, lost, expected, quantity),
    )  # fmt: skip


def _set(runs: Runs, name: str) -> bool:
    return _is_setting(name) and name in runs.request


def _shares(cell: _Cell, lost: float, expected: Estimate, quantity: str) -> tuple[float | None, Estimate | None]:
    """Return a cell's efficiency, and that which the line gives it; both None where the line is not one of efficiency."""
    if quantity != EFFICIENCY or cell.alone_ms is None:
        return None, None
    return cell.alone_ms / (cell.alone_ms + lost), efficiency_of(cell.alone_ms, expected)


def efficiency_of(alone_ms: float, lost_ms: Estimate) -> Estimate:
    """Return the efficiency of a step that takes `lost_ms` more than alone; interval ends change places."""
    value, high, low = (
        None if lost is None else alone_ms / max(alone_ms + lost, 1e-9)
        for lost in (lost_ms.value, lost_ms.low, lost_ms.high)
    )
    assert value is not None
    return Estimate(value, low, high)


def line_of(line: WireLine) -> Fit | None:
    """Return the fit of a line, to draw it."""
    return fit([(point.wire_ms, point.lost_ms) for point in line.points if not point.verdict])


def _speeds(times: Iterable[float]) -> int:
    """Return how many different times on the wires there are; those within ALIKE of the fastest of a group are one."""
    count, first = 0, 0.0
    for time in sorted(times):
        if not count or time > ALIKE * first:
            count, first = count + 1, time
    return count


def _missing(machines: Mapping[str, MachineLinks], mechanisms: Sequence[Sequence[_Cell]]) -> str:
    cells = max(mechanisms, key=lambda cells: sum(bool(cell.wire_ms) for cell in cells))
    strategy, machine = cells[0].runs.strategy, machines[cells[0].runs.provenance["machine"]]
    measured = [cell for cell in cells if cell.wire_ms]
    plan = " (gpus=classes adds them)" if machine.has_different_links else " (nccl.max_nchannels=1,2,4,8 adds them)"
    plan = plan if cells[0].runs.cell.device == "cuda" else ""
    said = "whether the speed of the links explains what cells lose is not known"
    if not measured:
        return f"{said}: no cell measured its exchange or its links"
    if not any(cell.lost_ms for cell in measured):
        return f"{said}: no cell of {strategy} measured what the strategy costs, and none ran on one GPU (gpus=each adds that)"
    if len(measured) < FEWEST:
        have = f"{len(measured)} cell{'s' if len(measured) > 1 else ''} with measured links"
        return f"{said}: {strategy} has {have}, and {FEWEST} with different GB/s are needed{plan}"
    speeds = [cell.megabytes / min(cell.wire_ms.values()) for cell in measured]
    return (
        f"{said}: all links of {strategy} are equally fast ({min(speeds):.0f} to {max(speeds):.0f} GB/s), and {FEWEST} cells "
        f"with different GB/s are needed{plan}"
    )
