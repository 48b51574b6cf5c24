"""A forecast: what a step of a cell should take, its parts, its interval and the null model beside it.

    forecast(calibration, question) -> Forecast

The interval is the best value ± q · the deviation of the draws · the growth outside what was measured. q comes from cells of the
study that were held out one by one (split-conformal, Lei et al. 2018: the quantile of |error| ÷ deviation); with fewer than
FEWEST_HELD_OUT of them no error is claimed. No interval goes below a step of the same GPUs without any exchange, less as many
deviations of that. The null model says that nothing changes: the step of one GPU, and the cost of the
nearest measured cell.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from analysis.prediction.assembled import Assembled, assemble
from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import Question
from analysis.prediction.draws import best, deviation
from analysis.prediction.links.model import ASSUMED, BY_COPIES, MEASURED
from analysis.prediction.parts.base import LEAST_STEP, StepPart
from analysis.prediction.parts.nearest import distance, rate_share
from analysis.study.names import of_unit

LEVEL = 0.9  # of an interval
FEWEST_HELD_OUT = 10
NOT_SCORED = "no error is claimed: cells of one GPU, or without an exchange, are not held out"
INTERPOLATED, EXTRAPOLATED, ASSUMED_NETWORK = "interpolated", "extrapolated", "assumed_network"


@dataclass(frozen=True)
class Forecast:
    """What a cell should give. Times are ms; without enough held-out cells `low` and `high` are None."""

    step_ms: float
    low: float | None
    high: float | None
    images_per_second: float  # as a run gives them, whose mean step is longer than its median (parts.nearest.rate_share)
    efficiency: float  # against one GPU with the same strategy
    cost_ms: float  # the step minus that of the same GPUs without exchange
    exposed_ms: float  # tail, contention and waiting: what one GPU with this strategy does not have
    tail_ms: float
    contention_ms: float
    own_work_ms: float
    waiting_ms: float
    null_step_ms: float
    null_cost_ms: float
    compute_ms: float  # a step of the same GPUs without any exchange, alone: no interval goes below it, but for its scatter
    compute_deviation_ms: float
    deviation_ms: float  # of the step, by the draws
    growth: float  # of the interval, outside what was measured
    basis: str  # interpolated, extrapolated, assumed_network
    widest: str  # the part that most of the deviation comes from
    why: tuple[
        str, ...
    ]  # a sentence for each part that was not measured, and for a missing interval
    records: tuple[str, ...]  # of the calibration

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


def forecast(calibration: Calibrated, question: Question, scores: Sequence[float] = ()) -> Forecast:
    """Return the forecast of a cell. `scores`: |error| ÷ deviation of held-out cells.

    Raises NoLink (a ValueError) where a wire is not known, ValueError for an unknown strategy or workload.
    """
    return forecast_of(assemble(calibration, question), scores)


def forecast_of(made: Assembled, scores: Sequence[float] = ()) -> Forecast:
    """Return the forecast of a cell whose parts are known."""
    calibration, question = made.calibration, made.question
    bare, own, waiting, launch = made.bare.values, made.own.values, made.waiting, made.launch_ms
    steps, played = made.steps(), made.played
    without = max(best(bare) + best(waiting), launch)
    cost = best(steps) - without
    own_ms = min(best(own), max(cost, 0.0))
    null_cost = max(_null_cost(calibration, question), (LEAST_STEP - 1) * without)
    basis, why = _basis(
        calibration, question, (made.bare, made.gamma, made.own), made.times.sources
    )
    spread, growth = deviation(steps), growth_of(calibration, question)
    sentence = (
        NOT_SCORED
        if not is_scored(question)
        else too_few(len(scores))
        if len(scores) < FEWEST_HELD_OUT
        else ""
    )
    compute_ms, ms = max(best(bare), launch), best(steps)
    found = Forecast(
        step_ms=ms,
        low=None,
        high=None,
        images_per_second=rate_share(calibration, question)
        * question.ranks
        * question.batch_size
        * 1e3
        / ms,
        efficiency=(compute_ms + own_ms) / ms,
        cost_ms=cost,
        exposed_ms=cost - own_ms + best(waiting),
        tail_ms=best(played.tail_ms),
        contention_ms=best(played.contention_ms),
        own_work_ms=own_ms,
        waiting_ms=best(waiting),
        null_step_ms=without + null_cost,
        null_cost_ms=null_cost,
        compute_ms=compute_ms,
        compute_deviation_ms=math.hypot(deviation(bare), deviation(made.noise)),
        deviation_ms=spread,
        growth=growth,
        basis=basis,
        widest=of_unit(made.widest, question.unit),
        why=tuple(of_unit(one, question.unit) for one in (*why, made.why_waiting, sentence) if one),
        records=calibration.record_ids,
    )
    if sentence:
        return found
    low, high = interval(found, conformal(scores))
    return replace(found, low=low, high=high)


def interval(made: Forecast, factor: float) -> tuple[float, float]:
    """Return the ends of the interval of a step: ± factor · deviation · growth, but not below what compute alone may take."""
    wide = factor * made.growth
    least = min(made.compute_ms - wide * made.compute_deviation_ms, made.step_ms)
    return max(
        made.step_ms - wide * made.deviation_ms, least, 0.0
    ), made.step_ms + wide * made.deviation_ms


def is_scored(question: Question) -> bool:
    """Tell whether cells of this kind are held out, so that an error can be claimed."""
    return question.ranks > 1 and question.strategy != "none"


def growth_of(calibration: Calibrated, question: Question) -> float:
    """Return the factor by which an interval grows beyond the ranks that were measured."""
    return 1 + math.log(max(1.0, question.ranks / _most_ranks(calibration, question)))


def _null_cost(calibration: Calibrated, question: Question) -> float:
    """Return the cost of the nearest measured cell of several ranks, or of one for one, unchanged; 0 where there is none.

    The nearest is of the same workload and strategy first: a null model knows nothing of wires and numbers of ranks. What
    another strategy costs one GPU says nothing.
    """
    if question.strategy == "none":
        return 0.0
    alike = [
        one
        for one in calibration.cells
        if one.ranks == 1 and one.question.strategy == question.strategy
    ]
    cells = calibration.several if question.ranks > 1 else alike
    found = [one for one in cells if one.cost_ms is not None and one.question.strategy != "none"]
    nearest = min(found, key=lambda one: _unlike(one.question, question), default=None)
    return 0.0 if nearest is None or nearest.cost_ms is None else best(nearest.cost_ms)


def _unlike(one: Question, other: Question) -> tuple[object, ...]:
    """Return a sort key: how unlike two cells are for the null model, workload and places before strategy."""
    places = (
        one.workload != other.workload,
        (one.hosts > 1) != (other.hosts > 1),
        one.shares_gpu != other.shares_gpu,
    )
    return (*places, one.strategy != other.strategy, distance(one, other))


def _basis(
    calibration: Calibrated, question: Question, parts: Sequence[StepPart], sources: set[str]
) -> tuple[str, tuple[str, ...]]:
    """Return how well founded a forecast is, and a sentence for each part that was not measured."""
    why = [one.why for one in parts]
    if BY_COPIES in sources:
        why.append(
            f"no collective {question.wire.way} was measured: it is in proportion to peer copies"
        )
    if ASSUMED in sources or (question.hosts > 1 and question.network is not None):
        return ASSUMED_NETWORK, (*why, "the network between hosts was described, not measured")
    inside = question.ranks <= _most_ranks(calibration, question)
    measured = sources <= {MEASURED} and all(one.basis == MEASURED for one in parts)
    return INTERPOLATED if inside and measured else EXTRAPOLATED, tuple(why)


def _most_ranks(calibration: Calibrated, question: Question) -> int:
    """Return the largest number of ranks whose steps were timed with this workload."""
    found = (
        one.ranks
        for one in calibration.cells
        if one.timed and one.question.workload == question.workload
    )
    return max(found, default=1)


def too_few(held_out: int) -> str:
    """Return why no error is claimed where so many cells could be held out."""
    cells = f"{held_out} cell{'' if held_out == 1 else 's'}"
    return f"not enough to state an error: {cells} could be held out, {FEWEST_HELD_OUT} are needed"


def conformal(scores: Sequence[float], level: float = LEVEL) -> float:
    """Return the factor that holds a further score with this probability.

    It is the ⌈(m + 1) · level⌉-th least of m, at most the largest.
    """
    place = math.ceil((len(scores) + 1) * level)
    return sorted(scores)[min(place, len(scores)) - 1]
