"""What a forecast rests on: the cells of a study with their scatter, and its links."""

import bisect
import functools
import heapq
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

from analysis.prediction import strategies
from analysis.prediction.distributions import Draws, mean, normal, scaled_normal
from analysis.prediction.link_model import (
    AND,
    DIRECT,
    HOST_MEMORY,
    LinkModel,
    TimeCurve,
    requested_wire,
    used_wire,
)
from analysis.prediction.query import CellQuery, Workload, query_of, workload_of
from analysis.prediction.recorded_forecast import any_doubtful
from analysis.study.conditions import IMAGES_PER_SECOND, request_of
from analysis.study.intervals import Estimate
from analysis.study.runs import Runs
from analysis.study.study import Study
from benchmarks.collectives.request import COLLECTIVES
from benchmarks.record import Record, finite

STEP, COST, EXCHANGE = "step/ms_median", "strategy/cost_ms", "comm/exchange_ms"
BUSY, LAUNCH = "gpu/busy_ms", "step/launch_ms"
SIGMA_AT_P95, SIGMA_AT_95 = 1.645, 1.96  # of a normal number: one-sided, and half an interval
# Scatter between runs where too few cells ran twice: shares, of the cost ms.
DEFAULT_SCATTER = {STEP: 0.003, BUSY: 0.003, EXCHANGE: 0.03, COST: 0.05}
Value = TypeVar("Value")
MOST_MS, MOST_BYTES = 1e9, 1e13  # what a damaged record may say beyond them enters no forecast
_BETWEEN_KINDS: dict[tuple[int, int], tuple[float, ...]] = {}  # CellQuery.kind


@dataclass(frozen=True)
class Moments:
    """When things happen in a step without any exchange, in ms after its start."""

    ready_ms: tuple[float, ...]  # each bucket, in order
    backward_ms: float
    step_ms: float


@dataclass(frozen=True, eq=False)
class MeasuredCell:
    """The runs of one cell."""

    query: CellQuery
    record_ids: tuple[str, ...]
    step_ms: Draws | None
    cost_ms: Draws | None = None  # steps with the strategy minus steps without, in turn
    exchange_ms: Draws | None = None  # alone
    between_runs: float = 0.003  # standard deviation of the step between runs, as a share
    scatter_known: bool = True  # runs of equal cells showed it; else it is DEFAULT_SCATTER
    valid: bool = True  # no check cast doubt on it
    cpu_bound: bool = False  # in every run GPUs waited for the CPU
    busy_ms: Draws | None = None  # of the devices in a step, without waiting for the CPU
    # In which the CPU enqueues a GPU's step, in ms, of each run; where it set the step, that too.
    launch_ms: tuple[float, ...] = ()
    label: str = ""
    rate: Estimate | None = None  # images per second of the next run, as reports have it
    lent_by: str = ""  # whose noise floor its interval has, where it is not that of equal cells
    # What a calibration measured in its ranks (benchmarks/training/calibration); None without one.
    buckets: tuple[float, ...] | None = None  # bytes of each on the wire
    moments: Moments | None = None


# Cells by CellQuery.kind and batch size, ascending: a cell of thousands is near without a look at
# the others.
CellIndex: TypeAlias = Mapping[int, Mapping[int, list[MeasuredCell]]]


@dataclass(frozen=True, eq=False)
class CalibrationData:
    """The measured cells and links of a study."""

    cells: tuple[MeasuredCell, ...]
    links: LinkModel
    link_class: str | None = None  # the farthest between its GPUs
    machine: str = ""  # that forecasts are for
    memo: dict[Any, Any] = field(default_factory=dict, init=False)  # what functions keep (once)

    @functools.cached_property
    def timed(self) -> list[MeasuredCell]:
        """The cells with a step time."""
        return [cell for cell in self.cells if cell.step_ms is not None]

    @functools.cached_property
    def by_workload(self) -> dict[Workload, list[MeasuredCell]]:
        """The cells with a step time, of each workload."""
        cells: dict[Workload, list[MeasuredCell]] = defaultdict(list)
        for cell in self.timed:
            cells[cell.query.workload].append(cell)
        return dict(cells)

    @property
    def unit(self) -> str:
        """What most cells ran on: a GPU, or a CPU worker."""
        return statistics.mode(cell.query.unit for cell in self.cells)

    @functools.cached_property
    def record_ids(self) -> tuple[str, ...]:
        """The records that it rests on."""
        record_ids: list[str] = []
        for cell in self.cells:
            record_ids += cell.record_ids
        return tuple(record_ids)

    def without(
        self, left_out: Callable[[MeasuredCell], bool], most_ranks: float = math.inf
    ) -> "CalibrationData":
        """Return the same without some cells and the collectives that were timed in their ranks.

        `most_ranks`: nor anything of more ranks, links included.
        """
        cells = []
        gone: set[str] = set()
        for cell in self.cells:
            if left_out(cell):
                gone.update(cell.record_ids)
            elif cell.query.ranks <= most_ranks:
                cells.append(cell)
        curves = []
        for curve in self.links.curves:
            if curve.record_id not in gone and curve.ranks <= most_ranks:
                curves.append(curve)
        host = {}
        for gpus, rate in self.links.host_gb_per_s.items():
            if gpus <= most_ranks:
                host[gpus] = rate
        links = replace(self.links, curves=tuple(curves), host_gb_per_s=host)
        return replace(self, cells=tuple(cells), links=links)


def once(function: Callable[..., Value]) -> Callable[..., Value]:
    """Return a function of a calibration that is computed once for it and the other arguments."""

    @functools.wraps(function)
    def kept(calibration: CalibrationData, *of: Hashable) -> Value:
        key = function.__name__, of
        if key not in calibration.memo:
            calibration.memo[key] = function(calibration, *of)
        value: Value = calibration.memo[key]
        return value

    return kept


@once
def cells_with(calibration: CalibrationData, *parts: str) -> CellIndex:
    """Return the cells that have these parts, by their kinds and batch sizes."""
    index: dict[int, dict[int, list[MeasuredCell]]] = defaultdict(lambda: defaultdict(list))
    for cell in calibration.cells:
        if all(getattr(cell, part) is not None for part in parts):
            index[cell.query.kind][cell.query.batch_size].append(cell)
    return {kind: dict(sorted(batches.items())) for kind, batches in index.items()}


def nearest_cells(
    index: CellIndex, query: CellQuery, unlike: Callable[[CellQuery], Any]
) -> Iterator[MeasuredCell]:
    """Yield cells, the nearest to a query first.

    `unlike` says how far a kind of cells lies from it before their distance counts; None: not at
    all like it.
    """
    by_distance: dict[Any, list[Mapping[int, list[MeasuredCell]]]] = defaultdict(list)
    for batches in index.values():
        there = next(iter(batches.values()))[0].query
        first = unlike(there)
        if first is not None:
            by_distance[first, _between_kinds(there, query)].append(batches)

    def of_sizes(
        batches: Mapping[int, list[MeasuredCell]], sizes: Iterable[int]
    ) -> Iterator[tuple[float, list[MeasuredCell]]]:
        for size in sizes:
            yield abs(math.log(size / query.batch_size)), batches[size]

    for _, alike in sorted(by_distance.items(), key=itemgetter(0)):
        ways = []
        for batches in alike:
            sizes = list(batches)
            middle = bisect.bisect_left(sizes, query.batch_size)
            ways.append(of_sizes(batches, reversed(sizes[:middle])))
            ways.append(of_sizes(batches, sizes[middle:]))
        for _, cells in heapq.merge(*ways, key=itemgetter(0)):
            yield from cells


def matching_cells(index: CellIndex, query: CellQuery, *same: str) -> Iterator[MeasuredCell]:
    """Yield the cells that equal a query in some of its properties, the nearest first."""
    wanted = [getattr(query, name) for name in same]

    def unlike(there: CellQuery) -> tuple[()] | None:
        if [getattr(there, name) for name in same] == wanted:
            return ()
        return None

    return nearest_cells(index, query, unlike)


def _between_kinds(here: CellQuery, there: CellQuery) -> tuple[float, ...]:
    """Return how far two queries lie from each other but for their batch sizes, the weightiest
    difference first.
    """
    pair = here.kind, there.kind
    if pair not in _BETWEEN_KINDS:  # of thousands of cells
        _BETWEEN_KINDS[pair] = (
            float(here.shares_gpu != there.shares_gpu),
            float(here.transport != there.transport),
            float(here.halves != there.halves),
            float(len(set(here.options) ^ set(there.options))),
            float(here.wire != there.wire),
            float(here.workload != there.workload),
            abs(math.log(here.ranks / there.ranks)),
            float(here.machine != there.machine),
        )
    return _BETWEEN_KINDS[pair]


def calibrate(study: Study, first: Study | None = None) -> CalibrationData:
    """Return the calibration of a study, for the machine that most timed cells of it ran on, or of
    the `first` of the studies that it is made of. Raises ValueError without a timed training cell.
    """
    cells = []
    devices = []
    for runs in study.runs:
        if not runs.cell.trains:
            continue
        devices.append(runs.cell.device)
        if str(runs.cell.strategy.get("comm_hook")) in strategies.NO_FORECAST_HOOKS:
            continue
        if runs.values(STEP) or runs.values(EXCHANGE):
            cells.append(_measured_cell(runs))
    if not any(cell.step_ms is not None for cell in cells):
        where = study.folder or study.name
        raise ValueError(
            f"{where}: no run has a step time; expected the folder of a study with training runs"
        )
    device = statistics.mode(devices)
    machine = _machine_of(cells, first or study)
    curves = []
    inside: dict[bool, list[str]] = {True: [], False: []}  # link classes, by: on this machine
    copies: dict[Any, list[float]] = defaultdict(list)  # by transport
    host: dict[Any, list[float]] = defaultdict(list)  # by the number of GPUs
    for runs in study.runs:
        for record in runs.records:
            if record.cell.device != device:
                continue
            curves.append(_collective_curve(record))
            link_class = record.effective.get("link_class")
            if link_class and link_class != "NET":
                inside[runs.machine == machine].append(link_class)
            for several, key, metric in (
                (copies, DIRECT, "p2p/unidirectional_enabled_gb_per_s"),
                (copies, HOST_MEMORY, "p2p/unidirectional_disabled_gb_per_s"),
                (host, 1, "host_link/one_both_gb_per_s"),
                (host, record.cell.world_size, "host_link/all_both_gb_per_s"),
            ):
                rate = record.metrics.get(metric, 0.0)
                if 0 < rate < math.inf:
                    several[key].append(rate)
    curves += map(gradient_curve, cells)
    links = LinkModel(
        tuple(filter(None, curves)),
        {transport: statistics.median(rates) for transport, rates in copies.items()},
        {gpus: statistics.median(rates) for gpus, rates in host.items()},
    )
    farthest = None
    if inside[True] or inside[False]:
        farthest = statistics.mode(inside[True] or inside[False])
    return CalibrationData(tuple(cells), links, farthest, machine)


def _machine_of(cells: Iterable[MeasuredCell], first: Study) -> str:
    """Return the machine of most timed cells of a study; of most of all cells where it has none."""
    record_ids = set()
    for record in (*first.records, *first.replaced):
        record_ids.add(record.record_id)
    machines: dict[bool, list[str]] = {True: [], False: []}
    for cell in cells:
        if cell.step_ms is not None:
            machines[not record_ids.isdisjoint(cell.record_ids)].append(cell.query.machine)
    return statistics.mode(machines[True] or machines[False])


def _measured_cell(runs: Runs) -> MeasuredCell:
    record = runs.records[0]
    workload = workload_of(runs.request, record.model)
    query = query_of(runs.cell, workload, record.effective.get("link_class"), runs.machine)
    if query.ranks > 1 and query.hosts == 1 and strategies.exchange_of(query).by_nccl:
        query = replace(query, wire=used_wire(record.effective.get("transport"), query.wire))
    tables: dict[str, Any] = {}
    record_ids = []
    cpu_bound = True
    launch_ms = []
    for run in runs.records:
        tables = run.tables | tables  # of a table in several records the first one's
        record_ids.append(run.record_id)
        if run.cell.device == "cuda":
            launch_ms.append(run.metrics.get(LAUNCH, 0.0))
        if "cpu_bound" in run.validity.codes:
            launch_ms.append(run.metrics.get(STEP, 0.0))
        else:
            cpu_bound = False
    rate = runs.next_run(IMAGES_PER_SECOND)
    if rate is not None and rate.value <= 0:
        rate = None
    floor = runs.floor(IMAGES_PER_SECOND)
    return MeasuredCell(
        query=query,
        record_ids=tuple(record_ids),
        step_ms=_median_of_runs(runs, STEP),
        cost_ms=_median_of_runs(runs, COST),
        exchange_ms=_median_of_runs(runs, EXCHANGE),
        between_runs=_scatter_of_a_run(runs, STEP),
        scatter_known=runs.floor(STEP) is not None,
        valid=not any_doubtful(runs.records),
        cpu_bound=cpu_bound,
        busy_ms=_median_of_runs(runs, BUSY),
        launch_ms=tuple(ms for ms in launch_ms if 0 < ms <= MOST_MS),
        label=runs.cell.name.replace(workload.model, str(workload), 1),
        rate=rate,
        lent_by=floor.lent_by if floor else "",
        buckets=read_buckets(tables) or None,
        moments=read_moments(tables),
    )


def _median_of_runs(runs: Runs, metric: str) -> Draws | None:
    values = []
    for ms in runs.values(metric):
        if abs(ms) <= MOST_MS and (ms > 0 or metric == COST):
            values.append(ms)
    if not values:
        return None
    middle = statistics.median(values)
    error = _scatter_of_a_run(runs, metric) / math.sqrt(len(values))
    name = f"{metric} {runs.records[0].record_id}"
    if metric == COST:
        return normal(middle, error, name)
    return scaled_normal(middle, error, name)


def _scatter_of_a_run(runs: Runs, metric: str) -> float:
    """Return the standard deviation of one run: between runs, or inside them if that is more.

    Shares, but of the cost ms: it may be 0 or less.
    """
    floor = runs.floor(metric)
    between = DEFAULT_SCATTER[metric]
    if floor:
        between = floor.deviation
    squares = []
    for record in runs.records:
        ends = record.ends_within_run(metric)
        if ends is None or max(abs(ends[0]), abs(ends[1])) > MOST_MS:
            continue
        if metric == COST:
            squares.append((ends[1] - ends[0]) ** 2)
        elif ends[0] > 0:
            squares.append(math.log(ends[1] / ends[0]) ** 2)
    if not squares:
        return between
    return max(between, math.sqrt(statistics.fmean(squares)) / 2 / SIGMA_AT_95)


def gradient_curve(cell: MeasuredCell) -> TimeCurve | None:
    """Return what the exchange of whole gradients says of one bucket; None without a collective."""
    query = cell.query
    kind = strategies.collective(query)
    if cell.exchange_ms is None or query.ranks < 2 or kind is None:
        return None
    buckets = cell.buckets or query.assumed_buckets
    size, time_us = sum(buckets) / len(buckets), 1e3 * mean(cell.exchange_ms) / len(buckets)
    if size <= 0:
        return None
    sizes, times_us = (size,), (time_us,)
    source = cell.record_ids[0]
    return TimeCurve(kind, query.wire, query.ranks, query.hosts, sizes, times_us, source, True)


def _collective_curve(record: Record) -> TimeCurve | None:
    """Return the collective that a record timed, alone or in the ranks of a training cell."""

    def read_row(row: Any) -> tuple[float, float]:
        timed = row.get("out_of_place") or row["in_place"]
        return _within(row["bytes"], 1, math.inf), _within(timed["time_us"], 0.0, math.inf)

    cell = record.cell
    times: dict[float, float] = {}
    if cell.trains:
        kind = record.tables.get("bucket_exchange", {}).get("operation")
        times = read_bucket_times(record.tables)
        if times:
            query = query_of(cell, workload_of(request_of(cell), record.model))
            # What went there and what came back, as a share of what went there.
            both_ways = (1 + strategies.return_ratio(query)) / 2
            times = {size * both_ways: time_us for size, time_us in times.items()}
    else:
        options = cell.benchmark
        if options.get("cuda_graph") or options.get("coalesced", 1) != 1 or "memory" in options:
            return None
        kind = options.get("collective")
        nccl_runs = record.tables.get("nccl-tests", {}).get("runs")
        if nccl_runs:
            rows = _rows({"first": nccl_runs[0]}, "first", read_row)
            times = {size: time_us for size, time_us in rows if time_us > 0}
    if not isinstance(kind, str) or not times:
        return None
    if not COLLECTIVES.keys() >= set(kind.split(AND)):
        return None
    hosts = max(1, len(cell.hosts))
    requested = requested_wire(cell.nccl, record.effective.get("link_class"), hosts)
    wire = used_wire(record.effective.get("transport"), requested)
    sizes, times_us = zip(*sorted(times.items()), strict=True)
    return TimeCurve(kind, wire, cell.world_size, hosts, sizes, times_us, record.record_id)


def read_buckets(tables: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the bytes of each bucket on the wire, in order; empty where a record has none."""
    return tuple(_rows(tables, "buckets", lambda row: _within(row["bytes"], 1, MOST_BYTES)))


def read_moments(tables: Mapping[str, Any]) -> Moments | None:
    """Return the moments of the slowest rank without exchange; None where they are not known."""

    def read_row(row: Any) -> tuple[bool, Moments]:
        ready_ms = tuple(_within(ms, 0.0, MOST_MS) for ms in row["ready_ms"])
        backward_ms = _within(row["backward_ms"], 0.0, MOST_MS)
        step_ms = _within(row["update_ms"], max(backward_ms, 1e-9), MOST_MS)
        return row["exchange"], Moments(ready_ms, backward_ms, step_ms)

    moments = []
    for with_exchange, row in _rows(tables, "timeline", read_row):
        if row.ready_ms and not with_exchange:
            moments.append(row)
    return max(moments, key=lambda row: row.step_ms, default=None)


def read_bucket_times(tables: Mapping[str, Any]) -> dict[float, float]:
    """Return {bytes: µs} of the collectives that were timed alone in the ranks of a cell."""

    def read_row(row: Any) -> tuple[float, float]:
        return _within(row["bytes"], 1, MOST_BYTES), 1e3 * _within(row["ms"], 0.0, MOST_MS)

    rows = _rows(tables, "bucket_exchange", read_row)
    return {size: time_us for size, time_us in rows if time_us > 0}


def _rows(tables: Mapping[str, Any], name: str, read_row: Callable[[Any], Any]) -> list[Any]:
    """Return what each row of a calibration's table says; nothing where one is damaged."""
    try:
        return [read_row(row) for row in tables[name]["rows"]]
    except (KeyError, TypeError, ValueError):
        return []


def _within(value: Any, least: float, most: float) -> float:
    checked = finite(value)
    if checked is None or not least <= checked <= most:
        raise ValueError(f"{value!r:.40} is not a number from {least:g} to {most:g}")
    return checked
