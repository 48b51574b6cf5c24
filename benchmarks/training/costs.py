"""What something costs a step: steps with it against steps without it, in the order A B B A (METHOD.md)."""

from collections.abc import Sequence

from benchmarks.derived import Derived, Line, RankLines, slowest, together
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.timing import statistics as intervals

FEWEST_ROUNDS = 3  # of A B B A, of which each is a block of its own


def strategy_cost(lines: RankLines) -> Derived:
    """Return what the strategy costs a step: steps with it against steps without exchange.

    Where steps without exchange stood between the timed windows, these are the steps with it; those beyond the rounds have no
    partner.
    """
    without_it = _windows(lines, "without exchange")
    with_it = _windows(lines, "with exchange") or _windows(lines, "timed")[: len(without_it)]
    return _cost(with_it, without_it, "strategy/cost_ms")


def data_cost(lines: RankLines) -> Derived:
    """Return what a data loader costs a step, and how long the host waits for it; nothing without a loader."""
    waits = together(lines, Kind.BLOCK, purpose="timed", has="wait_ms")
    if not waits:
        return Derived()
    wait_ms = [ms for window in waits for ms in slowest(block["wait_ms"] for block in window)]
    with_it = _windows(lines, "with loader")
    cost = _cost(with_it, _windows(lines, "without loader"), "data/cost_ms")
    share = cost.metrics["data/cost_ms"] / _median_of(with_it)
    metrics = {"data/wait_ms": statistics.median(wait_ms), "data/cost_share": share}
    return Derived(cost.metrics | metrics, within_run=cost.within_run)


def slowest_ms(windows: Sequence[Sequence[Line]]) -> list[float]:
    """Return the time of each iteration of some windows: that of its slowest rank."""
    return [ms for window in windows for ms in slowest(block["ms"] for block in window)]


def abba(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> tuple[float, list[float]]:
    """Return median(first) − median(second) of windows in the order A B B A, and the difference in each block.

    A whole round is a block, in which drift cancels; of few rounds each half is one.
    """
    differences = [
        statistics.median(one) - statistics.median(other)
        for one, other in zip(first, second, strict=True)
    ]
    if len(differences) >= 2 * FEWEST_ROUNDS:
        differences = [
            (one + other) / 2
            for one, other in zip(differences[::2], differences[1::2], strict=True)
        ]
    return _median_of(first) - _median_of(second), differences


def _cost(
    with_it: Sequence[Sequence[float]], without_it: Sequence[Sequence[float]], name: str
) -> Derived:
    """Return how much longer steps take with something than without it, as a metric with its interval."""
    if not without_it:
        return Derived()
    cost_ms, blocks = abba(with_it, without_it)
    low, high = intervals.difference_interval(cost_ms, blocks)
    return Derived(
        {name: cost_ms}, within_run={name: {"low": low, "high": high, "groups": len(blocks)}}
    )


def _windows(lines: RankLines, purpose: str) -> list[list[float]]:
    """Return the ms of every iteration of its slowest rank, by window."""
    return [slowest_ms([window]) for window in together(lines, Kind.BLOCK, purpose=purpose)]


def _median_of(windows: Sequence[Sequence[float]]) -> float:
    return statistics.median([ms for window in windows for ms in window])
