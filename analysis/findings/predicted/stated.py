"""The forecast that a record holds of itself, beside what was measured then.

`Record.predicted` is written before the ranks start (launch.study.forecasts). The launching process imports this module, so it
needs neither numpy nor scipy.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from benchmarks.record import FINDINGS, Record, finite
from benchmarks.record.metrics import interval

UNEXPLAINED = "unexplained"  # the code of a step outside its interval
# Codes of a record that say nothing against its step: a forecast of it may be scored. Without UNEXPLAINED among them, cells
# outside their intervals would leave the scores, and the next intervals would be too narrow.
FAIR = (UNEXPLAINED, *FINDINGS)
STEP, ERROR = "step/ms_median", "prediction/error"
_METRICS = {
    "predicted/step_ms": "step_ms",
    "predicted/step_ms_low": "low",
    "predicted/step_ms_high": "high",
    "predicted/images_per_second": "images_per_second",
    "predicted/efficiency": "efficiency",
    "predicted/exposed_ms": "exposed_ms",
    "predicted/null_step_ms": "null_step_ms",
}
_AS_FAST = 0.0005  # a smaller difference would be rounded to 0.0 %
_SHORTEST_MS, _LONGEST_MS = 1e-6, 1e12  # steps that a record may state


class BesideForecast:
    """A step in ms beside its forecast."""

    step_ms: float  # the forecast
    low: float | None  # of its interval; None: no error was claimed
    high: float | None
    null_step_ms: float  # by the null model
    measured_ms: float

    @property
    def error(self) -> float:
        """The measured step against the forecast, as a share; more than 0: slower."""
        return self.measured_ms / self.step_ms - 1

    @property
    def null_error(self) -> float:
        """The measured step against the null model, as a share."""
        return self.measured_ms / self.null_step_ms - 1

    @property
    def inside(self) -> bool | None:
        """Whether the measured step lies in the interval; None without one."""
        return (
            None
            if self.low is None or self.high is None
            else self.low <= self.measured_ms <= self.high
        )


@dataclass(frozen=True)
class StatedForecast(BesideForecast):
    """What a record says that its step would take, and what it took. Times are ms."""

    step_ms: float
    null_step_ms: float
    measured_ms: float
    low: float | None  # of the interval; None: no error was claimed
    high: float | None
    level: float  # of the interval
    in_time: bool  # written before the attempt began
    least_ms: float  # the ends of the interval of the measured step inside its run; without one, the measured step
    most_ms: float

    @property
    def unexplained(self) -> bool:
        """Whether the measured step lies outside, and its own interval too: a run that scatters much contradicts nothing."""
        return (
            self.low is not None
            and self.high is not None
            and (self.least_ms > self.high or self.most_ms < self.low)
        )

    @property
    def compared(self) -> str:
        """What was measured against the forecast: `step 4.1 % longer`, `step as long`. A rate counts the long steps too."""
        if abs(self.error) < _AS_FAST:
            return "step as long"
        return f"step {100 * abs(self.error):.1f} % {'longer' if self.error > 0 else 'shorter'}"

    def _apart(self, decimals: int) -> str:
        word = "slower" if self.error > 0 else "faster"
        return f"{100 * abs(self.error):.{decimals}f} % {word}"

    @property
    def missed(self) -> str:
        """Why the step is not explained, as a sentence's part, with how often that happens without a fault."""
        outside = round(1 / (1 - self.level))
        return (
            f"measured {self._apart(1 if abs(self.error) >= _AS_FAST else 3)} than forecast: "
            f"{self.measured_ms:.4g} ms instead of {self.step_ms:.4g} ms "
            f"({self.low:.4g} to {self.high:.4g}; without a fault at most 1 cell in {outside} lies outside)"
        )


def stated_forecast(record: Record) -> StatedForecast | None:
    """Return the forecast of a finished record; None where none was possible or asked for, or no step was measured.

    What a damaged record states, such as a step of 0 ms or an interval whose ends changed places, is none either.
    """
    said = record.predicted
    times = said.get("step_ms"), said.get("null_step_ms"), record.metrics.get(STEP)
    step, null, measured = map(finite, times)
    if record.state != "finished" or step is None or null is None or measured is None:
        return None
    if not _SHORTEST_MS <= min(step, null, measured) <= max(step, null, measured) <= _LONGEST_MS:
        return None
    made_at, level = finite(said.get("made_at")), finite(said.get("level")) or 0.0
    low, high = finite(said.get("low")), finite(said.get("high"))
    if not 0 < level < 1 or low is None or high is None or low > high:
        low = high = None
    in_time = made_at is not None and made_at <= record.started_at
    of_run = [
        measured,
        *(one for one in interval(STEP, record.within_run) or () if math.isfinite(one)),
    ]
    return StatedForecast(step, null, measured, low, high, level, in_time, min(of_run), max(of_run))


def with_forecast(record: Record) -> Record:
    """Return the record with the metrics of its forecast: the table METRICS has them under `predicted/`."""
    if not record.predicted or record.state != "finished":
        return record
    found = {name: finite(record.predicted.get(field)) for name, field in _METRICS.items()}
    known = {name: value for name, value in found.items() if value is not None}
    if (said := stated_forecast(record)) is not None:
        known[ERROR] = said.error
    return dataclasses.replace(record, metrics=record.metrics | known)


def about_forecasts(records: Iterable[Record]) -> str:
    """Return how good the forecasts of a sweep were, in one line; empty where no cell has one."""
    told = [one for one in records if one.predicted and one.state == "finished" and not one.drift]
    made = [found for one in told if (found := stated_forecast(one)) is not None and found.in_time]
    if not made:
        return ""
    errors = fmean(abs(one.error) for one in made), fmean(abs(one.null_error) for one in made)
    said = f"{len(made)} of {len(told)} cells before they ran: mean error of the step {100 * errors[0]:.1f} %, "
    said += f"of the null model {100 * errors[1]:.1f} %"
    judged = [one for one in made if one.inside is not None]
    outside = sum(not one.inside for one in judged)
    beyond = (
        f"; {outside} of {len(judged)} outside {100 * judged[0].level:.0f} % intervals"
        if judged
        else ""
    )
    return said + beyond


def doubted(records: Iterable[Record]) -> bool:
    """Tell whether a check casts doubt on one of some records, but for what FAIR names."""
    return any(
        one.validity.verdict == "suspect" and one.validity.codes.keys() - {*FAIR} for one in records
    )
