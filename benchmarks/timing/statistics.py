"""Statistics of iteration times: median, 95th percentile, bootstrap intervals, and whether a warm-up has ended.

Bootstrap intervals are percentile intervals (Efron and Tibshirani 1993), seeded, so that equal samples give equal intervals.
scipy.stats.bootstrap gives the same; importing it takes a second on every rank of every cell.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
COMPARABLE_MS = 100.0  # length of a window from which its two clocks can be compared
MOST_VALUES = 4_000_000  # drawn at once: 32 MB
# Neighbouring iterations are correlated (clocks, allocator, neighbours on the machine). Means over groups of them are
# resampled instead once the correlation of neighbours exceeds this.
CORRELATION_LIMIT = 0.2
FEWEST_GROUPS = 10  # that are left to resample
# A warm-up has ended when the medians of its last two quarters differ by less than this share.
FLAT_SHARE = 0.02
FEWEST_SAMPLES = 4  # of a warm-up: one for each quarter
SIGMA_PER_MAD = 1.4826  # of normal noise: standard deviation ÷ median absolute deviation


def interval(samples: Sequence[Sequence[float]], statistic: Callable[..., Any]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a statistic of independent samples; (nan, nan) if one has fewer than two values."""
    if min(len(sample) for sample in samples) < 2:
        return float("nan"), float("nan")
    generator = np.random.default_rng(0)
    data = [np.asarray(sample, dtype=float) for sample in samples]
    rows = max(1, min(RESAMPLES, MOST_VALUES // max(map(len, data))))
    found = np.concatenate([
        statistic(*(generator.choice(values, (min(rows, RESAMPLES - start), len(values))) for values in data), axis=-1)
        for start in range(0, RESAMPLES, rows)
    ])  # fmt: skip
    low, high = np.percentile(found, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)


def median_interval(ms: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median."""
    return interval([ms], np.median)


def mean_interval(ms: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean. Correlated neighbours are first joined into groups (batch means)."""
    return interval([joined(ms)], np.mean)


def difference_interval(longer: Sequence[float], shorter: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of median(longer) − median(shorter), resampled independently."""

    def difference(a: Any, b: Any, axis: int) -> Any:
        return np.median(a, axis=axis) - np.median(b, axis=axis)

    return interval([longer, shorter], difference)


def joined(ms: Sequence[float]) -> list[float]:
    """Return means over groups of 1, 2, 4, … neighbours: the shortest groups whose neighbours are nearly independent."""
    values = np.asarray(ms, dtype=float)
    while len(values) >= 2 * FEWEST_GROUPS and _correlation(values) > CORRELATION_LIMIT:
        values = values[: len(values) // 2 * 2].reshape(-1, 2).mean(axis=1)
    return [float(value) for value in values]


def _correlation(values: np.ndarray[Any, Any]) -> float:
    """Return the correlation of neighbours; 0 for constants."""
    if np.ptp(values) == 0:
        return 0.0
    centred = values - values.mean()
    return float((centred[1:] * centred[:-1]).sum() / (centred**2).sum())


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


def flat(ms: Sequence[float], least: int) -> bool:
    """Return whether the step time has stopped falling.

    There must be at least `least` (and FEWEST_SAMPLES) samples. The medians of the third and the last quarter must differ by
    less than FLAT_SHARE, or by less than two standard errors of a quarter's mean, taken from the scatter of the samples.
    """
    if len(ms) < max(least, FEWEST_SAMPLES):
        return False
    quarter = max(len(ms) // 4, 2)
    before, after = np.asarray(ms[-2 * quarter : -quarter]), np.asarray(ms[-quarter:])
    scatter = np.median(np.abs(np.concatenate([before - np.median(before), after - np.median(after)])))
    tolerance = max(FLAT_SHARE * float(np.median(after)), 2 * SIGMA_PER_MAD * float(scatter) / quarter**0.5)
    return bool(np.median(before) - np.median(after) < tolerance)
