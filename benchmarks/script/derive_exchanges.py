"""Derive which collectives a step of a script holds, from the lines that exchanges.py wrote."""

import statistics
from collections import defaultdict

from benchmarks.collectives.busbw import COLLECTIVES
from benchmarks.derived import RankLines

NAMES = {"_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}


def collectives_of_a_step(lines: RankLines) -> list[dict[str, str | float | None]]:
    """Return kind, bytes, calls, ms and busbw in GB/s of each collective in rank 0's steps.

    `ms` is the shortest of all ranks, that of the last to begin; None: no GPU.
    """
    calls, call_ms = defaultdict(list), defaultdict(list)
    steps = 0
    for rank, rank_lines in lines.items():
        for line in rank_lines:
            steps += rank == 0 and bool(line.get("collectives"))
            for kind, group, number, size, gpu_ms, _ in line.get("collectives") or ():
                if rank == 0:
                    calls[NAMES.get(kind, kind), size].append((group, number))
                if gpu_ms is not None:
                    call_ms[group, number].append(gpu_ms)
    rows = []
    for (kind, size), names in calls.items():
        shortest_ms = [min(call_ms[name]) for name in names if name in call_ms]
        ms = statistics.median(shortest_ms) if shortest_ms else None
        busbw = None
        if ms and kind in COLLECTIVES:
            shares = len(lines) if kind == "all_gather" else 1
            busbw = size * shares / ms / 1e6 * COLLECTIVES[kind].factor(len(lines))
        row = {"kind": kind, "bytes": size, "calls": len(names) / steps, "ms": ms}
        rows.append({**row, "busbw_gb_per_s": busbw})
    return rows
