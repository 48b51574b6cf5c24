"""Numbers that are made of several cells, with their intervals: the draws that findings share.

A rate is judged on a logarithmic scale, where the scatter is a share of the rate. A Sample holds
the median of the runs of one cell and the noise floor of its group (analysis.study.noise_floor);
without a floor it has no draws. A quantity made of several samples (an efficiency, a part of a
waterfall) is computed on draws of each sample, twice: as one more run of every cell would give it,
and as the runs at hand may have given it. What lies between the two is the interval of the next
run, as wide as Student's t has it with the degrees of freedom of all floors together (Satterthwaite
1946). Runs are not resampled: three runs have ten different resamples.
"""

import functools
import math
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.study.intervals import LEVEL, WIDEST, Estimate, of_median, quantile
from analysis.study.noise_floor import Floor

DRAWS = 1000
Draws = np.ndarray[Any, np.dtype[np.float64]]  # in the unit of the sample: of a rate its logarithm
NEXT, MEASURED = 0, 1  # rows of a sample's draws: one more run, and the median of the runs at hand
UNKNOWN: Draws = np.full((2, DRAWS), np.nan)  # where the scatter is not known; sums stay so


@dataclass(frozen=True)
class Sample:
    """The median over the runs of one cell."""

    value: float
    floor: Floor | None = None  # of single runs; None: not known
    runs: int = 1
    name: str = ""  # seeds the draws, so that equal records give equal intervals

    @functools.cached_property
    def draws(self) -> Draws:
        """Values that it could have, (2, DRAWS): rows NEXT and MEASURED, or UNKNOWN."""
        if self.floor is None:
            return UNKNOWN
        return draws_of_median(self.value, self.floor.deviation, self.runs, self.name, WIDEST)


@dataclass(frozen=True)
class Step:
    """A step time, or a part of one, in ms."""

    ms: float
    draws: Draws  # ms

    def __add__(self, other: "Step") -> "Step":
        return Step(self.ms + other.ms, self.draws + other.draws)

    def __sub__(self, other: "Step") -> "Step":
        return Step(self.ms - other.ms, self.draws - other.draws)

    def or_exact(self) -> "Step":
        """Return the step as if it were known exactly, where its scatter is not known."""
        return Step(self.ms, np.where(np.isnan(self.draws), self.ms, self.draws))


def mean_step(steps: Sequence[Step]) -> Step | None:
    """Return the mean of steps; None where there is none."""
    if not steps:
        return None
    mean_ms = sum(step.ms for step in steps) / len(steps)
    return Step(mean_ms, np.mean([step.draws for step in steps], axis=0))


def slowest(members: Collection[Sample]) -> tuple[float, Draws]:
    """Return the logarithm of the slowest of several rates, and draws of it."""
    draws: Draws = np.min([sample.draws for sample in members], axis=0)
    return min(sample.value for sample in members), draws


def draws_of_median(
    value: float, deviation: float, runs: int, name: str, widest: float = math.inf
) -> Draws:
    """Return draws of one more run and of the median of runs, (2, DRAWS); `name` seeds them."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    normal = generator.standard_normal((2, DRAWS))
    errors = np.array([[1.0], [math.sqrt(of_median(runs))]]) * deviation
    draws: Draws = value + np.clip(normal * errors, -widest, widest)
    return draws


def freedom(samples: Iterable[Sample]) -> float:
    """Return the degrees of freedom of a sum of samples; infinite where no floor is known."""
    variances: dict[Floor, float] = defaultdict(float)
    for sample in samples:
        if sample.floor is not None:
            variances[sample.floor] += sample.floor.deviation**2 * (1 + of_median(sample.runs))
    uncertainty = sum(variance**2 / floor.freedom for floor, variance in variances.items())
    if not uncertainty:
        return math.inf
    return sum(variances.values()) ** 2 / uncertainty


def next_run(value: float, draws: Draws, freedom: float) -> Estimate:
    """Return a value with the interval of the next run that its draws, (2, DRAWS), give."""
    if np.isnan(draws).any():
        return Estimate(value)
    wider = quantile(freedom) / quantile(math.inf)
    low, high = _ends(draws[NEXT] - draws[MEASURED])
    return Estimate(value, value + wider * low, value + wider * high)


def estimate(value: float, draws: Draws) -> Estimate:
    """Return an effect with its confidence interval, from draws of it (DRAWS,), reversed: 2 · value
    − quantile.

    It says where the true value lies, not where the next run falls: for what is asked of many runs
    together. The minimum of noisy values is biased low. Reversing the interval removes that bias, a
    plain interval doubles it.
    """
    if np.isnan(draws).any():
        return Estimate(value)
    low, high = _ends(draws)
    return Estimate(value, 2 * value - high, 2 * value - low)


def _ends(draws: Draws) -> tuple[float, float]:
    """Return the ends of the interval that holds LEVEL of the draws, (DRAWS,)."""
    ends = [round((DRAWS - 1) * (1 - LEVEL) / 2), round((DRAWS - 1) * (1 + LEVEL) / 2)]
    low, high = np.partition(draws, ends)[ends]
    return float(low), float(high)


def scaled(value: Estimate, factor: float) -> Estimate:
    """Return an estimate times a number; a negative one exchanges the ends of its interval."""
    if value.low is None or value.high is None:
        return Estimate(value.value * factor)
    return Estimate(value.value * factor, *sorted((value.low * factor, value.high * factor)))


def exponential(value: Estimate) -> Estimate:
    """Return the estimate of a number from that of its logarithm."""
    most = value.value + WIDEST
    if value.low is None or value.high is None:
        return Estimate(math.exp(value.value))
    low, high = math.exp(min(value.low, most)), math.exp(min(value.high, most))
    return Estimate(math.exp(value.value), low, high)
