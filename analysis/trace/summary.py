"""Summarize communication in a trace, per rank and across ranks.

These are the numbers of `python -m analysis trace`, and the metrics that a record keeps.

- **Communication** is the time at which a kernel of NCCL ran, or a copy from one GPU to another
  (kind PtoP); on ranks without NCCL's kernels, a call of gloo on the host. Copies between host and
  GPU may be input, results or staging; a trace does not say which. So they are listed separately,
  with their own exposed time, and never added. Copies within a GPU and memsets are neither
  communication nor compute.
- **Compute** is the time at which any other kernel ran on the same GPU (NVIDIA's definition in
  nccl_gpu_overlap_trace); on a host rank, an operator.
- **Overlapped** = communication ∩ compute; **exposed** = the rest of communication. Simultaneous
  events count once, so `comm_ms` can be less than the sum of the calls. Part of the exposed time
  lies **in gaps**: between two kernels that compute and are at most 10 µs apart, as they are
  without communication too; a profiler makes these gaps wider.
- **Gap**: the median pause between two kernels that compute and are at most 10 µs apart.
- **Idle**: the share of the traced window (first to last activity of the rank's GPU) at which
  nothing ran. NCCL's kernel that waits for a peer is not idle: see wait.
What is not known is None, never 0.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.trace.intervals import intersect, subtract, total, union
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

    `gb_per_s` is bytes ÷ the copies' own time (GB = 1e9 bytes). `exposed_ms` is the time at which
    such a copy ran and no compute.
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

    GPU work belongs to the step that launched it (`by`: launch), or, if launches were not traced,
    in which it started (`by`: start).
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

    @property
    def overlapped_ms(self) -> float | None:
        """Return the time per step of communication with compute."""
        if self.comm_ms is None or self.exposed_ms is None:
            return None
        return self.comm_ms - self.exposed_ms


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
    """One collective over the ranks that take part: sums over the matched calls.

    `wait_ms` is the average rank's.
    """

    name: str
    communicator: str | None
    ranks: list[int]
    matched: int
    wait_ms: float
    transfer_ms: float
    transfer_avg_us: float
    transfer_median_us: float

    @property
    def wait_avg_us(self) -> float:
        """Return the average rank's wait in a call."""
        return 1e3 * self.wait_ms / self.matched


@dataclass(frozen=True)
class TraceSummary:
    """The summary of a whole trace."""

    ranks: list[RankSummary]
    source: str
    collectives: list[MatchedCollective]
    stragglers: list[Straggler]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`, `ranks` first."""
        return asdict(self)


def summarize(trace: Trace) -> TraceSummary:
    """Return all numbers of a trace."""
    meetings = match(trace)
    ranks = [_rank(rank, trace, meetings) for rank in trace.ranks]
    notes = [*trace.notes, *meetings.notes]
    silent = [str(rank.rank) for rank in trace.ranks if not len(rank.collectives)]
    if silent:
        which = "any rank" if len(silent) == len(ranks) else f"rank {', '.join(silent)}"
        notes.append(
            f"no kernel of NCCL on {which}: one GPU, another way to communicate, or hidden in CUDA "
            "graphs"
        )
    if not any(rank.steps for rank in ranks):
        notes.append("no range named step: time per step is not known")
    collectives = [_collective(meeting) for meeting in meetings.matched]
    return TraceSummary(ranks, trace.source, collectives, meetings.stragglers(), notes)


def _rank(rank: RankTrace, trace: Trace, meetings: Meetings) -> RankSummary:
    comm_ms = exposed_ms = overlapped_ms = backend = None
    if len(rank.communication):
        comm_ns = total(rank.communication)
        overlapped_ns = total(intersect(rank.communication, rank.work))
        comm_ms, overlapped_ms = _ms(comm_ns), _ms(overlapped_ns)
        exposed_ms = _ms(comm_ns - overlapped_ns)
    if len(rank.collectives):
        is_gloo = trace.names[rank.collectives.name[0]].startswith("gloo:")
        backend = "gloo" if is_gloo else "nccl"
    waits = meetings.waits(rank)
    idle_share = window_ms = gap_us = None
    if len(rank.activity) and not rank.on_host:
        window_ns = int(rank.activity[-1, 1] - rank.activity[0, 0])
        idle_share, window_ms = 1 - total(rank.activity) / window_ns, _ms(window_ns)
    if len(rank.gaps) and not rank.on_host:
        gap_us = float(np.median(rank.gaps[:, 1] - rank.gaps[:, 0])) / 1e3
    return RankSummary(
        rank=rank.rank,
        device=rank.device,
        comm_ms=comm_ms,
        exposed_ms=exposed_ms,
        overlapped_ms=overlapped_ms,
        nccl=_calls(rank, trace),
        memcpy=_copies(rank, trace),
        wait_ms=None if waits is None else _ms(float(np.nansum(waits))),
        compute_ms=_ms(total(rank.work)) if len(rank.compute) else None,
        gpu_idle_share=idle_share,
        gap_us=gap_us,
        window_ms=window_ms,
        steps=_steps(rank, trace, waits),
        backend=backend,
        pid=rank.pid,
        gpu=rank.gpu,
        bus_id=rank.bus_id,
    )


def _calls(rank: RankTrace, trace: Trace) -> list[CollectiveCalls]:
    summaries = []
    for label in np.unique(rank.collectives.label).tolist():
        times_ns = rank.collectives.duration[rank.collectives.label == label]
        sum_ns = int(times_ns.sum())
        summaries.append(
            CollectiveCalls(
                name=trace.names[label],
                calls=len(times_ns),
                avg_us=sum_ns / len(times_ns) / 1e3,
                median_us=float(np.median(times_ns)) / 1e3,
                min_us=int(times_ns.min()) / 1e3,
                max_us=int(times_ns.max()) / 1e3,
                total_ms=_ms(sum_ns),
            )
        )
    return sorted(summaries, key=lambda calls: -calls.total_ms)


def _copies(rank: RankTrace, trace: Trace) -> list[CopySummary]:
    summaries = []
    for kind in np.unique(rank.copies.name).tolist():
        copies = rank.copies.where(rank.copies.name == kind)
        sum_ns = int(copies.duration.sum())
        size = gb_per_s = None
        if (copies.bytes >= 0).all():
            size = int(copies.bytes.sum())
            gb_per_s = size / sum_ns if sum_ns else None  # bytes per ns
        exposed_ms = _ms(total(subtract(union(copies.spans), rank.work)))
        name = trace.names[kind]
        summaries.append(CopySummary(name, len(copies), size, _ms(sum_ns), gb_per_s, exposed_ms))
    return sorted(summaries, key=lambda copies: -copies.total_ms)


def _steps(rank: RankTrace, trace: Trace, waits: NDArray[np.float64] | None) -> StepSummary | None:
    named = step_ranges(rank, trace)
    if named is None:
        return None
    source, steps = named
    count = len(steps)
    inside = step_of(rank.collectives, steps) >= 0
    comm_ms = exposed_ms = in_gaps_ms = wait_ms = None
    if len(rank.communication):
        copies = rank.copies.where(rank.copies.peer)
        copies = copies.where(step_of(copies, steps) >= 0)
        communication = union(rank.collectives.spans[inside], copies.spans)
        exposed = subtract(communication, rank.work)
        comm_ms, exposed_ms = _ms(total(communication)) / count, _ms(total(exposed)) / count
        if not rank.on_host:
            in_gaps_ms = _ms(total(intersect(exposed, rank.gaps))) / count
    if waits is not None and (not inside.any() or not np.isnan(waits[inside]).all()):
        wait_ms = _ms(float(np.nansum(waits[inside]))) / count
    has_launches = (rank.compute.launch >= 0).any() or (rank.collectives.launch >= 0).any()
    return StepSummary(
        source=source,
        count=count,
        median_ms=float(np.median(steps.duration)) / 1e6,
        times_ms=(steps.duration / 1e6).tolist(),
        by="launch" if has_launches else "start",
        comm_ms=comm_ms,
        exposed_ms=exposed_ms,
        exposed_in_gaps_ms=in_gaps_ms,
        wait_ms=wait_ms,
    )


def _collective(meeting: Meeting) -> MatchedCollective:
    return MatchedCollective(
        name=meeting.name,
        communicator=meeting.communicator,
        ranks=list(meeting.ranks),
        matched=meeting.calls,
        wait_ms=_ms(float(meeting.wait.sum()) / len(meeting.ranks)),
        transfer_ms=_ms(float(meeting.transfer.sum())),
        transfer_avg_us=float(meeting.transfer.mean()) / 1e3,
        transfer_median_us=float(np.median(meeting.transfer)) / 1e3,
    )


def _ms(ns: float) -> float:
    return ns / 1e6


# --- metrics --------------------------------------------------------------------------------------


def trace_metrics(summary: TraceSummary) -> dict[str, float]:
    """Return the metrics that a record keeps of whole steps (analysis.trace.steps.within_steps).

    They are means over ranks of times per step; METHOD.md, "Traces", defines each. A metric is
    present only if every rank knows it.
    """
    steps = [rank.steps for rank in summary.ranks if rank.steps is not None]
    means: dict[str, float | None] = {}
    if len(steps) == len(summary.ranks):
        means = {
            "trace/comm_ms_per_step": _mean(step.comm_ms for step in steps),
            "trace/exposed_ms_per_step": _mean(step.exposed_ms for step in steps),
            "trace/exposed_in_gaps_ms_per_step": _mean(step.exposed_in_gaps_ms for step in steps),
            "trace/overlapped_ms_per_step": _mean(step.overlapped_ms for step in steps),
            "trace/wait_ms_per_step": _mean(step.wait_ms for step in steps),
        }
    for backend in ("nccl", "gloo"):
        ranks = [rank for rank in summary.ranks if rank.backend == backend]
        calls = [call for rank in ranks for call in rank.nccl]
        count = sum(call.calls for call in calls)
        if count:
            means[f"trace/{backend}_avg_us"] = sum(call.total_ms for call in calls) * 1e3 / count
    means["trace/gpu_idle_share"] = _mean(rank.gpu_idle_share for rank in summary.ranks)
    means["trace/gap_us"] = _mean(rank.gap_us for rank in summary.ranks)
    return {name: value for name, value in means.items() if value is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean; None if a value is not known, or there is none."""
    present = list(values)
    known = [value for value in present if value is not None]
    if not known or len(known) < len(present):
        return None
    return sum(known) / len(known)
