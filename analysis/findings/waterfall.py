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
                on several hosts, inside them      the strategy on each host alone with all its GPUs
                and between them                   the rest of it
                on one host, after the last        observed steps, with exchange and without
                gradient, in a slower backward,    (losses.exchange)
                and the rest
    waiting     of it, waiting for a peer of equal speed           the cell's trace: trace/wait_ms_per_step

Subtracted one after the other they become images per second. Where no GPU ran alone without a strategy, but the clocks differ,
the waterfall begins with the slowest member alone with the strategy.
"""

import math

import numpy as np

from analysis.findings import labels
from analysis.findings.communication.steps import Step
from analysis.findings.control_cells import WITHOUT, ControlRuns
from analysis.findings.estimates import exponential, freedom, next_run, scaled, slowest
from analysis.findings.labels import gpu_list, several
from analysis.findings.losses.clocks import NAME as CLOCKS
from analysis.findings.losses.clocks import Clocks, clock_part
from analysis.findings.losses.subset import ExplainedSubset
from analysis.findings.model import Estimate, Waterfall, WaterfallPart
from analysis.findings.next_run.interval import WIDEST
from analysis.findings.study import Study

SPREAD = "spread between GPUs"


def waterfalls(study: Study) -> tuple[tuple[Waterfall, ...], tuple[str, ...]]:
    """Return a waterfall for every subset with a member that ran alone with strategy=none, and a sentence on the others."""
    controls, clocks = ControlRuns(study), Clocks(study)
    found, without = [], []
    for runs in study.timed:
        if runs.world_size == 1 or runs.strategy == WITHOUT:
            continue
        if subset := ExplainedSubset.of(runs, controls, clocks):
            found.append(_waterfall(labels.label(study, runs), subset))
        else:
            without.append(f"{labels.label(study, runs)} on {gpu_list(runs.gpus)}")
    found.sort(key=lambda one: -len(one.hosts))  # most hosts first, otherwise as they ran
    sentence = f"where the loss of {several(without)} comes from: run with waterfall=true" if without else ""
    return tuple(found), (sentence,) if sentence else ()


def _waterfall(label: str, subset: ExplainedSubset) -> Waterfall:
    runs, spent = subset.runs, subset.slowest_step
    parts = [_spread(subset)]
    for name, step, why in subset.parts():
        part = WaterfallPart(name, _lost(subset, spent, step), why, ms=_next_run(subset, step))
        parts.append(_with_clocks(part, subset) if name == CLOCKS and step else part)
        spent = spent + step if step else spent
    residual = _between(subset, spent, subset.step)
    return Waterfall(
        label=label,
        gpus=runs.gpus,
        key=runs.key,
        ideal=_ideal(subset),
        measured=exponential(subset.log_rate.next_run()),
        parts=tuple(parts),
        residual=residual.value,
        residual_low=residual.low,
        residual_high=residual.high,
        hosts=runs.cell.hosts if len(runs.cell.hosts) > 1 else (),
        with_strategy=subset.with_strategy,
    )


def _ideal(subset: ExplainedSubset) -> Estimate:
    """Return the images per second of N times the slowest member alone."""
    rates = subset.rates.values()
    return scaled(exponential(next_run(*slowest(rates), freedom(rates))), subset.runs.world_size)


def _spread(subset: ExplainedSubset) -> WaterfallPart:
    """Return what synchronous ranks lose because they wait for the slowest GPU; the ideal is without it."""
    missing = [gpu for gpu in subset.runs.gpus if gpu not in subset.rates]
    if missing:
        how = "" if subset.with_strategy else " with strategy=none"
        why = f"{gpu_list(missing)} did not run alone{how}: one of them may be the slowest"
        return WaterfallPart(SPREAD, None, why, above_ideal=True)
    rates = [math.exp(rate.value) for rate in subset.rates.values()]
    known = [rate.draws for rate in subset.rates.values() if rate.draws is not None]
    draws = None
    if len(known) == len(rates):
        drawn = np.exp(known)
        draws = drawn.sum(axis=0) - len(rates) * drawn.min(axis=0)
    lost = next_run(sum(rates) - len(rates) * min(rates), draws, subset.freedom)
    return WaterfallPart(SPREAD, lost, above_ideal=True)


def _with_clocks(part: WaterfallPart, subset: ExplainedSubset) -> WaterfallPart:
    """Return the part of the clocks with what it rests on."""
    members = subset.clocks.members(subset.runs, subset.members)
    follows, rate = subset.clocks.exponent(subset.runs), math.exp(subset.log_rate.value)
    return clock_part(part, members, follows, rate, subset.step.ms)


def _next_run(subset: ExplainedSubset, step: Step | None) -> Estimate | None:
    return None if step is None else next_run(step.ms, step.draws, subset.freedom)


def _lost(subset: ExplainedSubset, spent: Step, part: Step | None) -> Estimate | None:
    """Return the images per second that one part takes; with an interval where the scatter of the part alone is known too."""
    if part is None:
        return None
    if spent.draws is None and part.draws is not None:
        spent = Step(spent.ms, np.full_like(part.draws, spent.ms))
    return _between(subset, spent, spent + part)


def _between(subset: ExplainedSubset, before: Step, after: Step) -> Estimate:
    """Return the images per second between two step times."""
    images = subset.images * 1e3  # of a step, times the ms of a second
    draws = None
    if before.draws is not None and after.draws is not None:  # a step takes some time, however little is known of it
        longer, shorter = np.maximum(after.draws, after.ms / WIDEST), np.maximum(before.draws, before.ms / WIDEST)
        draws = images / shorter - images / longer
    return next_run(images / before.ms - images / after.ms, draws, subset.freedom)
