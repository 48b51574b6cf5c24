"""The interval of the next run: where one more run of the same cell falls, 95 times in 100.

METHOD.md, "The noise floor". Of three and more runs the median is less certain than the mean, so
1/n becomes the larger VARIANCES. A rate or a time is judged on its logarithm, a difference that may
be 0 or less as it is. What is made of several cells is drawn in analysis.study.draws.
"""

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from analysis.study.conditions import IMAGES_PER_SECOND
from analysis.study.noise_floor import Floor
from benchmarks.record.metrics import entry_of

LEVEL = 0.95
# Of the median of 1, 2, … 10 normal values, as a share of that of one value; of n more it is nearly
# π/2n (David, Nagaraja 2003).
VARIANCES = (1.0, 0.5, 0.4487, 0.2982, 0.2868, 0.2147, 0.2104, 0.1682, 0.1661, 0.1383)
# The most that a logarithm may be off: no overflow where little is known of the scatter.
WIDEST = 100.0
WORDS = "for the next run"  # what every ± and every interval of a number is
NOT_KNOWN = "too few runs of equal cells are known (repeats, or a sweep of five cells and more)"


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval. `low` and `high` are None where the scatter is not known."""

    value: float
    low: float | None = None
    high: float | None = None


def of_median(runs: int) -> float:
    """Return the variance of the median of normal values as a share of that of one value."""
    if runs > len(VARIANCES):
        return math.pi / 2 / runs
    return VARIANCES[runs - 1]


@functools.lru_cache(maxsize=1024)
def quantile(freedom: float, level: float = LEVEL) -> float:
    """Return the standard errors on each side of a two-sided interval, by Student's t."""
    # A third of a second, which the launching process spends while a cell runs.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + level) / 2))


def half_width(floor: Floor, runs: int) -> float:
    """Return half the interval of the next run around the median of `runs` runs."""
    return min(quantile(floor.freedom) * floor.deviation * math.sqrt(1 + of_median(runs)), WIDEST)


def median(values: Sequence[float], metric: str) -> float:
    """Return the median of a metric over runs, the only one of figures, tables and sentences.

    That of a rate is of its logarithm, as intervals and comparisons have it: of two runs it is
    their geometric mean.
    """
    low, high = statistics.median_low(values), statistics.median_high(values)
    if metric == IMAGES_PER_SECOND and low > 0:
        return low * math.sqrt(high / low)
    return statistics.median(values)


def interval(values: Sequence[float], metric: str, floor: Floor | None) -> Estimate:
    """Return the median of a metric over the runs of a cell, with the interval of the next run."""
    value, signed = median(values, metric), entry_of(metric).signed
    if floor is None or (min(values) <= 0 and not signed):
        return Estimate(value)
    half = half_width(floor, len(values))
    if signed:
        return Estimate(value, value - half, value + half)
    return Estimate(value, value * math.exp(-half), value * math.exp(half))


def names_of(metric: str) -> tuple[str, str, str]:
    """Return MLflow's names of the ends of a metric's interval, and of the runs it rests on."""
    prefix = f"{metric}_ci_"
    if metric == IMAGES_PER_SECOND:
        prefix = "throughput/ci_"
    return f"{prefix}low", f"{prefix}high", f"{prefix}runs"


def ends_of(metric: str, values: Mapping[str, float]) -> tuple[float, float] | None:
    """Return the ends of a metric's interval as `values` have them; None without both."""
    low, high, _ = names_of(metric)
    if low not in values or high not in values:
        return None
    return values[low], values[high]


def rests_on(numbers: Iterable[float], lent_by: str = "") -> str:
    """Return `from 6 to 12 repeated runs; …`; empty without any.

    `lent_by` names the cells whose runs others rest on; empty where none does.
    """
    runs, text = sorted(numbers), ""
    if runs:
        ends = dict.fromkeys((f"{runs[0]:,.0f}", f"{runs[-1]:,.0f}"))
        text = f"each from {' to '.join(ends)} repeated runs"
    if lent_by:
        start = f"{text}; a configuration with one run borrows" if text else "from"
        text = f"{start} the variation of {lent_by}"
    return text
