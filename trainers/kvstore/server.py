"""The server of a kvstore: waits for gradients, sums them, updates and sends weights (or the mean).

Synchronous: a bucket is served once every worker has pushed it. Asynchronous: each push is applied
when it is found. Its staleness is counted: the updates of the bucket since its worker last got the
weights. `max_staleness` bounds it by holding back pushes of workers that lead too far (stale
synchronous parallel, Ho et al. 2013, counted in updates).
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainers.kvstore.remote import CpuRemoteWorker, GpuRemoteWorker, RemoteWorker
from trainers.kvstore.shared_memory import (
    DTYPES,
    FLAG_BYTES,
    UPDATE,
    Regions,
    SharedMapping,
    address_of,
)
from trainers.memory import CopyStream, device_address
from trainers.optimizers import FlatSteps
from trainers.process import CORES, sleep_precisely

# Between two looks at the flags: short where a GPU waits, longer where looking takes the time of
# those who compute.
PAUSE_SECONDS = {"cuda": 10e-6, "cpu": 50e-6}
# After this long without a push, look less often: nobody is in backward.
BUSY_SECONDS = 2e-3
IDLE_PAUSE_SECONDS = 200e-6
# Elements of a piece for each thread that sums: its float32 sum and one source fill a core's cache
# of 2 MiB.
CHUNK = 1 << 18
# Cores that a rank with a GPU needs to launch kernels and to wait for flags.
SPARE_CORES = 2
# More threads would sum a little faster, and would take the cores that launch kernels. Seen on 4
# H200s with 16 cores each, ResNet-50: 18,460 images/s ± 0.05 % with 10, 17,461 ± 3.1 % with 14.
MOST_THREADS = 10


class Arithmetic(ABC):
    """Where sums and updates happen, and how replies get to workers."""

    def __init__(self, shared: SharedMapping, regions: Regions | None, server: int) -> None:
        """`regions` hold the weights of all buckets; this is a server of some."""
        assert regions is not None
        self.config, self.control, self.regions = shared.config, shared.control, regions
        self.remote: Mapping[int, RemoteWorker] = {}  # workers on other hosts
        self.own_buckets = shared.layout.of_server(server)
        self._steps: dict[int, FlatSteps] = {}
        for bucket in self.own_buckets:
            self._steps[bucket] = FlatSteps(self.config.optimizer, regions.weights[bucket])
        longest = max((bucket.elements for bucket in shared.layout.buckets), default=0)
        self._space = torch.empty(longest, device=regions.device)

    @abstractmethod
    def serve(self, bucket: int, workers: list[int], exchange: int) -> None:
        """Serve the pushes of `workers` to a bucket as an exchange, and tell them."""


class CpuArithmetic(Arithmetic):
    """In host memory, on as many threads as the calling thread has (torch.set_num_threads)."""

    remote: Mapping[int, CpuRemoteWorker]

    def serve(self, bucket: int, workers: list[int], exchange: int) -> None:
        """Pass over the bucket once: sum, update, copy to where replies lie."""
        regions, synchronous = self.regions, self.config.synchronous
        mode, *settings = self.control.settings[workers[0]].tolist()
        pushed = [regions.pushed[worker][bucket] for worker in workers]
        if mode == UPDATE:
            weights, steps = regions.weights[bucket], self._steps[bucket]
            copies = []
            if not synchronous:
                # While others may update, each worker reads a copy, so that no update tears it.
                copies = [regions.weight_replies[worker][bucket] for worker in workers]
            steps.begin()
            for piece in pieces(len(weights)):
                parts = [gradient[piece] for gradient in pushed]
                steps.take(mean_into(parts, self._space[: len(parts[0])]), settings, piece)
                for copy in copies:
                    copy[piece].copy_(weights[piece])
        elif not self.config.replies_own_gradient:
            replies = regions.gradient_replies
            chosen = list(replies) if synchronous else [workers[0]]
            mean(pushed, [replies[copy][bucket] for copy in chosen], self._space)
        self.control.done[workers, bucket] = exchange
        if self.remote:
            for worker in workers:
                if worker in self.remote:
                    self.remote[worker].reply(bucket)


class GpuArithmetic(Arithmetic):
    """In the memory of this process's GPU; replies go to the workers' GPUs by peer copies.

    The server writes replies into the workers' memory; workers do not fetch them: a GPU that both
    pushes and pulls shares one copy engine between the two (seen on H200s: 395 GB/s one way,
    2 × 197 both ways from one side, 2 × 370 when each side writes).
    """

    remote: Mapping[int, GpuRemoteWorker]

    def __init__(
        self, shared: SharedMapping, regions: Regions, server: int, replies: Mapping[int, int]
    ) -> None:
        """`replies`: the address, in this process, of the replies to each worker of this host."""
        super().__init__(shared, regions, server)
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # until the zeros above are there
        torch.cuda.set_stream(self._stream)  # for all operators of this process
        self._updated = torch.cuda.Event()
        self._streams = [CopyStream(torch.cuda.Stream()) for _ in range(self.config.workers)]
        self._buckets, self._replies = shared.layout.buckets, replies
        offset = device_address(shared.address) - shared.address
        self._flags = [address_of(flags) + offset for flags in shared.control.done]

    def serve(self, bucket: int, workers: list[int], exchange: int) -> None:
        """Enqueue the update, then a copy and a flag for each worker."""
        regions = self.regions
        mode, *settings = self.control.settings[workers[0]].tolist()
        pushed = [regions.pushed[worker][bucket] for worker in workers]
        if mode == UPDATE:
            reply = regions.weights[bucket]
            total = mean_into(pushed, self._space[: len(pushed[0])])
            self._steps[bucket].begin()
            self._steps[bucket].take(total, settings)
            if not self.config.synchronous:
                reply = regions.weight_replies[workers[0]][bucket].copy_(reply)
        elif self.config.replies_own_gradient:
            self._reply(pushed[0], bucket, workers[0], exchange)
            return
        else:
            reply, space = regions.gradient_replies[0][bucket], self._space[: len(pushed[0])]
            total = mean_into(pushed, reply if reply.dtype == space.dtype else space)
            if total is not reply:
                reply.copy_(total)
        self._updated.record()
        for worker in workers:
            self._streams[worker].stream.wait_event(self._updated)
            self._reply(reply, bucket, worker, exchange)

    def _reply(self, reply: Tensor, bucket: int, worker: int, exchange: int) -> None:
        stream = self._streams[worker]
        if worker in self.remote:
            self.remote[worker].reply(bucket, reply, stream.stream)
            return
        target = self._replies[worker] + self._buckets[bucket].pull_offset
        stream.copy(target, reply.data_ptr(), reply.nbytes)
        stream.write_flag(self._flags[worker] + FLAG_BYTES * bucket, exchange)


class HostMeans(CpuArithmetic):
    """Sums and updates in host memory; between the two, hosts exchange the means of their workers.

    The servers of all hosts keep the same weights.
    """

    def __init__(self, shared: SharedMapping, server: int, rail: dist.ProcessGroup) -> None:
        """`rail` has the servers of these buckets on all hosts. Nothing else may use it."""
        super().__init__(shared, shared.regions, server)
        self._rail = rail
        # By bucket, (elements,) as it travels: the mean of this host, then the sum of all means.
        self._means: dict[int, Tensor] = {}
        for index in self.own_buckets:
            bucket = shared.layout.buckets[index]
            dtype = DTYPES[shared.layout.arrays[bucket.parts[0].array].wire_dtype]
            self._means[index] = torch.empty(bucket.elements, dtype=dtype)
        # By bucket: its workers, and the exchange.
        self._arrived: dict[int, tuple[list[int], int]] = {}
        self._next = 0  # whose turn it is, in the order
        self._under_way: deque[tuple[int, list[int], int, dist.Work]] = deque()

    def serve(self, bucket: int, workers: list[int], exchange: int) -> None:
        """Sum the bucket, and begin to take the mean with the other hosts in its turn."""
        self._arrived[bucket] = (workers, exchange)
        # In the same order on every host: collectives must match, whatever order the flags are
        # seen in.
        turn = self.own_buckets[self._next]
        while turn in self._arrived:
            workers, exchange = self._arrived.pop(turn)
            pushed = [self.regions.pushed[worker][turn] for worker in workers]
            mean(pushed, [self._means[turn]], self._space)
            work = dist.all_reduce(self._means[turn], group=self._rail, async_op=True)
            assert work is not None
            self._under_way.append((turn, workers, exchange, work))
            self._next = (self._next + 1) % len(self.own_buckets)
            turn = self.own_buckets[self._next]

    def finish(self) -> int:
        """Reply where the other hosts have answered. Return the number of pushes served."""
        served = 0
        while self._under_way and self._under_way[0][-1].is_completed():
            bucket, workers, exchange, work = self._under_way.popleft()
            work.wait()  # raises what went wrong
            self._reply(bucket, workers)
            self.control.done[workers, bucket] = exchange
            served += len(workers)
        return served

    def _reply(self, bucket: int, workers: list[int]) -> None:
        mode, *settings = self.control.settings[workers[0]].tolist()
        total = self._means[bucket]
        replies = [copy[bucket] for copy in self.regions.gradient_replies.values()]
        if mode == UPDATE:
            self._steps[bucket].begin()
        for piece in pieces(len(total)):
            mean = self._space[: len(total[piece])].copy_(total[piece]).div_(self.config.hosts)
            if mode == UPDATE:
                self._steps[bucket].take(mean, settings, piece)
            else:
                for reply in replies:
                    reply[piece].copy_(mean)


class Server:
    """Serves its own buckets until it is stopped. One thread calls it."""

    def __init__(self, arithmetic: Arithmetic, row: int) -> None:
        """`row` is this server's row in the counts of staleness."""
        config, control = arithmetic.config, arithmetic.control
        own_buckets = arithmetic.own_buckets
        self._config, self._control = config, control
        self._own_buckets, self._arithmetic = own_buckets, arithmetic
        self._columns = np.array(own_buckets, dtype=np.intp)
        # (workers, own buckets) pushes whose serving has begun
        self._taken = np.zeros((config.workers, len(own_buckets)), dtype=np.int64)
        self._bounded = config.max_staleness is not None and config.workers > 1
        self._seen = b""  # the flags when nothing more could be done
        self._left_over = False  # whether a push waits for something else than a flag
        self._version = np.zeros(len(own_buckets), dtype=np.int64)  # (own buckets) updates so far
        # (workers, own buckets) the version that a worker has
        self._given = np.zeros_like(self._taken)
        self._updates = control.updates[row : row + 1]
        self._sum = control.staleness_sum[row : row + 1]
        self._max = control.staleness_max[row : row + 1]

    def run(
        self, stopped: Callable[[], bool], beat: Callable[[int], None], pause_seconds: float
    ) -> None:
        """Serve until `stopped()`. Calls `beat` with the pushes served since the last call."""
        sleep_precisely()
        last = time.monotonic()
        while not stopped():
            served = self.turn()
            beat(served)
            if served:
                last = time.monotonic()
            elif time.monotonic() - last < BUSY_SECONDS:
                time.sleep(pause_seconds)
            else:
                time.sleep(IDLE_PAUSE_SECONDS)

    def turn(self) -> int:
        """Serve what is there now. Returns the number of pushes served."""
        served = 0
        # Comparing bytes holds the interpreter's lock for a tenth of the time of what follows:
        # backward needs it too.
        seen = self._control.pushed.tobytes()
        if seen != self._seen:
            self._left_over = False
            before = int(self._taken.sum())
            flags = np.frombuffer(seen, np.int32).reshape(self._taken.shape[0], -1)
            pushed = flags[:, self._columns]  # (workers, own buckets)
            if self._config.synchronous:
                everyone = list(range(self._config.workers))
                for column in np.flatnonzero((pushed > self._taken).all(axis=0)):
                    self._taken[:, column] += 1
                    bucket, exchange = self._own_buckets[column], int(self._taken[0, column])
                    self._arithmetic.serve(bucket, everyone, exchange)
            else:
                self._serve_each(pushed)
            self._seen = b"" if self._left_over else seen
            served = int(self._taken.sum()) - before
        if isinstance(self._arithmetic, HostMeans):
            return self._arithmetic.finish()
        return served

    def _serve_each(self, pushed: Any) -> None:
        """Serve what has arrived, the stalest first. `pushed` is (workers, own buckets)."""
        workers, columns = np.nonzero(pushed > self._taken)
        arrived = list(zip(workers.tolist(), columns.tolist(), strict=True))
        if len(arrived) > 1:
            arrived.sort(key=lambda push: self._given[push])
        for worker, column in arrived:
            if self._bounded and not self._admissible(worker, column):
                self._left_over = True
                continue
            self._taken[worker, column] += 1
            # A push that only wants the mean gradient updates nothing and makes nothing stale.
            if self._control.settings[worker, 0] == UPDATE:
                staleness = int(self._version[column] - self._given[worker, column])
                self._updates[0] += 1
                self._sum[0] += staleness
                self._max[0] = max(int(self._max[0]), staleness)
                self._version[column] += 1
                self._given[worker, column] = self._version[column]
            bucket, exchange = self._own_buckets[column], int(self._taken[worker, column])
            self._arithmetic.serve(bucket, [worker], exchange)

    def _admissible(self, worker: int, column: int) -> bool:
        """Return whether a push may be applied now without making any update too stale.

        The slowest worker's always may. Let workers lead the slowest by at most `lead` pushes.
        While one worker computes, another can then make 2 lead + 2 pushes: from `lead` behind it to
        `lead` ahead. Where the bound is too small for that, workers take turns, and every update is
        workers − 1 stale.
        """
        bound, pushes = self._config.max_staleness, self._taken[:, column]
        assert bound is not None
        lead = bound // (2 * (self._config.workers - 1)) - 1
        if lead < 0:
            return int(np.argmin(pushes)) == worker  # the first of those with the fewest
        return bool(pushes[worker] - pushes.min() <= lead)


def thread_count(threads: int | str, sharers: int, spare: int = 0) -> int:
    """Return the threads of one of `sharers` processes that sum on this machine.

    'share' is its share of the cores, less the spare ones, at most MOST_THREADS.
    """
    if threads == "share":
        return max(1, min(MOST_THREADS, CORES // sharers - spare))
    return int(threads)


def pieces(elements: int) -> Iterator[slice]:
    """Yield the parts of a bucket that fit the caches of the calling thread's cores."""
    step = CHUNK * torch.get_num_threads()
    for start in range(0, elements, step):
        yield slice(start, min(elements, start + step))


def mean_into(sources: Sequence[Tensor], total: Tensor) -> Tensor:
    """Return the mean of tensors (elements,), summed in float32 in `total`.

    A single float32 source is returned as it is.
    """
    in_float32 = sources[0].dtype == total.dtype
    if len(sources) == 1 and in_float32:
        return sources[0]
    if in_float32:
        torch.add(sources[0], sources[1], out=total)
        rest = sources[2:]
    else:
        total.copy_(sources[0])
        rest = sources[1:]
    for source in rest:
        total.add_(source)
    return total.div_(len(sources)) if len(sources) > 1 else total


def mean(sources: Sequence[Tensor], targets: Sequence[Tensor], space: Tensor) -> None:
    """Write the mean of the sources to every target. `space` is float32, as long as a piece."""
    for piece in pieces(len(sources[0])):
        parts = [source[piece] for source in sources]
        # A float32 target takes the sum itself: one pass less.
        first = targets[0][piece]
        total = mean_into(parts, first if first.dtype == space.dtype else space[: len(first)])
        for target in targets:
            if target[piece].data_ptr() != total.data_ptr():
                target[piece].copy_(total)
