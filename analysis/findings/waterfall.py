"""Why a subset trains slower than its members would alone: the efficiency waterfall, from control cells.

Every part is a difference of step times in ms, and each comes from another measurement, so that the residual is a check
and not zero by construction (METHOD.md, Waterfall):

    spread      Σ members alone − N × slowest member alone         strategy=none on each GPU alone
    overhead    step with the strategy − step without, one rank    the strategy on each GPU alone
    clocks      slowest of (member alone + overhead) × (its SM     samples of the GPUs (losses.clocks)
                clock ÷ that together)^e, minus that alone
    contention  step of N ranks without exchange − slowest alone   strategy=none on the subset
                at the clocks of these ranks
    exposed     steps with and without exchange in turn (ABBA),    the cell itself: strategy/cost_ms
                minus the same on one GPU, else minus the overhead
                on several hosts: inside them      the strategy on each host alone with all its GPUs
                and between them                   the rest of it
                after the last gradient, in a      observed steps, with exchange and without
                slower backward, and the rest      (losses.exchange)
    waiting     of it, waiting for a peer of equal speed           the cell's trace: trace/wait_ms_per_step

Subtracted one after the other they become images per second. Where no GPU ran alone without a strategy, but the clocks differ,
the waterfall begins with the slowest member alone with the strategy.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from analysis.findings import labels
from analysis.findings.communication.by_hosts import COMMUNICATION, Parts, by_hosts
from analysis.findings.communication.exposed import COST
from analysis.findings.communication.steps import Step, mean_step, step_of
from analysis.findings.control_cells import WITHOUT, ControlRuns
from analysis.findings.estimates import Sample, exponential, freedom, next_run, scaled, slowest
from analysis.findings.labels import gpu_list, several
from analysis.findings.losses.clocks import NAME as CLOCKS
from analysis.findings.losses.clocks import Clocks, clock_part
from analysis.findings.losses.exchange import in_parts
from analysis.findings.model import Estimate, Member, Waterfall, WaterfallPart
from analysis.findings.next_run.interval import WIDEST
from analysis.findings.runs import Runs
from analysis.findings.study import Study

WAIT = "trace/wait_ms_per_step"
SPREAD, OVERHEAD, CONTENTION, WAITING = (
    "spread between GPUs",
    "strategy overhead on one GPU",
    "contention",
    "waiting for a peer",
)


def waterfalls(study: Study) -> tuple[tuple[Waterfall, ...], tuple[str, ...]]:
    """Return a waterfall for every subset with a member that ran alone with strategy=none, and a sentence on the others."""
    controls, clocks = ControlRuns(study), Clocks(study)
    found, without = [], []
    for runs in study.timed:
        if runs.world_size == 1 or runs.strategy == WITHOUT:
            continue
        made = _waterfall(study, runs, controls, clocks)
        if made:
            found.append(made)
        else:
            without.append(f"{labels.label(study, runs)} on {gpu_list(runs.gpus)}")
    found.sort(key=lambda one: -len(one.hosts))  # most hosts first, otherwise as they ran
    sentence = f"where the loss of {several(without)} comes from: run with waterfall=true" if without else ""
    return tuple(found), (sentence,) if sentence else ()


def _waterfall(study: Study, runs: Runs, controls: ControlRuns, clocks: Clocks) -> Waterfall | None:
    """Return the waterfall of one subset; None where no member ran alone, or only with the strategy and at the same clock."""
    size, batch = runs.world_size, runs.batch_size
    without, alone = controls.without(runs), controls.alone(runs)
    measured = runs.log_rate
    ran = {gpu: without[(gpu,)] for gpu in runs.gpus if (gpu,) in without}
    with_strategy = not ran
    ran = ran or {gpu: alone[gpu] for gpu in runs.gpus if gpu in alone}
    bare = {gpu: rate for gpu, one in ran.items() if (rate := one.log_rate) is not None}
    if not bare or measured is None or not batch:
        return None
    of_its_clock = ran[min(bare, key=lambda gpu: bare[gpu].value)]
    if with_strategy and not clocks.differ(runs, of_its_clock):
        return None
    images = size * batch * 1e3  # a step's images, times the ms of a second
    value, draws = slowest(bare.values())
    others = [alone[gpu].log_rate for gpu in runs.gpus if gpu in alone]
    others.append(without[runs.gpus].log_rate if runs.gpus in without else None)
    others.append(_as_share(runs.difference(COST), images / math.exp(measured.value)))
    degrees = freedom([measured, *bare.values(), *(one for one in others if one is not None)])
    ideal = scaled(exponential(next_run(value, draws, freedom(bare.values()))), size)
    whole = _step(measured, images)
    of_slowest = Step(batch * 1e3 / math.exp(value), None if draws is None else batch * 1e3 / np.exp(draws))
    parts = [_spread(runs, bare, degrees, with_strategy)]
    spent, overhead = of_slowest, None if with_strategy else _overhead(runs, bare, alone, batch)
    computing = {gpu: _step(rate, batch * 1e3) for gpu, rate in bare.items()}
    slowed = clocks.lost(runs, ran, {gpu: one + overhead if overhead else one for gpu, one in computing.items()})
    own_work = _cost_alone(runs, alone) or overhead
    at_clock = own_work and (clocks.at_clock_of(runs, own_work, of_its_clock) or own_work)
    for name, step, why in (
        (OVERHEAD, overhead, _why_no_overhead(with_strategy, overhead)),
        (CLOCKS, slowed, "" if slowed else _why_no_clocks(runs)),
        _contention(runs, without if not with_strategy else {}, clocks, of_its_clock, of_slowest, images),
        *by_hosts(
            runs,
            in_parts(
                _communication(
                    runs,
                    at_clock,
                    _for_the_slowest(of_slowest, bare, batch) if len(bare) == size else None,
                    with_strategy,
                ),
                runs,
                alone,
            ),
            controls.hosts(runs),
            own_work,
        ),
    ):
        lost = _lost(images, spent, step, degrees) if step else None
        ms = next_run(step.ms, step.draws, degrees) if step else None
        part = WaterfallPart(name, lost, why, ms=ms)
        if name == CLOCKS and step:
            images_per_second = math.exp(measured.value)
            part = clock_part(part, clocks.members(runs, ran), clocks.exponent(runs), images_per_second, whole.ms)
        parts.append(part)
        spent = spent + step if step else spent
    residual = _between(images, spent, whole, degrees)
    return Waterfall(
        labels.label(study, runs),
        runs.gpus,
        runs.key,
        ideal,
        exponential(measured.next_run()),
        tuple(parts),
        residual.value,
        residual.low,
        residual.high,
        runs.cell.hosts if len(runs.cell.hosts) > 1 else (),
        with_strategy,
    )


def _as_share(difference: Sample | None, ms: float) -> Sample | None:
    """Return a difference of step times as a share of a step."""
    if difference is None or difference.floor is None:
        return None
    floor = dataclasses.replace(difference.floor, deviation=difference.floor.deviation / ms)
    return dataclasses.replace(difference, value=difference.value / ms, floor=floor)


def _step(rate: Sample, images: float) -> Step:
    """Return the step time that belongs to the logarithm of a rate."""
    return Step(images / math.exp(rate.value), None if rate.draws is None else images / np.exp(rate.draws))


def _lost(images: float, before: Step, part: Step, degrees: float) -> Estimate:
    """Return the images per second that one part takes; with an interval where the scatter of the part alone is known too."""
    if before.draws is None and part.draws is not None:
        before = Step(before.ms, np.full_like(part.draws, before.ms))
    return _between(images, before, before + part, degrees)


def _between(images: float, before: Step, after: Step, degrees: float) -> Estimate:
    """Return the images per second between two step times, whose samples have these degrees of freedom together."""
    draws = None
    if before.draws is not None and after.draws is not None:  # a step takes some time, however little is known of it
        draws = images / np.maximum(before.draws, before.ms / WIDEST) - images / np.maximum(
            after.draws, after.ms / WIDEST
        )
    return next_run(images / before.ms - images / after.ms, draws, degrees)


def _spread(runs: Runs, bare: Mapping[Member, Sample], degrees: float, with_strategy: bool) -> WaterfallPart:
    """Return what synchronous ranks lose because they wait for the slowest GPU; the ideal is without it."""
    missing = [gpu for gpu in runs.gpus if gpu not in bare]
    if missing:
        how = "" if with_strategy else " with strategy=none"
        why = f"{gpu_list(missing)} did not run alone{how}: one of them may be the slowest"
        return WaterfallPart(SPREAD, None, why, above_ideal=True)
    rates = [math.exp(rate.value) for rate in bare.values()]
    known = [rate.draws for rate in bare.values() if rate.draws is not None]
    draws = None
    if len(known) == len(rates):
        drawn = np.exp(known)
        draws = drawn.sum(axis=0) - len(rates) * drawn.min(axis=0)
    return WaterfallPart(SPREAD, next_run(sum(rates) - len(rates) * min(rates), draws, degrees), above_ideal=True)


def _overhead(runs: Runs, bare: Mapping[Member, Sample], alone: Mapping[Member, Runs], batch: int) -> Step | None:
    """Return what the strategy adds to a step of one rank, the mean over the members."""
    steps = [
        _step(rate, batch * 1e3) - _step(bare[gpu], batch * 1e3)
        for gpu in runs.gpus
        if gpu in bare and gpu in alone and (rate := alone[gpu].log_rate) is not None
    ]
    return mean_step(steps)


def _cost_alone(runs: Runs, alone: Mapping[Member, Runs]) -> Step | None:
    """Return what steps with and without exchange in turn say that the strategy costs on one GPU, the mean over the members."""
    return mean_step([step for gpu in runs.gpus if gpu in alone and (step := step_of(alone[gpu], COST)) is not None])


def _why_no_overhead(with_strategy: bool, overhead: Step | None) -> str:
    if with_strategy:
        return "it is in the ideal: no GPU ran alone without a strategy (waterfall=true adds that)"
    return "" if overhead else "the strategy was not measured on one of these GPUs alone"


def _why_no_clocks(runs: Runs) -> str:
    return "the clocks were not sampled" if runs.cell.device == "cuda" else "CPU workers have no SM clock"


def _contention(
    runs: Runs,
    without: Mapping[tuple[Member, ...], Runs],
    clocks: Clocks,
    alone: Runs,
    of_slowest: Step,
    images: float,
) -> tuple[str, Step | None, str]:
    """Return what ranks take from each other without any exchange, beside clocks: host memory, the CPU."""
    together = without.get(runs.gpus)
    if together is None or together.log_rate is None:
        return CONTENTION, None, "strategy=none did not run on this subset"
    slowed = clocks.at_clock_of(together, of_slowest, alone) if runs.clock_mhz else None
    return CONTENTION, _step(together.log_rate, images) - (slowed or of_slowest), ""


def _for_the_slowest(of_slowest: Step, bare: Mapping[Member, Sample], batch: int) -> Step:
    """Return how long the mean rank waits in a step for a slower GPU: that is the spread, which the ideal is without."""
    behind = mean_step([of_slowest - _step(rate, batch * 1e3) for rate in bare.values()])
    assert behind is not None  # there is a member
    return behind


def _communication(runs: Runs, alone: Step | None, for_the_slowest: Step | None, with_strategy: bool) -> Parts:
    """Return the exposed communication without what the strategy costs on one GPU, and the waiting, which a trace shows.

    A trace shows how long the mean rank waits; the part in which it waits for a slower GPU is the spread.
    """
    whole = step_of(runs, COST)
    if whole is None:
        why = "steps without the exchange were not timed (benchmark.exposed_rounds=0)"
        return [(COMMUNICATION, None, why), (WAITING, None, why)]
    if with_strategy and alone is None:  # the ideal has it already
        why = "what the strategy costs on one GPU was not measured"
        return [(COMMUNICATION, None, why), (WAITING, None, why)]
    why = "" if alone else "this includes what the strategy costs on one GPU"
    exposed = whole - alone if alone else whole
    waiting = step_of(runs, WAIT)
    if waiting is None:
        return [
            (COMMUNICATION, exposed, why),
            (WAITING, None, "part of the exposed communication: no trace tells them apart"),
        ]
    if for_the_slowest is None:
        return [(COMMUNICATION, exposed, why), (WAITING, None, "how long ranks wait for slower GPUs is not known")]
    waiting = waiting - for_the_slowest
    if waiting.ms <= 0 or exposed.ms <= 0:
        return [
            (COMMUNICATION, exposed, why),
            (WAITING, None, "ranks wait for slower GPUs only, or the wait costs no step time"),
        ]
    if waiting.ms > exposed.ms:  # part of it was hidden behind compute
        return [(COMMUNICATION, None, "all of it is waiting"), (WAITING, exposed, why)]
    return [(COMMUNICATION, exposed - waiting, why), (WAITING, waiting, "")]
