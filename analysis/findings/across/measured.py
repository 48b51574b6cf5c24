"""The numbers of one cell of one side, each with its standard error: what differences between studies are made of.

The error is that of the median of the cell's runs, by the noise floor of its own study. Without a floor there is none, and
nothing can be said of a difference. It holds what differs between runs of one study, and nothing of what changes between studies.
"""

import math
import statistics
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr

from analysis.findings.baselines import EFFICIENCY, Baselines, efficiency
from analysis.findings.communication.exposed import COST, EXCHANGE, EXPOSED, Exposures
from analysis.findings.estimates import MEASURED, quantile
from analysis.findings.model import Estimate
from analysis.findings.next_run.interval import WIDEST, of_median
from analysis.findings.runs import Runs
from analysis.findings.scaling import log_speedup
from analysis.findings.study import Study
from benchmarks.record.metrics import metric as entry_of
from benchmarks.record.metrics import place


@dataclass(frozen=True)
class MeasuredNumber:
    """A number with its standard error; of rates and times both are those of the logarithm."""

    value: float
    runs: int
    error: float | None = None  # None: the scatter between runs is not known
    freedom: float = math.inf  # degrees of freedom of the error
    logarithm: bool = True

    @property
    def plain(self) -> float:
        """The number itself."""
        return math.exp(self.value) if self.logarithm else self.value

    @property
    def variance(self) -> float:
        """The square of the error; NaN where it is not known."""
        return math.nan if self.error is None else self.error**2


@dataclass(frozen=True)
class NumberDifference:
    """The difference of two measured numbers, second − first, on their own scale."""

    value: float
    error: float | None
    freedom: float
    logarithm: bool

    @staticmethod
    def between(first: MeasuredNumber, second: MeasuredNumber) -> "NumberDifference":
        """Return the difference; its degrees of freedom are Welch's."""
        variance = first.variance + second.variance
        value = second.value - first.value
        if math.isnan(variance):
            return NumberDifference(value, None, math.inf, first.logarithm)
        parts = sum(one.variance**2 / one.freedom for one in (first, second))
        return NumberDifference(value, math.sqrt(variance), variance**2 / parts if parts else math.inf, first.logarithm)

    @property
    def chance(self) -> float:
        """The two-sided p: the chance of so large a difference between equal cells. NaN without an error."""
        if self.error is None:
            return math.nan
        return float(2 * stdtr(self.freedom, -abs(self.value) / self.error)) if self.error else float(not self.value)

    def estimate(self) -> Estimate:
        """Return the difference with its 95 % interval: of a rate or time as a share of the first, else in its own unit."""
        if self.error is None:
            return Estimate(self._plain(self.value))
        half = min(quantile(self.freedom) * self.error, WIDEST)
        return Estimate(*(self._plain(self.value + end) for end in (0.0, -half, half)))

    def _plain(self, value: float) -> float:
        return math.expm1(max(-WIDEST, min(value, WIDEST))) if self.logarithm else value


class MeasuredCells:
    """Finds the numbers of the cells of one side."""

    def __init__(self, study: Study) -> None:
        """`study` is of one machine."""
        self._baselines = Baselines(study)
        self._exposures = Exposures(study, self._baselines)

    def of(self, runs: Runs) -> dict[str, MeasuredNumber]:
        """Return {metric: number} of runs of one cell: its main rate, its exchange, its efficiency, what is exposed."""
        metrics = dict.fromkeys(one for one in (main_metric(runs), EXCHANGE) if one is not None)
        found = {name: measured(runs, name) for name in metrics if runs.logarithms(name)}
        if share := self._efficiency(runs):
            found[EFFICIENCY] = share
        if exposed := self._exposed(runs):
            found[EXPOSED] = exposed
        return found

    def _efficiency(self, runs: Runs) -> MeasuredNumber | None:
        speedup = log_speedup(runs, self._baselines)
        if speedup is None:
            return None
        share, draws = efficiency(speedup.rate.value, speedup.slowest, runs.cell, speedup.alone), speedup.draws
        error = None if draws is None else float(np.std(draws[MEASURED])) * share
        return MeasuredNumber(share, speedup.rate.runs, error, speedup.freedom, logarithm=False)

    def _exposed(self, runs: Runs) -> MeasuredNumber | None:
        claimed = [self._exposures.of(record) for record in runs.records]
        values = [one.exposed_ms for one in claimed if one is not None and one.exposed_ms is not None]
        if not values:
            return None
        known, floor = self._exposures.of_runs(runs), runs.floor(COST)
        error = None if known is None or floor is None else known.half_ms / quantile(floor.freedom)
        freedom = floor.freedom if floor is not None else math.inf
        error = None if error is None or math.isnan(error) else error
        return MeasuredNumber(statistics.median(values), len(values), error, freedom, logarithm=False)


def measured(runs: Runs, metric: str) -> MeasuredNumber:
    """Return the median of a rate or time over runs."""
    values, floor = runs.logarithms(metric), runs.floor(metric)
    if floor is None:
        return MeasuredNumber(statistics.median(values), len(values))
    error = floor.deviation * math.sqrt(of_median(len(values)))
    return MeasuredNumber(statistics.median(values), len(values), error, floor.freedom)


def main_metric(runs: Runs) -> str | None:
    """Return the metric in which a cell is compared: its benchmark's rate, else the first that the table of metrics marks."""
    if runs.log_rates:
        return runs.rate.metric
    names = dict.fromkeys(name for record in runs.records for name in record.metrics)
    marked = [name for name in names if entry_of(name).first and not entry_of(name).signed and runs.logarithms(name)]
    return min(marked, key=place, default=None)
