"""Whether a step time stayed the same while it was measured: drift, a sudden change, pauses. METHOD.md defines the three.

Both tests know that neighbouring steps are correlated, and both say by how much the time changed and how far that is beyond
what noise explains. A change is judged by both (analysis.validity.timing).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.timing.student import two_sided_quantile

FEWEST = 12  # values that are tested
# Of clean series, both tests together accuse at most this share, up to a correlation of neighbours of 0.8.
DRIFT_CHANCE = 0.0005
# The self-normalised statistic of a change (Shao and Zhang 2010, Journal of the American Statistical Association 105) exceeds
# 100 · (1 + 100 ÷ effective values) in 0.1 % of simulated clean series; the second factor is for few values, by simulation.
CHANGE, CHANGE_OF_FEW = 100.0, 100.0
TRIM = 0.1  # share of the values at each end between which a change is looked for
FEWEST_IN_PART = 48
MOST_CORRELATED = 0.98
MOST_BEYOND = 1e6  # of a series without noise
# A pause makes a step longer than the median by this share, and by this many times the distance of the 90th percentile.
PAUSE_SHARE, PAUSE_DISTANCES = 0.25, 6.0


def facts(ms: Sequence[float]) -> dict[str, float]:
    """Return the drift and the largest change of a series, as shares of its mean; empty below FEWEST values.

    `drift` is from the first to the last value on a straight line, `change` is after − before at the iteration `change_at`.
    `drift_beyond` and `change_beyond` are the statistic ÷ its limit: above 1, noise does not explain it.
    """
    if len(ms) < FEWEST:
        return {}
    values = np.asarray(ms, dtype=float)
    mean = math.fsum(ms) / len(ms)
    drift, drift_beyond = _drift(values - mean)
    found = [(*_change(values[first:last] - mean), first) for first, last in _parts(len(values))]
    # What is beyond noise comes first, and of that the largest change.
    size, beyond, place, first = max(found, key=lambda one: (one[1] > 1, abs(one[0])))
    return {
        "drift": drift / mean,
        "drift_beyond": drift_beyond,
        "change": size / mean,
        "change_beyond": beyond,
        "change_at": float(first + place),
    }


def drift(ms: Sequence[float]) -> float:
    """Return how far a straight line through a series rises, as a share of its mean; 0 below three values."""
    if len(ms) < 3:
        return 0.0
    mean = math.fsum(ms) / len(ms)
    return _drift(np.asarray(ms, dtype=float) - mean)[0] / mean


def pauses(ms: Sequence[float]) -> dict[str, float]:
    """Return how many steps a pause made longer, the share of all time that they lost, and the longest step."""
    values = np.asarray(ms, dtype=float)
    middle, high = (float(value) for value in np.quantile(values, [0.5, 0.9]))
    beyond = values[values > middle + max(PAUSE_SHARE * middle, PAUSE_DISTANCES * (high - middle))]
    lost = math.fsum(float(value) - middle for value in beyond)
    return {"count": float(len(beyond)), "lost_share": lost / math.fsum(ms), "longest_ms": float(values.max())}


def _parts(count: int) -> list[tuple[int, int]]:
    """Return (first, last) of the whole, and of halves and quarters that overlap by half, where they are long enough.

    Several changes hide each other in the whole (seeded intervals: Kovács and others 2023, Biometrika 110).
    """
    parts = [(0, count)]
    for size in (count // 2, count // 4):
        if size >= FEWEST_IN_PART:
            parts += [(start, start + size) for start in range(0, count - size + 1, size // 2)]
    return parts


def _drift(centred: "np.ndarray[Any, Any]") -> tuple[float, float]:
    """Return the rise of a straight line through (n,) values, and |t| of its slope ÷ the limit of |t|."""
    count = len(centred)
    along = np.arange(count) / (count - 1) - 0.5
    squares = float((along**2).sum())
    rise = float((centred * along).sum()) / squares
    rest = centred - rise * along
    correlated = _correlation(rest, 2)
    # The variance of the rest is too small, because a correlated rest follows the line.
    variance = float((rest**2).sum()) / (count - 2) / (1 - min(2 * _inflation(correlated) / count, 0.8))
    error = math.sqrt(variance * _inflation(correlated) / squares)
    freedom = max(count / _inflation(correlated), 4.0) - 2
    limit = two_sided_quantile(DRIFT_CHANCE, freedom) * error
    return rise, _ratio(abs(rise), limit)


def _change(values: "np.ndarray[Any, Any]") -> tuple[float, float, int]:
    """Return (mean after − mean before, statistic ÷ its limit, how many values are before) at the likeliest place of a change.

    The statistic at k is D² ÷ V: D compares the means before and after k, V is made of the partial sums on either side, in
    which a change at k does not show.
    """
    count = len(values)
    centred = values - math.fsum(values) / count
    steps = np.arange(1, count + 1, dtype=float)
    sums = np.cumsum(centred)
    margin = max(2, int(TRIM * count))
    before = np.arange(margin, count - margin + 1)
    at = sums[before - 1]
    left = _bridges(np.cumsum(sums**2), np.cumsum(steps * sums), np.cumsum(steps**2), before, at)
    back = np.cumsum(centred[::-1])  # the same from the other end
    right = _bridges(
        np.cumsum(back**2), np.cumsum(steps * back), np.cumsum(steps**2), count - before, back[count - before - 1]
    )
    distance = at - before / count * sums[-1]
    tiny = 1e-20 * count * max(float((values**2).max()), 1e-300)
    statistic = distance**2 / count / (np.maximum(left + right, tiny) / count**2)
    best = int(statistic.argmax())
    place = int(before[best])
    first, second = (math.fsum(part) / len(part) for part in (centred[:place], centred[place:]))
    rest = np.concatenate([centred[:place] - first, centred[place:] - second])
    limit = CHANGE * (1 + CHANGE_OF_FEW * _inflation(_correlation(rest, 2)) / count)
    return second - first, _ratio(float(statistic[best]), limit), place


def _bridges(squares: Any, products: Any, steps: Any, lengths: Any, ends: Any) -> Any:
    """Return Σ (S_t − t ÷ k · S_k)² over t ≤ k, for every length k of a beginning of a series with partial sums S."""
    index = lengths - 1
    slope = ends / lengths
    return squares[index] - 2 * slope * products[index] + slope**2 * steps[index]


def _correlation(rest: "np.ndarray[Any, Any]", fitted: int) -> float:
    """Return the correlation of neighbours of what a fit of some parameters left, corrected for the fit; 0 or more."""
    count, squares = len(rest), float((rest**2).sum())
    if squares == 0:
        return 0.0
    seen = float((rest[1:] * rest[:-1]).sum()) / squares
    return min(max((seen + fitted / count) / (1 - min(2 * fitted / count, 0.5)), 0.0), MOST_CORRELATED)


def _inflation(correlated: float) -> float:
    """Return by how much a correlation of neighbours inflates the variance of a mean (an AR(1) process)."""
    return (1 + correlated) / (1 - correlated)


def _ratio(value: float, limit: float) -> float:
    return min(value / limit, MOST_BEYOND) if limit > 0 else MOST_BEYOND * (value > 0)
