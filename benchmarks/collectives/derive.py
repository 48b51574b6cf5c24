"""The numbers of `benchmark=collectives` from the raw lines of the ranks. README.md."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.collectives.request import COLLECTIVES, ELEMENT_BYTES, largest_bytes, sizes
from benchmarks.derived import Derived, Line, RankLines, of_kind, slowest, together
from benchmarks.record import Kind
from benchmarks.timing import statistics
from conf.cell import Cell

PLACEMENTS = ("out_of_place", "in_place")
# Our dtypes by their names in nccl-tests' table.
TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "half",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
}
# Columns of that table: those of a row, and those of each placement.
ROW = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}"
HEAD = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
FIGURES = "  {:>7}  {:>6}  {:>6}  {:>6}"
NAMES, UNITS = ("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")


def derive(lines: RankLines, cell: Cell) -> Derived:
    """Return a row for each size, bandwidths, the α–β line, and nccl-tests' table if asked for."""
    options = cell.benchmark
    rows = _rows(lines, options)
    measured = [placement for placement in PLACEMENTS if rows[0][placement] is not None]
    first = measured[0]
    busbw = []
    series: dict[str, list[list[float]]] = {}
    wrong, wrong_bytes = 0, []
    for row in rows:
        for placement in measured:
            size, figures = row["bytes"], row[placement]
            busbw.append(figures["busbw"])
            points = series.setdefault(f"collectives/{placement}_busbw_gb_per_s", [])
            points.append([size, figures["busbw"]])
            if options["verify"]:
                wrong += figures["wrong"]
                if figures["wrong"]:
                    wrong_bytes.append(size)
    average = math.fsum(busbw) / len(busbw)
    sizes_bytes = [row["bytes"] for row in rows]
    times_us = [row[first]["time_us"] for row in rows]
    metrics = {
        "collectives/busbw_gb_per_s": rows[-1][first]["busbw"],
        "collectives/algbw_gb_per_s": rows[-1][first]["algbw"],
        "collectives/avg_busbw_gb_per_s": average,
        "collectives/latency_us": times_us[0],
    }
    tables: dict[str, Any] = {}
    line = statistics.fit(sizes_bytes, times_us)
    if line is not None:
        tables["alpha_beta"] = line.to_dict() | {"placement": first}
        metrics["collectives/alpha_us"] = line.pieces[0].alpha_us
        metrics["collectives/fit_rms_error"] = line.rms_error
        beta = line.pieces[-1].beta_gb_per_s
        if beta:
            metrics["collectives/beta_gb_per_s"] = beta
    run = {
        "collective": options["collective"],
        "ranks": len(lines),
        "rows": rows,
        "avg_busbw": average,
    }
    tables["nccl-tests"] = {"runs": [run]}
    checks: dict[str, Any] = {}
    if options["verify"]:
        checks = {"wrong_elements": wrong, "wrong_bytes": wrong_bytes}
    output = ""
    if options["format"] == "nccl-tests":
        devices = []
        for rank in sorted(lines):
            devices.append(dict(of_kind(lines[rank], Kind.DEVICE)[0]))
        output = "\n".join(table_lines(cell, run, devices))
    return Derived(metrics, series, tables, checks, output)


def _rows(lines: RankLines, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    collective, dtype = COLLECTIVES[options["collective"]], options["dtype"]
    rows: dict[int, dict[str, Any]] = {}
    for window in together(lines, Kind.WINDOW, has="bytes"):
        size = window[0]["bytes"]
        share = size // len(lines) if collective.shares else size
        row: dict[str, Any] = {
            "bytes": size,
            "count": share // ELEMENT_BYTES[dtype],
            "dtype": TYPES[dtype],
            "redop": None,
            "root": None,
            "out_of_place": None,
            "in_place": None,
        }
        if collective.reduces:
            row["redop"] = options["op"]
        if collective.rooted:
            row["root"] = options["root"]
        rows.setdefault(size, row)[window[0]["placement"]] = _figures(window, lines, options)
    return list(rows.values())


def _figures(window: list[Line], lines: RankLines, options: Mapping[str, Any]) -> dict[str, Any]:
    size, placement = window[0]["bytes"], window[0]["placement"]
    times = [line["us"] for line in window]
    mean = math.fsum(times) / len(times)  # nccl-tests' default is the mean over ranks, too
    algbw = size / mean / 1e3
    wrong = together(lines, Kind.WRONG, bytes=size, placement=placement)
    figures: dict[str, Any] = {
        "time_us": mean,
        "algbw": algbw,
        "busbw": algbw * COLLECTIVES[options["collective"]].factor(len(lines)),
        "wrong": None,
        "slowest_us": max(times),
    }
    if wrong:
        figures["wrong"] = sum(line["elements"] for line in wrong[0])
    blocks = together(lines, Kind.BLOCK, bytes=size, placement=placement)
    if blocks:
        slowest_ms = slowest(block["ms"] for block in blocks[0])
        us = np.asarray(slowest_ms) * 1e3 / options["coalesced"]  # of one collective
        p50, p95, p99 = np.percentile(us, (50, 95, 99)).tolist()
        mean_us, deviation = float(us.mean()), float(us.std())
        figures["per_iteration"] = {
            "min_us": float(us.min()),
            "max_us": float(us.max()),
            "avg_us": mean_us,
            "p50_us": p50,
            "p95_us": p95,
            "p99_us": p99,
            "stdev_us": deviation,
            "cv_pct": 100 * deviation / mean_us,
        }
    return figures


def table_lines(cell: Cell, run: dict[str, Any], devices: list[dict[str, Any]]) -> list[str]:
    """Return one run in the layout of nccl-tests 2.19, for scripts that read that tool's output.

    `devices` hold pid, host, device, bus_id and name by rank.
    """
    options, program = cell.benchmark, COLLECTIVES[run["collective"]].program
    step = f"{options['factor']}(factor)"
    if options["step"]:
        step = f"{options['step']}(bytes)"
    lines = [
        "# Ringside's benchmark=collectives, in the layout of nccl-tests 2.19: "
        f"one process for each rank, calls={options['calls']}",
        f"# Collective test starting: {program}_perf",
        f"# nThread 1 nGpus 1 minBytes {sizes(cell)[0]} maxBytes {largest_bytes(cell)} "
        f"step: {step} warmup iters: {options['warmup']} iters: {options['iterations']} "
        f"agg iters: {options['coalesced']} validation: {int(options['verify'])} "
        f"graph: {int(options['cuda_graph'])} unalign: 0",
        "#",
        "# Using devices",
    ]
    for rank, device in enumerate(devices):
        lines.append(
            f"#  Rank {rank:2d} Group  0 Pid {device['pid']:6d} on {device['host']:>10} "
            f"device {device['device']:2d} [{device['bus_id']}] {device['name']}"
        )
    sides = "           out-of-place                       in-place          "
    names = HEAD.format("size", "count", "type", "redop", "root")
    units = HEAD.format("(B)", "(elements)", "", "", "")
    lines += ["#", HEAD.format("", "", "", "", "") + sides]
    lines += [names + 2 * FIGURES.format(*NAMES), units + 2 * FIGURES.format(*UNITS)]
    wrong = 0
    for row in run["rows"]:
        root = row["root"]
        if root is None:
            root = -1
        text = ROW.format(row["bytes"], row["count"], row["dtype"], row["redop"] or "none", root)
        for placement in PLACEMENTS:
            text += _figures_text(row[placement])
            wrong += bool(row[placement] and row[placement]["wrong"])
        lines.append(text)
    if options["verify"]:
        outcome = "FAILED" if wrong else "OK"
        lines.append(f"# Out of bounds values : {wrong} {outcome}")
    lines.append(f"# Avg bus bandwidth    : {run['avg_busbw']:g} ")
    return [*lines, "#", f"# Collective test concluded: {program}_perf", "#"]


def _figures_text(figures: dict[str, Any] | None) -> str:
    """Return the columns of one placement: nan if it was not measured, N/A if not verified."""
    if figures is None:
        return FIGURES.format("nan", "nan", "nan", "N/A")
    texts = []
    for name, width, digits in (("time_us", 7, 1), ("algbw", 6, 0), ("busbw", 6, 0)):
        text = f"{figures[name]:.{digits}e}"
        for decimals in (0, 1, 2):  # as many of two decimals as fit into the column
            if len(f"{figures[name]:.{decimals}f}") <= width:
                text = f"{figures[name]:.{decimals}f}"
        texts.append(text)
    wrong = "N/A"
    if figures["wrong"] is not None:
        wrong = f"{float(figures['wrong']):g}"
    return FIGURES.format(*texts, wrong)
