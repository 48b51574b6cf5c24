"""The noise floor: what it is made of, where it is kept, that its intervals hold the next run."""

import dataclasses
import io
import json
import math

import coverage_equal_cells
import numpy as np
import pytest
from build import make_record
from coverage import holds_efficiency, holds_rate, share_held
from rich.console import Console
from scipy.stats import t as student
from simulate import STRATEGY, Simulator, Truth, changed

from analysis.findings.examine import findings_of
from analysis.report.build import examine
from analysis.study.draws import Sample, freedom
from analysis.study.intervals import half_width, interval, names_of, of_median, quantile
from analysis.study.noise_floor import FEWEST, FILE, Floor, floors_of, has_floor, of_other_studies
from analysis.study.runs import median_of
from analysis.study.study import Study
from benchmarks.record import CellFolder, read, write
from conf.cell import SECOND_RUN
from conf.schema import Tracking
from launch.display.screen import Screen
from launch.plan.order import PlannedCell
from launch.study.background import update_noise_floor
from launch.study.study_folder import StudyFolder
from launch.tracking.tracker import Tracker, sync

RATE, COST = "throughput/images_per_second", "strategy/cost_ms"
FLOOR = Floor(0.002, 6, 12, "one")


# The quantile and the interval.


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 12, 45, 300])
def test_students_t_needs_no_scipy(freedom):
    for level in (0.5, 0.95, 0.999):
        assert quantile(freedom, level) == pytest.approx(
            student.ppf((1 + level) / 2, freedom), rel=1e-9
        )


def test_the_variance_of_a_median_is_that_of_drawn_medians():
    draw = np.random.default_rng(0)
    for runs in (1, 2, 3, 4, 5, 8, 15):
        drawn = np.median(draw.normal(size=(40_000, runs)), axis=1).var()
        assert of_median(runs) == pytest.approx(drawn, rel=0.05)


def test_the_interval_of_the_next_run_is_students():
    half = student.ppf(0.975, 6) * 0.002
    assert half_width(FLOOR, 1) == pytest.approx(half * math.sqrt(2))
    assert half_width(FLOOR, 2) == pytest.approx(half * math.sqrt(1.5))
    found, wide = interval([100.0], RATE, FLOOR), half * math.sqrt(2)
    assert found.low == pytest.approx(100 * math.exp(-wide))
    assert found.high == pytest.approx(100 * math.exp(wide))
    cost = interval([0.001], COST, FLOOR)
    assert cost.low < 0, "a difference may be below 0"
    assert cost.high - cost.value == pytest.approx(wide)
    assert interval([-3.0], RATE, FLOOR).low is None, "a rate may not"
    assert interval([100.0, 102.0], RATE, None).low is None
    two = [make_record(metrics={RATE: rate}) for rate in (500.0, 320.0)]
    of_two = (interval([500.0, 320.0], RATE, None).value, median_of(two, RATE))
    assert of_two == pytest.approx((400.0, 400.0)), "one median, as runs are compared"
    assert interval([100.0, 102.0], COST, None).value == 101.0


def test_floors_together_have_the_degrees_of_freedom_of_satterthwaite():
    one, other = Sample(0.0, FLOOR), Sample(0.0, dataclasses.replace(FLOOR, name="two"))
    still = Sample(0.0, dataclasses.replace(FLOOR, name="two", deviation=1e-9))
    assert freedom([one, one]) == pytest.approx(6), "one floor is known no better twice"
    assert freedom([one, other]) == pytest.approx(12)
    assert freedom([one, still]) == pytest.approx(6)
    assert math.isinf(freedom([Sample(0.0)]))


@pytest.mark.parametrize(("runs", "degrees"), [(1, 3), (2, 6), (3, 12)])
def test_the_next_run_is_held_as_often_as_the_interval_says(runs, degrees):
    """Of 1,000 studies 95 % have a standard error of 0.7 %. Runs with 25 % more noise are seen."""
    assert 0.93 <= share_held(holds_rate, runs, degrees, 1000) <= 0.97
    assert 0.93 <= share_held(holds_efficiency, runs, degrees, 1000, gpus=2) <= 0.97
    assert share_held(holds_rate, runs, degrees, 1000, noise=1.25) < 0.93


# The real records.


def test_on_real_gpus_the_interval_holds_a_run_that_it_has_not_seen():
    """The table of `python -m tests.coverage_equal_cells`; the interval inside a process holds under a third."""
    rows = coverage_equal_cells.held()
    rates = {strategy: row for (metric, strategy), row in rows.items() if metric == RATE}
    assert len(rates) == 12 and sum(of for _, of, _ in rates.values()) == 200
    for strategy, (shown, of, _) in rates.items():
        # Of five rates one may lie outside by chance.
        assert shown >= coverage_equal_cells.LEAST_HELD * of - (of < 10), strategy
    for metric in coverage_equal_cells.METRICS:
        of_metric = [row for (name, _), row in rows.items() if name == metric]
        shown, of, _ = np.sum(of_metric, axis=0)
        assert shown >= coverage_equal_cells.LEAST_HELD * of, metric
    shown, of, inside = np.sum(list(rates.values()), axis=0)
    assert inside < of / 3
    page = (coverage_equal_cells.DATA.parents[1] / "benchmarks" / "RESULTS.md").read_text()
    assert f"\n{shown} of {of} rates lie in the interval that an equal cell shows" in page


def test_equal_cells_of_real_gpus_are_not_told_apart_between_studies_nor_inside_one():
    for rows in coverage_equal_cells.verdicts(coverage_equal_cells.STUDIES):
        assert set(rows) >= {"nccl_allreduce", "none"}
        for strategy, (wrong, told) in rows.items():
            assert told >= 10 and wrong <= coverage_equal_cells.MOST_VERDICTS * told, strategy


def test_what_a_lent_floor_counts_for_holds_in_studies_that_it_was_not_chosen_by():
    rows = coverage_equal_cells.held_out_of_sample()
    _, shown, of = np.sum(list(rows.values()), axis=0)
    assert len(rows) >= 5 and of >= 90 and shown >= coverage_equal_cells.LEAST_HELD * of
    assert all(freedom >= FEWEST for freedom, _, _ in rows.values()), "the product has no more"


# What a floor is made of.


def floor_of(records, gpus, metric=RATE, others=None):
    """The floor of the cells on a subset."""
    study = Study.of(records, scatters=others)
    return next(runs for runs in study.runs if runs.gpus == gpus).floor(metric)


def repeated(simulator, gpus, runs, **cell):
    return [simulator.record(gpus, repeat=repeat, **cell) for repeat in range(runs)]


def test_a_floor_is_the_scatter_of_equal_cells_around_their_own_means():
    simulator = Simulator(seed=1)
    first, second = repeated(simulator, (0,), 3), repeated(simulator, (1,), 2)
    drift = [changed(simulator.record((0,), repeat=-3), drift=True)]
    logs = [[math.log(one.metrics[RATE]) for one in cell] for cell in (first + drift, second)]
    squares = sum(np.var(values) * len(values) for values in logs)
    found = floor_of([*first, *second, *drift, simulator.record((2,))], (2,))
    assert (found.freedom, found.runs, found.lent_by) == (4, 6, "")
    assert found.deviation == pytest.approx(math.sqrt(squares / 4))
    replicate = changed(simulator.record((1,), repeat=SECOND_RUN), cell_key="f" * 16)
    once = [simulator.record((1,)), replicate]
    assert [len(runs.records) for runs in Study.of(once).runs] == [2], (
        "a second run is a run of its cell"
    )


def test_few_runs_borrow_from_other_numbers_of_gpus_and_then_from_other_strategies():
    simulator = Simulator(seed=2)
    two, one = repeated(simulator, (0, 1), 2), repeated(simulator, (0,), 3)
    four, none = [simulator.record((0, 1, 2, 3))], [simulator.record((0,), strategy="none")]
    assert floor_of(two + four, (0, 1)) is None, "one degree of freedom, of its own and lent"
    assert floor_of(one, (0,)).freedom == 2 and floor_of(one + four, (0, 1, 2, 3)) is None
    lent = floor_of(two + one + four, (0, 1, 2, 3))
    assert lent.lent_by == f"{STRATEGY} on 1 and 2 GPUs"
    assert (lent.runs, lent.freedom) == (5, 2), "what is lent counts as three runs"
    assert floor_of(two + one, (0,)).lent_by == "", "it has enough of its own"
    stranger = Study.of([*two, *one, *none]).runs[-1]
    assert stranger.strategy == "none" and stranger.floor(RATE).lent_by == lent.lent_by
    for other in ({"precision": "fp32"}, {"optimize": "compile"}, {"batch_size": 64}):
        assert floor_of([*two, *one, simulator.record((1,), **other)], (1,)) is None, other
    elsewhere = changed(four[0], environment=four[0].environment | {"host": "another"})
    assert floor_of([*two, *one, elsewhere], (0, 1, 2, 3)) is None
    steps = []
    for number, record in enumerate(repeated(simulator, (0,), 4)):
        steps.append(changed(record, metrics=record.metrics | {COST: 0.1 * number}))
    deviation = np.std([0, 0.1, 0.2, 0.3], ddof=1)
    assert floor_of(steps, (0,), COST).deviation == pytest.approx(deviation), "in ms: one is 0"
    assert not has_floor("scaling/efficiency")
    assert not has_floor("step/iterations")
    assert has_floor("my/own_number")


def test_a_lent_floor_is_never_below_what_the_runs_show_themselves():
    """The audit's cpu_staged: ±0.97 % of quiet strategies, where the run itself said ±116 %."""
    simulator = Simulator(Truth(noise=0.0005), seed=5)
    lenders = repeated(simulator, (0, 1), 4)
    quiet = simulator.record((0, 1), strategy="none")
    value = quiet.metrics[RATE]
    wide = changed(quiet, within_run={RATE: {"low": 0.8 * value, "high": 1.25 * value}})
    shown = {}
    for name, stranger in (("quiet", quiet), ("wide", wide)):
        runs = Study.of([*lenders, stranger]).runs[-1]
        assert runs.floor(RATE).lent_by == f"{STRATEGY} on 2 GPUs"
        shown[name] = runs.next_run(RATE)
    assert shown["quiet"].low > 0.98 * value
    assert shown["wide"].low < 0.8 * value and shown["wide"].high > 1.25 * value
    apart = [changed(quiet, metrics={RATE: value * factor}) for factor in (1.0, 1.1)]
    apart[1] = changed(apart[1], record_id="9" * 32, cell_key="9" * 16)
    both = Study.of([*lenders, *apart]).runs[-1]
    assert len(both.records) == 2 and both.floor(RATE).deviation > 0.06, "two runs 10 % apart"


def test_suspect_cells_neither_give_nor_take():
    simulator = Simulator(seed=6)
    valid, once = repeated(simulator, (0, 1), 4), simulator.record((2, 3))
    doubted = [doubtful(record) for record in valid]
    assert floor_of([*valid, once], (2, 3)).freedom == 3
    assert floor_of([*doubted, once], (2, 3)) is None, "they give nothing"
    assert floor_of([*valid, doubtful(once)], (2, 3)) is None, "it takes nothing"
    assert floor_of(doubted, (0, 1)).freedom == 3, "what its own runs show stays"
    assert Study.of(doubted).floors.own() == {}


def doubtful(record):
    """A record that a check cast doubt on."""
    validity = dataclasses.replace(record.validity, verdict="suspect", codes={"noisy": "noisy"})
    return changed(record, validity=validity)


def test_a_cost_has_its_interval_and_one_that_may_be_0_says_nothing_of_a_suspect_cell():
    """The audit's −8.60 ms, whose own interval was −52 to +35 ms."""
    record = Simulator(seed=7).record((0, 1))
    cases = {(-8.6, -52.0, 35.0): None, (0.5, 0.4, 0.6): (0.4, 0.6)}
    for (value, low, high), expected in cases.items():
        measured = changed(
            record,
            metrics=record.metrics | {COST: value},
            within_run={COST: {"low": low, "high": high}},
        )
        (runs,), (suspect,) = Study.of([measured]).runs, Study.of([doubtful(measured)]).runs
        assert (runs.next_run(COST).low, runs.next_run(COST).high) == pytest.approx((low, high))
        shown = suspect.next_run(COST)
        assert (shown and (shown.low, shown.high)) == (expected and pytest.approx(expected))


# The file beside the studies.


def test_a_study_is_in_the_file_once_and_reads_the_others(tmp_path):
    simulator, notes = Simulator(seed=3), []
    made = {name: repeated(simulator, (0, 1), 3) for name in ("one", "two")}
    path = tmp_path / FILE
    update_noise_floor(tmp_path / "nothing", [simulator.record((0,))], notes.append)
    assert not path.exists()
    for name in ("one", "two", "one"):
        update_noise_floor(tmp_path / name, made[name], notes.append)
    assert notes == []
    assert list(floors_of(path)) == ["two", "one"]
    assert path.stat().st_mode & 0o077 == 0o044
    assert json.loads(path.read_text())["studies"]["one"][0]["runs"] == 3
    found = floor_of(made["one"], (0, 1), others=of_other_studies(tmp_path / "one"))
    assert (found.freedom, found.runs) == (4, 6)
    assert floor_of(made["one"], (0, 1)).runs == 3, "a folder alone has its own runs"
    update_noise_floor(tmp_path / "one", made["one"][:1], notes.append)
    assert list(floors_of(path)) == ["two"], "runs that are gone"


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"version": 2, "studies": {}}', '{"version": 1, "studies": 3}']
)
def test_a_file_that_cannot_be_read_stays_and_is_named(tmp_path, content):
    notes, made = [], repeated(Simulator(), (0, 1), 3)
    (tmp_path / FILE).write_text(content)
    assert of_other_studies(tmp_path / "one") == {}
    update_noise_floor(tmp_path / "one", made, notes.append)
    assert (tmp_path / FILE).read_text() == content and str(tmp_path / FILE) in notes[0]


WRONG = [{"squares": -1}, {"squares": None}, {"freedom": 3}, {"runs": "9"}, {"world_size": True}]


@pytest.mark.parametrize("wrong", [*WRONG, {"metric": 1}, {"x": 1}])
def test_a_damaged_row_counts_for_nothing(tmp_path, wrong):
    update_noise_floor(tmp_path / "one", repeated(Simulator(), (0, 1), 3), print)
    content = json.loads((tmp_path / FILE).read_text())
    right = len(content["studies"]["one"])
    content["studies"]["one"][0] |= wrong
    content["studies"]["one"].append(7)
    (tmp_path / FILE).write_text(json.dumps(content))
    assert len(of_other_studies(tmp_path / "two")) == right - 1


# Where it is shown.


def test_every_place_shows_the_interval_as_soon_as_its_floor_is_known(output_dir):
    simulator, study = Simulator(seed=4), StudyFolder(str(output_dir), "late")
    record = changed(simulator.record((0, 1)), sweep_id="a" * 32)
    folder = CellFolder(study.folder / record.cell.folder)
    folder.path.mkdir()
    write(folder, record)
    sync(study.folder)
    tracker = Tracker(Tracking(), output_dir, "late")

    def stored():
        runs = tracker._client.search_runs([tracker._experiment])
        (run,) = [run for run in runs if "validity" in run.data.tags]
        return run.info.run_id, [run.data.metrics.get(name) for name in names_of(RATE)]

    def on_terminal():
        console = Console(file=io.StringIO(), width=200)
        floors = of_other_studies(study.folder)
        with Screen([PlannedCell(record.cell)], [], console, floors) as screen:
            screen.settle(0, "finished", record)
        return console.file.getvalue()

    assert stored()[1] == [None] * 3 and "images/s  one run  " in on_terminal()
    update_noise_floor(output_dir / "other", repeated(simulator, (0, 1), 5), print)
    for _ in range(2):
        sync(study.folder)
    run_id, (low, high, runs) = stored()
    floor = floor_of([record], (0, 1), others=of_other_studies(study.folder))
    half, rate = quantile(4) * floor.deviation * math.sqrt(2), record.metrics[RATE]
    assert (low, high) == pytest.approx((rate * math.exp(-half), rate * math.exp(half)))
    assert runs == 5
    history = tracker._client.get_metric_history(run_id, names_of(RATE)[0])
    assert len(history) == 1, "twice changes nothing"
    share = f"±{100 * (high - low) / 2 / rate:.1f}"
    assert share in on_terminal()
    assert "± for the next run (95 %), each from 5 repeated runs" in on_terminal()
    content, findings = examine(study.folder)
    (point,) = findings.scaling.curves[0].points
    assert (point.rate.low, point.rate.high) == (pytest.approx(low), pytest.approx(high))
    tables = [table for section in content.sections for table in section.tables]
    words = "95\N{NO-BREAK SPACE}% intervals for the next run, each from 5 repeated runs"
    assert any(words in table.caption for table in tables)
    assert "noise_floor" in {table.name for table in tables}
    assert read(folder.record) == record, "the record stays as it was written"


def test_no_interval_within_a_process_is_shown():
    """A run with the narrowest interval inside: nothing that is made of it has an interval."""
    simulator = Simulator(Truth(noise=0.0))
    made = [simulator.record(gpus) for gpus in ((0,), (1,), (0, 1))]
    assert all(record.ends_within_run(RATE) for record in made)
    found = findings_of(Study.of(made))
    points = [point for curve in found.scaling.curves for point in curve.points]
    assert len(points) == 3
    for point in points:
        for one in (point.rate, point.efficiency, point.baseline):
            assert one is None or one.low is None
