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
        samples = [self.runs.log_rate, *self.rates.values()]
        samples += [control.log_rate for control in controls]
        cost = self.runs.difference(COST)
        if cost is not None and cost.floor is not None:  # as a share of a step
            ms = self.measured.ms
            floor = dataclasses.replace(cost.floor, deviation=cost.floor.deviation / ms)
            samples.append(dataclasses.replace(cost, value=cost.value / ms, floor=floor))
        return freedom(sample for sample in samples if sample is not None)


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
    without, rates = controls.without(runs), {}
    for gpu in runs.gpus:
        member = without.get((gpu,))
        if member is not None and member.log_rate is not None:
            rates[gpu] = member.log_rate
    if not rates or runs.log_rate is None or not runs.cell.batch_size:
        return None
    images = runs.cell.batch_size
    measured = _step(runs.log_rate.value, runs.log_rate.draws, runs.cell.world_size * images)
    return ExplainedSubset(
        runs=runs,
        rates=rates,
        steps={gpu: _step(rate.value, rate.draws, images) for gpu, rate in rates.items()},
        slowest=_step(*slowest(rates.values()), images),
        measured=measured,
        without=without,
        alone=controls.alone(runs),
        hosts=controls.hosts(runs),
    )


def _step(log_rate: float, draws: Draws | None, images: int) -> Step:
    """Return the step in which so many images are trained at a rate; draws of it where known."""
    ms = images * 1e3  # at one image per second
    return Step(ms / math.exp(log_rate), None if draws is None else ms / np.exp(draws))


def _waterfall(label: str, subset: ExplainedSubset) -> Waterfall:
    runs, spent = subset.runs, subset.slowest
    assert runs.log_rate is not None
    degrees = subset.freedom()
    parts = [_spread(subset, degrees)]
    for name, step, why in _steps_of_parts(subset):
        if step is None:
            parts.append(WaterfallPart(name, None, why))
            continue
        before = spent
        if before.draws is None and step.draws is not None:
            before = Step(spent.ms, np.full_like(step.draws, spent.ms))
        lost = _images_between(subset.images, before, before + step, degrees)
        ms = next_run(step.ms, step.draws, degrees)
        if name == NAME:
            lost, ms, why = reaching_0(lost), reaching_0(ms), why if lost.value else ""
        parts.append(WaterfallPart(name, lost, why, ms=ms))
        spent = spent + step
    residual = _images_between(subset.images, spent, subset.measured, degrees)
    rates = subset.rates.values()
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
        hosts=runs.cell.hosts if len(runs.cell.hosts) > 1 else (),
    )


def _spread(subset: ExplainedSubset, degrees: float) -> WaterfallPart:
    """Return what ranks lose because they wait for the slowest GPU; the ideal is without it."""
    missing = [gpu for gpu in subset.runs.gpus if gpu not in subset.rates]
    if missing:
        why = f"{gpu_list(missing)} did not run alone with strategy=none"
        return WaterfallPart(
            SPREAD, None, f"{why}: one of them may be the slowest", above_ideal=True
        )
    rates = [math.exp(rate.value) for rate in subset.rates.values()]
    log_draws = [rate.draws for rate in subset.rates.values() if rate.draws is not None]
    draws = None
    if len(log_draws) == len(rates):
        drawn = np.exp(log_draws)
        draws = drawn.sum(axis=0) - len(rates) * drawn.min(axis=0)
    lost = next_run(sum(rates) - len(rates) * min(rates), draws, degrees)
    return WaterfallPart(SPREAD, lost, above_ideal=True)


def _steps_of_parts(subset: ExplainedSubset) -> Parts:
    """Return the parts below the ideal: name, time, and why it is unknown or what qualifies it."""
    runs, overheads, steps = subset.runs, [], dict(subset.steps)
    for gpu, step in subset.steps.items():
        rate = subset.alone[gpu].log_rate if gpu in subset.alone else None
        if rate is not None:
            overheads.append(_step(rate.value, rate.draws, runs.cell.batch_size) - step)
    overhead, why = mean_step(overheads), ""
    if overhead is None:
        why = "the strategy was not measured on one of these GPUs alone"
    else:
        steps = {gpu: step + overhead for gpu, step in steps.items()}
    parts: Parts = [(OVERHEAD, overhead, why)]
    members = {gpu: subset.without[(gpu,)] for gpu in steps}
    lost, why = clock_loss(runs, members, steps), AT_MOST
    if lost is None:
        why = "CPU workers have no SM clock"
        if runs.cell.device == "cuda":
            why = "the clocks were not sampled"
    parts.append((NAME, lost, why))
    parts.append(_contention(subset))
    costs = [alone.step(COST) for alone in subset.alone.values()]
    own = mean_step([cost for cost in costs if cost is not None])
    return [*parts, *_communication(subset, own or overhead)]


def _contention(subset: ExplainedSubset) -> tuple[str, Step | None, str]:
    """Return what ranks take from each other without any exchange: host memory, the CPU."""
    together = subset.without.get(subset.runs.gpus)
    if together is None or together.log_rate is None:
        return CONTENTION, None, "strategy=none did not run on this subset"
    alone = None
    if subset.runs.median(CLOCK):
        alone = step_at_clock_of(together, subset.slowest, subset.slowest_runs)
    step = _step(together.log_rate.value, together.log_rate.draws, subset.images)
    return CONTENTION, step - (alone or subset.slowest), ""


def _communication(subset: ExplainedSubset, own: Step | None) -> Parts:
    """Return the exposed communication without the cost `own` on one GPU, and waiting."""
    runs, whole = subset.runs, subset.runs.step(COST)
    if whole is None:
        reason = "benchmark.exposed_rounds=0"
        if runs.cell.benchmark.get("exposed_rounds", 1):
            reason = "the strategy has no exchange alone"
        why = f"steps without the exchange were not timed ({reason})"
        return [(COMMUNICATION, None, why), (WAITING, None, why)]
    exposed, why = whole, "this includes what the strategy costs on one GPU"
    if own is not None:
        exposed = whole - (step_at_clock_of(runs, own, subset.slowest_runs) or own)
        why = ""
    parts = _without_waiting(subset, exposed, why)
    if len(runs.cell.hosts) > 1:
        return by_hosts(runs, parts, subset.hosts, own)
    return in_parts(parts, runs, subset.alone)


def _without_waiting(subset: ExplainedSubset, exposed: Step, why: str) -> Parts:
    """Return the exposed communication and, of it, the waiting for a peer of equal speed.

    A trace shows how long the mean rank waits, for slower GPUs (the spread) too.
    """
    traced, unknown = subset.runs.step(WAIT), ""
    if traced is None:
        unknown = "part of the exposed communication: no trace tells them apart"
    elif len(subset.rates) < subset.runs.cell.world_size:
        unknown = "how long ranks wait for slower GPUs is not known"
    if traced is None or unknown:
        return [(COMMUNICATION, exposed, why), (WAITING, None, unknown)]
    for_slower = mean_step([subset.slowest - step for step in subset.steps.values()])
    assert for_slower is not None  # there is a member
    waiting = traced - for_slower
    if waiting.ms <= 0 or exposed.ms <= 0:
        unknown = "ranks wait for slower GPUs only, or the wait costs no step time"
        return [(COMMUNICATION, exposed, why), (WAITING, None, unknown)]
    if waiting.ms > exposed.ms:  # part of it was hidden behind compute
        return [(COMMUNICATION, None, "all of it is waiting"), (WAITING, exposed, why)]
    return [(COMMUNICATION, exposed - waiting, why), (WAITING, waiting, "")]


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
