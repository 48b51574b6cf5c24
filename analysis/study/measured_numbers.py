"""Numbers of cells with the error of their medians, and which differences between them are seen.

The error comes from the noise floor that belongs to the cell's own group. Where it is lent, or the
cell ran once, the number has no error and there is no verdict.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtr, stdtrit

from analysis.study.draws import Sample
from analysis.study.intervals import LEVEL, WIDEST, Estimate, of_median, quantile
from analysis.study.noise_floor import Floor
from analysis.study.runs import Runs

FEWEST_RUNS = 2  # of fewer nobody knows how far those of this cell scatter
FASTER, SLOWER, NO_DIFFERENCE, UNKNOWN = "faster", "slower", "no difference seen", "cannot tell"
CHANCE = "its interval excludes 0, but among this many configurations that can be chance"
POWER = 0.8  # a difference as large as smallest_change is seen in four studies of five


@dataclass(frozen=True)
class MeasuredNumber:
    """A number, or a difference, with its standard error; of rates and times of the logarithm."""

    value: float
    runs: int
    error: float | None = None  # None: the scatter between runs is not known
    freedom: float = math.inf  # degrees of freedom of the error
    logarithm: bool = True
    floor: Floor | None = None  # that the error rests on

    @property
    def plain(self) -> float:
        """The number itself."""
        return math.exp(self.value) if self.logarithm else self.value

    def minus(self, first: "MeasuredNumber") -> "MeasuredNumber":
        """Return the difference from the first; its degrees of freedom are Welch's, those of one
        floor where both rest on it.
        """
        value, runs = self.value - first.value, min(self.runs, first.runs)
        if self.error is None or first.error is None:
            return MeasuredNumber(value, runs, logarithm=self.logarithm)
        variances, freedom = (first.error**2, self.error**2), math.inf
        parts = variances[0] ** 2 / first.freedom + variances[1] ** 2 / self.freedom
        if self.floor is not None and self.floor == first.floor:
            freedom = self.freedom
        elif parts:
            freedom = sum(variances) ** 2 / parts
        return MeasuredNumber(value, runs, math.sqrt(sum(variances)), freedom, self.logarithm)

    @property
    def chance(self) -> float:
        """The two-sided p of a difference: the chance of so large a one between equal cells."""
        if self.error is None:
            return math.nan
        if not self.error:
            return float(not self.value)
        return float(2 * stdtr(self.freedom, -abs(self.value) / self.error))

    def smallest_change(self, tests: int) -> float:
        """Return the smallest change, as a share, that runs could have shown in so many tests."""
        level = (1 - LEVEL) / max(1, tests)
        errors = stdtrit(self.freedom, 1 - level / 2) + stdtrit(self.freedom, POWER)
        return math.expm1(min(float(errors) * (self.error or 0.0), WIDEST))

    def estimate(self) -> Estimate:
        """Return a difference with its 95 % interval: of a rate or time as a share of the first."""
        ends = [0.0]
        if self.error is not None:
            half = min(quantile(self.freedom) * self.error, WIDEST)
            ends += [-half, half]
        values = []
        for end in ends:
            value = self.value + end
            if self.logarithm:
                value = math.expm1(max(-WIDEST, min(value, WIDEST)))
            values.append(value)
        return Estimate(*values)


def measured(runs: Runs, metric: str) -> MeasuredNumber | None:
    """Return the median of a metric's logarithm over the runs of a cell; None without values."""
    values = runs.logarithms(metric)
    if not values:
        return None
    value, floor = statistics.median(values), runs.floor(metric)
    if floor is None or not is_known(Sample(value, floor, len(values))):
        return MeasuredNumber(value, len(values))
    error = floor.deviation * math.sqrt(of_median(len(values)))
    return MeasuredNumber(value, len(values), error, floor.freedom, floor=floor)


def is_known(sample: Sample) -> bool:
    """Return whether the runs of a cell show how far they differ: they, and no others."""
    return sample.runs >= FEWEST_RUNS and sample.floor is not None and not sample.floor.lenders


def judge(difference: Estimate, is_seen: bool) -> tuple[str, str]:
    """Return the verdict on the second of two cells by what its rate differs, and a doubt of it."""
    assert difference.low is not None and difference.high is not None
    if is_seen and difference.value > 0:
        return FASTER, ""
    if is_seen:
        return SLOWER, ""
    if difference.low <= 0 <= difference.high:
        return NO_DIFFERENCE, ""
    return NO_DIFFERENCE, CHANCE


def significant(chances: Any, level: float) -> Any:
    """Return which of m tests show a difference, so that a wrong one has at most this chance.

    By Holm's method (1979): the smallest of `chances` (p of each test) must be below level ÷ m, the
    next below level ÷ (m − 1), until one is not.
    """
    seen = np.zeros(len(chances), dtype=bool)
    for rank, index in enumerate(np.argsort(chances, kind="stable")):
        if chances[index] > level / (len(chances) - rank):
            break
        seen[index] = True
    return seen
