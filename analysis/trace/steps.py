"""Steps: which host ranges are steps, which GPU work belongs to each, and which one to draw."""

from dataclasses import dataclass, replace

import numpy as np

from analysis.trace.intervals import Spans, Times, union
from analysis.trace.model import Events, RankTrace, Trace
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
    for what, wanted in (('range "step"', is_step), ("ProfilerStep", is_profiler_step)):
        names = [
            number for number in np.unique(rank.ranges.name).tolist() if wanted(trace.names[number])
        ]
        found = rank.ranges.where(
            np.isin(rank.ranges.name, names) & (rank.ranges.end > rank.ranges.start)
        )
        if len(found):
            return what, found.where(np.argsort(found.start, kind="stable"))
    return None


def step_of(events: Events, steps: Events) -> Times:
    """Return the step of each event, -1 for none: by its launch if known, else by its start. Shape (events,)."""
    when = np.where(events.launch >= 0, events.launch, events.start)
    at = np.searchsorted(steps.start, when, side="right") - 1
    inside = (at >= 0) & (when < steps.end[np.maximum(at, 0)])
    number: Times = np.where(inside, at, -1)
    return number


def within_steps(trace: Trace) -> Trace:
    """Return the trace without work outside steps (warm-up, barriers). A rank without step ranges keeps everything."""
    return replace(trace, ranks=tuple(_within(rank, trace) for rank in trace.ranks))


def _within(rank: RankTrace, trace: Trace) -> RankTrace:
    named = step_ranges(rank, trace)
    if named is None:
        return rank
    return replace(
        rank,
        compute=rank.compute.where(step_of(rank.compute, named[1]) >= 0),
        collectives=rank.collectives.where(step_of(rank.collectives, named[1]) >= 0),
        copies=rank.copies.where(step_of(rank.copies, named[1]) >= 0),
        memsets=rank.memsets.where(step_of(rank.memsets, named[1]) >= 0),
    )


def choose_window(trace: Trace, step: int | None = None) -> Window:
    """Choose one step to draw: number `step`, or the one of median time.

    Without step ranges it is one period of the kernels' repeating sequence, else the last 100 ms. Raises ValueError for
    a step that does not exist and for an empty trace.
    """
    named = [
        (rank, found[1]) for rank in trace.ranks if (found := step_ranges(rank, trace)) is not None
    ]
    if named:
        steps = named[0][1]
        fewest = min(len(of_rank) for _, of_rank in named)
        middle = int(np.argsort(steps.duration[:fewest], kind="stable")[fewest // 2])
        chosen = middle if step is None else step
        if not 0 <= chosen < fewest:
            raise ValueError(f"step {chosen} is not in the trace; accepted are 0 to {fewest - 1}")
        spans = [_of_step(rank, of_rank, chosen) for rank, of_rank in named]
        start, end = min(int(span[0, 0]) for span in spans), max(int(span[-1, 1]) for span in spans)
        how = ", the one of median time" if step is None else ""
        return Window(start, end, f"step {chosen} of 0 to {fewest - 1}{how}")
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


def _of_step(rank: RankTrace, steps: Events, number: int) -> Spans:
    """Return the step's GPU work; on a host rank, or without GPU work, its range."""
    tables = (rank.compute, rank.collectives, rank.copies, rank.memsets)
    work = union(*(table.spans[step_of(table, steps) == number] for table in tables))
    return work if len(work) and not rank.on_host else steps.spans[number : number + 1]


def _period(rank: RankTrace) -> tuple[int, int] | None:
    """Find the last stretch of the busiest stream whose kernels repeat the stretch before it, with a collective."""
    if not len(rank.compute) or rank.on_host:
        return None
    lanes, counts = np.unique(rank.compute.lane, return_counts=True)
    stream = rank.compute.where(rank.compute.lane == lanes[counts.argmax()])
    stream = stream.where(np.argsort(stream.start, kind="stable")[-_TAIL:])
    calls = np.sort(rank.collectives.start)
    for part in (1.0, 0.95, 0.9, 0.8, 0.7, 0.6):  # other work may follow the loop
        end = int(len(stream) * part)
        lengths = np.arange(_SAME, end // 2)
        for back in range(_SAME if len(lengths) else 0):
            lengths = lengths[stream.name[end - 1 - back - lengths] == stream.name[end - 1 - back]]
        for length in lengths.tolist():
            begin = end - length
            times = int(stream.start[begin]), int(stream.end[end - 1])
            met = np.searchsorted(calls, times[1]) - np.searchsorted(calls, times[0])
            same = np.array_equal(stream.name[begin:end], stream.name[begin - length : begin])
            if same and (met > 0 or not len(calls)):
                return times
    return None
