"""The numbers of `benchmark=host_link` from the raw lines of the ranks. README.md."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.derived import Derived, Line, RankLines, together
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.timing import statistics as intervals
from conf.cell import Cell

LABELS = {
    "to_device": "host to device",
    "to_host": "device to host",
    "both": "both at once, each way",
    "copy": "copy (reads and writes)",
    "add": "sum of two arrays",
}
MEMORIES = {
    "pinned": "",
    "pageable": "_pageable",
    "host": "_host",
}  # memory: what it adds to a metric's name


def derive(lines: RankLines, cell: Cell) -> Derived:
    """Return every derived value: a row for each operation, alone and all at once, the metrics, and a table for people."""
    windows = together(lines, Kind.BLOCK, has="operation")
    rows = [row(window) for window in windows]
    table = {"bytes": windows[0][0]["bytes"], "gpus": list(cell.gpus), "rows": rows}
    checks = {}
    found = [one for window in windows if (one := disagreement(window)) is not None]
    # A CPU worker has one clock, and short copies between signs of life.
    if cell.device == "cuda" and found:
        checks["clock_disagreement"] = max(found)
    return Derived(
        metrics(rows), tables={"host_link": table}, checks=checks, output=text(table, cell.device)
    )


def row(window: Sequence[Line]) -> dict[str, Any]:
    """Return one row of the table: GB/s of every rank, all at once or each while the others wait."""
    facts = window[0]
    by_rank: list[list[float]] = [block["ms"] for block in window]
    seconds = [math.fsum(ms) / 1e3 for ms in by_rank]
    counted = facts["counted_bytes"] * len(by_rank[0])
    slowest = max(by_rank, key=sum)
    low, high = intervals.mean_interval([slowest])
    at_once = facts["at_once"]
    return {
        "operation": facts["operation"],
        "memory": facts["memory"],
        "at_once": at_once,
        "threads": facts["threads"] if facts["memory"] == "host" else None,
        "gb_per_s": [counted / one / 1e9 for one in seconds],
        # All is done when the slowest is.
        "sum_gb_per_s": at_once * counted / max(seconds) / 1e9 if at_once > 1 else None,
        # Mean of the slowest rank, between its 95 % interval's ends.
        "slowest_ms": [low, math.fsum(slowest) / len(slowest), high],
    }


def disagreement(window: Sequence[Line]) -> float | None:
    """Return the largest disagreement of a rank's two clocks, as a share of the host's; None: every window is too short."""
    found = [
        statistics.clock_disagreement(block["device_ms"], block["host_ms"])
        for block in window
        if block["host_ms"] >= statistics.COMPARABLE_MS
    ]
    return max(found, default=None)


def metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return GB/s: `one_…` is the slowest rank alone, `all_…` the sum of all at once. First stands the reference of staging."""
    found = {}
    for one in rows:
        how = "one" if one["at_once"] == 1 else "all"
        value = min(one["gb_per_s"]) if one["sum_gb_per_s"] is None else one["sum_gb_per_s"]
        found[f"host_link/{how}{MEMORIES[one['memory']]}_{one['operation']}_gb_per_s"] = value
    first = [
        name
        for name in ("host_link/all_both_gb_per_s", "host_link/one_both_gb_per_s")
        if name in found
    ][:1]
    return {name: found[name] for name in [*first, *found]}


def text(table: Mapping[str, Any], device: str) -> str:
    """Return the table for people: a line for each measurement, GB/s of one rank and of all."""
    ranks = "GPUs" if device == "cuda" else "CPU workers"
    lines = [
        f"{'GB/s':32s}{'at once':>9s}{'threads':>9s}{'slowest':>10s}{'fastest':>10s}{'sum':>10s}"
    ]
    for memory, head in (("pinned", "pinned"), ("pageable", "pageable"), ("host", "host memory")):
        rows = [one for one in table["rows"] if one["memory"] == memory]
        lines += [f"{head}"] if rows else []
        for one in rows:
            total = "" if one["sum_gb_per_s"] is None else f"{one['sum_gb_per_s']:.1f}"
            lines.append(
                f"  {LABELS[one['operation']]:30s}{one['at_once']:>9d}{one['threads'] or '':>9}"
                f"{min(one['gb_per_s']):>10.1f}{max(one['gb_per_s']):>10.1f}{total:>10s}"
            )
    if device == "cpu":
        lines.append("CPU workers have no link between host and device.")
    lines.insert(
        0,
        f"{ranks} {','.join(map(str, table['gpus']))}, {table['bytes'] / 2**20:g} MiB a copy and array",
    )
    return "\n".join(lines)
