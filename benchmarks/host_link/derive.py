"""The numbers of `benchmark=host_link` from the raw lines of the ranks. README.md."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.derived import Derived, RankLines, together
from benchmarks.record import Kind
from benchmarks.timing import statistics
from conf.cell import Cell

LABELS = {
    "to_device": "host to device",
    "to_host": "device to host",
    "both": "both at once, each way",
    "copy": "copy (reads and writes)",
    "add": "sum of two arrays",
}
# A kind of memory: what it adds to a metric's name, and its title.
MEMORIES = {
    "pinned": ("", "pinned"),
    "pageable": ("_pageable", "pageable"),
    "host": ("_host", "host memory"),
}
# The reference of staging comes first.
FIRST = ("host_link/all_both_gb_per_s", "host_link/one_both_gb_per_s")


def derive(lines: RankLines, cell: Cell) -> Derived:
    """Return a row for each operation, alone and all at once, the metrics, and a printed table."""
    windows = together(lines, Kind.BLOCK, has="operation")
    rows = []
    metrics = {}
    for window in windows:
        facts, by_rank = window[0], [block["ms"] for block in window]
        at_once = facts["at_once"]
        counted = facts["counted_bytes"] * len(by_rank[0])
        seconds = [math.fsum(ms) / 1e3 for ms in by_rank]
        slowest = max(by_rank, key=sum)
        low, high = statistics.mean_interval([slowest])
        row = {
            "operation": facts["operation"],
            "memory": facts["memory"],
            "at_once": at_once,
            "threads": None,
            "gb_per_s": [counted / own_seconds / 1e9 for own_seconds in seconds],
            "sum_gb_per_s": None,
            # Mean of the slowest rank, between its 95 % interval's ends.
            "slowest_ms": [low, math.fsum(slowest) / len(slowest), high],
        }
        if facts["memory"] == "host":
            row["threads"] = facts["threads"]
        name = f"{MEMORIES[facts['memory']][0]}_{facts['operation']}_gb_per_s"
        if at_once > 1:  # all is done when the slowest is
            row["sum_gb_per_s"] = at_once * counted / max(seconds) / 1e9
            metrics[f"host_link/all{name}"] = row["sum_gb_per_s"]
        else:
            metrics[f"host_link/one{name}"] = min(row["gb_per_s"])  # the slowest rank alone
        rows.append(row)
    for first in FIRST:
        if first in metrics:
            metrics = {first: metrics[first]} | metrics
            break
    checks = {}
    disagreements = []
    for window in windows:
        for block in window:
            if block["host_ms"] >= statistics.COMPARABLE_MS:
                clocks = block["device_ms"], block["host_ms"]
                disagreements.append(statistics.clock_disagreement(*clocks))
    # A CPU worker has one clock, and short copies between signs of life.
    if cell.device == "cuda" and disagreements:
        checks["clock_disagreement"] = max(disagreements)
    size = windows[0][0]["bytes"]
    table = {"bytes": size, "gpus": list(cell.gpus), "rows": rows}
    output = "\n".join(_table_lines(rows, cell, size))
    return Derived(metrics, tables={"host_link": table}, checks=checks, output=output)


def _table_lines(rows: Sequence[Mapping[str, Any]], cell: Cell, size: int) -> list[str]:
    """Return the table for people: a line for each measurement, GB/s of one rank and of all."""
    ranks = "CPU workers" if cell.device == "cpu" else "GPUs"
    lines = [
        f"{ranks} {','.join(map(str, cell.gpus))}, {size / 2**20:g} MiB a copy and array",
        f"{'GB/s':32s}{'at once':>9s}{'threads':>9s}{'slowest':>10s}{'fastest':>10s}{'sum':>10s}",
    ]
    for memory, (_, title) in MEMORIES.items():
        for row in rows:
            if row["memory"] != memory:
                continue
            if title not in lines:
                lines.append(title)
            rates = row["gb_per_s"]
            total = ""
            if row["sum_gb_per_s"] is not None:
                total = f"{row['sum_gb_per_s']:.1f}"
            lines.append(
                f"  {LABELS[row['operation']]:30s}{row['at_once']:>9d}{row['threads'] or '':>9}"
                f"{min(rates):>10.1f}{max(rates):>10.1f}{total:>10s}"
            )
    if cell.device == "cpu":
        lines.append("CPU workers have no link between host and device.")
    return lines
