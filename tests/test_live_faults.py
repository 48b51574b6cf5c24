"""The faults of planted_live: each is found although it begins with the timed windows, its twin is clean."""

import pytest
from build import BUSY, make_cell
from derived_results import write_record
from planted_live import LIVE, SEEN, cases

from analysis.validity.checks import judge
from benchmarks.rank.ranks import Reporter
from benchmarks.record import CellFolder
from benchmarks.training.throughput import TrainingBenchmark
from conf.schema import ValidityLimits
from trainers.step import unmarked

# What cells without a launching process, on shared cores, may be told.
AROUND = BUSY | {"time_between_steps"}


TWINS = [name for name, *_ in cases() if not name.startswith(tuple(LIVE))]


@pytest.fixture(scope="module")
def codes(forked):
    """{case: {code: sentence}} of every cell; `failed` of those whose ranks raised an error."""
    failures = forked("live")[0]
    codes = {}
    for number, (name, cell, _, _) in enumerate(cases()):
        if name in failures:
            codes[name] = {"failed": failures[name]}
            continue
        folder = CellFolder(forked.folder / "live" / name / "cells" / cell.key)
        judged = judge(write_record(folder, number), ValidityLimits()).codes
        codes[name] = {code: text for code, text in judged.items() if code not in AROUND}
    return codes


@pytest.mark.parametrize("twin", TWINS)
def test_a_clean_twin_has_no_code(codes, twin):
    assert codes[twin] == {}


@pytest.mark.parametrize("name", LIVE)
def test_a_fault_that_begins_with_the_timed_windows_is_found(codes, name):
    assert codes[name].keys() & LIVE[name].codes, codes[name]


@pytest.mark.parametrize("name", [name for name, live in LIVE.items() if live.in_window == SEEN])
def test_a_fault_that_ends_with_the_windows_is_found_where_a_window_counts_it(codes, name):
    """LIVE says of the others why no window sees them."""
    assert codes[f"{name}, while timed"]


def test_no_timed_step_carries_a_hook_of_the_checks(alone, tmp_path):
    folder = CellFolder(tmp_path)
    folder.rank_lines(0).parent.mkdir()
    reporter = Reporter(folder, 0)
    cell = make_cell(gpus=(0,), strategy={"name": "none"})
    benchmark = TrainingBenchmark(cell, alone, reporter)
    training, block = benchmark.training, benchmark.clock.block
    model, states = training.model, []

    def watched(*asked):
        modules = list(training.network.modules())
        hooks = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in modules)
        states.append((hooks, training.mark is unmarked, training.model is model))
        return block(*asked)

    benchmark.clock.block = watched
    benchmark.run()
    assert len(states) >= 3 and set(states[:-1]) == {(0, True, True)}
