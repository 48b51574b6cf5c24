"""Steps as CUDA graphs: what is refused, that a replay is the step, and faults that checks find.

CPU workers have no CUDA graphs: here a replay runs the step again and leaves its results where the
capture left them. With the mark gpu the same tests capture real ones:
python -m pytest -n 0 -m 'gpu or multi_gpu' tests/test_graphs.py
"""

import dataclasses
import gc
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from build import ROOT, changed_cell, make_cell, strategy_of

from analysis.validity.checks import CHECKS
from benchmarks.rank.ranks import Ranks
from benchmarks.record import read_study
from benchmarks.training import correctness
from benchmarks.training.correctness import Snapshot
from trainers import cuda_graph, step
from trainers.step import Training

MORE_MEMORY = 1.1  # of what is reserved, from one training to the next
WRONG = {check.code for check in CHECKS if check.severity == "invalid"} - {"foreign_load"}
SHARDED, NONE = {"name": "kvstore_device"}, {"name": "none"}
# DDP here takes seconds to import where nothing else needs its imports.
STRATEGIES = [SHARDED, NONE, pytest.param({"name": "nccl_allreduce"}, marks=pytest.mark.gpu)]


class Again:
    """A capture without a device: `run` takes its place, and leaves its results where they were."""

    training = None  # once there is one

    def __init__(self, device):
        self.closed = False

    def __call__(self, run):
        graphs = self.training.graphs
        with Snapshot(self.training, whole=True).restored(), torch.random.fork_rng(devices=[]):
            loss = run()
            places = [parameter.grad for parameter in self.training.parameters]
        graphs._done.sub_(1)

        def replay():
            loss.copy_(run())
            for place, parameter in zip(places, self.training.parameters, strict=True):
                if place is not None:
                    place.copy_(parameter.grad)

        return replay, loss

    def close(self):
        self.closed = True


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ranks(request):
    """The one rank of a process group."""
    backend = "gloo" if request.param == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device, steps = torch.device("cpu"), 2
    if request.param == "cuda":
        device, steps = torch.device("cuda", 0), cuda_graph.WARM_UP
    with mock.patch.object(cuda_graph, "WARM_UP", steps):
        yield Ranks(0, 1, device)
    dist.destroy_process_group()


def graphed(ranks, strategy=SHARDED, optimizer="sgd", optimize="graph"):
    """A training of a tiny cell whose steps are replays."""
    kind = ranks.device.type
    cell = changed_cell(make_cell((0,), strategy_of(strategy)), optimize=optimize, device=kind)
    cell = dataclasses.replace(cell, optimizer=dataclasses.replace(cell.optimizer, name=optimizer))
    if kind == "cuda":
        return Training(cell, ranks.device, 0)
    with mock.patch.object(step, "CudaCapture", Again):
        training = Training(cell, ranks.device, 0)
    if training.graphs:
        training.graphs._capture.training = training
    return training


def state(training):
    """Copies of everything that steps change."""
    return [tensor.clone() for tensor in correctness._state(training, whole=True)]


def replay(training, ranks):
    """How far a replay is from the step, by the check of a cell."""
    drawn = [next(training.batches) for _ in range(2)]
    return correctness.replay_differences(training, drawn, ranks)["replay"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["sharded", "none", "DDP"])
def test_replays_move_everything_as_the_same_steps_without_a_graph(strategy, optimizer, ranks):
    ends = []
    for optimize in ("graph", "eager"):
        training = graphed(ranks, strategy, optimizer, optimize)
        drawn = [next(training.batches) for _ in range(2)]
        first = [drawn[0]] * (1 + cuda_graph.WARM_UP if optimize == "eager" else 1)
        for batch in (*first, drawn[1], drawn[0]):
            training.step(batch)
        moved = [*training.network.state_dict().values(), *training.strategy.state()]
        moved += [training.loss, *(parameter.grad for parameter in training.parameters)]
        ends.append([tensor.clone() for tensor in moved])
        training.close()
    for graph, eager in zip(*ends, strict=True):  # a step more or less moves them by 1e-2 and more
        assert (graph - eager).norm() <= 1e-3 * eager.norm()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["sharded", "none", "DDP"])
def test_a_healthy_graph_passes_and_is_left_as_it_was(strategy, ranks):
    training = graphed(ranks, strategy)
    for _ in range(2):
        training.step()
    before = state(training)
    facts = replay(training, ranks)
    assert facts["error"] <= facts["tolerance"]
    assert all(map(torch.equal, before, state(training)))
    # With exchange and without: one captures, one compares.
    replayed = 4 if strategy == NONE else 6
    assert correctness.replay_counts(training, ranks) == {"replays": [[replayed, replayed]]}
    capture = training.graphs._capture
    training.close()
    assert ranks.device.type == "cuda" or capture.closed
    assert all(parameter.grad is None for parameter in training.parameters)


def left_out(training):
    """A gradient that the captured step lacks."""
    usual = training.strategy.update

    def update(optimizer):
        if training.graphs._step is planted:
            training.parameters[2].grad = None
        usual(optimizer)

    def planted(batch):
        training.strategy.update = update
        try:
            return training.uncaptured_step(batch)
        finally:
            training.strategy.update = usual

    training.graphs._step = planted


def stale(training):
    """A batch that is not copied to where the graph reads it."""
    training.graphs._load = lambda batch: None


def not_updated(training):
    """Weights that stay."""
    training.graphs._step = training.backward


@pytest.mark.parametrize("fault", [stale, not_updated, left_out])
def test_a_graph_that_does_something_else_is_found(fault, ranks):
    training = graphed(ranks)
    fault(training)
    training.step()
    facts = replay(training, ranks)
    assert not facts["error"] <= facts["tolerance"], facts
    if fault is left_out:
        assert facts["array"] == training.names[2]


@pytest.mark.parametrize("extra", [1, -1])
def test_a_rank_that_replays_once_too_often_is_counted(extra, ranks):
    training = graphed(ranks, NONE)
    training.step()
    once, *left = training.graphs._captured[True]
    more = (lambda: (once(), once())) if extra > 0 else (lambda: None)
    training.graphs._captured[True] = (more, *left)
    training.step()
    assert correctness.replay_counts(training, ranks) == {"replays": [[2, 2 + extra]]}


def test_a_batch_of_another_shape_is_refused(ranks):
    training = graphed(ranks, NONE)
    images, labels = next(training.batches)
    training.step((images, labels))
    shapes = r"\[1, 1, 28, 28\] where the first had \[2, 1, 28, 28\]"
    with pytest.raises(RuntimeError, match=shapes):
        training.step((images[:1], labels[:1]))


def test_a_step_that_is_no_replay_shows_its_own_gradients(ranks):
    def gradients():
        return [id(parameter.grad) for parameter in training.parameters]

    training = graphed(ranks)
    training.step()
    replayed, places = gradients(), [parameter.grad for parameter in training.parameters]
    training.backward(next(training.batches))
    assert not set(gradients()) & set(replayed)
    with training.without_exchange():
        training.step()
        assert not set(gradients()) & set(replayed)
    training.step()
    assert gradients() == replayed == [id(gradient) for gradient in places]


@pytest.mark.gpu
def test_graphs_give_their_memory_and_the_default_stream_back():
    device, found = torch.device("cuda", 0), []
    for _ in range(3):
        training = graphed(Ranks(0, 1, device), NONE)
        for _ in range(2):
            training.step()
        assert torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
        training.close()
        del training
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
        found.append(torch.cuda.memory_reserved(device))
    assert max(found) < MORE_MEMORY * min(found), "each left as much as the one before"


@pytest.mark.multi_gpu
@pytest.mark.timeout(200)
def test_graphs_of_small_batches_are_twice_as_fast(tmp_path):
    words = """-m gpus=0,1 strategy=nccl_allreduce,kvstore_device optimize=eager,graph
        model=resnet18 batch_size=16 benchmark.max_seconds=0.5 benchmark.exposed_rounds=1
        benchmark.warmup_min_seconds=0.3 noise_pairs=0 tracking=none report=false"""
    command = [sys.executable, "launch.py", *words.split(), f"output_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    records, _ = read_study(tmp_path / "default")
    rates = {}
    for record in records:
        strategy, graphs = record.cell.strategy["name"], record.cell.graphed
        rates[strategy, graphs] = record.metrics["throughput/images_per_second"]
        assert not record.validity.codes.keys() & WRONG, record.validity.codes
        if graphs:
            assert "cpu_bound" not in record.validity.codes
            # No share where ranks that begin together wait for each other longer than in a step.
            assert record.metrics.get("gpu/idle_share", 0.0) < 0.05
            assert all(asked == done for asked, done in record.checks["replays"])
    assert len(rates) == len(records) == 4
    for strategy in ("nccl_allreduce", "kvstore_device"):
        assert rates[strategy, True] > 2 * rates[strategy, False], rates


@pytest.mark.gpu
def test_a_step_that_waits_for_the_gpu_cannot_be_captured_and_says_so():
    # In a process that ends: an error of a capture stays in its process.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        said = own.submit(capture_a_step_that_waits).result()
    assert "cannot be captured in a CUDA graph" in said and "optimize=eager" in said


def capture_a_step_that_waits():
    """What is said of a step that reads its loss."""
    training = graphed(Ranks(0, 1, torch.device("cuda", 0)), NONE)
    training.graphs._step = lambda batch: training.uncaptured_step(batch) * training.loss.item()
    try:
        training.step()
    except RuntimeError as error:
        return str(error)
