"""The tables of a calibration, and the residuals of a cell's steps, from the raw lines."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.derived import RankLines, of_kind, slowest, together
from benchmarks.record import Kind
from benchmarks.timing import statistics
from conf.cell import Cell

PROBABILITIES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
MOST_LAGS = 10
STAGES = ("forward", "backward", "exchange", "update")
Table = dict[str, Any]


def tables(lines: RankLines, cell: Cell) -> dict[str, Table]:
    """Return every table of a calibration that the lines give, and the residuals."""
    every = {
        "buckets": table_of(lines, Kind.BUCKETS),  # of rank 0: all ranks have the same
        "timeline": timeline(lines),
        "bucket_exchange": bucket_exchange(lines),
        "residuals": residuals(lines, cell),
    }
    return {name: table for name, table in every.items() if table}


def table_of(lines: RankLines, kind: str) -> Table:
    """Return the line of one kind of rank 0 as a table; empty where there is none."""
    written = of_kind(lines[0], kind)
    if not written:
        return {}
    table: Table = dict(written[0])
    for name in ("kind", "time"):
        table.pop(name, None)
    return table


def timeline(lines: RankLines) -> Table:
    """Return when the moments of a step come on each rank, without the exchange and with it."""
    rows = []
    for rank, own in sorted(lines.items()):
        for line in sorted(of_kind(own, Kind.TIMELINE), key=lambda line: bool(line["exchange"])):
            row: Table = {"rank": rank, "exchange": line["exchange"], "steps": line["steps"]}
            for stage in STAGES:
                median_ms, spread_ms = _median_and_spread(line[f"{stage}_ms"])
                row |= {f"{stage}_ms": median_ms, f"{stage}_spread_ms": spread_ms}
            row |= {"ready_ms": [], "ready_spread_ms": []}
            for bucket_ms in line["ready_ms"]:
                median_ms, spread_ms = _median_and_spread(bucket_ms)
                row["ready_ms"].append(median_ms)
                row["ready_spread_ms"].append(spread_ms)
            row["unknown"] = line["unknown"]
            rows.append(row)
    if not rows:
        return {}
    return {"rows": rows}


def bucket_exchange(lines: RankLines) -> Table:
    """Return how long one collective takes by itself, by its bytes: as on its slowest rank."""
    table = table_of(lines, Kind.BUCKET_EXCHANGE)
    if not table:
        return {}
    rows = []
    rows_by_rank = [line["rows"] for line in together(lines, Kind.BUCKET_EXCHANGE)[0]]
    for of_ranks in zip(*rows_by_rank, strict=True):
        ms = slowest(row["ms"] for row in of_ranks)
        median_ms, spread_ms = _median_and_spread(ms)
        row = {"bytes": of_ranks[0]["bytes"], "dtype": of_ranks[0]["dtype"]}
        rows.append(row | {"calls": len(ms), "ms": median_ms, "spread_ms": spread_ms})
    return table | {"rows": rows}


def residuals(lines: RankLines, cell: Cell) -> Table:
    """Return how the steps of each rank scatter where they wait for nobody.

    `acf` is the autocorrelation at lags 1, 2, …, of pairs inside one window; the last lag is half
    of the longest window at most.
    """
    purpose = "without exchange"
    if cell.world_size == 1 or cell.strategy["name"] == "none":
        purpose = "timed"
    rows = []
    windows_by_rank = zip(*together(lines, Kind.BLOCK, purpose=purpose), strict=True)
    for rank, blocks in enumerate(windows_by_rank):
        windows = [np.asarray(block["ms"], dtype=float) for block in blocks]
        ms = np.concatenate(windows)
        mean = math.fsum(ms) / len(ms)
        variance = math.fsum((ms - mean) ** 2) / len(ms)
        lags = min(MOST_LAGS, max(map(len, windows)) // 2)
        acf = []
        for lag in range(1, lags + 1):
            correlation = 0.0
            if variance:
                pairs = [(window[:-lag] - mean) * (window[lag:] - mean) for window in windows]
                products = np.concatenate(pairs)
                correlation = math.fsum(products) / len(products) / variance
            acf.append(correlation)
        row = {
            "rank": rank,
            "n": len(ms),
            "mean_ms": mean,
            "sd_ms": variance**0.5,
            "quantiles_ms": np.quantile(ms, PROBABILITIES).tolist(),
            "acf": acf,
        }
        rows.append(row)
    if not rows:
        return {}
    return {"purpose": purpose, "probabilities": list(PROBABILITIES), "rows": rows}


def _median_and_spread(ms: Sequence[float]) -> tuple[float | None, float | None]:
    if not len(ms):
        return None, None
    low, high = np.quantile(ms, [0.25, 0.75])
    return statistics.median(ms), float(high - low)
