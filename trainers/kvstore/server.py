"""The server of a kvstore: waits for gradients, sums them, updates weights, and sends weights (or the mean gradient) back.

Synchronous: a bucket is served once every worker has pushed it. Asynchronous: each push is applied when it is found. Its
staleness is counted: the updates of the bucket since its worker last got the weights. `max_staleness` bounds it by holding
back pushes of workers that lead too far (stale synchronous parallel, Ho et al. 2013, counted in updates).
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainers.kvstore.shared_memory import (
    DTYPES,
    STALENESS_BINS,
    UPDATE,
    Control,
    KvstoreConfig,
    Regions,
    SharedMapping,
)
from trainers.optimizers import FlatSteps
from trainers.process import CORES, sleep_precisely

FLAG_BYTES = 4  # int32
# Between two looks at the flags: short where a GPU waits, longer where looking takes the time of those who compute.
PAUSE_SECONDS = {"cuda": 10e-6, "cpu": 50e-6}
# After this long without a push, look less often: nobody is in backward.
BUSY_SECONDS = 2e-3
IDLE_PAUSE_SECONDS = 200e-6


class Arithmetic(ABC):
    """Where sums and updates happen."""

    @abstractmethod
    def serve(self, bucket: int, workers: list[int], number: int) -> None:
        """Serve the pushes of `workers` to a bucket as exchange `number`; set their `done` flags when the reply is there."""


class CpuArithmetic(Arithmetic):
    """In host memory, on as many threads as the calling thread has (torch.set_num_threads)."""

    def __init__(
        self, config: KvstoreConfig, shared: SharedMapping, own_buckets: list[int]
    ) -> None:
        assert shared.regions is not None
        self._config, self._control, self._regions = config, shared.control, shared.regions
        weights = self._regions.weights
        self._steps = {
            bucket: FlatSteps(config.optimizer, weights[bucket]) for bucket in own_buckets
        }
        longest = max((bucket.elements for bucket in shared.layout.buckets), default=0)
        self._space = torch.empty(longest)

    def serve(self, bucket: int, workers: list[int], number: int) -> None:
        """Pass over the bucket once: sum, update, copy to where replies lie."""
        regions = self._regions
        mode, *settings = self._control.settings[workers[0]].tolist()
        pushed = [regions.pushed[worker][bucket] for worker in workers]
        if mode == UPDATE:
            self._update(bucket, workers, pushed, settings)
        elif not self._config.replies_own_gradient:
            replies = regions.gradient_replies
            copies = replies.values() if self._config.synchronous else [replies[workers[0]]]
            mean(pushed, [copy[bucket] for copy in copies], self._space)
        self._control.done[workers, bucket] = number

    def _update(
        self, bucket: int, workers: list[int], pushed: list[Tensor], settings: list[float]
    ) -> None:
        weights, steps = self._regions.weights[bucket], self._steps[bucket]
        # While others may update, each worker reads a copy of its own, so that no update tears it.
        asynchronous = not self._config.synchronous
        copies = (
            [self._regions.weight_replies[worker][bucket] for worker in workers]
            if asynchronous
            else []
        )
        steps.begin()
        for piece in pieces(len(weights)):
            parts = [gradient[piece] for gradient in pushed]
            mean = mean_into(parts, self._space[: len(parts[0])])
            steps.take(mean, settings, piece)
            for copy in copies:
                copy[piece].copy_(weights[piece])


class Distant(Protocol):
    """A worker on another host (trainers.kvstore.remote)."""

    def reply_from(self, stream: torch.cuda.Stream, bucket: int, reply: Tensor) -> None:
        """Send the reply to its push of a bucket, behind what the stream has."""


class GpuArithmetic(Arithmetic):
    """In the memory of this process's GPU; replies go to the workers' GPUs by peer copies.

    The server writes replies into the workers' memory; workers do not fetch them: a GPU that both pushes and pulls shares
    one copy engine between the two (seen on H200s: 395 GB/s one way, 2 × 197 both ways from one side, 2 × 370 when each
    side writes).
    """

    def __init__(
        self,
        config: KvstoreConfig,
        shared: SharedMapping,
        regions: Regions,
        reply_addresses: dict[int, int],
        own_buckets: list[int],
    ) -> None:
        """`reply_addresses`: where the replies of each worker here start, as this process sees the workers' memory."""
        from trainers.kvstore import cuda_copies

        self._config, self._control, self.regions = config, shared.control, regions
        # The workers on other hosts.
        self.elsewhere: Mapping[int, Distant] = {}
        self._steps = {
            bucket: FlatSteps(config.optimizer, regions.weights[bucket]) for bucket in own_buckets
        }
        longest = max((bucket.elements for bucket in shared.layout.buckets), default=0)
        self._space = torch.empty(longest, device=regions.weights[0].device)
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # until the zeros above are there
        torch.cuda.set_stream(self._stream)  # for all operators of this process
        self._updated = torch.cuda.Event()
        self._streams = [cuda_copies.CopyStream(torch.cuda.Stream()) for _ in range(config.workers)]
        self._targets = {
            worker: [start + b.pull_offset for b in shared.layout.buckets]
            for worker, start in reply_addresses.items()
        }
        offset = cuda_copies.device_address(shared.address) - shared.address
        self._flags = [
            shared.address_of(shared.control.done[worker]) + offset
            for worker in range(config.workers)
        ]

    def serve(self, bucket: int, workers: list[int], number: int) -> None:
        """Enqueue the update, then a copy and a flag for each worker."""
        mode, *settings = self._control.settings[workers[0]].tolist()
        pushed = [self.regions.pushed[worker][bucket] for worker in workers]
        if mode != UPDATE and self._config.replies_own_gradient:
            self._reply(pushed[0], bucket, workers[0], number)
            return
        reply = (
            self._update(bucket, workers, pushed, settings)
            if mode == UPDATE
            else self._mean(bucket, pushed)
        )
        self._updated.record()
        for worker in workers:
            self._streams[worker].stream.wait_event(self._updated)
            self._reply(reply, bucket, worker, number)

    def _update(
        self, bucket: int, workers: list[int], pushed: list[Tensor], settings: list[float]
    ) -> Tensor:
        weights = self.regions.weights[bucket]
        mean = mean_into(pushed, self._space[: len(pushed[0])])
        self._steps[bucket].begin()
        self._steps[bucket].take(mean, settings)
        return (
            weights
            if self._config.synchronous
            else self.regions.weight_replies[workers[0]][bucket].copy_(weights)
        )

    def _mean(self, bucket: int, pushed: list[Tensor]) -> Tensor:
        reply, space = self.regions.gradient_replies[0][bucket], self._space[: len(pushed[0])]
        mean = mean_into(pushed, reply if reply.dtype == space.dtype else space)
        return reply if mean is reply else reply.copy_(mean)

    def _reply(self, reply: Tensor, bucket: int, worker: int, number: int) -> None:
        stream = self._streams[worker]
        if worker in self.elsewhere:
            self.elsewhere[worker].reply_from(stream.stream, bucket, reply)
            return
        stream.copy(self._targets[worker][bucket], reply.data_ptr(), reply.nbytes)
        stream.write_flag(self._flags[worker] + FLAG_BYTES * bucket, number)


class Server:
    """Serves its own buckets until it is stopped. One thread calls it."""

    def __init__(
        self,
        config: KvstoreConfig,
        control: Control,
        number: int,
        own_buckets: list[int],
        arithmetic: Arithmetic,
    ) -> None:
        """`number` is this server's row in the counts of staleness."""
        self._config, self._control, self._own_buckets, self._arithmetic = (
            config,
            control,
            own_buckets,
            arithmetic,
        )
        self._columns = np.array(own_buckets, dtype=np.intp)
        # (workers, own buckets) pushes whose serving has begun
        self._taken = np.zeros((config.workers, len(own_buckets)), dtype=np.int64)
        self._bounded = config.max_staleness is not None and config.workers > 1
        self._seen = b""  # the flags when nothing more could be done
        self._left_over = False  # whether a push waits for something else than a flag
        self._version = np.zeros(len(own_buckets), dtype=np.int64)  # (own buckets) updates so far
        self._given = np.zeros(
            (config.workers, len(own_buckets)), dtype=np.int64
        )  # version that a worker has
        self._counts = control.staleness_counts[number]
        self._sum, self._max = (
            one[number : number + 1] for one in (control.staleness_sum, control.staleness_max)
        )
        self._serve: Callable[[Any], None] = (
            self._together if config.synchronous else self._as_they_come
        )

    def run(
        self, stopped: Callable[[], bool], beat: Callable[[int], None], pause_seconds: float
    ) -> None:
        """Serve until `stopped()`. Calls `beat` often, with the number of pushes served since the last call."""
        sleep_precisely()
        last = time.monotonic()
        while not stopped():
            served = self.turn()
            beat(served)
            if served:
                last = time.monotonic()
            else:
                time.sleep(
                    pause_seconds if time.monotonic() - last < BUSY_SECONDS else IDLE_PAUSE_SECONDS
                )

    def turn(self) -> int:
        """Serve what is there now. Returns the number of pushes served."""
        # Comparing bytes holds the interpreter's lock for a tenth of the time of what follows: backward needs it too.
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
        """Serve the buckets that every worker has pushed. `pushed` is (workers, own buckets)."""
        everyone = list(range(self._config.workers))
        for place in np.flatnonzero((pushed > self._taken).all(axis=0)):
            self._taken[:, place] += 1
            self._arithmetic.serve(self._own_buckets[place], everyone, int(self._taken[0, place]))

    def _as_they_come(self, pushed: Any) -> None:
        """Serve what has arrived, the stalest first. `pushed` is (workers, own buckets)."""
        workers, places = np.nonzero(pushed > self._taken)
        arrived = list(zip(workers.tolist(), places.tolist(), strict=True))
        for worker, place in (
            sorted(arrived, key=lambda one: self._given[one]) if len(arrived) > 1 else arrived
        ):
            if self._bounded and not self._admissible(worker, place):
                self._left_over = True
                continue
            self._taken[worker, place] += 1
            # A push that only wants the mean gradient updates nothing and makes nothing stale.
            if self._control.settings[worker, 0] == UPDATE:
                self._count(worker, place)
            self._arithmetic.serve(
                self._own_buckets[place], [worker], int(self._taken[worker, place])
            )

    def _count(self, worker: int, place: int) -> None:
        """Count the staleness of an update."""
        staleness = int(self._version[place] - self._given[worker, place])
        self._counts[min(staleness, STALENESS_BINS - 1)] += 1
        self._sum[0] += staleness
        self._max[0] = max(int(self._max[0]), staleness)
        self._version[place] += 1
        self._given[worker, place] = self._version[place]

    def _admissible(self, worker: int, place: int) -> bool:
        """Return whether a push may be applied now without making any update too stale; the slowest worker's always may.

        Let workers lead the slowest by at most `lead` pushes. While one worker computes, another can then make 2 lead + 2
        pushes: from `lead` behind it to `lead` ahead. Where the bound is too small for that, workers take turns, and every
        update is workers − 1 stale.
        """
        bound, pushes = self._config.max_staleness, self._taken[:, place]
        assert bound is not None
        lead = bound // (2 * (self._config.workers - 1)) - 1
        if lead < 0:
            return int(np.argmin(pushes)) == worker  # the first of those with the fewest
        return bool(pushes[worker] - pushes.min() <= lead)


# Servers of several hosts that keep the same weights: each sums the gradients of its host, and all take the mean of these.


class HostMeans(CpuArithmetic):
    """Sums and updates in host memory; between the two, the hosts exchange their means."""

    def __init__(
        self,
        config: KvstoreConfig,
        shared: SharedMapping,
        own_buckets: list[int],
        rail: dist.ProcessGroup,
    ) -> None:
        """`rail` has the servers of these buckets on all hosts. Nothing else may use it meanwhile."""
        super().__init__(config, shared, own_buckets)
        self._rail, self._order = rail, own_buckets
        layout = shared.layout
        # By bucket, (elements,) in the dtype that travels: the mean of this host, then the sum of all hosts' means.
        self._means: dict[int, Tensor] = {}
        for number in own_buckets:
            bucket = layout.buckets[number]
            dtype = DTYPES[layout.arrays[bucket.parts[0].array].wire_dtype]
            self._means[number] = torch.empty(bucket.elements, dtype=dtype)
        self._arrived: dict[
            int, tuple[list[int], int]
        ] = {}  # by bucket: its workers, and the exchange
        self._next = 0  # whose turn it is, in the order
        self._under_way: deque[tuple[int, list[int], int, dist.Work]] = deque()

    def serve(self, bucket: int, workers: list[int], number: int) -> None:
        """Sum the bucket, and begin to take the mean with the other hosts, once its turn has come."""
        self._arrived[bucket] = (workers, number)
        # In the same order on every host: collectives must match, whatever order the flags are seen in.
        while (turn := self._order[self._next]) in self._arrived:
            workers, number = self._arrived.pop(turn)
            pushed = [self._regions.pushed[worker][turn] for worker in workers]
            mean(pushed, [self._means[turn]], self._space)
            work = dist.all_reduce(self._means[turn], group=self._rail, async_op=True)
            assert work is not None
            self._under_way.append((turn, workers, number, work))
            self._next = (self._next + 1) % len(self._order)

    def finish(self) -> int:
        """Update, or reply with the mean, where the other hosts have answered. Return the number of pushes served."""
        served = 0
        while self._under_way and self._under_way[0][-1].is_completed():
            bucket, workers, number, work = self._under_way.popleft()
            work.wait()  # raises what went wrong
            self._reply(bucket, workers)
            self._control.done[workers, bucket] = number
            served += len(workers)
        return served

    def _reply(self, bucket: int, workers: list[int]) -> None:
        mode, *settings = self._control.settings[workers[0]].tolist()
        total = self._means[bucket]
        replies = [copy[bucket] for copy in self._regions.gradient_replies.values()]
        if mode == UPDATE:
            self._steps[bucket].begin()
        for piece in pieces(len(total)):
            mean = self._space[: len(total[piece])].copy_(total[piece]).div_(self._config.hosts)
            if mode == UPDATE:
                self._steps[bucket].take(mean, settings, piece)
            else:
                for reply in replies:
                    reply[piece].copy_(mean)


class ServerAcrossHosts(Server):
    """A server whose replies wait for other hosts."""

    def __init__(
        self,
        config: KvstoreConfig,
        shared: SharedMapping,
        number: int,
        own_buckets: list[int],
        rail: dist.ProcessGroup,
    ) -> None:
        self._hosts = HostMeans(config, shared, own_buckets, rail)
        super().__init__(config, shared.control, number, own_buckets, self._hosts)

    def turn(self) -> int:
        """Sum what is there now, and end what the other hosts have answered. Returns the number of pushes served."""
        super().turn()
        return self._hosts.finish()


# Sums and updates on the CPU by torch's own threads.


# Elements of a piece for each thread: its float32 sum and one source fill a core's cache of 2 MiB.
CHUNK = 1 << 18
# Cores that a rank with a GPU needs to launch kernels and to wait for flags.
SPARE_CORES = 2
# More threads would sum a little faster, and would take the cores that launch kernels.
# Seen on 4 H200s with 16 cores each, ResNet-50: 18,460 images/s ± 0.05 % with 10, 17,461 ± 3.1 % with 14.
MOST_THREADS = 10


def thread_count(threads: int | str, sharers: int, spare: int = 0) -> int:
    """Return the threads of one of `sharers` processes that sum on this machine.

    'share' is its share of the cores, less the spare ones, at most MOST_THREADS.
    """
    return (
        int(threads) if threads != "share" else max(1, min(MOST_THREADS, CORES // sharers - spare))
    )


def pieces(elements: int) -> Iterator[slice]:
    """Yield the parts of a bucket that fit the caches of the calling thread's cores."""
    step = CHUNK * torch.get_num_threads()
    for start in range(0, elements, step):
        yield slice(start, min(elements, start + step))


def mean_into(sources: Sequence[Tensor], total: Tensor) -> Tensor:
    """Return the mean of float tensors (elements,), summed in float32 in `total`; a single float32 source as it is."""
    if len(sources) == 1 and sources[0].dtype == total.dtype:
        return sources[0]
    if len(sources) > 1 and sources[0].dtype == total.dtype:
        torch.add(sources[0], sources[1], out=total)
        rest = sources[2:]
    else:
        total.copy_(sources[0])
        rest = sources[1:]
    for source in rest:
        total.add_(source)
    return total.div_(len(sources)) if len(sources) > 1 else total


def mean(sources: Sequence[Tensor], targets: Sequence[Tensor], space: Tensor) -> None:
    """Write the mean of the sources (elements,) to every target. `space` is float32, at least as long as a piece."""
    for piece in pieces(len(sources[0])):
        parts = [source[piece] for source in sources]
        # A float32 target takes the sum itself: one pass less.
        first = targets[0][piece]
        found = mean_into(parts, first if first.dtype == space.dtype else space[: len(first)])
        for target in targets:
            if target[piece].data_ptr() != found.data_ptr():
                target[piece].copy_(found)
