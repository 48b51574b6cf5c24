"""Steps: which host ranges are steps, which GPU work belongs to each, and which one to draw.

And the same collective on several ranks: who came last, how long the others waited.

A collective's n-th call on one rank is the n-th on every other (NCCL demands the same order of all
ranks), per communicator if the trace names it, else per name. Its time on a rank splits into
- **wait**: from its own start until the last rank has started;
- **transfer**: the shortest time of any rank, usually of the rank that came last and waited for
  nobody;
- the rest: the ranks do not leave at the same time.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    It is step number `step`, or the one of median time; of a host rank, or without GPU work, its
    range. Raises ValueError: the trace has no step, or not this one.
    """
    steps_of = []
    for rank in trace.ranks:
        steps = step_ranges(rank, trace)
        if len(steps):
            steps_of.append((rank, steps))
    if not steps_of:
        raise ValueError(
            "the trace has no NVTX range named step, so no step can be drawn; runs with "
            "profiler=auto have one"
        )
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
            for table in rank.tables:
                of_tables.append(spans(table[step_of(table, steps) == step]))
            launched = union(*of_tables)
            if len(launched):
                work = launched
        starts.append(int(work[0, 0]))
        ends.append(int(work[-1, 1]))
    return min(starts), max(ends), f"step {step} of 0 to {count - 1}{how}"


# Clocks of GPUs of one host, as CUPTI converts them, agree to some µs: a gap below this is no
# contradiction.
_CLOCK_TOLERANCE_NS = 20_000
# No rank can leave these before the last has come. In the others the root may hand its data to a
# buffer and leave.
_MUTUAL = {"AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Barrier"}
# The trace does not say which ranks take part in these.
_PAIRED = {"SendRecv", "Send", "Recv", "Generic", "other"}


@dataclass(frozen=True, eq=False)
class Meeting:
    """One collective of one communicator. Times are ns; rows are those of `ranks`."""

    name: str
    communicator: str | None
    ranks: list[int]
    wait: Times  # (ranks, calls): how long a rank waited in a call
    transfer: Times  # (calls,): the time of the fastest rank
    last: NDArray[np.intp]  # (calls,): the row of the rank that came last
    index: Times  # (ranks, calls): the call's place in the rank's collectives


def match(trace: Trace) -> tuple[list[Meeting], list[str]]:
    """Match the collectives of all ranks; return also notes on what cannot be matched."""
    if len(trace.ranks) < 2:
        return [], ["only one rank: waiting and transfer cannot be separated"]
    if not trace.one_clock:
        return [], []
    notes: list[str] = []
    meetings = []
    calls_of = {rank.rank: rank.collectives for rank in trace.ranks}
    for (communicator, label), rows in _calls_by_collective(trace).items():
        name, group = trace.names[label], None
        title = name
        if communicator >= 0:
            group = trace.names[communicator]
            title = f"{name} of process group {group}"
        ranks = sorted(rows)
        is_pair = len(trace.ranks) == 2 == len(ranks) and trace.world_size in (None, 2)
        if name in _PAIRED and not (name == "SendRecv" and is_pair):
            notes.append(
                f"{title}: the trace does not say which ranks take part, so its calls are not "
                "matched across ranks"
            )
            continue
        if group is None and len(ranks) < len(trace.ranks):
            notes.append(f"{title}: only on rank {', '.join(map(str, ranks))}")
        if len(ranks) < 2:
            continue
        counts, starts, ends = [], [], []
        for rank in ranks:
            counts.append(f"{len(rows[rank])} on rank {rank}")
            starts.append(calls_of[rank]["start"][rows[rank]])
            ends.append(calls_of[rank]["end"][rows[rank]])
        if len(set(map(len, starts))) > 1:
            notes.append(f"{title}: {', '.join(counts)}: not matched")
            continue
        index = np.stack([rows[rank] for rank in ranks])
        start, end = np.stack(starts), np.stack(ends)
        fit = end.min(axis=0) + _CLOCK_TOLERANCE_NS >= start.max(axis=0)
        if name in _MUTUAL and not fit.all():
            notes.append(
                f"{title}: {int((~fit).sum())} of {len(fit)} calls end on one rank before another "
                "begins: not matched"
            )
            index, start, end = index[:, fit], start[:, fit], end[:, fit]
        if index.shape[1]:
            wait = np.minimum(start.max(axis=0) - start, end - start)
            transfer, last = (end - start).min(axis=0), start.argmax(axis=0)
            meetings.append(Meeting(name, group, ranks, wait, transfer, last, index))
    meetings.sort(key=lambda meeting: -int(meeting.wait.sum() + meeting.transfer.sum()))
    return meetings, notes


def waits_of(rank: RankTrace, meetings: Sequence[Meeting]) -> NDArray[np.float64] | None:
    """Return the wait in each of the rank's collectives, ns, NaN in one that is not matched; None
    if none is matched.
    """
    waits = np.full(len(rank.collectives), np.nan)
    for meeting in meetings:
        if rank.rank in meeting.ranks:
            row = meeting.ranks.index(rank.rank)
            waits[meeting.index[row]] = meeting.wait[row]
    if np.isnan(waits).all():
        return None
    return waits


def stragglers(meetings: Sequence[Meeting]) -> list[dict[str, Any]]:
    """Return the ranks that others waited for, longest wait first: each came last in `last` of `of`
    matched calls, and the others waited `others_waited_ms` for it on average.
    """
    rows: dict[int, dict[str, Any]] = {}
    for meeting in meetings:
        mean_wait = meeting.wait.sum(axis=0) / (len(meeting.ranks) - 1)
        for at, rank in enumerate(meeting.ranks):
            row = rows.setdefault(rank, {"rank": rank, "last": 0, "of": 0, "others_waited_ms": 0.0})
            is_last = meeting.last == at
            row["last"] += int(is_last.sum())
            row["of"] += len(meeting.transfer)
            row["others_waited_ms"] += float(mean_wait[is_last].sum()) / 1e6
    late = [row for row in rows.values() if row["others_waited_ms"] > 0]
    return sorted(late, key=lambda row: (-row["others_waited_ms"], row["rank"]))


def _calls_by_collective(trace: Trace) -> dict[tuple[int, int], dict[int, Times]]:
    """Return {(communicator, name): {rank: places of its calls, in the order of their starts}}.

    If some calls of a rank do not name their communicator, all are matched by name and order.
    """
    groups: dict[tuple[int, int], dict[int, Times]] = defaultdict(dict)
    for rank in trace.ranks:
        calls = rank.collectives
        communicators = calls["communicator"]
        if not (communicators >= 0).all():
            communicators = np.full(len(calls), -1)
        keys = np.column_stack((calls["name"], communicators))
        for label, communicator in np.unique(keys, axis=0).tolist():
            rows = np.flatnonzero((calls["name"] == label) & (communicators == communicator))
            order = np.argsort(calls["start"][rows], kind="stable")
            groups[communicator, label][rank.rank] = rows[order]
    return groups
