"""What each of two ranks measures for test_measuring: tiny cells, strategies with a fault, and a slow rank."""

import contextlib
import time

import torch
import torch.distributed as dist
from build import DDP, make_cell
from derived_results import run_whole

from benchmarks.rank.ranks import Ranks, Reporter
from benchmarks.record import CellFolder, read_lines
from benchmarks.training import correctness, derive, throughput
from trainers.step import Training
from trainers.strategy import Strategy

CASES = {
    "ddp": make_cell(),
    "none": make_cell(strategy={"name": "none"}),
    "fp16": make_cell(strategy=DDP | {"comm_hook": "fp16"}, exposed_rounds=0),
    "bf16": make_cell(strategy=DDP | {"comm_hook": "bf16"}, exposed_rounds=0),
    "fp8": make_cell(strategy=DDP | {"comm_hook": "fp8"}, exposed_rounds=0),
    "bf16_weights": make_cell(precision="bf16_weights", exposed_rounds=0),
    "small buckets": make_cell(
        strategy=DDP | {"bucket_cap_mb": 0.5, "static_graph": False}, exposed_rounds=0
    ),
}


# Strategies with a fault. Each wraps the model of a healthy one; the checks must notice.


@contextlib.contextmanager
def _nothing():
    yield


class Skips(Strategy):
    """Claims to be synchronous and exchanges nothing."""

    def prepare(self, model, optimizer):
        self.model = model
        return model

    def without_exchange(self):
        return _nothing()

    def bytes_moved(self, gradient_bytes, world_size):
        return gradient_bytes


class Exchanges(Skips):
    """Sums in place between backward and update; `share` is what the sum is divided by."""

    share = 2.0

    def __init__(self):
        self.on = True

    @contextlib.contextmanager
    def without_exchange(self):
        self.on = False
        yield
        self.on = True

    def exchange(self):
        if self.on:
            for parameter in self.model.parameters():
                self.reduce(parameter.grad)

    def reduce(self, gradient):
        dist.all_reduce(gradient)
        gradient /= self.share


class Sums(Exchanges):
    """Forgets to divide by the number of ranks."""

    share = 1.0


class SkipsBias(Exchanges):
    """Exchanges all but the first element of each array: the kind of fault that a broken kernel makes."""

    def reduce(self, gradient):
        kept = gradient.flatten()[0].item()
        super().reduce(gradient)
        gradient.view(-1)[0] = kept


FAULTY = {"healthy": Exchanges, "skips": Skips, "sums": Sums, "skips one element": SkipsBias}


def measure(rank, folder):
    """Return what a rank measures: all cases, then the faulty strategies, then a slow rank."""
    ranks = Ranks(rank, 2, torch.device("cpu"))
    found = {}
    for name, cell in CASES.items():
        found[name] = run_whole(throughput.run, cell, ranks, case_folder(folder, name))
    for name, faulty in FAULTY.items():
        training = faulty_training(faulty(), ranks)
        for _ in range(2):
            training.step()
        found[name] = correctness.gradient(training, next(training.batches), ranks)
        found[name]["equal"] = correctness.replicas_equal(training, ranks)
    found["slow rank"] = slow_rank(ranks, folder)
    return found


def case_folder(folder, name):
    made = CellFolder(folder / name)
    made.rank_lines(0).parent.mkdir(parents=True, exist_ok=True)
    return made


def faulty_training(strategy, ranks, precision="fp32"):
    """A Training whose strategy is replaced before its first step."""
    training = Training(
        make_cell(strategy={"name": "none"}, precision=precision), ranks.device, ranks.rank
    )
    strategy.prepare(training.model, training.optimizer)
    training.strategy = strategy
    return training


def slow_rank(ranks, folder):
    """Independent ranks of which the second sleeps longer in every step."""
    cell = make_cell(strategy={"name": "none"}, batch_size=8, min_iterations=10, max_iterations=10)
    lines_folder = case_folder(folder, "slow")
    benchmark = throughput.TrainingBenchmark(cell, ranks, Reporter(lines_folder, ranks.rank))

    def step():
        time.sleep(0.03 if ranks.rank else 0.01)
        benchmark.training.images += 8

    benchmark.training.step = step
    benchmark.step_ms = 200.0
    benchmark.timed()
    ranks.barrier()
    return derive.timed(
        {rank: list(read_lines(lines_folder.rank_lines(rank))) for rank in range(2)}
    ).metrics
