"""Cells one after the other in the same two ranks, for test_giving_back: clean ones, and some that leave something."""

import gc
import os
import random
import signal
import socket
import threading
import warnings
import weakref

import torch
import torch.distributed as dist
from cells import changed_cell, make_cell, strategy_of

from benchmarks.rank.giving_back import Baseline, give_back, left
from trainers import shared_memory
from trainers.step import Training

DEVICE = torch.device("cpu")
CLEAN = {
    "none": {"name": "none"},
    "all-reduce": {"name": "nccl_allreduce"},
    "sharded": {"name": "kvstore_device"},
    "on two hosts": {"name": "hierarchical"},
    "staged": {"name": "cpu_staged"},
    "staged in shares": {"name": "cpu_staged", "staging": "sharded"},
    "all-reduce again": {"name": "nccl_allreduce"},
}
KEPT = []  # what holds on to things: a global of somebody's module


class Planted:
    """What cells leave, each with the way to remove it."""

    def __init__(self, folder):
        self.folder, self.stop = folder, threading.Event()

    def tensor(self):
        KEPT.append(torch.zeros(70 << 20, dtype=torch.uint8))
        return KEPT.clear

    def thread(self):
        thread = threading.Thread(target=self.stop.wait, name="left over")
        thread.start()
        return lambda: (self.stop.set(), thread.join())

    def file(self):
        file = (self.folder / "left").open("w")
        return file.close

    def sockets(self):
        pair = socket.socketpair()
        return lambda: [one.close() for one in pair]

    def shared_memory(self):
        path = shared_memory.new_path()
        path.touch()
        return path.unlink

    def tf32(self):
        torch.backends.cuda.matmul.allow_tf32 = True

    def cudnn(self):
        torch.backends.cudnn.deterministic = True

    def compiler(self):
        import torch._dynamo.config

        torch._dynamo.config.recompile_limit = 3

    def threads_that_compute(self):
        torch.set_num_threads(2)

    def dtype(self):
        torch.set_default_dtype(torch.float64)

    def variable(self):
        os.environ["LEFT_BY_A_CELL"] = "1"

    def variable_gone(self):
        del os.environ["OMP_NUM_THREADS"]

    def umask(self):
        os.umask(0o077)

    def working_folder(self):
        os.chdir("/")

    def handler(self):
        signal.signal(signal.SIGUSR1, lambda *_: None)

    def cores(self):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    def nothing(self):
        """What any cell may do: draw random numbers, add filters of warnings, use what torch sets up once."""
        torch.rand(1), random.random()
        warnings.simplefilter("error")

    def frozen(self):
        gc.freeze()


FAULTS = [name for name in vars(Planted) if not name.startswith("_")]


class Ranks:
    """One of two ranks, which live from cell to cell."""

    def __init__(self, rank, folder):
        self.rank, self.folder, self.number = rank, folder, 0
        self.store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        self.baseline, self.first_idle = Baseline.now(DEVICE, folder), None

    def cell(self, strategy, on_hosts=False):
        """What is left of a whole cell, and whether its model is."""
        cell = make_cell(strategy=strategy_of(strategy))
        cell = changed_cell(cell, hosts=["a", "b"], gpus=[0]) if on_hosts else cell
        self.number += 1
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(self.number), self.store), rank=self.rank, world_size=2
        )
        model = self.trained(cell)
        dist.destroy_process_group()
        found = self.back(cell)
        self.first_idle = self.first_idle or found
        return {"kept": found.kept, "model_is_there": model() is not None, "line": found.line()}

    def trained(self, cell):
        training = Training(cell, DEVICE, self.rank)
        for _ in range(2):
            training.step()
        with training.strategy.gradients_only():
            if alone := training.strategy.exchange_alone(training.parameters):
                alone()
        training.close()
        return weakref.ref(training.network)

    def back(self, cell):
        changed = give_back(self.baseline, DEVICE, cell)
        return left(self.baseline, DEVICE, self.first_idle, changed)

    def planted(self, fault):
        """What is said of a fault, and of the cell after it once what cannot be given back is gone."""
        cell = changed_cell(make_cell(strategy=strategy_of({"name": "none"})), benchmark={"name": "overhead"})
        _set_as_for(cell)
        remove = getattr(Planted(self.folder), fault)()
        found = self.back(cell).kept
        if remove:
            remove()
        _set_as_for(cell)
        return {"kept": found, "after": self.back(cell).kept, "random": torch.rand(1).item()}


def _set_as_for(cell):
    from trainers.step import set_arithmetic

    set_arithmetic(cell.precision)


def measure(rank, folder):
    """What a rank finds: {cell: facts}, {fault: sentences}."""
    os.umask(0o022)
    ranks = Ranks(rank, folder)
    cells = {name: ranks.cell(strategy, name == "on two hosts") for name, strategy in CLEAN.items()}
    faults = {fault: ranks.planted(fault) for fault in FAULTS} if rank == 0 else {}
    dist.init_process_group("gloo", store=dist.PrefixStore("end", ranks.store), rank=rank, world_size=2)
    return {"cells": cells, "faults": faults}
