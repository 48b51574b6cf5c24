"""Statistics of iteration times: median, 95th percentile, spread, and whether a warm-up has ended."""

from collections.abc import Sequence

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
    tolerance = max(FLAT_SHARE * float(middles[-1]), 2 * ERROR_OF_MEDIAN * sigma * (2 / size) ** 0.5)
    return bool(middles[:-1].max() - middles[-1] <= tolerance)
