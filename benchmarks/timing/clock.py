"""The one clock: times a run of iterations on this rank. METHOD.md, "The clock".

On a GPU a CUDA event is recorded after every iteration and all are read after the window, so that nothing waits inside it.
A host clock around the same window must agree. On a CPU worker both clocks are the host's.
"""

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.rank.group import Ranks


@dataclass(frozen=True)
class Block:
    """One window: iterations timed back to back after one lead-in iteration, which is kept and not counted."""

    ms: list[float]  # of each counted iteration, on the device's clock
    lead_in_ms: float  # of the lead-in: it starts on an idle device
    launch_ms: float  # host time to enqueue the lead-in
    device_ms: float  # the whole window on the device's clock
    host_ms: float  # the whole window on the host's clock


class Clock:
    """Times blocks of iterations; events are made once and used again."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._events: list[torch.cuda.Event] = []

    def block(self, iterate: Callable[[], None], iterations: int, between: Callable[[], None] = lambda: None) -> Block:
        """Time `iterations` calls of `iterate` after one lead-in. Collective: every rank calls it alike.

        `between` is called on the host after each; the garbage collector waits until the window is closed.
        """
        gc.collect()
        gc.disable()
        try:
            self._ranks.barrier()
            timed = self._cuda_block if self._ranks.device.type == "cuda" else self._host_block
            return timed(iterate, iterations + 1, between)
        finally:
            gc.enable()

    def held(self, iterate: Callable[[], None], hold_ms: float) -> float:
        """Device time in ms of one iteration that is enqueued while the device is held, hence without launch gaps.

        The device spins for about `hold_ms` (nvbandwidth's method); longer than enqueuing takes. GPU only.
        """
        self._ranks.barrier()
        # Cycles at a clock of 2 GHz; a slower clock holds longer, which is harmless.
        torch.cuda._sleep(int(hold_ms * 2e6))
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        iterate()
        last.record()
        torch.cuda.synchronize(self._ranks.device)
        return float(first.elapsed_time(last))

    def _cuda_block(self, iterate: Callable[[], None], calls: int, between: Callable[[], None]) -> Block:
        while len(self._events) <= calls:
            self._events.append(torch.cuda.Event(enable_timing=True))
        events = self._events[: calls + 1]
        opened = time.perf_counter()
        events[0].record()
        launched = opened
        for number, event in enumerate(events[1:]):
            iterate()
            event.record()
            if number == 0:
                launched = time.perf_counter()
            between()
        torch.cuda.synchronize(self._ranks.device)
        host_ms = (time.perf_counter() - opened) * 1e3
        ms = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
        return Block(ms[1:], ms[0], (launched - opened) * 1e3, events[0].elapsed_time(events[-1]), host_ms)

    def _host_block(self, iterate: Callable[[], None], calls: int, between: Callable[[], None]) -> Block:
        opened = time.perf_counter()
        ms = []
        for _ in range(calls):
            start = time.perf_counter()
            iterate()
            ms.append((time.perf_counter() - start) * 1e3)
            between()
        return Block(ms[1:], ms[0], ms[0], sum(ms), (time.perf_counter() - opened) * 1e3)
