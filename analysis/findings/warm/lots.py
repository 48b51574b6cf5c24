"""Cells that a study measured in new ranks and in warm ones: drawn at random, in another repeat, or as a second run."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from scipy.special import stdtrit

from analysis.findings.model import Estimate
from analysis.findings.next_run.interval import LEVEL
from analysis.findings.runs import Runs
from analysis.findings.study import Study
from analysis.findings.warm.pools import was_warm


@dataclass(frozen=True)
class BothWays:
    """How the rate of cells in warm ranks compares with that of the same cells in new ranks."""

    cells: int
    change: Estimate  # mean over the cells, as a share of the rate in new ranks; its interval needs two cells
    largest: float  # change of one cell


def both_ways(study: Study) -> BothWays | None:
    """Return the comparison over all cells that were measured both ways; None where none was."""
    changes = list(_changes(study))
    if not changes:
        return None
    mean, largest = statistics.fmean(changes), math.expm1(max(changes, key=abs))
    if len(changes) < 2:
        return BothWays(1, Estimate(math.expm1(mean)), largest)
    error = statistics.stdev(changes) / math.sqrt(len(changes))
    half = float(stdtrit(len(changes) - 1, (1 + LEVEL) / 2)) * error
    return BothWays(len(changes), Estimate(*map(math.expm1, (mean, mean - half, mean + half))), largest)


def _changes(study: Study) -> Iterator[float]:
    """Yield the difference of the logarithms' medians, warm minus cold, of every cell that has both."""
    for runs in study.rated:
        sides = _sides(runs)
        if all(sides):
            cold, warm = map(statistics.median, sides)
            yield warm - cold


def _sides(runs: Runs) -> tuple[list[float], list[float]]:
    """Return the logarithms of the rate in new ranks, and in warm ones."""
    cold: list[float] = []
    warm: list[float] = []
    for record, rate in zip(runs.rated_records, runs.log_rates, strict=True):
        (warm if was_warm(record) else cold).append(rate)
    return cold, warm
