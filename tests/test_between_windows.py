"""Steps without exchange between the timed windows: when, without a trace, and what they tell."""

import dataclasses
import statistics
from itertools import chain
from pathlib import Path

import pytest
import torch
from build import DDP, make_cell

from benchmarks.derived import together
from benchmarks.rank.ranks import Ranks
from benchmarks.record import CellFolder, Kind, read, read_lines
from benchmarks.training import request
from benchmarks.training.correctness import Snapshot
from benchmarks.training.derive import slowest_ms, strategy_cost
from benchmarks.training.throughput import TrainingBenchmark
from conf.cell import Optimizer
from trainers.step import Training
from trainers.strategies.ddp import NcclAllreduce

CPU = torch.device("cpu")
DATA = Path(__file__).parent / "data" / "h200_x2"
GPUS = {"max_seconds": 20.0, "max_iterations": 1000, "min_iterations": 10}
GPUS |= {"interval_target": 0.0025, "exposed_rounds": 4}


def training_of(optimizer):
    return Training(make_cell((0,), {"name": "none"}, optimizer=Optimizer(name=optimizer)), CPU, 0)


def state_of(training):
    """Everything that a step changes on a rank, as copies."""
    state = {name: value.clone() for name, value in training.network.state_dict().items()}
    for number, parameter in enumerate(training.parameters):
        for name, value in training.optimizer.state.get(parameter, {}).items():
            state[number, name] = value.clone()
    return state


def differing(state, before):
    """The names in a state whose values are others than before."""
    return {
        name for name, value in state.items() if not torch.equal(value, before.get(name, value + 1))
    }


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_steps_in_between_leave_no_trace(optimizer, steps_before):
    training = training_of(optimizer)
    for _ in range(steps_before):
        training.step()
    snapshot, before = Snapshot(training), state_of(training)
    for _ in range(2):  # the copies are used again
        with snapshot.restored():
            training.step()
            training.step()
            assert differing(state_of(training), before)
        after = state_of(training)
        assert after.keys() == before.keys() and not differing(after, before)
    training.step()
    assert differing(state_of(training), before)


def test_the_scale_of_the_loss_is_brought_back():
    training = training_of("sgd")
    training.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    training.scaler.scale(torch.ones(1))
    with Snapshot(training).restored():
        training.scaler.update(2.0)
        assert training.scaler.get_scale() == 2.0
    assert training.scaler.get_scale() == 1024.0


@pytest.mark.parametrize(("other_has_room", "made"), [(True, True), (False, False)])
def test_no_rank_makes_copies_where_one_has_no_room(other_has_room, made):
    class Two(Ranks):
        def gather(self, values):
            return [list(values), [other_has_room]]

    assert (Snapshot.take(training_of("sgd"), Two(0, 2, CPU)) is not None) is made


def benchmark_of(strategy=NcclAllreduce, device="cpu", ranks=2, longest=(), data=None, **options):
    """A benchmark with as much of it as decides."""
    made = object.__new__(TrainingBenchmark)
    made.cell = make_cell(data=data or {})
    made.options = make_cell(max_iterations=1000, exposed_rounds=2, **options).benchmark
    made.ranks = Ranks(0, ranks, torch.device(device))
    made.training = type("Stub", (), {"strategy": object.__new__(strategy), "parameters": [0]})
    made.longest_ms = list(longest)
    return made


class Asynchronous(NcclAllreduce):
    in_lockstep = False


class NotAlone(NcclAllreduce):
    own_work_alone = False


STEADY, CAPPED = [55.0] * 40, [55.0] * 14 + [57.0] * 26


@pytest.mark.parametrize(
    ("given", "may"),
    [
        ({}, True),
        ({"strategy": Asynchronous}, False),
        ({"data": {"name": "mine"}}, False),
        ({"exchange_iterations": 0}, False),
        ({"ranks": 1}, True),
        ({"ranks": 1, "strategy": NotAlone}, False),
        ({"device": "cuda", "longest": STEADY}, True),
        ({"device": "cuda", "longest": CAPPED}, False),
        ({"device": "cuda", "longest": STEADY[:10]}, False),
    ],
    ids=["synchronous", "asynchronous", "loader", "no exchange alone", "own work alone",
         "communication alone", "GPU", "at its power cap", "too short to tell"],
)  # fmt: skip
def test_when_steps_without_exchange_stand_between_the_timed_windows(given, may):
    assert benchmark_of(**given)._may_interleave() is may


def windows_of(folder, purpose):
    """The ms of a committed cell's windows of one purpose, on its slowest rank, by window."""
    ranks = range(len(read(folder.record).cell.gpus))
    lines = {rank: list(read_lines(folder.rank_lines(rank))) for rank in ranks}
    return [slowest_ms([window]) for window in together(lines, Kind.BLOCK, purpose=purpose)]


@pytest.mark.parametrize(("study", "capped"), [("compiled_a", True), ("eager_a", False)])
def test_a_power_cap_shows_in_two_seconds_of_steps_and_makes_short_windows_faster(study, capped):
    """Compiled cells of H200s were at their cap in 60 % of the samples, eager ones in none."""
    folders = sorted((DATA / study).glob("resnet50-nccl_allreduce-gpus0-*"))
    assert len(folders) >= 3
    for folder in map(CellFolder, folders):
        timed, short = windows_of(folder, "timed"), windows_of(folder, "with exchange")
        assert request.gets_longer(timed[0]) is capped
        faster = 1 - statistics.fmean(chain(*short)) / statistics.fmean(chain(*timed))
        assert faster > 0.004 if capped else abs(faster) < 0.001, folder.path.name


@pytest.mark.parametrize(
    ("step_ms", "options", "rounds", "steps"),
    [
        (55.0, {}, 4, 14),  # 6 s in eight windows
        (55.0, {"max_seconds": 2.0}, 2, 10),
        (55.0, {"max_seconds": 2.0}, 4, 5),
        (900.0, {"max_seconds": 2.0}, 4, 3),
        (55.0, {}, 1, 37),  # no longer than elsewhere
        (0.5, {}, 4, 125),  # all fit max_iterations
        (55.0, {"max_iterations": 24}, 4, 3),
    ],
)
def test_the_timed_windows_of_all_rounds_take_as_long_as_the_fewest_elsewhere(
    step_ms, options, rounds, steps
):
    assert request.timed_abba_iterations(step_ms, GPUS | options, rounds) == steps


def test_rounds_are_finished_before_time_or_iterations_or_a_narrow_interval_end_the_measurement():
    window, short = [55.0] * 14, GPUS | {"max_seconds": 1.0}
    for options, rounds, count, stops in (
        (short, 2, 1, False), (short, 2, 2, False), (short, 2, 3, False), (short, 2, 4, True),
        (GPUS, 4, 3, False), (GPUS, 4, 7, False), (GPUS, 4, 8, True),
    ):  # fmt: skip
        assert request.should_stop([window] * count, 770.0 * count, options, rounds) is stops
    assert request.rounds_between(GPUS) == 4
    assert request.rounds_between(GPUS | {"max_iterations": 23}) == 0


def lines_of(*windows):
    return {0: [{"kind": "block", "purpose": purpose, "ms": ms} for purpose, ms in windows]}


def test_the_first_timed_windows_are_the_steps_with_exchange_and_a_trend_cancels():
    windows = []
    for place, is_timed in enumerate((1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1)):
        purpose, ms = ("timed", 10.0) if is_timed else ("without exchange", 9.0)
        windows.append((purpose, [ms + 0.3 * place] * 5))
    cost = strategy_cost(lines_of(*windows))
    assert cost.metrics["strategy/cost_ms"] == pytest.approx(1.0)
    assert cost.within_run["strategy/cost_ms"]["groups"] == 4


def test_lines_of_before_have_their_own_steps_with_exchange():
    timed, *abba = ("timed", [50.0] * 5), ("with exchange", [10.0]), ("without exchange", [8.0])
    assert strategy_cost(lines_of(timed, *abba)).metrics == {"strategy/cost_ms": 2.0}
    assert strategy_cost(lines_of(timed)).metrics == {}


def test_the_estimate_has_no_second_time_of_steps_with_exchange():
    cell = make_cell(strategy=DDP, exposed_rounds=4, max_iterations=1000, max_seconds=6.0)
    loaded = dataclasses.replace(cell, data={"name": "mine"})
    longer = request.throughput(loaded) - request.throughput(cell)
    assert longer == pytest.approx(8 * request.ABBA_SECONDS, rel=0.5)


@pytest.mark.parametrize(("equal_after", "equal"), [(0, True), (2, True), (3, False)])
def test_replicas_are_compared_after_each_of_the_steps_that_make_them_equal(
    monkeypatch, equal_after, equal
):
    steps, benchmark = [], benchmark_of()
    benchmark.training.strategy.equal_every = 3
    benchmark.training.batches = iter(range(9))
    benchmark.training.step = steps.append
    compared = "benchmarks.training.correctness.equal_arrays"
    monkeypatch.setattr(compared, lambda *_: {0} if len(steps) == equal_after else set())
    assert benchmark.replicas_equal() == equal
    assert steps == list(range(min(equal_after, 2)))
