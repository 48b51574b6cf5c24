"""Why a subset trains slower than its members alone: METHOD.md, "Waterfall".

Every part is a difference of step times in ms, from control cells; subtracted one
after the other they become images per second. The exposed part is split by hosts, or by what a
timeline of steps shows.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from analysis.findings.baselines import WITHOUT, ControlRuns
from analysis.findings.communication import COST, Uncertain
from analysis.study import names as labels
from analysis.study.conditions import IMAGES_PER_SECOND
from analysis.study.draws import (
    Draws,
    Sample,
    Step,
    draws_of_median,
    exponential,
    freedom,
    mean_step,
    next_run,
    scaled,
    slowest,
)
from analysis.study.intervals import WIDEST, Estimate
from analysis.study.names import gpu_list, several
from analysis.study.noise_floor import CLOCK
from analysis.study.runs import Key, Runs
from analysis.study.study import Study
from benchmarks.record import Record, finite
from benchmarks.timing.statistics import ERROR_OF_MEDIAN
from conf.cell import Member

# Names of parts.
SPREAD, OVERHEAD = "spread between GPUs", "strategy overhead on one GPU"
CLOCKS = "other clocks than alone"
CONTENTION, WAITING = "contention", "waiting for a peer"
COMMUNICATION = "exposed communication"
INSIDE, BETWEEN = "communication inside hosts", "communication between hosts"  # together all of it
TAIL = "exchange after the last gradient"
SLOWED = "backward slowed by the exchange"
REST = "exposed, not explained"
# What qualifies a part, or why it is not known.
AT_MOST = "at most this, as if the whole step followed the clock; it may be nothing"
UNSEEN = "no step was traced (benchmark.calibrate=timeline traces some)"
UNSEEN_ALONE = "no GPU's steps were traced alone"
UNSPLIT = (
    "no host was measured alone with all its GPUs: what is lost inside hosts and between them is "
    "not told apart"
)
WAIT = "trace/wait_ms_per_step"
QUARTILES = 1.349  # between those of normal values, in standard deviations


class LossPart(NamedTuple):
    """A part of a waterfall."""

    name: str
    step: Step | None  # None: not known
    why: str = ""  # it is not known, or what qualifies it


@dataclass(frozen=True)
class WaterfallPart:
    """One step down of a waterfall."""

    name: str
    lost: Estimate | None  # images per second; None where no cell measured it
    why: str = ""  # where it is None, or what qualifies it
    above_ideal: bool = False  # subtracted before the ideal: the spread, which is not in `ideal`
    ms: Estimate | None = None  # of a step


@dataclass(frozen=True)
class Waterfall:
    """From the sum of the members alone down to the measured rate.

    It closes: ideal − every known part that is not above the ideal − residual = measured.
    """

    label: str
    gpus: tuple[Member, ...]
    key: Key
    ideal: Estimate  # images per second: world_size times the slowest member alone
    measured: Estimate
    parts: tuple[WaterfallPart, ...]  # in the order in which they are subtracted
    residual: float  # images per second that no part explains
    residual_low: float | None = None  # its 95 % interval
    residual_high: float | None = None
    hosts: tuple[str, ...] = ()  # where there are several

    @property
    def is_explained(self) -> bool:
        """Whether half of the parts are known."""
        return 2 * sum(part.lost is not None for part in self.parts) >= len(self.parts)


@dataclass(frozen=True)
class ExplainedSubset:
    """The runs of a subset, and those of the control cells that explain them."""

    runs: Runs
    rates: Mapping[Member, Sample]  # log(images per second) of members alone without a strategy
    steps: Mapping[Member, Step]  # theirs
    slowest: Step  # of the slowest of them, whichever that is in each draw
    without: Mapping[tuple[Member, ...], Runs]  # strategy=none, by subset
    alone: Mapping[Member, Runs]  # with the strategy
    hosts: Mapping[Member, Runs]  # hosts alone with all their GPUs, as far as they were measured

    @property
    def images(self) -> int:
        """The images of a step of all ranks."""
        return self.runs.cell.world_size * self.runs.cell.batch_size

    @property
    def measured(self) -> Step:
        """The step of the subset."""
        return _step(self.runs.log_rate.value, self.runs.log_rate.draws, self.images)

    @property
    def slowest_runs(self) -> Runs:
        """The runs of the slowest member alone."""
        return self.without[(min(self.rates, key=lambda gpu: self.rates[gpu].value),)]

    def freedom(self) -> float:
        """Return the degrees of freedom of all rates and differences that the parts come from."""
        controls = [*self.alone.values()]
        if self.runs.gpus in self.without:
            controls.append(self.without[self.runs.gpus])
        samples = [self.runs.log_rate, *self.rates.values()]
        for control in controls:
            samples.append(control.log_rate)
        cost = self.runs.difference(COST)
        if cost is not None and cost.floor is not None:  # as a share of a step
            ms = self.measured.ms
            floor = dataclasses.replace(cost.floor, deviation=cost.floor.deviation / ms)
            samples.append(dataclasses.replace(cost, value=cost.value / ms, floor=floor))
        return freedom(samples)

    def spread(self, degrees: float) -> WaterfallPart:
        """Return what ranks lose because they wait for the slowest GPU; the ideal is without it."""
        missing, rates, log_draws = [], [], []
        for gpu in self.runs.gpus:
            if gpu not in self.rates:
                missing.append(gpu)
                continue
            rates.append(math.exp(self.rates[gpu].value))
            log_draws.append(self.rates[gpu].draws)
        if missing:
            why = f"{gpu_list(missing)} did not run alone with strategy=none"
            return WaterfallPart(
                SPREAD, None, f"{why}: one of them may be the slowest", above_ideal=True
            )
        drawn = np.exp(log_draws)
        draws = drawn.sum(axis=0) - len(rates) * drawn.min(axis=0)
        lost = next_run(sum(rates) - len(rates) * min(rates), draws, degrees)
        return WaterfallPart(SPREAD, lost, above_ideal=True)

    def parts_below(self) -> list[LossPart]:
        """Return the parts below the ideal."""
        runs, steps = self.runs, dict(self.steps)
        overheads, costs = [], []
        for gpu, alone in self.alone.items():
            rate, cost = alone.log_rate, alone.step(COST)
            if gpu in self.steps:
                step = _step(rate.value, rate.draws, runs.cell.batch_size)
                overheads.append(step - self.steps[gpu])
            if cost is not None:
                costs.append(cost)
        overhead, why = mean_step(overheads), ""
        if overhead is None:
            why = "the strategy was not measured on one of these GPUs alone"
        else:
            steps = {gpu: step + overhead for gpu, step in steps.items()}
        members = {gpu: self.without[(gpu,)] for gpu in steps}
        lost_to_clocks, about_clocks = clock_loss(runs, members, steps), AT_MOST
        if lost_to_clocks is None:
            about_clocks = "CPU workers have no SM clock"
            if runs.cell.device == "cuda":
                about_clocks = "the clocks were not read"
        return [
            LossPart(OVERHEAD, overhead, why),
            LossPart(CLOCKS, lost_to_clocks, about_clocks),
            self.contention(),
            *self.communication(mean_step(costs) or overhead),
        ]

    def contention(self) -> LossPart:
        """Return what ranks take from each other without any exchange: host memory, the CPU."""
        together = self.without.get(self.runs.gpus)
        if together is None:
            return LossPart(CONTENTION, None, "strategy=none did not run on this subset")
        alone = None
        if self.runs.median(CLOCK):
            alone = step_at_clock_of(together, self.slowest, self.slowest_runs)
        step = _step(together.log_rate.value, together.log_rate.draws, self.images)
        return LossPart(CONTENTION, step - (alone or self.slowest))

    def communication(self, cost_alone: Step | None) -> Sequence[LossPart]:
        """Return the exposed communication without what it costs on one GPU, and waiting."""
        runs, whole = self.runs, self.runs.step(COST)
        if whole is None:
            reason = "benchmark.exposed_rounds=0"
            if runs.cell.benchmark.get("exposed_rounds", 1):
                reason = "the strategy has no exchange_alone"
            why = f"steps without the exchange were not timed ({reason})"
            return [LossPart(COMMUNICATION, None, why), LossPart(WAITING, None, why)]
        exposed, why = whole, "this includes the overhead of the strategy on one GPU"
        if cost_alone is not None:
            at_clock = step_at_clock_of(runs, cost_alone, self.slowest_runs)
            exposed, why = whole - (at_clock or cost_alone), ""
        # A trace shows how long the mean rank waits, for slower GPUs (the spread) too.
        traced = runs.step(WAIT)
        for_slower = mean_step([self.slowest - step for step in self.steps.values()])
        waiting, unknown = None, ""
        if traced is None or for_slower is None:
            unknown = "included in exposed communication: only a trace can separate them"
        elif len(self.rates) < runs.cell.world_size:
            unknown = "how long ranks wait for slower GPUs is not known"
        elif traced.ms <= for_slower.ms or exposed.ms <= 0:
            unknown = "ranks wait for slower GPUs only, or the wait costs no step time"
        else:
            waiting = traced - for_slower
        if waiting is None:
            parts = [LossPart(COMMUNICATION, exposed, why), LossPart(WAITING, None, unknown)]
        elif waiting.ms <= exposed.ms:
            parts = [LossPart(COMMUNICATION, exposed - waiting, why), LossPart(WAITING, waiting)]
        else:  # part of it was hidden behind compute
            nothing = LossPart(COMMUNICATION, None, "all of it is waiting")
            parts = [nothing, LossPart(WAITING, exposed, why)]
        if len(runs.cell.hosts) > 1:
            return split_by_hosts(runs, parts, self.hosts, cost_alone)
        return split_by_timeline(parts, runs, self.alone)


def waterfalls(study: Study) -> tuple[tuple[Waterfall, ...], dict[str, str]]:
    """Return a waterfall for every subset with a member that ran alone; what others lack."""
    controls = ControlRuns(study)
    explained: list[Waterfall] = []
    unexplained = []
    for runs in study.timed:
        if runs.cell.world_size == 1 or runs.strategy == WITHOUT:
            continue
        label, subset = labels.label(study, runs), _explained(runs, controls)
        if subset is not None:
            explained.append(_waterfall(label, subset))
        if subset is None or not explained[-1].is_explained:
            unexplained.append(f"{label} on {gpu_list(runs.gpus)}")
    explained.sort(key=lambda fall: -len(fall.hosts))  # most hosts first, otherwise as they ran
    if not unexplained:
        return tuple(explained), {}
    sentence = f"Breakdown of the loss of {several(unexplained)}: no control runs"
    return tuple(explained), {sentence: "waterfall=true"}


def _explained(runs: Runs, controls: ControlRuns) -> ExplainedSubset | None:
    without, images = controls.without.like(runs), runs.cell.batch_size
    rates, steps = {}, {}
    for gpu in runs.gpus:
        if (gpu,) in without:
            rates[gpu] = without[(gpu,)].log_rate
            steps[gpu] = _step(rates[gpu].value, rates[gpu].draws, images)
    if not rates or not images:
        return None
    return ExplainedSubset(
        runs=runs,
        rates=rates,
        steps=steps,
        slowest=_step(*slowest(rates.values()), images),
        without=without,
        alone=controls.alone.of(runs, runs.gpus),
        hosts=controls.hosts.of(runs, runs.cell.hosts),
    )


def _waterfall(label: str, subset: ExplainedSubset) -> Waterfall:
    runs, step_so_far = subset.runs, subset.slowest
    measured = runs.next_run(IMAGES_PER_SECOND)
    assert measured is not None
    degrees = subset.freedom()
    parts = [subset.spread(degrees)]
    for name, step, why in subset.parts_below():
        if step is None:
            parts.append(WaterfallPart(name, None, why))
            continue
        before = step_so_far.or_exact()
        lost = _images_between(subset.images, before, before + step, degrees)
        ms = next_run(step.ms, step.draws, degrees)
        if name == CLOCKS:
            if not lost.value:
                why = ""
            lost, ms = with_0_inside(lost), with_0_inside(ms)
        parts.append(WaterfallPart(name, lost, why, ms=ms))
        step_so_far = step_so_far + step
    residual = _images_between(subset.images, step_so_far, subset.measured, degrees)
    rates, hosts = subset.rates.values(), runs.cell.hosts
    ideal = exponential(next_run(*slowest(rates), freedom(rates)))
    return Waterfall(
        label=label,
        gpus=runs.gpus,
        key=runs.key,
        ideal=scaled(ideal, runs.cell.world_size),
        measured=measured,
        parts=tuple(parts),
        residual=residual.value,
        residual_low=residual.low,
        residual_high=residual.high,
        hosts=hosts if len(hosts) > 1 else (),
    )


def _images_between(images: int, before: Step, after: Step, degrees: float) -> Estimate:
    per_ms = images * 1e3  # of a step, times the ms of a second
    # A step takes some time, however little is known of it.
    longer = np.maximum(after.draws, after.ms / WIDEST)
    shorter = np.maximum(before.draws, before.ms / WIDEST)
    lost = per_ms / before.ms - per_ms / after.ms
    return next_run(lost, per_ms / shorter - per_ms / longer, degrees)


def _step(log_rate: float, draws: Draws, images: int) -> Step:
    """Return the step in which so many images are trained at a rate."""
    ms = images * 1e3  # at one image per second
    return Step(ms / math.exp(log_rate), ms / np.exp(draws))


def split_by_hosts(
    runs: Runs, parts: Sequence[LossPart], hosts: Mapping[Member, Runs], alone: Step | None
) -> Sequence[LossPart]:
    """Return the parts with the communication of several hosts split into inside and between.

    Inside is what the strategy costs on a host alone with all its GPUs, the mean over the hosts,
    without what it costs on one GPU.
    """
    (_, exposed, why), *rest = parts
    if exposed is None:
        return parts
    if len(runs.cell.gpus) == 1:
        return [LossPart(BETWEEN, exposed, why), *rest]
    costs = []
    for of_host in hosts.values():
        cost = of_host.step(COST)
        if cost is not None:
            costs.append(cost)
    inside = mean_step(costs)
    if inside is None or len(costs) < len(runs.cell.hosts):
        return [LossPart(COMMUNICATION, exposed, _joined(why, UNSPLIT)), *rest]
    if alone:
        inside = inside - alone
    return [LossPart(INSIDE, inside, why), LossPart(BETWEEN, exposed - inside), *rest]


def split_by_timeline(
    parts: Sequence[LossPart], runs: Runs, alone: Mapping[Member, Runs]
) -> Sequence[LossPart]:
    """Return the parts with the exposed one split by observed steps, else with the reason."""
    (name, exposed, why), *rest = parts
    if exposed is None:
        return parts
    together = _timeline_steps(runs)
    tails_alone, slowed_alone = [], []
    for member in alone.values():
        of_member = _timeline_steps(member)
        if of_member:
            tails_alone.append(of_member[TAIL])
            slowed_alone.append(of_member[SLOWED])
    mean_tail, mean_slowed = mean_step(tails_alone), mean_step(slowed_alone)
    if not together or mean_tail is None or mean_slowed is None:
        reason = UNSEEN_ALONE
        if not together:
            reason = _why_unseen(runs.records[0])
        return [LossPart(name, exposed, _joined(why, f"not split further: {reason}")), *rest]
    tail, slowed = together[TAIL] - mean_tail, together[SLOWED] - mean_slowed
    unexplained = LossPart(REST, exposed - tail - slowed)
    return [LossPart(TAIL, tail, why), LossPart(SLOWED, slowed), unexplained, *rest]


def _why_unseen(record: Record) -> str:
    for row in _timeline_rows(record).values():
        for reason in row.get("unknown", {}).values():
            return str(reason)
    return UNSEEN


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _timeline_steps(runs: Runs) -> dict[str, Step]:
    """Return how much longer TAIL and SLOWED take with the exchange, medians over the runs; empty
    without steps with the exchange and without it.
    """
    observed = list(filter(None, map(_timeline_times, runs.records)))
    steps: dict[str, Step] = {}
    if not observed:
        return steps
    tails, slowed = zip(*observed, strict=True)
    for index, (name, times) in enumerate({TAIL: tails, SLOWED: slowed}.items()):
        values, errors = zip(*times, strict=True)
        deviation = statistics.median(errors)
        if len(values) > 1:  # the larger of the scatter inside runs and of that between them
            deviation = max(deviation, statistics.stdev(values))
        median, seed = statistics.median(values), f"{index} moments {runs.records[0].record_id}"
        steps[name] = Step(median, draws_of_median(median, deviation, len(values), seed))
    return steps


def _timeline_times(record: Record) -> tuple[Uncertain, Uncertain] | None:
    """Return how much longer tail and backward take, on the rank with the shortest tail."""
    rows = _timeline_rows(record)
    of_ranks = []
    for rank in range(record.cell.world_size):
        without = _gradient_and_exchange(rows.get((rank, False)))
        with_exchange = _gradient_and_exchange(rows.get((rank, True)))
        if without is None or with_exchange is None:
            return None
        gradient_later, exchange_later = map(Uncertain.minus, with_exchange, without)
        of_ranks.append((exchange_later.minus(gradient_later), gradient_later))
    return min(of_ranks)


def _gradient_and_exchange(row: Mapping[str, Any] | None) -> tuple[Uncertain, Uncertain] | None:
    """Return when the last gradient is there, and when the exchange has ended."""
    if row is None:
        return None
    ready, spreads = row.get("ready_ms"), row.get("ready_spread_ms", ())
    steps = row.get("steps")
    if not steps or not ready or len(spreads) != len(ready):
        return None
    moments = [*ready, row.get("exchange_ms"), row.get("update_ms")]
    spreads = [*spreads, row.get("exchange_spread_ms"), row.get("update_spread_ms")]
    error_per_spread = ERROR_OF_MEDIAN / QUARTILES / math.sqrt(steps)
    times = []
    for moment, spread in zip(moments, spreads, strict=True):
        at_ms, spread_ms = finite(moment), finite(spread)
        if at_ms is None or spread_ms is None:
            return None
        times.append(Uncertain(at_ms, spread_ms * error_per_spread))
    *gradients, exchange, _ = times
    return max(gradients), exchange


def _timeline_rows(record: Record) -> dict[tuple[int, bool], Mapping[str, Any]]:
    """Return {(rank, with exchange): row} of a record's timeline."""
    rows = {}
    for row in record.tables.get("timeline", {}).get("rows", ()):
        if "rank" in row:
            rows[row["rank"], bool(row.get("exchange"))] = row
    return rows


# What lower SM clocks take from GPUs that train together: at most, as if steps followed clocks.
def step_at_clock_of(together: Runs, step: Step, alone: Runs) -> Step | None:
    """Return what a step of one GPU takes at the mean clock of a cell; None without both clocks."""
    return _slowed(step, _clock_of_cell(alone), _clock_of_cell(together))


def clock_loss(
    runs: Runs, alone: Mapping[Member, Runs], steps: Mapping[Member, Step]
) -> Step | None:
    """Return how much longer the slowest step is at the clocks of the members together.

    `steps` are those of members alone, with what the strategy does on one GPU. The clocks are those
    of each GPU where records have them, else the mean of a cell; None without clocks.
    """
    slowed = []
    for gpu, step in steps.items():
        at_clock = _slowed(step, _clock_of_gpu(alone[gpu], gpu), _clock_of_gpu(runs, gpu))
        if at_clock is not None:
            slowed.append(at_clock)
    slowest = max(steps, key=lambda gpu: steps[gpu].ms)
    longest = step_at_clock_of(runs, steps[slowest], alone[slowest])
    if len(slowed) == len(steps):
        longest = max(slowed, key=lambda step: step.ms)
    if longest is None:
        return None
    return longest - steps[slowest].or_exact()


def _clock_of_cell(runs: Runs) -> Sample | None:
    return runs.sample(CLOCK, runs.logarithms(CLOCK), f"{CLOCK} {runs.records[0].record_id}")


def _clock_of_gpu(runs: Runs, gpu: Member) -> Sample | None:
    rank, logarithms = runs.gpus.index(gpu), []
    for record in runs.records:
        phases = record.checks.get("gpu_samples", {}).get("phases", {})
        clocks = phases.get("timed", {}).get("sm_mhz", ())
        if len(clocks) == runs.cell.world_size:
            mhz = finite(clocks[rank])
            if mhz is not None and mhz > 0:
                logarithms.append(math.log(mhz))
    return runs.sample(CLOCK, logarithms, f"{CLOCK} {runs.records[0].record_id} {gpu}")


def _slowed(step: Step, before: Sample | None, after: Sample | None) -> Step | None:
    if before is None or after is None:
        return None
    draws = step.or_exact().draws * np.exp(before.draws - after.draws)
    return Step(step.ms * math.exp(before.value - after.value), draws)


def with_0_inside(bound: Estimate) -> Estimate:
    """Return what is at most so large, with an interval that holds 0."""
    if bound.low is None or bound.high is None:
        return bound
    return Estimate(bound.value, min(bound.low, 0.0), max(bound.high, 0.0))
