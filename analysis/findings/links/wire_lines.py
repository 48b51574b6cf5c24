"""What cells lose, against what their wires carry: a line for every mechanism of a study.

    lost ms per step = fixed + share · ms that the bytes of the exchange take at the measured GB/s
    of its wires

A mechanism is everything asked but the GPUs and NCCL's settings: a model, a strategy with its
options, a batch. Only within one does the same share of the exchange hide behind compute. GB/s are
measured, and a line has those of one source alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from analysis.findings.baselines import EFFICIENCY
from analysis.findings.communication import COST, EXPOSED
from analysis.findings.links.line_fit import Fit, bends, fit, outliers
from analysis.findings.links.machine_links import MachineLinks, transport_of
from analysis.study import names as labels
from analysis.study.conditions import OF_LINKS, irrelevant_to_curves, is_among
from analysis.study.estimates import Communication, Estimate, Point, Scaling, WireLine, WirePoint
from analysis.study.intervals import LEVEL
from analysis.study.runs import Runs
from analysis.study.study import Study
from benchmarks.record import Record

FEWEST = 4  # cells of a line
SPREAD = 1.2  # the slowest wires of a line must take this many times as long as the fastest
ALIKE = 1.1  # below this ratio two speeds are one
# Where the GB/s of a line come from, as the report words it. Of sources that know as many cells the
# first counts.
SOURCES = {
    "p2p": "peer copies (benchmark=p2p), in all rings that fit",
    "collectives": "all-reduce alone (benchmark=collectives)",
    "reference": "the reference that each cell measured",
    "exchange": "the exchange alone in each cell",
}
# What a cell measured of the wires that its strategy uses; the ring crosses nothing but the wires
# between GPUs.
_STAGE, _RING = "reference/", "reference/ring_ms"
# NCCL's settings change the wires or their use, not the mechanism.
SETTINGS = (*OF_LINKS, "NCCL_")


@dataclass(frozen=True)
class _Cell:
    """One cell of a mechanism: ms on its wires by each source, and what it lost by each quantity,
    both where known.
    """

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
    neighbours: Sequence[Record] = (),
) -> tuple[tuple[WireLine, ...], str]:
    """Return the lines of a study; without any, a sentence on what is missing and how to plan it.

    `neighbours` are records of other studies of the machine's links
    (analysis.findings.links.machine_links).
    """
    mechanisms = _mechanisms(study, machines, scaling, neighbours)
    exposed = {}
    for each in communication:
        if each.exposed_ms is not None:
            exposed[each.record_ids[0]] = each.exposed_ms
    chosen = []
    for mechanism in mechanisms:
        for quantity in (COST, EFFICIENCY):
            cells = [cell for cell in mechanism if quantity in cell.lost_ms]
            source = _source(cells)
            if source is None:
                continue
            cells = [cell for cell in cells if source in cell.wire_ms]
            ids = [cell.runs.records[0].record_id for cell in cells]
            if quantity == COST and all(record_id in exposed for record_id in ids):
                quantity = EXPOSED
                for index, record_id in enumerate(ids):
                    lost_ms = {**cells[index].lost_ms, EXPOSED: exposed[record_id]}
                    cells[index] = replace(cells[index], lost_ms=lost_ms)
            chosen.append((quantity, source, cells))
    tested = sum(len(cells) for _, _, cells in chosen)
    level = 1 - (1 - LEVEL) / max(1, tested)  # all cells of all lines are one family
    lines = [_line(study, quantity, source, cells, level) for quantity, source, cells in chosen]
    fitted = tuple(line for line in lines if line is not None)
    return fitted, "" if fitted or not mechanisms else _missing(machines, mechanisms)


def _mechanisms(
    study: Study,
    machines: Mapping[str, MachineLinks],
    scaling: Scaling,
    neighbours: Sequence[Record],
) -> list[list[_Cell]]:
    points = {point.record_ids[0]: point for curve in scaling.curves for point in curve.points}
    collectives = _collectives(study, neighbours)
    mechanisms: dict[Any, list[_Cell]] = defaultdict(list)
    for runs in study.timed:
        if runs.world_size > 1 and runs.strategy != "none":
            condition = study.condition(runs, (*SETTINGS, *irrelevant_to_curves(runs.strong)))
            point = points.get(runs.records[0].record_id)
            cell = _cell(runs, machines[runs.machine], collectives, point)
            mechanisms[condition].append(cell)
    return list(mechanisms.values())


def _cell(
    runs: Runs,
    machine: MachineLinks,
    collectives: Mapping[Any, Sequence[float]],
    point: Point | None,
) -> _Cell:
    exchange, busbw = runs.median("comm/exchange_ms"), runs.median("comm/busbw_gb_per_s")
    megabytes = exchange * busbw if exchange and busbw else 0.0
    stages = {name for record in runs.records for name in record.metrics if name.startswith(_STAGE)}
    transport = transport_of(runs)
    speeds: dict[str, float | None] = {}
    if stages <= {_RING} and transport:
        speeds["p2p"] = machine.measured_gb_per_s(runs.gpus, transport)
        alone = collectives.get(_collectives_key(runs.machine, runs.records[0]))
        speeds["collectives"] = median(alone) if alone else None
    times = {source: megabytes / speed for source, speed in speeds.items() if speed and megabytes}
    reference = runs.median("comm/ideal_ms")
    if megabytes and reference:
        times["reference"] = reference
    if megabytes and exchange:
        times["exchange"] = exchange
    lost, step_alone = {}, None
    cost = runs.median(COST)
    if cost is not None:
        lost[COST] = cost
    if point is not None and point.baseline is not None:
        step_alone = 1e3 * point.batch_size / point.baseline.value
        lost[EFFICIENCY] = 1e3 * point.batch_size * point.world_size / point.rate.value - step_alone
    return _Cell(runs, megabytes, times, lost, step_alone)


def _collectives_key(machine: str, record: Record) -> tuple[Any, ...]:
    return machine, frozenset(record.cell.members), frozenset(record.cell.nccl.items())


def _collectives(study: Study, neighbours: Sequence[Record]) -> dict[Any, list[float]]:
    busbw: dict[Any, list[float]] = defaultdict(list)
    records = [(runs.machine, record) for runs in study.runs for record in runs.records]
    if records:  # there are no neighbours of a study of several machines
        records += [(records[0][0], record) for record in neighbours]
    for machine, record in records:
        options = record.cell.benchmark
        value = record.metrics.get("collectives/busbw_gb_per_s")
        is_all_reduce = options.get("collective") == "all_reduce"
        if value and options["name"] == "collectives" and is_all_reduce:
            busbw[_collectives_key(machine, record)].append(value)
    return busbw


def _source(cells: Sequence[_Cell]) -> str | None:
    counts = {}
    for source in SOURCES:
        times = [cell.wire_ms[source] for cell in cells if source in cell.wire_ms]
        if len(times) >= FEWEST and max(times) >= SPREAD * min(times):
            counts[source] = len(times)
    return max(counts, key=counts.__getitem__, default=None)


def _line(
    study: Study, quantity: str, source: str, cells: Sequence[_Cell], level: float
) -> WireLine | None:
    pairs = [(cell.wire_ms[source], cell.lost_ms[quantity]) for cell in cells]
    outside = outliers(pairs, level, FEWEST)
    inside = [index for index in range(len(pairs)) if index not in outside]
    line = fit([pairs[index] for index in inside])
    if line is None:
        return None
    points = []
    for index, cell in enumerate(cells):
        through = line
        if index not in outside:  # judged by the line through all others
            rest = [pairs[each] for each in inside if each != index]
            through = fit(rest) or line
        expected = through.expected(pairs[index][0], level)
        points.append(_point(study, quantity, source, cell, expected, index in outside))
    alone = [cell.alone_ms for cell in cells if cell.alone_ms is not None]
    varied_settings = [name for name in study.varied if is_among(name, SETTINGS)]
    first = cells[0].runs
    return WireLine(
        label=labels.label(study, first, ["benchmark.name", *varied_settings]),
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
        speeds=_speeds(x for x, _ in pairs),
        bends=bends([pairs[index] for index in inside]),
        alone_ms=median(alone) if alone and quantity == EFFICIENCY else None,
    )


def _point(
    study: Study, quantity: str, source: str, cell: _Cell, expected: Estimate, outside: bool
) -> WirePoint:
    runs, lost = cell.runs, cell.lost_ms[quantity]
    words = [labels.gpu_ids(runs.gpus)]
    for name in study.varied:
        if is_among(name, SETTINGS) and name in runs.request:
            words.append(labels.format_option(name, runs.request[name]))
    verdict = ""
    if outside:
        verdict = "more" if lost > expected.value else "less"
    efficiency, expected_efficiency = None, None
    if quantity == EFFICIENCY and cell.alone_ms is not None:
        efficiency = cell.alone_ms / (cell.alone_ms + lost)
        expected_efficiency = efficiency_of(cell.alone_ms, expected)
    return WirePoint(
        gpus=runs.gpus,
        key=runs.key,
        label=labels.BETWEEN.join(words),
        gb_per_s=cell.megabytes / cell.wire_ms[source],
        wire_ms=cell.wire_ms[source],
        lost_ms=lost,
        expected_ms=expected,
        residual_ms=lost - expected.value,
        verdict=verdict,
        efficiency=efficiency,
        expected_efficiency=expected_efficiency,
    )


def efficiency_of(alone_ms: float, lost_ms: Estimate) -> Estimate:
    """Return the efficiency of a step that takes `lost_ms` more than alone; interval ends change
    places.
    """

    def efficiency(ms: float) -> float:
        return alone_ms / max(alone_ms + ms, 1e-9)

    if lost_ms.low is None or lost_ms.high is None:
        return Estimate(efficiency(lost_ms.value))
    return Estimate(efficiency(lost_ms.value), efficiency(lost_ms.high), efficiency(lost_ms.low))


def line_of(line: WireLine) -> Fit | None:
    """Return the fit of a line, to draw it."""
    return fit([(point.wire_ms, point.lost_ms) for point in line.points if not point.verdict])


def _speeds(times: Iterable[float]) -> int:
    """Return how many different times on the wires there are; those within ALIKE of the fastest of
    a group are one.
    """
    count, first = 0, 0.0
    for time in sorted(times):
        if not count or time > ALIKE * first:
            count, first = count + 1, time
    return count


def _missing(machines: Mapping[str, MachineLinks], mechanisms: Sequence[Sequence[_Cell]]) -> str:
    """Return a sentence on what the mechanism with most measured cells lacks, and how to plan it."""
    cells = max(mechanisms, key=lambda cells: sum(bool(cell.wire_ms) for cell in cells))
    measured = [cell for cell in cells if cell.wire_ms]
    runs = cells[0].runs
    plan = ""
    if runs.cell.device == "cuda" and machines[runs.machine].has_different_links:
        plan = " (gpus=classes adds them)"
    elif runs.cell.device == "cuda":
        plan = " (nccl.max_nchannels=1,2,4,8 adds them)"
    if not measured:
        why = "no cell measured its exchange or its links"
    elif not any(cell.lost_ms for cell in measured):
        why = (
            f"no cell of {runs.strategy} measured what the strategy costs, and none ran on one GPU "
            "(gpus=each adds that)"
        )
    elif len(measured) < FEWEST:
        cells_words = f"{len(measured)} cell{'s' if len(measured) > 1 else ''} with measured links"
        why = (
            f"{runs.strategy} has {cells_words}, and {FEWEST} with different GB/s are needed{plan}"
        )
    else:
        speeds = [cell.megabytes / min(cell.wire_ms.values()) for cell in measured]
        range_words = f"{min(speeds):.0f} to {max(speeds):.0f} GB/s"
        why = (
            f"all links of {runs.strategy} are equally fast ({range_words}), and {FEWEST} cells "
            f"with different GB/s are needed{plan}"
        )
    return f"whether the speed of the links explains what cells lose is not known: {why}"
