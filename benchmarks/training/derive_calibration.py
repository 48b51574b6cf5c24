"""The tables of a calibration, and the residuals of a cell's steps, from the raw lines. Shapes: this package's docstring."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.derived import Line, RankLines, of_kind, slowest, together
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.training.steadiness import own_ms
from conf.cell import Cell

PROBABILITIES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
MOST_LAGS = 10
Table = dict[str, Any]


def tables(lines: RankLines, cell: Cell) -> dict[str, Table]:
    """Return every table of a calibration that the lines give, and the residuals."""
    found = {
        "buckets": _said(lines, Kind.BUCKETS),  # of rank 0: all ranks have the same
        "timeline": timeline(lines),
        "bucket_exchange": bucket_exchange(lines),
        "interference": interference(lines),
        "residuals": residuals(lines, cell),
    }
    return {name: table for name, table in found.items() if table}


def timeline(lines: RankLines) -> Table:
    """Return when the moments of a step come on each rank, without the exchange and with it."""
    rows = []
    for rank, own in sorted(lines.items()):
        for line in sorted(of_kind(own, Kind.TIMELINE), key=lambda one: bool(one["exchange"])):
            row: Table = {"rank": rank, "exchange": line["exchange"], "steps": line["steps"]}
            for name in ("forward", "backward", "exchange", "update"):
                row |= _middle(name, line[f"{name}_ms"])
            ready = [_middle("ready", ms) for ms in line["ready_ms"]]
            row |= {name: [one[name] for one in ready] for name in _middle("ready", [])}
            rows.append(row | {"unknown": line["unknown"]})
    return {"rows": rows} if rows else {}


def bucket_exchange(lines: RankLines) -> Table:
    """Return how long one collective takes by itself, by its bytes: as long as on its slowest rank."""
    table = _said(lines, Kind.BUCKET_EXCHANGE)
    rows = []
    for of_ranks in zip(
        *(line["rows"] for line in _one_of_each(lines, Kind.BUCKET_EXCHANGE)), strict=True
    ):
        ms = slowest(row["ms"] for row in of_ranks)
        middle = _middle("", ms)
        row = {name: of_ranks[0][name] for name in ("bytes", "dtype")}
        rows.append(row | {"calls": len(ms), "ms": middle["ms"], "spread_ms": middle["spread_ms"]})
    return table | {"rows": rows} if table else {}


def interference(lines: RankLines) -> Table:
    """Return how much longer a step without exchange takes beside collectives, on each rank."""
    table = _said(lines, Kind.INTERFERENCE)
    rows = []
    for rank, line in enumerate(_one_of_each(lines, Kind.INTERFERENCE)):
        rows += [{"rank": rank} | _beside(row) for row in line["rows"]]
    return table | {"rows": rows} if table else {}


def residuals(lines: RankLines, cell: Cell) -> Table:
    """Return how the steps of each rank scatter where they wait for nobody; empty where none were timed."""
    purpose = (
        "timed" if cell.world_size == 1 or cell.strategy["name"] == "none" else "without exchange"
    )
    if cell.world_size == 1:
        of_ranks = [[list(block["ms"]) for block in of_kind(lines[0], Kind.BLOCK, purpose=purpose)]]
    else:
        of_ranks = own_ms(lines, cell)
    if not of_ranks:
        return {}
    rows = [{"rank": rank} | _scatter(windows) for rank, windows in enumerate(of_ranks)]
    return {"purpose": purpose, "probabilities": list(PROBABILITIES), "rows": rows}


def _one_of_each(lines: RankLines, kind: str) -> list[Line]:
    """Return the line of one kind that every rank wrote; empty where none did. Raises IncompleteLines."""
    return next(iter(together(lines, kind)), [])


def _said(lines: RankLines, kind: str) -> Table:
    """Return the line of one kind of rank 0 as a table; empty where there is none."""
    line = next(iter(of_kind(lines[0], kind)), {})
    return {name: value for name, value in line.items() if name not in ("kind", "time")}


def _middle(name: str, ms: Sequence[float]) -> dict[str, float | None]:
    """Return the median of some times and the distance between their quartiles, as fields; None where there are none."""
    of = f"{name}_" if name else ""
    if not len(ms):
        return {f"{of}ms": None, f"{of}spread_ms": None}
    low, high = np.quantile(ms, [0.25, 0.75])
    return {f"{of}ms": statistics.median(ms), f"{of}spread_ms": float(high - low)}


def _beside(row: Line) -> Table:
    """Return one rank's steps alone and beside collectives as a row."""
    alone, beside, comm = row["alone_ms"], row["beside_ms"], row["comm_ms"]
    added_ms = statistics.median(beside) - statistics.median(alone)
    error_ms = np.hypot(_error_of_median(alone), _error_of_median(beside))
    comm_ms = statistics.median(comm)
    return {
        "steps": len(alone),
        "bytes": row["bytes"],
        "calls": row["calls"],
        **_middle("alone", alone),
        **_middle("beside", beside),
        "comm_alone_ms": row["comm_alone_ms"],
        "comm_ms": comm_ms,
        "gamma": added_ms / comm_ms,
        "gamma_error": float(error_ms) / comm_ms,
    }


def _error_of_median(ms: Sequence[float]) -> float:
    """Return the standard error of a median, from the scatter around it."""
    middle = statistics.median(ms)
    sigma = statistics.SIGMA_PER_MAD * statistics.median([abs(one - middle) for one in ms])
    return float(statistics.ERROR_OF_MEDIAN * sigma / len(ms) ** 0.5)


def _scatter(windows: Sequence[Sequence[float]]) -> Table:
    """Return how the steps of one rank scatter around their mean, and how much neighbours in a window have in common."""
    ms = np.concatenate([np.asarray(window, dtype=float) for window in windows])
    mean = math.fsum(ms) / len(ms)
    variance = math.fsum((ms - mean) ** 2) / len(ms)
    return {
        "n": len(ms),
        "mean_ms": mean,
        "sd_ms": variance**0.5,
        "quantiles_ms": [float(one) for one in np.quantile(ms, PROBABILITIES)],
        "acf": _autocorrelation(
            [np.asarray(window, dtype=float) - mean for window in windows], variance
        ),
    }


def _autocorrelation(windows: Sequence["np.ndarray[Any, Any]"], variance: float) -> list[float]:
    """Return the autocorrelation at lags 1, 2, …, of pairs inside one window, up to half of the longest."""
    lags = min(MOST_LAGS, max(map(len, windows)) // 2)
    if not variance:
        return [0.0] * lags
    found = []
    for lag in range(1, lags + 1):
        products = np.concatenate([window[:-lag] * window[lag:] for window in windows])
        found.append(math.fsum(products) / len(products) / variance)
    return found
