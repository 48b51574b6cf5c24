"""Efficiency: terminal, MLflow and report show one value, also after a baseline that came later."""

import dataclasses
import io
import math

import numpy as np
import pytest
from rich.console import Console
from simulate import Simulator, Truth

from analysis.findings.baselines import (
    BASELINES,
    EFFICIENCY,
    NOISE,
    Baselines,
    Efficiency,
    stated_efficiency,
)
from analysis.findings.communication import (
    EXPOSED,
    HIDDEN,
    rests_on,
    values_from_baselines,
    values_of,
    with_values,
)
from analysis.findings.examine import findings_of
from analysis.report.build import examine
from analysis.report.cell_numbers import cell_numbers
from analysis.report.numbers import number
from analysis.study.study import Study, open_study
from analysis.verification.verify_study import verify
from benchmarks import record as records
from benchmarks.record import CellFolder, read
from conf.schema import Tracking
from launch.display.screen import Screen
from launch.plan.order import PlannedCell
from launch.study import study_folder
from launch.study.study_folder import ProcessIdentity, Sweep
from launch.tracking.tracker import MlflowWriter, sync

EARLY, LATE = "a" * 32, "b" * 32


def costing(record, ms, others=None):
    """The record with what its strategy costs a step."""
    ends = {"strategy/cost_ms": {"low": ms - 0.01, "high": ms + 0.01}}
    metrics = record.metrics | {"strategy/cost_ms": ms} | (others or {})
    return dataclasses.replace(record, metrics=metrics, within_run=record.within_run | ends)


@pytest.fixture
def made():
    """A pair, and its baselines: measured later, in another sweep. GPU 1 ran twice."""
    simulator = Simulator(seed=3)
    pair = dataclasses.replace(simulator.record((0, 1)), sweep_id=EARLY)
    pair = costing(pair, 0.7, {"comm/exchange_ms": 1.0})
    alone = [simulator.record((0,)), simulator.record((1,)), simulator.record((1,), repeat=1)]
    alone = [costing(one, 0.5) for one in alone]
    return pair, [dataclasses.replace(one, sweep_id=LATE, cell_key=one.cell.key) for one in alone]


def write(study, record):
    folder = CellFolder(study / record.cell.folder)
    folder.path.mkdir(parents=True)
    records.write(folder, record)


def measure(study, sweep_id, own, known, done_before=()):
    """Write records and project them, as a sweep does that measures them."""
    asked, began, process = [f"sweep={sweep_id[0]}"], own[0].started_at, ProcessIdentity.own()
    sweep = Sweep(sweep_id, study.name, asked, began, len(own), process)
    order = [one.cell.folder for one in own]
    study.note("sweep", sweep_id=sweep_id, overrides=asked, order=order)
    writer = MlflowWriter(Tracking(), study, sweep, Console(file=io.StringIO()))
    writer.open()
    for record in own:
        write(study.folder, record)
        writer.log(record)
    writer.close(own, done_before, [*known, *own], stopping=lambda: False, report=None)
    assert not writer._failed
    return writer._tracker


def efficiencies(records):
    """{record id: efficiency} of a study."""
    values = values_of(records)
    return {one: values[one][EFFICIENCY] for one in values if EFFICIENCY in values[one]}


def in_mlflow(tracker, metric=EFFICIENCY):
    """({record id: a metric}, {sweep id: table}) of the store."""
    shares, tables = {}, {}
    for run in tracker._client.search_runs([tracker._experiment]):
        tags = run.data.tags
        if "mlflow.parentRunId" in tags:
            shares[tags["ringside.record_id"]] = run.data.metrics.get(metric)
        else:
            tables[tags["ringside.sweep_id"]] = tags["mlflow.note.content"]
    return shares, tables


def with_efficiency(tracker):
    """The only run of the store that has an efficiency."""
    runs = tracker._client.search_runs([tracker._experiment])
    (run,) = [run for run in runs if EFFICIENCY in run.data.metrics]
    return run


def on_terminal(every, column="efficiency"):
    """A column of the first cell as the table shows it after all were measured."""
    screen = Screen([PlannedCell(one.cell) for one in every], [], Console(file=io.StringIO()))
    with screen:
        for number, record in enumerate(every):
            screen.settle(number, record.state, record)
    return screen._numbers[0][column]


def test_a_baseline_that_comes_later_gives_every_place_the_same_value(made, output_dir):
    pair, alone = made
    last = Simulator(seed=9).record((1,), repeat=-2, drift=True, factor=0.67)  # takes no part
    drift = {"record_id": "d" * 32, "sweep_id": LATE, "cell_key": last.cell.key}
    alone = [*alone, dataclasses.replace(last, **drift)]
    every = [pair, *alone]
    study = study_folder.StudyFolder(str(output_dir), "late")
    assert with_values(pair, []) == pair, "without a baseline a record has no efficiency"
    tracker = measure(study, EARLY, [pair], [])
    shares, tables = in_mlflow(tracker)
    assert shares == {pair.record_id: None} and "%" not in tables[EARLY].split("|")[-6]
    tracker = measure(study, LATE, alone, [pair])
    assert in_mlflow(tracker)[0][pair.record_id] is None, "written when a sweep ends, and by sync"
    sync(study.folder)
    sync(study.folder)
    of_run = (with_efficiency(tracker).info.run_id, EFFICIENCY)
    assert len(tracker._client.get_metric_history(*of_run)) == 1, "twice changes nothing"

    rate, *rates = (one.metrics["throughput/images_per_second"] for one in every)
    slowest = min(rates[0], math.sqrt(rates[1] * rates[2]))
    share = efficiencies(every)[pair.record_id]
    assert share == pytest.approx(rate / (2 * slowest), rel=1e-12)
    points = []
    for curve in findings_of(open_study(study.folder)).scaling.curves:
        points += [one.efficiency.value for one in curve.points if one.world_size == 2]
    assert points == [share]
    report, _ = examine(study.folder)
    (table,) = [one for section in report.sections for one in section.tables if one.name == "cells"]
    columns = [column.key for column in table.columns]
    values = values_of(every)[pair.record_id]
    assert values[EXPOSED] == pytest.approx(0.2) and values[HIDDEN] == pytest.approx(0.8)
    for name, key, column, text in (
        (EFFICIENCY, "efficiency", "efficiency", f"{100 * share:.1f} %"),
        (EXPOSED, "exposed_ms", "exposed ms", "0.200"),
        (HIDDEN, "hidden_share", "hidden", "80 %"),
    ):
        assert in_mlflow(tracker, name)[0][pair.record_id] == values[name]
        assert [row[columns.index(key)] for row in table.rows] == [values[name], *[None] * 4]
        assert on_terminal(every, column) == text
    written = read(CellFolder(study.folder / pair.cell.folder).record)
    assert written == pair, "the record stays as it was written"


def test_the_table_of_a_sweep_has_the_cells_that_were_done_before_it(made, output_dir):
    """A sweep that resumed a cell has it in its table; sync brings its efficiency up to date."""
    pair, alone = made
    study = study_folder.StudyFolder(str(output_dir), "late")
    done = dataclasses.replace(alone[0], sweep_id="c" * 32)
    measure(study, "c" * 32, [done], [])
    own = with_values(pair, [done])
    tracker = measure(study, EARLY, [own], [done], [done])
    shares, tables = in_mlflow(tracker)
    assert shares[own.record_id] == own.metrics[EFFICIENCY]
    assert with_efficiency(tracker).data.tags["efficiency.of"] == "GPU 0"
    assert tables[EARLY].count("GPU\N{NO-BREAK SPACE}0") == 1
    assert sum(line.startswith("| ") for line in tables[EARLY].splitlines()) == 4
    measure(study, LATE, alone[1:], [done, own])
    sync(study.folder)
    share = efficiencies([done, own, *alone[1:]])[own.record_id]
    assert in_mlflow(tracker)[0][own.record_id] == share != own.metrics[EFFICIENCY]
    assert with_efficiency(tracker).data.tags["efficiency.of"] == "every GPU"


def test_a_record_names_the_baselines_of_its_efficiency(made, tmp_path):
    """What it states can be computed again from them, whatever was measured since."""
    pair, alone = made
    own = with_values(pair, alone[:2])
    assert own.checks[BASELINES] == {"0": [alone[0].record_id], "1": [alone[1].record_id]}
    assert own.metrics[EFFICIENCY] != efficiencies([pair, *alone])[pair.record_id]
    for wrong in ({}, {EFFICIENCY: 0.5}, {HIDDEN: 0.9}):
        study = tmp_path / "-".join(["study", *wrong]).replace("/", "_")
        for one in (dataclasses.replace(own, metrics=own.metrics | wrong), *alone):
            write(study, one)
        differences = []
        for one in verify(study).differences:
            if one.field.startswith("metrics "):  # records of the simulator have names of their own
                differences.append((one.recorded, one.recomputed))
        assert differences == [(value, own.metrics[name]) for name, value in wrong.items()]
    CellFolder(study / alone[0].cell.folder).record.unlink()
    unknown = {f"metrics {name}" for name in (EFFICIENCY, EXPOSED, HIDDEN)}
    assert unknown <= verify(study).not_compared.keys()


def test_a_record_that_is_invalid_or_replaced_has_an_efficiency_and_is_no_baseline():
    simulator = Simulator(seed=1)
    alone = [simulator.record((0,)), simulator.record((1,), verdict="invalid")]
    invalid = simulator.record((0, 1), verdict="invalid")
    found = efficiencies([*alone, invalid])
    rate, first = (one.metrics["throughput/images_per_second"] for one in (invalid, alone[0]))
    assert found == {invalid.record_id: pytest.approx(rate / 2 / first)}
    assert Study.of([*alone, invalid]).timed[0].gpus == (0,)


def baseline_cells(draw, rates, noise, repeats):
    """Repeats of each GPU alone, and all together without noise."""
    nothing = {"overhead_ms": 0, "contention_ms": 0, "exposed_ms": 0, "noise": 0.0}
    simulator, made = Simulator(Truth(alone_ms=(54.0,) * 8, **nothing)), []
    for repeat in range(repeats):
        for gpu, rate in enumerate(rates):
            factor = rate * math.exp(draw.normal(0, noise))
            made.append(simulator.record((gpu,), repeat=repeat, factor=factor))
    return simulator.record(tuple(range(len(rates)))), made


def bias(seed, rates, noise, repeats=2, studies=60):
    """How far the mean efficiency is from 1, in noises, and how far that of the plain minimum."""
    draw, ours, plain = np.random.default_rng(seed), [], []
    for _ in range(studies):
        subset, alone = baseline_cells(draw, rates, noise, repeats)
        study = Study.of([subset, *alone])
        members = Baselines(study).of_members(study.single(subset))
        ours.append(Baselines(study).efficiency(subset) * min(rates))
        plain.append(math.exp(-min(one.median_log_rate for one in members.values())) * min(rates))
    rate = subset.metrics["throughput/images_per_second"] / len(rates)
    return (np.mean(ours) - 1) / noise, (np.mean(plain) * rate - 1) / noise


def test_the_slowest_of_equal_gpus_does_not_make_the_efficiency_too_high():
    for noise in (0.0013, 0.01):
        ours, plain = bias(1, (1.0,) * 4, noise)
        assert plain > 0.6, "what the minimum does"
        assert abs(ours) < 0.35
    ours, plain = bias(2, (1.0, 0.97), 0.0013)
    assert abs(ours) < 0.25, "a GPU that is slower is the slowest"


@pytest.mark.parametrize("other", [{"strategy": "kvstore_device"}, {"batch_size": 16}])
def test_runs_of_another_strategy_or_batch_lend_no_noise(other):
    quiet, noisy = (Simulator(Truth(noise=noise), seed=9) for noise in (0.001, 0.2))
    made = [quiet.record((0,), repeat=repeat) for repeat in range(4)]
    made += [noisy.record((0,), repeat=repeat, **other) for repeat in range(4)]
    study = Study.of(made)
    assert Baselines(study).noise(study.single(made[0])) < 0.003
    assert Baselines(study).noise(study.single(made[-1])) > 0.03


def test_a_record_states_what_verify_computes_again_with_the_noise_of_its_study():
    simulator, known = Simulator(Truth(noise=0.004), seed=8), []
    for repeat in range(3):
        known += [simulator.record((gpu,), repeat=repeat) for gpu in (0, 1)]
    known.append(simulator.record((0,), repeat=-3, drift=True, factor=0.67))
    own = with_values(simulator.record((0, 1)), known)
    share = own.metrics[EFFICIENCY]
    assert share == values_of([*known, own])[own.record_id][EFFICIENCY]
    rates = [one.metrics["throughput/images_per_second"] for one in known if not one.drift]
    slowest = own.metrics["throughput/images_per_second"] / 2 / share
    assert min(rates) <= slowest <= max(rates), "without the drift run"
    others = [one for one in known if one.record_id in rests_on(own)]
    assert len(others) == 6 and values_from_baselines(own, others)[EFFICIENCY] == share
    without_noise = dataclasses.replace(own, checks=own.checks | {NOISE: 0.0})
    assert values_from_baselines(without_noise, others)[EFFICIENCY] > share


def test_an_efficiency_of_some_members_says_of_which_wherever_it_is_shown(tmp_path):
    simulator = Simulator(seed=4)
    alone, other = simulator.record((0,)), simulator.record((1,))
    pair = with_values(simulator.record((0, 1)), [alone])
    share = values_of([pair, alone])[pair.record_id][EFFICIENCY]
    assert (
        share.of == (0,)
        and stated_efficiency(pair).of == (0,)
        and share == pair.metrics[EFFICIENCY]
    )
    shown = f"{100 * share:.1f} % against GPU 0"
    assert on_terminal([pair, alone]) == shown
    assert on_terminal([pair, alone, other]).endswith(" %"), "the mark goes with the other"
    unbroken = shown.replace(" ", "\N{NO-BREAK SPACE}")
    assert cell_numbers(pair, {})["efficiency"] == unbroken == number(share, "share")
    for one in (pair, alone):
        write(tmp_path, one)
    marks = set()
    for section in examine(tmp_path)[0].sections:
        cells = (cell for table in section.tables for row in table.rows for cell in row)
        marks |= {cell.mark for cell in cells if isinstance(cell, Efficiency)}
    assert marks == {"against GPU 0"}
