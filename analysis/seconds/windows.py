"""The seconds of a cell inside windows whose samples enter its record. METHOD.md, "What a cell costs"."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from benchmarks.derived import Line, RankLines
from benchmarks.record import Kind

# Windows whose samples say when the measuring may begin.
BEFORE_MEASURING = ("first", "warm-up", "using up")
# Where lines of other kinds have their samples, in the line or in its rows, and ms of one unit of them.
SAMPLES: Mapping[str, tuple[tuple[str, ...], float]] = {
    Kind.HELD: (("ms",), 1.0),
    Kind.TIMELINE: (("update_ms",), 1.0),
    Kind.BUCKET_EXCHANGE: (("ms",), 1.0),
    Kind.INTERFERENCE: (("alone_ms", "beside_ms"), 1.0),
    Kind.SOLVES: (("seconds",), 1e3),
    Kind.GRID_COPIES: (("seconds",), 1e3),
}
MOST_MS = 1e12  # of a window; who writes more writes no ms
# Lines of windows that did not say in an earlier Ringside how long these were.
SAY_SINCE_LATELY = (Kind.WINDOW, Kind.P2P)


def measuring_seconds(lines: RankLines) -> float | None:
    """Return the seconds in which at least one rank was inside a window that counts; None where lines do not tell.

    A line is written right after its window, and says how long that was.
    """
    every = [line for own in lines.values() for line in own]
    if any(line["kind"] in SAY_SINCE_LATELY and "window_ms" not in line for line in every):
        return None
    spans = [(line["time"] - seconds, line["time"]) for line in every for seconds in _windows(line)]
    return open_seconds(spans) or None


def open_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds in which at least one of some spans (from, to) was open."""
    edges = sorted(
        edge for first, last in spans if last > first for edge in ((first, 1), (last, -1))
    )
    total, depth = 0.0, 0
    for (moment, change), (following, _) in pairwise(edges):
        depth += change
        total += following - moment if depth else 0.0
    return total


def _windows(line: Line) -> Iterator[float]:
    """Yield the seconds of the window that a line is of, its lead-in too; nothing for a line of no window."""
    if line.get("purpose") in BEFORE_MEASURING:
        return
    stated = line.get("window_ms", line.get("host_ms"))
    if stated is None and line["kind"] in SAMPLES:
        names, unit_ms = SAMPLES[line["kind"]]
        rows = line.get("rows")
        holders = (
            [line, *(row for row in rows if isinstance(row, Mapping))]
            if isinstance(rows, list)
            else [line]
        )
        stated = math.fsum(unit_ms * _sum(holder.get(name)) for holder in holders for name in names)
    if _is_number(stated) and stated > 0:
        yield stated / 1e3


def _sum(values: Any) -> float:
    """Return the sum of a list of numbers; 0 for anything else."""
    known = isinstance(values, list) and all(map(_is_number, values))
    return math.fsum(values) if known else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST_MS
