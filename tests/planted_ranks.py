"""What two real ranks find where a fault is planted: faulty exchanges, and whole cells."""

import contextlib
import dataclasses
import itertools
import time
from unittest import mock

import torch
import torch.distributed as dist
from build import SMALL_CNN, make_cell
from derived_results import run_whole

from benchmarks.rank.ranks import Ranks, Reporter
from benchmarks.record import CellFolder
from benchmarks.training import correctness, throughput
from trainers import models, step
from trainers.step import Training
from trainers.strategies import ddp
from trainers.strategy import Strategy

LOST = 0.001  # of all elements


class Planted(Strategy):
    """Averages every gradient in place between backward and update, but for one fault."""

    def __init__(self, fault):
        self.fault, self.on, self.chance = fault, True, torch.Generator()

    def prepare(self, model, optimizer):
        self.model = model
        return model

    def bytes_moved(self, gradient_bytes, world_size):
        return gradient_bytes

    @contextlib.contextmanager
    def without_exchange(self):
        self.on = False
        yield
        self.on = True

    def exchange(self):
        if not self.on or self.fault == "nothing exchanged":
            return
        arrays = [parameter.grad for parameter in self.model.parameters()]
        smallest, rank = min(arrays, key=torch.Tensor.numel), dist.get_rank()
        self.chance.manual_seed(0)  # the same on every rank and in every run
        for number, array in enumerate(arrays):
            if self.fault == "a bucket dropped" and number < 2:
                continue
            own = array.view(-1)[0].item()
            sent = array.to(HOOKS.get(self.fault, array.dtype))
            dist.all_reduce(sent)
            array.copy_(sent if self.fault == "sum" else sent / 2)
            if self.fault == "elements lost":
                array[torch.rand(array.shape, generator=self.chance) < LOST] = 0
            if self.fault == "one element of each array":  # as of a broken kernel
                array.view(-1)[0] = own
        if self.fault == "one array summed":
            smallest *= 2
        if self.fault == "one array lost":
            smallest.zero_()
        if self.fault == "NaN on one rank" and rank:
            smallest.view(-1)[-1] = float("nan")
        if self.fault == "one element wrong on one rank" and rank:
            smallest.view(-1)[-1] *= 1.5


def faulty_training(fault, ranks, precision="fp32"):
    """A Training whose strategy is replaced before its first step."""
    cell = make_cell(strategy={"name": "none"}, precision=precision, model=SMALL_CNN)
    training = Training(cell, ranks.device, ranks.rank)
    training.strategy = Planted(fault)
    training.strategy.prepare(training.model, training.optimizer)
    return training


HOOKS = {"fp16 hook": torch.float16, "bf16 hook": torch.bfloat16}
GRADIENT_FAULTS = (
    *HOOKS, "elements lost", "one array summed", "one array lost", "a bucket dropped",
    "NaN on one rank", "one element wrong on one rank",
)  # fmt: skip
# Faults of every step, and whether they leave equal replicas.
LEFT_EQUAL = {
    "none": True, "nothing exchanged": False, "sum": True, "one element of each array": False
}  # fmt: skip
PRECISIONS = ("fp32", "bf16")


def after_two_steps(ranks):
    """{fault: facts of the gradient, and whether replicas are equal}."""
    facts = {}
    for fault in LEFT_EQUAL:
        training = faulty_training(fault, ranks)
        for _ in range(2):
            training.step()
        facts[fault] = correctness.gradient(training, next(training.batches), ranks)
        facts[fault]["equal"] = correctness.replicas_equal(training, ranks)
    return facts


def gradients(ranks):
    """{precision: {fault: facts}}; of `unrepeatable` ones backward differs in each run."""
    facts = {}
    for precision in PRECISIONS:
        training = faulty_training("none", ranks, precision)
        training.step()
        batch = next(training.batches)
        facts[precision] = of_fault = {}
        for fault in ("none", *GRADIENT_FAULTS):
            training.strategy.fault = fault
            of_fault[fault] = correctness.gradient(training, batch, ranks)
        with unrepeatable(ranks.rank):
            for fault in ("none", "one array lost"):
                training.strategy.fault = fault
                noisy = correctness.gradient(training, batch, ranks)
                of_fault[f"unrepeatable, {fault}"] = noisy
    return facts


def unrepeatable(rank):
    """Have backward add relative noise of 1e-4 to every gradient, another one in each run."""
    chance, exchange = torch.Generator().manual_seed(rank), Planted.exchange

    def noisy(strategy):
        for parameter in strategy.model.parameters():
            parameter.grad *= 1 + 1e-4 * torch.randn(parameter.grad.shape, generator=chance)
        exchange(strategy)

    return mock.patch.object(Planted, "exchange", noisy)


# Whole cells. Faults of one cell have different codes, so that each is seen alone.


def same_batches(cell, device, rank, model):
    """In float32, or the layers would refuse them without autocast."""
    return REAL_BATCHES(dataclasses.replace(cell, precision="fp32"), device, 0, model)


def one_batch(cell, device, rank, model):
    return itertools.repeat(next(REAL_BATCHES(cell, device, rank, model)))


def sleeping_beat(reporter, iterations=1):
    time.sleep(0.01 if iterations else 0)
    REAL_BEAT(reporter, iterations)


def frozen(network):
    model = REAL_BUILD(network)
    for parameter in list(model.parameters())[1::2]:
        parameter.requires_grad_(False)
    return model


def counted_twice(parameters):
    sizes = REAL_SIZES(parameters)
    return sizes | {"gradient_bytes": 2 * sizes["gradient_bytes"]}


REAL_BATCHES, REAL_BEAT = step.synthetic, Reporter.beat
REAL_BUILD, REAL_SIZES = models.build, models.sizes
REAL_BYTES = ddp.NcclAllreduce.bytes_moved
CELLS = {
    "clean": (make_cell(precision="bf16", exposed_rounds=0), []),
    "first": (
        make_cell(precision="bf16", exposed_rounds=0, max_iterations=7),
        [
            (step, "AUTOCAST", {}),
            (step, "synthetic", same_batches),
            (Strategy, "update", lambda strategy, optimizer: None),
            (ddp.NcclAllreduce, "bytes_moved", lambda *asked: 2 * REAL_BYTES(*asked)),
            (Reporter, "beat", sleeping_beat),
        ],
    ),
    "second": (
        make_cell(exposed_rounds=0, max_iterations=7),
        [
            (step, "synthetic", one_batch),
            (models, "build", frozen),
            (models, "sizes", counted_twice),
            (ddp.DdpAlone, "__call__", lambda alone: None),
        ],
    ),
}


def measure(rank, folder):
    """What a rank finds: the gradients' facts; the cells leave their lines in the folder."""
    ranks = Ranks(rank, 2, torch.device("cpu"))
    for name, (cell, plants) in CELLS.items():
        lines = CellFolder(folder / name)
        lines.rank_lines(0).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as planted:
            for owner, method, fault in plants:
                planted.enter_context(mock.patch.object(owner, method, fault))
            run_whole(throughput.run, cell, ranks, lines)
    found = {"after two steps": after_two_steps(ranks)}
    with mock.patch.object(correctness, "MOST_ELEMENTS", 2_000):  # of 18,362
        return found | gradients(ranks)
