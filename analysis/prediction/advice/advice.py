"""Rank cells that could be run by their images per second, and say which of them are worth measuring before one is chosen.

A cell that was measured counts by its runs, another by its forecast. What the next run may differ by is left out: the choice is
between means. Draws of forecasts are widened as their intervals are. Neither they nor the ends of intervals are above the rate
of the same GPUs without any exchange, whose step was measured and may be shorter by its scatter, nor above MOST_RATE of the best.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from analysis.prediction.advice.beliefs import Beliefs
from analysis.prediction.advice.options import Candidate
from analysis.prediction.assembled import assemble, between_runs_ms
from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import Question
from analysis.prediction.draws import Values, best, deviation, exactly
from analysis.prediction.forecast import FEWEST_HELD_OUT, conformal, growth_of, is_scored
from analysis.prediction.holdout import KnownScores
from analysis.prediction.parts.base import base
from analysis.prediction.parts.nearest import rate_share

AS_FAST = 0.05  # chance to be as fast as the first, from which a cell cannot be told from it
OF_NORMAL = 1.645  # standard deviations that hold 90 % of a normal number
MOST_RATE = 2.0  # as far above the best value as 0 is below it: beliefs are symmetric
MOST_CONTENDERS = 48  # cells that are compared with each other; slower ones are listed only


@dataclass(frozen=True)
class RankedCell:
    """A cell with its rate in images per second. Without an interval, too few cells could be held out."""

    option: Candidate
    rate: float
    low: float | None
    high: float | None
    runs: int  # that were measured; 0: it is a forecast
    fastest: float = 0.0  # the chance that no other cell is faster
    as_fast_as_first: float = 0.0  # the chance to be as fast as the first, or faster
    bounded: bool = (
        False  # the upper end of its interval is that of compute alone, or MOST_RATE of its rate
    )

    @property
    def as_fast(self) -> bool:
        """Whether it cannot be told from the first."""
        return self.as_fast_as_first >= AS_FAST


@dataclass(frozen=True)
class WorthMeasuring:
    """A cell worth measuring, and what a wrong choice costs on average once it and those before it are measured."""

    cell: RankedCell
    loss: float  # images per second


@dataclass(frozen=True)
class Advice:
    """The cells in order, the first to be chosen, and what would make the choice surer."""

    ranked: tuple[RankedCell, ...]
    refused: tuple[tuple[Candidate, str], ...]  # cells without a forecast, and why
    loss: float  # what the choice of the first costs on average against the fastest, images per second
    next_cells: tuple[WorthMeasuring, ...]

    @property
    def first(self) -> RankedCell:
        """The cell to choose."""
        return self.ranked[0]


def advise(calibration: Calibrated, options: Sequence[Candidate], known: KnownScores) -> Advice:
    """Return the advice; of equal forecasts the option that comes first is first. `known`: scores of held-out cells.

    Raises ValueError where no option has a forecast.
    """
    cells: list[RankedCell] = []
    rates: list[Values] = []
    refused: list[tuple[Candidate, str]] = []
    for option in options:
        try:
            cell, rate = _believed(calibration, option, known)
        except ValueError as error:  # NoLink too
            refused.append((option, str(error)))
            continue
        cells.append(cell)
        rates.append(rate)
    if not cells:
        raise ValueError(
            refused[0][1]
            if refused
            else "the study has no strategy to advise on; accepted with --strategy"
        )
    order = sorted(range(len(cells)), key=lambda place: -round(cells[place].rate, 6))
    near, rest = order[:MOST_CONTENDERS], order[MOST_CONTENDERS:]
    beliefs = Beliefs.of(
        [rates[place] for place in near], [_of_a_run(calibration, cells[place]) for place in near]
    )
    chances, faster = beliefs.chances(), beliefs.as_fast_as(0)
    ranked = [
        replace(cells[place], fastest=float(chance), as_fast_as_first=float(as_fast))
        for place, chance, as_fast in zip(near, chances, faster, strict=True)
    ]
    next_cells = tuple(WorthMeasuring(ranked[place], loss) for place, loss in beliefs.next_cells())
    return Advice(
        (*ranked, *(cells[place] for place in rest)), tuple(refused), beliefs.loss(), next_cells
    )


def _believed(
    calibration: Calibrated, option: Candidate, known: KnownScores
) -> tuple[RankedCell, Values]:
    """Return a cell and draws of its rate over many runs. Raises NoLink, ValueError."""
    question = option.question
    images = rate_share(calibration, question) * question.ranks * question.batch_size * 1e3
    measured = [
        one
        for one in calibration.cells
        if one.step_ms is not None and same_cell(one.question, question)
    ]
    if measured:
        runs = sum(len(one.record_ids) for one in measured)
        steps = sum(
            (one.step_ms for one in measured if one.step_ms is not None), exactly(0.0)
        ) / len(measured)
        step, half = (
            best(steps),
            OF_NORMAL * math.sqrt(1 + 1 / runs) * between_runs_ms(calibration, question),
        )
        images = (
            step * fmean(one.images_per_second for one in measured) or images
        )  # the rate of the report
        least = _shortest_ms(calibration, question, step, base(calibration, question).values)
        ends = images / (step + half), images / max(step - half, least)
        cell = RankedCell(option, images / step, *ends, runs, bounded=step - half < least)
        return cell, images / np.maximum(steps, least)
    made, scores = assemble(calibration, question), known.of(question)
    enough, growth = (
        is_scored(question) and len(scores) >= FEWEST_HELD_OUT,
        growth_of(calibration, question),
    )
    factor = conformal(scores) if enough else OF_NORMAL
    step = best(made.steps())
    half = factor * growth * deviation(made.steps())
    least = _shortest_ms(calibration, question, step, made.bare.values)
    low, high = (
        (images / (step + half), images / max(step - half, least)) if enough else (None, None)
    )
    steps = made.steps(next_run=False)
    steps = np.maximum(step + growth * factor / OF_NORMAL * (steps - step), least)
    return RankedCell(
        option, images / step, low, high, 0, bounded=enough and step - half < least
    ), images / steps


def _shortest_ms(
    calibration: Calibrated, question: Question, step_ms: float, bare: Values
) -> float:
    """Return the shortest step that is believed in: that without any exchange, less its scatter (OF_NORMAL, 90 %).

    It is at least the step ÷ MOST_RATE, and at most the step.
    """
    scatter = math.hypot(deviation(bare), between_runs_ms(calibration, question))
    return min(max(best(bare) - OF_NORMAL * scatter, step_ms / MOST_RATE), step_ms)


def same_cell(one: Question, other: Question) -> bool:
    """Tell whether two questions are one cell, but for the order of its ranks."""
    here, there = (
        (
            each.workload,
            each.batch_size,
            each.options,
            each.wire,
            each.hosts,
            each.machine,
            each.shares_gpu,
        )
        for each in (one, other)
    )
    return here == there and frozenset(one.members) == frozenset(other.members)


def _of_a_run(calibration: Calibrated, cell: RankedCell) -> float:
    """Return the variance of the rate of one run."""
    question = cell.option.question
    step_ms = (
        rate_share(calibration, question) * question.ranks * question.batch_size * 1e3 / cell.rate
    )
    return (cell.rate * between_runs_ms(calibration, question) / step_ms) ** 2
