"""The step of a cell, put together from its parts (README.md). All times are draws in ms.

step = bare + tail + γ · overlap + local cost
"""

import bisect
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from analysis.prediction.calibration_data import (
    CalibrationData,
    MeasuredCell,
    cells_with,
    matching_cells,
    once,
)
from analysis.prediction.distributions import (
    Draws,
    average,
    constant,
    deviation,
    inverse_variance_mean,
    mean,
    normal,
    scaled_normal,
)
from analysis.prediction.link_model import HOST_MEMORY, NETWORK
from analysis.prediction.query import CellQuery, Options, Workload
from analysis.prediction.strategies import (
    GATHERING,
    BucketTimes,
    bucket_times,
    collective,
    exchange_of,
    occupies,
    overlaps,
    refuse_unknown,
    return_ratio,
)
from analysis.study.names import of_unit
from analysis.text import count

FORWARD_SHARE = 1 / 3  # of a step: a backward pass takes twice as long as a forward pass
MOST_GAMMA = 0.95  # compute always goes on
# γ before anything was measured: overlap slows compute by 18.9 % on average (arXiv 2507.03114).
PUBLISHED_GAMMA, PUBLISHED_SPREAD = 0.189, 0.189
MOST_SEEN = 32  # cells that γ is the mean of, the nearest: more change nothing
LEAST_STEP = 0.05  # of a step: below it no scatter of a cost takes one
# Standard deviations as shares.
OF_TRAFFIC = 0.5  # of γ in proportion to the traffic
OF_BATCH = 0.1  # of a step in proportion to the batch
OF_GPUS = 0.003  # between equal GPUs: what four H200s showed
OF_LAUNCH = 0.2  # of the time to enqueue a step, between cells of one host: what H200 hosts showed
Part: TypeAlias = tuple[
    Draws, str
]  # and a sentence where something else stands for its measurement


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


def by_batch(cells: Iterable[MeasuredCell]) -> dict[int, list[MeasuredCell]]:
    """Return the cells of each batch size, ascending: with small ones GPUs wait."""
    by_size: dict[int, list[MeasuredCell]] = defaultdict(list)
    for cell in cells:
        by_size[cell.query.batch_size].append(cell)
    return dict(sorted(by_size.items()))


def bare_step(calibration: CalibrationData, query: CellQuery) -> Part:
    """Return the step of one GPU without the strategy: of the slowest GPU of the query where all
    were measured alone, else of the mean GPU. Raises ValueError for a new workload.
    """
    cells = calibration.by_workload.get(query.workload)
    if not cells:
        raise ValueError(
            f"model {query.workload}: no run of the study trains it so; its step time is not known"
        )
    of_batch = of_batches(calibration, query.workload).get(query.batch_size)
    if of_batch:
        steps, why = _bare_steps(query, of_batch)
    else:
        step, why = _step_of_new_batch(query, cells)
        steps = {(): step}
    alone = [steps[(member,)] for member in query.members if (member,) in steps]
    if alone and len(alone) == len(query.members):
        return max(alone, key=mean), why
    step = average(list(steps.values()))
    return step + normal(0.0, OF_GPUS * mean(step), f"GPUs {query.members or query.ranks}"), why


@once
def of_batches(calibration: CalibrationData, workload: Workload) -> dict[int, list[MeasuredCell]]:
    """Return the cells with a step time of a workload by their batch sizes."""
    return by_batch(calibration.by_workload.get(workload, ()))


def _bare_steps(
    query: CellQuery, cells: Sequence[MeasuredCell]
) -> tuple[dict[tuple[Any, ...], Draws], str]:
    """Return {GPUs: their step without the strategy} by the cells that say most of it."""
    here = [cell for cell in cells if cell.query.machine == query.machine] or cells
    without = []
    with_cost = []
    for cell in here:
        if cell.query.strategy == "none":
            without.append(cell)
        # Steps of shards without exchange are those of whole weights in the hooks of FSDP.
        if cell.cost_ms is not None and cell.query.strategy not in GATHERING:
            with_cost.append(cell)
    why = ""
    for chosen in (without, with_cost):
        alone = [cell for cell in chosen if cell.query.ranks == 1]
        if alone:
            break
    else:
        alone = without
        if not without:
            alone = with_cost
            why = (
                f"{query.workload} was not measured on one GPU with strategy=none; its "
                "compute time is inferred from several GPUs"
            )
    if not alone:
        raise ValueError(f"it needs a run of {query.workload} with strategy=none; add one")
    steps: dict[tuple[Any, ...], list[Draws]] = defaultdict(list)
    for cell in alone:
        step = cell.step_ms
        assert step is not None
        if cell.query.strategy != "none" and cell.cost_ms is not None:
            step = np.maximum(step - cell.cost_ms, LEAST_STEP * step)
        steps[cell.query.members].append(step)
    return {members: average(several) for members, several in steps.items()}, why


def _step_of_new_batch(query: CellQuery, cells: Sequence[MeasuredCell]) -> Part:
    """Return the step of a batch that nobody measured: that of the device, on the line through the
    nearest two, and no less than the CPU takes to enqueue it.
    """
    usable = [cell for cell in cells if not cell.cpu_bound]
    for cell in cells:
        if usable and cell.cpu_bound and cell.busy_ms is not None:
            usable.append(replace(cell, step_ms=cell.busy_ms, cost_ms=constant(0.0)))
    step, why = _device_step(query, by_batch(usable))
    alike = cells
    for name in ("machine", "strategy"):
        wanted = getattr(query, name)
        alike = [cell for cell in alike if getattr(cell.query, name) == wanted] or alike
    launches_ms: list[float] = []
    queue_full = 0
    for several in by_batch(alike).values():
        longest_ms = max(launches_ms, default=math.inf)  # with a smaller batch
        for cell in several:
            for ms in cell.launch_ms:
                # Launching takes as long with every batch, but it waits where the queue is full.
                launches_ms.append(min(ms, longest_ms))
                queue_full += ms > longest_ms
    if not launches_ms:
        return step, why
    middle_ms = statistics.median(launches_ms)
    spread = statistics.fmean(math.log(ms / middle_ms) ** 2 for ms in launches_ms)
    values = len(launches_ms) - queue_full
    share = max(OF_LAUNCH, math.sqrt(spread)) * math.sqrt(1 + 1 / values)
    if middle_ms > mean(step):
        why += (
            f"; a step takes at least the {middle_ms:.0f} ms ± {100 * share:.0f} % that the CPU "
            f"needs to launch it ({count(values, 'measurement')})"
        )
    return np.maximum(step, scaled_normal(middle_ms, share, f"launch {query.workload}")), why


def _device_step(query: CellQuery, usable: Mapping[int, Sequence[MeasuredCell]]) -> Part:
    if not usable:
        raise ValueError(
            f"batch_size={query.batch_size}: with every measured batch size GPUs wait for the CPU "
            "(cpu_bound), which says nothing of other sizes; add a run with this one, or with "
            "optimize=graph"
        )
    sizes = sorted(usable, key=lambda size: abs(math.log(size / query.batch_size)))[:2]
    steps: list[Draws] = []
    for size in sizes:
        by_gpu, _ = _bare_steps(query, usable[size])
        steps.append(average(list(by_gpu.values())))
    share = query.batch_size / sizes[0]
    if len(steps) == 1:
        step = steps[0] * share * scaled_normal(1.0, OF_BATCH, "batch")
        why = f"only batch {sizes[0]} was measured; step time is scaled by the batch size"
        return step, why
    slope = (steps[1] - steps[0]) / (sizes[1] - sizes[0])
    line = steps[0] + slope * (query.batch_size - sizes[0])
    # More images take no less time, and at most as much more as they are more.
    step = np.clip(line, steps[0] * min(share, 1.0), steps[0] * max(share, 1.0))
    side = "beyond"
    if min(sizes) < query.batch_size < max(sizes):
        side = "between"
    why = f"batch {query.batch_size} was not measured; it lies {side} {min(sizes)} and {max(sizes)}"
    return step, why


def buckets_of(calibration: CalibrationData, query: CellQuery) -> tuple[float, ...]:
    """Return the bytes of each bucket: as a cell that fills them alike has them, else all full."""
    for cell in matching_cells(cells_with(calibration, "buckets"), query, "bucket_plan"):
        assert cell.buckets is not None
        whole = query.sent_bytes
        if cell.query.halves == query.halves:
            whole = sum(cell.buckets)
        return tuple(size * whole / sum(cell.buckets) for size in cell.buckets)
    return query.assumed_buckets


def nearest_exchange(calibration: CalibrationData, query: CellQuery) -> MeasuredCell | None:
    """Return the cell whose exchange alone is most like that of the query."""
    if query.across_hosts and calibration.links.network is not None:
        return None  # what is described was not measured
    same = ["is_alone", "same_exchange", "across_hosts", "shares_gpu"]
    if collective(query) is not None or query.across_hosts:
        same.append("transport")
    if query.ranks < 2:
        return None
    return next(matching_cells(cells_with(calibration, "exchange_ms"), query, *same), None)


def exchange_times(calibration: CalibrationData, query: CellQuery) -> BucketTimes:
    """Return the time of each bucket in a step, if nothing else went on.

    They are in proportion to the exchange of the nearest cell. Raises ValueError.
    """
    sizes = buckets_of(calibration, query)
    nearest = nearest_exchange(calibration, query)
    ratio = return_ratio(query)
    if nearest is None or nearest.exchange_ms is None:
        return bucket_times(query, sizes, calibration.links, ratio)
    links = calibration.links.with_unit_copies
    during, after = bucket_times(query, sizes, links, ratio)
    sizes_there = buckets_of(calibration, nearest.query)
    there, after_there = bucket_times(nearest.query, sizes_there, links)
    scale = nearest.exchange_ms / mean(sum(there, after_there))
    return [ms * scale for ms in during], after * scale


def replay_of(
    calibration: CalibrationData, query: CellQuery, bare: Draws, times: BucketTimes, gamma: Draws
) -> Replay:
    """Replay one step of a query with these parts, the mean of its period."""
    during, after = times
    period = int(query.option("period", "1"))
    during, after = [ms / period for ms in during], after / period
    ready_ms: list[Draws] = []
    backward_ms = bare
    with_moments = cells_with(calibration, "moments")
    for cell in matching_cells(with_moments, query, "workload", "strategy"):
        if cell.moments and len(cell.moments.ready_ms) == len(during):
            scale = bare / cell.moments.step_ms
            ready_ms = [scale * ms for ms in cell.moments.ready_ms]
            backward_ms = scale * cell.moments.backward_ms
            break
    if not ready_ms:  # evenly
        sizes = buckets_of(calibration, query)
        micro_steps = int(query.workload.requested("accumulate", "1"))
        before = 1 - (1 - FORWARD_SHARE) / micro_steps  # what gradients travel beside
        for share in np.cumsum(sizes) / max(sum(sizes), 1e-9):
            ready_ms.append(bare * (before + (1 - before) * share))
    if not overlaps(query):
        ready_ms = [backward_ms] * len(during)
    return replay(ready_ms, during, backward_ms, bare - backward_ms, gamma, after)


def _replay_measured(calibration: CalibrationData, query: CellQuery, gamma: Draws) -> Replay:
    times = exchange_times(calibration, query)
    bare, _ = bare_step(calibration, query)
    return replay_of(calibration, query, bare, times, gamma)


def contention(calibration: CalibrationData, query: CellQuery) -> Part:
    """Return γ: by what measured costs on this transport leave, drawn to what was published.

    γ over a network may be that over host memory, in proportion to the bytes that pass in a second:
    both cross the GPUs' host links. Only from more to less traffic.
    """
    if not occupies(query) or query.ranks < 2:
        return constant(0.0), ""
    seen: list[Draws] = []
    for cell in _contending(calibration, query):
        seen += _measured_contention(calibration, cell)
    why = ""
    if not seen and query.transport == NETWORK:
        why = f"assumed: as over {HOST_MEMORY}, in proportion to the bytes per second"
        on_host = replace(query, wire=replace(query.wire, transport=HOST_MEMORY))
        for cell in _contending(calibration, on_host):
            share = _bytes_per_ms(calibration, query) / _bytes_per_ms(calibration, cell.query)
            if share < 1:
                scale = scaled_normal(share, OF_TRAFFIC, "traffic")
                for gamma in _measured_contention(calibration, cell):
                    seen.append(scale * gamma)
    if not seen:
        slowdown = f"{PUBLISHED_GAMMA:.2f} ± {PUBLISHED_SPREAD:.2f}"
        why = f"assumed: {slowdown} ms for each ms of communication (a published value)"
    if why:
        what = f"how much compute slows while ranks communicate {query.wire.way}"
        why = f"it was not measured {what}; {why}"
    weighted = [(normal(PUBLISHED_GAMMA, PUBLISHED_SPREAD, "slowed"), PUBLISHED_SPREAD)]
    for gamma in seen:
        weighted.append((gamma, deviation(gamma)))
    return np.clip(inverse_variance_mean(weighted), 0.0, None), why


def _contending(calibration: CalibrationData, query: CellQuery) -> Iterator[MeasuredCell]:
    same = "workload", "shares_gpu", "transport", "is_alone"
    several = matching_cells(cells_with(calibration, "step_ms", "cost_ms"), query, *same)
    return itertools.islice((cell for cell in several if occupies(cell.query)), MOST_SEEN)


def _bytes_per_ms(calibration: CalibrationData, query: CellQuery) -> float:
    during, after = exchange_times(calibration, query)
    return query.sent_bytes / mean(sum(during, after))


@once
def _measured_contention(calibration: CalibrationData, cell: MeasuredCell) -> list[Draws]:
    """Return γ of a cell by what its cost leaves beside local cost and tail; empty without both."""
    local = _cost_on_one_gpu(calibration, cell.query)
    if local is None or cell.cost_ms is None:
        return []
    played = _replay_measured(calibration, cell.query, constant(0.0))
    overlap = np.maximum(played.overlap_ms, 1e-6)
    return [(cell.cost_ms - local - played.tail_ms) / overlap]


def local_cost(calibration: CalibrationData, query: CellQuery, gamma: Draws) -> Part:
    """Return what the strategy adds to a step of one GPU: as one alone showed, else what tail and
    contention leave of the cost of the most similar cell. Raises ValueError.
    """
    if query.strategy == "none":
        return constant(0.0), ""
    alone = _cost_on_one_gpu(calibration, query)
    if alone is not None:
        return alone, ""
    same = "same_work", "shares_gpu", "workload"
    with_cost = cells_with(calibration, "step_ms", "cost_ms")
    for nearest in matching_cells(with_cost, query, *same):
        if nearest.query.is_alone or nearest.cost_ms is None:
            continue
        if nearest.query.wire != query.wire:
            gamma, _ = contention(calibration, nearest.query)
        played = _replay_measured(calibration, nearest.query, gamma)
        left = np.maximum(nearest.cost_ms - played.tail_ms - played.contention_ms, 0.0)
        if nearest.query.options == query.options:
            return left, ""
        return left, f"the overhead of {query.strategy} is assumed to be that of {nearest.label}"
    what, where = f"strategy={query.strategy}", "one GPU"
    why = f"the overhead of {what} was not measured"
    if exchange_of(query).gpu_servers:
        place = "a GPU that trains" if query.shares_gpu else "a separate GPU"
        why = f"the overhead of {what} with its server on {place} was not measured"
        where = "two GPUs or more"
    why += f"; add a run of {what} on {where}"
    raise ValueError(of_unit(why, query.unit))


def _cost_on_one_gpu(calibration: CalibrationData, query: CellQuery) -> Draws | None:
    """Return the cost that one GPU alone showed, at the nearest batch size."""
    by_size = _alone_with_cost(calibration, query.workload, query.options)
    if not by_size:
        return None
    sizes = list(by_size)
    middle = bisect.bisect(sizes, query.batch_size)
    nearest = min(
        sizes[max(middle - 1, 0) : middle + 1],
        key=lambda size: abs(math.log(size / query.batch_size)),
    )
    costs = []
    for cell in by_size[nearest]:
        assert cell.cost_ms is not None
        costs.append((cell.cost_ms, deviation(cell.cost_ms)))
    return np.maximum(inverse_variance_mean(costs), 0.0)


@once
def _alone_with_cost(
    calibration: CalibrationData, workload: Workload, options: Options
) -> dict[int, list[MeasuredCell]]:
    alone: list[MeasuredCell] = []
    for cell in calibration.cells:
        same = cell.query.options == options and cell.query.workload == workload
        if same and cell.query.ranks == 1 and cell.cost_ms is not None:
            alone.append(cell)
    # The costs of others are the scatter of the CPU.
    alone = [cell for cell in alone if not cell.cpu_bound] or alone
    return by_batch(alone)


@dataclass(frozen=True)
class StepModel:
    """A step as a mean over many runs, and its parts. Times are ms."""

    step: Draws
    bare: Draws
    local: Draws
    noise: Draws  # what the next run differs by
    played: Replay
    is_measured: bool  # the exchange of such ranks was measured
    why: tuple[str, ...]  # a sentence for each part that was not measured


def step_model(calibration: CalibrationData, query: CellQuery) -> StepModel:
    """Return the step of a cell. Raises ValueError."""
    refuse_unknown(query)
    bare, no_bare = bare_step(calibration, query)
    gamma, no_gamma = contention(calibration, query)
    local, no_local = local_cost(calibration, query, gamma)
    during, after = exchange_times(calibration, query)
    played = replay_of(calibration, query, bare, (during, after), gamma)
    step = played.step_ms + local
    if not exchange_of(query).waits:  # a server answers all ranks, one after the other
        step = np.maximum(step, sum(during, after))
    noise = normal(0.0, _between_runs_ms(calibration, query.workload), "next run")
    is_measured = query.ranks < 2 or query.strategy == "none"
    nearest = nearest_exchange(calibration, query)
    if nearest is not None:
        there = nearest.query
        is_same_exchange = there.wire == query.wire and there.options == query.options
        is_measured = there.ranks == query.ranks and is_same_exchange
    why = tuple(filter(None, (no_bare, no_gamma, no_local)))
    return StepModel(step, bare, local, noise, played, is_measured, why)


@once
def _between_runs_ms(calibration: CalibrationData, workload: Workload) -> float:
    deviations_ms = []
    for cell in calibration.by_workload[workload]:
        assert cell.step_ms is not None
        deviations_ms.append(cell.between_runs * mean(cell.step_ms))
    return statistics.median(deviations_ms)


@once
def rate_share(calibration: CalibrationData, workload: Workload, strategy: str) -> float:
    """Return images per second, of those that the median step gives: the median of similar cells.

    A rate counts every step; a power cap, or servers that answer late, make some much longer.
    """
    cells = calibration.by_workload[workload]
    for several in ([cell for cell in cells if cell.query.strategy == strategy], cells):
        shares = []
        for cell in several:
            if cell.step_ms is not None and cell.rate is not None:
                images = cell.query.ranks * cell.query.batch_size * 1e3
                shares.append(cell.rate.value * mean(cell.step_ms) / images)
        if shares:
            return statistics.median(shares)
    return 1.0
