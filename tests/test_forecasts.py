"""predict=auto: a cell is forecast before its ranks start, and its record is held to it."""

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from build import make_record, without_entry
from scipy import stats
from simulate import ForecastMachine, ForecastTruth

from analysis.__main__ import main as analysis
from analysis.prediction.calibration import calibrate
from analysis.prediction.draws import deviation
from analysis.prediction.forecast import (
    FEWEST_HELD_OUT,
    LEVEL,
    VERSION,
    conformal,
    hold_out,
    interval,
    scores_by_machine,
    scores_of,
)
from analysis.prediction.recorded_forecast import (
    about_forecasts,
    doubted,
    recorded_forecast,
    with_forecast,
)
from analysis.report.cell_numbers import cell_numbers, with_unit
from analysis.study.study import Study
from analysis.validity.checks import CHECKS, judge
from benchmarks.record import FINDINGS, Validity, read, read_lines, read_study, write
from benchmarks.record.folder import CellFolder
from conf.schema import ValidityLimits
from launch.study.forecasts import Forecasts
from launch.tracking.mlflow_run import project

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
LIMITS = ValidityLimits()
SHORT = (
    "gpus=0,1", "model=fmnist_cnn", "batch_size=2,4", "predict=auto", "noise_pairs=0", "tracking=none",
    "report=false", "benchmark.max_seconds=0.1", "benchmark.min_iterations=3", "benchmark.max_iterations=6",
    "benchmark.warmup_iterations=1", "benchmark.warmup_min_seconds=0", "benchmark.exchange_iterations=2",
    "benchmark.limit_iterations=0", "benchmark.exposed_rounds=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A real sweep of two gloo ranks: its study, and what it printed."""
    folder = tmp_path_factory.mktemp("predicted")
    done = subprocess.run(
        [sys.executable, "launch.py", "-m", *SHORT, f"output_dir={folder}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "default", done.stdout


def test_every_forecast_of_a_real_sweep_was_written_before_its_ranks_started(sweep):
    records, _ = read_study(sweep[0])
    assert len(records) == 2
    for record in records:
        folder = CellFolder(sweep[0] / record.cell.folder)
        assert json.loads(folder.attempt.read_text())["predicted"] == record.predicted
        starts = [next(read_lines(path))["time"] for path in folder.all_rank_lines()]
        assert len(starts) == 2 and record.predicted["made_at"] <= record.started_at < min(starts)
        assert (
            record.cell.benchmark["calibrate"] == "all" and record.tables["bucket_exchange"]["rows"]
        )
        assert without_entry([record]) == set()
    first, second = records
    assert first.predicted["refused"] == "no cell of the study was measured before it"
    answer = second.predicted
    assert answer["records"] == [first.record_id] and (answer["cells"], answer["version"]) == (
        1,
        VERSION,
    )
    assert answer["basis"] == "extrapolated" and answer["null_step_ms"] > 0
    assert answer["low"] is None and "not enough to state an error" in " ".join(answer["why"])
    assert "unexplained" not in second.validity.codes, "no error was claimed"


def test_a_forecast_is_a_part_of_the_record_that_verify_makes_again(sweep, capsys):
    assert analysis(["verify", str(sweep[0])]) == 0
    path = max(
        sweep[0].glob("*/record.json"),
        key=lambda entry: json.loads(entry.read_text())["started_at"],
    )
    content = json.loads(path.read_text())
    content["predicted"]["step_ms"] *= 1.01
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert analysis(["verify", str(sweep[0]), "--json"]) == 1
    differing = [entry["field"] for entry in json.loads(capsys.readouterr().out)["differences"]]
    content["predicted"]["step_ms"] /= 1.01
    path.write_text(json.dumps(content))
    assert differing == ["predicted step_ms"]


def test_a_sweep_says_what_was_predicted(sweep):
    records, answer = read_study(sweep[0])[0], sweep[1]
    assert (
        answer.count("  predicted ") == 1
        and "forecast 1 of 2 cells before they ran: mean error of the step " in answer
    )
    projected = project(records[-1])
    assert projected.tags["predicted.basis"] == f"extrapolated, from 1 cell, model {VERSION}"
    values = {name: value for name, value, *_ in projected.metrics}
    assert values["predicted/step_ms"] == records[-1].predicted["step_ms"]
    measured = records[-1].metrics["step/ms_median"]
    assert values["prediction/error"] == pytest.approx(measured / values["predicted/step_ms"] - 1)
    assert {
        "predicted/images_per_second",
        "predicted/efficiency",
        "predicted/exposed_ms",
        "predicted/null_step_ms",
    } <= values.keys()


@pytest.fixture(scope="module")
def calibrated():
    return ForecastMachine().calibrate()


FAULTS = {
    "a link at half its bandwidth": (ForecastTruth(gb_per_s=10.0, noise=0.0), "slower"),
    "a slow rank": (ForecastTruth(slow_rank=1.02, noise=0.0), "slower"),
    "a wrong bucket size": (ForecastTruth(bucket_mib=0.5, noise=0.0), "faster"),
}


@pytest.mark.parametrize("gpus", [(0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_unexplained_and_its_sound_twin_is_not(calibrated, name, gpus):
    truths, word = FAULTS[name]
    faulty, sound = (
        calibrated.measure(gpus, 160, truths=entry) for entry in (truths, ForecastTruth(noise=0.0))
    )
    assert faulty.predicted["step_ms"] == sound.predicted["step_ms"], (
        "what it was forecast from is the same"
    )
    assert sound.validity.codes == {} and faulty.validity.verdict == "suspect"
    assert f"{word} than forecast" in faulty.validity.codes["unexplained"]
    assert (
        "without a fault at most 1 cell in 10 lies outside" in faulty.validity.codes["unexplained"]
    )
    assert sound.predicted["low"] < sound.metrics["step/ms_median"] < sound.predicted["high"]


def test_sound_cells_are_seldom_unexplained(calibrated):
    run = [
        calibrated.measure(gpus, batch)
        for batch in range(72, 256, 8)
        for gpus in ((0, 1), (0, 1, 2, 3))
    ]
    fired = ["unexplained" in entry.validity.codes for entry in run]
    assert fired == [not recorded_forecast(entry).inside for entry in run] and len(fired) == 46
    assert sum(fired) <= allowed(len(fired)), "at most the stated rate"


def allowed(cells):
    """How many sound cells may lie outside: one in ten, and what chance adds in one of twenty."""
    return stats.binom.ppf(0.95, cells, 1 - LEVEL)


def test_clean_cells_of_h200s_are_unexplained_at_the_stated_rate():
    """Each committed cell, forecast from all others, by the scores of its machine."""
    folders = sorted({path.parent.parent for path in DATA.glob("h200_*/*/*/record.json")})
    study = Study.of(record for folder in folders for record in read_study(folder)[0])
    held = [entry for entry in hold_out(calibrate(study), "condition") if entry.forecast]
    by_id, fired = {entry.record_id: entry for entry in study.records}, []
    for entry in held:
        others = scores_of(
            elsewhere
            for elsewhere in held
            if elsewhere.cell.query.machine == entry.cell.query.machine and elsewhere is not entry
        )
        if len(others) >= FEWEST_HELD_OUT:
            record = by_id[entry.cell.record_ids[0]]
            low, high = interval(entry.forecast, conformal(others))
            answer = entry.forecast.to_json() | {
                "low": low,
                "high": high,
                "level": LEVEL,
                "made_at": 0.0,
            }
            metrics = record.metrics | {"step/ms_median": entry.step_ms}  # of all its runs
            judged = judge(dataclasses.replace(record, predicted=answer, metrics=metrics), LIMITS)
            fired.append("unexplained" in judged.codes)
    assert len(fired) >= 20 and sum(fired) <= allowed(len(fired))


def test_nothing_is_claimed_with_fewer_than_ten_cells():
    nine = ForecastMachine().calibrate(batches=(64, 128, 192))
    run = nine.measure((0, 1, 2, 3), 160, truths=ForecastTruth(slow_rank=2.0))
    assert run.predicted["held_out"] == FEWEST_HELD_OUT - 1 and run.predicted["low"] is None
    assert run.validity.codes == {} and recorded_forecast(run).error > 0.5
    assert "unexplained" in judge(run, LIMITS).not_applicable


def test_cells_of_one_gpu_are_forecast_without_an_error(calibrated):
    run = calibrated.measure((1,), 160)
    assert run.predicted["low"] is None and run.predicted["held_out"] == 0
    assert "cells of one GPU, or without an exchange, are not held out" in run.predicted["why"][-1]
    assert "cells of one GPU, or" in judge(run, LIMITS).not_applicable["unexplained"]
    assert recorded_forecast(run).error == pytest.approx(0, abs=0.01)


def scores_on_one_machine(records):
    """The scores of one machine, by the way of holding out."""
    values = scores_by_machine(Study.of(records))
    assert len({key[1:] for key in values}) == 1
    return {way: scores for (way, *_), scores in values.items()}


def test_errors_on_another_machine_or_of_a_new_model_are_no_errors_of_this_cell(calibrated):
    last = calibrated.known[-1]
    elsewhere = [
        dataclasses.replace(entry, environment={**entry.environment, "host": "another"})
        for entry in calibrated.known
    ]
    forecasts = Forecasts("auto", lambda job: job())
    forecasts.learn(elsewhere)
    answer = forecasts.before(last.cell, last.environment, elsewhere)
    assert answer["step_ms"] > 0 and answer["low"] is None and answer["held_out"] == 0
    forecasts.learn([*elsewhere, *calibrated.known])
    answer = forecasts.before(last.cell, last.environment, [*elsewhere, *calibrated.known])
    assert answer["low"] is not None and answer["held_out"] == 12
    alone = dataclasses.replace(calibrated.known[0].cell, precision="fp32")
    run = dataclasses.replace(
        calibrated.known[0], cell=alone, cell_key=alone.key, record_id="f" * 32
    )
    request = dataclasses.replace(last.cell, precision="fp32", batch_size=alone.batch_size)
    answer = calibrated.forecasts.before(request, last.environment, [*calibrated.known, run])
    assert answer["step_ms"] > 0 and answer["low"] is None, (
        "nobody measured several GPUs that compute so"
    )


def test_a_cell_outside_its_interval_stays_among_the_scores(calibrated):
    """Else the next intervals would be those of cells that fitted."""
    run = calibrated.measure((0, 1), 160, truths=ForecastTruth(gb_per_s=5.0))
    assert (
        run.validity.verdict == "suspect"
        and len(scores_on_one_machine([*calibrated.known, run])["condition"]) == 13
    )
    assert not doubted([run])
    assert doubted(
        [dataclasses.replace(run, validity=Validity("suspect", {"unexplained": "", "noisy": ""}))]
    )
    assert {check.code for check in CHECKS if check.severity == "finding"} <= {*FINDINGS}


def test_suspect_cells_are_scored_where_the_others_are_too_few(calibrated):
    doubtful = [
        dataclasses.replace(entry, validity=Validity("suspect", {"noisy": "wide"}))
        for entry in calibrated.known
    ]
    assert scores_by_machine(Study.of(doubtful)) == scores_by_machine(Study.of(calibrated.known))
    few = [*doubtful[:-1], calibrated.known[-1]]
    assert len(scores_on_one_machine(few)["condition"]) == 12


REFUSED = {
    "no model": ({"model": {"name": "none"}}, "trains nothing"),
    "another model": (
        {"model": {"name": "alexnet"}},
        "no cell of the study that trains alexnet like this",
    ),
    "another strategy": ({"strategy": {"name": "mine"}}, "no forecast knows how it sends"),
    "a wire that nobody measured": (
        {"nccl": {"NCCL_P2P_LEVEL": "LOC"}},
        "over host memory was measured",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_no_forecast_is_possible_one_sentence_says_why(calibrated, name):
    changes, sentence = REFUSED[name]
    cell = calibrated.known[-1].cell
    if "model" in changes:
        changes = {"model": dataclasses.replace(cell.model, **changes["model"])}
    request = dataclasses.replace(cell, **changes)
    answer = calibrated.forecasts.before(
        request, calibrated.known[-1].environment, calibrated.known
    )
    assert (
        sentence in answer["refused"]
        and "\n" not in answer["refused"]
        and "step_ms" not in answer
        and answer["made_at"] > 0
    )
    record = with_forecast(make_record(predicted=answer))
    assert (
        recorded_forecast(record) is None and "unexplained" in judge(record, LIMITS).not_applicable
    )


def test_whatever_the_records_hold_a_cell_is_measured(calibrated, monkeypatch):
    def broken(*_):
        raise LookupError("planted")

    monkeypatch.setattr("analysis.prediction.forecast.forecast_before", broken)
    monkeypatch.setattr("analysis.prediction.forecast.scores_by_machine", broken)
    last = calibrated.known[-1]
    calibrated.forecasts.learn(calibrated.known)
    answer = calibrated.forecasts.before(last.cell, last.environment, calibrated.known)
    assert answer["refused"] == "the forecast failed (LookupError: planted)"


def test_without_predict_nothing_is_said_and_nothing_is_done():
    forecasts, last = Forecasts(False, lambda job: pytest.fail("a job")), make_record()
    forecasts.prepare([last])
    forecasts.learn([last])
    assert forecasts.before(last.cell, {}, [last]) == {} == make_record().predicted
    assert with_forecast(last) is last and about_forecasts([last]) == ""


@pytest.mark.parametrize(("share", "values"), [(0.001, True), (0.2, False)])
def test_a_run_that_scatters_much_contradicts_no_forecast(calibrated, share, values):
    run = calibrated.measure((0, 1), 160, truths=ForecastTruth(gb_per_s=10.0))
    step = run.metrics["step/ms_median"]
    within = {"step/ms_median": {"low": step * (1 - share), "high": step * (1 + share)}}
    record = dataclasses.replace(run, within_run=within)
    assert ("unexplained" in judge(record, LIMITS).codes) == values and not recorded_forecast(
        record
    ).inside


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.003), (0.2, 0.2 / 1.96)])
def test_a_step_is_known_no_better_than_the_run_that_it_is_from(calibrated, share, expected):
    """Measured once, its deviation was 0.3 % on noisy CPU workers too."""
    run = calibrated.known[0]
    step = run.metrics["step/ms_median"]
    within = {"step/ms_median": {"low": step * (1 - share), "high": step * (1 + share)}}
    measured = calibrate(Study.of([dataclasses.replace(run, within_run=within)])).cells[0].step_ms
    assert deviation(measured) / step == pytest.approx(expected, rel=0.1)


def test_a_forecast_that_came_late_counts_for_nothing(calibrated):
    run = calibrated.measure((0, 1), 160, truths=ForecastTruth(gb_per_s=5.0))
    late = dataclasses.replace(run, started_at=run.predicted["made_at"] - 1e-3)
    assert "not written before" in judge(late, LIMITS).unchecked["unexplained"]


@pytest.mark.parametrize(
    "damaged",
    [
        {"step_ms": "fast"},
        {"step_ms": math.nan},
        {"step_ms": -1.0},
        {"step_ms": 10**400},
        {"null_step_ms": 0},
        {"low": []},
        {"level": 7},
        {"made_at": None},
        {},
    ],
)
def test_a_damaged_forecast_is_none(calibrated, damaged):
    run = calibrated.measure((0, 1), 160, truths=ForecastTruth(gb_per_s=5.0))
    predicted = run.predicted | damaged if damaged else {"unknown": 1}
    record = with_forecast(dataclasses.replace(run, predicted=predicted))
    assert "unexplained" not in judge(record, LIMITS).codes and cell_numbers(record, {})
    assert project(dataclasses.replace(record, record_id="0" * 32, sweep_id="1" * 32)).tags
    assert about_forecasts([record]) == "" or not damaged.keys() & {"step_ms", "null_step_ms"}


def test_a_forecast_of_any_number_is_read_as_it_was_written(tmp_path):
    record = make_record(
        predicted={"deviation_ms": math.inf, "low": None, "why": ["a"], "records": [], "cells": 3}
    )
    assert read(write(CellFolder(tmp_path), record)) == record
    content = json.loads((tmp_path / "record.json").read_text())
    del content["predicted"]
    (tmp_path / "record.json").write_text(json.dumps(content | {"schema_version": 5}))
    assert read(tmp_path / "record.json").predicted == {}, "schema 5 had none"


def test_tables_say_the_forecast_beside_what_was_measured(calibrated):
    slow, sound = (
        calibrated.measure((0, 1), 160, truths=ForecastTruth(gb_per_s=entry, noise=0.0))
        for entry in (10.0, 20.0)
    )
    answer = {
        name: cell_numbers(entry, {})["predicted"].replace("\N{NARROW NO-BREAK SPACE}", " ")
        for name, entry in (("slow", slow), ("sound", sound))
    }
    assert answer["slow"].endswith(" % longer") and with_unit(
        "predicted", "9,341, step as long"
    ).endswith("d 9,341, step as long")
    predicted = sound.predicted | {
        "low": 0.0,
        "high": 0.999 * sound.metrics["step/ms_median"],
        "step_ms": sound.metrics["step/ms_median"] / 1.0001,
    }
    narrow = dataclasses.replace(sound, predicted=predicted)
    assert "measured 0.010 % slower than forecast" in judge(narrow, LIMITS).codes["unexplained"]
    assert about_forecasts([slow, sound, make_record()]).startswith("2 of 2 cells before they ran")
    assert about_forecasts([slow, sound]).endswith("; 1 of 2 outside 90 % intervals")


def test_a_forecast_between_two_cells_takes_no_twentieth_of_a_second():
    """Of 54 records of four H200s; the seconds of a processor, because others may use it."""
    folders = [DATA / "h200_x4" / name for name in ("settings", "waterfall", "strategies")]
    known = [record for folder in folders for record in read_study(folder)[0]]
    forecasts = Forecasts("auto", lambda job: job())
    forecasts.learn(known)
    several = [entry for entry in known if entry.cell.world_size > 1 and entry.cell.trains]
    spent = []
    for entry in several[:9]:
        began = time.thread_time()
        answer = forecasts.before(entry.cell, entry.environment, known)
        spent.append(time.thread_time() - began)
        assert answer["took_ms"] > 0 and answer["step_ms"] > 0
    assert np.median(spent) < 0.05
