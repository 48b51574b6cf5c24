"""The ranks of a cell as a benchmark sees them: this rank's number, the others' values, and what all do together on hosts."""

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainers import shared_memory
from trainers.peers import told

POLL_SECONDS = 0.02  # between two looks while rank 0 works: far below the seconds that it takes


@dataclass(frozen=True)
class Ranks:
    """This rank among all ranks. What is told travels over gloo, outside every timed window.

    Clocks of two hosts have nothing in common: no time that another rank tells may be subtracted from one of this rank's.
    """

    rank: int
    world_size: int
    device: torch.device
    several_hosts: bool = False

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of every rank, by rank. Every rank passes the same number of values. Collective."""
        mine = torch.tensor(list(values), dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [values.tolist() for values in everyone]

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over the ranks: an iteration takes as long as its slowest rank. Collective."""
        return [max(column) for column in zip(*self.gather(values), strict=True)]

    def barrier(self) -> None:
        """Finish this rank's device, then wait on the host for every rank. Collective."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1))

    def on_rank_zero(self, work: Callable[[], None], beat: Callable[[int], None]) -> None:
        """Run `work` on rank 0. The others wait on the host with idle devices and call `beat` as signs of life. Collective."""
        if self.rank == 0:
            work()
        waiting = dist.all_reduce(torch.zeros(1), async_op=True)
        while not waiting.is_completed():
            beat(0)
            time.sleep(POLL_SECONDS)
        waiting.wait()

    def map_shared(self, size_bytes: int) -> mmap.mmap:
        """Map zeroed host memory that every rank sees; no file stays behind. Collective.

        Raises:
            OSError: there is not that much shared memory.
            ValueError: the ranks are on several hosts, which share none.
        """
        if self.several_hosts:
            raise ValueError("ranks on several hosts share no memory; accepted is a cell on one host")
        path = shared_memory.named(told.by_first(shared_memory.new_path().name))
        if self.rank == 0:
            memory = shared_memory.create(path, size_bytes)
        self.barrier()
        if self.rank != 0:
            memory = shared_memory.attach(path, size_bytes)
        self.barrier()
        if self.rank == 0:
            path.unlink()
        return memory
