"""Exposed communication: what a strategy costs a step of several GPUs beyond what it costs a step of one.

    comm/exposed_ms = strategy/cost_ms − what the strategy costs on one GPU        comm/hidden_share = 1 − exposed ÷ exchange

What a strategy costs on one GPU is the mean over the members that were measured alone: `strategy/cost_ms` of their one-GPU
cells (A B B A there), else the step alone with the strategy minus the step alone with strategy=none. Neither is used for a
strategy that moves gradients on one GPU too, because communication is then part of the cost there. Where the cost on one GPU
is not known, nothing is claimed. METHOD.md, "Exposed communication". The launching process imports this module: no numpy.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.findings.baselines import OF_SERVERS, Baselines, is_irrelevant_alone
from analysis.findings.control_cells import WITHOUT
from analysis.study import names as labels
from analysis.study.estimates import Communication, Member
from analysis.study.intervals import of_median, quantile
from analysis.study.names import gpu_list, several
from analysis.study.rates import IMAGES_PER_SECOND
from analysis.study.study import Runs, Study, merged
from benchmarks.record import Record, metrics

COST, EXPOSED, HIDDEN, EXCHANGE = (
    "strategy/cost_ms",
    "comm/exposed_ms",
    "comm/hidden_share",
    "comm/exchange_ms",
)
TRACE_EXPOSED, DISAGREEMENT = "trace/exposed_ms_per_step", "trace/exposed_disagreement_ms"
OWN_WORK = "own_work_alone"  # among a record's checks: whether one rank alone exchanges nothing
MOST_NOISE = 0.5  # of the hidden share, on each side: a wider interval says nothing of a share
ALONE, DIFFERENCE = "A B B A on one GPU", "one GPU with the strategy and without"


@dataclass(frozen=True)
class Uncertain:
    """A number of ms with half of its 95 % interval; NaN where that is not known."""

    ms: float
    half_ms: float


# What a strategy costs on one GPU, ALONE or DIFFERENCE, and the ids of the records; or why it is not known.
CostAlone = tuple[Uncertain, str, tuple[str, ...]] | str


@dataclass(frozen=True)
class Exposure:
    """What is exposed of a cell's communication, or why that is not known."""

    exposed_ms: float | None = None
    half_ms: float | None = None  # half the 95 % interval; None: not known
    hidden_share: float | None = None
    half_share: float | None = None
    alone_ms: float | None = None  # what the strategy costs on one GPU
    source: str = ""  # ALONE or DIFFERENCE
    why: str = ""  # a sentence without its full stop, where one of the two numbers is not claimed
    record_ids: tuple[str, ...] = ()  # of the one-GPU cells


class Exposures:
    """Finds the one-GPU costs of a study's strategies, and subtracts them."""

    def __init__(
        self, study: Study, baselines: Baselines | None = None, *, judged: bool = True
    ) -> None:
        """Sort the cells of one GPU without a strategy by their condition.

        `judged=False` gives the numbers also where the noise, which other records show, forbids to claim them: for `verify`.
        """
        self._study, self._alone, self._judged = study, baselines or Baselines(study), judged
        together: dict[Any, dict[Member, list[Runs]]] = defaultdict(lambda: defaultdict(list))
        for runs in study.timed:
            if runs.world_size == 1 and runs.strategy == WITHOUT:
                together[_without_strategy(runs)][runs.gpus[0]].append(runs)
        self._costs: dict[tuple[int, ...], CostAlone] = {}
        self._without = {
            key: {gpu: merged(one) for gpu, one in members.items()}
            for key, members in together.items()
        }

    def of(self, record: Record) -> Exposure | None:
        """Return what may be claimed of a record's exposed communication; None where it has no A B B A on several GPUs."""
        one = self._study.single(record)
        cost = record.metrics.get(COST)
        if one.world_size == 1 or cost is None or not math.isfinite(cost):
            return None
        found = self._cost_alone(one)
        if isinstance(found, str):
            return Exposure(why=found)
        alone, source, ids = found
        half_ms = math.hypot(_next(one, COST, record).half_ms, alone.half_ms)
        exposed = Uncertain(cost - alone.ms, half_ms)
        if self._judged and exposed.ms < 0 and not exposed.ms + exposed.half_ms >= 0:
            why = f"the strategy costs more on one GPU ({_ms(alone.ms)}) than on {one.world_size} ({_ms(cost)})"
            return Exposure(alone_ms=alone.ms, source=source, why=why, record_ids=ids)
        share, why = self._hidden(exposed, record, one)
        known = None if math.isnan(half_ms) else half_ms
        return Exposure(exposed.ms, known, *share, alone.ms, source, why, ids)

    def of_runs(self, runs: Runs) -> Uncertain | None:
        """Return what is exposed of runs of one cell, with half the interval of the medians; None where it is not known."""
        found = self._cost_alone(runs) if runs.values(COST) else ""
        return None if isinstance(found, str) else _difference(_median(runs, COST), found[0])

    def _hidden(
        self, exposed: Uncertain, record: Record, one: Runs
    ) -> tuple[tuple[float | None, float | None], str]:
        """Return (the hidden share, half its interval), and why it is not claimed; within the noise it is cut to 0 to 1."""
        exchange = record.metrics.get(EXCHANGE)
        if exchange is None or not exchange > 0:
            return (None, None), "the exchange alone was not timed"
        part = exposed.ms / exchange
        half = math.hypot(exposed.half_ms, part * _next(one, EXCHANGE, record).half_ms) / exchange
        share = 1 - part
        why = ""
        if share < 0 and not share + half >= 0:
            why = f"more is exposed ({_ms(exposed.ms)}) than the exchange alone takes ({_ms(exchange)}): communication "
            why += "also slows compute"
        elif half >= MOST_NOISE:
            why = f"the noise (±{_ms(exposed.half_ms)}) is too large beside the exchange alone ({_ms(exchange)})"
        if self._judged and why:
            return (None, None), why
        return (min(1.0, max(0.0, share)), None if math.isnan(half) else half), ""

    def _cost_alone(self, one: Runs) -> CostAlone:
        """Return what the strategy costs on one GPU, how that was measured and by which records; or why it is not known."""
        members = self._alone.of(one)
        same = tuple(
            map(id, members.values())
        )  # a study may have thousands of records with equal baselines
        if same not in self._costs:
            self._costs[same] = self._cost_of(members)
        return self._costs[same]

    def _cost_of(self, members: Mapping[Member, Runs]) -> CostAlone:
        if not members:
            return "the strategy was not measured on one of its GPUs (gpus=each adds that)"
        measured = {gpu: runs for gpu, runs in members.items() if runs.values(COST)}
        if measured:
            costs = [_median(runs, COST) for runs in measured.values()]
            ids = [record.record_id for runs in measured.values() for record in runs.records]
            return _mean(costs), ALONE, tuple(ids)
        if not all(own_work_alone(record) for runs in members.values() for record in runs.records):
            return (
                "this strategy exchanges on one device too, so its own work was not measured alone"
            )
        bare = {
            gpu: self._without.get(_without_strategy(runs), {}) for gpu, runs in members.items()
        }
        pairs = [(members[gpu], found[gpu]) for gpu, found in bare.items() if gpu in found]
        if not pairs:
            return "what the strategy costs on one GPU was not measured (waterfall=true adds that)"
        costs = [
            _difference(_step(with_strategy), _step(without)) for with_strategy, without in pairs
        ]
        if self._judged and any(math.isnan(one.half_ms) for one in costs):
            return "too few runs on one GPU show how far they differ (repeats=5 adds them)"
        ids = [record.record_id for pair in pairs for runs in pair for record in runs.records]
        return _mean(costs), DIFFERENCE, tuple(ids)


def own_work_alone(record: Record) -> bool:
    """Tell whether the strategy of a one-GPU record moves nothing there, so that its cost is its own work."""
    return record.checks.get(OWN_WORK) is True


def disagreement(values: Mapping[str, float]) -> dict[str, float]:
    """Return exposed communication by the trace minus comm/exposed_ms, ms per step; empty if one is missing."""
    traced, measured = values.get(TRACE_EXPOSED), values.get(EXPOSED)
    return {} if traced is None or measured is None else {DISAGREEMENT: traced - measured}


def _next(runs: Runs, metric: str, record: Record) -> Uncertain:
    """Return a metric of one record with half the interval of the next run; without a floor that inside the run."""
    value, floor = record.metrics[metric], runs.floor(metric)
    ends = metrics.interval(metric, record.within_run)
    inside = (ends[1] - ends[0]) / 2 if ends else math.nan
    if floor is None:
        return Uncertain(value, inside)
    half = (
        quantile(floor.freedom) * floor.deviation * (1 if metrics.metric(metric).signed else value)
    )
    return Uncertain(value, half)


def _median(runs: Runs, metric: str) -> Uncertain:
    """Return the median of a difference over runs, with half the interval of the median."""
    values, floor = runs.values(metric), runs.floor(metric)
    value = statistics.median(values)
    if floor is not None:
        return Uncertain(
            value, quantile(floor.freedom) * floor.deviation * math.sqrt(of_median(len(values)))
        )
    inside = [
        _next(runs, metric, record).half_ms for record in runs.records if metric in record.metrics
    ]
    return Uncertain(value, max(inside, default=math.nan))


def _step(runs: Runs) -> Uncertain:
    """Return the step time of a one-GPU cell that belongs to its median rate."""
    assert runs.median_log_rate is not None
    step_ms, floor = (
        runs.batch_size * 1e3 / math.exp(runs.median_log_rate),
        runs.floor(IMAGES_PER_SECOND),
    )
    if floor is None:
        return Uncertain(step_ms, math.nan)
    count = len(runs.values(IMAGES_PER_SECOND))
    return Uncertain(
        step_ms, step_ms * quantile(floor.freedom) * floor.deviation * math.sqrt(of_median(count))
    )


def _difference(longer: Uncertain, shorter: Uncertain) -> Uncertain:
    return Uncertain(longer.ms - shorter.ms, math.hypot(longer.half_ms, shorter.half_ms))


def _mean(values: Sequence[Uncertain]) -> Uncertain:
    """Return the mean of independent numbers."""
    halves = math.hypot(*(one.half_ms for one in values))
    return Uncertain(math.fsum(one.ms for one in values) / len(values), halves / len(values))


def _without_strategy(runs: Runs) -> Any:
    """Return a key that is equal for a one-GPU cell and those on one GPU without a strategy."""
    free = (*OF_SERVERS, "batch_size", "global_batch_size")
    left = [
        item
        for item in (*runs.request.items(), *runs.provenance.items())
        if not is_irrelevant_alone(item[0], free)
    ]
    return frozenset(item for item in left if not item[0].startswith("strategy.")), runs.batch_size


def _ms(value: float) -> str:
    """Return milliseconds with three significant digits, and with all digits before the point: `2,510 ms`."""
    return f"{value:,.0f} ms" if abs(value) >= 999.5 else f"{value:.3g} ms"  # else 1e+03


# Exposed communication of every set of equal cells of a study, and a sentence on those of which it is not claimed.


def communication(study: Study) -> tuple[Communication, ...]:
    """Return what is exposed of the communication of every set of equal cells on several GPUs that has an A B B A."""
    exposures = Exposures(study)
    found = []
    for runs in study.timed:
        known = [one for record in runs.records if (one := exposures.of(record)) is not None]
        if known:
            found.append(_of(study, runs, known))
    return tuple(found)


def _of(study: Study, runs: Runs, known: Sequence[Exposure]) -> Communication:
    return Communication(
        label=labels.label(study, runs),
        gpus=runs.gpus,
        key=runs.key,
        record_ids=tuple(record.record_id for record in runs.records),
        cost_ms=statistics.median(runs.values(COST)),
        cost_alone_ms=known[0].alone_ms,
        alone_from=known[0].source,
        exposed_ms=_cells_median(one.exposed_ms for one in known),
        hidden_share=_cells_median(one.hidden_share for one in known),
        hidden_half=_cells_median(one.half_share for one in known),
        why=next((one.why for one in known if one.why), ""),
    )


def _cells_median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def not_claimed(found: Iterable[Communication]) -> tuple[str, ...]:
    """Return a sentence for each reason why exposed communication or the hidden share is not claimed."""
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in found:
        if one.hidden_share is None:
            what = (
                "the exposed communication"
                if one.exposed_ms is None
                else "the hidden share of the exchange"
            )
            cells[what, one.why].append(f"{one.label} on {gpu_list(one.gpus)}")
    return tuple(f"{what} of {several(named)}: {why}" for (what, why), named in cells.items())
