"""The forecast that a record holds of itself (predict=auto), beside what was measured then.

`Record.predicted` is written before the ranks start (launch.study.background). The launcher
imports this module, so it needs neither numpy nor scipy.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from benchmarks.record import FINDINGS, Record, finite

UNEXPLAINED = "unexplained"  # the code of a step outside its interval
# Codes that say nothing against a step. UNEXPLAINED is one: without cells outside their intervals
# the next intervals would be too narrow.
FAIR = {UNEXPLAINED, *FINDINGS}
STEP, ERROR = "step/ms_median", "prediction/error"
METRICS = {
    "predicted/step_ms": "step_ms",
    "predicted/step_ms_low": "low",
    "predicted/step_ms_high": "high",
    "predicted/images_per_second": "images_per_second",
    "predicted/efficiency": "efficiency",
    "predicted/exposed_ms": "exposed_ms",
    "predicted/null_step_ms": "null_step_ms",
}
AS_LONG = 0.0005  # a smaller difference would be rounded to 0.0 %
SHORTEST_MS, LONGEST_MS = 1e-6, 1e12  # steps that a record may state


@dataclass(frozen=True)
class RecordedForecast:
    """What a record says that its step would take, and what it took. Times are ms."""

    step_ms: float
    null_step_ms: float  # by the null model
    measured_ms: float
    low: float | None  # of the interval; None: no error was claimed
    high: float | None
    level: float  # of the interval
    in_time: bool  # written before the attempt began
    # The ends of the interval of the measured step inside its run; without one, the step.
    least_ms: float
    most_ms: float

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
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured_ms <= self.high

    @property
    def comparison(self) -> str:
        """What was measured against the forecast: `step 4.1 % longer`, `step as long`."""
        if abs(self.error) < AS_LONG:
            return "step as long"
        word = "longer" if self.error > 0 else "shorter"
        return f"step {100 * abs(self.error):.1f} % {word}"


def shown_low_ms(low: float, step_ms: float, efficiency: float, ranks: int) -> float:
    """Return the lower end of the interval of a step in ms as it is shown: of several ranks not
    below the step of one GPU with the same strategy, which would be more than 100 % efficiency.
    """
    if ranks < 2:
        return low
    return max(low, min(efficiency, 1.0) * step_ms)


def recorded_forecast(record: Record) -> RecordedForecast | None:
    """Return the forecast of a finished record; None where none was possible or asked for.

    What a damaged record states, such as a step of 0 ms or an interval whose ends changed places,
    is none either.
    """
    predicted = record.predicted
    step, null = finite(predicted.get("step_ms")), finite(predicted.get("null_step_ms"))
    measured = finite(record.metrics.get(STEP))
    if record.state != "finished" or step is None or null is None or measured is None:
        return None
    if min(step, null, measured) < SHORTEST_MS or max(step, null, measured) > LONGEST_MS:
        return None
    made_at, level = finite(predicted.get("made_at")), finite(predicted.get("level")) or 0.0
    low, high = finite(predicted.get("low")), finite(predicted.get("high"))
    if not 0 < level < 1 or low is None or high is None or low > high:
        low = high = None
    ends = [measured, *filter(math.isfinite, record.ends_within_run(STEP) or ())]
    return RecordedForecast(
        step_ms=step,
        null_step_ms=null,
        measured_ms=measured,
        low=low,
        high=high,
        level=level,
        in_time=made_at is not None and made_at <= record.started_at,
        least_ms=min(ends),
        most_ms=max(ends),
    )


def with_forecast(record: Record) -> Record:
    """Return the record with the metrics of its forecast (METRICS)."""
    if not record.predicted or record.state != "finished":
        return record
    metrics = dict(record.metrics)
    for name, key in METRICS.items():
        value = finite(record.predicted.get(key))
        if value is not None:
            metrics[name] = value
    recorded = recorded_forecast(record)
    if recorded is not None:
        metrics[ERROR] = recorded.error
    return dataclasses.replace(record, metrics=metrics)


def about_forecasts(records: Iterable[Record]) -> str:
    """Return how good the forecasts of a sweep were, in one line; empty where no cell has one."""
    cells = 0
    forecasts = []
    for record in records:
        if record.predicted and record.state == "finished" and not record.drift:
            cells += 1
            forecast = recorded_forecast(record)
            if forecast is not None and forecast.in_time:
                forecasts.append(forecast)
    if not forecasts:
        return ""
    error = fmean(abs(forecast.error) for forecast in forecasts)
    null_error = fmean(abs(forecast.null_error) for forecast in forecasts)
    words = f"{len(forecasts)} of {cells} runs before they ran: steps were off by "
    words += f"{100 * error:.1f} % on average, naive forecasts (as in the nearest run) by "
    words += f"{100 * null_error:.1f} %"
    judged = [forecast for forecast in forecasts if forecast.inside is not None]
    if judged:
        outside = sum(not forecast.inside for forecast in judged)
        words += f"; {outside} of {len(judged)} outside the {100 * judged[-1].level:.0f} % "
        words += "prediction intervals"
    return words


def any_doubtful(records: Iterable[Record]) -> bool:
    """Tell whether a check casts doubt on one of some records, but for what FAIR names."""
    for record in records:
        if record.validity.verdict == "suspect" and record.validity.codes.keys() - FAIR:
            return True
    return False
