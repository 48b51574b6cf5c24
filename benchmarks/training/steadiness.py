"""Facts about the times of a training cell, from the raw lines: did the step stay the same, do samples fill their windows,
and what does a step cost each rank alone. analysis.validity.limits judges them.
"""

import math
from collections.abc import Sequence

from benchmarks.derived import Derived, Line, RankLines, of_kind, together
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.timing import statistics as intervals
from benchmarks.timing import statistics as stationarity
from conf.cell import Cell

OWN_MS = "ranks/own_ms"  # in tables: ms of a step without waiting for others, by rank


def steadiness(lines: RankLines, cell: Cell, ms: Sequence[float]) -> Derived:
    """Return the facts of a cell whose timed steps took `ms` on their slowest rank."""
    own = own_ms(lines, cell)
    checks = {
        "stationarity": stationarity.facts(ms),
        "pauses": stationarity.pauses(ms),
        "unaccounted_share": unaccounted_share(lines),
    }
    if not own:
        return Derived(checks=checks)
    table = [statistics.median([ms for block in blocks for ms in block]) for blocks in own]
    return Derived(
        tables={OWN_MS: table}, checks=checks | {"slowest_rank": slowest_rank(own, table)}
    )


def unaccounted_share(lines: RankLines) -> float:
    """Return the largest share of a window that its samples and its lead-in leave out, or count too much."""
    blocks = [block for own in lines.values() for block in of_kind(own, Kind.BLOCK)]
    return max(
        abs(math.fsum([block["lead_in_ms"], *block["ms"]]) / float(block["device_ms"]) - 1)
        for block in blocks
    )


def own_ms(lines: RankLines, cell: Cell) -> list[list[list[float]]]:
    """Return ms of steps that wait for no other rank, as [rank][window][step]; empty where none were timed.

    These are the steps without exchange of A B B A; every step of `strategy=none` is one.
    """
    if cell.world_size == 1:
        return []
    purpose = "timed" if cell.strategy["name"] == "none" else "without exchange"
    windows: list[list[Line]] = together(lines, Kind.BLOCK, purpose=purpose)
    return [
        list(of_rank)
        for of_rank in zip(*([block["ms"] for block in window] for window in windows), strict=True)
    ]


def slowest_rank(
    own: Sequence[Sequence[Sequence[float]]], table: Sequence[float]
) -> dict[str, float]:
    """Return which rank is slowest alone, by what share of the median of the others, and the noise of that share.

    The noise is the half-width of the 95 % interval from window to window; nan for a single window.
    """
    rank = max(range(len(table)), key=lambda one: table[one])
    shares = []
    for window in zip(*own, strict=True):
        middles = [statistics.median(ms) for ms in window]
        shares.append(middles[rank] / statistics.median(_others(middles, rank)) - 1)
    share = table[rank] / statistics.median(_others(table, rank)) - 1
    low, high = intervals.difference_interval(share, shares)
    return {"rank": rank, "share": share, "noise": (high - low) / 2}


def _others(values: Sequence[float], rank: int) -> list[float]:
    return [value for number, value in enumerate(values) if number != rank]
