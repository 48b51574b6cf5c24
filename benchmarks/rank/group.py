"""The ranks of a cell as a benchmark sees them: who I am, what the others measured, and waiting for them on the host."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Ranks:
    """This rank among its peers. Host values travel over gloo, outside every timed window."""

    rank: int
    world_size: int
    device: torch.device

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, by rank; each rank passes equally many. Collective."""
        mine = torch.tensor(list(values), dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [values.tolist() for values in everyone]

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over the ranks: the time of an iteration is that of its slowest rank. Collective."""
        return [max(column) for column in zip(*self.gather(values), strict=True)]

    def barrier(self) -> None:
        """Wait for every rank on the host; queued work of the device is finished first. Collective."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1))

    def alone(self, work: Callable[[], None], beat: Callable[[int], None]) -> None:
        """Rank 0 does `work` while the others wait on the host, with signs of life and idle devices. Collective."""
        if self.rank == 0:
            work()
        waiting = dist.all_reduce(torch.zeros(1), async_op=True)
        while not waiting.is_completed():
            beat(0)
            time.sleep(POLL_SECONDS)
        waiting.wait()
