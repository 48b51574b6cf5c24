"""The tables of `nsys stats`: cuda_gpu_kern_sum and cuda_gpu_mem_time_sum, over all ranks of a trace.

They follow those reports: kernels by their full (demangled) name, copies by direction, memsets as one. Times are ns. The
share is that of the table's own total. The median of an even number is the mean of the middle two. The standard
deviation is that of a sample (n - 1), 0 for one call. SQLite rounds averages, medians and deviations to one decimal, as
in nsys. Largest total first.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from analysis.trace.intervals import Times
from analysis.trace.model import Trace
from analysis.trace.names import COPY_LABELS


@dataclass(frozen=True)
class StatsRow:
    """One line of such a table."""

    name: str
    share_percent: float
    total_ns: int
    instances: int
    avg_ns: float
    median_ns: float
    min_ns: int
    max_ns: int
    stddev_ns: float


def kernel_rows(trace: Trace) -> list[StatsRow]:
    """Return cuda_gpu_kern_sum: every GPU kernel, NCCL's too. Ranks on the host have no rows."""
    events = [
        table
        for rank in trace.ranks
        if not rank.on_host
        for table in (rank.compute, rank.collectives)
    ]
    gloo = [number for number, name in enumerate(trace.names) if name.startswith("gloo:")]
    events = [table.where(~np.isin(table.name, gloo)) for table in events]
    return _rows(
        trace.names, [table.name for table in events], [table.duration for table in events]
    )


def memory_rows(trace: Trace) -> list[StatsRow]:
    """Return cuda_gpu_mem_time_sum: copies and memsets on GPUs."""
    events = [table for rank in trace.ranks for table in (rank.copies, rank.memsets)]
    names = [_operation(name) for name in trace.names]
    return _rows(names, [table.name for table in events], [table.duration for table in events])


def _operation(name: str) -> str:
    return f"[CUDA memcpy {COPY_LABELS[name]}]" if name in COPY_LABELS else "[CUDA memset]"


def _rows(
    names: Sequence[str], numbers: Sequence[Times], durations: Sequence[Times]
) -> list[StatsRow]:
    if not sum(len(some) for some in numbers):
        return []
    texts = sorted({names[number] for some in numbers for number in np.unique(some).tolist()})
    row_of = {text: row for row, text in enumerate(texts)}
    to_row = np.array([row_of.get(name, -1) for name in names], dtype=np.int64)
    row, time = to_row[np.concatenate(numbers)], np.concatenate(durations)
    order = np.lexsort((time, row))
    row, time = row[order], time[order]
    bounds = np.searchsorted(row, np.arange(len(texts) + 1))
    whole = int(time.sum())
    found = []
    with closing(sqlite3.connect(":memory:")) as connection:
        for text, first, end in zip(texts, bounds[:-1], bounds[1:], strict=True):
            some = time[first:end]
            spent, count = int(some.sum()), len(some)
            spread = float(some.std(ddof=1)) if count > 1 else 0.0
            exact = (
                100 * spent / whole if whole else 0.0,
                spent / count,
                float(np.median(some)),
                spread,
            )
            share, mean, median, spread = connection.execute(
                f"SELECT {', '.join(['round(?, 1)'] * 4)}", exact
            ).fetchone()
            found.append(
                StatsRow(
                    text, share, spent, count, mean, median, int(some[0]), int(some[-1]), spread
                )
            )
    return sorted(found, key=lambda one: (-one.total_ns, one.instances, one.name))
