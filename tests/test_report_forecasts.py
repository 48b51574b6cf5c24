"""The report's section on forecasts: what it says of cells held out, of those forecast before they ran, and of neither."""

import csv
import io
from pathlib import Path

import pytest

from analysis.findings.examine import findings_of
from analysis.findings.study import open_study
from analysis.prediction.calibration import calibrate
from analysis.prediction.holdout import CONDITION, hold_out
from analysis.report.sections.forecasts.cells import forecasts
from analysis.report.sections.losses.exchange import cost_parts
from analysis.report.style import style
from analysis.report.tables import to_csv

DATA = Path(__file__).parent / "data"


def section(study, of=forecasts):
    with style():
        return of(study, findings_of(study))


def rows(table):
    return list(csv.DictReader(io.StringIO(to_csv(table))))


@pytest.fixture(scope="module")
def settings():
    return open_study(DATA / "h200_x4" / "settings")


def test_cells_held_out_stand_beside_what_was_measured_and_are_called_hindsight(settings):
    found = section(settings)
    held = hold_out(calibrate(settings), CONDITION)
    (table,) = found.tables
    assert [float(row["forecast_ms"]) for row in rows(table)] == [one.forecast.step_ms for one in held]
    assert [float(row["step_ms"]) for row in rows(table)] == [one.step_ms for one in held]
    assert {row["made"] for row in rows(table)} == {"held out afterwards"}
    assert "8 cells were held out and forecast from the others, in hindsight" in found.lines[0]
    assert "No error is claimed: 8 cells could be held out, 10 are needed." in found.lines
    cost, *curves = found.pictures
    assert len(rows(cost.data)) == 8 and "in hindsight" in cost.caption
    assert [one.name for one in curves] == ["forecast-curve-1"] and "No band" in curves[0].caption
    drawn = rows(curves[0].data)
    assert [row["gpus"] for row in drawn] == ["1", "2", "4", "8"] and float(drawn[0]["null_efficiency"]) == 1.0
    assert float(drawn[3]["efficiency"]) < 1.0 and drawn[3]["basis"] == "extrapolated"


def test_modelled_parts_stand_beside_the_measured_cost_where_no_step_was_observed(settings):
    found = section(settings, cost_parts)
    told = rows(found.tables[0])
    whole = [row for row in told if row["part"] == "all that it costs"]
    assert len(whole) == 8 and all(row["measured_ms"] and row["modelled_ms"] for row in whole)
    tails = [row for row in told if row["part"] == "exchange after the last gradient"]
    assert len(tails) == 8 and all(row["modelled_ms"] and not row["measured_ms"] for row in tails), (
        "unknown stays unknown"
    )


@pytest.mark.parametrize("study", ["h200_x4/links", "h200_x2/scaling"])
def test_a_study_that_allows_no_forecast_has_no_such_section(study):
    assert section(open_study(DATA / study)) is None
