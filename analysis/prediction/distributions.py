"""Uncertain numbers as arrays: the best value first, then DRAWS values that it may have.

Functions of such arrays are ordinary numpy, and the spread of the result is the propagated one
(a parametric bootstrap). Equal names give equal draws, so equal records give equal forecasts.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Draws = np.ndarray[Any, np.dtype[np.float64]]
DRAWS = 200
MOST_SHARE = 5.0  # standard deviations of a logarithm beyond which nothing is believed


def constant(value: float) -> Draws:
    """Return a number that is known, (1 + DRAWS,)."""
    return np.full(1 + DRAWS, float(value))


def scaled_normal(value: float, share: float, name: str) -> Draws:
    """Return a positive number that scatters by a share of itself, log-normally, (1 + DRAWS,)."""
    return value * np.exp(min(share, MOST_SHARE) * _standard_normal(name))


def normal(value: float, deviation: float, name: str) -> Draws:
    """Return a number of any sign with a standard deviation in its own unit, (1 + DRAWS,)."""
    return value + deviation * _standard_normal(name)


def mean(draws: Draws) -> float:
    """Return the best value."""
    return float(draws[0])


def deviation(draws: Draws) -> float:
    """Return the standard deviation of the draws about the best value."""
    return float(np.sqrt(np.mean((draws[1:] - draws[0]) ** 2)))


def average(several: Sequence[Draws]) -> Draws:
    """Return the plain mean of several numbers."""
    return np.asarray(np.mean(several, axis=0))


def inverse_variance_mean(several: Sequence[tuple[Draws, float]]) -> Draws:
    """Return the mean of (number, standard deviation), each weighted by one over its variance."""
    total = constant(0.0)
    weights = 0.0
    for draws, error in several:
        weight = 1 / max(error, 1e-3) ** 2  # none is known exactly
        total = total + weight * draws
        weights += weight
    return total / weights


def _standard_normal(name: str) -> Draws:
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(DRAWS)
    return np.concatenate([[0.0], drawn - drawn.mean()])
