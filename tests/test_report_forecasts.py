"""The report's section on forecasts: what it says of cells held out, of those forecast before they ran, and of neither."""

import csv
import dataclasses
import io
from pathlib import Path

import pytest
from forecasting import Machine

from analysis.findings.examine import findings_of
from analysis.findings.predicted.stated import about_forecasts
from analysis.prediction.calibration import calibrate
from analysis.prediction.holdout import CONDITION, hold_out
from analysis.report.figure import style
from analysis.report.sections.forecasts.cells import forecasts
from analysis.report.sections.forecasts.known import known, of_own_parts
from analysis.report.sections.losses import OWN, CostParts, cost_figure, cost_parts
from analysis.study.estimates import Estimate
from analysis.study.study import Study, open_study
from benchmarks.record import read_study

DATA = Path(__file__).parent / "data"


def section(study, of=forecasts):
    with style():
        return of(study, findings_of(study))


def rows(table):
    return list(csv.DictReader(io.StringIO(table.to_csv())))


@pytest.fixture(scope="module")
def settings():
    return open_study(DATA / "h200_x4" / "settings")


def test_cells_held_out_stand_beside_what_was_measured_and_are_called_hindsight(settings):
    found = section(settings)
    held = hold_out(calibrate(settings), CONDITION)
    (table,) = found.tables
    assert [float(row["forecast_ms"]) for row in rows(table)] == [
        one.forecast.step_ms for one in held
    ]
    assert [float(row["step_ms"]) for row in rows(table)] == [one.step_ms for one in held]
    assert {row["made"] for row in rows(table)} == {"afterwards, from the other cells"}
    assert (
        "8 cells on several GPUs were forecast afterwards, each from the other cells"
        in found.lines[0]
    )
    assert "No error is claimed: 8 cells could be held out, 10 are needed." in found.lines
    cost, *curves = found.figures
    assert len(rows(cost.data)) == 8 and "forecast afterwards" in cost.caption
    assert [one.name for one in curves] == ["forecast-curve-1"] and "No band" in curves[0].caption
    drawn = rows(curves[0].data)
    assert [row["gpus"] for row in drawn] == ["1", "2", "4", "8"] and float(
        drawn[0]["null_efficiency"]
    ) == 1.0
    assert float(drawn[3]["efficiency"]) < 1.0 and drawn[3]["basis"] == "extrapolated"


def test_modelled_parts_stand_beside_the_measured_cost_where_no_step_was_observed(settings):
    found = section(settings, cost_parts)
    told = rows(found.tables[0])
    whole = [row for row in told if row["part"] == "all that it costs"]
    assert len(whole) == 8 and all(row["measured_ms"] and row["modelled_ms"] for row in whole)
    tails = [row for row in told if row["part"] == "exchange after the last gradient"]
    assert len(tails) == 8 and all(
        row["modelled_ms"] and not row["measured_ms"] for row in tails
    ), "unknown stays unknown"
    assert "own work on one GPU" in found.figures[0].svg


def test_the_key_of_the_parts_says_cpu_worker_where_there_is_no_gpu():
    one = CostParts("cell", "0,1", {OWN: Estimate(1.0)}, {}, "")
    with style():
        said = cost_figure([one], "CPU workers").svg
    assert "own work on one CPU worker" in said and "GPU" not in said


@pytest.mark.parametrize("study", ["h200_x4/links", "h200_x2/scaling"])
def test_a_study_that_allows_no_forecast_has_no_such_section(study):
    assert section(open_study(DATA / study)) is None


def test_forecasts_made_before_a_cell_ran_come_first_and_are_told_apart_from_hindsight(settings):
    after = {one.record_id: one for one in known(settings).forecasts}
    made = []
    for place, record in enumerate(read_study(DATA / "h200_x4" / "settings")[0]):
        one = after.get(record.record_id)
        if one is not None and place % 2:
            late = place == 1  # written when the cell had begun: it is none
            said = {
                "step_ms": one.step_ms,
                "low": 10.0,
                "high": 20.0,
                "level": 0.9,
                "null_step_ms": one.null_step_ms,
            }
            said |= {
                "cost_ms": one.cost_ms,
                "tail_ms": "x",
                "made_at": record.started_at + (1 if late else -1),
            }
            record = dataclasses.replace(record, predicted=said)
        made.append(record)
    told = section(Study.of(made))
    table = rows(told.tables[0])
    before = [row["made"] == "before it ran" for row in table]
    assert before == sorted(before, reverse=True) and 2 <= sum(before) < len(after) == len(table)
    assert all(row["inside"] == "no" for row in table[: sum(before)]) and len(
        told.tables[0].marked
    ) == sum(before)
    assert (
        f"{sum(before)} cells on several GPUs were forecast before their ranks started"
        in told.lines[0]
        and "forecast afterwards" in told.lines[1]
    )
    assert "0 of" in told.lines[0] and "Filled" in told.figures[0].caption


def test_a_cell_that_probed_its_own_exchange_is_modelled_by_that_and_not_by_its_steps(settings):
    records = read_study(DATA / "h200_x4" / "settings")[0]
    place = next(
        at
        for at, one in enumerate(records)
        if one.cell.nccl.get("NCCL_P2P_LEVEL") == "LOC" and one.usable
    )

    def modelled(gamma, slower=1.0):
        tables = {
            "interference": {
                "rows": [{"rank": rank, "gamma": gamma, "gamma_error": 0.001} for rank in (0, 1)]
            },
            "bucket_exchange": {
                "operation": "all_reduce",
                "rows": [
                    {"bytes": size, "ms": size / 30e6}
                    for size in (2**16, 2**20, 26 * 2**20, 104 * 2**20)
                ],
            },
        }
        metrics = {
            name: value * slower
            for name, value in records[place].metrics.items()
            if "step/" in name
        }
        planted = dataclasses.replace(
            records[place],
            tables={**records[place].tables, **tables},
            metrics={**records[place].metrics, **metrics},
        )
        found = known(Study.of([*records[:place], planted, *records[place + 1 :]]))
        return of_own_parts(found, [planted.record_id])

    little, much = modelled(0.1), modelled(0.3)
    assert (
        much.contention_ms == pytest.approx(3 * little.contention_ms, rel=0.1)
        and little.tail_ms > 0
    )
    assert modelled(0.1, slower=1.5).step_ms == pytest.approx(little.step_ms), (
        "its own steps say nothing"
    )
    assert of_own_parts(known(settings), [records[place].record_id]) is None


def test_a_cell_measured_once_more_has_no_row_of_its_own():
    """With predict=auto the drift run has a forecast too: it ended the report with a KeyError."""
    machine = Machine().calibrate(batches=(64, 128))
    first = machine.measure((0, 2), 64)
    again = dataclasses.replace(first, started_at=first.started_at + 9, ended_at=first.ended_at + 9)
    drift = dataclasses.replace(first.cell, repeat=-2)
    once_more = [
        dataclasses.replace(again, record_id="d" * 32, cell=drift, cell_key=drift.key, drift=True),
    ]
    found = known(Study.of([*machine.known, first, *once_more])).forecasts
    assert [one.record_id for one in found if one.before] == [first.record_id]
    assert (
        section(Study.of([*machine.known, first, *once_more]))
        .lines[0]
        .startswith("1 cell on several GPUs was forecast")
    )
    assert about_forecasts([first, *once_more]).startswith("1 of 1 cells before they ran")
    late = dataclasses.replace(
        first, predicted={**first.predicted, "made_at": first.started_at + 1}
    )
    assert about_forecasts([late]) == "", "what was written afterwards is no forecast"
