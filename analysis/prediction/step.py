"""The step of a cell, put together from its parts. All times are draws in ms.

    step = bare + tail + γ · overlap + local cost + waiting

bare        the step of one GPU without the strategy
tail        what of the exchange goes on after the backward pass
overlap     the time in which an exchange runs beside backward, which is slower by γ meanwhile
local cost  what the strategy adds to a step of one GPU
waiting     for the slowest of all ranks
"""

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import log_ndtr

from analysis.prediction.calibration import CalibrationData, MeasuredCell
from analysis.prediction.draws import (
    Draws,
    average,
    constant,
    deviation,
    inverse_variance_mean,
    mean,
    normal,
    scaled_normal,
)
from analysis.prediction.links import HOST_MEMORY, MEASURED, NETWORK, SCALED, UnknownLink
from analysis.prediction.query import CellQuery
from analysis.prediction.strategies import (
    BucketTimes,
    bucket_times,
    collective,
    exchange_of,
    occupies,
    overlaps,
    refuse_unknown,
)
from analysis.study.names import of_unit

FORWARD_SHARE = 1 / 3  # of a step: a backward pass takes twice as long as a forward pass
MOST_GAMMA = 0.95  # compute always goes on
# γ before anything was measured: overlap slows compute by 18.9 % on average (arXiv 2507.03114).
PUBLISHED_GAMMA, PUBLISHED_SPREAD = 0.189, 0.189
LEAST_STEP = 0.05  # of a step: below it no scatter of a cost takes one
# Standard deviations as shares.
OF_TRAFFIC = 0.5  # of γ in proportion to the traffic
OF_BATCH = 0.1  # of a step in proportion to the batch
OF_WAITING = 0.25  # of a wait that follows from a 95th percentile
OF_GPUS = 0.003  # between equal GPUs where fewer than two were measured: what four H200s showed


@dataclass(frozen=True)
class StepPart:
    """One part of a step, and a sentence where something else stands for its measurement."""

    draws: Draws
    why: str = ""


@dataclass(frozen=True)
class Replay:
    """One step with its exchange, and what the exchange adds to it, in ms."""

    step_ms: Draws
    tail_ms: Draws
    contention_ms: Draws  # γ · overlap
    overlap_ms: Draws


def replay(
    ready_ms: Sequence[Draws],
    exchange_ms: Sequence[Draws],
    backward_ms: Draws,
    update_ms: Draws,
    gamma: Draws,
    after_ms: Draws | float = 0.0,
) -> Replay:
    """Replay the buckets of a step: one stream carries their exchanges, in order.

    Bucket j is ready once compute has done `ready_ms[j]` of work, and starts when the one before
    it has ended. Compute is slower by γ while an exchange runs. The backward pass ends after
    `backward_ms` of work; `after_ms` follows it and the last bucket.
    Source: Shi et al., arXiv 1805.03812; arXiv 2507.03114 (slower compute during exchanges).
    """
    gamma = np.clip(gamma, 0.0, MOST_GAMMA)
    work_done = now = stream_free = overlap = 0.0 * backward_ms
    for bucket_work, bucket_ms in [*zip(ready_ms, exchange_ms, strict=True), (backward_ms, 0.0)]:
        work = np.maximum(bucket_work - work_done, 0.0)
        # All buckets so far are ready, so the stream is busy without a gap until it is free.
        busy = np.maximum(stream_free - now, 0.0)
        elapsed = np.minimum(work / (1 - gamma), work + gamma * busy)
        overlap = overlap + np.minimum(busy, elapsed)
        now = now + elapsed
        work_done = work_done + work
        stream_free = np.maximum(now, stream_free) + bucket_ms
    tail = stream_free - now + after_ms
    return Replay(now + tail + update_ms, tail, now - backward_ms, overlap)


@functools.lru_cache(maxsize=256)
def expected_max(means: tuple[float, ...], deviation: float) -> tuple[float, float]:
    """Return the mean and the standard deviation of the largest of normal numbers.

    Integrated, not by √(2 ln n): 0.564 and 0.826 for two standard ones, 3.25 for 1,024.
    """
    if deviation <= 0:
        return max(means), 0.0
    x = np.linspace(min(means) - 9 * deviation, max(means) + 9 * deviation, 4001)
    log_below = np.zeros_like(x)
    for value in set(means):
        log_below += means.count(value) * log_ndtr((x - value) / deviation)
    probability = np.diff(np.exp(log_below))
    middle = (x[1:] + x[:-1]) / 2
    largest = float((middle * probability).sum())
    variance = float(((middle - largest) ** 2 * probability).sum())
    return largest, math.sqrt(variance)


def distance(here: CellQuery, there: CellQuery) -> tuple[float, ...]:
    """Return how far two queries lie from each other, the weightiest difference first."""
    return (
        float(here.shares_gpu != there.shares_gpu),
        float(here.transport != there.transport),
        float(here.halves != there.halves),
        float(len(set(here.options) ^ set(there.options))),
        float(here.wire != there.wire),
        float(here.workload != there.workload),
        abs(math.log(here.ranks / there.ranks)),
        float(here.machine != there.machine),
        abs(math.log(here.batch_size / there.batch_size)),
    )


def matching_cells(
    cells: Iterable[MeasuredCell], query: CellQuery, *same: str
) -> list[MeasuredCell]:
    """Return the cells that equal a query in some of its properties, the nearest first."""
    matching = []
    for cell in cells:
        if all(getattr(cell.query, name) == getattr(query, name) for name in same):
            matching.append(cell)
    return sorted(matching, key=lambda cell: distance(cell.query, query))


def of_nearest_batch(cells: Sequence[MeasuredCell], query: CellQuery) -> list[MeasuredCell]:
    """Return the cells of the nearest batch size: with small batches GPUs wait for the CPU."""

    def batch_distance(cell: MeasuredCell) -> float:
        return abs(math.log(cell.query.batch_size / query.batch_size))

    nearest = min(cells, key=batch_distance, default=None)
    if nearest is None:
        return []
    return [cell for cell in cells if cell.query.batch_size == nearest.query.batch_size]


# --- bare: the step of one GPU


@dataclass(frozen=True)
class BareStep:
    """The step of one GPU without the strategy, in ms."""

    draws: Draws  # of the slowest GPU of the query, where all were measured; else of the mean GPU
    spread_ms: float  # standard deviation between GPUs
    member_ms: tuple[float, ...]  # of each GPU of the query, where all ran alone
    waited_ranks: int  # of which the measured steps are the slowest's; 1: GPUs ran alone
    why: str


def bare_step(calibration: CalibrationData, query: CellQuery) -> BareStep:
    """Return the step of one GPU without the strategy. Raises ValueError for a new workload."""
    cells = calibration.timed(query.workload)
    if not cells:
        raise ValueError(
            f"model {query.workload}: no cell of the study trains it so, and nothing says its step"
        )
    of_batch = matching_cells(cells, query, "batch_size")
    chosen, why = _bare_cells(query, of_batch or cells)
    waited_ranks = max(cell.ranks for cell in chosen)
    if of_batch:
        steps = _steps_by_gpu(calibration, chosen)
    else:
        step, why = _step_of_new_batch(calibration, query, cells)
        steps = {(): step}
    means = [mean(step) for step in steps.values()]
    spread_ms = statistics.stdev(means) if len(means) > 1 else OF_GPUS * means[0]
    alone = [steps[(member,)] for member in query.members if (member,) in steps]
    if alone and len(alone) == len(query.members):
        member_ms = tuple(mean(step) for step in alone)
        return BareStep(max(alone, key=mean), spread_ms, member_ms, waited_ranks, why)
    share = 1 / math.sqrt(query.ranks)
    if exchange_of(query).waits:
        share = expected_max((0.0,) * query.ranks, 1.0)[1]
    apart = normal(0.0, share * spread_ms, f"GPUs {query.members or query.ranks}")
    return BareStep(average(list(steps.values())) + apart, spread_ms, (), waited_ranks, why)


def _bare_cells(query: CellQuery, cells: Sequence[MeasuredCell]) -> tuple[list[MeasuredCell], str]:
    """Return the cells that say most of a step without any strategy, and what they lack."""
    here = [cell for cell in cells if cell.query.machine == query.machine] or list(cells)
    without = [cell for cell in here if cell.query.strategy == "none"]
    with_cost = [cell for cell in here if cell.cost_ms is not None]
    for chosen in (without, with_cost):
        alone = [cell for cell in chosen if cell.ranks == 1]
        if alone:
            return alone, ""
    if without:
        return without, ""
    if with_cost:
        return with_cost, "no GPU ran alone: a step is that of several without their cost"
    return here, (
        "the strategy's own work on one GPU was not measured: it is that of another model"
    )


def _steps_by_gpu(
    calibration: CalibrationData, cells: Iterable[MeasuredCell]
) -> dict[tuple[Any, ...], Draws]:
    """Return {GPUs: their step without the strategy}: at least LEAST_STEP of it."""
    steps: dict[tuple[Any, ...], list[Draws]] = defaultdict(list)
    for cell in cells:
        step = cell.step_ms
        assert step is not None
        if cell.query.strategy != "none":
            cost = cell.cost_ms
            if cost is None:
                other_model = _cost_on_one_gpu(calibration, cell.query, "options")
                cost = other_model.draws if other_model else constant(0.0)
            step = np.maximum(step - cost, LEAST_STEP * step)
        steps[cell.query.members].append(step)
    return {members: average(several) for members, several in steps.items()}


def _step_of_new_batch(
    calibration: CalibrationData, query: CellQuery, cells: Sequence[MeasuredCell]
) -> tuple[Draws, str]:
    """Return the step of a batch that nobody measured: on the line through the nearest two."""
    usable = [cell for cell in cells if not cell.cpu_bound]
    if not usable:
        raise ValueError(
            f"batch_size={query.batch_size}: every batch size that was measured waits for the CPU "
            "(cpu_bound), which says nothing of others; add a cell with this one, or with "
            "optimize=graph"
        )
    sizes: list[int] = []
    steps: list[Draws] = []
    while usable and len(steps) < 2:
        nearest = of_nearest_batch(usable, query)
        usable = [cell for cell in usable if cell not in nearest]
        chosen, _ = _bare_cells(query, nearest)
        sizes.append(nearest[0].query.batch_size)
        steps.append(average(list(_steps_by_gpu(calibration, chosen).values())))
    share = query.batch_size / sizes[0]
    if len(steps) == 1:
        step = steps[0] * share * scaled_normal(1.0, OF_BATCH, "batch")
        return step, f"only batch {sizes[0]} was measured: a step is in proportion to it"
    slope = (steps[1] - steps[0]) / (sizes[1] - sizes[0])
    line = steps[0] + slope * (query.batch_size - sizes[0])
    # More images take no less time, and at most as much more as they are more.
    step = np.clip(line, steps[0] * min(share, 1.0), steps[0] * max(share, 1.0))
    side = "between" if min(sizes) < query.batch_size < max(sizes) else "beyond"
    return step, f"batch {query.batch_size} lies {side} {min(sizes)} and {max(sizes)}"


# --- exchange: the times of the buckets, and their replay


def buckets_of(calibration: CalibrationData, query: CellQuery) -> tuple[float, ...]:
    """Return the bytes of each bucket: as a cell that fills them alike has them, else all full."""
    planned = [cell for cell in calibration.cells if cell.buckets]
    for cell in matching_cells(planned, query, "bucket_plan"):
        whole = query.sent_bytes
        if cell.query.halves == query.halves:
            whole = sum(cell.buckets)
        return tuple(size * whole / sum(cell.buckets) for size in cell.buckets)
    return query.assumed_buckets


def nearest_exchange(calibration: CalibrationData, query: CellQuery) -> MeasuredCell | None:
    """Return the cell whose exchange alone is most like that of the query."""
    same = ["same_exchange", "across_hosts", "shares_gpu"]
    if collective(query) is not None or query.across_hosts:
        same.append("transport")
    several = [cell for cell in calibration.cells if cell.exchange_ms is not None]
    several = [cell for cell in several if cell.ranks > 1]
    if query.network is not None or query.ranks < 2:  # what is described was not measured
        return None
    return next(iter(matching_cells(several, query, *same)), None)


def exchange_times(calibration: CalibrationData, query: CellQuery) -> BucketTimes:
    """Return the time of each bucket in a step, if nothing else went on.

    They are in proportion to the exchange of the nearest cell. Raises UnknownLink, ValueError.
    """
    sizes = buckets_of(calibration, query)
    nearest = nearest_exchange(calibration, query)
    links = calibration.links
    try:
        times = bucket_times(query, sizes, links)
    except UnknownLink:
        if nearest is None:
            raise
        links = links.with_unit_copies()
        times = replace(bucket_times(query, sizes, links), sources=frozenset({SCALED}))
    if nearest is None or nearest.exchange_ms is None:
        return times
    sizes_there = buckets_of(calibration, nearest.query)
    there = bucket_times(nearest.query, sizes_there, links, in_step=False)
    ratio = nearest.exchange_ms / mean(there.whole_ms)
    times = times.scaled(ratio)
    if nearest.ranks != query.ranks or nearest.query.wire != query.wire:
        return replace(times, sources=times.sources | {SCALED})
    if nearest.query.options == query.options:
        return replace(times, sources=frozenset({MEASURED}))
    return times


def replay_of(
    calibration: CalibrationData, query: CellQuery, bare: Draws, times: BucketTimes, gamma: Draws
) -> Replay:
    """Replay one step of a query with these parts."""
    ready_ms: list[Draws] = []
    backward_ms = bare
    for cell in matching_cells(calibration.cells, query, "workload", "strategy"):
        if cell.moments and len(cell.moments.ready_ms) == len(times.during):
            scale = bare / cell.moments.step_ms
            ready_ms = [scale * ms for ms in cell.moments.ready_ms]
            backward_ms = scale * cell.moments.backward_ms
            break
    if not ready_ms:  # evenly
        sizes = buckets_of(calibration, query)
        for share in np.cumsum(sizes) / max(sum(sizes), 1e-9):
            ready_ms.append(bare * (FORWARD_SHARE + (1 - FORWARD_SHARE) * share))
    if not overlaps(query):
        ready_ms = [backward_ms] * len(times.during)
    return replay(ready_ms, times.during, backward_ms, bare - backward_ms, gamma, times.after)


def _replay_measured(calibration: CalibrationData, query: CellQuery, gamma: Draws) -> Replay:
    """Replay a step of a measured cell with this γ, as its parts are forecast."""
    times = exchange_times(calibration, query)
    return replay_of(calibration, query, bare_step(calibration, query).draws, times, gamma)


# --- γ and local cost


def contention(calibration: CalibrationData, query: CellQuery) -> StepPart:
    """Return γ: by probes or by measured costs on this transport, drawn to what was published.

    γ over a network may be that over host memory, in proportion to the bytes that pass in a second:
    both cross the GPUs' host links. Only from more to less traffic.
    """
    if not occupies(query) or query.ranks < 2:
        return StepPart(constant(0.0))
    key = (query.workload, query.wire, query.shares_gpu, query.network)
    if key not in calibration.memo:
        calibration.memo[key] = _contention(calibration, query)
    part: StepPart = calibration.memo[key]
    return part


def _contention(calibration: CalibrationData, query: CellQuery) -> StepPart:
    alike = []
    for cell in matching_cells(calibration.cells, query, "workload", "shares_gpu"):
        if query.network is None and cell.ranks > 1 and occupies(cell.query):
            alike.append(cell)
    cells = matching_cells(alike, query, "transport")
    seen = []
    for cell in [cell for cell in cells if cell.gamma is not None] or cells:
        seen += _measured_contention(calibration, cell)
    why = ""
    if not seen and query.transport == NETWORK:
        why = f"that over {HOST_MEMORY}, by the bytes that pass in a second"
        for cell in alike:
            share = _bytes_per_ms(calibration, query) / _bytes_per_ms(calibration, cell.query)
            if cell.query.transport == HOST_MEMORY and share < 1:
                scale = scaled_normal(share, OF_TRAFFIC, "traffic")
                seen += [scale * gamma for gamma in _measured_contention(calibration, cell)]
    if not seen:
        why = f"{PUBLISHED_GAMMA:g} ± {PUBLISHED_SPREAD:g}, as published"
    if why:
        why = f"γ {query.wire.way} was not measured: {why}"
    weighted = [(normal(PUBLISHED_GAMMA, PUBLISHED_SPREAD, "slowed"), PUBLISHED_SPREAD)]
    weighted += [(gamma, deviation(gamma)) for gamma in seen]
    return StepPart(np.clip(inverse_variance_mean(weighted), 0.0, None), why)


def _bytes_per_ms(calibration: CalibrationData, query: CellQuery) -> float:
    return query.sent_bytes / mean(exchange_times(calibration, query).whole_ms)


def _measured_contention(calibration: CalibrationData, cell: MeasuredCell) -> list[Draws]:
    """Return γ of a cell by its probe, else by what its cost leaves beside local cost and tail."""
    if cell.gamma is not None:
        gamma, error = cell.gamma
        return [normal(gamma, max(error, 1e-3), f"probe {cell.record_ids[0]}")]
    local = _cost_on_one_gpu(calibration, cell.query, "workload", "options")
    if local is None or cell.cost_ms is None:
        return []
    played = _replay_measured(calibration, cell.query, constant(0.0))
    overlap = np.maximum(played.overlap_ms, 1e-6)
    return [(cell.cost_ms - local.draws - played.tail_ms) / overlap]


def local_cost(calibration: CalibrationData, query: CellQuery, gamma: Draws) -> StepPart:
    """Return what the strategy adds to a step of one GPU: as one alone showed, else what tail and
    contention leave of the cost of the most similar cell. Raises ValueError.
    """
    if query.strategy == "none":
        return StepPart(constant(0.0))
    alone = _cost_on_one_gpu(calibration, query, "workload", "options")
    if alone is not None:
        return StepPart(alone.draws)
    nearest = _by_similarity(calibration, query)
    if nearest is not None and nearest.cost_ms is not None:
        there = nearest.query
        if there.wire != query.wire:
            gamma = contention(calibration, there).draws
        played = _replay_measured(calibration, there, gamma)
        left = np.maximum(nearest.cost_ms - played.tail_ms - played.contention_ms, 0.0)
        same = there.workload == query.workload and there.options == query.options
        return StepPart(left, "" if same else f"own work is that of {nearest.label}")
    other_model = _cost_on_one_gpu(calibration, query, "options")
    if other_model is not None:
        return other_model
    where = "one GPU"
    if query.shares_gpu or exchange_of(query).gpu_servers:
        where = f"{query.ranks} GPUs"
    raise ValueError(
        of_unit(
            f"strategy {query.strategy}: no such cell was measured that shows what it adds to a "
            f"step; add a cell with strategy={query.strategy} on {where}",
            query.unit,
        )
    )


def _cost_on_one_gpu(calibration: CalibrationData, query: CellQuery, *same: str) -> StepPart | None:
    """Return the cost that one GPU alone showed, at the nearest batch size."""
    alone = [cell for cell in calibration.cells if cell.ranks == 1 and cell.cost_ms is not None]
    costs = []
    nearest = of_nearest_batch(matching_cells(alone, query, *same), query)
    for cell in nearest:
        assert cell.cost_ms is not None
        costs.append((cell.cost_ms, deviation(cell.cost_ms)))
    if not costs:
        return None
    draws = np.maximum(inverse_variance_mean(costs), 0.0)
    return StepPart(draws, f"own work is that of {nearest[0].label}")


def _by_similarity(calibration: CalibrationData, query: CellQuery) -> MeasuredCell | None:
    """Return the most similar cell of several ranks that may show the local cost of a query.

    Another model may show it with equal options only.
    """
    with_cost = [cell for cell in calibration.several if cell.cost_ms is not None]
    for same in ("workload", "options"):
        alike = matching_cells(with_cost, query, "same_work", "shares_gpu", same)
        if alike:
            return alike[0]
    return None


# --- waiting, and the whole


def waiting(calibration: CalibrationData, query: CellQuery, bare: BareStep) -> StepPart:
    """Return what a step takes longer than that of `bare`: ranks wait for the slowest."""
    if query.ranks < 2 or not exchange_of(query).waits:
        return StepPart(constant(0.0))
    cells = of_nearest_batch(calibration.timed(query.workload), query)
    alone = [cell for cell in cells if cell.ranks == 1] or cells
    scatter_ms = statistics.median(cell.scatter_ms for cell in alone)
    if bare.member_ms:
        longer_ms = expected_max(bare.member_ms, scatter_ms)[0] - max(bare.member_ms)
        return StepPart(scaled_normal(longer_ms, OF_WAITING, "waiting"))
    # A step of several ranks has waited for some already.
    more = expected_max((0.0,) * query.ranks, 1.0)[0]
    more -= expected_max((0.0,) * bare.waited_ranks, 1.0)[0]
    longer_ms = math.hypot(scatter_ms, bare.spread_ms) * max(more, 0.0)
    why = "GPUs that were not measured scatter as those that were"
    return StepPart(scaled_normal(longer_ms, OF_WAITING, "waiting"), why)


@dataclass(frozen=True)
class StepModel:
    """The parts of a step. Times are ms."""

    calibration: CalibrationData
    query: CellQuery
    bare: BareStep
    times: BucketTimes
    gamma: StepPart
    local: StepPart
    waiting: StepPart
    noise: Draws  # what the next run differs by

    def simulate(self) -> tuple[Draws, Replay]:
        """Return the step as a mean over many runs, and its replay."""
        bare, times, gamma = self.bare.draws, self.times, self.gamma.draws
        played = replay_of(self.calibration, self.query, bare, times, gamma)
        step = played.step_ms + self.local.draws + self.waiting.draws
        if not exchange_of(self.query).waits:  # a server answers all ranks, one after the other
            step = np.maximum(step, times.whole_ms)
        return step, played


def step_model(calibration: CalibrationData, query: CellQuery) -> StepModel:
    """Return the parts of the step of a cell. Raises UnknownLink, ValueError."""
    refuse_unknown(query)
    bare = bare_step(calibration, query)
    gamma = contention(calibration, query)
    local = local_cost(calibration, query, gamma.draws)
    times = exchange_times(calibration, query)
    noise = normal(0.0, between_runs_ms(calibration, query), "next run")
    wait = waiting(calibration, query, bare)
    return StepModel(calibration, query, bare, times, gamma, local, wait, noise)


def between_runs_ms(calibration: CalibrationData, query: CellQuery) -> float:
    """Return the standard deviation of a step between runs of equal cells, in ms."""
    deviations = []
    for cell in calibration.timed(query.workload):
        assert cell.step_ms is not None
        deviations.append(cell.between_runs * mean(cell.step_ms))
    return statistics.median(deviations)


def rate_share(calibration: CalibrationData, query: CellQuery) -> float:
    """Return images per second, of those that the median step gives: the median of similar cells.

    A rate counts every step; a power cap, or servers that answer late, make some much longer.
    """
    cells = calibration.timed(query.workload)
    for several in (matching_cells(cells, query, "strategy"), cells):
        shares = [cell.rate_share for cell in several if cell.rate_share is not None]
        if shares:
            return statistics.median(shares)
    return 1.0
