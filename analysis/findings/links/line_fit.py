"""A straight line through points: least squares, with the intervals of Student's t, and the points
that it does not explain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.statistics.tests import Floats
from analysis.study.draws import quantile
from analysis.study.estimates import Estimate
from analysis.study.intervals import LEVEL

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

    def expected(self, x: float, level: float = LEVEL) -> Estimate:
        """Return the line's value with the interval that holds a further point at x."""
        value = self.fixed + self.slope * x
        return self._estimate(value, math.sqrt(1 + self._leverage(x)), level)

    def fixed_estimate(self) -> Estimate:
        """Return the line's value at 0 with its interval."""
        return self._estimate(self.fixed, math.sqrt(self._leverage(0)), LEVEL)

    def slope_estimate(self) -> Estimate:
        """Return the slope with its interval."""
        return self._estimate(self.slope, 1 / math.sqrt(self.spread), LEVEL)

    def _estimate(self, value: float, errors: float, level: float) -> Estimate:
        half = quantile(self.count - 2, level) * self.deviation * errors
        return Estimate(value, value - half, value + half)

    def _leverage(self, x: float) -> float:
        return 1 / self.count + (x - self.middle) ** 2 / self.spread


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """Return the line of least squares through (x, y); None for fewer than three points, or where
    all x are equal.
    """
    count = len(points)
    if count < 3:
        return None
    middle, mean = (math.fsum(values) / count for values in zip(*points, strict=True))
    spread = math.fsum((x - middle) ** 2 for x, _ in points)
    if spread <= (_LEAST * middle) ** 2:
        return None
    slope = math.fsum((x - middle) * (y - mean) for x, y in points) / spread
    fixed = mean - slope * middle
    residuals = math.fsum((y - fixed - slope * x) ** 2 for x, y in points)
    total = math.fsum((y - mean) ** 2 for _, y in points)
    least = _LEAST * max(abs(y) for _, y in points)
    deviation = max(math.sqrt(residuals / (count - 2)), least)
    r_squared = 1 - residuals / total if total > least**2 else 0.0
    return Fit(fixed, slope, count, middle, spread, deviation, r_squared)


def outliers(points: Sequence[tuple[float, float]], level: float, fewest: int) -> list[int]:
    """Return the indices of points outside the interval that all others give them, farthest first.

    They are taken out one by one, each judged by what is left (Rosner's generalised test for
    several outliers, Technometrics 25, 1983), at most a quarter of the points and never below
    `fewest`. A point counts only if neither a line nor a parabola through the others explains it:
    cells that bend away from a line together are no outliers.
    """
    remaining = list(range(len(points)))
    outside = []
    while len(remaining) > max(fewest, len(points) - len(points) // 4):
        values = np.array([points[index] for index in remaining])
        misses = np.minimum(_misses(values, 1, level), _misses(values, 2, level))
        if misses.max() <= 1:
            break
        outside.append(remaining.pop(int(misses.argmax())))
    return outside


def _misses(points: Floats, degree: int, level: float) -> Floats:
    """Return how far each point lies from the polynomial through all others, as a multiple of half
    its interval.
    """
    x, y = points.T
    freedom = len(x) - degree - 2  # of the polynomial through the others
    if freedom < 1:
        return np.zeros(len(x))
    basis = _basis(x, degree)
    residuals = y - basis @ (basis.T @ y)
    independent = np.maximum(1 - (basis**2).sum(axis=1), _LEAST)  # 1 − leverage
    squares = np.maximum((residuals**2).sum() - residuals**2 / independent, 0.0) / freedom
    deviation = np.maximum(np.sqrt(squares), _LEAST * np.abs(y).max() + 1e-300)
    half = np.sqrt(independent) * deviation * quantile(freedom, level)
    misses: Floats = np.abs(residuals) / half
    return misses


def bends(points: Sequence[tuple[float, float]]) -> bool:
    """Return whether the points follow a parabola rather than a line: its further term differs from
    0.
    """
    x, y = np.array(points, dtype=float).T
    freedom = len(x) - 3
    if freedom < 1:
        return False
    basis = _basis(x, 2)
    terms = basis.T @ y
    squares = max(float(((y - basis @ terms) ** 2).sum()), 0.0)
    deviation = max(math.sqrt(squares / freedom), _LEAST * float(np.abs(y).max()))
    return bool(abs(terms[2]) > quantile(freedom, BENT) * deviation)


def _basis(x: Floats, degree: int) -> Floats:
    """Return orthonormal polynomials at x, the constant first, (len(x), degree + 1)."""
    scaled = (x - x.mean()) / (np.ptp(x) or 1.0)
    basis, _ = np.linalg.qr(np.vander(scaled, degree + 1, increasing=True))
    return basis
