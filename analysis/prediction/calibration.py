"""What a study gives a forecast to rest on: its cells with their scatter, its links, and what its records do not hold."""

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from analysis.findings.predicted.stated import doubted
from analysis.prediction import strategies, tables
from analysis.prediction.cells import MIB, MeasuredCell, question_of, workload_of
from analysis.prediction.draws import best
from analysis.prediction.links.host import HostLink, Known
from analysis.prediction.links.model import DIRECT, HOST_MEMORY, KnownLinks, TimeCurve
from analysis.prediction.links.nccl_constants import constants, nvlink
from analysis.prediction.links.ring import TOGETHER, NvLinks
from analysis.prediction.links.wires import asked_wire, used_wire
from analysis.prediction.scatter import COST, EXCHANGE, STEP, RunScatter, run_workload
from analysis.study.provenance import gpus_of, mapping
from analysis.study.study import Runs, Study, request_of
from analysis.topology.model import nvlink_count
from benchmarks.collectives.busbw import COLLECTIVES
from benchmarks.record import Record, finite

P95 = "step/ms_p95"
LAUNCH, CLOCK, CAPPED = "step/launch_ms", "gpu/sm_mhz", "gpu/power_capped_share"
_SIGMA_AT_P95 = 1.645


@dataclass(frozen=True)
class Calibrated:
    """The measured cells and links of a study."""

    cells: tuple[MeasuredCell, ...]
    known: Known
    notes: tuple[str, ...] = ()
    link_class: str | None = None  # the farthest between its GPUs
    memo: dict[Any, Any] = field(
        default_factory=dict, compare=False
    )  # what several forecasts look up alike

    def without(
        self, left_out: Callable[[MeasuredCell], bool], most_ranks: int | None = None
    ) -> "Calibrated":
        """Return the same without some cells and the collectives that were timed in their ranks.

        `most_ranks`: nor anything of more ranks, links included.
        """
        kept = tuple(one for one in self.cells if not left_out(one))
        gone = {name for one in self.cells if left_out(one) for name in one.record_ids}
        links, host = self.known.links, self.known.host
        curves = tuple(one for one in links.curves if one.source not in gone)
        if most_ranks is not None:
            kept = tuple(one for one in kept if one.ranks <= most_ranks)
            curves = tuple(one for one in curves if one.ranks <= most_ranks)
            host = HostLink(
                {gpus: rate for gpus, rate in host.sums_gb_per_s.items() if gpus <= most_ranks}
            )
        return replace(self, cells=kept, known=Known(replace(links, curves=curves), host), memo={})

    @property
    def unit(self) -> str:
        """What most cells ran on: a GPU, or a CPU worker."""
        return statistics.mode(one.question.unit for one in self.cells)

    @property
    def several(self) -> tuple[MeasuredCell, ...]:
        """The cells of several ranks whose steps were timed."""
        return tuple(one for one in self.cells if one.ranks > 1 and one.timed)

    @functools.cached_property
    def with_buckets(self) -> tuple[tuple[MeasuredCell, tuple[float, ...]], ...]:
        """The cells whose records have their bucket plan, with the bytes of each bucket."""
        return tuple(
            (one, found)
            for one in self.cells
            if (found := tables.buckets(one.tables) or one.logged_buckets)
        )

    @functools.cached_property
    def with_moments(self) -> tuple[tuple[MeasuredCell, tables.StepMoments], ...]:
        """The cells whose records have the moments of a step."""
        return tuple((one, found) for one in self.cells if (found := tables.moments(one.tables)))

    @property
    def record_ids(self) -> tuple[str, ...]:
        """The records that it rests on."""
        return tuple(one for cell in self.cells for one in cell.record_ids)


def calibrate(study: Study) -> Calibrated:
    """Return the calibration of a study. Raises ValueError where it has no timed training cell."""
    runs = [one for one in study.runs if one.trains]
    scatter = RunScatter(runs)
    cells = tuple(_cell(one, scatter) for one in runs if one.values(STEP) or one.values(EXCHANGE))
    if not any(cell.timed for cell in cells):
        where = study.folder or study.name
        raise ValueError(
            f"{where}: no cell has a step time; accepted is the folder of a study with training cells"
        )
    device = statistics.mode(one.cell.device for one in runs)
    records = [
        record for one in study.runs for record in one.records if record.cell.device == device
    ]
    nccl = next((version for one in records if (version := _nccl(one))), None)
    curves = (*_curves(records), *(made for one in cells if (made := exchange_curve(one))))
    known = Known(
        KnownLinks(curves, _copies(records), nccl, _nvlinks(records)), _host_link(records)
    )
    calibration = Calibrated(cells, known, (), _link_class(records))
    return replace(
        calibration, notes=_notes(calibration, cells, nccl if device == "cuda" else "2.28")
    )


def _cell(runs: Runs, scatter: RunScatter) -> MeasuredCell:
    """Return what forecasts take from the runs of one cell; of a table in several records the first one's."""
    cell, record = runs.cell, runs.records[0]
    merged: dict[str, Any] = {}
    for one in reversed(runs.records):
        merged |= one.tables
    question = question_of(
        cell, run_workload(runs), _class_of(record), runs.provenance.get("machine", "")
    )
    step, p95 = runs.values(STEP), runs.values(P95)
    launch = runs.values(LAUNCH)
    sent = question.sent_bytes
    full = question.cap_mib * MIB * (0.5 if question.halves else 1.0)
    logged = (
        tables.logged_buckets(one.effective.get("choices"), sent, full) for one in runs.records
    )
    return MeasuredCell(
        question=replace(question, wire=used_wire(record.effective.get("transport"), question.wire))
        if question.ranks > 1 and question.hosts == 1 and strategies.exchange_of(question).by_nccl
        else question,
        record_ids=tuple(one.record_id for one in runs.records),
        step_ms=scatter.drawn(runs, STEP),
        cost_ms=scatter.drawn(runs, COST),
        exchange_ms=scatter.drawn(runs, EXCHANGE),
        scatter_ms=max(0.0, statistics.median(p95) - statistics.median(step)) / _SIGMA_AT_P95
        if step and p95
        else 0.0,
        launch_ms=statistics.median(launch) if launch else 0.0,
        between_runs=scatter.share(runs, STEP),
        valid=not doubted(runs.records),
        cpu_bound=all("cpu_bound" in one.validity.codes for one in runs.records),
        tables=merged,
        logged_buckets=next(filter(None, logged), ()),
        label=cell.name,
        sm_mhz=statistics.fmean(runs.values(CLOCK) or [0.0]),
        capped_share=statistics.fmean(runs.values(CAPPED) or [0.0]),
        images_per_second=0.0 if runs.median_log_rate is None else math.exp(runs.median_log_rate),
    )


def exchange_curve(cell: MeasuredCell) -> TimeCurve | None:
    """Return what the exchange of a whole gradient says of one bucket; None where it is no collective of NCCL's."""
    question = cell.question
    kind = strategies.collective(question)
    if cell.exchange_ms is None or question.ranks < 2 or kind is None:
        return None
    buckets = tables.buckets(cell.tables) or question.assumed_buckets
    size, us = sum(buckets) / len(buckets), 1e3 * best(cell.exchange_ms) / len(buckets)
    if size <= 0:
        return None
    wire, source = question.wire, cell.record_ids[0]
    return TimeCurve(
        kind, wire, question.ranks, question.hosts, (size,), (us,), source, of_gradients=True
    )


def _curves(records: Iterable[Record]) -> list[TimeCurve]:
    """Return the collectives that were measured, alone or in the ranks of a training cell."""
    found = []
    for record in records:
        cell, hosts = record.cell, max(1, len(record.cell.hosts))
        wire = used_wire(
            record.effective.get("transport"), asked_wire(cell.nccl, _class_of(record), hosts)
        )
        if cell.trains:
            if (made := tables.exchange_curve(record.tables)) and _are_collectives(made[0]):
                sizes = tuple(size * _both_ways(record) for size in made[1])
                found.append(
                    TimeCurve(
                        made[0], wire, cell.world_size, hosts, sizes, made[2], record.record_id
                    )
                )
            continue
        options = cell.benchmark
        if (
            options["name"] != "collectives"
            or options.get("cuda_graph")
            or options.get("coalesced", 1) != 1
        ):
            continue
        kind, rows = options.get("collective"), _rows_of(record)
        if kind in COLLECTIVES and rows:
            sizes, times = zip(*sorted(rows.items()), strict=True)
            found.append(
                TimeCurve(kind, wire, cell.world_size, hosts, sizes, times, record.record_id)
            )
    return found


def _both_ways(record: Record) -> float:
    """Return the mean of what went there and came back of a bucket in a record, as a share of what went there."""
    question = question_of(record.cell, workload_of(request_of(record.cell), record.model))
    with contextlib.suppress(
        ValueError
    ):  # the user's own exchange; the forecast of such a cell says it
        question = strategies.as_in_a_step(question)
    return (1 + question.back) / 2


def _are_collectives(operation: str) -> bool:
    """Tell whether an operation of one bucket is made of collectives that a curve may be of."""
    return all(one in COLLECTIVES for one in operation.split(TOGETHER))


def _rows_of(record: Record) -> dict[float, float]:
    """Return {bytes: µs} of a collectives record, out of place where there is."""
    table = mapping(record.tables.get("nccl-tests"))
    runs = table.get("runs")
    rows = mapping(runs[0]).get("rows") if isinstance(runs, list) and runs else ()
    found: dict[float, float] = {}
    for row in rows if isinstance(rows, list) else ():
        timed = mapping(mapping(row).get("out_of_place")) or mapping(mapping(row).get("in_place"))
        size, us = finite(mapping(row).get("bytes")), finite(timed.get("time_us"))
        if size and us and size > 0 and us > 0:
            found[size] = us
    return found


def _copies(records: Iterable[Record]) -> dict[str, float]:
    """Return GB/s of peer copies one way, with peer access and through host memory."""
    found: dict[str, list[float]] = {}
    for record in records:
        for transport, word in ((DIRECT, "enabled"), (HOST_MEMORY, "disabled")):
            value = record.metrics.get(f"p2p/unidirectional_{word}_gb_per_s", 0.0)
            if 0 < value < math.inf:
                found.setdefault(transport, []).append(value)
    return {transport: statistics.median(values) for transport, values in found.items()}


def _host_link(records: Iterable[Record]) -> HostLink:
    """Return the GB/s in sum that one GPU and all at once copy both ways: medians over the records."""
    found: dict[int, list[float]] = {}
    for record in records:
        for gpus, word in ((1, "one"), (record.cell.world_size, "all")):
            value = record.metrics.get(f"host_link/{word}_both_gb_per_s", 0.0)
            if 0 < value < math.inf:
                found.setdefault(gpus, []).append(value)
    return HostLink({gpus: statistics.median(values) for gpus, values in found.items()})


def _nvlinks(records: Iterable[Record]) -> NvLinks | None:
    """Return what joins two GPUs, if every two of them have equally many NVLinks and NCCL's rate of one is known."""
    words: set[str] = set()
    names: set[str] = set()
    for record in records:
        words |= {str(word) for word in mapping(record.environment.get("links")).values()}
        names |= {str(one.get("name")) for one in gpus_of(record.environment)}
    counts, kinds = {nvlink_count(word) for word in words}, {nvlink(name) for name in names}
    count, kind = next(iter(counts), None), next(iter(kinds), None)
    alike = len(counts) == len(kinds) == 1
    return NvLinks(count * kind[0], kind[1]) if alike and count and kind else None


def _nccl(record: Record) -> str | None:
    """Return NCCL's version in the environment of a record; None without one."""
    version = mapping(record.environment.get("versions")).get("nccl")
    return version if isinstance(version, str) else None


def _class_of(record: Record) -> str | None:
    """Return the farthest link class between the GPUs of a record; None where it does not say."""
    found = record.effective.get("link_class")
    return found if isinstance(found, str) else None


def _link_class(records: Iterable[Record]) -> str | None:
    """Return the most frequent link class of the records inside hosts; None without any."""
    found = [one for record in records if (one := _class_of(record)) and one != "NET"]
    return statistics.mode(found) if found else None


def _notes(
    calibration: Calibrated, cells: Sequence[MeasuredCell], nccl: str | None
) -> tuple[str, ...]:
    """Return a sentence for each thing that the records do not hold."""
    timed = [one for one in cells if one.timed]
    if not calibration.several:  # of one GPU alone, whose forecasts need none of this
        return ()
    notes = [constants(nccl)[1]]
    if not calibration.with_buckets:
        notes.append("no record has its bucket plan: buckets are taken as full, by bucket_cap_mb")
    if not any(tables.moments(one.tables) for one in timed):
        notes.append(
            "no record has the moments of a step: buckets are taken as ready evenly over the last two thirds"
        )
    if not any(tables.slowed(one.tables) for one in timed):
        notes.append("no record has an interference probe: γ comes from the cost of measured cells")
    if not any(tables.residuals_ms(one.tables) is not None for one in timed):
        notes.append(
            "no record has residuals of its steps: waiting is taken as normal, from their 95th percentile"
        )
    if all(one.of_gradients for one in calibration.known.links.curves):
        notes.append(
            "no collective was measured by itself: links come from the exchange of whole gradients"
        )
    return tuple(one for one in notes if one)
