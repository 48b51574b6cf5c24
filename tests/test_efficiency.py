"""One algorithm computes efficiency: terminal, MLflow and report show one value, also after a baseline that came later."""

import dataclasses
import io
import math
import types

import numpy as np
import pytest
from rich.console import Console
from simulate import Simulator, Truth

from analysis.findings.baselines import BASELINES, EFFICIENCY, NOISE, Baselines, stated
from analysis.findings.communication import EXPOSED, HIDDEN
from analysis.findings.examine import findings_of
from analysis.findings.record_values import again, rests_on, values_of, with_values
from analysis.report.build import examine
from analysis.report.cell_numbers import cell_numbers
from analysis.report.numbers import number
from analysis.study.estimates import Efficiency
from analysis.study.study import Study, open_study
from analysis.verification.verify import verify
from benchmarks import record as records
from benchmarks.record import CellFolder, read
from conf.schema import Tracking
from launch.display.screen import Screen
from launch.plan.order import PlannedCell
from launch.study import study as studies
from launch.study.identity import ProcessIdentity, Sweep
from launch.tracking.sync import sync
from launch.tracking.tracker import MlflowWriter

EARLY, LATE = "a" * 32, "b" * 32


def costing(record, ms, others=types.MappingProxyType({})):
    """The record with what its strategy costs a step."""
    ends = {"strategy/cost_ms": {"low": ms - 0.01, "high": ms + 0.01}}
    return dataclasses.replace(
        record,
        metrics=record.metrics | {"strategy/cost_ms": ms, **others},
        within_run=record.within_run | ends,
    )


@pytest.fixture
def made():
    """A pair, and the one-GPU cells that are its baselines: measured later, in another sweep. GPU 1 ran twice."""
    simulator = Simulator(seed=3)
    pair = costing(
        dataclasses.replace(simulator.record((0, 1)), sweep_id=EARLY),
        0.7,
        {"comm/exchange_ms": 1.0},
    )
    alone = [simulator.record((0,)), simulator.record((1,)), simulator.record((1,), repeat=1)]
    alone = [costing(one, 0.5) for one in alone]
    return pair, [dataclasses.replace(one, sweep_id=LATE, cell_key=one.cell.key) for one in alone]


def measure(study, sweep_id, own, known, done_before=()):
    """Write records and project them, as a sweep does that measures them."""
    sweep = Sweep(
        sweep_id,
        study.name,
        [f"sweep={sweep_id[0]}"],
        own[0].started_at,
        len(own),
        ProcessIdentity.own(),
    )
    study.note(
        "sweep",
        sweep_id=sweep_id,
        overrides=sweep.overrides,
        order=[one.cell.folder for one in own],
    )
    writer = MlflowWriter(Tracking(), study, sweep, Console(file=io.StringIO()))
    writer.open()
    for record in own:
        folder = CellFolder(study.folder / record.cell.folder)
        folder.path.mkdir()
        records.write(folder, record)
        writer.log(record)
    writer.close(own, done_before, [*known, *own], stopping=lambda: False, report=None)
    assert not writer._failed
    return writer._tracker


def efficiencies(records):
    """{record id: efficiency} of a study."""
    return {
        one: values[EFFICIENCY]
        for one, values in values_of(records).items()
        if EFFICIENCY in values
    }


def in_mlflow(tracker, metric=EFFICIENCY):
    """({record id: a metric}, {sweep id: table}) of the store."""
    runs = tracker._client.search_runs([tracker._experiment])
    shares = {run.data.tags["ringside.record_id"]: run.data.metrics.get(metric)
              for run in runs if "mlflow.parentRunId" in run.data.tags}  # fmt: skip
    tables = {run.data.tags["ringside.sweep_id"]: run.data.tags["mlflow.note.content"]
              for run in runs if "mlflow.parentRunId" not in run.data.tags}  # fmt: skip
    return shares, tables


def efficiency_of(tracker):
    """The GPUs that the only efficiency of the store is against."""
    (run,) = [
        one
        for one in tracker._client.search_runs([tracker._experiment])
        if EFFICIENCY in one.data.metrics
    ]
    return run.data.tags["efficiency.of"]


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
    alone = [
        *alone,
        dataclasses.replace(last, record_id="d" * 32, sweep_id=LATE, cell_key=last.cell.key),
    ]
    study = studies.StudyFolder(str(output_dir), "late")
    first = with_values(pair, [])
    assert first == pair, "without a baseline a record has no efficiency"
    tracker = measure(study, EARLY, [pair], [])
    shares, tables = in_mlflow(tracker)
    assert shares == {pair.record_id: None} and "%" not in tables[EARLY].split("|")[-6]
    tracker = measure(study, LATE, alone, [pair])
    assert in_mlflow(tracker)[0][pair.record_id] is None, (
        "values are written when a sweep ends, and by sync"
    )
    sync(study.folder)

    slowest = math.sqrt(
        alone[1].metrics["throughput/images_per_second"]
        * alone[2].metrics["throughput/images_per_second"]
    )
    slowest = min(slowest, alone[0].metrics["throughput/images_per_second"])
    share = efficiencies([pair, *alone])[pair.record_id]
    assert share == pytest.approx(
        pair.metrics["throughput/images_per_second"] / (2 * slowest), rel=1e-12
    )

    assert in_mlflow(tracker)[0][pair.record_id] == share
    (point,) = [
        one
        for curve in findings_of(open_study(study.folder)).scaling.curves
        for one in curve.points
        if one.world_size == 2
    ]
    assert point.efficiency.value == share
    report, _ = examine(study.folder)
    (table,) = [one for section in report.sections for one in section.tables if one.name == "cells"]
    place = [column.key for column in table.columns].index("efficiency")
    assert [row[place] for row in table.rows] == [share, *[None] * 4]
    values = values_of([pair, *alone])[pair.record_id]
    assert values["comm/exposed_ms"] == pytest.approx(0.2) and values[
        "comm/hidden_share"
    ] == pytest.approx(0.8)
    for name, key, column, text in (
        ("comm/exposed_ms", "exposed_ms", "exposed ms", "0.200"), ("comm/hidden_share", "hidden_share", "hidden", "80 %"),
    ):  # fmt: skip
        assert in_mlflow(tracker, name)[0][pair.record_id] == values[name]
        place = [one.key for one in table.columns].index(key)
        assert [row[place] for row in table.rows] == [values[name], *[None] * 4]
        assert on_terminal([pair, *alone], column) == text
    shown = f"{100 * share:.1f} %"
    assert on_terminal([pair, *alone]) == shown

    assert read(CellFolder(study.folder / pair.cell.folder).record) == pair, (
        "the record stays as it was written"
    )


def test_sync_brings_a_store_up_to_date_and_twice_changes_nothing(made, output_dir):
    pair, alone = made
    study = studies.StudyFolder(str(output_dir), "late")
    tracker = measure(study, EARLY, [pair], [])
    for record in alone:
        folder = CellFolder(study.folder / record.cell.folder)
        folder.path.mkdir()
        records.write(folder, record)
    assert sync(study.folder).projected == 3
    share = efficiencies([pair, *alone])[pair.record_id]
    assert in_mlflow(tracker)[0][pair.record_id] == share
    (run,) = [
        one
        for one in tracker._client.search_runs([tracker._experiment])
        if EFFICIENCY in one.data.metrics
    ]
    sync(study.folder)
    assert len(tracker._client.get_metric_history(run.info.run_id, EFFICIENCY)) == 1


def test_the_table_of_a_sweep_has_the_cells_that_were_done_before_it(made, output_dir):
    """A sweep that resumed a cell has it in its table; sync brings its efficiency up to date."""
    pair, alone = made
    study = studies.StudyFolder(str(output_dir), "late")
    done = dataclasses.replace(alone[0], sweep_id="c" * 32)
    measure(study, "c" * 32, [done], [])
    own = with_values(pair, [done])
    tracker = measure(study, EARLY, [own], [done], [done])
    shares, tables = in_mlflow(tracker)
    assert shares[own.record_id] == own.metrics[EFFICIENCY] and efficiency_of(tracker) == "GPU 0"
    assert tables[EARLY].count("GPU\N{NO-BREAK SPACE}0") == 1
    assert sum(line.startswith("| ") for line in tables[EARLY].splitlines()) == 4
    measure(study, LATE, alone[1:], [done, own])
    sync(study.folder)
    share = efficiencies([done, own, *alone[1:]])[own.record_id]
    assert in_mlflow(tracker)[0][own.record_id] == share != own.metrics[EFFICIENCY]
    assert efficiency_of(tracker) == "every GPU"


def test_a_record_names_the_baselines_of_its_efficiency(made, tmp_path):
    """What it states can be computed again from them, whatever was measured since."""
    pair, alone = made
    own = with_values(pair, alone[:2])
    assert own.checks[BASELINES] == {"0": [alone[0].record_id], "1": [alone[1].record_id]}
    assert own.metrics[EFFICIENCY] != efficiencies([pair, *alone])[pair.record_id]
    for place, (own_now, recorded, differences) in enumerate((
        (own, alone, []),
        (dataclasses.replace(own, metrics=own.metrics | {EFFICIENCY: 0.5}), alone, [(0.5, own.metrics[EFFICIENCY])]),
        (dataclasses.replace(own, metrics=own.metrics | {HIDDEN: 0.9}), alone, [(0.9, own.metrics[HIDDEN])]),
    )):  # fmt: skip
        study = tmp_path / str(place)
        for one in (own_now, *recorded):
            (study / one.record_id).mkdir(parents=True)
            records.write(CellFolder(study / one.record_id), one)
        found = verify(study)
        assert [(one.recorded, one.recomputed) for one in found.differences] == differences
    for one in alone[:1]:
        CellFolder(study / one.record_id).record.unlink()
    assert {f"metrics {name}" for name in (EFFICIENCY, EXPOSED, HIDDEN)} <= verify(
        study
    ).not_compared.keys()


def test_a_record_that_is_invalid_or_replaced_has_an_efficiency_and_is_no_baseline():
    simulator = Simulator(seed=1)
    alone = [simulator.record((0,)), simulator.record((1,), verdict="invalid")]
    invalid = simulator.record((0, 1), verdict="invalid")
    found = efficiencies([*alone, invalid])
    rate, first = (one.metrics["throughput/images_per_second"] for one in (invalid, alone[0]))
    assert found == {invalid.record_id: pytest.approx(rate / 2 / first)}
    assert Study.of([*alone, invalid]).timed[0].gpus == (0,)


# The slowest of noisy baselines.


def baseline_cells(draw, rates, noise, repeats):
    """Repeats of each GPU alone and of all together; the pair's rate is without noise, so its efficiency shows the baseline's."""
    simulator = Simulator(
        Truth(alone_ms=(54.0,) * 8, overhead_ms=0, contention_ms=0, exposed_ms=0, noise=0.0)
    )
    gpus = tuple(range(len(rates)))
    made = [
        simulator.record((gpu,), repeat=repeat, factor=rate * math.exp(draw.normal(0, noise)))
        for repeat in range(repeats)
        for gpu, rate in enumerate(rates)
    ]
    return simulator.record(gpus), made


def bias(seed, rates, noise, repeats=2, studies=60):
    """How far the mean efficiency is from 1, as a share of the noise, and how far that of the plain minimum is."""
    draw, ours, plain = np.random.default_rng(seed), [], []
    for _ in range(studies):
        subset, alone = baseline_cells(draw, rates, noise, repeats)
        study = Study.of([subset, *alone])
        members = Baselines(study).of(study.single(subset))
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


def test_without_repeats_the_slowest_counts_as_it_is():
    simulator = Simulator(seed=2)
    alone = [simulator.record((gpu,)) for gpu in (0, 1)]
    pair = simulator.record((0, 1))
    rates = [one.metrics["throughput/images_per_second"] for one in (*alone, pair)]
    assert values_of([pair, *alone])[pair.record_id][EFFICIENCY] == pytest.approx(
        rates[2] / 2 / min(rates[:2]), rel=1e-12
    )


def test_a_record_states_what_verify_computes_again_with_the_noise_of_its_study():
    simulator, known = Simulator(Truth(noise=0.004), seed=8), []
    for repeat in range(3):
        known += [simulator.record((gpu,), repeat=repeat) for gpu in (0, 1)]
    known.append(simulator.record((0,), repeat=-3, drift=True, factor=0.67))
    own = with_values(simulator.record((0, 1)), known)
    share = own.metrics[EFFICIENCY]
    assert share == values_of([*known, own])[own.record_id][EFFICIENCY]
    rates = [one.metrics["throughput/images_per_second"] for one in known if not one.drift]
    assert min(rates) <= own.metrics["throughput/images_per_second"] / 2 / share <= max(rates), (
        "without the drift run"
    )
    others = [one for one in known if one.record_id in rests_on(own)]
    assert len(others) == 6 and again(own, others)[EFFICIENCY] == share
    assert (
        again(dataclasses.replace(own, checks=own.checks | {NOISE: 0.0}), others)[EFFICIENCY]
        > share
    )


def test_an_efficiency_of_some_members_says_of_which_wherever_it_is_shown(tmp_path):
    simulator = Simulator(seed=4)
    alone, other = simulator.record((0,)), simulator.record((1,))
    pair = with_values(simulator.record((0, 1)), [alone])
    share = values_of([pair, alone])[pair.record_id][EFFICIENCY]
    assert share.of == (0,) and stated(pair).of == (0,) and share == pair.metrics[EFFICIENCY]
    shown = f"{100 * share:.1f} % against GPU 0"
    assert on_terminal([pair, alone]) == shown
    assert on_terminal([pair, alone, other]).endswith(" %"), (
        "once the other is measured, the mark goes"
    )
    assert [cell_numbers(pair, {})["efficiency"], number(share, "share")] == [
        shown.replace(" ", "\N{NO-BREAK SPACE}")
    ] * 2
    for one in (pair, alone):
        folder = CellFolder(tmp_path / one.cell.folder)
        folder.path.mkdir()
        records.write(folder, one)
    report, _ = examine(tmp_path)
    found = {cell.mark for section in report.sections for table in section.tables for row in table.rows for cell in row
             if isinstance(cell, Efficiency)}  # fmt: skip
    assert found == {"against GPU 0"}
