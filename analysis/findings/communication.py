"""Exposed communication: what a strategy costs a step of several GPUs beyond what it costs on one.

METHOD.md, "Exposed communication". The cost on one GPU is the mean over the members that were
measured alone: `strategy/cost_ms` of their one-GPU cells, else the step alone with the strategy
minus that with strategy=none. The launching process imports this module: no numpy.

Last, the values of a record that need other records too, as terminal, MLflow and report show them.
"""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from analysis.findings.baselines import (
    AT_EQUAL_CLOCKS,
    BASELINES,
    EFFICIENCY,
    HOST_BASELINES,
    NODE_EFFICIENCY,
    WITHOUT,
    Baselines,
)
from analysis.study import names as labels
from analysis.study.conditions import IMAGES_PER_SECOND, irrelevant_to_baselines
from analysis.study.intervals import names_of, of_median, quantile
from analysis.study.names import gpu_list, several
from analysis.study.noise_floor import COST as COST
from analysis.study.noise_floor import OF_SEVERAL_RECORDS, Scatters
from analysis.study.runs import Key, Runs, RunsByMember
from analysis.study.study import Study
from benchmarks.record import Record, metrics
from conf.cell import Member

EXCHANGE = "comm/exchange_ms"
EXPOSED, HIDDEN = "comm/exposed_ms", "comm/hidden_share"
TRACE_EXPOSED, DISAGREEMENT = "trace/exposed_ms_per_step", "trace/exposed_disagreement_ms"
OWN_WORK = "own_work_alone"  # among a record's checks: whether one rank alone exchanges nothing
MOST_NOISE = 0.5  # of the hidden share, on each side: a wider interval says nothing of a share

# Why one of the two numbers is not claimed.
NOT_ALONE = "the strategy was not measured on a single GPU"
EXCHANGES_ALONE = "this strategy exchanges on one GPU too, so its own work was not measured alone"
NO_COST_ALONE = "the overhead of the strategy on one GPU was not measured"
TOO_FEW_ALONE = "the run-to-run variation on one GPU is not known"
# What measures it.
REMEDIES = {NOT_ALONE: "gpus=each", NO_COST_ALONE: "waterfall=true", TOO_FEW_ALONE: "repeats=5"}
MORE_ALONE = "the overhead is larger on one GPU ({alone}) than on {gpus} ({cost})"
NOT_TIMED = "the exchange alone was not timed"
MORE_EXPOSED = (
    "more is exposed ({exposed}) than the exchange alone takes ({exchange}): communication also "
    "slows compute"
)
TOO_NOISY = "the noise (±{noise}) is too large beside the exchange alone ({exchange})"


class Uncertain(NamedTuple):
    """A time with its uncertainty."""

    ms: float
    half_ms: float  # half of the 95 % interval, or the standard error; NaN: not known

    def minus(self, other: "Uncertain") -> "Uncertain":
        """Return the difference."""
        return Uncertain(self.ms - other.ms, math.hypot(self.half_ms, other.half_ms))


class CostAlone(NamedTuple):
    """What a strategy costs on one GPU."""

    cost: Uncertain | None = None
    record_ids: tuple[str, ...] = ()  # of the one-GPU cells
    why: str = ""  # it is not known


@dataclass(frozen=True)
class Communication:
    """What equal cells say of their exposed communication, medians over runs; None: not claimed."""

    label: str
    gpus: tuple[Member, ...]
    key: Key
    record_ids: tuple[str, ...]
    exposed_ms: float | None
    hidden_share: float | None
    why: str  # why a number is not claimed


@dataclass(frozen=True)
class Exposure:
    """What is exposed of a cell's communication, or why that is not known."""

    exposed_ms: float | None = None
    hidden_share: float | None = None
    why: str = ""  # a sentence without its full stop, where one of the two numbers is not claimed
    record_ids: tuple[str, ...] = ()  # of the one-GPU cells


class Exposures:
    """Finds the one-GPU costs of a study's strategies, and subtracts them."""

    def __init__(
        self, study: Study, baselines: Baselines | None = None, *, judged: bool = True
    ) -> None:
        """Group the one-GPU cells without a strategy by their condition.

        `judged=False` gives numbers also where the noise, which other records show, forbids to
        claim them: for `verify`.
        """
        self._study, self._judged = study, judged
        self._baselines = baselines or Baselines(study)
        self._costs: dict[tuple[int, ...], CostAlone] = {}
        without = []
        for runs in study.timed:
            if runs.cell.world_size == 1 and runs.strategy == WITHOUT:
                without.append(runs)
        irrelevant = (*irrelevant_to_baselines(strong=True), "global_batch_size", "strategy.")
        self._without = RunsByMember(
            without,
            lambda runs: study.condition(runs, irrelevant, runs.cell.batch_size),
            lambda runs: runs.gpus[0],
        )

    def of(self, record: Record) -> Exposure | None:
        """Return what may be claimed of a record; None without an A B B A on several GPUs."""
        single = self._study.single(record)
        cost = record.metrics.get(COST)
        if single.cell.world_size == 1 or cost is None or not math.isfinite(cost):
            return None
        members = self._baselines.of_members(single)
        key = tuple(map(id, members.values()))  # thousands of records may have equal baselines
        if key not in self._costs:
            self._costs[key] = self._cost_of(members)
        alone, ids, why = self._costs[key]
        if alone is None:
            return Exposure(why=why)
        exposed = _next_run(single, COST, record).minus(alone)
        if self._judged and exposed.ms < 0 and not exposed.ms + exposed.half_ms >= 0:
            gpus = single.cell.world_size
            return Exposure(why=MORE_ALONE.format(alone=_ms(alone.ms), gpus=gpus, cost=_ms(cost)))
        return Exposure(exposed.ms, *self._hidden_share(exposed, record, single), ids)

    def _hidden_share(
        self, exposed: Uncertain, record: Record, single: Runs
    ) -> tuple[float | None, str]:
        """Return the hidden share, within the noise cut to 0 to 1, or why it is not claimed."""
        exchange = record.metrics.get(EXCHANGE)
        if exchange is None or not exchange > 0:
            return None, NOT_TIMED
        part = exposed.ms / exchange
        half_ms = _next_run(single, EXCHANGE, record).half_ms
        half = math.hypot(exposed.half_ms, part * half_ms) / exchange
        share, why = 1 - part, ""
        if share < 0 and not share + half >= 0:
            why = MORE_EXPOSED.format(exposed=_ms(exposed.ms), exchange=_ms(exchange))
        elif half >= MOST_NOISE:
            why = TOO_NOISY.format(noise=_ms(exposed.half_ms), exchange=_ms(exchange))
        if self._judged and why:
            return None, why
        return min(1.0, max(0.0, share)), ""

    def _cost_of(self, members: Mapping[Member, Runs]) -> CostAlone:
        if not members:
            return CostAlone(why=NOT_ALONE)
        costs: list[Uncertain] = []
        ids: list[str] = []
        own_work: set[bool] = set()
        for runs in members.values():
            own_work.update(record.checks.get(OWN_WORK) is True for record in runs.records)
            if not runs.values(COST):
                continue
            cost_ms, floor = statistics.median(runs.values(COST)), runs.floor(COST)
            halves = []
            if floor is not None:
                error = floor.deviation * math.sqrt(of_median(len(runs.values(COST))))
                halves.append(quantile(floor.freedom) * error)
            for record in runs.records:
                if floor is None and COST in record.metrics:
                    halves.append(_next_run(runs, COST, record).half_ms)
            costs.append(Uncertain(cost_ms, max(halves, default=math.nan)))
            ids += runs.record_ids
        if costs:
            return CostAlone(_mean(costs), tuple(ids))
        if False in own_work:
            return CostAlone(why=EXCHANGES_ALONE)
        are_known = True
        for gpu, runs in members.items():
            without = self._without.like(runs).get(gpu)
            if without is not None:
                cost = _step(runs).minus(_step(without))
                are_known = are_known and not math.isnan(cost.half_ms)
                costs.append(cost)
                ids += [*runs.record_ids, *without.record_ids]
        if not costs:
            return CostAlone(why=NO_COST_ALONE)
        if self._judged and not are_known:
            return CostAlone(why=TOO_FEW_ALONE)
        return CostAlone(_mean(costs), tuple(ids))


def disagreement(values: Mapping[str, float]) -> dict[str, float]:
    """Return {DISAGREEMENT: exposed by the trace − comm/exposed_ms}; empty if one is missing."""
    traced, measured = values.get(TRACE_EXPOSED), values.get(EXPOSED)
    if traced is None or measured is None:
        return {}
    return {DISAGREEMENT: traced - measured}


def _mean(values: Sequence[Uncertain]) -> Uncertain:
    numbers, halves = zip(*values, strict=True)
    return Uncertain(math.fsum(numbers) / len(numbers), math.hypot(*halves) / len(halves))


def _next_run(runs: Runs, metric: str, record: Record) -> Uncertain:
    """Return a metric of a record with the interval of the next run, else that inside the run."""
    value, floor = record.metrics[metric], runs.floor(metric)
    if floor is None:
        ends = record.ends_within_run(metric)
        return Uncertain(value, (ends[1] - ends[0]) / 2 if ends else math.nan)
    half = quantile(floor.freedom) * floor.deviation
    return Uncertain(value, half if metrics.entry_of(metric).signed else half * value)


def _step(runs: Runs) -> Uncertain:
    step_ms = runs.cell.batch_size * 1e3 / math.exp(runs.median_log_rate)
    floor = runs.floor(IMAGES_PER_SECOND)
    if floor is None:
        return Uncertain(step_ms, math.nan)
    count = len(runs.values(IMAGES_PER_SECOND))
    half = quantile(floor.freedom) * floor.deviation * math.sqrt(of_median(count))
    return Uncertain(step_ms, step_ms * half)


def _ms(value: float) -> str:
    """Return milliseconds with three significant digits: `0.58 ms`, `2,510 ms`."""
    if abs(value) >= 999.5:  # else 1e+03
        return f"{value:,.0f} ms"
    return f"{value:.3g} ms"


def communication(study: Study) -> tuple[Communication, ...]:
    """Return what is exposed of every set of equal cells on several GPUs that has an A B B A."""
    exposures = Exposures(study)
    cells = []
    for runs in study.timed:
        claims = list(filter(None, map(exposures.of, runs.records)))
        if not claims:
            continue
        why = ""
        for claim in claims:
            why = why or claim.why
        cell = Communication(
            label=labels.label(study, runs),
            gpus=runs.gpus,
            key=runs.key,
            record_ids=runs.record_ids,
            exposed_ms=_median_of_known([claim.exposed_ms for claim in claims]),
            hidden_share=_median_of_known([claim.hidden_share for claim in claims]),
            why=why,
        )
        cells.append(cell)
    return tuple(cells)


def _median_of_known(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def not_claimed(communications: Iterable[Communication]) -> dict[str, str]:
    """Return {why one of the two numbers is not claimed: the option that measures it}."""
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    for cell in communications:
        if cell.hidden_share is None:
            quantity = "Hidden share of the exchange"
            if cell.exposed_ms is None:
                quantity = "Exposed communication"
            cells[quantity, cell.why].append(f"{cell.label} on {gpu_list(cell.gpus)}")
    sentences = {}
    for (quantity, why), labels_of_cells in cells.items():
        sentences[f"{quantity} of {several(labels_of_cells)}: {why}"] = REMEDIES.get(why, "")
    return sentences


COST_ALONE = "cost_alone"  # among a record's checks: ids of one-GPU records behind its exposed part


class SeveralRecords:
    """Computes the values of one record from a study."""

    def __init__(self, study: Study, *, judged: bool = True) -> None:
        """Find the one-GPU cells of the study; `judged` as Exposures has it."""
        self._study = study
        self._baselines = Baselines(study, judged=judged)
        self._exposures = Exposures(study, self._baselines, judged=judged)

    def values(self, record: Record) -> dict[str, float]:
        """Return {metric: value} of OF_SEVERAL_RECORDS; what is not known is absent."""
        share, exposure = self._baselines.efficiency(record), self._exposures.of(record)
        values: dict[str, float | None] = {
            EFFICIENCY: share,
            AT_EQUAL_CLOCKS: self._baselines.at_equal_clocks(record, share),
            NODE_EFFICIENCY: self._baselines.node_efficiency(record),
        }
        if exposure is not None:
            values |= {EXPOSED: exposure.exposed_ms, HIDDEN: exposure.hidden_share}
        present = {}
        for name, value in values.items():
            if value is not None:
                present[name] = value
        return present | disagreement({**record.metrics, **present})

    def shown(self, record: Record) -> dict[str, float]:
        """Return the same with the intervals of the next run, of the numbers that say most."""
        runs, values = self._study.single(record), self.values(record)
        if not record.usable:
            return values
        names = [IMAGES_PER_SECOND, runs.rate.metric, COST]
        for name in record.metrics:
            entry = metrics.known(name)
            if entry is None or entry.first:
                names.append(name)
        for name in dict.fromkeys(names):
            estimate, floor = runs.next_run(name), runs.floor(name)
            if estimate is None or floor is None or estimate.low is None or estimate.high is None:
                continue
            low, high, runs_of_floor = names_of(name)
            values |= {low: estimate.low, high: estimate.high}
            if not floor.lenders:  # a lent one rests on no run of an equal cell
                values[runs_of_floor] = float(floor.runs)
        return values

    def facts(self, record: Record) -> dict[str, object]:
        """Return what the values rest on, as a record's checks have it: ids of records."""
        facts: dict[str, object] = {}
        efficiencies = self._baselines.efficiency(record), self._baselines.node_efficiency(record)
        if efficiencies != (None, None):
            facts |= self._baselines.facts(record)
        exposure = self._exposures.of(record)
        if exposure is not None and exposure.exposed_ms is not None:
            facts[COST_ALONE] = sorted(exposure.record_ids)
        return facts


def values_of(
    records: Iterable[Record], scatters: Scatters | None = None
) -> dict[str, dict[str, float]]:
    """Return {record_id: `shown`} for the records of a study; `scatters` as Study.of has it."""
    study = Study.of(records, scatters=scatters)
    several, values = SeveralRecords(study), {}
    for record in (*study.records, *study.replaced):
        shown = several.shown(record)
        if shown:
            values[record.record_id] = shown
    return values


def rests_on(record: Record) -> set[str]:
    """Return the ids of the other records that a record's values rest on."""
    lists = [record.checks.get(COST_ALONE, ())]
    for name in (BASELINES, HOST_BASELINES):
        lists += record.checks.get(name, {}).values()
    return set().union(*lists)


def values_from_baselines(record: Record, neighbours: Iterable[Record]) -> dict[str, float]:
    """Return the values that the records which a record names give it, whatever the noise was."""
    own = {name: value for name, value in record.metrics.items() if name not in OF_SEVERAL_RECORDS}
    bare = dataclasses.replace(record, metrics=own)
    return SeveralRecords(Study.of([*neighbours, bare]), judged=False).values(bare)


def with_values(record: Record, earlier: Sequence[Record]) -> Record:
    """Return the record with the values that the records known by now give it, and their ids."""
    several = SeveralRecords(Study.of([*earlier, record]))
    return dataclasses.replace(
        record,
        metrics=record.metrics | several.values(record),
        checks=record.checks | several.facts(record),
    )
