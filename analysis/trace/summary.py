"""Summarize communication in a trace, per rank and across ranks: the numbers of `python -m analysis trace`.

- **Communication** is the time at which a kernel of NCCL ran, or a copy from one GPU to another (kind PtoP); on ranks
  without NCCL's kernels, a call of gloo on the host. Copies between host and GPU may be input, results or staging; a
  trace does not say which. So they are listed separately, with their own exposed time, and never added. Copies within
  a GPU and memsets are neither communication nor compute.
- **Compute** is the time at which any other kernel ran on the same GPU (NVIDIA's definition in nccl_gpu_overlap_trace);
  on a host rank, an operator.
- **Overlapped** = communication ∩ compute; **exposed** = the rest of communication. Simultaneous events count once, so
  `comm_ms` can be less than the sum of the calls. Part of the exposed time lies **in gaps**: between two kernels that compute
  and are at most 10 µs apart, as they are without communication too; a profiler makes these gaps wider.
- **Gap**: the median pause between two kernels that compute and are at most 10 µs apart.
- **Idle**: the share of the traced window (first to last activity of the rank's GPU) at which nothing ran. NCCL's
  kernel that waits for a peer is not idle: see wait.
What is not known is None, never 0.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.trace.intervals import Flags, intersect, subtract, total, union
from analysis.trace.matching import Meeting, Meetings, Straggler, match
from analysis.trace.model import RankTrace, Trace
from analysis.trace.steps import step_of, step_ranges


@dataclass(frozen=True)
class CollectiveCalls:
    """The calls of one collective on one rank."""

    name: str
    calls: int
    avg_us: float
    median_us: float
    min_us: float
    max_us: float
    total_ms: float


@dataclass(frozen=True)
class CopySummary:
    """The copies of one kind on one rank.

    `gb_per_s` is bytes ÷ the copies' own time (GB = 1e9 bytes). `exposed_ms` is the time at which such a copy ran and
    no compute.
    """

    kind: str
    calls: int
    bytes: int | None
    total_ms: float
    gb_per_s: float | None
    exposed_ms: float


@dataclass(frozen=True)
class StepSummary:
    """Steps: host ranges named step. Times per step are means.

    GPU work belongs to the step that launched it (`by`: launch), or, if launches were not traced, in which it started
    (`by`: start).
    """

    source: str
    count: int
    median_ms: float
    times_ms: list[float]
    by: str
    comm_ms: float | None
    exposed_ms: float | None
    exposed_in_gaps_ms: float | None  # of `exposed_ms`
    wait_ms: float | None


@dataclass(frozen=True)
class RankSummary:
    """One rank. `wait_ms`: how long it waited in its collectives for the last rank.

    `gap_us`: the median pause of at most 10 µs between two compute kernels on its GPU.
    """

    rank: int
    device: int | None
    comm_ms: float | None
    exposed_ms: float | None
    overlapped_ms: float | None
    nccl: list[CollectiveCalls]
    memcpy: list[CopySummary]
    wait_ms: float | None
    compute_ms: float | None
    gpu_idle_share: float | None
    gap_us: float | None
    window_ms: float | None
    steps: StepSummary | None
    backend: str | None
    pid: int | None
    gpu: str | None
    bus_id: str | None


@dataclass(frozen=True)
class MatchedCollective:
    """One collective over the ranks that take part: sums over the matched calls; `wait_ms` is the average rank's."""

    name: str
    communicator: str | None
    ranks: list[int]
    matched: int
    wait_ms: float
    transfer_ms: float
    transfer_avg_us: float
    transfer_median_us: float


@dataclass(frozen=True)
class TraceSummary:
    """The summary of a whole trace."""

    source: str
    ranks: list[RankSummary]
    collectives: list[MatchedCollective]
    stragglers: list[Straggler]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return the object of `--json`, `ranks` first."""
        return {"ranks": [asdict(rank) for rank in self.ranks]} | {
            one: value for one, value in asdict(self).items() if one != "ranks"
        }


def summarize(trace: Trace) -> TraceSummary:
    """Return all numbers of a trace."""
    meetings = match(trace)
    ranks = [_rank(rank, trace, meetings) for rank in trace.ranks]
    notes = [*trace.notes, *meetings.notes]
    silent = [rank.rank for rank in trace.ranks if not len(rank.collectives)]
    if silent:
        which = "any rank" if len(silent) == len(ranks) else f"rank {', '.join(map(str, silent))}"
        notes.append(
            f"no kernel of NCCL on {which}: one GPU, another way to communicate, or hidden in CUDA graphs"
        )
    if not any(rank.steps for rank in ranks):
        notes.append("no range named step: time per step is not known")
    return TraceSummary(
        trace.source,
        ranks,
        [_across(meeting) for meeting in meetings.matched],
        meetings.stragglers(),
        notes,
    )


def _rank(rank: RankTrace, trace: Trace, meetings: Meetings) -> RankSummary:
    work, communication, activity = rank.work, rank.communication, rank.activity
    known = len(communication) > 0
    overlapped = intersect(communication, work)
    waits = meetings.waits(rank)
    window = int(activity[-1, 1] - activity[0, 0]) if len(activity) and not rank.on_host else None
    gaps = rank.gaps
    return RankSummary(
        rank=rank.rank,
        device=rank.device,
        comm_ms=_ms(total(communication)) if known else None,
        exposed_ms=_ms(total(communication) - total(overlapped)) if known else None,
        overlapped_ms=_ms(total(overlapped)) if known else None,
        nccl=_calls(rank, trace),
        memcpy=_copied(rank, trace),
        wait_ms=_ms(float(np.nansum(waits))) if waits is not None else None,
        compute_ms=_ms(total(work)) if len(rank.compute) else None,
        gpu_idle_share=1 - total(activity) / window if window else None,
        gap_us=float(np.median(gaps[:, 1] - gaps[:, 0])) / 1e3
        if len(gaps) and not rank.on_host
        else None,
        window_ms=_ms(window) if window else None,
        steps=_steps(rank, trace, waits),
        backend=_backend(rank, trace),
        pid=rank.pid,
        gpu=rank.gpu,
        bus_id=rank.bus_id,
    )


def _backend(rank: RankTrace, trace: Trace) -> str | None:
    if not len(rank.collectives):
        return None
    return "gloo" if trace.names[rank.collectives.name[0]].startswith("gloo:") else "nccl"


def _calls(rank: RankTrace, trace: Trace) -> list[CollectiveCalls]:
    found = []
    for label in np.unique(rank.collectives.label).tolist():
        time = rank.collectives.duration[rank.collectives.label == label]
        spent, middle = int(time.sum()), float(np.median(time))
        ends = int(time.min()) / 1e3, int(time.max()) / 1e3
        found.append(
            CollectiveCalls(
                trace.names[label],
                len(time),
                spent / len(time) / 1e3,
                middle / 1e3,
                *ends,
                _ms(spent),
            )
        )
    return sorted(found, key=lambda one: -one.total_ms)


def _copied(rank: RankTrace, trace: Trace) -> list[CopySummary]:
    found, work = [], rank.work
    for kind in np.unique(rank.copies.name).tolist():
        some = rank.copies.where(rank.copies.name == kind)
        time = int(some.duration.sum())
        moved = int(some.bytes.sum()) if (some.bytes >= 0).all() else None
        speed = moved / time if moved is not None and time else None  # bytes per ns are GB/s
        exposed = total(subtract(union(some.spans), work))
        found.append(
            CopySummary(trace.names[kind], len(some), moved, _ms(time), speed, _ms(exposed))
        )
    return sorted(found, key=lambda one: -one.total_ms)


def _steps(rank: RankTrace, trace: Trace, waits: NDArray[np.float64] | None) -> StepSummary | None:
    named = step_ranges(rank, trace)
    if named is None:
        return None
    source, steps = named
    count = len(steps)
    inside: Flags = step_of(rank.collectives, steps) >= 0
    peers = rank.copies.where(rank.copies.peer)
    peers = peers.where(step_of(peers, steps) >= 0)
    communication = union(rank.collectives.spans[inside], peers.spans)
    exposed = subtract(communication, rank.work)
    known = len(rank.communication) > 0
    waited = None if waits is None else waits[inside]
    if waited is not None and len(waited) and np.isnan(waited).all():
        waited = None
    launched = bool((rank.compute.launch >= 0).any() or (rank.collectives.launch >= 0).any())
    return StepSummary(
        source=source,
        count=count,
        median_ms=float(np.median(steps.duration)) / 1e6,
        times_ms=(steps.duration / 1e6).tolist(),
        by="launch" if launched else "start",
        comm_ms=_ms(total(communication)) / count if known else None,
        exposed_ms=_ms(total(exposed)) / count if known else None,
        exposed_in_gaps_ms=_ms(total(intersect(exposed, rank.gaps))) / count
        if known and not rank.on_host
        else None,
        wait_ms=_ms(float(np.nansum(waited))) / count if waited is not None else None,
    )


def _across(meeting: Meeting) -> MatchedCollective:
    return MatchedCollective(
        meeting.name,
        meeting.communicator,
        list(meeting.ranks),
        meeting.calls,
        _ms(float(meeting.wait.sum()) / len(meeting.ranks)),
        _ms(float(meeting.transfer.sum())),
        float(meeting.transfer.mean()) / 1e3,
        float(np.median(meeting.transfer)) / 1e3,
    )


def _ms(ns: float) -> float:
    return ns / 1e6
