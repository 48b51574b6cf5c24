"""Steps: which host ranges are steps, which GPU work belongs to each, and which one to draw."""

from dataclasses import dataclass, replace

import numpy as np

from analysis.trace.intervals import Spans, Times, union
from analysis.trace.model import Events, RankTrace, Trace, column
from analysis.trace.names import is_profiler_step, is_step

_TAIL = 20_000  # kernels in which a repeating sequence is looked for
_SAME = 16  # kernels that must repeat before a whole period is compared
_LAST_NS = 100_000_000


@dataclass(frozen=True)
class Window:
    """A stretch of time, ns; `title` says how it was chosen."""

    start: int
    end: int
    title: str


def step_ranges(rank: RankTrace, trace: Trace) -> tuple[str, Events] | None:
    """Return what the step ranges are called, and the ranges in order; None if there are none."""
    for source, is_wanted in (('range "step"', is_step), ("ProfilerStep", is_profiler_step)):
        names = np.unique(rank.ranges.name).tolist()
        wanted = [name for name in names if is_wanted(trace.names[name])]
        is_range = np.isin(rank.ranges.name, wanted) & (rank.ranges.end > rank.ranges.start)
        steps = rank.ranges.where(is_range)
        if len(steps):
            return source, steps.where(np.argsort(steps.start, kind="stable"))
    return None


def step_of(events: Events, steps: Events) -> Times:
    """Return the step of each event, -1 for none: by its launch if known, else by its start."""
    when = np.where(events.launch >= 0, events.launch, events.start)
    at = np.searchsorted(steps.start, when, side="right") - 1
    inside = (at >= 0) & (when < steps.end[np.maximum(at, 0)])
    return column(np.where(inside, at, -1))


def within_steps(trace: Trace) -> Trace:
    """Return the trace without work outside steps (warm-up, barriers).

    A rank without step ranges keeps everything.
    """
    ranks = []
    for rank in trace.ranks:
        named = step_ranges(rank, trace)
        if named is not None:
            _, steps = named
            rank = replace(
                rank,
                compute=rank.compute.where(step_of(rank.compute, steps) >= 0),
                collectives=rank.collectives.where(step_of(rank.collectives, steps) >= 0),
                copies=rank.copies.where(step_of(rank.copies, steps) >= 0),
                memsets=rank.memsets.where(step_of(rank.memsets, steps) >= 0),
            )
        ranks.append(rank)
    return replace(trace, ranks=tuple(ranks))


def choose_window(trace: Trace, step: int | None = None) -> Window:
    """Choose one step to draw: number `step`, or the one of median time.

    Without step ranges it is one period of the kernels' repeating sequence, else the last 100 ms.

    Raises:
        ValueError: a step that does not exist, or an empty trace.
    """
    steps_of = []
    for rank in trace.ranks:
        named = step_ranges(rank, trace)
        if named is not None:
            steps_of.append((rank, named[1]))
    if steps_of:
        return _step_window(steps_of, step)
    if step is not None:
        raise ValueError(f"step {step}: the trace has no range named step")
    activity = union(*(rank.activity for rank in trace.ranks))
    if not len(activity):
        raise ValueError("the trace has no activity to draw")
    for rank in trace.ranks:
        period = _period(rank)
        if period is not None:
            return Window(*period, "one period of the repeating kernels (no range named step)")
    first, last = int(activity[0, 0]), int(activity[-1, 1])
    return Window(max(first, last - _LAST_NS), last, "the last 100 ms (no range named step)")


def _step_window(steps_of: list[tuple[RankTrace, Events]], step: int | None) -> Window:
    """Return the window of a step's GPU work on all ranks.

    On a host rank, or without GPU work, the step's range counts.
    """
    count = min(len(steps) for _, steps in steps_of)
    how = ""
    if step is None:
        durations = steps_of[0][1].duration[:count]
        step = int(np.argsort(durations, kind="stable")[count // 2])
        how = ", the one of median time"
    if not 0 <= step < count:
        raise ValueError(f"step {step} is not in the trace; accepted are 0 to {count - 1}")
    starts, ends = [], []
    for rank, steps in steps_of:
        work: Spans = steps.spans[step : step + 1]
        if not rank.on_host:
            tables = (rank.compute, rank.collectives, rank.copies, rank.memsets)
            launched = union(*(table.spans[step_of(table, steps) == step] for table in tables))
            if len(launched):
                work = launched
        starts.append(int(work[0, 0]))
        ends.append(int(work[-1, 1]))
    return Window(min(starts), max(ends), f"step {step} of 0 to {count - 1}{how}")


def _period(rank: RankTrace) -> tuple[int, int] | None:
    """Return the last stretch of the busiest stream whose kernels repeat the stretch before it.

    It has a collective, if the rank has any.
    """
    if not len(rank.compute) or rank.on_host:
        return None
    lanes, counts = np.unique(rank.compute.lane, return_counts=True)
    stream = rank.compute.where(rank.compute.lane == lanes[counts.argmax()])
    stream = stream.where(np.argsort(stream.start, kind="stable")[-_TAIL:])
    calls = np.sort(rank.collectives.start)
    for part in (1.0, 0.95, 0.9, 0.8, 0.7, 0.6):  # other work may follow the loop
        end = int(len(stream) * part)
        lengths = np.arange(_SAME, end // 2)
        if not len(lengths):
            continue
        for last in range(end - 1, end - 1 - _SAME, -1):
            lengths = lengths[stream.name[last - lengths] == stream.name[last]]
        for length in lengths.tolist():
            begin = end - length
            start_ns, end_ns = int(stream.start[begin]), int(stream.end[end - 1])
            call_count = np.searchsorted(calls, end_ns) - np.searchsorted(calls, start_ns)
            before = stream.name[begin - length : begin]
            repeats = np.array_equal(stream.name[begin:end], before)
            if repeats and (call_count > 0 or not len(calls)):
                return start_ns, end_ns
    return None
