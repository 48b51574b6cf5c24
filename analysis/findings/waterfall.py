"""Why a subset trains slower than its members would alone: the efficiency waterfall, from control
cells.

Every part is a difference of step times in ms, and each comes from another measurement, so that the
residual is a check and not zero by construction (METHOD.md, Waterfall):

    spread      Σ members alone − N × slowest member alone         strategy=none on each GPU alone
    overhead    step with the strategy − step without, one rank    the strategy on each GPU alone
    clocks      slowest of (member alone + overhead) × (its SM     samples of the GPUs (clock_loss)
                clock ÷ that together)^e, minus that alone
    contention  step of N ranks without exchange − slowest alone   strategy=none on the subset
                at the clocks of these ranks
    exposed     steps with and without exchange in turn (ABBA),    the cell itself: strategy/cost_ms
                minus the same on one GPU, else minus the overhead
                on several hosts, inside them      the strategy on each host alone with all its GPUs
                and between them                   the rest of it
                on one host, after the last        observed steps, with exchange and without
                gradient, in a slower backward,    (communication_parts)
                and the rest
    waiting     of it, waiting for a peer of equal speed           the cell's trace:
    trace/wait_ms_per_step

Subtracted one after the other they become images per second. Where no GPU ran alone without a
strategy, but the clocks differ, the waterfall begins with the slowest member alone with the
strategy.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from analysis.findings.clock_loss import NAME, Clocks, clock_part
from analysis.findings.communication import COST
from analysis.findings.communication_parts import COMMUNICATION, Parts, by_hosts, in_parts
from analysis.findings.control_cells import WITHOUT, ControlRuns
from analysis.study import names as labels
from analysis.study.draws import (
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
from analysis.study.runs import Runs
from analysis.study.study import Study

WAIT = "trace/wait_ms_per_step"
SPREAD, OVERHEAD = "spread between GPUs", "strategy overhead on one GPU"
CONTENTION, WAITING = "contention", "waiting for a peer"


@dataclass(frozen=True)
class ExplainedSubset:
    """The runs of a subset, and those of the control cells that explain them."""

    runs: Runs
    log_rate: Sample  # of `runs`: the logarithm of images per second
    members: Mapping[Member, Runs]  # those that ran alone
    rates: Mapping[Member, Sample]  # of each member, as `log_rate`
    with_strategy: bool  # so the members ran alone
    without: Mapping[tuple[Member, ...], Runs]  # strategy=none, by subset; empty `with_strategy`
    alone: Mapping[Member, Runs]  # with the strategy
    hosts: Mapping[Member, Runs]  # each of several hosts alone with all its GPUs
    clocks: Clocks

    @staticmethod
    def of(runs: Runs, controls: ControlRuns, clocks: Clocks) -> "ExplainedSubset | None":
        """Return what is known of a subset; None where no member ran alone, or only with the
        strategy and at the same clock.
        """
        without, alone = controls.without(runs), controls.alone(runs)
        members = {gpu: without[(gpu,)] for gpu in runs.gpus if (gpu,) in without}
        with_strategy = not members
        if with_strategy:
            without = {}
            members = {gpu: alone[gpu] for gpu in runs.gpus if gpu in alone}
        rates = {}
        for gpu, member in members.items():
            if member.log_rate is not None:
                rates[gpu] = member.log_rate
        if not rates or runs.log_rate is None or not runs.batch_size:
            return None
        hosts = controls.hosts(runs)
        subset = ExplainedSubset(
            runs, runs.log_rate, members, rates, with_strategy, without, alone, hosts, clocks
        )
        if with_strategy and not clocks.differ(runs, subset.slowest):
            return None
        return subset

    @property
    def slowest(self) -> Runs:
        """The runs of the slowest member alone."""
        return self.members[min(self.rates, key=lambda gpu: self.rates[gpu].value)]

    @property
    def images(self) -> int:
        """The images of a step of all ranks."""
        return self.runs.world_size * self.runs.batch_size

    @functools.cached_property
    def step(self) -> Step:
        """The measured step."""
        return _step_at(self.log_rate, self.images)

    @functools.cached_property
    def slowest_step(self) -> Step:
        """The step of the slowest member alone, whichever that is in each draw."""
        value, draws = slowest(self.rates.values())
        images = self.runs.batch_size * 1e3  # of a step, times the ms of a second
        return Step(images / math.exp(value), None if draws is None else images / np.exp(draws))

    @functools.cached_property
    def steps_alone(self) -> dict[Member, Step]:
        """The step of each member alone."""
        return {gpu: _step_at(rate, self.runs.batch_size) for gpu, rate in self.rates.items()}

    @functools.cached_property
    def freedom(self) -> float:
        """The degrees of freedom of all rates and differences that the parts come from."""
        controls = [self.alone[gpu] for gpu in self.runs.gpus if gpu in self.alone]
        if self.runs.gpus in self.without:
            controls.append(self.without[self.runs.gpus])
        samples = [self.log_rate, *self.rates.values()]
        samples += [each.log_rate for each in controls if each.log_rate is not None]
        cost = self.runs.difference(COST)
        if cost is not None and cost.floor is not None:  # as a share of a step
            ms = self.step.ms
            floor = dataclasses.replace(cost.floor, deviation=cost.floor.deviation / ms)
            samples.append(dataclasses.replace(cost, value=cost.value / ms, floor=floor))
        return freedom(samples)

    def parts(self) -> Iterator[tuple[str, Step | None, str]]:
        """Yield the parts below the ideal: name, time, and why it is not known or what qualifies
        it.
        """
        yield OVERHEAD, self._overhead, self._why_no_overhead()
        yield self._clocks()
        yield self._contention()
        yield from self._communication()

    @functools.cached_property
    def _overhead(self) -> Step | None:
        """What the strategy adds to a step of one rank, the mean over the members; None with it in
        the ideal.
        """
        if self.with_strategy:
            return None
        steps = []
        for gpu, step in self.steps_alone.items():
            with_strategy = self.alone[gpu].log_rate if gpu in self.alone else None
            if with_strategy is not None:
                steps.append(_step_at(with_strategy, self.runs.batch_size) - step)
        return mean_step(steps)

    def _why_no_overhead(self) -> str:
        if self.with_strategy:
            return (
                "it is in the ideal: no GPU ran alone without a strategy (waterfall=true adds that)"
            )
        return "" if self._overhead else "the strategy was not measured on one of these GPUs alone"

    def _clocks(self) -> tuple[str, Step | None, str]:
        steps = self.steps_alone
        if self._overhead:
            steps = {gpu: step + self._overhead for gpu, step in steps.items()}
        slowed = self.clocks.lost(self.runs, self.members, steps)
        if slowed:
            return NAME, slowed, ""
        if self.runs.cell.device == "cuda":
            return NAME, None, "the clocks were not sampled"
        return NAME, None, "CPU workers have no SM clock"

    def _contention(self) -> tuple[str, Step | None, str]:
        """Return what ranks take from each other without any exchange, beside clocks: host memory,
        the CPU.
        """
        together = self.without.get(self.runs.gpus)
        if together is None or together.log_rate is None:
            return CONTENTION, None, "strategy=none did not run on this subset"
        slowed = None
        if self.runs.clock_mhz:
            slowed = self.clocks.at_clock_of(together, self.slowest_step, self.slowest)
        step = _step_at(together.log_rate, self.images)
        return CONTENTION, step - (slowed or self.slowest_step), ""

    def _communication(self) -> Parts:
        costs = [self.alone[gpu].step(COST) for gpu in self.runs.gpus if gpu in self.alone]
        # By steps with and without exchange in turn on one GPU, the mean over the members; else the
        # overhead.
        own = mean_step([cost for cost in costs if cost is not None]) or self._overhead
        at_clock = own
        if own:
            at_clock = self.clocks.at_clock_of(self.runs, own, self.slowest) or own
        parts = self._exposed_and_waiting(at_clock)
        if len(self.runs.cell.hosts) > 1:
            return by_hosts(self.runs, parts, self.hosts, own)
        return in_parts(parts, self.runs, self.alone)

    def _exposed_and_waiting(self, own: Step | None) -> Parts:
        """Return the exposed communication without what the strategy costs on one GPU, and the
        waiting, which a trace shows.
        """
        whole = self.runs.step(COST)
        if whole is None:
            reason = "benchmark.exposed_rounds=0"
            if self.runs.cell.benchmark.get("exposed_rounds", 1):
                reason = "the strategy has no exchange alone"
            why = f"steps without the exchange were not timed ({reason})"
            return [(COMMUNICATION, None, why), (WAITING, None, why)]
        if self.with_strategy and own is None:  # the ideal has it already
            why = "what the strategy costs on one GPU was not measured"
            return [(COMMUNICATION, None, why), (WAITING, None, why)]
        why = "" if own else "this includes what the strategy costs on one GPU"
        exposed = whole - own if own else whole
        waiting, why_not = self._waiting()
        if waiting is None:
            return [(COMMUNICATION, exposed, why), (WAITING, None, why_not)]
        if waiting.ms <= 0 or exposed.ms <= 0:
            why_not = "ranks wait for slower GPUs only, or the wait costs no step time"
            return [(COMMUNICATION, exposed, why), (WAITING, None, why_not)]
        if waiting.ms > exposed.ms:  # part of it was hidden behind compute
            return [(COMMUNICATION, None, "all of it is waiting"), (WAITING, exposed, why)]
        return [(COMMUNICATION, exposed - waiting, why), (WAITING, waiting, "")]

    def _waiting(self) -> tuple[Step | None, str]:
        """Return how long the mean rank waits for a peer of equal speed, or why that is not known.

        A trace shows how long it waits; the part in which it waits for a slower GPU is the spread,
        which the ideal is without.
        """
        waiting = self.runs.step(WAIT)
        if waiting is None:
            return None, "part of the exposed communication: no trace tells them apart"
        if len(self.rates) < self.runs.world_size:
            return None, "how long ranks wait for slower GPUs is not known"
        for_slower = mean_step([self.slowest_step - step for step in self.steps_alone.values()])
        assert for_slower is not None  # there is a member
        return waiting - for_slower, ""


def _step_at(rate: Sample, images: int) -> Step:
    ms = images * 1e3  # at one image per second
    return Step(ms / math.exp(rate.value), None if rate.draws is None else ms / np.exp(rate.draws))


def waterfalls(study: Study) -> tuple[tuple[Waterfall, ...], tuple[str, ...]]:
    """Return a waterfall for every subset with a member that ran alone with strategy=none, and a
    sentence on the others.
    """
    controls, clocks = ControlRuns(study), Clocks(study)
    explained, without = [], []
    for runs in study.timed:
        if runs.world_size == 1 or runs.strategy == WITHOUT:
            continue
        label = labels.label(study, runs)
        subset = ExplainedSubset.of(runs, controls, clocks)
        if subset is None:
            without.append(f"{label} on {gpu_list(runs.gpus)}")
        else:
            explained.append(_waterfall(label, subset))
    explained.sort(key=lambda each: -len(each.hosts))  # most hosts first, otherwise as they ran
    if not without:
        return tuple(explained), ()
    sentence = f"where the loss of {several(without)} comes from: run with waterfall=true"
    return tuple(explained), (sentence,)


def _waterfall(label: str, subset: ExplainedSubset) -> Waterfall:
    runs, spent, clocks = subset.runs, subset.slowest_step, subset.clocks
    parts = [_spread(subset)]
    for name, step, why in subset.parts():
        if step is None:
            parts.append(WaterfallPart(name, None, why))
            continue
        before = spent
        if before.draws is None and step.draws is not None:
            before = Step(spent.ms, np.full_like(step.draws, spent.ms))
        lost = _images_between(subset, before, before + step)
        part = WaterfallPart(name, lost, why, ms=next_run(step.ms, step.draws, subset.freedom))
        if name == NAME:
            members, rate = clocks.members(runs, subset.members), math.exp(subset.log_rate.value)
            part = clock_part(part, members, clocks.exponent(runs), rate, subset.step.ms)
        parts.append(part)
        spent = spent + step
    residual = _images_between(subset, spent, subset.step)
    rates = subset.rates.values()
    ideal = exponential(next_run(*slowest(rates), freedom(rates)))
    return Waterfall(
        label=label,
        gpus=runs.gpus,
        key=runs.key,
        ideal=scaled(ideal, runs.world_size),
        measured=exponential(subset.log_rate.next_run()),
        parts=tuple(parts),
        residual=residual.value,
        residual_low=residual.low,
        residual_high=residual.high,
        hosts=runs.cell.hosts if len(runs.cell.hosts) > 1 else (),
        with_strategy=subset.with_strategy,
    )


def _spread(subset: ExplainedSubset) -> WaterfallPart:
    """Return what synchronous ranks lose because they wait for the slowest GPU; the ideal is
    without it.
    """
    missing = [gpu for gpu in subset.runs.gpus if gpu not in subset.rates]
    if missing:
        how = "" if subset.with_strategy else " with strategy=none"
        why = f"{gpu_list(missing)} did not run alone{how}: one of them may be the slowest"
        return WaterfallPart(SPREAD, None, why, above_ideal=True)
    rates = [math.exp(rate.value) for rate in subset.rates.values()]
    log_draws = [rate.draws for rate in subset.rates.values() if rate.draws is not None]
    draws = None
    if len(log_draws) == len(rates):
        drawn = np.exp(log_draws)
        draws = drawn.sum(axis=0) - len(rates) * drawn.min(axis=0)
    lost = next_run(sum(rates) - len(rates) * min(rates), draws, subset.freedom)
    return WaterfallPart(SPREAD, lost, above_ideal=True)


def _images_between(subset: ExplainedSubset, before: Step, after: Step) -> Estimate:
    """Return the images per second between two step times; with an interval where the scatter of
    both is known.
    """
    images = subset.images * 1e3  # of a step, times the ms of a second
    draws = None
    if before.draws is not None and after.draws is not None:
        # A step takes some time, however little is known of it.
        longer = np.maximum(after.draws, after.ms / WIDEST)
        shorter = np.maximum(before.draws, before.ms / WIDEST)
        draws = images / shorter - images / longer
    return next_run(images / before.ms - images / after.ms, draws, subset.freedom)
