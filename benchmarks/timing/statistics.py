"""Statistics of iteration times: median, 95th percentile, spread, and whether a warm-up has ended."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

COMPARABLE_MS = 100.0  # length of a window from which its two clocks can be compared
# A warm-up has ended when the step time of its last three windows falls by less than this share, or by less than noise.
FLAT_SHARE = 0.001
WINDOWS = 3
FEWEST_SAMPLES = 6  # of a warm-up: two for each window
SIGMA_PER_MAD = 1.4826  # of normal noise: standard deviation ÷ median absolute deviation
ERROR_OF_MEDIAN = 1.2533  # of normal noise: standard error of a median ÷ that of a mean


def median(ms: Sequence[float]) -> float:
    """Return the median."""
    return float(np.median(ms))


def percentile_95(ms: Sequence[float]) -> float:
    """Return the 95th percentile, linear between neighbours."""
    return float(np.percentile(ms, 95))


def clock_disagreement(device: float, host: float) -> float:
    """Return the difference of the two clocks of a window, as a share of the host's."""
    return abs(device - host) / host


def spread(values: Sequence[float]) -> float:
    """Return (largest − smallest) ÷ median."""
    return (max(values) - min(values)) / median(values)


def flat(ms: Sequence[float], least: int, least_ms: float = 0.0) -> bool:
    """Return whether the step time has stopped falling.

    There must be at least `least` (and FEWEST_SAMPLES) samples, which lasted `least_ms`. The last half of them, and at least
    those of the last `least_ms`, are cut into three windows. The median of the last window must not lie below that of
    another by more than FLAT_SHARE, or by more than two standard errors of the difference, taken from the scatter of the samples.
    """
    lasted = np.cumsum(np.asarray(ms, dtype=float)[::-1])
    if len(ms) < max(least, FEWEST_SAMPLES) or lasted[-1] < least_ms:
        return False
    recent = int(np.searchsorted(lasted, max(lasted[-1] / 2, least_ms)) + 1)
    size = max(min(recent, len(ms)), FEWEST_SAMPLES) // WINDOWS
    windows = np.asarray(ms[-WINDOWS * size :], dtype=float).reshape(WINDOWS, size)
    middles = np.median(windows, axis=1)
    sigma = SIGMA_PER_MAD * float(np.median(np.abs(windows - middles[:, None])))
    tolerance = max(
        FLAT_SHARE * float(middles[-1]), 2 * ERROR_OF_MEDIAN * sigma * (2 / size) ** 0.5
    )
    return bool(middles[:-1].max() - middles[-1] <= tolerance)


# 95 % intervals of the mean, the median and the difference of correlated times inside one run. METHOD.md defines them.


Windows = Sequence[Sequence[float]]  # ms of each iteration, by window
OUTSIDE = 0.05  # of the 95 % interval
# |mean − truth| · √n ÷ √V exceeds this with probability 0.05: √45.40 (Lobato 2001, table 1), and for few values, from
# 400,000 simulated series.
CRITICAL, CRITICAL_OF_FEW = 6.738, {2: 36.0, 3: 11.86, 4: 9.06}
MORE_FOR_FEW = 4.7  # for n independent values: CRITICAL · (1 + 4.7 ÷ n²), within 1 % of the simulated ones from five on
FEWEST_OF_LONGEST = (
    0.5  # a window shorter than this share of the longest one has no level of its own
)


def mean_interval(windows: Windows) -> tuple[float, float]:
    """Return the 95 % interval of the mean; (nan, nan) below two values."""
    return _around(_mean(_joined(windows)), mean_half_width(windows))


def mean_half_width(windows: Windows) -> float:
    """Return the half-width of the 95 % interval of the mean; nan below two values."""
    values = _joined(windows)
    if len(values) < 2:
        return math.nan
    return max(
        _self_normalised(values - _mean(values)),
        _of_levels([_mean(window) for window in _long(windows)]),
    )


def median_interval(windows: Windows) -> tuple[float, float]:
    """Return the 95 % interval of the median; (nan, nan) below two values.

    Its self-normalised part is found in ranks: how far the share of values below the median may be off. With few values
    no rank is far enough out, and the half-width of the mean is taken.
    """
    values = _joined(windows)
    if len(values) < 2:
        return math.nan, math.nan
    middle = float(np.median(values))
    above = np.sign(values - middle) / 2
    off = _self_normalised(above - _mean(above))
    if off >= 0.5:
        return _around(middle, mean_half_width(windows))
    low, high = (float(end) for end in np.quantile(values, [0.5 - off, 0.5 + off]))
    of_levels = _around(middle, _of_levels([float(np.median(window)) for window in _long(windows)]))
    return min(low, of_levels[0]), max(high, of_levels[1])


def difference_interval(estimate: float, differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a difference that was found in several blocks: Student's t; (nan, nan) below two blocks."""
    half_width = _of_levels(differences) if len(differences) > 1 else math.nan
    return estimate - half_width, estimate + half_width


def correlation(values: "Sequence[float] | np.ndarray[Any, Any]") -> float:
    """Return the correlation of neighbours; 0 for constants and below three values."""
    centred = np.asarray(values, dtype=float) - _mean(values)
    squares = float((centred**2).sum())
    return (
        float((centred[1:] * centred[:-1]).sum()) / squares
        if len(centred) > 2 and squares > 0
        else 0.0
    )


def _around(middle: float, half_width: float) -> tuple[float, float]:
    """Return the ends of an interval of a positive value."""
    if half_width == 0:
        return middle, middle
    factor = math.exp(min(half_width / middle, 700.0))
    return middle / factor, middle * factor


def _self_normalised(deviations: "np.ndarray[Any, Any]") -> float:
    """Return the half-width of the mean of (n,) values whose deviations from it are given."""
    count = len(deviations)
    correlated = max(correlation(deviations), 0.0)
    effective = (
        count * (1 - correlated) / (1 + correlated)
    )  # as many independent values tell as much
    critical = max(
        CRITICAL_OF_FEW.get(count, CRITICAL),
        CRITICAL * (1 + MORE_FOR_FEW / max(effective, 2.0) ** 2),
    )
    sums = np.cumsum(deviations)
    return critical * math.sqrt(float((sums**2).sum()) / count**3)


def _of_levels(levels: Sequence[float]) -> float:
    """Return the half-width of a mean of independent values by Student's t; 0 below two."""
    count = len(levels)
    if count < 2:
        return 0.0
    deviation = float(np.std(np.asarray(levels, dtype=float), ddof=1))
    return two_sided_quantile(OUTSIDE, count - 1) * deviation / math.sqrt(count)


def _long(windows: Windows) -> list[Sequence[float]]:
    """Return the windows that are long enough for a level of their own."""
    longest = max(map(len, windows))
    return [window for window in windows if len(window) >= FEWEST_OF_LONGEST * longest]


def _joined(windows: Windows) -> "np.ndarray[Any, Any]":
    return np.asarray([ms for window in windows for ms in window], dtype=float)


def _mean(values: "Sequence[float] | np.ndarray[Any, Any]") -> float:
    return math.fsum(values) / len(values) if len(values) else math.nan


# Whether a step time stayed the same while it was measured: drift, a sudden change, pauses. METHOD.md defines the three.


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


def stationarity(ms: Sequence[float]) -> dict[str, float]:
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
    return {
        "count": float(len(beyond)),
        "lost_share": lost / math.fsum(ms),
        "longest_ms": float(values.max()),
    }


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
    variance = (
        float((rest**2).sum()) / (count - 2) / (1 - min(2 * _inflation(correlated) / count, 0.8))
    )
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
        np.cumsum(back**2),
        np.cumsum(steps * back),
        np.cumsum(steps**2),
        count - before,
        back[count - before - 1],
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
    return min(
        max((seen + fitted / count) / (1 - min(2 * fitted / count, 0.5)), 0.0), MOST_CORRELATED
    )


def _inflation(correlated: float) -> float:
    """Return by how much a correlation of neighbours inflates the variance of a mean (an AR(1) process)."""
    return (1 + correlated) / (1 - correlated)


def _ratio(value: float, limit: float) -> float:
    return min(value / limit, MOST_BEYOND) if limit > 0 else MOST_BEYOND * (value > 0)


# Quantiles of Student's t distribution, without scipy: importing it takes a second on every rank.


def two_sided_quantile(share: float, freedom: float) -> float:
    """Return the value that |t| exceeds with probability `share`, for `freedom` degrees of freedom, 1 or from 2 on.

    Hill 1970, Communications of the ACM 13(10), algorithm 396.
    """
    n = freedom
    if n == 1:
        return 1 / math.tan(share * math.pi / 2)
    if n == 2:
        return math.sqrt(2 / (share * (2 - share)) - 2)
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * share) ** (2 / n)
    if y <= 0.05 + a:
        y = (
            (1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1
        ) * (n + 1) / (n + 2) + 1 / y
        return math.sqrt(n * y)
    x = NormalDist().inv_cdf(share / 2)
    y = x**2
    if n < 5:
        c += 0.3 * (n - 4.5) * (x + 0.6)
    c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
    y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
    return math.sqrt(n * math.expm1(a * y**2))
