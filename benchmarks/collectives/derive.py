"""The numbers of `benchmark=collectives` from the raw lines of the ranks. METHOD.md, "Collectives"."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.collectives import nccl_tests_table
from benchmarks.collectives.busbw import COLLECTIVES, ELEMENT_BYTES
from benchmarks.derived import Derived, Line, RankLines, of_kind, slowest, together
from benchmarks.record import Kind
from benchmarks.timing import alpha_beta
from conf.cell import Cell

PLACEMENTS = ("out_of_place", "in_place")


def derive(lines: RankLines, cell: Cell) -> Derived:
    """Return every derived value: a row for each size, bandwidths, the α–β line, and nccl-tests' table where it is asked for."""
    asked = cell.benchmark
    windows = together(lines, Kind.WINDOW, has="bytes")
    rows = [_row(size, windows, lines, asked) for size in dict.fromkeys(window[0]["bytes"] for window in windows)]
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
        metrics |= {"collectives/alpha_us": line.pieces[0].alpha_us, "collectives/fit_rms_error": line.rms_error}
        if beta := line.pieces[-1].beta_gb_per_s:
            metrics["collectives/beta_gb_per_s"] = beta
    series = {
        f"collectives/{place}_busbw_gb_per_s": [[row["bytes"], row[place]["busbw"]] for row in rows]
        for place in measured
    }
    run = {"collective": asked["collective"], "ranks": len(lines), "rows": rows, "avg_busbw": average}
    tables["nccl-tests"] = {"runs": [run]}
    output = ""
    if asked["format"] == "nccl-tests":
        devices = [dict(line) for (line,) in (of_kind(lines[rank], Kind.DEVICE) for rank in sorted(lines))]
        output = "\n".join(nccl_tests_table.table_lines(cell, run, devices))
    return Derived(metrics, series, tables, _wrong(found) if asked["verify"] else {}, output)


def _wrong(found: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the number of wrong elements, and the sizes that have any."""
    wrong = [(size, one["wrong"]) for size, one in found if one["wrong"]]
    return {"wrong_elements": sum(count for _, count in wrong), "wrong_bytes": [size for size, _ in wrong]}


def _row(size: int, windows: list[list[Line]], lines: RankLines, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of one size, in the shape of `python -m analysis nccl-tests`."""
    kind, dtype = COLLECTIVES[asked["collective"]], asked["dtype"]
    share = size // len(lines) if kind.shares else size
    by_place = {window[0]["placement"]: window for window in windows if window[0]["bytes"] == size}
    return {
        "bytes": size,
        "count": share // ELEMENT_BYTES[dtype],
        "dtype": nccl_tests_table.TYPES[dtype],
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
        found["per_iteration"] = _per_iteration([block["ms"] for block in blocks[0]], asked["coalesced"])
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
