"""A barrier that ranks leave at nearly the same time, for windows timed by the host's clock.

Ranks leave a barrier over sockets one after the other, and the first would wait for the last inside the window. Here every
rank spins on counters in shared memory. Several hosts share none: there GPUs all-reduce one number, which ends on all within
the latency of the wire. CPU workers would take each other's cores, so they wait over sockets.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.rank.group import Ranks

COUNTER_BYTES = 8  # an int64 for each rank


class SpinBarrier:
    """A barrier that can be passed any number of times."""

    def __init__(self, ranks: Ranks) -> None:
        """Map the counters of GPUs on one host. Collective."""
        self._ranks = ranks
        self._passed = 0
        if ranks.several_hosts:
            self._number = torch.zeros(1, device=ranks.device)
        elif ranks.device.type == "cuda":
            self._counters = memoryview(ranks.map_shared(COUNTER_BYTES * ranks.world_size)).cast("q")

    def wait(self, settle: Callable[[], object]) -> None:
        """Call `settle`; return when all ranks have done so and their devices are idle. Collective."""
        if self._ranks.device.type == "cpu":
            settle()
            self._ranks.barrier()
            return
        self._ranks.barrier()
        settle()
        if self._ranks.several_hosts:
            dist.all_reduce(self._number)
            torch.cuda.current_stream().synchronize()
            return
        self._passed += 1
        self._counters[self._ranks.rank] = self._passed
        while min(self._counters) < self._passed:
            pass
