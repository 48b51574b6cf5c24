"""A straight line through the cells of one mechanism: least squares, with the intervals of Student's t."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.findings.estimates import quantile
from analysis.findings.model import Estimate
from analysis.findings.next_run.interval import LEVEL

Values = np.ndarray[Any, np.dtype[np.float64]]
_LEAST = 1e-6  # of the largest value: residuals below it are rounding
BENT = 0.99  # level at which a parabola's further term differs from 0


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
    """Return the places of points outside the interval that all others give them, farthest first.

    They are taken out one by one, each judged by what is left (Rosner's generalised test for several outliers, Technometrics
    25, 1983), at most a quarter of the points and never below `fewest`. A point counts only if neither a line nor a parabola
    through the others explains it: cells that bend away from a line together are no outliers.
    """
    left, found = list(range(len(points))), []
    while len(left) > max(fewest, len(points) - len(points) // 4):
        values = np.array([points[place] for place in left])
        misses = np.minimum(_misses(values, 1, level), _misses(values, 2, level))
        if misses.max() <= 1:
            break
        found.append(left.pop(int(misses.argmax())))
    return found


def _misses(points: Values, degree: int, level: float) -> Values:
    """Return how far each point lies from the polynomial through all others, as a multiple of half its interval."""
    x, y = points.T
    freedom = len(x) - degree - 2  # of the polynomial through the others
    if freedom < 1:
        return np.zeros(len(x))
    basis = _basis(x, degree)
    left = y - basis @ (basis.T @ y)
    kept = np.maximum(1 - (basis**2).sum(axis=1), _LEAST)  # 1 − leverage
    squares = np.maximum((left**2).sum() - left**2 / kept, 0.0) / freedom
    deviation = np.maximum(np.sqrt(squares), _LEAST * np.abs(y).max() + 1e-300)
    misses: Values = np.abs(left) / (np.sqrt(kept) * deviation * quantile(freedom, level))
    return misses


def bends(points: Sequence[tuple[float, float]]) -> bool:
    """Tell whether the points follow a parabola rather than a line: its further term differs from 0."""
    x, y = np.array(points, dtype=float).T
    freedom = len(x) - 3
    if freedom < 1:
        return False
    basis = _basis(x, 2)
    parts = basis.T @ y
    deviation = math.sqrt(max(float(((y - basis @ parts) ** 2).sum()), 0.0) / freedom)
    return bool(abs(parts[2]) > quantile(freedom, BENT) * max(deviation, _LEAST * float(np.abs(y).max())))


def _basis(x: Values, degree: int) -> Values:
    """Return orthonormal polynomials at x, the constant first, (len(x), degree + 1)."""
    basis, _ = np.linalg.qr(np.vander((x - x.mean()) / (np.ptp(x) or 1.0), degree + 1, increasing=True))
    return basis
