"""The metrics of a trace that a record keeps: times per step, averaged over ranks. METHOD.md, "Traces", defines each.

A metric is present only if every rank of the trace knows it: what is not known is absent, never 0.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names of metrics are read where numpy would cost a tenth of a second
    from analysis.trace.summary import RankSummary, TraceSummary

TRACE_EXPOSED = "trace/exposed_ms_per_step"


def trace_metrics(summary: "TraceSummary") -> dict[str, float]:
    """Return the metrics of a summary of whole steps (analysis.trace.steps.within_steps)."""
    steps = [rank.steps for rank in summary.ranks if rank.steps is not None]
    every = len(steps) == len(summary.ranks)
    found = {
        "trace/comm_ms_per_step": _mean(one.comm_ms for one in steps),
        TRACE_EXPOSED: _mean(one.exposed_ms for one in steps),
        "trace/exposed_in_gaps_ms_per_step": _mean(one.exposed_in_gaps_ms for one in steps),
        "trace/overlapped_ms_per_step": _mean(
            None if one.comm_ms is None or one.exposed_ms is None else one.comm_ms - one.exposed_ms
            for one in steps
        ),
        "trace/wait_ms_per_step": _mean(one.wait_ms for one in steps),
    }
    found = found if every else {}
    for backend in ("nccl", "gloo"):
        found[f"trace/{backend}_avg_us"] = _average_us(
            [one for one in summary.ranks if one.backend == backend]
        )
    found["trace/gpu_idle_share"] = _mean(one.gpu_idle_share for one in summary.ranks)
    found["trace/gap_us"] = _mean(one.gap_us for one in summary.ranks)
    return {name: value for name, value in found.items() if value is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = list(values)
    if not known or None in known:
        return None
    return sum(value for value in known if value is not None) / len(known)


def _average_us(ranks: "list[RankSummary]") -> float | None:
    """Return the average µs of a collective's call, over all calls of all ranks."""
    calls = [one for rank in ranks for one in rank.nccl]
    count = sum(one.calls for one in calls)
    return sum(one.total_ms for one in calls) * 1e3 / count if count else None
