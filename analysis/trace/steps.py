"""Steps: which host ranges are steps, which GPU work belongs to each, and which one to draw."""

import re
from dataclasses import replace

import numpy as np

from analysis.trace.events import Events, RankTrace, Times, Trace, spans, union

_STEP = re.compile(r"step(?:[ _:#/-]?\d+)?", re.IGNORECASE)


def is_step(name: str) -> bool:
    """Tell whether a range is one training step: `step`, `step 7`, `step#7`."""
    return _STEP.fullmatch(name) is not None


def step_ranges(rank: RankTrace, trace: Trace) -> Events:
    """Return the ranges named step, in order."""
    step_ids = []
    for name_id in np.unique(rank.ranges["name"]).tolist():
        if is_step(trace.names[name_id]):
            step_ids.append(name_id)
    is_range = np.isin(rank.ranges["name"], step_ids) & (rank.ranges["end"] > rank.ranges["start"])
    steps = rank.ranges[is_range]
    return steps[np.argsort(steps["start"], kind="stable")]


def step_of(events: Events, steps: Events) -> Times:
    """Return the step of each event, -1 for none: by its launch if known, else by its start."""
    when = np.where(events["launch"] >= 0, events["launch"], events["start"])
    at = np.searchsorted(steps["start"], when, side="right") - 1
    inside = (at >= 0) & (when < steps["end"][np.maximum(at, 0)])
    return np.where(inside, at, -1).astype(np.int64)


def within_steps(trace: Trace) -> Trace:
    """Return the trace without work outside steps (warm-up, barriers).

    A rank without step ranges keeps everything.
    """
    ranks = []
    for rank in trace.ranks:
        steps = step_ranges(rank, trace)
        if len(steps):
            tables = {}
            for table in ("compute", "collectives", "copies", "memsets"):
                events = getattr(rank, table)
                tables[table] = events[step_of(events, steps) >= 0]
            rank = replace(rank, **tables)
        ranks.append(rank)
    return replace(trace, ranks=tuple(ranks))


def choose_window(trace: Trace, step: int | None = None) -> tuple[int, int, str]:
    """Return the time of one step's work on all ranks (start and end in ns), and its title.

    It is step number `step`, or the one of median time. On a host rank, or without GPU work, the
    step's range counts.

    Raises:
        ValueError: the trace has no step, or not this one.
    """
    steps_of = []
    for rank in trace.ranks:
        steps = step_ranges(rank, trace)
        if len(steps):
            steps_of.append((rank, steps))
    if not steps_of:
        raise ValueError("the trace has no range named step: there is no step to draw")
    count = min(len(steps) for _, steps in steps_of)
    how = ""
    if step is None:
        first = steps_of[0][1][:count]
        step = int(np.argsort(first["end"] - first["start"], kind="stable")[count // 2])
        how = ", the one of median time"
    if not 0 <= step < count:
        raise ValueError(f"step {step} is not in the trace; expected 0 to {count - 1}")
    starts, ends = [], []
    for rank, steps in steps_of:
        work = spans(steps[step : step + 1])
        if not rank.on_host:
            of_tables = []
            for table in (rank.compute, rank.collectives, rank.copies, rank.memsets):
                of_tables.append(spans(table[step_of(table, steps) == step]))
            launched = union(*of_tables)
            if len(launched):
                work = launched
        starts.append(int(work[0, 0]))
        ends.append(int(work[-1, 1]))
    return min(starts), max(ends), f"step {step} of 0 to {count - 1}{how}"
