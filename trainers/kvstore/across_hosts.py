"""Servers of several hosts that keep the same weights: each sums the gradients of its host, and all take the mean of these.

A bucket has one server on every host; together they all-reduce its sum over gloo, while later buckets are summed.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.kvstore import cpu_sums
from trainers.kvstore.server import CpuArithmetic, Server
from trainers.kvstore.shared_regions import DTYPES, UPDATE, KvstoreConfig, SharedMapping


class HostMeans(CpuArithmetic):
    """Sums and updates in host memory; between the two, the hosts exchange their means."""

    def __init__(
        self, config: KvstoreConfig, shared: SharedMapping, own_buckets: list[int], rail: dist.ProcessGroup
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
        self._arrived: dict[int, tuple[list[int], int]] = {}  # by bucket: its workers, and the exchange
        self._next = 0  # whose turn it is, in the order
        self._under_way: deque[tuple[int, list[int], int, dist.Work]] = deque()

    def serve(self, bucket: int, workers: list[int], number: int) -> None:
        """Sum the bucket, and begin to take the mean with the other hosts, once its turn has come."""
        self._arrived[bucket] = (workers, number)
        # In the same order on every host: collectives must match, whatever order the flags are seen in.
        while (turn := self._order[self._next]) in self._arrived:
            workers, number = self._arrived.pop(turn)
            pushed = [self._regions.pushed[worker][turn] for worker in workers]
            cpu_sums.mean(pushed, [self._means[turn]], self._space)
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
        for piece in cpu_sums.pieces(len(total)):
            mean = self._space[: len(total[piece])].copy_(total[piece]).div_(self._config.hosts)
            if mode == UPDATE:
                self._steps[bucket].take(mean, settings, piece)
            else:
                for reply in replies:
                    reply[piece].copy_(mean)


class ServerAcrossHosts(Server):
    """A server whose replies wait for other hosts."""

    def __init__(
        self, config: KvstoreConfig, shared: SharedMapping, number: int, own_buckets: list[int], rail: dist.ProcessGroup
    ) -> None:
        self._hosts = HostMeans(config, shared, own_buckets, rail)
        super().__init__(config, shared.control, number, own_buckets, self._hosts)

    def turn(self) -> int:
        """Sum what is there now, and end what the other hosts have answered. Returns the number of pushes served."""
        super().turn()
        return self._hosts.finish()
