"""predict=auto: a cell is forecast before its ranks start, and its record is held to it."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from build import DATA, ROOT, make_record, without_entry
from scipy import stats
from simulate import ForecastMachine, ForecastTruth

from analysis.__main__ import main as analysis
from analysis.findings.examine import findings_of
from analysis.prediction.calibration_data import calibrate
from analysis.prediction.distributions import deviation
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
    any_doubtful,
    recorded_forecast,
    with_forecast,
)
from analysis.report.cell_numbers import cell_numbers, with_unit
from analysis.report.sections.scaling_section import forecasts
from analysis.study.study import Study, open_study
from analysis.validity.checks import CHECKS, judge
from benchmarks.record import FINDINGS, Validity, read_lines, read_study
from benchmarks.record.folder import CellFolder
from conf.schema import ValidityLimits
from launch.study.background import Forecasts
from launch.tracking.mlflow_run import project

LIMITS = ValidityLimits()
SHORT = """
    gpus=0,1 model=fmnist_cnn batch_size=2,4 predict=auto noise_pairs=0 tracking=none report=false
    benchmark.max_seconds=0.1 benchmark.min_iterations=3 benchmark.max_iterations=6
    benchmark.warmup_iterations=1 benchmark.warmup_min_seconds=0 benchmark.exchange_iterations=2
    benchmark.limit_iterations=0 benchmark.exposed_rounds=1
"""


# --- a real sweep of two gloo ranks


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The study, and what the sweep printed."""
    folder = tmp_path_factory.mktemp("predicted")
    command = [sys.executable, "launch.py", "-m", *SHORT.split(), f"output_dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
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
        assert record.cell.benchmark["calibrate"] == "all"
        assert record.tables["bucket_exchange"]["rows"]
        assert without_entry([record]) == set()
    first, second = records
    assert first.predicted["refused"] == "no run of the study was measured before it"
    answer = second.predicted
    assert answer["records"] == [first.record_id]
    assert (answer["cells"], answer["version"]) == (1, VERSION)
    assert answer["basis"] == "extrapolated" and answer["null_step_ms"] > 0
    assert answer["low"] is None and "no error bars: cross-validation needs 10" in " ".join(
        answer["why"]
    )
    assert "unexplained" not in second.validity.codes, "no error was claimed"


def test_a_forecast_is_a_part_of_the_record_that_verify_makes_again(sweep, capsys):
    assert analysis(["verify", str(sweep[0])]) == 0
    paths = sweep[0].glob("*/record.json")
    path = max(paths, key=lambda entry: json.loads(entry.read_text())["started_at"])
    text = path.read_text()
    content = json.loads(text)
    content["predicted"]["step_ms"] *= 1.01
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert analysis(["verify", str(sweep[0]), "--json"]) == 1
    differing = [entry["field"] for entry in json.loads(capsys.readouterr().out)["differences"]]
    path.write_text(text)
    assert differing == ["predicted step_ms"]


def test_a_sweep_shows_what_was_predicted(sweep):
    records, printed = read_study(sweep[0])[0], sweep[1]
    # The closing table has a column of that name too, where it has room.
    lines = [line for line in printed.splitlines() if "  finished  " in line]
    assert ["  predicted " in line for line in lines] == [False, True]
    assert "forecast 1 of 2 runs before they ran: steps were off by " in printed
    run = project(records[-1])
    assert run.tags["predicted.basis"] == f"extrapolated, from 1 run, model {VERSION}"
    values = {name: value for name, value, *_ in run.metrics}
    assert values["predicted/step_ms"] == records[-1].predicted["step_ms"]
    measured = records[-1].metrics["step/ms_median"]
    assert values["prediction/error"] == pytest.approx(measured / values["predicted/step_ms"] - 1)
    names = ("images_per_second", "efficiency", "exposed_ms", "null_step_ms")
    assert {f"predicted/{name}" for name in names} <= values.keys()


# --- an invented machine


@pytest.fixture(scope="module")
def calibrated():
    return ForecastMachine().calibrate()


def planted(machine, gpus=(0, 1), **truth):
    return machine.measure(gpus, 160, truths=ForecastTruth(**truth))


FAULTS = {
    "a link at half its bandwidth": ({"gb_per_s": 10.0}, "slower"),
    "a slow rank": ({"slow_rank": 1.02}, "slower"),
    "a wrong bucket size": ({"bucket_mib": 0.5}, "faster"),
}


@pytest.mark.parametrize("gpus", [(0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_unexplained_and_its_sound_twin_is_not(calibrated, name, gpus):
    truth, word = FAULTS[name]
    faulty = planted(calibrated, gpus, noise=0.0, **truth)
    sound = planted(calibrated, gpus, noise=0.0)
    assert faulty.predicted["step_ms"] == sound.predicted["step_ms"]
    assert sound.validity.codes == {} and faulty.validity.verdict == "suspect"
    sentence = faulty.validity.codes["unexplained"]
    assert f"{word} than forecast" in sentence
    assert "without a fault at most 1 run in 10 lies outside" in sentence
    assert sound.predicted["low"] < sound.metrics["step/ms_median"] < sound.predicted["high"]


def allowed(cells):
    """How many sound cells may lie outside: one in ten, and what chance adds in one of twenty."""
    return stats.binom.ppf(0.95, cells, 1 - LEVEL)


def test_sound_cells_are_seldom_unexplained(calibrated):
    fired = []
    for batch in range(72, 256, 8):
        for gpus in ((0, 1), (0, 1, 2, 3)):
            record = calibrated.measure(gpus, batch)
            fired.append("unexplained" in record.validity.codes)
            assert fired[-1] != recorded_forecast(record).inside
    assert len(fired) == 46 and sum(fired) <= allowed(46), "at most the stated rate"


def test_clean_cells_of_h200s_are_unexplained_at_the_stated_rate():
    """Each committed cell, forecast from all others, by the scores of its machine."""
    folders = sorted({path.parent.parent for path in DATA.glob("h200_*/*/*/record.json")})
    study = Study.of(record for folder in folders for record in read_study(folder)[0])
    held = [entry for entry in hold_out(calibrate(study), "condition") if entry.forecast]
    by_id, fired = {entry.record_id: entry for entry in study.records}, []
    for entry in held:
        machine = entry.cell.query.machine
        others = [apart for apart in held if apart.cell.query.machine == machine]
        scores = scores_of(apart for apart in others if apart is not entry)
        if len(scores) >= FEWEST_HELD_OUT:
            record = by_id[entry.cell.record_ids[0]]
            low, high = interval(entry.forecast, conformal(scores))
            ends = {"low": low, "high": high, "level": LEVEL, "made_at": 0.0}
            metrics = record.metrics | {"step/ms_median": entry.step_ms}  # of all its runs
            answer = asdict(entry.forecast) | ends
            judged = judge(replace(record, predicted=answer, metrics=metrics), LIMITS)
            fired.append("unexplained" in judged.codes)
    assert len(fired) >= 20 and sum(fired) <= allowed(len(fired))


def test_nothing_is_claimed_with_fewer_than_ten_cells():
    nine = ForecastMachine().calibrate(batches=(64, 128, 192))
    record = planted(nine, (0, 1, 2, 3), slow_rank=2.0)
    assert record.predicted["held_out"] == FEWEST_HELD_OUT - 1 and record.predicted["low"] is None
    assert record.validity.codes == {} and recorded_forecast(record).error > 0.5
    assert "unexplained" in judge(record, LIMITS).not_applicable


def test_cells_of_one_gpu_are_forecast_without_an_error(calibrated):
    record = planted(calibrated, (1,))
    assert record.predicted["low"] is None and record.predicted["held_out"] == 0
    words = "forecasts for one GPU, or without an exchange, are not cross-validated"
    assert any(words in sentence for sentence in record.predicted["why"])
    assert "no error was claimed" in judge(record, LIMITS).not_applicable["unexplained"]
    assert recorded_forecast(record).error == pytest.approx(0, abs=0.01)


def test_errors_on_another_machine_or_of_a_new_model_are_no_errors_of_this_cell(calibrated):
    last, elsewhere = calibrated.known[-1], []
    for record in calibrated.known:
        elsewhere.append(replace(record, environment={**record.environment, "host": "another"}))
    forecasts = Forecasts("auto", lambda job: job())
    for known, held_out in ((elsewhere, 0), ([*elsewhere, *calibrated.known], 12)):
        forecasts.learn(known)
        answer = forecasts.before(last.cell, last.environment, known)
        assert answer["step_ms"] > 0 and answer["held_out"] == held_out
        assert (answer["low"] is None) == (held_out == 0)
    first = calibrated.known[0]
    alone = replace(first.cell, precision="fp32")
    record = replace(first, cell=alone, cell_key=alone.key, record_id="f" * 32)
    request = replace(
        last.cell, strategy={"name": "none"}, precision="fp32", batch_size=alone.batch_size
    )
    answer = calibrated.forecasts.before(request, last.environment, [*calibrated.known, record])
    assert answer["step_ms"] > 0 and answer["low"] is None, "nobody measured several GPUs so"


def test_a_cell_outside_its_interval_stays_among_the_scores(calibrated):
    """Else the next intervals would be those of cells that fitted."""
    record = planted(calibrated, gb_per_s=5.0)
    assert record.validity.verdict == "suspect" and not any_doubtful([record])
    scores = scores_by_machine(Study.of([*calibrated.known, record]))
    assert {key[0]: len(values) for key, values in scores.items()}["condition"] == 13
    noisy = Validity("suspect", {"unexplained": "", "noisy": ""})
    assert any_doubtful([replace(record, validity=noisy)])
    assert {check.code for check in CHECKS if check.severity == "finding"} <= {*FINDINGS}


REFUSED = {
    "no model": ("model", "none", "trains nothing"),
    "another model": ("model", "alexnet", "no run of the study that trains alexnet like this"),
    "another strategy": ("strategy", {"name": "mine"}, "it is not known how mine sends"),
    "an unknown wire": ("nccl", {"NCCL_P2P_LEVEL": "LOC"}, "over host memory was measured"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_no_forecast_is_possible_one_sentence_says_why(calibrated, name):
    field, value, sentence = REFUSED[name]
    last = calibrated.known[-1]
    if field == "model":
        value = replace(last.cell.model, name=value, builder=value)
    request = replace(last.cell, **{field: value})
    answer = calibrated.forecasts.before(request, last.environment, calibrated.known)
    assert sentence in answer["refused"] and "\n" not in answer["refused"]
    assert "step_ms" not in answer and answer["made_at"] > 0
    record = with_forecast(make_record(predicted=answer))
    assert recorded_forecast(record) is None
    assert "unexplained" in judge(record, LIMITS).not_applicable


def test_whatever_the_records_hold_a_cell_is_measured(calibrated, monkeypatch):
    def broken(*_):
        raise LookupError("planted")

    for name in ("forecast_before", "scores_by_machine"):
        monkeypatch.setattr(f"analysis.prediction.forecast.{name}", broken)
    last = calibrated.known[-1]
    calibrated.forecasts.learn(calibrated.known)
    answer = calibrated.forecasts.before(last.cell, last.environment, calibrated.known)
    assert answer["refused"] == "the forecast failed (LookupError: planted)"


def test_without_predict_nothing_is_forecast_and_nothing_is_done():
    forecasts, last = Forecasts(False, lambda job: pytest.fail("a job")), make_record()
    forecasts.prepare([last])
    forecasts.learn([last])
    assert forecasts.before(last.cell, {}, [last]) == {} == last.predicted
    assert with_forecast(last) is last and about_forecasts([last]) == ""


@pytest.mark.parametrize(("share", "fires"), [(0.001, True), (0.2, False)])
def test_a_run_that_scatters_much_contradicts_no_forecast(calibrated, share, fires):
    record = planted(calibrated, gb_per_s=10.0)
    step = record.metrics["step/ms_median"]
    within = {"step/ms_median": {"low": step * (1 - share), "high": step * (1 + share)}}
    record = replace(record, within_run=within)
    assert ("unexplained" in judge(record, LIMITS).codes) == fires
    assert not recorded_forecast(record).inside


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.003), (0.2, 0.2 / 1.96)])
def test_a_step_is_known_no_better_than_the_run_that_it_is_from(calibrated, share, expected):
    """Measured once, its deviation was 0.3 % on noisy CPU workers too."""
    record = calibrated.known[0]
    step = record.metrics["step/ms_median"]
    within = {"step/ms_median": {"low": step * (1 - share), "high": step * (1 + share)}}
    (cell,) = calibrate(Study.of([replace(record, within_run=within)])).cells
    assert deviation(cell.step_ms) / step == pytest.approx(expected, rel=0.1)


def test_a_forecast_that_came_late_counts_for_nothing(calibrated):
    record = planted(calibrated, gb_per_s=5.0)
    late = replace(record, started_at=record.predicted["made_at"] - 1e-3)
    assert "not written before" in judge(late, LIMITS).unchecked["unexplained"]


DAMAGED = [{"step_ms": value} for value in ("fast", math.nan, -1.0, 10**400)]
DAMAGED += [{"null_step_ms": 0}, {"low": []}, {"level": 7}, {"made_at": None}, {}]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_forecast_is_none(calibrated, damaged):
    record = planted(calibrated, gb_per_s=5.0)
    predicted = record.predicted | damaged if damaged else {"unknown": 1}
    record = with_forecast(replace(record, predicted=predicted))
    assert "unexplained" not in judge(record, LIMITS).codes and cell_numbers(record, {})
    assert project(replace(record, record_id="0" * 32, sweep_id="1" * 32)).tags
    assert about_forecasts([record]) == "" or not damaged.keys() & {"step_ms", "null_step_ms"}


def test_tables_show_the_forecast_beside_what_was_measured(calibrated):
    slow, sound = (planted(calibrated, noise=0.0, gb_per_s=gb_per_s) for gb_per_s in (10.0, 20.0))
    assert cell_numbers(slow, {})["predicted"].endswith("% longer")
    assert with_unit("predicted", "9,341, step as long").endswith("d 9,341, step as long")
    step = sound.metrics["step/ms_median"]
    ends = {"low": 0.0, "high": 0.999 * step, "step_ms": step / 1.0001}
    narrow = replace(sound, predicted=sound.predicted | ends)
    assert "measured 0.010 % slower than forecast" in judge(narrow, LIMITS).codes["unexplained"]
    words = about_forecasts([slow, sound, make_record()])
    assert words.startswith("2 of 2 runs before they ran")
    assert words.endswith("; 1 of 2 outside the 90 % prediction intervals")


# --- the report's section


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
    wide = replace(first, predicted=outside)
    (table,) = section(Study.of([*machine.known, wide])).tables
    assert table.marked == {0} and table.to_json()[0]["inside"] == "no"
    late = replace(first, predicted={**first.predicted, "made_at": first.started_at + 1})
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
    changed = replace(first, predicted={**first.predicted, **ends})
    (table,) = section(Study.of([*machine.known, changed])).tables
    (row,) = table.to_json()
    assert row["forecast_ms_low"] == pytest.approx(shown * step_ms)
