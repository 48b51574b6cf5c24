"""A barrier that ranks of one machine leave at nearly the same time, for windows timed by the host's clock.

Ranks leave a barrier over sockets tens of microseconds apart, which is more than a small message takes. Here every rank
spins on counters in shared memory. CPU workers, which would take each other's cores, wait over sockets.
"""

import mmap
import os
from pathlib import Path

import torch.distributed as dist

from benchmarks.ranks import Ranks
from trainers.kvstore.memory import Shared

COUNTER_BYTES = 8


class Gate:
    """One barrier, to be passed any number of times."""

    def __init__(self, ranks: Ranks) -> None:
        """Map the counters; nothing is left behind in /dev/shm. Collective."""
        self._ranks = ranks
        self._passed = 0
        path = [str(Shared.new_path())]
        dist.broadcast_object_list(path, 0)
        size = COUNTER_BYTES * ranks.world_size
        if ranks.rank == 0:
            Path(path[0]).write_bytes(bytes(size))
        ranks.barrier()
        file = os.open(path[0], os.O_RDWR)
        self._counters = memoryview(mmap.mmap(file, size)).cast("q")
        os.close(file)
        ranks.barrier()
        if ranks.rank == 0:
            Path(path[0]).unlink()

    def wait(self) -> None:
        """Leave when all ranks are here and their devices idle. Collective."""
        self._ranks.barrier()
        if self._ranks.device.type == "cpu":
            return
        self._passed += 1
        self._counters[self._ranks.rank] = self._passed
        while min(self._counters) < self._passed:
            pass
