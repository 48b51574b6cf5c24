"""A number that is not known exactly, as an array: its best value first, then DRAWS values that it may have.

Functions of such arrays are ordinary numpy, and the spread of the result is the propagated one. The draws are a parametric
bootstrap: a measured median is drawn again with the scatter between runs. Equal names give equal draws, so that equal records
give equal forecasts.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Values = np.ndarray[Any, np.dtype[np.float64]]
DRAWS = 200
MANY = 5.0  # standard deviations of a logarithm beyond which nothing is believed


def exactly(value: float) -> Values:
    """Return a number that is known, (1 + DRAWS,)."""
    return np.full(1 + DRAWS, float(value))


def about(value: float, share: float, name: str) -> Values:
    """Return a positive number that scatters by a share of itself, log-normally, (1 + DRAWS,)."""
    return value * np.exp(min(share, MANY) * _normal(name))


def near(value: float, deviation: float, name: str) -> Values:
    """Return a number of any sign with a standard deviation in its own unit, (1 + DRAWS,)."""
    return value + deviation * _normal(name)


def best(values: Values) -> float:
    """Return the best value."""
    return float(values[0])


def deviation(values: Values) -> float:
    """Return the standard deviation of the draws about the best value."""
    return float(np.sqrt(np.mean((values[1:] - values[0]) ** 2)))


def weighted(parts: Sequence[tuple[Values, float]]) -> Values:
    """Return the mean of numbers, each weighted by one over the variance beside it."""
    total = sum((one / variance for one, variance in parts), exactly(0.0))
    return total / sum(1 / variance for _, variance in parts)


def _normal(name: str) -> Values:
    """Return standard normal draws, equal for equal names."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(DRAWS)
    return np.concatenate([[0.0], drawn - drawn.mean()])
