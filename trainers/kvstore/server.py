"""The server of a kvstore: waits for gradients, sums and updates them, and hands weights (or the mean gradient) back.

Synchronous: a bucket is served once every worker has pushed it. Asynchronous: each push is applied when it is found, and
its staleness is counted: updates to the bucket since its worker was last given the weights. `max_staleness` bounds it by
holding back pushes of workers that lead too far (stale synchronous parallel, Ho et al. 2013, counted in updates).
"""

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.kvstore import cpu_sums
from trainers.kvstore.shared_regions import STALENESS_BINS, UPDATE, Control, KvstoreConfig, Regions, Shared

PR_SET_TIMERSLACK = 29  # <linux/prctl.h>
# Between two looks at the flags: short where a GPU waits, longer where looking takes the time of those who compute.
PAUSE_SECONDS = {"cuda": 10e-6, "cpu": 50e-6}
# After this long without a push, look less often: nobody is in backward.
BUSY_SECONDS = 2e-3
IDLE_PAUSE_SECONDS = 200e-6


def short_naps() -> None:
    """Let this thread's sleeps end when they should, not 50 µs later."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)


class Arithmetic(ABC):
    """Where sums and updates happen."""

    @abstractmethod
    def serve(self, bucket: int, workers: list[int], number: int) -> None:
        """Serve the pushes of `workers` to a bucket as exchange `number`; flags say when the answer is there."""


class OnCpu(Arithmetic):
    """In host memory, on the threads of the thread that calls (torch.set_num_threads)."""

    def __init__(self, terms: KvstoreConfig, shared: Shared, mine: list[int]) -> None:
        assert shared.regions is not None
        self._terms, self._control, self._regions = terms, shared.control, shared.regions
        self._momentum = {bucket: torch.zeros_like(self._regions.weights[bucket]) for bucket in mine}
        longest = max((bucket.elements for bucket in shared.layout.buckets), default=0)
        self._space = torch.empty(longest)

    def serve(self, bucket: int, workers: list[int], number: int) -> None:
        """One pass over the bucket: sum, update, hand back."""
        regions = self._regions
        mode, *settings = self._control.settings[workers[0]].tolist()
        sources = [regions.pushed[worker][bucket] for worker in workers]
        if mode == UPDATE:
            weights, momentum = regions.weights[bucket], self._momentum[bucket]
            # While others may update, a worker reads a copy of its own: nothing torn.
            snapshots = [] if self._terms.synchronous else [regions.out[worker][bucket] for worker in workers]
            for piece in cpu_sums.pieces(len(weights)):
                parts = [source[piece] for source in sources]
                cpu_sums.sgd(
                    weights[piece], cpu_sums.mean_into(parts, self._space[: len(parts[0])]), momentum[piece], *settings
                )
                for snapshot in snapshots:
                    snapshot[piece].copy_(weights[piece])
        elif not self._terms.echoes:
            copies = regions.out_sent if self._terms.synchronous else [regions.out_sent[workers[0]]]
            cpu_sums.mean(sources, [copy[bucket] for copy in copies], self._space)
        self._control.done[workers, bucket] = number


class OnGpu(Arithmetic):
    """In the memory of this process's GPU; answers go to the workers' GPUs by peer copies.

    Answers are pushed, not pulled: a GPU that both pushes and pulls shares one copy engine between the two (seen on
    H200s: 395 GB/s one way, 2 × 197 both ways from one side, 2 × 370 when each side writes).
    """

    def __init__(
        self, terms: KvstoreConfig, shared: Shared, regions: Regions, inboxes: list[int], mine: list[int]
    ) -> None:
        """`inboxes` are the workers' addresses for answers."""
        from trainers.kvstore import cuda_copies

        self._terms, self._control, self._regions = terms, shared.control, regions
        self._momentum = {bucket: torch.zeros_like(regions.weights[bucket]) for bucket in mine}
        longest = max((bucket.elements for bucket in shared.layout.buckets), default=0)
        self._space = torch.empty(longest, device=regions.weights[0].device)
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # the zeros are there
        torch.cuda.set_stream(self._stream)  # of all operators of this process
        self._updated = torch.cuda.Event()
        self._lanes = [cuda_copies.Lane(torch.cuda.Stream()) for _ in range(terms.workers)]
        self._targets = [[inbox + bucket.pull_offset for bucket in shared.layout.buckets] for inbox in inboxes]
        offset = cuda_copies.device_address(shared.address) - shared.address
        self._flags = [shared.address_of(shared.control.done[worker]) + offset for worker in range(terms.workers)]

    def serve(self, bucket: int, workers: list[int], number: int) -> None:
        """Enqueue the update, then a copy and a flag for each worker."""
        regions = self._regions
        mode, *settings = self._control.settings[workers[0]].tolist()
        sources = [regions.pushed[worker][bucket] for worker in workers]
        if mode != UPDATE and self._terms.echoes:
            self._answer(sources[0], bucket, workers[0], number)
            return
        space = self._space[: len(sources[0])]
        if mode == UPDATE:
            answer = regions.weights[bucket]
            cpu_sums.sgd(answer, cpu_sums.mean_into(sources, space), self._momentum[bucket], *settings)
            if not self._terms.synchronous:
                answer = regions.out[workers[0]][bucket].copy_(answer)
        else:
            answer = regions.out_sent[0][bucket]
            mean = cpu_sums.mean_into(sources, answer if answer.dtype == space.dtype else space)
            if mean is not answer:
                answer.copy_(mean)
        self._updated.record()
        for worker in workers:
            self._lanes[worker].stream.wait_event(self._updated)
            self._answer(answer, bucket, worker, number)

    def _answer(self, answer: Tensor, bucket: int, worker: int, number: int) -> None:
        lane = self._lanes[worker]
        lane.copy(self._targets[worker][bucket], answer.data_ptr(), answer.nbytes)
        lane.write_flag(self._flags[worker] + 4 * bucket, number)


class Server:
    """Serves some buckets to their end. One thread calls it."""

    def __init__(
        self, terms: KvstoreConfig, control: Control, number: int, mine: list[int], arithmetic: Arithmetic
    ) -> None:
        self._terms, self._control, self._mine, self._arithmetic = terms, control, mine, arithmetic
        self._columns = np.array(mine, dtype=np.intp)
        self._taken = np.zeros((terms.workers, len(mine)), dtype=np.int64)  # pushes whose serving has begun
        self._bounded = terms.max_staleness is not None and terms.workers > 1
        self._seen = b""  # the flags when nothing more could be done
        self._left_over = False  # a push has to wait for something else than a flag
        self._version = np.zeros(len(mine), dtype=np.int64)  # updates so far
        self._given = np.zeros((terms.workers, len(mine)), dtype=np.int64)  # version that a worker was given
        self._staleness = control.staleness[number]
        self._stale, self._worst = (counts[number : number + 1] for counts in (control.stale, control.worst))
        self._serve: Callable[[Any], None] = self._together if terms.synchronous else self._as_they_come

    def run(self, told_to_stop: Callable[[], bool], beat: Callable[[int], None], pause_seconds: float) -> None:
        """Serve until told to stop. `beat` is called often, with the number of pushes that were served."""
        short_naps()
        last = time.monotonic()
        while not told_to_stop():
            served = self.turn()
            beat(served)
            if served:
                last = time.monotonic()
            else:
                time.sleep(pause_seconds if time.monotonic() - last < BUSY_SECONDS else IDLE_PAUSE_SECONDS)

    def turn(self) -> int:
        """Serve what is there now. Returns the number of pushes."""
        # Comparing bytes takes the interpreter's lock for a tenth of the time of what follows: backward needs it too.
        seen = self._control.pushed.tobytes()
        if seen == self._seen:
            return 0
        self._left_over = False
        before = int(self._taken.sum())
        flags = np.frombuffer(seen, np.int32).reshape(self._taken.shape[0], -1)
        self._serve(flags[:, self._columns])
        self._seen = b"" if self._left_over else seen
        return int(self._taken.sum()) - before

    def _together(self, pushed: Any) -> None:
        """Serve what every worker has pushed."""
        everyone = list(range(self._terms.workers))
        ready = np.flatnonzero((pushed > self._taken).all(axis=0))
        for place in ready:
            self._taken[:, place] += 1
            self._arithmetic.serve(self._mine[place], everyone, int(self._taken[0, place]))

    def _as_they_come(self, pushed: Any) -> None:
        """Serve what has arrived, the stalest first."""
        workers, places = np.nonzero(pushed > self._taken)
        arrived = list(zip(workers.tolist(), places.tolist(), strict=True))
        for worker, place in sorted(arrived, key=lambda one: self._given[one]) if len(arrived) > 1 else arrived:
            if self._bounded and not self._admissible(worker, place):
                self._left_over = True
                continue
            self._taken[worker, place] += 1
            # What hands a gradient back updates nothing and makes nothing stale.
            if self._control.settings[worker, 0] == UPDATE:
                staleness = int(self._version[place] - self._given[worker, place])
                self._staleness[min(staleness, STALENESS_BINS - 1)] += 1
                self._stale[0] += staleness
                self._worst[0] = max(int(self._worst[0]), staleness)
                self._version[place] += 1
                self._given[worker, place] = self._version[place]
            self._arithmetic.serve(self._mine[place], [worker], int(self._taken[worker, place]))

    def _admissible(self, worker: int, place: int) -> bool:
        """Whether a push may be applied now without making any update too stale; the slowest worker's always may.

        While a worker computes, another that may lead by `lead` pushes can make 2 lead + 2: from as far behind to as far
        ahead. Where the bound leaves no room for that, workers take turns, and every update is workers − 1 stale.
        """
        bound, pushes = self._terms.max_staleness, self._taken[:, place]
        assert bound is not None
        lead = bound // (2 * (self._terms.workers - 1)) - 1
        if lead < 0:
            return int(np.argmin(pushes)) == worker  # the first of those with the fewest
        return bool(pushes[worker] - pushes.min() <= lead)
