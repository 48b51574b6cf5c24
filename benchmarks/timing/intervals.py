"""95 % intervals of the mean, the median and the difference of correlated times inside one run. METHOD.md defines them.

Two half-widths are computed, and the wider one counts:
- the self-normalised one (Lobato 2001, Journal of the American Statistical Association 96; Shao 2010, Journal of the Royal
  Statistical Society B 72): the partial sums of the deviations say how far a correlated mean may be off. It has no size of a
  group to choose, so it cannot run out of groups;
- that of the windows: Student's t of their means, for a level that changes from window to window.

The ends are the mean · exp(± half-width ÷ mean), so that a time stays positive.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.timing.student import two_sided_quantile

Windows = Sequence[Sequence[float]]  # ms of each iteration, by window
OUTSIDE = 0.05  # of the 95 % interval
# |mean − truth| · √n ÷ √V exceeds this with probability 0.05: √45.40 (Lobato 2001, table 1), and for few values, from
# 400,000 simulated series.
CRITICAL, CRITICAL_OF_FEW = 6.738, {2: 36.0, 3: 11.86, 4: 9.06}
MORE_FOR_FEW = 4.7  # for n independent values: CRITICAL · (1 + 4.7 ÷ n²), within 1 % of the simulated ones from five on
FEWEST_OF_LONGEST = 0.5  # a window shorter than this share of the longest one has no level of its own


def mean_interval(windows: Windows) -> tuple[float, float]:
    """Return the 95 % interval of the mean; (nan, nan) below two values."""
    return _around(_mean(_joined(windows)), mean_half_width(windows))


def mean_half_width(windows: Windows) -> float:
    """Return the half-width of the 95 % interval of the mean; nan below two values."""
    values = _joined(windows)
    if len(values) < 2:
        return math.nan
    return max(_self_normalised(values - _mean(values)), _of_levels([_mean(window) for window in _long(windows)]))


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
    return float((centred[1:] * centred[:-1]).sum()) / squares if len(centred) > 2 and squares > 0 else 0.0


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
    effective = count * (1 - correlated) / (1 + correlated)  # as many independent values tell as much
    critical = max(CRITICAL_OF_FEW.get(count, CRITICAL), CRITICAL * (1 + MORE_FOR_FEW / max(effective, 2.0) ** 2))
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
