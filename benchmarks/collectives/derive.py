"""The numbers of `benchmark=collectives` from the raw lines of the ranks. README.md."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.collectives.busbw import COLLECTIVES, ELEMENT_BYTES
from benchmarks.collectives.request import largest_bytes, sizes
from benchmarks.derived import Derived, Line, RankLines, of_kind, slowest, together
from benchmarks.record import Kind
from benchmarks.timing import alpha_beta
from conf.cell import Cell

PLACEMENTS = ("out_of_place", "in_place")


def derive(lines: RankLines, cell: Cell) -> Derived:
    """Return every derived value: a row for each size, bandwidths, the α–β line, and nccl-tests' table where it is asked for."""
    asked = cell.benchmark
    windows = together(lines, Kind.WINDOW, has="bytes")
    rows = [
        _row(size, windows, lines, asked)
        for size in dict.fromkeys(window[0]["bytes"] for window in windows)
    ]
    measured = [place for place in PLACEMENTS if rows[0][place] is not None]
    found = [(row["bytes"], row[place]) for row in rows for place in measured]
    average = math.fsum(one["busbw"] for _, one in found) / len(found)
    headed = measured[0]
    times = [row[headed]["time_us"] for row in rows]
    metrics = {
        "collectives/busbw_gb_per_s": rows[-1][headed]["busbw"],
        "collectives/algbw_gb_per_s": rows[-1][headed]["algbw"],
        "collectives/avg_busbw_gb_per_s": average,
        "collectives/latency_us": times[0],
    }
    tables: dict[str, Any] = {}
    if line := alpha_beta.fit([row["bytes"] for row in rows], times):
        tables["alpha_beta"] = line.to_dict() | {"placement": headed}
        metrics |= {
            "collectives/alpha_us": line.pieces[0].alpha_us,
            "collectives/fit_rms_error": line.rms_error,
        }
        if beta := line.pieces[-1].beta_gb_per_s:
            metrics["collectives/beta_gb_per_s"] = beta
    series = {
        f"collectives/{place}_busbw_gb_per_s": [[row["bytes"], row[place]["busbw"]] for row in rows]
        for place in measured
    }
    run = {
        "collective": asked["collective"],
        "ranks": len(lines),
        "rows": rows,
        "avg_busbw": average,
    }
    tables["nccl-tests"] = {"runs": [run]}
    output = ""
    if asked["format"] == "nccl-tests":
        devices = [
            dict(line) for (line,) in (of_kind(lines[rank], Kind.DEVICE) for rank in sorted(lines))
        ]
        output = "\n".join(table_lines(cell, run, devices))
    return Derived(metrics, series, tables, _wrong(found) if asked["verify"] else {}, output)


def _wrong(found: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the number of wrong elements, and the sizes that have any."""
    wrong = [(size, one["wrong"]) for size, one in found if one["wrong"]]
    return {
        "wrong_elements": sum(count for _, count in wrong),
        "wrong_bytes": [size for size, _ in wrong],
    }


def _row(
    size: int, windows: list[list[Line]], lines: RankLines, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the row of one size, in the shape of `python -m analysis nccl-tests`."""
    kind, dtype = COLLECTIVES[asked["collective"]], asked["dtype"]
    share = size // len(lines) if kind.shares else size
    by_place = {window[0]["placement"]: window for window in windows if window[0]["bytes"] == size}
    return {
        "bytes": size,
        "count": share // ELEMENT_BYTES[dtype],
        "dtype": TYPES[dtype],
        "redop": asked["op"] if kind.reduces else None,
        "root": asked["root"] if kind.rooted else None,
        **dict.fromkeys(PLACEMENTS),
        **{place: _figures(window, lines, asked) for place, window in by_place.items()},
    }


def _figures(window: list[Line], lines: RankLines, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of one size in one placement."""
    size, place = window[0]["bytes"], window[0]["placement"]
    times = [line["us"] for line in window]
    mean = math.fsum(times) / len(times)  # nccl-tests' default is the mean over ranks, too
    algbw = size / mean / 1e3
    wrong = together(lines, Kind.WRONG, bytes=size, placement=place)
    found: dict[str, Any] = {
        "time_us": mean,
        "algbw": algbw,
        "busbw": algbw * COLLECTIVES[asked["collective"]].factor(len(lines)),
        "wrong": sum(line["elements"] for line in wrong[0]) if wrong else None,
        "slowest_us": max(times),
    }
    if blocks := together(lines, Kind.BLOCK, bytes=size, placement=place):
        found["per_iteration"] = _per_iteration(
            [block["ms"] for block in blocks[0]], asked["coalesced"]
        )
    return found


def _per_iteration(ms: Sequence[Sequence[float]], coalesced: int) -> dict[str, float]:
    """Return statistics of single iterations, each as long as its slowest rank's, in µs of one collective."""
    us = np.asarray(slowest(ms)) * 1e3 / coalesced
    p50, p95, p99 = (float(value) for value in np.percentile(us, (50, 95, 99)))
    spread = float(us.std())
    return {
        "min_us": float(us.min()), "max_us": float(us.max()), "avg_us": float(us.mean()), "p50_us": p50, "p95_us": p95,
        "p99_us": p99, "stdev_us": spread, "cv_pct": 100 * spread / float(us.mean()),
    }  # fmt: skip


# The output of a cell in the layout of nccl-tests 2.19, line for line, for scripts that read that tool's output.


# Our dtype: its name in the table.
TYPES = {
    "float32": "float", "float64": "double", "float16": "half", "bfloat16": "bfloat16", "int8": "int8", "uint8": "uint8",
    "int32": "int32", "int64": "int64",
}  # fmt: skip
LEFT = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"
FIGURES = "  {:>7}  {:>6}  {:>6}  {:>6}"
NAMES, UNITS = ("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")


def table_lines(cell: Cell, run: dict[str, Any], devices: list[dict[str, Any]]) -> list[str]:
    """Return the whole output of one run of tables["nccl-tests"]; `devices` hold pid, host, device, bus_id and name by rank."""
    asked, collective = cell.benchmark, COLLECTIVES[run["collective"]]
    step, by = (asked["step"], "bytes") if asked["step"] else (cell.benchmark["factor"], "factor")
    found = [
        "# Ringside's benchmark=collectives, in the layout of nccl-tests 2.19: one process for each rank, "
        f"calls={cell.benchmark['calls']}",
        f"# Collective test starting: {collective.program}_perf",
        f"# nThread 1 nGpus 1 minBytes {sizes(cell)[0]} maxBytes {largest_bytes(cell)} step: {step}({by}) "
        f"warmup iters: {cell.benchmark['warmup']} iters: {cell.benchmark['iterations']} agg iters: {asked['coalesced']} "
        f"validation: {int(asked['verify'])} graph: {int(asked['cuda_graph'])} unalign: 0",
        "#",
        "# Using devices",
    ]
    for rank, one in enumerate(devices):
        found.append(
            f"#  Rank {rank:2d} Group  0 Pid {one['pid']:6d} on {one['host']:>10} device {one['device']:2d} "
            f"[{one['bus_id']}] {one['name']}"
        )
    left = "# {:>10}" + LEFT[6:]
    found += [
        "#",
        left.format("", "", "", "", "")
        + "           out-of-place                       in-place          ",
        left.format("size", "count", "type", "redop", "root") + 2 * FIGURES.format(*NAMES),
        left.format("(B)", "(elements)", "", "", "") + 2 * FIGURES.format(*UNITS),
        *(_nccl_tests_table_row(row) for row in run["rows"]),
    ]
    checked = [
        row[place] for row in run["rows"] for place in ("out_of_place", "in_place") if row[place]
    ]
    if asked["verify"]:
        wrong = sum(1 for one in checked if one["wrong"])
        found.append(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    found.append(f"# Avg bus bandwidth    : {run['avg_busbw']:g} ")
    return [*found, "#", f"# Collective test concluded: {collective.program}_perf", "#"]


def _nccl_tests_table_row(row: dict[str, Any]) -> str:
    root = -1 if row["root"] is None else row["root"]
    left = LEFT.format(row["bytes"], row["count"], row["dtype"], row["redop"] or "none", root)
    return (
        left
        + _nccl_tests_table_figures(row["out_of_place"])
        + _nccl_tests_table_figures(row["in_place"])
    )


def _nccl_tests_table_figures(one: dict[str, Any] | None) -> str:
    """Return the columns of one placement: nan where nothing was measured, N/A where nothing was verified."""
    if one is None:
        return FIGURES.format("nan", "nan", "nan", "N/A")
    wrong = "N/A" if one["wrong"] is None else f"{float(one['wrong']):g}"
    return FIGURES.format(
        _number(one["time_us"], 7), _number(one["algbw"], 6), _number(one["busbw"], 6), wrong
    )


def _number(value: float, width: int) -> str:
    """Return a number with as many of two decimals as fit into a column."""
    fitting = (text for decimals in (2, 1, 0) if len(text := f"{value:.{decimals}f}") <= width)
    return next(fitting, f"{value:.{1 if width >= 7 else 0}e}")
