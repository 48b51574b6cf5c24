"""The step of one GPU without any strategy: of the slowest member, or of the mean GPU where members were not measured."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import MeasuredCell, Question
from analysis.prediction.draws import Values, about, best, exactly, near
from analysis.prediction.links.model import MEASURED, SCALED
from analysis.prediction.parts.clocks import slower_together
from analysis.prediction.parts.nearest import of_nearest_size
from analysis.prediction.strategies import exchange_of
from analysis.prediction.waiting import largest_deviation

_SPREAD_OF_GPUS = (
    0.003  # of the steps of equal GPUs where fewer than two were measured: what four H200s showed
)
LEAST_STEP = 0.05  # of a step: below it no scatter of a cost takes one
_OF_BATCH, _OF_ARRAYS = (
    0.1,
    0.2,
)  # errors of a step in proportion to the batch, of own work in proportion to the arrays


@dataclass(frozen=True)
class StepPart:
    """One part, and whether something of another kind had to stand for it."""

    values: Values
    basis: str  # MEASURED, SCALED, BY_COPIES, ASSUMED of links
    why: str = ""  # a sentence where it is not measured


def base(calibration: Calibrated, question: Question) -> StepPart:
    """Return the mean step of one GPU without the strategy, in ms: the slowest member that is known, else the mean.

    Raises ValueError where no cell has this workload.
    """
    found, why = _bare(calibration, question)
    measured = dict(found)
    if waited_ranks(calibration, question) == 1:
        clocks, said = slower_together(calibration, question)
        measured = {gpu: values * clocks for gpu, values in measured.items()}
        why = "; ".join(filter(None, (why, said)))
    if question.members and all(member in measured for member in question.members):
        values = [measured[member] for member in question.members]
        return StepPart(max(values, key=best), MEASURED, why)
    if question.members in measured:  # together
        return StepPart(measured[question.members], SCALED if why else MEASURED, why)
    mean = sum(measured.values(), exactly(0.0)) / len(measured)
    return StepPart(mean + _which_gpus(calibration, question), SCALED if why else MEASURED, why)


def _which_gpus(calibration: Calibrated, question: Question) -> Values:
    """Return how far GPUs that were not measured alone may lie from their expected step, in ms."""
    count = question.ranks
    share = largest_deviation(count) if exchange_of(question).waits else 1 / math.sqrt(count)
    return near(
        0.0, share * between_gpus_ms(calibration, question), f"GPUs {question.members or count}"
    )


def of_members(calibration: Calibrated, question: Question) -> list[float]:
    """Return the step of each member in ms, if every one was measured alone; else none."""
    found = dict(_bare(calibration, question)[0])
    whole = bool(question.members) and all(member in found for member in question.members)
    return [best(found[member]) for member in question.members] if whole else []


def between_gpus_ms(calibration: Calibrated, question: Question) -> float:
    """Return the standard deviation of the mean steps of GPUs, in ms: as asked, else of those that were measured.

    It is 0.3 % of a step where fewer than two were measured.
    """
    values = [best(one) for one in dict(_bare(calibration, question)[0]).values()]
    if question.gpu_spread is not None:
        return question.gpu_spread * statistics.fmean(values)
    if len(values) < 2:
        return _SPREAD_OF_GPUS * values[0]
    return statistics.stdev(values)


def _bare(calibration: Calibrated, question: Question) -> tuple[list[tuple[object, Values]], str]:
    """Return (GPU, its step without the strategy in ms), and a sentence where that was not measured by itself."""
    of_workload = [
        one for one in calibration.cells if one.timed and one.question.workload == question.workload
    ]
    if not of_workload:
        raise ValueError(
            f"model {question.workload}: no cell of the study trains it so, and nothing says its step"
        )
    sizes = {one.question.batch_size for one in of_workload}
    if question.batch_size in sizes:
        of_size = [one for one in of_workload if one.question.batch_size == question.batch_size]
        return _bare_at(calibration, question, of_size)
    of_workload = [one for one in of_workload if not one.cpu_bound]
    nearest = sorted(
        {one.question.batch_size for one in of_workload},
        key=lambda size: abs(math.log(size / question.batch_size)),
    )[:2]
    if not nearest:
        raise ValueError(
            f"batch_size={question.batch_size}: every batch size that was measured waits for the CPU (cpu_bound), which says "
            "nothing of others; add a cell with this one, or with optimize=graph"
        )
    steps = []
    for size in nearest:
        of_size = [one for one in of_workload if one.question.batch_size == size]
        found = dict(_bare_at(calibration, replace(question, batch_size=size), of_size)[0])
        steps.append(sum(found.values(), exactly(0.0)) / len(found))
    if len(steps) == 1:
        grown = steps[0] * question.batch_size / nearest[0]
        why = f"only batch {nearest[0]} was measured: a step is in proportion to it"
        return [("", grown * about(1.0, _OF_BATCH, "batch"))], why
    slope = (steps[1] - steps[0]) / (nearest[1] - nearest[0])
    between = min(nearest) < question.batch_size < max(nearest)
    why = f"batch {question.batch_size} lies {'between' if between else 'beyond'} {min(nearest)} and {max(nearest)}"
    share = (
        question.batch_size / nearest[0]
    )  # more images take no less time, and at most as much more as they are more
    least, most = steps[0] * min(share, 1.0), steps[0] * max(share, 1.0)
    return [("", np.clip(steps[0] + slope * (question.batch_size - nearest[0]), least, most))], why


def waited_ranks(calibration: Calibrated, question: Question) -> int:
    """Return how many ranks the steps of `base` waited for each other in: 1 where GPUs ran alone."""
    of_workload = [
        one for one in calibration.cells if one.timed and one.question.workload == question.workload
    ]
    of_size = [
        one for one in of_workload if one.question.batch_size == question.batch_size
    ] or of_workload
    return max(one.ranks for one in _chosen(question, of_size)[0])


def _bare_at(
    calibration: Calibrated, question: Question, cells: Sequence[MeasuredCell]
) -> tuple[list[tuple[object, Values]], str]:
    """Return (GPU or GPUs, their step without any strategy) of the cells that say most, and why they are others."""
    chosen, why = _chosen(question, cells)
    found: dict[object, list[Values]] = {}
    for one in chosen:
        gpu = one.question.members[0] if len(one.question.members) == 1 else one.question.members
        found.setdefault(gpu, []).append(_without_strategy(calibration, one))
    return [(gpu, sum(several, exactly(0.0)) / len(several)) for gpu, several in found.items()], why


def _chosen(question: Question, cells: Sequence[MeasuredCell]) -> tuple[list[MeasuredCell], str]:
    """Return the cells that say most of a step without any strategy, and a sentence where none says it by itself."""
    here = [one for one in cells if one.question.machine == question.machine] or [*cells]
    ways = (
        ([one for one in here if one.ranks == 1 and one.question.strategy == "none"], ""),
        ([one for one in here if one.ranks == 1 and one.cost_ms is not None], ""),
        ([one for one in here if one.question.strategy == "none"], ""),
        (
            [one for one in here if one.cost_ms is not None],
            "no GPU ran alone: a step is that of several without their cost",
        ),
        (
            here,
            "the strategy's own work on one GPU was not measured: it is that of another model, by its arrays",
        ),
    )
    return next(way for way in ways if way[0])


def _without_strategy(calibration: Calibrated, cell: MeasuredCell) -> Values:
    """Return the step of a cell without what its strategy adds, in ms; at least LEAST_STEP of it."""
    assert cell.step_ms is not None
    if cell.question.strategy == "none":
        return cell.step_ms
    own = None if cell.cost_ms is not None else own_of_another_model(calibration, cell.question)
    cost = cell.cost_ms if cell.cost_ms is not None else own.values if own else exactly(0.0)
    return np.maximum(cell.step_ms - cost, LEAST_STEP * cell.step_ms)


def scatter_ms(calibration: Calibrated, question: Question) -> float:
    """Return the standard deviation of one rank's steps inside a run, in ms, at the nearest batch size."""
    cells = [
        one for one in calibration.cells if one.timed and one.question.workload == question.workload
    ]
    here = of_nearest_size(cells, question)
    alone = [one for one in here if one.ranks == 1] or here
    return statistics.median(one.scatter_ms for one in alone) if alone else 0.0


def own_of_another_model(calibration: Calibrated, question: Question) -> StepPart | None:
    """Return the own work of another model, in proportion to its arrays: a strategy enqueues one kernel for each."""
    known = [one for one in calibration.cells if one.ranks == 1 and one.cost_ms is not None]
    for one in of_nearest_size(
        [one for one in known if one.question.options == question.options], question
    ):
        if one.cost_ms is not None:
            why = f"own work is that of {one.label}, by the number of arrays"
            return StepPart(
                one.cost_ms * in_proportion_to_arrays(question, one.question), SCALED, why
            )
    return None


def in_proportion_to_arrays(question: Question, there: Question) -> Values:
    """Return the ratio of the arrays of two models; 1 where one is not known."""
    here, other = question.workload.arrays, there.workload.arrays
    ratio = here / other if here and other else 1.0
    return about(ratio, _OF_ARRAYS, f"arrays {ratio}")
