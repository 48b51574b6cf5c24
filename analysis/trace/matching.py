"""Match the same collective on several ranks: who came last, how long the others waited.

A collective's n-th call on one rank is the n-th on every other (NCCL demands the same order of all
ranks), per communicator if the trace names it, else per name. Its time on a rank splits into
- **wait**: from its own start until the last rank has started;
- **transfer**: the shortest time of any rank, usually of the rank that came last and waited for
  nobody;
- the rest: the ranks do not leave at the same time.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.trace.intervals import Flags, Times
from analysis.trace.model import Collectives, RankTrace, Trace

# Clocks of GPUs of one host, as CUPTI converts them, agree to some µs: a gap below this is no
# contradiction.
_CLOCK_TOLERANCE_NS = 20_000
# No rank can leave these before the last has come. In the others the root may hand its data to a
# buffer and leave.
_MUTUAL = {"AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Barrier"}
# The trace does not say which ranks take part in these.
_PAIRED = {"SendRecv", "Send", "Recv", "Generic", "other"}
_MOST_SHIFTS = 1000  # tried if one rank has more calls

Key = tuple[int, int]  # communicator (-1: not known) and label


@dataclass(frozen=True, eq=False)
class Meeting:
    """One collective of one communicator; arrays have one row per rank of `ranks`, ns.

    `wait[r, i]`: how long the r-th rank waited in call i; `transfer[i]`: the shortest rank's time;
    `last[i]`: the row of the rank that came last; `index[r, i]`: the call's place in that rank's
    collectives.
    """

    name: str
    communicator: str | None
    ranks: tuple[int, ...]
    wait: Times
    transfer: Times
    last: NDArray[np.intp]
    index: Times

    @property
    def calls(self) -> int:
        """Return the number of matched calls."""
        return len(self.transfer)


@dataclass(frozen=True)
class Straggler:
    """A rank that came last in `last` of `of` matched calls.

    The others waited `others_waited_ms` on average.
    """

    rank: int
    last: int
    of: int
    others_waited_ms: float


@dataclass(frozen=True, eq=False)
class Meetings:
    """All matched collectives, and notes on the rest."""

    matched: tuple[Meeting, ...]
    notes: tuple[str, ...]

    def waits(self, rank: RankTrace) -> NDArray[np.float64] | None:
        """Return the wait in each of the rank's collectives, ns; None if none is matched.

        Shape (calls,); NaN if a call is not matched.
        """
        waits = np.full(len(rank.collectives), np.nan)
        for meeting in self.matched:
            if rank.rank in meeting.ranks:
                row = meeting.ranks.index(rank.rank)
                waits[meeting.index[row]] = meeting.wait[row]
        return None if np.isnan(waits).all() else waits

    def stragglers(self) -> list[Straggler]:
        """Return the ranks that others waited for, longest wait first."""
        waited_ms: dict[int, float] = defaultdict(float)
        last: dict[int, int] = defaultdict(int)
        calls: dict[int, int] = defaultdict(int)
        for meeting in self.matched:
            mean_wait = meeting.wait.sum(axis=0) / (len(meeting.ranks) - 1)
            for row, rank in enumerate(meeting.ranks):
                is_last = meeting.last == row
                waited_ms[rank] += float(mean_wait[is_last].sum()) / 1e6
                last[rank] += int(is_last.sum())
                calls[rank] += meeting.calls
        stragglers = []
        for rank in sorted(waited_ms, key=lambda rank: (-waited_ms[rank], rank)):
            if waited_ms[rank] > 0:
                stragglers.append(Straggler(rank, last[rank], calls[rank], waited_ms[rank]))
        return stragglers


def match(trace: Trace) -> Meetings:
    """Match the collectives of all ranks; leave out and note what cannot be matched."""
    if len(trace.ranks) < 2:
        return Meetings((), ("only one rank: waiting and transfer cannot be separated",))
    if not trace.one_clock:
        return Meetings((), ())
    calls_of = {rank.rank: rank.collectives for rank in trace.ranks}
    notes: list[str] = []
    meetings = []
    for (communicator, label), members in _calls_by_collective(trace).items():
        name = trace.names[label]
        group = None if communicator < 0 else trace.names[communicator]
        title = name if group is None else f"{name} of process group {group}"
        is_pair = len(trace.ranks) == 2 == len(members) and trace.world_size in (None, 2)
        if name in _PAIRED and not (name == "SendRecv" and is_pair):
            notes.append(
                f"{title}: the trace does not say which ranks take part, so its calls are not "
                "matched across ranks"
            )
            continue
        if group is None and len(members) < len(trace.ranks):
            notes.append(f"{title}: only on rank {', '.join(map(str, sorted(members)))}")
        if len(members) < 2:
            continue
        index = _matched_calls(title, calls_of, members, name in _MUTUAL, notes)
        if not index.shape[1]:
            continue
        ranks = tuple(sorted(members))
        start, end = _times(calls_of, ranks, index)
        wait = np.minimum(start.max(axis=0) - start, end - start)
        transfer, last = (end - start).min(axis=0), start.argmax(axis=0)
        meetings.append(Meeting(name, group, ranks, wait, transfer, last, index))
    meetings.sort(key=lambda meeting: -int(meeting.wait.sum() + meeting.transfer.sum()))
    return Meetings(tuple(meetings), tuple(notes))


def _calls_by_collective(trace: Trace) -> dict[Key, dict[int, Times]]:
    """Return the rows of each rank's calls in the order of their starts, by collective.

    If some calls of a rank do not name their communicator, all are matched by name and order.
    """
    groups: dict[Key, dict[int, Times]] = defaultdict(dict)
    for rank in trace.ranks:
        calls = rank.collectives
        communicators = calls.communicator
        if not (communicators >= 0).all():
            communicators = np.full(len(calls), -1)
        for label in np.unique(calls.label).tolist():
            for communicator in np.unique(communicators[calls.label == label]).tolist():
                mine = (calls.label == label) & (communicators == communicator)
                rows = np.flatnonzero(mine)
                order = np.argsort(calls.start[rows], kind="stable")
                groups[communicator, label][rank.rank] = rows[order]
    return groups


def _matched_calls(
    title: str,
    calls_of: Mapping[int, Collectives],
    members: Mapping[int, Times],
    mutual: bool,
    notes: list[str],
) -> Times:
    """Return the rows of the matched calls, shape (ranks, calls)."""
    ranks = sorted(members)
    fewest = min(ranks, key=lambda rank: len(members[rank]))
    count = len(members[fewest])
    if any(len(members[rank]) != count for rank in ranks):
        counts = ", ".join(f"{len(members[rank])} on rank {rank}" for rank in ranks)
        notes.append(
            f"{title}: {counts}; the {count} calls that fit best in time are matched, the others "
            "left out"
        )
        reference = calls_of[fewest].where(members[fewest])
        members = {rank: _best_run(members[rank], calls_of[rank], reference) for rank in ranks}
    index = np.stack([members[rank] for rank in ranks])
    start, end = _times(calls_of, ranks, index)
    fit: Flags = end.min(axis=0) + _CLOCK_TOLERANCE_NS >= start.max(axis=0)
    if mutual and not fit.all():
        notes.append(
            f"{title}: {int((~fit).sum())} of {count} calls end on one rank before another begins: "
            "not matched"
        )
        index = index[:, fit]
    return index


def _times(
    calls_of: Mapping[int, Collectives], ranks: Sequence[int], index: Times
) -> tuple[Times, Times]:
    """Return starts and ends of the calls of `index`, shape (ranks, calls)."""
    start = [calls_of[rank].start[rows] for rank, rows in zip(ranks, index, strict=True)]
    end = [calls_of[rank].end[rows] for rank, rows in zip(ranks, index, strict=True)]
    return np.stack(start), np.stack(end)


def _best_run(rows: Times, calls: Collectives, reference: Collectives) -> Times:
    """Return the run of a rank's calls that overlaps most calls of the reference in time.

    It is as long as the reference. A capture that began late lacks the first calls; one that ended
    early lacks the last.
    """
    count = len(reference)
    spare = len(rows) - count

    def overlaps(shift: int) -> int:
        run = rows[shift : shift + count]
        begins_before = calls.start[run] <= reference.end
        return int((begins_before & (reference.start <= calls.end[run])).sum())

    best = max([*range(min(spare, _MOST_SHIFTS) + 1), spare], key=overlaps)
    return rows[best : best + count]
