"""Why a subset trains slower than its members alone: the efficiency waterfall, from control cells.

Every part is a difference of step times in ms, and each comes from another measurement, so that the
residual is a check and not zero by construction (METHOD.md, Waterfall):

    spread      Σ members alone − N × slowest member alone         strategy=none on each GPU alone
    overhead    step with the strategy − step without, one rank    the strategy on each GPU alone
    clocks      slowest of (member alone + overhead) × its SM      samples of the GPUs (clock_loss)
                clock ÷ that together, minus that alone
    contention  step of N ranks without exchange − slowest alone   strategy=none on the subset
                at the clocks of these ranks
    exposed     steps with and without exchange in turn (ABBA),    the cell itself: strategy/cost_ms
                minus the same on one GPU, else minus overhead     (its parts: communication_parts)
    waiting     of it, waiting for a peer of equal speed           the cell's trace

Subtracted one after the other they become images per second.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from analysis.findings.baselines import WITHOUT, ControlRuns
from analysis.findings.clock_loss import AT_MOST, NAME, clock_loss, reaching_0, step_at_clock_of
from analysis.findings.communication import COST
from analysis.findings.communication_parts import COMMUNICATION, Parts, by_hosts, in_parts
from analysis.study import names as labels
from analysis.study.draws import (
    Draws,
    Sample,
    Step,
    exponential,
    freedom,
    mean_step,
    next_run,
    scaled,
    slowest,
)
from analysis.study.estimates import Estimate, Member, Waterfall, WaterfallPart
from analysis.study.intervals import WIDEST
from analysis.study.names import gpu_list, several
from analysis.study.noise_floor import CLOCK
from analysis.study.runs import Runs
from analysis.study.study import Study

WAIT = "trace/wait_ms_per_step"
SPREAD, OVERHEAD = "spread between GPUs", "strategy overhead on one GPU"
CONTENTION, WAITING = "contention", "waiting for a peer"


@dataclass(frozen=True)
class ExplainedSubset:
    """The runs of a subset, and those of the control cells that explain them."""

    runs: Runs
    rates: Mapping[Member, Sample]  # log(images per second) of members alone without a strategy
    steps: Mapping[Member, Step]  # theirs
    slowest: Step  # of the slowest of them, whichever that is in each draw
    measured: Step
    without: Mapping[tuple[Member, ...], Runs]  # strategy=none, by subset
    alone: Mapping[Member, Runs]  # with the strategy
    hosts: Mapping[Member, Runs]  # each of several hosts alone with all its GPUs

    @property
    def images(self) -> int:
        """The images of a step of all ranks."""
        return self.runs.cell.world_size * self.runs.cell.batch_size

    @property
    def slowest_runs(self) -> Runs:
        """The runs of the slowest member alone."""
        return self.without[(min(self.rates, key=lambda gpu: self.rates[gpu].value),)]

    def freedom(self) -> float:
        """Return the degrees of freedom of all rates and differences that the parts come from."""
        controls = [*self.alone.values()]
        if self.runs.gpus in self.without:
            controls.append(self.without[self.runs.gpus])
        samples = list(self.rates.values())
        if self.runs.log_rate is not None:
            samples.insert(0, self.runs.log_rate)
        for control in controls:
            if control.log_rate is not None:
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
            rate = self.rates[gpu]
            rates.append(math.exp(rate.value))
            if rate.draws is not None:
                log_draws.append(rate.draws)
        if missing:
            why = f"{gpu_list(missing)} did not run alone with strategy=none"
            return WaterfallPart(
                SPREAD, None, f"{why}: one of them may be the slowest", above_ideal=True
            )
        draws = None
        if len(log_draws) == len(rates):
            drawn = np.exp(log_draws)
            draws = drawn.sum(axis=0) - len(rates) * drawn.min(axis=0)
        lost = next_run(sum(rates) - len(rates) * min(rates), draws, degrees)
        return WaterfallPart(SPREAD, lost, above_ideal=True)

    def parts_below(self) -> Parts:
        """Return the parts below the ideal: name, time, why it is unknown or what qualifies it."""
        runs, steps = self.runs, dict(self.steps)
        overheads, costs = [], []
        for gpu, alone in self.alone.items():
            rate, cost = alone.log_rate, alone.step(COST)
            if rate is not None and gpu in self.steps:
                step = _step(rate.value, rate.draws, runs.cell.batch_size)
                overheads.append(step - self.steps[gpu])
            if cost is not None:
                costs.append(cost)
        overhead, why = mean_step(overheads), ""
        if overhead is None:
            why = "the strategy was not measured on one of these GPUs alone"
        else:
            steps = {gpu: step + overhead for gpu, step in steps.items()}
        parts: Parts = [(OVERHEAD, overhead, why)]
        members = {gpu: self.without[(gpu,)] for gpu in steps}
        lost, why = clock_loss(runs, members, steps), AT_MOST
        if lost is None:
            why = "CPU workers have no SM clock"
            if runs.cell.device == "cuda":
                why = "the clocks were not sampled"
        parts.append((NAME, lost, why))
        parts.append(self.contention())
        return [*parts, *self.communication(mean_step(costs) or overhead)]

    def contention(self) -> tuple[str, Step | None, str]:
        """Return what ranks take from each other without any exchange: host memory, the CPU."""
        together = self.without.get(self.runs.gpus)
        if together is None or together.log_rate is None:
            return CONTENTION, None, "strategy=none did not run on this subset"
        alone = None
        if self.runs.median(CLOCK):
            alone = step_at_clock_of(together, self.slowest, self.slowest_runs)
        step = _step(together.log_rate.value, together.log_rate.draws, self.images)
        return CONTENTION, step - (alone or self.slowest), ""

    def communication(self, own: Step | None) -> Parts:
        """Return the exposed communication without the cost `own` on one GPU, and waiting."""
        runs, whole = self.runs, self.runs.step(COST)
        if whole is None:
            reason = "benchmark.exposed_rounds=0"
            if runs.cell.benchmark.get("exposed_rounds", 1):
                reason = "the strategy has no exchange alone"
            why = f"steps without the exchange were not timed ({reason})"
            return [(COMMUNICATION, None, why), (WAITING, None, why)]
        exposed, why = whole, "this includes what the strategy costs on one GPU"
        if own is not None:
            exposed = whole - (step_at_clock_of(runs, own, self.slowest_runs) or own)
            why = ""
        # A trace shows how long the mean rank waits, for slower GPUs (the spread) too.
        traced = runs.step(WAIT)
        for_slower = mean_step([self.slowest - step for step in self.steps.values()])
        parts: Parts = [(COMMUNICATION, exposed, why)]
        if traced is None or for_slower is None:
            unknown = "part of the exposed communication: no trace tells them apart"
            parts.append((WAITING, None, unknown))
        elif len(self.rates) < runs.cell.world_size:
            parts.append((WAITING, None, "how long ranks wait for slower GPUs is not known"))
        elif traced.ms <= for_slower.ms or exposed.ms <= 0:
            unknown = "ranks wait for slower GPUs only, or the wait costs no step time"
            parts.append((WAITING, None, unknown))
        else:
            waiting = traced - for_slower
            parts = [(COMMUNICATION, exposed - waiting, why), (WAITING, waiting, "")]
            if waiting.ms > exposed.ms:  # part of it was hidden behind compute
                parts = [(COMMUNICATION, None, "all of it is waiting"), (WAITING, exposed, why)]
        if len(runs.cell.hosts) > 1:
            return by_hosts(runs, parts, self.hosts, own)
        return in_parts(parts, runs, self.alone)


def waterfalls(study: Study) -> tuple[tuple[Waterfall, ...], tuple[str, ...]]:
    """Return a waterfall for every subset with a member that ran alone, a sentence on others."""
    controls = ControlRuns(study)
    explained, without = [], []
    for runs in study.timed:
        if runs.cell.world_size == 1 or runs.strategy == WITHOUT:
            continue
        label, subset = labels.label(study, runs), _explained(runs, controls)
        if subset is None:
            without.append(f"{label} on {gpu_list(runs.gpus)}")
        else:
            explained.append(_waterfall(label, subset))
    explained.sort(key=lambda fall: -len(fall.hosts))  # most hosts first, otherwise as they ran
    if not without:
        return tuple(explained), ()
    sentence = f"where the loss of {several(without)} comes from: run with waterfall=true"
    return tuple(explained), (sentence,)


def _explained(runs: Runs, controls: ControlRuns) -> ExplainedSubset | None:
    without, images = controls.without(runs), runs.cell.batch_size
    rates, steps = {}, {}
    if runs.log_rate is None or not images:
        return None
    for gpu in runs.gpus:
        member = without.get((gpu,))
        if member is not None and member.log_rate is not None:
            rates[gpu] = member.log_rate
            steps[gpu] = _step(member.log_rate.value, member.log_rate.draws, images)
    if not rates:
        return None
    measured = _step(runs.log_rate.value, runs.log_rate.draws, runs.cell.world_size * images)
    return ExplainedSubset(
        runs=runs,
        rates=rates,
        steps=steps,
        slowest=_step(*slowest(rates.values()), images),
        measured=measured,
        without=without,
        alone=controls.alone(runs),
        hosts=controls.hosts(runs),
    )


def _step(log_rate: float, draws: Draws | None, images: int) -> Step:
    """Return the step in which so many images are trained at a rate; draws of it where known."""
    ms = images * 1e3  # at one image per second
    if draws is None:
        return Step(ms / math.exp(log_rate), None)
    return Step(ms / math.exp(log_rate), ms / np.exp(draws))


def _waterfall(label: str, subset: ExplainedSubset) -> Waterfall:
    runs, spent = subset.runs, subset.slowest
    assert runs.log_rate is not None
    degrees = subset.freedom()
    parts = [subset.spread(degrees)]
    for name, step, why in subset.parts_below():
        if step is None:
            parts.append(WaterfallPart(name, None, why))
            continue
        before = spent
        if before.draws is None and step.draws is not None:
            before = Step(spent.ms, np.full_like(step.draws, spent.ms))
        lost = _images_between(subset.images, before, before + step, degrees)
        ms = next_run(step.ms, step.draws, degrees)
        if name == NAME:
            if not lost.value:
                why = ""
            lost, ms = reaching_0(lost), reaching_0(ms)
        parts.append(WaterfallPart(name, lost, why, ms=ms))
        spent = spent + step
    residual = _images_between(subset.images, spent, subset.measured, degrees)
    rates, hosts = subset.rates.values(), runs.cell.hosts
    ideal = exponential(next_run(*slowest(rates), freedom(rates)))
    return Waterfall(
        label=label,
        gpus=runs.gpus,
        key=runs.key,
        ideal=scaled(ideal, runs.cell.world_size),
        measured=exponential(runs.log_rate.next_run()),
        parts=tuple(parts),
        residual=residual.value,
        residual_low=residual.low,
        residual_high=residual.high,
        hosts=hosts if len(hosts) > 1 else (),
    )


def _images_between(images: int, before: Step, after: Step, degrees: float) -> Estimate:
    """Return the images per second between two step times."""
    per_ms = images * 1e3  # of a step, times the ms of a second
    draws = None
    if before.draws is not None and after.draws is not None:
        # A step takes some time, however little is known of it.
        longer = np.maximum(after.draws, after.ms / WIDEST)
        shorter = np.maximum(before.draws, before.ms / WIDEST)
        draws = per_ms / shorter - per_ms / longer
    return next_run(per_ms / before.ms - per_ms / after.ms, draws, degrees)
