"""Messages between a worker and a server on different hosts, which share no memory.

A bucket has a tag of its own in each direction. Where servers are on GPUs, buckets travel by NCCL;
requests and what they ask for by gloo in any case.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store, Work  # type: ignore[attr-defined]

from trainers.kvstore.buckets import BucketLayout
from trainers.kvstore.shared_memory import (
    FLAG_BYTES,
    UPDATE,
    KvstoreConfig,
    Regions,
    SharedMapping,
    address_of,
)
from trainers.kvstore.wires import SERVER, WORKER, GpuWire, Guarded, Wire
from trainers.memory import CopyStream, device_address
from trainers.optimizers import SETTINGS

NO_SETTINGS = (0.0,) * (1 + SETTINGS)  # a row of Control.settings
COUNTS = 3  # what a server answers to COUNT and STOP: updates, sum and maximum of their staleness
# Requests that a server can take in before it has looked at the first: buckets need not wait for
# each other.
REQUESTS_AHEAD = 16


class Demand(IntEnum):
    """What a worker asks a server to do."""

    PUSH = 0  # take the gradient of a bucket that follows, and answer with weights or the mean
    PROBE = 1  # send a bucket back as it came
    WEIGHTS = 2  # take the first weights of a bucket
    COUNT = 3  # tell the staleness
    STOP = 4  # this worker is done


class RemoteServer:
    """One server on another host, as a worker sees it.

    Buckets leave while backward runs, and a thread takes in the replies.
    """

    def __init__(
        self, store: Store, worker: int, server: int, config: KvstoreConfig, layout: BucketLayout
    ) -> None:
        self.buckets = layout.of_server(server)
        self._wire = Wire(store, worker, server, WORKER, len(layout.buckets))
        self._gpu_wire = None
        if config.server_gpu:
            self._gpu_wire = GpuWire(store, worker, server, WORKER)
            self._receiving = torch.cuda.Stream()
        self._under_way: dict[int, Any] = {}  # by bucket, what must stay until the reply is here
        self._replies: SimpleQueue[tuple[Work, Callable[[], None]] | None] = SimpleQueue()
        self._one_at_a_time = threading.Lock()
        self._thread = Guarded(self._wire.name, self._wait_for_replies)
        self._thread.start()

    def push(
        self,
        kind: Demand,
        bucket: int,
        sent: Tensor,
        reply: Tensor,
        arrived: Callable[[], None],
        settings: Sequence[float] = NO_SETTINGS,
    ) -> None:
        """Send a bucket in host memory as PUSH or PROBE. Waits for nothing.

        Calls `arrived`, from another thread, when the reply is there.
        """
        answer = self._wire.receive(reply, bucket)
        with self._one_at_a_time:
            request = self._request(kind, bucket, settings)
            self._under_way[bucket] = (request, self._wire.send(sent, bucket))
        self._replies.put((answer, arrived))

    def exchange_on_gpu(
        self,
        kind: Demand,
        bucket: int,
        sent: Tensor,
        reply: Tensor,
        settings: Sequence[float],
        sending: torch.cuda.Stream,
    ) -> torch.cuda.Stream:
        """Enqueue a PUSH or PROBE behind what the stream `sending` has.

        Returns the stream that has the reply.
        """
        assert self._gpu_wire is not None
        with self._one_at_a_time:
            self._under_way[bucket] = self._request(kind, bucket, settings)
        with torch.cuda.stream(sending):
            self._gpu_wire.send(sent)
        with torch.cuda.stream(self._receiving):
            self._gpu_wire.receive(reply)
        return self._receiving

    def give_weights(self, bucket: int, weights: Tensor) -> None:
        """Send a bucket's first weights, in host memory: they are there once `ask` is answered."""
        request = self._request(Demand.WEIGHTS, bucket)
        sent = self._wire.send(weights, self._wire.weights_tag + bucket)
        self._under_way[bucket] = (request, weights, sent)

    def ask(self, kind: Demand) -> list[float]:
        """Return the answer to COUNT or STOP: updates, sum and maximum of their staleness."""
        counts = torch.zeros(COUNTS, dtype=torch.float64)
        answer = self._wire.receive(counts, self._wire.request_tag)
        with self._one_at_a_time:
            _, request = self._request(kind)
        request.wait()
        answer.wait()
        return list(counts.tolist())

    def check(self) -> None:
        """Raises RuntimeError: the connection has failed."""
        self._wire.watch.check()
        self._thread.check()

    def close(self) -> None:
        """Part from the server."""
        self.ask(Demand.STOP)
        self._replies.put(None)
        self._thread.join()
        self._wire.part()
        if self._gpu_wire:
            self._gpu_wire.close()

    def _request(
        self, kind: Demand, bucket: int = 0, settings: Sequence[float] = NO_SETTINGS
    ) -> tuple[Tensor, Work]:
        request = torch.tensor([kind, bucket, *settings], dtype=torch.float64)
        return request, self._wire.send(request, self._wire.request_tag)

    def _wait_for_replies(self) -> None:
        for work, arrived in iter(self._replies.get, None):
            work.wait()
            arrived()


class RemoteWorker(ABC):
    """One worker on another host, as a server sees it.

    A thread takes its requests, and sets the flags that a worker of this host sets itself.
    """

    def __init__(
        self, store: Store, worker: int, server: int, shared: SharedMapping, regions: Regions
    ) -> None:
        """Meet the worker. The regions of the server have a row for it."""
        self._worker, self._server = worker, server
        self._control, self._regions = shared.control, regions
        self._pushed = regions.pushed[worker]  # by bucket, the gradient
        self._wire = Wire(store, worker, server, SERVER, len(shared.layout.buckets))
        # Of each of the server's buckets so far.
        self._pushes = dict.fromkeys(shared.layout.of_server(server), 0)
        self._requests: deque[tuple[Tensor, Work]] = deque()
        self.stopped = False
        self._thread = Guarded(self._wire.name, self._serve_requests)

    def check(self) -> None:
        """Raises RuntimeError: the connection has failed."""
        self._wire.watch.check()
        self._thread.check()

    @abstractmethod
    def _take_gradient(self, bucket: int, settings: list[float]) -> None:
        """Take the gradient of a PUSH, then the settings, and set the flag."""

    @abstractmethod
    def _send_back(self, bucket: int) -> None:
        """Answer a PROBE: a gradient goes back as it came."""

    def _begin(self) -> None:
        for _ in range(REQUESTS_AHEAD):
            self._requests.append(self._next_request())
        self._thread.start()

    def _next_request(self) -> tuple[Tensor, Work]:
        request = torch.zeros(2 + len(NO_SETTINGS), dtype=torch.float64)
        return request, self._wire.receive(request, self._wire.request_tag)

    def _serve_requests(self) -> None:
        kind = Demand.PUSH
        while kind != Demand.STOP:
            request, came = self._requests.popleft()
            came.wait()
            number, bucket, *settings = request.tolist()
            kind = Demand(int(number))
            self._serve(kind, int(bucket), settings)
            self._requests.append(self._next_request())
        self._part()
        self.stopped = True

    def _serve(self, kind: Demand, bucket: int, settings: list[float]) -> None:
        if kind not in (Demand.COUNT, Demand.STOP) and bucket not in self._pushes:
            raise ValueError(f"bucket {bucket} is another server's")
        match kind:
            case Demand.PUSH:
                self._pushes[bucket] += 1
                self._take_gradient(bucket, settings)
            case Demand.PROBE:
                self._send_back(bucket)
            case Demand.WEIGHTS:
                weights = self._regions.weights[bucket]
                received = torch.empty_like(weights, device="cpu")
                self._wire.receive(received, self._wire.weights_tag + bucket).wait()
                weights.copy_(received)
            case Demand.COUNT | Demand.STOP:
                self._send_counts()

    def _send_counts(self) -> None:
        control, row = self._control, self._server
        counts = torch.zeros(COUNTS, dtype=torch.float64)
        counts[0] = int(control.updates[row])
        counts[1] = int(control.staleness_sum[row])
        counts[2] = int(control.staleness_max[row])
        self._wire.send(counts, self._wire.request_tag).wait()

    def _part(self) -> None:
        self._wire.part()


class CpuRemoteWorker(RemoteWorker):
    """One of a server in host memory: buckets travel by gloo."""

    def __init__(
        self, store: Store, worker: int, server: int, shared: SharedMapping, regions: Regions
    ) -> None:
        super().__init__(store, worker, server, shared, regions)
        self._config = shared.config
        self._under_way: dict[int, tuple[Tensor, Work]] = {}  # by bucket, the last reply
        self._gradients: dict[int, Work] = {}  # by bucket, the next one
        for bucket in self._pushes:
            self._await_gradient(bucket)
        self._begin()

    def reply(self, bucket: int) -> None:
        """Begin to send what the push of a bucket came to. Waits for nothing."""
        regions, worker, synchronous = self._regions, self._worker, self._config.synchronous
        if self._control.settings[worker, 0] == UPDATE:
            result = regions.weights if synchronous else regions.weight_replies[worker]
        elif self._config.replies_own_gradient:
            result = self._pushed
        else:
            replies = regions.gradient_replies  # synchronously they are equal
            result = replies[next(iter(replies)) if synchronous else worker]
        self._send(bucket, result[bucket])

    def _take_gradient(self, bucket: int, settings: list[float]) -> None:
        self._gradients[bucket].wait()
        self._control.settings[self._worker] = settings
        self._control.pushed[self._worker, bucket] = self._pushes[bucket]

    def _send_back(self, bucket: int) -> None:
        self._gradients[bucket].wait()
        self._send(bucket, self._pushed[bucket])

    def _send(self, bucket: int, reply: Tensor) -> None:
        # The worker pushes again when it has the reply, and not before.
        self._await_gradient(bucket)
        self._under_way[bucket] = (reply, self._wire.send(reply, bucket))

    def _await_gradient(self, bucket: int) -> None:
        self._gradients[bucket] = self._wire.receive(self._pushed[bucket], bucket)


class GpuRemoteWorker(RemoteWorker):
    """One of a server on a GPU: buckets travel by NCCL, which receives on a stream of its own."""

    def __init__(
        self, store: Store, worker: int, server: int, shared: SharedMapping, regions: Regions
    ) -> None:
        super().__init__(store, worker, server, shared, regions)
        self._gpu_wire = GpuWire(store, worker, server, SERVER)
        self._receiving = CopyStream(torch.cuda.Stream())
        offset = device_address(shared.address) - shared.address
        self._flags = address_of(shared.control.pushed[worker]) + offset
        # Buckets in the order in which the worker awaits the replies, and replies whose turn has
        # not come.
        self._order: deque[int] = deque()
        self._ready: dict[int, Tensor] = {}
        self._begin()

    def reply(self, bucket: int, reply: Tensor, stream: torch.cuda.Stream) -> None:
        """Send a reply behind what the stream has, once its turn has come.

        An asynchronous server may serve in another order than the worker awaits.
        """
        self._ready[bucket] = reply
        while self._order and self._order[0] in self._ready:
            with torch.cuda.stream(stream):
                self._gpu_wire.send(self._ready.pop(self._order.popleft()))

    def _serve_requests(self) -> None:
        torch.cuda.set_device(self._regions.device)  # of this thread
        super()._serve_requests()

    def _take_gradient(self, bucket: int, settings: list[float]) -> None:
        # The settings are here already; the flag comes behind the gradient on its stream.
        self._control.settings[self._worker] = settings
        self._order.append(bucket)
        self._receive(bucket)
        self._receiving.write_flag(self._flags + FLAG_BYTES * bucket, self._pushes[bucket])

    def _send_back(self, bucket: int) -> None:
        self._receive(bucket)
        with torch.cuda.stream(self._receiving.stream):
            self._gpu_wire.send(self._pushed[bucket])

    def _receive(self, bucket: int) -> None:
        with torch.cuda.stream(self._receiving.stream):
            self._gpu_wire.receive(self._pushed[bucket])

    def _part(self) -> None:
        super()._part()
        self._gpu_wire.close()


def remote_workers(
    store: Store, server: int, shared: SharedMapping, regions: Regions
) -> dict[int, RemoteWorker]:
    """Meet the workers on other hosts, and give them rows in the server's regions.

    Returns them by number.
    """
    config, layout = shared.config, shared.layout
    workers = config.remote_workers(config.places.server_hosts[server])
    kind: type[RemoteWorker]
    if config.server_gpu:
        kind = GpuRemoteWorker
        torch.cuda.set_device(regions.device)  # of this thread; the regions have all rows
    else:
        kind = CpuRemoteWorker
        # Takes pages as they are written.
        base = torch.empty(Regions.size(config, layout, workers), dtype=torch.uint8)
        regions.add(Regions(base, config, layout, workers), config.synchronous)
    return {worker: kind(store, worker, server, shared, regions) for worker in workers}
