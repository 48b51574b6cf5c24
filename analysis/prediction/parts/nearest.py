"""Which measured cells are most like a question."""

import math
import statistics
from collections.abc import Iterable

from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import LOW_RANK, MeasuredCell, Question
from analysis.prediction.strategies import collective, exchange_of

# What makes another exchange of a strategy, and not only another size of it.
_SAME_EXCHANGE = ("name", "staging", "reduce", "transport", "servers")


def alike(cells: Iterable[MeasuredCell], question: Question, options: bool) -> list[MeasuredCell]:
    """Return the cells of one workload and strategy, the nearest first; `options`: with equal options."""
    found = [
        one
        for one in cells
        if one.question.workload == question.workload
        and one.question.strategy == question.strategy
        and (not options or one.question.options == question.options)
    ]
    return sorted(found, key=lambda one: distance(one.question, question))


def of_nearest_size(cells: Iterable[MeasuredCell], question: Question) -> list[MeasuredCell]:
    """Return the cells whose batch size is nearest to that of a question: with small batches GPUs wait for the CPU."""
    cells = list(cells)
    sizes = {one.question.batch_size for one in cells}
    nearest = min(sizes, key=lambda size: abs(math.log(size / question.batch_size)), default=0)
    return [one for one in cells if one.question.batch_size == nearest]


def rate_share(calibration: Calibrated, question: Question) -> float:
    """Return images per second, of those that the median step gives: the median of the cells that are alike.

    A rate counts every step; a power cap, or servers that answer late, make some steps much longer than the median.
    """
    key = rate_share, question.workload, question.strategy
    if key not in calibration.memo:
        same = [one for one in calibration.cells if one.question.workload == question.workload]
        of_strategy = [one for one in same if one.question.strategy == question.strategy]
        found = (
            [share for one in cells if (share := one.rate_share) is not None]
            for cells in (of_strategy, same)
        )
        calibration.memo[key] = statistics.median(next(filter(None, found), [1.0]))
    return float(calibration.memo[key])


def nearest_exchange(calibration: Calibrated, question: Question) -> MeasuredCell | None:
    """Return the cell whose exchange alone is most like that of the question."""
    by_nccl = collective(question) is not None or question.hosts > 1
    found = [
        one
        for one in calibration.cells
        if one.exchange_ms is not None
        and one.ranks > 1
        and all(one.question.option(name) == question.option(name) for name in _SAME_EXCHANGE)
        and (one.question.hosts > 1) == (question.hosts > 1)
        and (one.question.wire.transport == question.wire.transport or not by_nccl)
        and one.question.shares_gpu == question.shares_gpu
        and one.question.low_rank == question.low_rank
    ]
    if question.network is not None:  # what the user describes is not what was measured
        return None
    return min(found, key=lambda one: distance(one.question, question), default=None)


def refuse_unknown_sizes(calibration: Calibrated, question: Question) -> None:
    """Refuse a forecast of PowerSGD unless its exchange was measured on as many ranks over the same wire. Raises ValueError."""
    if not question.low_rank or question.ranks < 2:
        return
    near_one = nearest_exchange(calibration, question)
    if near_one is None or _sends(near_one.question) != _sends(question):
        hosts = f" of {question.hosts} hosts" if question.hosts > 1 else ""
        raise ValueError(
            f"strategy {question.strategy} with comm_hook={LOW_RANK} sends rank × (rows + columns) numbers of each layer's "
            f"matrix, and no record says how large these are; add such a cell on {question.ranks} ranks{hosts} over "
            f"{question.wire}"
        )


def _sends(question: Question) -> tuple[object, ...]:
    """Return what two questions share whose ranks send the same over the same wire."""
    return question.workload, question.options, question.wire, question.gpus, question.hosts


def distance(one: Question, other: Question) -> tuple[float, ...]:
    """Return how far two questions lie from each other, the weightiest first."""
    options = len(set(one.options) ^ set(other.options))
    return (
        float(one.shares_gpu != other.shares_gpu),
        float(one.wire.transport != other.wire.transport),
        float(one.halves != other.halves),
        options,
        float(one.wire != other.wire),
        float(one.workload != other.workload),
        abs(math.log(one.ranks / other.ranks)),
        float(one.machine != other.machine),
        float(exchange_of(one).waits != exchange_of(other).waits),
        abs(math.log(one.batch_size / other.batch_size)),
    )
