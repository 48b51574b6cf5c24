"""Estimates with 95 % intervals from few runs: the parametric bootstrap that every finding shares.

A rate is compared on a logarithmic scale, where the scatter is a share of the rate. A Sample holds the median of several
runs, with a standard error from the scatter *between* runs and Student's t with runs − 1 degrees of freedom; one run has
its own 95 % interval. A quantity made of several samples (an efficiency, a part of a waterfall) is computed on draws of
each sample. Runs are not resampled: three runs have ten different resamples, and the interval from these holds the truth
in three studies of four, not in nineteen of twenty.
"""

import functools
import math
import zlib
from collections.abc import Iterable, Sequence
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

# The most that a logarithm may be off, and a draw in standard errors. Two runs know little of their scatter: no overflow then.
WIDEST = 100.0

Draws = np.ndarray[Any, np.dtype[np.float64]]  # (DRAWS,), in the unit of the sample: of a rate its logarithm


@dataclass(frozen=True)
class Sample:
    """A value from one or several runs."""

    value: float
    error: float | None  # standard error; None where the scatter is not known
    freedom: float = math.inf  # degrees of freedom of the error
    runs: int = 1
    name: str = ""  # seeds the draws, so that equal records give equal intervals

    @functools.cached_property
    def draws(self) -> Draws | None:
        """Values that it could have had; None where the scatter is not known."""
        if self.error is None:
            return None
        generator = np.random.default_rng(zlib.crc32(self.name.encode()))
        many = math.isinf(self.freedom)
        standard = generator.standard_normal(DRAWS) if many else generator.standard_t(self.freedom, DRAWS)
        drawn: Draws = self.value + self.error * np.clip(standard, -WIDEST, WIDEST)
        return drawn

    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval; None where the scatter is not known."""
        if self.error is None:
            return None
        half = self.error * quantile(self.freedom)
        return self.value - half, self.value + half


def sample(values: Sequence[float], low: float, high: float, name: str) -> Sample:
    """Return the sample of several runs; of a single run, with `low` and `high`, the 95 % interval within the run."""
    runs = len(values)
    value = float(np.median(values))
    if runs > 1:
        error = float(np.std(values, ddof=1)) / math.sqrt(runs) * (MEDIAN if runs > 2 else 1.0)
        return Sample(value, error, runs - 1, runs, name)
    known = math.isfinite(low) and math.isfinite(high) and low <= high
    return Sample(value, (high - low) / 2 / NORMAL if known else None, name=name)


def estimate(value: float, draws: Draws | None) -> Estimate:
    """Return a value with the interval that its draws give, reversed: 2 · value − quantile.

    The minimum of noisy values is biased low. Reversing the interval removes that bias, a plain interval doubles it.
    """
    if draws is None:
        return Estimate(value)
    ends = [round((DRAWS - 1) * share) for share in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)]
    low, high = np.partition(draws, ends)[ends]
    return Estimate(value, float(2 * value - high), float(2 * value - low))


def slowest(members: Iterable[Sample]) -> tuple[float, Draws | None]:
    """Return the logarithm of the slowest of several rates, and draws of it; None where one member's scatter is not known."""
    listed = list(members)
    value = min(member.value for member in listed)
    drawn = [member.draws for member in listed if member.draws is not None]
    return value, np.min(drawn, axis=0) if len(drawn) == len(listed) else None


def scaled(value: Estimate, factor: float) -> Estimate:
    """Return an estimate times a positive number."""
    ends = (None if end is None else end * factor for end in (value.low, value.high))
    return Estimate(value.value * factor, *ends)


def exponential(value: Estimate) -> Estimate:
    """Return the estimate of a number from that of its logarithm."""
    most = value.value + WIDEST
    ends = (None if end is None else math.exp(min(end, most)) for end in (value.low, value.high))
    return Estimate(math.exp(value.value), *ends)


@functools.lru_cache(maxsize=1024)
def quantile(freedom: float, level: float = LEVEL) -> float:
    """Return the number of standard errors on each side of a two-sided interval, by Student's t."""
    return float(student.ppf((1 + level) / 2, freedom))
