"""A straight line through the cells of one mechanism: least squares, with the intervals of Student's t."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.findings.estimates import LEVEL, quantile
from analysis.findings.model import Estimate

_LEAST = 1e-6  # of the largest value: residuals below it are rounding


@dataclass(frozen=True)
class Fit:
    """y = fixed + slope · x, through `count` points."""

    fixed: float
    slope: float
    count: int
    middle: float  # mean of x
    spread: float  # sum of squares of x about it
    deviation: float  # of the residuals, with count − 2 degrees of freedom
    r_squared: float

    def at(self, x: float) -> float:
        """Return the line's value."""
        return self.fixed + self.slope * x

    def expected(self, x: float, level: float = LEVEL) -> Estimate:
        """Return the line's value with the interval that holds a further point at x."""
        half = quantile(self.count - 2, level) * self.deviation * math.sqrt(1 + self._leverage(x))
        return Estimate(self.at(x), self.at(x) - half, self.at(x) + half)

    def fixed_estimate(self) -> Estimate:
        """Return the line's value at 0 with its interval."""
        half = quantile(self.count - 2) * self.deviation * math.sqrt(self._leverage(0))
        return Estimate(self.fixed, self.fixed - half, self.fixed + half)

    def slope_estimate(self) -> Estimate:
        """Return the slope with its interval."""
        half = quantile(self.count - 2) * self.deviation / math.sqrt(self.spread)
        return Estimate(self.slope, self.slope - half, self.slope + half)

    def _leverage(self, x: float) -> float:
        return 1 / self.count + (x - self.middle) ** 2 / self.spread


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """Return the line of least squares through (x, y); None for fewer than three points, or where all x are equal."""
    count = len(points)
    if count < 3:
        return None
    middle, mean = (math.fsum(values) / count for values in zip(*points, strict=True))
    spread = math.fsum((x - middle) ** 2 for x, _ in points)
    if spread <= (_LEAST * middle) ** 2:
        return None
    slope = math.fsum((x - middle) * (y - mean) for x, y in points) / spread
    fixed = mean - slope * middle
    left = math.fsum((y - fixed - slope * x) ** 2 for x, y in points)
    total = math.fsum((y - mean) ** 2 for _, y in points)
    least = _LEAST * max(abs(y) for _, y in points)
    deviation = max(math.sqrt(left / (count - 2)), least)
    return Fit(fixed, slope, count, middle, spread, deviation, 1 - left / total if total > least**2 else 0.0)


def outliers(points: Sequence[tuple[float, float]], level: float, fewest: int) -> list[int]:
    """Return the places of points outside the interval that the line through all others gives them, farthest first.

    They are taken out one by one, each judged by the line through what is left (Rosner's generalised test for several
    outliers, Technometrics 25, 1983), at most a quarter of the points and never below `fewest`.
    """
    left, found = list(range(len(points))), []
    while len(left) > max(fewest, len(points) - len(points) // 4):
        misses = []
        for place in left:
            line = fit([points[other] for other in left if other != place])
            if line is None:
                continue
            x, y = points[place]
            expected = line.expected(x, level)
            assert expected.high is not None
            misses.append((abs(y - expected.value) / (expected.high - expected.value), place))
        if not misses or max(misses)[0] <= 1:
            break
        found.append(max(misses)[1])
        left.remove(found[-1])
    return found
