"""Estimates with 95 % intervals from few runs: the parametric bootstrap that every finding shares.

A rate is compared on a logarithmic scale, where a scatter is a share. What is known of it is a Sample: of several runs their
median, with a standard error from the scatter *between* runs and Student's t with runs − 1 degrees of freedom; of one run
its own 95 % interval. Quantities made of several samples (an efficiency, a part of a waterfall) are computed on draws of
each sample. Runs themselves are not resampled: three runs have ten different resamples, and the interval that these give
holds the truth in three studies of four, not in nineteen of twenty.
"""

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t as student

from analysis.findings.model import Estimate

DRAWS = 1000
LEVEL = 0.95
NORMAL = 1.959964  # quantile of the normal distribution that belongs to LEVEL
# The standard error of a median over that of a mean, for normal values: 1 for two values, π/2 under the root for many.
MEDIAN = math.sqrt(math.pi / 2)

# The most that a logarithm may be off, and a draw in standard errors: two runs know almost nothing, and say so without overflow.
WIDEST = 100.0

Draws = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Sample:
    """A value from one or several runs. `error` is its standard error, None where nothing tells its scatter."""

    value: float
    error: float | None
    freedom: float = math.inf  # degrees of freedom of the error
    runs: int = 1
    name: str = ""  # seeds the draws, so that equal records give equal intervals

    @functools.cached_property
    def draws(self) -> Draws | None:
        """DRAWS values that it could have had; None where nothing tells the scatter."""
        if self.error is None:
            return None
        generator = np.random.default_rng(zlib.crc32(self.name.encode()))
        many = math.isinf(self.freedom)
        standard = generator.standard_normal(DRAWS) if many else generator.standard_t(self.freedom, DRAWS)
        drawn: Draws = self.value + self.error * np.clip(standard, -WIDEST, WIDEST)
        return drawn

    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval."""
        if self.error is None:
            return None
        half = self.error * quantile(self.freedom)
        return self.value - half, self.value + half


def sample(values: Sequence[float], low: float, high: float, name: str) -> Sample:
    """What runs tell of a value; `low` and `high` are the interval within the run where there is one run."""
    runs = len(values)
    value = float(np.median(values))
    if runs > 1:
        error = float(np.std(values, ddof=1)) / math.sqrt(runs) * (MEDIAN if runs > 2 else 1.0)
        return Sample(value, error, runs - 1, runs, name)
    known = math.isfinite(low) and math.isfinite(high) and low <= high
    return Sample(value, (high - low) / 2 / NORMAL if known else None, name=name)


def estimate(value: float, draws: Draws | None) -> Estimate:
    """A value with the interval that draws of it give, reversed: 2 · value − quantile.

    Draws of the slowest of several members lie below the slowest, as it itself lies below the truth (noise makes the
    smallest of equal ones smaller); the reversed interval corrects for that, the plain one would count it twice.
    """
    if draws is None:
        return Estimate(value)
    ends = [round((DRAWS - 1) * share) for share in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)]
    low, high = np.partition(draws, ends)[ends]
    return Estimate(value, float(2 * value - high), float(2 * value - low))


def exponential(value: Estimate) -> Estimate:
    """From a logarithm back to the number."""
    most = value.value + WIDEST
    ends = (None if end is None else math.exp(min(end, most)) for end in (value.low, value.high))
    return Estimate(math.exp(value.value), *ends)


@functools.lru_cache(maxsize=1024)
def quantile(freedom: float, level: float = LEVEL) -> float:
    """How many standard errors to each side a two-sided interval of a level has."""
    return float(student.ppf((1 + level) / 2, freedom))
