"""What lower SM clocks take from GPUs that train together: at most, as if steps followed clocks."""

import math
import statistics
from collections.abc import Mapping

import numpy as np

from analysis.study.draws import Sample, Step
from analysis.study.estimates import Estimate, Member
from analysis.study.noise_floor import CLOCK
from analysis.study.provenance import mapping
from analysis.study.runs import Runs
from benchmarks.record import finite

NAME = "other clocks than alone"
AT_MOST = (
    "at most, as if a step followed the clock; one that waits for memory follows it less; "
    "not told apart from 0"
)


def step_at_clock_of(together: Runs, step: Step, alone: Runs) -> Step | None:
    """Return what a step of one GPU takes at the mean clock of a cell; None without both clocks."""
    before, after = _clock_of_cell(alone), _clock_of_cell(together)
    if before is None or after is None:
        return None
    return _slowed(step, before, after)


def clock_loss(
    runs: Runs, alone: Mapping[Member, Runs], steps: Mapping[Member, Step]
) -> Step | None:
    """Return how much longer the slowest step is at the clocks of the members together.

    `steps` are those of members alone, with what the strategy does on one GPU. The clocks are those
    of each GPU where records have them, else the mean of a cell; None without clocks.
    """
    slowed = []
    for gpu, step in steps.items():
        before, after = _clock_of_gpu(alone[gpu], gpu), _clock_of_gpu(runs, gpu)
        if before is not None and after is not None:
            slowed.append(_slowed(step, before, after))
    slowest = max(steps, key=lambda gpu: steps[gpu].ms)
    longest: Step | None
    if len(slowed) == len(steps):
        longest = max(slowed, key=lambda step: step.ms)
    else:
        longest = step_at_clock_of(runs, steps[slowest], alone[slowest])
    if longest is None:
        return None
    unslowed = steps[slowest]
    if unslowed.draws is None and longest.draws is not None:
        unslowed = Step(unslowed.ms, np.full_like(longest.draws, unslowed.ms))
    return longest - unslowed


def _clock_of_cell(runs: Runs) -> Sample | None:
    logarithms = runs.logarithms(CLOCK)
    if not logarithms:
        return None
    name = f"{CLOCK} {runs.records[0].record_id}"
    return Sample(statistics.median(logarithms), runs.floor(CLOCK), len(logarithms), name)


def _clock_of_gpu(runs: Runs, gpu: Member) -> Sample | None:
    rank, logarithms = runs.gpus.index(gpu), []
    for record in runs.records:
        phases = mapping(mapping(record.checks.get("gpu_samples")).get("phases"))
        clocks = mapping(phases.get("timed")).get("sm_mhz")
        if isinstance(clocks, list) and len(clocks) == runs.cell.world_size:
            mhz = finite(clocks[rank])
            if mhz is not None and mhz > 0:
                logarithms.append(math.log(mhz))
    if not logarithms:
        return None
    name = f"{CLOCK} {runs.records[0].record_id} {gpu}"
    return Sample(statistics.median(logarithms), runs.floor(CLOCK), len(logarithms), name)


def _slowed(step: Step, before: Sample, after: Sample) -> Step:
    ms = step.ms * math.exp(before.value - after.value)
    if before.draws is None or after.draws is None:
        return Step(ms, None)
    unslowed = step.ms if step.draws is None else step.draws
    return Step(ms, unslowed * np.exp(before.draws - after.draws))


def reaching_0(bound: Estimate) -> Estimate:
    """Return what is at most so large, with an interval that holds 0."""
    if bound.low is None or bound.high is None:
        return bound
    return Estimate(bound.value, min(bound.low, 0.0), max(bound.high, 0.0))
