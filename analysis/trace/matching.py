"""Match the same collective on several ranks: who came last, how long the others waited, how long the transfer took.

A collective's n-th call on one rank is the n-th on every other (NCCL demands the same order of all ranks), per
communicator if the trace names it, else per name. Its time on a rank splits into
- **wait**: from its own start until the last rank has started;
- **transfer**: the shortest time of any rank, usually of the rank that came last and waited for nobody;
- the rest: the ranks do not leave at the same time.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.trace.intervals import Flags, Times
from analysis.trace.model import Collectives, RankTrace, Trace

# Clocks of GPUs of one host, as CUPTI converts them, agree to some µs: a gap below this is no contradiction.
_CLOCK_TOLERANCE_NS = 20_000
# No rank can leave these before the last has come. In the others the root may hand its data to a buffer and leave.
_MUTUAL = {"AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Barrier"}
_PAIRED = {
    "SendRecv",
    "Send",
    "Recv",
    "Generic",
    "other",
}  # the trace does not say which ranks take part
_SHIFTS = 1000  # tried if one rank has more calls


@dataclass(frozen=True, eq=False)
class Meeting:
    """One collective of one communicator: `calls` matched; arrays have one row per rank of `ranks`, ns.

    `wait[r, i]`: how long the r-th rank waited in call i; `transfer[i]`: the shortest rank's time; `last[i]`: the row
    of the rank that came last; `index[r, i]`: the call's place in that rank's collectives.
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
    """A rank that came last in `last` of `of` matched calls; the others waited `others_waited_ms` on average."""

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
        """Return the wait in each of the rank's collectives, ns, shape (calls,), NaN if not matched; None if none is."""
        found = np.full(len(rank.collectives), np.nan)
        for one in self.matched:
            if rank.rank in one.ranks:
                row = one.ranks.index(rank.rank)
                found[one.index[row]] = one.wait[row]
        return None if np.isnan(found).all() else found

    def stragglers(self) -> list[Straggler]:
        """Return the ranks that others waited for, longest wait first."""
        waited: dict[int, float] = defaultdict(float)
        last: dict[int, int] = defaultdict(int)
        of: dict[int, int] = defaultdict(int)
        for one in self.matched:
            others = one.wait.sum(axis=0) / (len(one.ranks) - 1)
            for row, rank in enumerate(one.ranks):
                waited[rank] += float(others[one.last == row].sum()) / 1e6
                last[rank] += int((one.last == row).sum())
                of[rank] += one.calls
        order = sorted(waited, key=lambda rank: (-waited[rank], rank))
        return [
            Straggler(rank, last[rank], of[rank], waited[rank])
            for rank in order
            if waited[rank] > 0
        ]


def match(trace: Trace) -> Meetings:
    """Match the collectives of all ranks; leave out and note what cannot be matched."""
    notes: list[str] = []
    if len(trace.ranks) < 2:
        return Meetings((), ("only one rank: waiting and transfer cannot be separated",))
    if not trace.one_clock:
        return Meetings((), ())
    groups: dict[tuple[int, int], dict[int, Times]] = defaultdict(dict)
    for rank in trace.ranks:
        calls = rank.collectives
        # If some calls do not name their communicator, all are matched by name and order.
        known = bool((calls.communicator >= 0).all()) and len(calls) > 0
        for label in np.unique(calls.label).tolist():
            for communicator in (
                np.unique(calls.communicator[calls.label == label]).tolist() if known else [-1]
            ):
                mine = (calls.label == label) & ((calls.communicator == communicator) | (not known))
                index = np.flatnonzero(mine)
                groups[communicator, label][rank.rank] = index[
                    np.argsort(calls.start[index], kind="stable")
                ]
    by_number = {rank.rank: rank.collectives for rank in trace.ranks}
    found = []
    for (communicator, label), members in groups.items():
        name = trace.names[label]
        title = name if communicator < 0 else f"{name} of process group {trace.names[communicator]}"
        if not _can_match(name, title, members, trace, communicator < 0, notes):
            continue
        meeting = _meet(title, by_number, members, name in _MUTUAL, notes)
        if meeting is not None:
            said = None if communicator < 0 else trace.names[communicator]
            found.append(Meeting(name, said, tuple(sorted(members)), *meeting))
    found.sort(key=lambda one: -int(one.wait.sum() + one.transfer.sum()))
    return Meetings(tuple(found), tuple(notes))


def _can_match(
    name: str, title: str, members: dict[int, Times], trace: Trace, all_meet: bool, notes: list[str]
) -> bool:
    two = len(trace.ranks) == 2 == len(members) and trace.world_size in (None, 2)
    if name in _PAIRED and not (name == "SendRecv" and two):
        notes.append(
            f"{title}: the trace does not say which ranks take part, so its calls are not matched across ranks"
        )
        return False
    if all_meet and len(members) < len(trace.ranks):
        notes.append(f"{title}: only on rank {', '.join(map(str, sorted(members)))}")
    return len(members) > 1


def _meet(
    title: str,
    calls: dict[int, Collectives],
    members: dict[int, Times],
    mutual: bool,
    notes: list[str],
) -> tuple[Times, Times, NDArray[np.intp], Times] | None:
    """Return wait, transfer, last and index of a `Meeting`; None without a matched call."""
    ranks = sorted(members)
    fewest = min(ranks, key=lambda rank: len(members[rank]))
    count = len(members[fewest])
    if any(len(members[rank]) != count for rank in ranks):
        told = ", ".join(f"{len(members[rank])} on rank {rank}" for rank in ranks)
        notes.append(
            f"{title}: {told}; the {count} calls that fit best in time are matched, the others left out"
        )
        reference = calls[fewest].where(members[fewest])
        members = {rank: _best_run(members[rank], calls[rank], reference) for rank in ranks}
    index = np.stack([members[rank] for rank in ranks])
    start = np.stack([calls[rank].start[row] for rank, row in zip(ranks, index, strict=True)])
    end = np.stack([calls[rank].end[row] for rank, row in zip(ranks, index, strict=True)])
    fit: Flags = end.min(axis=0) + _CLOCK_TOLERANCE_NS >= start.max(axis=0)
    if mutual and not fit.all():
        notes.append(
            f"{title}: {int((~fit).sum())} of {count} calls end on one rank before another begins: not matched"
        )
        index, start, end = index[:, fit], start[:, fit], end[:, fit]
    if not index.shape[1]:
        return None
    latest = start.max(axis=0)
    wait = np.minimum(latest - start, end - start)
    return wait, (end - start).min(axis=0), start.argmax(axis=0), index


def _best_run(index: Times, calls: Collectives, reference: Collectives) -> Times:
    """Return the run of a rank's calls, as long as the reference, that overlaps most of its calls in time.

    A capture that began late lacks the first calls; one that ended early lacks the last.
    """
    spare, count = len(index) - len(reference), len(reference)
    shifts = [*range(min(spare, _SHIFTS) + 1), spare]

    def overlaps(shift: int) -> int:
        run = index[shift : shift + count]
        return int(
            ((calls.start[run] <= reference.end) & (reference.start <= calls.end[run])).sum()
        )

    best = max(shifts, key=overlaps)
    return index[best : best + count]
