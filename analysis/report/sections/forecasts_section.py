"""Every cell that was forecast before its ranks started (predict=auto), beside what it gave.

`python -m analysis predict STUDY --holdout condition` forecasts cells afterwards, from the others.
"""

from typing import NamedTuple

from analysis.findings.examine import Findings
from analysis.prediction.recorded_forecast import (
    RecordedForecast,
    about_forecasts,
    recorded_forecast,
)
from analysis.report.numbers import NumberFormat
from analysis.report.section import Section
from analysis.report.table import Column, Table
from analysis.study.intervals import Estimate
from analysis.study.names import gpu_ids, run_name, short_names
from analysis.study.study import Study
from benchmarks.record import Record

INSIDE = {None: "", True: "yes", False: "no"}
CHANGE = NumberFormat(100.0, "%", 2, sign=True)


class CellForecast(NamedTuple):
    """What one run was forecast to give, and what it gave."""

    record: Record
    forecast: RecordedForecast

    @property
    def step(self) -> Estimate:
        """The forecast of the step, with its interval."""
        return Estimate(self.forecast.step_ms, self.forecast.low, self.forecast.high)


def forecasts(study: Study, findings: Findings) -> Section | None:
    """Return the forecasts of a study's cells; None where no cell has one."""
    cells = []
    for record in study.usable:
        forecast = recorded_forecast(record)
        if forecast is not None and forecast.in_time:
            cells.append(CellForecast(record, forecast))
    if not cells:
        return None
    names = short_names(run_name(cell.record) for cell in cells)
    table = Table.of(
        "forecasts",
        "Each run beside its forecast, and how much longer the measured step is than the forecast "
        "and than the null model, which says that nothing changes.",
        (
            Column("cell", "cell", lambda cell: names[run_name(cell.record)]),
            Column("gpus", "GPUs", lambda cell: gpu_ids(cell.record.cell.members)),
            Column("step_ms", "step ms", "forecast.measured_ms", "ms"),
            Column("forecast_ms", "forecast ms", "step", "ms", bounded=True),
            Column("error", "measured against it", "forecast.error", CHANGE),
            Column("null_error", "against null model", "forecast.null_error", CHANGE),
            Column("inside", "in interval", lambda cell: INSIDE[cell.forecast.inside]),
        ),
        cells,
        lambda cell: cell.forecast.inside is False,
    )
    line = f"Forecast: {about_forecasts(study.usable)}."
    return Section("forecasts", "Forecast and measured", (line,), (), (table,))
