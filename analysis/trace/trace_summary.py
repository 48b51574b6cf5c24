"""Summarize communication in a trace, per rank and across ranks: METHOD.md, "Traces".

These are the numbers of `python -m analysis trace`, and the metrics that a record keeps.

- **Communication**: on ranks without NCCL's kernels, a call of gloo on the host. Copies between
  host and GPU may be input, results or staging; a trace does not say which. So they are listed
  separately, with their own exposed time, and never added. Copies within a GPU and memsets are
  neither communication nor compute.
- **Compute** is any other kernel on the same GPU (NVIDIA's definition in nccl_gpu_overlap_trace);
  on a host rank, an operator. Simultaneous events count once.
- **Gap**: the median pause between two kernels that compute and are at most 10 µs apart. There are
  gaps without communication too; a profiler makes them wider.
- **Idle**: the share of the traced window (first to last activity of the rank's GPU) at which
  nothing ran. NCCL's kernel that waits for a peer is not idle: see wait.
What is not known is None, never 0.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.trace.events import RankTrace, Trace, intersect, spans, subtract, total, union
from analysis.trace.steps import Meeting, match, step_of, step_ranges, stragglers, waits_of

Row = dict[str, Any]


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
        """Return the time of communication beside compute."""
        if self.comm_ms is None or self.exposed_ms is None:
            return None
        return self.comm_ms - self.exposed_ms


@dataclass(frozen=True)
class RankSummary:
    """One rank: `nccl` has a row per collective, `memcpy` one per kind of copy, whose `gb_per_s` is
    bytes ÷ the copies' own time (GB = 1e9 bytes), and `exposed_ms` the time without compute.
    """

    rank: int
    device: int | None
    comm_ms: float | None
    exposed_ms: float | None
    overlapped_ms: float | None
    nccl: list[Row]
    memcpy: list[Row]
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
class TraceSummary:
    """The summary of a whole trace. `collectives` has a row per collective over the ranks that take
    part: sums over the matched calls, `wait_ms` of the average rank.
    """

    ranks: list[RankSummary]
    source: str
    collectives: list[Row]
    stragglers: list[Row]
    notes: list[str]

    def to_json(self) -> Row:
        """Return the object of `--json`, `ranks` first."""
        return asdict(self)


def summarize(trace: Trace) -> TraceSummary:
    """Return all numbers of a trace."""
    meetings, match_notes = match(trace)
    ranks = [_rank(rank, trace, meetings) for rank in trace.ranks]
    notes = [*trace.notes, *match_notes]
    silent = [str(traced.rank) for traced in trace.ranks if not len(traced.collectives)]
    if silent:
        which = f"rank {', '.join(silent)}"
        if len(silent) == len(ranks):
            which = "any rank"
        notes.append(
            f"no kernel of NCCL on {which}: one GPU, another way to communicate, or hidden in CUDA "
            "graphs"
        )
    if not any(rank.steps for rank in ranks):
        notes.append("no range named step: time per step is not known")
    collectives = []
    for meeting in meetings:
        collectives.append(
            {
                "name": meeting.name,
                "communicator": meeting.communicator,
                "ranks": meeting.ranks,
                "matched": len(meeting.transfer),
                "wait_ms": float(meeting.wait.sum()) / len(meeting.ranks) / 1e6,
                "transfer_ms": float(meeting.transfer.sum()) / 1e6,
                "transfer_avg_us": float(meeting.transfer.mean()) / 1e3,
                "transfer_median_us": float(np.median(meeting.transfer)) / 1e3,
            }
        )
    return TraceSummary(ranks, trace.source, collectives, stragglers(meetings), notes)


def _rank(rank: RankTrace, trace: Trace, meetings: list[Meeting]) -> RankSummary:
    comm_ms = exposed_ms = overlapped_ms = wait_ms = compute_ms = None
    if len(rank.communication):
        comm_ns = total(rank.communication)
        overlapped_ns = total(intersect(rank.communication, rank.work))
        comm_ms, overlapped_ms = comm_ns / 1e6, overlapped_ns / 1e6
        exposed_ms = (comm_ns - overlapped_ns) / 1e6
    backend = None
    if len(rank.collectives):
        backend = rank.backend
    waits = waits_of(rank, meetings)
    if waits is not None:
        wait_ms = float(np.nansum(waits)) / 1e6
    if len(rank.compute):
        compute_ms = total(rank.work) / 1e6
    idle_share = window_ms = gap_us = None
    if len(rank.activity) and not rank.on_host:
        window_ns = int(rank.activity[-1, 1] - rank.activity[0, 0])
        idle_share, window_ms = 1 - total(rank.activity) / window_ns, window_ns / 1e6
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
        wait_ms=wait_ms,
        compute_ms=compute_ms,
        gpu_idle_share=idle_share,
        gap_us=gap_us,
        window_ms=window_ms,
        steps=_steps(rank, trace, waits),
        backend=backend,
        pid=rank.pid,
        gpu=rank.gpu,
        bus_id=rank.bus_id,
    )


def _calls(rank: RankTrace, trace: Trace) -> list[Row]:
    rows = []
    for name in np.unique(rank.collectives["name"]).tolist():
        calls = rank.collectives[rank.collectives["name"] == name]
        times_ns = calls["end"] - calls["start"]
        sum_ns = int(times_ns.sum())
        rows.append(
            {
                "name": trace.names[name],
                "calls": len(calls),
                "avg_us": sum_ns / len(calls) / 1e3,
                "median_us": float(np.median(times_ns)) / 1e3,
                "min_us": int(times_ns.min()) / 1e3,
                "max_us": int(times_ns.max()) / 1e3,
                "total_ms": sum_ns / 1e6,
            }
        )
    return sorted(rows, key=lambda row: -row["total_ms"])


def _copies(rank: RankTrace, trace: Trace) -> list[Row]:
    rows = []
    for kind in np.unique(rank.copies["name"]).tolist():
        copies = rank.copies[rank.copies["name"] == kind]
        sum_ns = int((copies["end"] - copies["start"]).sum())
        size = gb_per_s = None
        if (copies["bytes"] >= 0).all():
            size = int(copies["bytes"].sum())
            if sum_ns:
                gb_per_s = size / sum_ns  # bytes per ns
        rows.append(
            {
                "kind": trace.names[kind],
                "calls": len(copies),
                "bytes": size,
                "total_ms": sum_ns / 1e6,
                "gb_per_s": gb_per_s,
                "exposed_ms": total(subtract(union(spans(copies)), rank.work)) / 1e6,
            }
        )
    return sorted(rows, key=lambda row: -row["total_ms"])


def _steps(rank: RankTrace, trace: Trace, waits: NDArray[np.float64] | None) -> StepSummary | None:
    steps = step_ranges(rank, trace)
    if not len(steps):
        return None
    count = len(steps)
    inside = step_of(rank.collectives, steps) >= 0
    comm_ms = exposed_ms = in_gaps_ms = wait_ms = None
    if len(rank.communication):
        peer = rank.copies[(rank.copies["peer"] == 1) & (step_of(rank.copies, steps) >= 0)]
        communication = union(spans(rank.collectives[inside]), spans(peer))
        exposed = subtract(communication, rank.work)
        comm_ms = total(communication) / 1e6 / count
        exposed_ms = total(exposed) / 1e6 / count
        if not rank.on_host:
            in_gaps_ms = total(intersect(exposed, rank.gaps)) / 1e6 / count
    if waits is not None and (not inside.any() or not np.isnan(waits[inside]).all()):
        wait_ms = float(np.nansum(waits[inside])) / 1e6 / count
    by = "start"
    if (rank.compute["launch"] >= 0).any() or (rank.collectives["launch"] >= 0).any():
        by = "launch"
    durations_ns = steps["end"] - steps["start"]
    return StepSummary(
        source='range "step"',
        count=count,
        median_ms=float(np.median(durations_ns)) / 1e6,
        times_ms=(durations_ns / 1e6).tolist(),
        by=by,
        comm_ms=comm_ms,
        exposed_ms=exposed_ms,
        exposed_in_gaps_ms=in_gaps_ms,
        wait_ms=wait_ms,
    )


def trace_metrics(summary: TraceSummary) -> dict[str, float]:
    """Return the metrics that a record keeps of whole steps (analysis.trace.steps.within_steps).

    They are means over ranks of times per step; METHOD.md, "Traces", defines each. A metric is
    present only if every rank knows it.
    """
    steps = [rank.steps for rank in summary.ranks if rank.steps is not None]
    means: dict[str, float | None] = {}
    if len(steps) == len(summary.ranks):
        for name in ("comm_ms", "exposed_ms", "exposed_in_gaps_ms", "overlapped_ms", "wait_ms"):
            means[f"trace/{name}_per_step"] = _mean(getattr(step, name) for step in steps)
    for backend in ("nccl", "gloo"):
        count, total_ms = 0, 0.0
        for rank in summary.ranks:
            if rank.backend == backend:
                for row in rank.nccl:
                    count += row["calls"]
                    total_ms += row["total_ms"]
        if count:
            means[f"trace/{backend}_avg_us"] = total_ms * 1e3 / count
    means["trace/gpu_idle_share"] = _mean(rank.gpu_idle_share for rank in summary.ranks)
    means["trace/gap_us"] = _mean(rank.gap_us for rank in summary.ranks)
    return {name: value for name, value in means.items() if value is not None}


def _mean(values: Iterable[Any]) -> float | None:
    numbers = list(values)
    if not numbers or None in numbers:
        return None
    return float(sum(numbers) / len(numbers))
