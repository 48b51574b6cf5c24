"""When the timed windows of a training cell are enough, and how many steps one of them has. No torch: simulations call it too."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.timing import intervals

# Seconds of one window: long enough that its start does not count, short enough to stop early.
WINDOW_SECONDS = 2.0
FEWEST_PER_WINDOW, MOST_PER_WINDOW = 5, 200
# An interval is only believed once this many windows agree: within one, drift does not show.
FEWEST_WINDOWS = 3


def window_iterations(step_ms: float) -> int:
    """Return how many steps fit a window."""
    return min(MOST_PER_WINDOW, max(FEWEST_PER_WINDOW, round(WINDOW_SECONDS * 1e3 / step_ms)))


def half_width(by_window: intervals.Windows) -> float:
    """Return the half-width of the 95 % interval of the mean, as a share of the mean."""
    ms = [one for window in by_window for one in window]
    return intervals.mean_half_width(by_window) * len(ms) / math.fsum(ms)


def enough(by_window: Sequence[Sequence[float]], lasted_ms: float, options: Mapping[str, Any]) -> bool:
    """Return whether the measurement ends: its interval is narrow enough, or time or iterations have run out.

    `by_window` has the ms of every iteration on its slowest rank, `lasted_ms` is the time of the slowest rank.
    """
    done = sum(map(len, by_window))
    if lasted_ms >= options["max_seconds"] * 1e3 or done >= options["max_iterations"]:
        return True
    if done < options["min_iterations"] or len(by_window) < FEWEST_WINDOWS:
        return False
    return half_width(by_window) <= float(options["interval_target"])
