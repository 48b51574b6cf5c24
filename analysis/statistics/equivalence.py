"""Equivalence of two things by their paired differences: two one-sided tests (Schuirmann 1987).

A difference that is not seen is no proof that there is none: few runs see nothing. So what is tested is the opposite claim, that
the mean difference is as large as a margin. If that is refused on both sides, the two are equivalent within the margin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.05  # of each of the two tests; the interval that belongs to them is of 1 − 2 × LEVEL
EQUIVALENT, DIFFERENT, NOT_ENOUGH = "equivalent", "different", "not enough to say"
MOST_PAIRS = 10_000


@dataclass(frozen=True)
class Equivalence:
    """What the differences say; all numbers are in their unit."""

    verdict: str  # EQUIVALENT, DIFFERENT (by more than the margin) or NOT_ENOUGH
    margin: float
    pairs: int
    mean: float
    low: float  # ends of the 90 % interval of the mean; NaN with fewer than two pairs
    high: float
    chance: float  # p of the two tests: the chance of such differences between two that differ by the margin
    needed: int | None  # pairs with which such differences would be enough to say; None where so many are not known


def equivalence(differences: Sequence[float], margin: float) -> Equivalence:
    """Return whether the mean of independent differences is within ± `margin`, beyond it, or neither is known."""
    values = np.asarray(differences, dtype=float)
    if len(values) < 2:
        mean = float(values[0]) if len(values) else math.nan
        return Equivalence(NOT_ENOUGH, margin, len(values), mean, math.nan, math.nan, 1.0, None)
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, 1 - LEVEL)) * error
    low, high = mean - half, mean + half
    verdict = EQUIVALENT if -margin < low and high < margin else NOT_ENOUGH
    if low > margin or high < -margin:
        verdict = DIFFERENT
    needed = None if verdict != NOT_ENOUGH else _needed(abs(abs(mean) - margin), error * math.sqrt(len(values)))
    return Equivalence(verdict, margin, len(values), mean, low, high, _chance(values, margin, error), needed)


def _chance(values: "np.ndarray[tuple[int], np.dtype[np.float64]]", margin: float, error: float) -> float:
    if not error > 1e-12 * margin:  # equal to the last digits: the tests have no scatter to divide by
        return 0.0 if abs(float(values.mean())) < margin else 1.0
    from scipy.stats import ttest_1samp  # takes longer to import than all else of a small report

    below = ttest_1samp(values, -margin, alternative="greater").pvalue
    above = ttest_1samp(values, margin, alternative="less").pvalue
    return float(max(below, above))


def _needed(room: float, deviation: float) -> int | None:
    """Return with how many pairs half the interval is smaller than the room that the mean leaves to the margin."""
    low, high = 2, MOST_PAIRS
    if not deviation * stdtrit(high - 1, 1 - LEVEL) / math.sqrt(high) < room:
        return None
    while low < high:
        middle = (low + high) // 2
        enough = deviation * stdtrit(middle - 1, 1 - LEVEL) / math.sqrt(middle) < room
        low, high = (low, middle) if enough else (middle + 1, high)
    return low
