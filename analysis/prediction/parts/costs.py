"""What measured costs say beside tail: γ, a property of the workload and the wire, and own work, one of the strategy.

Own work is what a GPU alone showed. Where none ran alone, it is what tail and contention leave of a measured cost.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from analysis.prediction import tables
from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import MeasuredCell, Question
from analysis.prediction.draws import Values, about, best, deviation, exactly, near, weighted
from analysis.prediction.links.model import HOST_MEMORY, MEASURED, NETWORK, SCALED, WAYS
from analysis.prediction.parts.base import StepPart, in_proportion_to_arrays, own_of_another_model
from analysis.prediction.parts.exchange import exchange, play
from analysis.prediction.parts.nearest import alike, distance, of_nearest_size
from analysis.prediction.strategies import occupies
from analysis.study.names import of_unit

# Mean and spread of γ before anything was measured: overlap slows compute by 18.9 % on average (arXiv 2507.03114).
SLOWED_BEFORE, SLOWED_SPREAD = 0.189, 0.189
OF_TRAFFIC = 0.5  # how far γ is from being in proportion to the traffic


def slowed(calibration: Calibrated, question: Question) -> StepPart:
    """Return γ on this wire: by probes, else by measured costs whose own work is known, drawn to what was published."""
    if not occupies(question) or question.ranks < 2:
        return StepPart(exactly(0.0), MEASURED)
    key = (
        slowed,
        question.workload,
        question.wire,
        question.shares_gpu,
        question.low_rank,
        question.network is None,
    )
    if key not in calibration.memo:
        calibration.memo[key] = _slowed(calibration, question)
    found: StepPart = calibration.memo[key]
    return found


def _slowed(calibration: Calibrated, question: Question) -> StepPart:
    """Return γ: what was seen and what is published, each weighted by one over its variance."""
    together = [one for one in calibration.cells if _same_occupation(one.question, question)]
    same = [one for one in together if one.question.workload == question.workload]
    seen = _seen(calibration, same) or _seen(calibration, together)
    why = ""
    alike = [
        one for one in calibration.cells if _same_occupation(one.question, question, settings=False)
    ]
    if not seen and (
        seen := _seen(
            calibration, [one for one in alike if one.question.workload == question.workload]
        )
    ):
        why = f"γ {question.wire.way} was not measured: that {WAYS[question.wire.transport]} with other settings"
    elif not seen and (seen := _seen_with_more_traffic(calibration, question)):
        why = f"γ {question.wire.way} was not measured: that over {HOST_MEMORY}, by the bytes that pass in a second"
    elif not seen:
        why = f"γ {question.wire.way} was not measured: {SLOWED_BEFORE:g} ± {SLOWED_SPREAD:g}, as published"
    before = near(SLOWED_BEFORE, SLOWED_SPREAD, "slowed")
    values = weighted([(before, SLOWED_SPREAD**2), *((one, _variance(one)) for one in seen)])
    return StepPart(np.clip(values, 0.0, None), SCALED if why else MEASURED, why)


def _variance(one: Values) -> float:
    """Return how far a number may be off, squared; none is known exactly."""
    return max(deviation(one), 1e-3) ** 2


def _seen_with_more_traffic(calibration: Calibrated, question: Question) -> list[Values]:
    """Return γ over a network by that of host memory: both pass the GPUs' host links, and kernels wait for the memory behind.

    It is in proportion to the bytes that pass in a second. Only from more to less: a γ of little traffic says nothing of much.
    """
    if question.wire.transport != NETWORK or question.low_rank:
        return []
    found, here = [], _bytes_per_ms(calibration, question)
    for one in calibration.cells:
        there = one.question
        alike = there.workload == question.workload and not there.low_rank
        if there.wire.transport == HOST_MEMORY and alike and there.ranks > 1:
            share = here / _bytes_per_ms(calibration, there)
            if occupies(there) and share < 1:
                by_traffic = about(share, OF_TRAFFIC, "traffic")
                found += [gamma * by_traffic for gamma in _seen(calibration, [one])]
    return found


def _bytes_per_ms(calibration: Calibrated, question: Question) -> float:
    """Return the bytes that each rank sends, by the time that their exchange takes alone."""
    return question.sent_bytes / best(exchange(calibration, question).whole_ms)


def _seen(calibration: Calibrated, cells: Sequence[MeasuredCell]) -> list[Values]:
    """Return γ of cells by their probes; where there is none, by their costs."""
    probes = [(one, found) for one in cells if (found := tables.slowed(one.tables))]
    if probes:
        return [
            near(found.gamma, max(found.error, 1e-3), f"probe {one.record_ids[0]}")
            for one, found in probes
        ]
    return [made for one in cells if (made := _slowed_by_cost(calibration, one)) is not None]


def _same_occupation(one: Question, other: Question, settings: bool = True) -> bool:
    """Tell whether a cell's exchange takes the same resources as that of a question: its wire and GPUs.

    Without `settings` the same transport is enough.
    """
    wire = one.wire == other.wire if settings else one.wire.transport == other.wire.transport
    alike = wire and one.shares_gpu == other.shares_gpu
    return (
        one.ranks > 1
        and occupies(one)
        and alike
        and one.low_rank == other.low_rank
        and other.network is None
    )


def _slowed_by_cost(calibration: Calibrated, cell: MeasuredCell) -> Values | None:
    """Return γ by what a measured cost leaves beside own work that one GPU showed, and tail."""
    own = _own_alone(calibration, cell.question)
    if own is None or cell.cost_ms is None:
        return None
    played = play(calibration, cell.question, own.values, exactly(0.0))
    overlap = np.maximum(played.overlap_ms, 1e-6)
    return (cell.cost_ms - own.values - played.tail_ms) / overlap


def own_work(calibration: Calibrated, question: Question, gamma: Values) -> StepPart:
    """Return what the strategy adds to a step of one GPU, in ms."""
    if question.strategy == "none":
        return StepPart(exactly(0.0), MEASURED)
    if found := _own_alone(calibration, question):
        return found
    for allowed in _likest_first(question):
        if found := _own_left_over(calibration, question, gamma, allowed):
            return found
    if found := own_of_another_model(calibration, question):
        return found
    if any(
        one.ranks == 1 and one.timed for one in alike(calibration.cells, question, options=True)
    ):
        why, add = (
            "it ran on one GPU, but no GPU ran without it",
            "strategy=none on the same GPU (waterfall=true)",
        )
    else:
        placed = {
            one.question.shares_gpu
            for one in calibration.cells
            if one.question.strategy == question.strategy
        }
        why = (
            "its cells do not show what it costs a step" if placed else "no cell of it was measured"
        )
        add = f"strategy={question.strategy} on one GPU"
        if placed == {not question.shares_gpu}:
            why = f"no cell of it was measured with servers on GPUs of {'ranks' if question.shares_gpu else 'their own'}"
            add = f"strategy={question.strategy} on {question.ranks} GPUs"
    said = f"strategy {question.strategy}: {why}, so nothing says what it adds to a step; add a cell with {add}"
    raise ValueError(of_unit(said, question.unit))


def _own_alone(calibration: Calibrated, question: Question) -> StepPart | None:
    """Return the cost that a GPU alone showed, in turn with steps without, else between cells."""
    alone = [
        one
        for one in alike(calibration.cells, question, options=True)
        if one.ranks == 1 and one.timed
    ]
    alone = of_nearest_size(alone, question)
    costs = [one.cost_ms for one in alone if one.cost_ms is not None]
    if costs:
        # A window of few steps may say nothing: the cost of one with compiled code was 0.1 ± 6.6 ms.
        return StepPart(
            np.maximum(weighted([(one, _variance(one)) for one in costs]), 0.0), MEASURED
        )
    bare = [one for one in calibration.cells if one.question.strategy == "none" and one.timed]
    pairs = [
        (one.step_ms, other.step_ms)
        for one in alone
        for other in bare
        if _same_gpu(one.question, other.question)
    ]
    steps = [
        with_it - without
        for with_it, without in pairs
        if with_it is not None and without is not None
    ]
    return (
        StepPart(np.maximum(sum(steps, exactly(0.0)) / len(steps), 0.0), MEASURED)
        if steps
        else None
    )


def _same_gpu(one: Question, other: Question) -> bool:
    """Tell whether two cells train the same on the same GPUs, whatever their strategy."""
    here, there = (
        (each.workload, each.batch_size, each.members, each.machine) for each in (one, other)
    )
    return here == there


def _likest_first(question: Question) -> list[Callable[[Question], bool]]:
    """Return which cells may show the own work of a question, the likest first: of several hosts and of other models last."""
    rules = itertools.product((True, False), repeat=3)
    return [
        functools.partial(
            _may_show,
            other=question,
            same_hosts=hosts,
            same_workload=workload,
            same_strategy=strategy,
        )
        for hosts, workload, strategy in rules
    ]


def _may_show(
    one: Question, other: Question, same_hosts: bool, same_workload: bool, same_strategy: bool
) -> bool:
    """Tell whether a cell may show the own work of another, by rules that are kept or given up."""
    alike = one.strategy == other.strategy if same_strategy else _alike_in_kind(one, other)
    return (
        alike
        and one.shares_gpu == other.shares_gpu
        and one.low_rank == other.low_rank
        and ((one.hosts > 1) == (other.hosts > 1) or not same_hosts)
        and (one.workload == other.workload if same_workload else one.options == other.options)
    )


def _own_left_over(
    calibration: Calibrated, question: Question, gamma: Values, allowed: Callable[[Question], bool]
) -> StepPart | None:
    """Return what tail and contention leave of the cost of the nearest cell that is allowed."""
    found = [
        one for one in calibration.several if one.cost_ms is not None and allowed(one.question)
    ]
    if not found:
        return None
    nearest = min(found, key=lambda one: distance(one.question, question))
    there = nearest.question
    gamma = gamma if there.wire == question.wire else slowed(calibration, there).values
    played = play(calibration, there, exactly(0.0), gamma)
    assert nearest.cost_ms is not None
    left = np.maximum(nearest.cost_ms - played.tail_ms - played.contention_ms, 0.0)
    same_workload = there.workload == question.workload
    if not same_workload:
        left = left * in_proportion_to_arrays(question, there)
    why = (
        ""
        if same_workload and there.options == question.options
        else f"own work is that of {nearest.label}"
    )
    return StepPart(left, MEASURED if not why else SCALED, why)


def _alike_in_kind(one: Question, other: Question) -> bool:
    """Tell whether two strategies do the same on a GPU: servers that wait for all ranks, and those that do not."""
    return one.strategy.replace("_async", "_sync") == other.strategy.replace("_async", "_sync")
