"""Waiting for the slowest of n ranks: the expected largest of n step times.

The core of the residuals is taken as normal, and the largest of n is integrated exactly, not by √(2 ln n). Where residuals
are known, they count as they are; beyond the largest a generalised Pareto distribution of the highest tenth goes on. Its shape
is bounded above, and the bound is stated. GPUs that were not measured scatter as those that were.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtri

from analysis.prediction.draws import Values

THRESHOLD = 0.9  # quantile above which residuals are a tail
FEWEST_IN_TAIL = 10
HEAVIEST = 0.5  # largest shape: beyond it even the variance is infinite, which no step time showed
_GRID = 4000


@dataclass(frozen=True)
class Waiting:
    """The expected wait for the slowest of n ranks, in ms."""

    ms: float
    bound_ms: float  # with the heaviest tail that the residuals allow
    beyond: bool  # n exceeds the residuals: the tail was extrapolated


@functools.cache
def largest_normal(ranks: int) -> float:
    """Return the expected largest of n standard normal numbers: 0.564 for 2, 1.42 for 8, 3.25 for 1,024."""
    return expected_largest([0.0] * ranks, 1.0) if ranks < 3 else _identical(ranks)


@functools.cache
def largest_deviation(ranks: int) -> float:
    """Return the standard deviation of the largest of n standard normal numbers: 1 for 1, 0.826 for 2, 0.611 for 8."""
    return math.sqrt(max(_identical(ranks, 2) - _identical(ranks) ** 2, 0.0))


def _identical(ranks: int, power: int = 1) -> float:
    """Return the expected power of the largest of n standard normal numbers: ∫ power · x^(power − 1) · (1 − F) or −F."""
    x = np.linspace(-9.0, 9.0, _GRID)
    below = np.exp(ranks * log_ndtr(x))
    return _area(power * x ** (power - 1) * np.where(x > 0, 1 - below, -below), x)


def _area(y: Values, x: Values) -> float:
    """Return the integral of y over x, by trapezoids.

    numpy has it under one name up to 1.26, under another from 2.0; scipy.integrate takes 0.2 s to import.
    """
    return float((np.diff(x) * (y[1:] + y[:-1]) / 2.0).sum())


def expected_largest(means: Sequence[float], deviation: float) -> float:
    """Return the expected largest of normal numbers with these means and one standard deviation."""
    highest = max(means)
    if deviation <= 0:
        return highest
    x = np.linspace(min(means) - 9 * deviation, highest + 9 * deviation, _GRID)
    below = np.exp(sum(log_ndtr((x - mean) / deviation) for mean in means))
    return float(x[0]) + _area(1 - below, x)


def wait_of_residuals(residuals_ms: Sequence[float], ranks: int) -> Waiting:
    """Return the wait for the slowest of n ranks with residuals like these, in ms. Raises ValueError for fewer than two."""
    values = np.asarray(residuals_ms, dtype=float)
    if len(values) < 2:
        raise ValueError(f"residuals: {len(values)} given; a wait needs at least 2")
    values = np.sort(values - values.mean())
    threshold = float(np.quantile(values, THRESHOLD))
    tail = values[values > threshold] - threshold
    levels = (np.arange(_GRID) + 0.5) / _GRID
    quantiles = levels ** (1 / ranks)  # of the largest of n
    core = ndtri(quantiles) * float(values.std(ddof=1))
    if len(tail) < FEWEST_IN_TAIL or float(np.ptp(tail)) == 0.0:
        ms = float(core.mean())
        return Waiting(ms, ms, ranks > len(values))
    from scipy.stats import genpareto  # takes longer to import than all else of a small report

    shape, _, scale = genpareto.fit(tail, floc=0)
    shape = float(np.clip(shape, -HEAVIEST, HEAVIEST))
    error = (1 + abs(shape)) / math.sqrt(len(tail))  # Smith 1987
    inner = np.interp(quantiles, (np.arange(len(values)) + 0.5) / len(values), values)

    def mean(heaviness: float) -> float:
        rest = np.clip((quantiles - THRESHOLD) / (1 - THRESHOLD), 0.0, None)
        beyond = np.maximum(threshold + genpareto.ppf(rest, heaviness, scale=scale), values[-1])
        return float(np.where(quantiles > 1 - 1 / len(values), beyond, inner).mean())

    return Waiting(mean(shape), mean(min(shape + 2 * error, HEAVIEST)), ranks > len(values))
