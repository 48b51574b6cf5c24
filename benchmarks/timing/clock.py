"""The one clock: times a run of iterations on this rank. METHOD.md, "The clock".

On a GPU it records a CUDA event after every iteration and reads all events after the window, so
that nothing waits inside the window. A host clock around the same window must agree. On a CPU
worker both clocks are the host's.
"""

import gc
import itertools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.rank.ranks import Block, Ranks

# Generations of garbage that steps make. To look through the oldest too takes 24 ms of a rank with
# torch, before each window.
YOUNG = 1
CYCLES_PER_MS = 2e6  # of a GPU at 2 GHz; a slower clock spins longer, which is harmless
COUNTER_BYTES = 8  # an int64 for each rank


class Clock:
    """Times blocks of iterations. Makes its events once and uses them again."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._events: list[torch.cuda.Event] = []

    def block(
        self,
        iterate: Callable[[], None],
        iterations: int,
        between: Callable[[], None] = lambda: None,
    ) -> Block:
        """Time `iterations` calls of `iterate` after one lead-in. Collective.

        Calls `between` on the host after each iteration. Python's garbage collector is off inside
        the window.
        """
        gc.collect(YOUNG)
        gc.disable()
        try:
            self._ranks.barrier()
            timed = self._cuda_block if self._ranks.device.type == "cuda" else self._host_block
            return timed(iterate, iterations + 1, between)
        finally:
            gc.enable()

    def launch_ahead(self, iterate: Callable[[], None], delay_ms: float) -> float:
        """Return the device's ms for one iteration without launch gaps. GPUs only.

        It is enqueued while the device spins for about `delay_ms`, which must be longer than
        enqueuing takes (the method of nvbandwidth).
        """
        self._ranks.barrier()
        torch.cuda._sleep(int(delay_ms * CYCLES_PER_MS))
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        iterate()
        last.record()
        torch.cuda.synchronize(self._ranks.device)
        return float(first.elapsed_time(last))

    def _cuda_block(
        self, iterate: Callable[[], None], calls: int, between: Callable[[], None]
    ) -> Block:
        while len(self._events) <= calls:
            self._events.append(torch.cuda.Event(enable_timing=True))
        events = self._events[: calls + 1]
        opened = time.perf_counter()
        events[0].record()
        launched = opened
        for call, event in enumerate(events[1:]):
            iterate()
            event.record()
            if call == 0:
                launched = time.perf_counter()
            between()
        torch.cuda.synchronize(self._ranks.device)
        host_ms = (time.perf_counter() - opened) * 1e3
        ms = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
        return Block(
            ms=ms[1:],
            lead_in_ms=ms[0],
            launch_ms=(launched - opened) * 1e3,
            device_ms=events[0].elapsed_time(events[-1]),
            host_ms=host_ms,
        )

    def _host_block(
        self, iterate: Callable[[], None], calls: int, between: Callable[[], None]
    ) -> Block:
        opened = time.perf_counter()
        ms = []
        for _ in range(calls):
            start = time.perf_counter()
            iterate()
            ms.append((time.perf_counter() - start) * 1e3)
            between()
        return Block(
            ms=ms[1:],
            lead_in_ms=ms[0],
            launch_ms=ms[0],
            device_ms=sum(ms),
            host_ms=(time.perf_counter() - opened) * 1e3,
        )


class SpinBarrier:
    """A barrier that ranks leave at nearly the same time, for windows timed by the host's clock.

    It can be passed any call of times.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Map the counters of GPUs on one host. Collective."""
        self._ranks = ranks
        self._passed = 0
        if ranks.several_hosts:
            self._number = torch.zeros(1, device=ranks.device)
        elif ranks.device.type == "cuda":
            memory = ranks.map_shared(COUNTER_BYTES * ranks.world_size)
            self._counters = memoryview(memory).cast("q")

    def wait(self, settle: Callable[[], object]) -> None:
        """Call `settle`; return when all ranks have and their devices are idle. Collective."""
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
