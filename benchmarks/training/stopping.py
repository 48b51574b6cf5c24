"""When the timed windows of a training cell are enough, and how many steps each window has. No torch: simulations call it too.

Where the timed windows are the A of A B B A (METHOD.md, "Exposed communication"), there are two of them for each round.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.timing import intervals, statistics
from benchmarks.training.request import ABBA_SECONDS, FEWEST_STEPS, WITH_IT

# Seconds of one window: long enough that its start does not count, short enough to stop early.
WINDOW_SECONDS = 2.0
FEWEST_PER_WINDOW, MOST_PER_WINDOW = 5, 200
# An interval is only believed once this many windows agree: within one, drift does not show.
FEWEST_WINDOWS = 3
MOST_PER_ABBA_WINDOW = 30
# A window under load that is shorter says nothing of a power cap: on H200s one begins to hold the clock after 0.7 s.
LOADED_MS = 1000.0


def window_iterations(step_ms: float) -> int:
    """Return how many steps fit a timed window."""
    return min(MOST_PER_WINDOW, max(FEWEST_PER_WINDOW, round(WINDOW_SECONDS * 1e3 / step_ms)))


def abba_iterations(step_ms: float) -> int:
    """Return how many steps a window of A B B A has that is not timed."""
    return min(MOST_PER_ABBA_WINDOW, max(FEWEST_STEPS, round(ABBA_SECONDS * 1e3 / step_ms)))


def timed_abba_iterations(step_ms: float, options: Mapping[str, Any], rounds: int) -> int:
    """Return how many steps a timed window has that is the A of A B B A.

    Those of all rounds take `max_seconds` together, or what the fewest timed windows take, and fit `max_iterations`.
    """
    seconds = min(FEWEST_WINDOWS * WINDOW_SECONDS, float(options["max_seconds"])) / (WITH_IT * rounds)
    fitting = max(FEWEST_STEPS, math.ceil(min(WINDOW_SECONDS, seconds) * 1e3 / step_ms))
    return min(MOST_PER_WINDOW, fitting, int(options["max_iterations"]) // (WITH_IT * rounds))


def gets_longer(ms: Sequence[float]) -> bool:
    """Return whether the steps of one window got longer from its first third on, or the window is too short to tell.

    Such steps, held back by a power cap, are shorter in short windows, because the device rests between two of them.
    """
    return math.fsum(ms) < LOADED_MS or not statistics.flat(ms[::-1], 0, math.fsum(ms))


def half_width(by_window: intervals.Windows) -> float:
    """Return the half-width of the 95 % interval of the mean, as a share of the mean."""
    ms = [one for window in by_window for one in window]
    return intervals.mean_half_width(by_window) * len(ms) / math.fsum(ms)


def enough(by_window: Sequence[Sequence[float]], lasted_ms: float, options: Mapping[str, Any], rounds: int = 0) -> bool:
    """Return whether the measurement ends: its interval is narrow enough, or time or iterations have run out.

    `by_window` has the ms of every iteration on its slowest rank, `lasted_ms` is the time of the slowest rank. Rounds of A B B A
    of which the windows are the A are finished first.
    """
    if len(by_window) < WITH_IT * rounds:
        return False
    done = sum(map(len, by_window))
    if lasted_ms >= options["max_seconds"] * 1e3 or done >= options["max_iterations"]:
        return True
    if done < options["min_iterations"] or len(by_window) < FEWEST_WINDOWS:
        return False
    return half_width(by_window) <= float(options["interval_target"])
