"""What ranks find when a Training steps with each way to synchronise, beside a one-process reference."""

import contextlib
import dataclasses
import math

import torch
from build import make_cell, strategy_of
from derived_results import run_whole
from torch import nn

from benchmarks.rank.ranks import Ranks
from benchmarks.record import CellFolder
from benchmarks.training import step_facts, throughput
from conf.cell import Network, Optimizer
from trainers import models
from trainers.batches import synthetic
from trainers.optimizers import optimizer_of
from trainers.step import Training
from trainers.strategies import local_sgd
from trainers.strategies.local_sgd import fragments_of
from trainers.strategy import local, whole

STEPS = 4
CPU = torch.device("cpu")
SGD = Optimizer(learning_rate=0.1, momentum=0.8, weight_decay=0.01)
# A large epsilon: a weight whose gradient is rounding alone does not move by a whole step.
ADAMW = Optimizer(0.01, weight_decay=0.1, name="adamw", epsilon=1e-3)
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}
MODEL = Network("blocks", "python", "synchronising:build", 1, 10, 8, 0.0, {})
SMALL = {"bucket_cap_mb": 0.002}
ACCUMULATING = {
    "nccl_allreduce": SMALL, "kvstore_device": SMALL, "hierarchical": SMALL, "cpu_staged": SMALL,
}  # fmt: skip


class Block(nn.Module):
    """A part that other parts repeat."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


def build(classes, channels):
    """A small network of blocks, with arrays that no number of ranks divides."""
    stem, head = nn.Linear(64 * channels, 13), nn.Linear(13, classes)
    return nn.Sequential(nn.Flatten(), stem, nn.Sequential(*map(Block, [13] * 3)), head)


def cell_of(ranks, strategy, optimizer="sgd", batch_size=8, **fields):
    """The cell of a strategy with its YAML's defaults, on the network above."""
    cell = make_cell(tuple(range(ranks)), strategy_of(strategy), batch_size)
    return dataclasses.replace(cell, model=MODEL, optimizer=OPTIMIZERS[optimizer], **fields)


class Alone:
    """The same training in one process: the model, its optimizer, and the batches of every rank."""

    def __init__(self, cell):
        torch.manual_seed(cell.seed)
        self.model = models.build(cell.model)
        self.optimizer = optimizer_of(cell.optimizer, list(self.model.parameters()))
        self.batches = [synthetic(cell, CPU, rank) for rank in range(cell.world_size)]

    def step(self):
        """One update by the mean gradient of all ranks."""
        self.optimizer.zero_grad()
        for batches in self.batches:
            images, labels = next(batches)
            loss = nn.functional.cross_entropy(self.model(images), labels)
            (loss / len(self.batches)).backward()
        self.optimizer.step()

    def weights(self):
        return [parameter.detach() for parameter in self.model.parameters()]


def difference(weights, reference):
    """The largest difference of two lists of arrays, as a share of the largest value."""
    most = max(array.abs().max().item() for array in reference)
    pairs = zip(weights, reference, strict=True)
    return max((own - right).abs().max().item() for own, right in pairs) / most


def against_alone(rank, cell):
    """How far the weights are from those of one process after some steps."""
    training, alone = Training(cell, CPU, rank), Alone(cell)
    for _ in range(STEPS):
        training.step()
        alone.step()
    training.close()
    weights = [whole(parameter.detach()) for parameter in training.parameters]
    return difference(weights, alone.weights())


def accumulated(rank, ranks):
    """Micro-steps: every strategy without servers, and one that exchanges in each of them."""
    found = {}
    for name, options in ACCUMULATING.items():
        for optimizer in OPTIMIZERS:
            cell = cell_of(ranks, {"name": name, **options}, optimizer, accumulate=4)
            found[f"{name} {optimizer}"] = against_alone(rank, cell)
    for count in (1, 2, 4, 8):
        plain = make_cell(tuple(range(ranks)), batch_size=2 * count)
        training = Training(dataclasses.replace(plain, accumulate=count), CPU, rank)
        found[f"{count} micro-steps"] = {**sent_in_a_step(training), "images": 2 * count}
    training.strategy.accumulating = contextlib.nullcontext
    return found | {"fault": sent_in_a_step(training)}


def sent_in_a_step(training):
    training.step()
    with step_facts.sent(training) as sent:
        training.step()
    return sent


def local_reference(cell, period, fragments, outer):
    """Local SGD written by hand, every rank in this process. Returns the weights of rank 0."""
    ranks = [Alone(cell) for _ in range(cell.world_size)]
    for rank, own in enumerate(ranks):
        own.batches = [own.batches[rank]]
    start = [weight.clone() for weight in ranks[0].weights()]
    velocity = [torch.zeros_like(weight) for weight in start]
    parts = fragments_of(list(ranks[0].model.parameters()), fragments)
    part_of = [part for part, members in enumerate(parts) for _ in members]
    for step in range(1, STEPS * period + 1):
        for own in ranks:
            own.step()
        for array, part in enumerate(part_of):
            if (step - part * period // fragments) % period:
                continue
            mean = sum(own.weights()[array] for own in ranks) / len(ranks)
            if outer == "nesterov":
                change = start[array] - mean
                velocity[array] = 0.9 * velocity[array] + change
                mean = start[array] - 0.7 * (change + 0.9 * velocity[array])
                start[array] = mean.clone()
            for own in ranks:
                own.weights()[array].copy_(mean)
    return ranks[0].weights()


LOCAL = {
    "average": {"period": 3},
    "nesterov": {"period": 3, "outer": "nesterov"},
    "fragments": {"period": 4, "fragments": 3, "outer": "nesterov"},
}


def rarer(rank, ranks):
    """Local SGD beside a hand-written one, and whole cells of it."""
    found = {}
    for name, options in LOCAL.items():
        for optimizer in OPTIMIZERS:
            cell = cell_of(ranks, {"name": "local_sgd", **options}, optimizer)
            training = Training(cell, CPU, rank)
            for _ in range(STEPS * options["period"]):
                training.step()
            period, fragments = options["period"], options.get("fragments", 1)
            reference = local_reference(cell, period, fragments, options.get("outer"))
            if rank == 0 or fragments == 1:
                found[f"{name} {optimizer}"] = difference(training.parameters, reference)
    for name, options in {"period 1": {"period": 1}, "warm-up": {"warmup_steps": 100}}.items():
        cell = cell_of(ranks, {"name": "local_sgd", **options})
        found[name] = against_alone(rank, cell)
    return found


@torch.no_grad()
def twice_as_far(fragment):
    """A fault: every rank gets the same weights, and they are not the mean."""
    for parameter in fragment.parameters:
        torch.distributed.all_reduce(parameter.data)


def whole_cells(rank, ranks, folder):
    """Whole cells of each new strategy, and of a local SGD that averages wrongly."""
    found, limits = {}, {"min_iterations": 8, "max_iterations": 26}
    cells = {
        "average": {"name": "local_sgd", "period": 4, "warmup_steps": 3},
        "fragments": {"name": "local_sgd", "period": 4, "fragments": 2, "outer": "nesterov"},
        "fsdp": {"name": "fsdp"},
        "wrong": {"name": "local_sgd", "period": 4},
    }
    for name, strategy in cells.items():
        cell = cell_of(ranks, strategy)
        cell = dataclasses.replace(cell, benchmark=cell.benchmark | limits)
        own = CellFolder(folder / name)
        own.rank_lines(rank).parent.mkdir(parents=True, exist_ok=True)
        if name == "wrong":
            local_sgd.Fragment.synchronise = twice_as_far
        found[name] = run_whole(throughput.run, cell, Ranks(rank, ranks, CPU), own)
    return found


SHARDED = {
    "fsdp": {"name": "fsdp", "prefetch": 1}, "fsdp 4": {"name": "fsdp", "accumulate": 4},
    "zero2": {"name": "zero2"}, "zero2 4": {"name": "zero2", "accumulate": 4},
    "zero1": {"name": "zero1"}, "hsdp": {"name": "hsdp", "shard_size": 1},
    "hsdp 2": {"name": "hsdp", "shard_size": 2},
}  # fmt: skip


def sharded(rank, ranks):
    """Shards beside one process, and the bytes of model states on this rank."""
    found = {}
    for name, options in SHARDED.items():
        strategy, count = dict(options), options.get("accumulate", 1)
        strategy.pop("accumulate", None)
        if ranks % strategy.get("shard_size", 1):
            continue
        for optimizer in OPTIMIZERS:
            cell = cell_of(ranks, strategy, optimizer, accumulate=count)
            found[f"{name} {optimizer}"] = against_alone(rank, cell)
    for name in ("fsdp", "zero2"):
        for optimizer in OPTIMIZERS:
            training = Training(cell_of(ranks, {"name": name}, optimizer), CPU, rank)
            training.step()
            sizes = [whole_bytes(parameter) for parameter in training.parameters]
            padded = 0
            for parameter, size in zip(training.parameters, sizes, strict=True):
                rows = len(parameter)
                padded += size * math.ceil(rows / ranks) * ranks // rows
            found[f"{name} {optimizer} states"] = [states(training), sum(sizes), padded]
    return found


def whole_bytes(parameter):
    return parameter.numel() * parameter.element_size()


def states(training):
    """The bytes of this rank's weights, gradients and numbers of the optimizer between steps."""
    tensors = [local(parameter.detach()) for parameter in training.parameters]
    tensors += [local(parameter.grad) for parameter in training.parameters]
    for state in training.optimizer.state.values():
        tensors += [value for value in state.values() if value.dim()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(rank, ranks, folder):
    torch.set_num_threads(1)
    found = {"accumulated": accumulated(rank, ranks), "local": rarer(rank, ranks)}
    found["sharded"] = sharded(rank, ranks)
    if ranks == 2:
        found["cells"] = whole_cells(rank, ranks, folder)
    return found
