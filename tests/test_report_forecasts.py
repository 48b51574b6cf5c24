"""The report's section on forecasts: of cells that were forecast before they ran."""

import dataclasses

import pytest
from build import DATA
from simulate import ForecastMachine

from analysis.findings.examine import findings_of
from analysis.prediction.recorded_forecast import about_forecasts
from analysis.report.sections.scaling_section import forecasts
from analysis.study.study import Study, open_study


def section(study):
    return forecasts(study, findings_of(study))


@pytest.mark.parametrize("study", ["h200_x4/links", "h200_x2/scaling"])
def test_a_study_without_forecasts_has_no_such_section(study):
    assert section(open_study(DATA / study)) is None


def test_a_forecast_stands_beside_what_was_measured_and_one_that_came_late_does_not():
    machine = ForecastMachine().calibrate(batches=(64, 128))
    first = machine.measure((0, 2), 64)
    shown = section(Study.of([*machine.known, first]))
    (table,) = shown.tables
    (row,) = table.to_json()
    assert row["step_ms"] == pytest.approx(first.metrics["step/ms_median"])
    assert row["forecast_ms"] == first.predicted["step_ms"]
    assert row["error"] == pytest.approx(row["step_ms"] / row["forecast_ms"] - 1)
    assert shown.lines[0].startswith("Forecast: 1 of 1 runs before they ran: steps were off by ")
    outside = {**first.predicted, "low": 1.0, "high": 2.0, "level": 0.9}
    wide = dataclasses.replace(first, predicted=outside)
    (table,) = section(Study.of([*machine.known, wide])).tables
    assert table.marked == {0} and table.to_json()[0]["inside"] == "no"
    late = dataclasses.replace(
        first, predicted={**first.predicted, "made_at": first.started_at + 1}
    )
    assert about_forecasts([late]) == "" and section(Study.of([*machine.known, late])) is None


@pytest.mark.parametrize(
    ("gpus", "low", "shown"),
    [((0, 2), 0.9, 0.97), ((0, 2), 0.98, 0.98), ((0,), 0.9, 0.9)],
    ids=["above 100 %", "below", "one GPU"],
)
def test_no_interval_of_a_forecast_reaches_above_100_percent_efficiency(gpus, low, shown):
    """Its step would be shorter than that of one GPU alone."""
    machine = ForecastMachine().calibrate(batches=(64, 128))
    first = machine.measure(gpus, 64)
    step_ms = first.predicted["step_ms"]
    ends = {"low": low * step_ms, "high": 1.1 * step_ms, "level": 0.9, "efficiency": 0.97}
    changed = dataclasses.replace(first, predicted={**first.predicted, **ends})
    (table,) = section(Study.of([*machine.known, changed])).tables
    (row,) = table.to_json()
    assert row["forecast_ms_low"] == pytest.approx(shown * step_ms)
