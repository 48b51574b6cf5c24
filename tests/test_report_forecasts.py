"""The report's section on forecasts: of cells held out, of those forecast before they ran."""

import csv
import dataclasses
import io
from pathlib import Path

import pytest
from simulate import ForecastMachine

from analysis.findings.examine import findings_of
from analysis.prediction.calibration import calibrate
from analysis.prediction.forecast import CONDITION, hold_out
from analysis.prediction.recorded_forecast import about_forecasts
from analysis.report.sections.forecasts import forecasts, study_forecasts
from analysis.study.study import Study, open_study
from benchmarks.record import read_study

DATA = Path(__file__).parent / "data"
SETTINGS = DATA / "h200_x4" / "settings"


def section(study):
    return forecasts(study, findings_of(study))


def rows(table):
    return list(csv.DictReader(io.StringIO(table.to_csv())))


@pytest.fixture(scope="module")
def settings():
    return open_study(SETTINGS)


def test_cells_held_out_stand_beside_what_was_measured_and_are_called_hindsight(settings):
    shown = section(settings)
    held = hold_out(calibrate(settings), CONDITION)
    (table,) = shown.tables
    steps = [(float(row["forecast_ms"]), float(row["step_ms"])) for row in rows(table)]
    assert steps == [(result.forecast.step_ms, result.step_ms) for result in held]
    assert {row["made"] for row in rows(table)} == {"afterwards, from the other cells"}
    words = "8 cells on several GPUs were forecast afterwards, each from the other cells"
    assert words in shown.lines[0] and not shown.figures
    assert "No error is claimed: 8 cells could be held out, 10 are needed." in shown.lines


@pytest.mark.parametrize("study", ["h200_x4/links", "h200_x2/scaling"])
def test_a_study_that_allows_no_forecast_has_no_such_section(study):
    assert section(open_study(DATA / study)) is None


def test_forecasts_made_before_a_cell_ran_come_first_and_are_told_apart_from_hindsight(settings):
    after = {cell.record.record_id: cell for cell in study_forecasts(settings)[0]}
    records = []
    for index, record in enumerate(read_study(SETTINGS)[0]):
        cell = after.get(record.record_id)
        if cell is not None and index % 2:
            late = index == 1  # written when the cell had begun: it is none
            made_at = record.started_at + (1 if late else -1)
            ends = {"low": 10.0, "high": 20.0, "level": 0.9, "tail_ms": "x", "made_at": made_at}
            record = dataclasses.replace(record, predicted={**cell.forecast, **ends})
        records.append(record)
    shown = section(Study.of(records))
    (table,) = shown.tables
    before = [row["made"] == "before it ran" for row in rows(table)]
    assert before == sorted(before, reverse=True)
    assert 2 <= sum(before) < len(after) == len(before)
    assert all(row["inside"] == "no" for row in rows(table)[: sum(before)])
    assert len(table.marked) == sum(before)
    words = f"{sum(before)} cells on several GPUs were forecast before their ranks started"
    assert words in shown.lines[0] and "0 of" in shown.lines[0]
    assert "forecast afterwards" in shown.lines[1]


def test_what_was_written_after_a_cell_began_is_no_forecast():
    machine = ForecastMachine().calibrate(batches=(64, 128))
    first = machine.measure((0, 2), 64)
    study = Study.of([*machine.known, first])
    before = [cell.record.record_id for cell in study_forecasts(study)[0] if cell.before]
    assert before == [first.record_id]
    assert section(study).lines[0].startswith("1 cell on several GPUs was forecast")
    assert about_forecasts([first]).startswith("1 of 1 cells before they ran")
    late = {**first.predicted, "made_at": first.started_at + 1}
    assert about_forecasts([dataclasses.replace(first, predicted=late)]) == ""
