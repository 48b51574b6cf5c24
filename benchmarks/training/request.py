"""How long the benchmarks that train measure, and when their windows are enough (no torch).

Seen on one core of a server CPU: 17 to 51 · 10⁹ operations a second, by the model. Seen on an H200:
ResNet-50 in bf16 at 114 · 10¹². The rules take rounder ones.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.request import Room
from benchmarks.timing import statistics
from conf import groups
from conf.cell import Cell
from conf.options import Refused

FLOPS = {"cpu": 25e9, "cuda": 60e12}  # operations a second of one rank
USUAL_STEP_SECONDS = 0.1  # of a model of which nothing is known
FIRST_STEPS, WARM_UP_STEPS, CHECKED_STEPS, LEAD_IN = 2, 10, 6, 1
GRAPH_STEPS = 40  # before the captures of a cell with CUDA graphs, and to compare them
FEWEST_STEPS, ABBA_SECONDS = 3, 0.5  # of a window of A B B A
WITH_IT, WITHOUT_IT = 2, 2  # windows of a round, A B B A
CALIBRATION_SECONDS = 1.5  # of benchmark.calibrate=all, at most; else it takes little
EXCHANGE_SECONDS = {"cpu": 8.0, "cuda": 4.0}  # of benchmark=exchange with ResNet-50
# Of one window: long enough that its start does not count, short enough to stop early.
WINDOW_SECONDS = 2.0
FEWEST_PER_WINDOW, MOST_PER_WINDOW = 5, 200
# An interval is only believed once this many windows agree: within one, drift does not show.
FEWEST_WINDOWS = 3
MOST_PER_ABBA_WINDOW = 30
# A window under load that is shorter says nothing of a power cap: on H200s one begins to hold the
# clock after 0.7 s.
LOADED_MS = 1000.0


def step_seconds(cell: Cell) -> float:
    """Return the seconds of a training step, from the operations that the model's YAML has."""
    gigaflop = groups.training_gigaflop(cell.model.name, cell.model.image_size)
    if gigaflop is None:
        return USUAL_STEP_SECONDS
    return gigaflop * 1e9 * cell.batch_size / FLOPS[cell.device]


def throughput(cell: Cell) -> float:
    """Return the seconds that benchmark=throughput measures."""
    options, step_s = cell.benchmark, step_seconds(cell)
    timed_s = max(float(options["max_seconds"]), step_s * int(options["min_iterations"]))
    abba_window_s = max(FEWEST_STEPS * step_s, ABBA_SECONDS) + LEAD_IN * step_s
    # Without a loader the timed windows are the steps with exchange, mostly; a power cap or
    # asynchronous ranks need their own.
    windows = WITH_IT + WITHOUT_IT
    if rounds_between(options, cell.period) and not cell.data:
        windows = WITHOUT_IT
    abba_s = 0.0
    if cell.world_size > 1:
        abba_s = int(options["exposed_rounds"]) * windows * abba_window_s
    calibration_s = CALIBRATION_SECONDS if options.get("calibrate") == "all" else 0.0
    return _seconds_before(cell, step_s) + timed_s + abba_s + calibration_s


def rounds_between(options: Mapping[str, Any], period: int = 1) -> int:
    """Return the rounds of A B B A of which the timed windows may be the A.

    0 where too few iterations are allowed.
    """
    rounds = int(options["exposed_rounds"])
    if int(options["max_iterations"]) < WITH_IT * rounds * whole_periods(FEWEST_STEPS, period):
        return 0
    return rounds


def refuse(cell: Cell, room: Room) -> None:
    """Refuse a strategy whose period does not fit the timed windows. Raises Refused."""
    most = int(cell.benchmark["max_iterations"])
    if cell.period * FEWEST_WINDOWS > most:
        raise Refused(
            f"strategy.period={cell.period}: benchmark.max_iterations={most} must hold "
            f"{FEWEST_WINDOWS} periods; expected a period of at most {most // FEWEST_WINDOWS}, or "
            f"benchmark.max_iterations={cell.period * FEWEST_WINDOWS}"
        )


def exchange(cell: Cell) -> float:
    """Return the seconds that benchmark=exchange measures; the launcher has no model's bytes."""
    return EXCHANGE_SECONDS[cell.device]


def _seconds_before(cell: Cell, step_s: float) -> float:
    least_s = float(cell.benchmark.get("warmup_min_seconds", 0.0))
    steps = FIRST_STEPS + CHECKED_STEPS + GRAPH_STEPS * cell.graphed
    return steps * step_s + max(least_s, WARM_UP_STEPS * step_s)


# How many steps each window has, and when the timed windows are enough. Simulations call it too.
def whole_periods(iterations: int, period: int) -> int:
    """Return the fewest iterations, at least these, that hold whole periods of a strategy."""
    return -(-iterations // period) * period


def window_iterations(step_ms: float, period: int = 1) -> int:
    """Return how many steps fit a timed window."""
    fitting = min(MOST_PER_WINDOW, max(FEWEST_PER_WINDOW, round(WINDOW_SECONDS * 1e3 / step_ms)))
    return whole_periods(fitting, period)


def abba_iterations(step_ms: float, period: int = 1) -> int:
    """Return how many steps a window of A B B A has that is not timed."""
    fitting = min(MOST_PER_ABBA_WINDOW, max(FEWEST_STEPS, round(ABBA_SECONDS * 1e3 / step_ms)))
    return whole_periods(fitting, period)


def timed_abba_iterations(
    step_ms: float, options: Mapping[str, Any], rounds: int, period: int = 1
) -> int:
    """Return how many steps a timed window has that is the A of A B B A.

    Those of all rounds take `max_seconds` together, or what the fewest timed windows take, and fit
    `max_iterations`.
    """
    windows = WITH_IT * rounds
    seconds = min(FEWEST_WINDOWS * WINDOW_SECONDS, float(options["max_seconds"])) / windows
    fitting = max(FEWEST_STEPS, math.ceil(min(WINDOW_SECONDS, seconds) * 1e3 / step_ms))
    most = int(options["max_iterations"]) // windows
    return min(whole_periods(min(MOST_PER_WINDOW, fitting), period), most // period * period)


def gets_longer(ms: Sequence[float]) -> bool:
    """Return whether the steps of one window got longer, or it is too short to tell.

    From its first third on: such steps, held back by a power cap, are shorter in short windows,
    because the device rests between two of them.
    """
    lasted_ms = math.fsum(ms)
    return lasted_ms < LOADED_MS or not statistics.flat(ms[::-1], 0, lasted_ms)


def half_width(by_window: statistics.Windows) -> float:
    """Return the half-width of the 95 % interval of the mean, as a share of the mean."""
    ms = statistics.joined(by_window)
    return statistics.mean_half_width(by_window) * len(ms) / math.fsum(ms)


def should_stop(
    by_window: Sequence[Sequence[float]],
    lasted_ms: float,
    options: Mapping[str, Any],
    rounds: int = 0,
    period: int = 1,
) -> bool:
    """Return whether the interval is narrow enough, or time or iterations have run out.

    `by_window` has the ms of every iteration on its slowest rank, `lasted_ms` is the time of the
    slowest rank. Rounds of A B B A of which the windows are the A are finished first.
    """
    if len(by_window) < WITH_IT * rounds:
        return False
    iterations = sum(map(len, by_window))
    are_over = iterations + period > options["max_iterations"]
    if lasted_ms >= options["max_seconds"] * 1e3 or are_over:
        return True
    if iterations < options["min_iterations"] or len(by_window) < FEWEST_WINDOWS:
        return False
    return half_width(by_window) <= float(options["interval_target"])
