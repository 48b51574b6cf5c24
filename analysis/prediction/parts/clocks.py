"""Clocks: GPUs at their power cap run slower together than alone, and a step follows its clock to some part.

    step together = step alone · (clock alone ÷ clock together)^e

Both clocks are the mean SM clocks that samples of measured cells show. e lies between 0, all time is memory's, and 1. Pairs of
cells of this workload, alone and together, say e and with it the step. Without such a pair the step stays as it is, and its
interval reaches what clocks may do. A workload that no cell showed at its cap keeps its clock.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import MeasuredCell, Question
from analysis.prediction.draws import Values, best, exactly, near
from analysis.prediction.parts.nearest import of_nearest_size

CAPPED = 0.5  # share of samples at the cap from which a workload has a power term
FOLLOWS_BEFORE, FOLLOWS_SPREAD = 0.5, 0.29  # mean and deviation of any number from 0 to 1
_UNKNOWN_CLOCK = 0.03  # how far clocks together may lie below those alone: ResNet-50, compiled, on two and four H200s
_LEAST_APART = 0.004  # of logarithms of clocks: half of an H200's smallest step


def slower_together(calibration: Calibrated, question: Question) -> tuple[Values, str]:
    """Return the factor on a step of GPUs that were measured alone, and a sentence where their clock together is assumed."""
    here = [
        one for one in calibration.cells if one.timed and one.question.workload == question.workload
    ]
    clocked = [one for one in here if one.sm_mhz]
    alone = [one for one in clocked if one.ranks == 1]
    if question.ranks < 2 or not alone or max(one.capped_share for one in clocked) < CAPPED:
        return exactly(1.0), ""
    together = [one for one in clocked if one.ranks > 1]
    if not together:
        drop = np.abs(near(0.0, _UNKNOWN_CLOCK, "clock together"))
        return np.exp(
            _follows([]) * drop
        ), "at the power cap the clock together may be lower than alone: no cell shows it"
    nearest = min(
        together, key=lambda one: (one.question.machine != question.machine, _away(one, question))
    )
    below, pairs = _below(nearest, alone), _pairs(together, alone)
    if pairs:
        return np.exp(_follows(pairs) * below), ""
    factor = np.exp(_follows([]) * below)
    factor[0] = 1.0
    return (
        factor,
        "no pair of cells, alone and together, says how far a step follows its clock at the power cap",
    )


def _away(one: MeasuredCell, question: Question) -> float:
    return abs(math.log(one.ranks / question.ranks))


def _below(cell: MeasuredCell, alone: Sequence[MeasuredCell]) -> float:
    """Return the logarithm of clock alone ÷ clock together, with those alone of the same batch and machine if there are any.

    A small batch waits for the CPU, and its clock is high.
    """
    of_size = of_nearest_size(alone, cell.question)
    same = [one for one in of_size if one.question.machine == cell.question.machine] or of_size
    return math.log(statistics.fmean(one.sm_mhz for one in same) / cell.sm_mhz)


def _pairs(
    together: Sequence[MeasuredCell], alone: Sequence[MeasuredCell]
) -> list[tuple[float, float]]:
    """Return (logarithm of the steps' ratio, of the clocks') of cells of one machine and batch, without their strategy."""
    found = []
    for one in together:
        for other in alone:
            here, there = one.question, other.question
            steps = [_bare_ms(each) for each in (one, other)]
            if (here.machine, here.batch_size) == (there.machine, there.batch_size) and all(steps):
                apart = math.log(other.sm_mhz / one.sm_mhz)
                if abs(apart) > _LEAST_APART:
                    found.append((math.log(steps[0] / steps[1]), apart))
    return found


def _bare_ms(cell: MeasuredCell) -> float:
    """Return a step without its strategy in ms; 0 where it was not measured."""
    if cell.step_ms is None or (cell.question.strategy != "none" and cell.cost_ms is None):
        return 0.0
    return best(cell.step_ms) - (0.0 if cell.cost_ms is None else best(cell.cost_ms))


def _follows(pairs: Sequence[tuple[float, float]]) -> Values:
    """Return e: what pairs say and what is known before them, each by its variance."""
    before = near(FOLLOWS_BEFORE, FOLLOWS_SPREAD, "e")
    if not pairs:
        return np.clip(before, 0.0, 1.0)
    said = sum(y * x for y, x in pairs) / sum(x * x for _, x in pairs)
    scatter = 0.005 / math.sqrt(
        sum(x * x for _, x in pairs) / len(pairs)
    )  # 0.5 %: two steps, each ± 0.3 %
    seen, weight = near(said, scatter, "e seen"), 1 / scatter**2
    prior = 1 / FOLLOWS_SPREAD**2
    return np.clip((seen * weight + before * prior) / (weight + prior), 0.0, 1.0)
