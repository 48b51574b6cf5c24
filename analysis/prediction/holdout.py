"""Held-out cells: each forecast from the others, and how far the forecast and the null model were off.

condition   the cells of one condition (workload, strategy, wire, ranks), with every collective timed in their ranks
size        each size of several GPUs from the smaller ones, without any link measured on as many GPUs
transport   the steps of every transport but the most frequent; exchanges alone stay, since they are links
batch       every cell of a batch size, those of one GPU too, with every collective timed in their ranks
model       every cell of several GPUs of one model; its steps on one GPU stay
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import MeasuredCell, Question
from analysis.prediction.draws import best, deviation
from analysis.prediction.forecast import (
    FEWEST_HELD_OUT,
    LEVEL,
    Forecast,
    conformal,
    forecast,
    interval,
)
from analysis.study.names import of_unit

CONDITION, SIZE, TRANSPORT, BATCH, MODEL = "condition", "size", "transport", "batch", "model"
WAYS = (CONDITION, SIZE, TRANSPORT, BATCH, MODEL)
_MEAN_ABSOLUTE = math.sqrt(2 / math.pi)  # of a normal number, in standard deviations


@dataclass(frozen=True)
class HeldOut:
    """A cell and its forecast from others; `forecast` is None where `why` says so."""

    cell: MeasuredCell
    forecast: Forecast | None
    why: str = ""
    low: float | None = None  # of the step in ms, by the scores of the other cells
    high: float | None = None

    @property
    def step_ms(self) -> float:
        """The measured step."""
        assert self.cell.step_ms is not None
        return best(self.cell.step_ms)

    @property
    def cost_ms(self) -> float | None:
        """The measured cost of communication, by steps with and without it in turn; None where it was not measured."""
        return None if self.cell.cost_ms is None else best(self.cell.cost_ms)

    @property
    def floor(self) -> float | None:
        """What a perfect forecast of the cost would be off by on average, as a share: measured costs scatter between runs."""
        if self.cell.cost_ms is None or best(self.cell.cost_ms) <= 0:
            return None
        return _MEAN_ABSOLUTE * deviation(self.cell.cost_ms) / best(self.cell.cost_ms)

    @property
    def score(self) -> float:
        """|error| of the step ÷ deviation of the forecast, and ÷ the growth outside what was measured."""
        assert self.forecast is not None
        expected_ms = max(self.forecast.deviation_ms * self.forecast.growth, 1e-9)
        return abs(self.step_ms - self.forecast.step_ms) / expected_ms

    @property
    def inside(self) -> bool | None:
        """Whether the measured step lies in the interval; None without one."""
        return (
            None if self.low is None or self.high is None else self.low <= self.step_ms <= self.high
        )


def hold_out(calibration: Calibrated, way: str, suspect: bool = False) -> list[HeldOut]:
    """Return every held-out cell, in order of the study; `suspect`: cells that a check casts doubt on too.

    Raises ValueError for a way that the study has no cells for.
    """
    targets = [
        one
        for one in calibration.several
        if one.question.strategy != "none" and (suspect or one.valid)
    ]
    groups = _GROUPS[way](calibration, targets) if targets else []
    if not groups:
        raise ValueError(
            f"--holdout {way}: {of_unit(_NEEDS[way if targets else CONDITION], calibration.unit)}"
        )
    found: dict[int, HeldOut] = {}
    for cells, others in groups:
        for cell in cells:
            try:
                found[id(cell)] = HeldOut(cell, forecast(others, cell.question))
            except ValueError as error:
                found[id(cell)] = HeldOut(cell, None, str(error))
    held = [found[id(cell)] for cell in targets if id(cell) in found]
    return [_with_interval(one, held) for one in held]


def scores(held: Iterable[HeldOut]) -> list[float]:
    """Return the scores of the cells that have a forecast."""
    return [one.score for one in held if one.forecast is not None]


class KnownScores:
    """The scores of the cells of a calibration, held out so that as much is unknown as of a question."""

    def __init__(self, calibration: Calibrated) -> None:
        self._calibration = calibration
        self._of = functools.cache(self._of_way)

    def of(self, question: Question) -> Sequence[float]:
        """Return the scores for a question: of batch sizes held out where nobody measured its own, else of conditions."""
        same = [one.question for one in self._calibration.cells if one.timed]
        sizes = {one.batch_size for one in same if one.workload == question.workload}
        return self._of(CONDITION if question.batch_size in sizes else BATCH)

    def _of_way(self, way: str) -> list[float]:
        """Return the scores of one way of holding out; none where there is nothing to hold out."""
        try:
            return scores(hold_out(self._calibration, way))
        except ValueError:  # there is nothing to hold out
            return []


def _with_interval(one: HeldOut, held: Sequence[HeldOut]) -> HeldOut:
    """Return a cell with the interval that the others' scores give."""
    others = scores(other for other in held if other is not one)
    if one.forecast is None or len(others) < FEWEST_HELD_OUT:
        return one
    low, high = interval(one.forecast, conformal(others, LEVEL))
    return replace(one, low=low, high=high)


Group = tuple[list[MeasuredCell], Calibrated]


def _conditions(calibration: Calibrated, targets: Sequence[MeasuredCell]) -> list[Group]:
    """Return each condition of the targets, with the calibration that lacks all cells of it."""
    groups = _by(targets, _condition)
    return [(cells, calibration.without(_equals(_condition, key))) for key, cells in groups]


def _condition(cell: MeasuredCell) -> tuple[Any, ...]:
    """Return what cells of one condition share."""
    question = cell.question
    return (
        question.workload,
        question.batch_size,
        question.options,
        question.wire,
        question.gpus,
        question.hosts,
    )


def _sizes(calibration: Calibrated, targets: Sequence[MeasuredCell]) -> list[Group]:
    """Return the cells of each number of ranks but the fewest, with the calibration of fewer ranks alone."""
    several = {one.ranks for one in targets if one.question.hosts == 1}
    groups = _by([one for one in targets if one.question.hosts == 1], lambda one: one.ranks)
    return [
        (cells, calibration.without(lambda one: False, most_ranks=size - 1))
        for size, cells in groups
        if size > min(several)
    ]


def _transports(calibration: Calibrated, targets: Sequence[MeasuredCell]) -> list[Group]:
    """Return the cells of each transport but the most frequent, with the calibration that lacks their steps."""
    common = Counter(one.question.wire.transport for one in targets).most_common(1)
    groups = _by(targets, lambda one: one.question.wire.transport)
    made = []
    for transport, cells in groups:
        if transport == common[0][0]:
            continue
        blinded = tuple(
            replace(one, step_ms=None, cost_ms=None)
            if one.ranks > 1 and one.question.wire.transport == transport
            else one
            for one in calibration.cells
        )
        made.append((cells, replace(calibration, cells=blinded, memo={})))
    return made


def _batches(calibration: Calibrated, targets: Sequence[MeasuredCell]) -> list[Group]:
    """Return the cells of each batch size of a workload that has several, with the calibration without that size."""
    sizes: dict[Any, set[int]] = defaultdict(set)
    for one in calibration.cells:
        if one.timed:
            sizes[one.question.workload].add(one.question.batch_size)
    groups = _by([one for one in targets if len(sizes[one.question.workload]) > 1], _batch)
    return [(cells, calibration.without(_equals(_batch, key))) for key, cells in groups]


def _batch(cell: MeasuredCell) -> tuple[Any, ...]:
    return cell.question.workload, cell.question.batch_size


def _models(calibration: Calibrated, targets: Sequence[MeasuredCell]) -> list[Group]:
    """Return the cells of each model, where there are several, with the calibration without its cells of several GPUs."""
    groups = _by(targets, _model)
    if len(groups) < 2:
        return []
    return [(cells, calibration.without(_equals(_model, key))) for key, cells in groups]


def _model(cell: MeasuredCell) -> str:
    return cell.question.workload.model if cell.ranks > 1 else ""


def _equals(of: Callable[[MeasuredCell], Any], key: Any) -> Callable[[MeasuredCell], bool]:
    return lambda one: of(one) == key


def _by(
    cells: Iterable[MeasuredCell], key: Callable[[MeasuredCell], Any]
) -> list[tuple[Any, list[MeasuredCell]]]:
    """Return cells in groups of equal keys, in the order of their first."""
    groups: dict[Any, list[MeasuredCell]] = defaultdict(list)
    for one in cells:
        groups[key(one)].append(one)
    return list(groups.items())


_GROUPS: dict[str, Callable[[Calibrated, Sequence[MeasuredCell]], list[Group]]] = {
    CONDITION: _conditions,
    SIZE: _sizes,
    TRANSPORT: _transports,
    BATCH: _batches,
    MODEL: _models,
}
_NEEDS = {
    CONDITION: "the study has no valid training cell of several GPUs",
    SIZE: "the study has training cells of one size of several GPUs only",
    TRANSPORT: "all training cells of several GPUs have the same transport",
    BATCH: "all training cells of a model have the same batch size",
    MODEL: "all training cells of several GPUs have the same model",
}
