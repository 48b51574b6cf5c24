"""A named study has a reduced version on CPU workers, and what was typed always counts."""

import dataclasses
import re
from unittest.mock import MagicMock

import pytest
from build import ROOT, changed_cell, make_cell, make_record

from launch.plan.estimate import COMPILE_SECONDS, FIRST_SECONDS, estimates, rule_of_thumb, worded
from launch.plan.order import PlannedCell

STUDIES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
STUDIES.remove("tune_nccl")  # refused there: CPU workers have no NCCL
SMALL = "runs a reduced version on CPU workers"
MOST_SECONDS = 240  # on an idle machine; composing, the store and the report come in addition


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})


@pytest.fixture
def dry_run(launch, two_cores):
    """Plan only: (notes, names of the cells, seconds that they will take)."""

    def run(*arguments):
        code, out, err = launch(*arguments, "dry_run=true")
        assert (code, err) == (0, "")
        *lines, last = out.splitlines()
        rule = r"\(rough estimate\); nothing"
        found = re.match(
            rf"(\d+) runs?(?: \(the last repeats the first\))?, about (?:(\d+) min )?(\d+) s {rule}",
            last,
        )
        notes = [line for line in lines if line.startswith("note: ")]
        cells = [line.split(maxsplit=1)[1] for line in lines if line not in notes]
        assert found and int(found[1]) == len(cells) == len(set(cells))
        return "\n".join(notes), cells, 60 * int(found[2] or 0) + int(found[3])

    return run


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_ends_in_minutes_on_two_cores(dry_run, name):
    notes, _, seconds = dry_run(f"+experiment={name}")
    assert seconds <= MOST_SECONDS
    has_block = "\non_cpu:" in (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    assert (SMALL in notes) == has_block == (f"study '{name}' {SMALL}" in notes)


def test_a_command_without_arguments_says_first_what_it_measures_and_how_long(
    launch, two_cores, monkeypatch
):
    begun = []
    monkeypatch.setattr("launch.sweep.MlflowWriter", MagicMock())
    monkeypatch.setattr("launch.sweep.LocalEngine.open", lambda engine, cell: None)
    monkeypatch.setattr("launch.sweep.SweepRun._try_cell", lambda sweep, index: begun.append(index))
    monkeypatch.setattr("launch.sweep.SweepRun._end", lambda sweep: 0)
    code, out, err = launch()
    first, *rest = out.splitlines()
    study = "First study (help: python launch.py --help): fmnist_cnn on 1, 2, 4, … all devices; "
    assert (code, err, begun) == (0, "", [0, 1]) and first.startswith(f"{study}2 runs, about ")
    assert f"note: study 'first' {SMALL} (model=fmnist_cnn)" in "\n".join(rest)


@pytest.mark.parametrize(
    ("typed", "models"),
    [
        ([], ["fmnist_cnn"] * 2),
        (["output_dir=here", "study=mine", "tracking.enabled=false"], ["fmnist_cnn"] * 2),
        (["gpus=0+1"], ["resnet50"]),
        (["batch_size=8"], ["resnet50"]),
    ],
)
def test_options_that_do_not_say_what_is_measured_leave_the_first_study(dry_run, typed, models):
    assert [cell.split(" · ")[0] for cell in dry_run(*typed)[1]] == models


def test_what_is_typed_counts_and_the_full_form_is_to_be_had(dry_run):
    scaling = ("+experiment=scaling", "repeats=1", "noise_pairs=0", "waterfall=false")
    notes, cells, _ = dry_run(*scaling, "benchmark=exchange")
    # Its options are of another benchmark.
    assert "(model=fmnist_cnn)" in notes and all("exchange" in cell for cell in cells)
    notes, cells, _ = dry_run(*scaling, "model=resnet18")
    assert "(benchmark.max_seconds=2" in notes and "resnet18" in cells[0]
    notes, cells, _ = dry_run(*scaling, "full=true")
    assert SMALL not in notes and "resnet50" in cells[0]
    notes, _, _ = dry_run("+experiment=strong_scaling", "repeats=1", "full=true")
    assert SMALL not in notes and "study 'strong_scaling' has optimize=auto on CPU workers" in notes


def test_cpu_workers_measure_one_of_the_cells_that_differ_in_nccls_settings(dry_run):
    notes, cells, _ = dry_run("-m", "gpus=0,1", "nccl.algo=Ring,null", "seed=0,1", "noise_pairs=0")
    assert "NCCL settings have no effect on CPU workers" in notes
    name = "resnet50 · nccl_allreduce · gpus 0,1"
    assert cells == [f"{name} · seed={seed}" for seed in (0, 1)], "the plainest"
    assert dry_run("-m", "gpus=0,1", "nccl.algo=Ring")[1] == [f"{name} · ALGO=Ring"]


def took(cell, seconds, **changes):
    return make_record(cell=cell, started_at=1000.0, ended_at=1000.0 + seconds, **changes)


def seconds_of(cells, known=(), **begun):
    """The estimate of each of some cells."""
    planned = [PlannedCell(one) for one in cells]
    return [one.seconds for one in estimates(planned, known, **begun)]


def test_no_estimate_rests_on_another_model():
    cell = make_cell()
    slow = changed_cell(cell, model={"name": "resnet50", "builder": "resnet50"})
    known = [took(slow, 500.0, record_id="5" * 32, sweep_id="another")]
    assert seconds_of([cell], known) == seconds_of([cell])
    assert seconds_of([cell], [took(cell, 21.0), *known], begun=False) == pytest.approx([21.0])
    assert rule_of_thumb(slow) > rule_of_thumb(cell)


def test_a_clock_that_was_set_back_makes_no_estimate():
    odd = took(make_cell(), -500.0)
    assert seconds_of([make_cell()], [odd]) == seconds_of([make_cell()])


def test_an_estimate_is_scaled_from_the_same_model_and_says_so():
    one, two = make_cell((0,), max_seconds=2.0), make_cell((0, 1), max_seconds=2.0)
    known = [took(one, 2 * rule_of_thumb(one, first=True))]
    # The machine is half as fast.
    assert seconds_of([two], known) == pytest.approx([2 * rule_of_thumb(two)])
    words = "(based on earlier runs of this model"
    assert worded([PlannedCell(two)], known).endswith(f"{words})")
    other = PlannedCell(make_cell(max_seconds=3.0))
    rule = "; a rough estimate for 1)"
    assert worded([PlannedCell(two), other], known).endswith(f"{words}{rule}")


def on_gpus(nccl=None, **changes):
    return make_cell(device="cuda", nccl=nccl or {}, **changes)


def test_cells_take_what_the_first_of_a_sweep_and_their_graph_cost_them():
    cells = [on_gpus({"NCCL_ALGO": name} if name else {}) for name in ("", "Ring", "Tree")]
    new, after = seconds_of(cells[:2], begun=False)
    assert new - after == pytest.approx(FIRST_SECONDS["cuda"])
    compiled = [dataclasses.replace(cell, optimize="compile") for cell in cells]
    new, cached = (after + COMPILE_SECONDS["cuda"][state] for state in ("new", "cached"))
    assert seconds_of(compiled) == pytest.approx([new, cached, cached])
    first = compiled[:1]
    failed = [took(*first, 100.0, state="failed")]  # it may have compiled nothing
    assert seconds_of(first, failed) == seconds_of(first)
    known = [took(*first, rule_of_thumb(*first, first=True))]
    assert seconds_of(first, known) == pytest.approx([cached])
