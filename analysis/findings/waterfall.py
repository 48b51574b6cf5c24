"""Why a subset trains slower than its members would alone: the efficiency waterfall, from control cells.

Every part is a difference of step times in ms, and each comes from another measurement, so that the residual is a check
and not zero by construction (METHOD.md, Waterfall):

    spread      Σ members alone − N × slowest member alone         strategy=none on each GPU alone
    overhead    step with the strategy − step without, one rank    the strategy on each GPU alone
    clocks      (slowest alone + overhead) × (its SM clock ÷       samples of the GPUs
                clock of the cell − 1)
    contention  step of N ranks without exchange − slowest alone   strategy=none on the subset
                at the clocks of these ranks
    exposed     steps with and without exchange in turn (ABBA),    the cell itself: strategy/cost_ms
                minus the same on one GPU, else minus the overhead
                on several hosts: inside them      the strategy on each host alone with all its GPUs
                and between them                   the rest of it
    waiting     of it, waiting for a peer of equal speed           the cell's trace: trace/wait_ms_per_step

Subtracted one after the other they become images per second.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping

import numpy as np

from analysis.findings import labels
from analysis.findings.communication.by_hosts import COMMUNICATION, Parts, by_hosts
from analysis.findings.communication.exposed import COST
from analysis.findings.communication.steps import Step, mean_step, step_of
from analysis.findings.control_cells import WITHOUT, ControlRuns
from analysis.findings.estimates import Sample, exponential, freedom, next_run, scaled, slowest
from analysis.findings.labels import gpu_list, several
from analysis.findings.model import Estimate, Member, Waterfall, WaterfallPart
from analysis.findings.next_run.floors import CLOCK
from analysis.findings.next_run.interval import WIDEST
from analysis.findings.runs import Runs
from analysis.findings.study import Study

WAIT = "trace/wait_ms_per_step"
SPREAD, OVERHEAD, CLOCKS, CONTENTION, WAITING = (
    "spread between GPUs",
    "strategy overhead on one GPU",
    "other clocks than alone",
    "contention",
    "waiting for a peer",
)


def waterfalls(study: Study) -> tuple[tuple[Waterfall, ...], tuple[str, ...]]:
    """Return a waterfall for every subset with a member that ran alone with strategy=none, and a sentence on the others."""
    controls = ControlRuns(study)
    found, without = [], []
    for runs in study.timed:
        if runs.world_size == 1 or runs.strategy == WITHOUT:
            continue
        made = _waterfall(study, runs, controls)
        if made:
            found.append(made)
        else:
            without.append(f"{labels.label(study, runs)} on {gpu_list(runs.gpus)}")
    found.sort(key=lambda one: -len(one.hosts))  # most hosts first, otherwise as they ran
    sentence = f"where the loss of {several(without)} comes from: run with waterfall=true" if without else ""
    return tuple(found), (sentence,) if sentence else ()


def _waterfall(study: Study, runs: Runs, controls: ControlRuns) -> Waterfall | None:
    """Return the waterfall of one subset; None where no member ran alone without a strategy."""
    size, batch = runs.world_size, runs.batch_size
    without, alone = controls.without(runs), controls.alone(runs)
    bare = {gpu: rate for gpu in runs.gpus if (gpu,) in without and (rate := without[(gpu,)].log_rate) is not None}
    measured = runs.log_rate
    if not bare or measured is None or not batch:
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
    parts = [_spread(runs, bare, degrees)]
    spent, overhead = of_slowest, _overhead(runs, bare, alone, batch)
    of_its_clock = without[(min(bare, key=lambda gpu: bare[gpu].value),)]
    computing = of_slowest + overhead if overhead else of_slowest
    own_work = _cost_alone(runs, alone) or overhead
    at_clock = own_work and (_at_clock_of(runs, own_work, of_its_clock) or own_work)
    for name, step, why in (
        (OVERHEAD, overhead, "" if overhead else "the strategy was not measured on one of these GPUs alone"),
        _clocks(runs, of_its_clock, computing),
        _contention(runs, without, of_its_clock, of_slowest, images),
        *by_hosts(
            runs,
            _communication(runs, at_clock, _for_the_slowest(of_slowest, bare, batch) if len(bare) == size else None),
            controls.hosts(runs),
            own_work,
        ),
    ):
        after = spent + step if step else spent
        parts.append(WaterfallPart(name, _lost(images, spent, after, degrees) if step else None, why))
        spent = after
    residual = _lost(images, spent, whole, degrees)
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


def _lost(images: float, before: Step, after: Step, degrees: float) -> Estimate:
    """Return the images per second between two step times, whose samples have these degrees of freedom together."""
    draws = None
    if before.draws is not None and after.draws is not None:  # a step takes some time, however little is known of it
        draws = images / np.maximum(before.draws, before.ms / WIDEST) - images / np.maximum(
            after.draws, after.ms / WIDEST
        )
    return next_run(images / before.ms - images / after.ms, draws, degrees)


def _spread(runs: Runs, bare: Mapping[Member, Sample], degrees: float) -> WaterfallPart:
    """Return what synchronous ranks lose because they wait for the slowest GPU; the ideal is without it."""
    missing = [gpu for gpu in runs.gpus if gpu not in bare]
    if missing:
        why = f"{gpu_list(missing)} did not run alone with strategy=none: one of them may be the slowest"
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


def _at_clock_of(together: Runs, step: Step, alone: Runs) -> Step | None:
    """Return what a step of the slowest member, or a part of it, takes at the SM clock that ranks have together.

    None where one of both clocks was not sampled.
    """
    one, several = _log_clock(alone), _log_clock(together)
    if one is None or several is None:
        return None
    draws = None
    if step.draws is not None and one.draws is not None and several.draws is not None:
        draws = step.draws * np.exp(one.draws - several.draws)
    return Step(step.ms * math.exp(one.value - several.value), draws)


def _log_clock(runs: Runs) -> Sample | None:
    found = runs.logarithms(CLOCK)
    name = f"{CLOCK} {runs.records[0].record_id}"
    return Sample(statistics.median(found), runs.floor(CLOCK), len(found), name) if found else None


def _clocks(runs: Runs, alone: Runs, computing: Step) -> tuple[str, Step | None, str]:
    """Return what computing takes longer because the GPUs have lower SM clocks together than the slowest has alone."""
    slowed = _at_clock_of(runs, computing, alone)
    if slowed is None:
        on_gpus = runs.cell.device == "cuda"
        return CLOCKS, None, "the clocks were not sampled" if on_gpus else "CPU workers have no SM clock"
    return CLOCKS, slowed - computing, ""


def _contention(
    runs: Runs, without: Mapping[tuple[Member, ...], Runs], alone: Runs, of_slowest: Step, images: float
) -> tuple[str, Step | None, str]:
    """Return what ranks take from each other without any exchange, beside clocks: host memory, the CPU."""
    together = without.get(runs.gpus)
    if together is None or together.log_rate is None:
        return CONTENTION, None, "strategy=none did not run on this subset"
    slowed = _at_clock_of(together, of_slowest, alone) if _log_clock(runs) else None
    return CONTENTION, _step(together.log_rate, images) - (slowed or of_slowest), ""


def _for_the_slowest(of_slowest: Step, bare: Mapping[Member, Sample], batch: int) -> Step:
    """Return how long the mean rank waits in a step for a slower GPU: that is the spread, which the ideal is without."""
    behind = mean_step([of_slowest - _step(rate, batch * 1e3) for rate in bare.values()])
    assert behind is not None  # there is a member
    return behind


def _communication(runs: Runs, alone: Step | None, for_the_slowest: Step | None) -> Parts:
    """Return the exposed communication without what the strategy costs on one GPU, and the waiting, which a trace shows.

    A trace shows how long the mean rank waits; the part in which it waits for a slower GPU is the spread.
    """
    whole = step_of(runs, COST)
    if whole is None:
        why = "steps without the exchange were not timed (benchmark.exposed_rounds=0)"
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
