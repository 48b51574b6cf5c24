"""The connection of one worker and one server on different hosts.

Each such pair has a group of its own over gloo: no pair waits for another, and one that breaks breaks no other. A bucket has
a tag of its own in each direction. A receiver names its memory before the data comes, so gloo writes it there at once, and
buckets are under way in both directions at the same time. gloo listens on the interfaces of GLOO_SOCKET_IFNAME only, and
opens a connection for each name in that list; tags take turns on them.
"""

import datetime
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    Store,
    TCPStore,
    Work,
)

from trainers.kvstore.buckets import BucketLayout
from trainers.kvstore.cuda_copies import CopyStream, device_address
from trainers.kvstore.server import FLAG_BYTES, Arithmetic
from trainers.kvstore.shared_memory import UPDATE, KvstoreConfig, Regions, SharedMapping
from trainers.optimizers import SETTINGS
from trainers.process import sleep_precisely

# The supervisor ends what hangs; this ends what has no supervisor any more.
TIMEOUT = datetime.timedelta(hours=2)
WORKER, SERVER = 0, 1  # ranks in a pair's group
IFNAME, LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
NO_SETTINGS = (0.0,) * (1 + SETTINGS)  # a row of Control.settings
COUNTS = (
    3  # what a server answers to COUNT and STOP: its updates, sum and maximum of their staleness
)
# After a failure: the main thread has this long to say it in its own words.
LAST_WORDS_SECONDS = 2.0


def rendezvous_store() -> PrefixStore:
    """Return the store where the cell's processes met (torchrun's variables)."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore("ringside/kvstore", TCPStore(address, port, is_master=False))


class Demand(IntEnum):
    """What a worker asks a server to do."""

    PUSH = 0  # take the gradient of a bucket that follows, and answer with weights or the mean
    PROBE = 1  # send a bucket back as it came
    WEIGHTS = 2  # take the first weights of a bucket
    COUNT = 3  # tell the staleness
    STOP = 4  # this worker is done


@dataclass(frozen=True)
class Tags:
    """Tags of the messages of a pair, in both directions; that of a bucket's gradient and reply is the bucket's number."""

    buckets: int

    @property
    def request(self) -> int:
        """What a worker asks; a server's answer to COUNT and STOP."""
        return self.buckets

    @property
    def farewell(self) -> int:
        """What each says when it is done with the other."""
        return self.buckets + 1

    def weights(self, bucket: int) -> int:
        """First weights of a bucket."""
        return self.buckets + 2 + bucket


class Wire:
    """The messages of a worker and a server, as one of them sees them."""

    def __init__(self, store: Store, worker: int, server: int, me: int, buckets: int) -> None:
        """Meet the other one in the store. `me` is WORKER or SERVER; `buckets` are those of all servers.

        Raises:
            RuntimeError: it does not come.
        """
        self.tags = Tags(buckets)
        self.name = f"the connection of worker {worker} and server {server}"
        os.environ.setdefault(IFNAME, LOOPBACK)  # gloo alone would choose by the host's name
        self._group: Any = ProcessGroupGloo(
            PrefixStore(f"{worker}-{server}", store), me, 2, TIMEOUT
        )
        self._peer = 1 - me
        # gloo does not wake who waits for a message of which a part has come when the other side ends. This it often wakes; the
        # supervisor, which sees the end of every process, ends the cell in any case.
        self._watch = Guarded(self.name, self.receive(torch.zeros(1), self.tags.farewell).wait)
        self._watch.start()

    def send(self, tensor: Tensor, tag: int) -> Work:
        """Begin to send a tensor (elements,), which stays as it is until the work is done. Waits for nothing."""
        work: Work = self._group.send([tensor.view(torch.uint8)], self._peer, tag)
        return work

    def receive(self, tensor: Tensor, tag: int) -> Work:
        """Begin to receive into a tensor (elements,)."""
        work: Work = self._group.recv([tensor.view(torch.uint8)], self._peer, tag)
        return work

    def check(self) -> None:
        """Raises RuntimeError: the connection has failed."""
        self._watch.check()

    def part(self) -> None:
        """Say farewell, and wait for the other's."""
        self.send(torch.zeros(1), self.tags.farewell).wait()
        self._watch.join()


class Guarded:
    """A thread that waits for messages. What it raises, `check` raises again; without a check it ends the process."""

    def __init__(self, what: str, work: Callable[[], object]) -> None:
        """`what` is what failed if the thread raises: `the connection of …`."""
        self._what, self._work, self._error = what, work, ""
        self._thread = threading.Thread(target=self._guard, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def check(self) -> None:
        """Raises RuntimeError: the thread has failed."""
        if self._error:
            raise RuntimeError(self._error)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def _guard(self) -> None:
        try:
            self._work()
        except BaseException as error:
            traceback.print_exc()  # to the rank's log
            self._error = f"{self._what} failed: {error}"
            time.sleep(LAST_WORDS_SECONDS)
            os._exit(1)  # the main thread waits for a GPU, which waits for us


# The servers on other hosts, which a worker meets in the cell's store.


class ServersElsewhere:
    """All servers on other hosts; none where all are on one.

    `by_bucket` has the server of each bucket that goes there, `on_gpus` those that are on GPUs.
    """

    def __init__(self, worker: int, config: KvstoreConfig, layout: BucketLayout) -> None:
        """Meet them in the cell's store."""
        hosts = enumerate(config.places.server_hosts if config.places else ())
        far = [server for server, host in hosts if worker in config.elsewhere(host)]
        store = rendezvous_store() if far else None
        self._servers: list[ServerElsewhere] = []
        self.on_gpus: dict[int, GpuServerElsewhere] = {}
        for server in far:
            assert store is not None
            buckets = [
                number for number, bucket in enumerate(layout.buckets) if bucket.server == server
            ]
            wire = Wire(store, worker, server, WORKER, len(layout.buckets))
            if config.server_gpu:
                pass

                on_gpu = GpuServerElsewhere(wire, buckets, GpuWire(store, worker, server, WORKER))
                self._servers.append(on_gpu)
                self.on_gpus |= dict.fromkeys(buckets, on_gpu)
            else:
                self._servers.append(ServerElsewhere(wire, buckets))
        self.by_bucket = {bucket: server for server in self._servers for bucket in server.buckets}

    def counts(self) -> list[list[float]]:
        """Return the updates of each server, and the sum and maximum of their staleness."""
        return [server.ask(Demand.COUNT) for server in self._servers]

    def check(self) -> None:
        """Raises RuntimeError: a connection has failed."""
        for server in self._servers:
            server.check()

    def close(self) -> None:
        """Part from all."""
        for server in self._servers:
            server.close()


# A server on another host, as a worker sees it: buckets leave while backward runs, and a thread takes in the replies.


class ServerElsewhere:
    """One server on another host."""

    def __init__(self, wire: Wire, buckets: Sequence[int]) -> None:
        """`buckets` are those of the server."""
        self._wire, self._tags, self.buckets = wire, wire.tags, buckets
        self._under_way: dict[
            int, tuple[Any, ...]
        ] = {}  # by bucket, what must stay until the reply is here
        self._replies: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._one_at_a_time = threading.Lock()
        self._thread = Guarded(wire.name, self._wait_for_replies)
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
        """Send a bucket as PUSH or PROBE. Calls `arrived`, from another thread, when the reply is there. Waits for nothing."""
        answer = self._wire.receive(reply, bucket)
        with self._one_at_a_time:
            request = self._request(kind, bucket, settings)
            self._under_way[bucket] = (*request, self._wire.send(sent, bucket))
        self._replies.put((answer, arrived))

    def give_weights(self, bucket: int, weights: Tensor) -> None:
        """Send the first weights of a bucket, in host memory; the server has them once it answers `ask`."""
        request = self._request(Demand.WEIGHTS, bucket)
        self._under_way[bucket] = (
            *request,
            weights,
            self._wire.send(weights, self._tags.weights(bucket)),
        )

    def ask(self, kind: Demand) -> list[float]:
        """Return the answer to COUNT or STOP: updates, sum and maximum of their staleness."""
        counts = torch.zeros(COUNTS, dtype=torch.float64)
        answer = self._wire.receive(counts, self._tags.request)
        with self._one_at_a_time:
            _, asked = self._request(kind)
        asked.wait()
        answer.wait()
        return list(counts.tolist())

    def check(self) -> None:
        """Raises RuntimeError: the connection has failed."""
        self._wire.check()
        self._thread.check()

    def close(self) -> None:
        """Part from the server."""
        self.ask(Demand.STOP)
        self._replies.put(None)
        self._thread.join()
        self._wire.part()

    def _request(
        self, kind: Demand, bucket: int = 0, settings: Sequence[float] = NO_SETTINGS
    ) -> tuple[Tensor, Work]:
        request = torch.tensor([kind, bucket, *settings], dtype=torch.float64)
        return request, self._wire.send(request, self._tags.request)

    def _wait_for_replies(self) -> None:
        """Wait for the replies in the order of the pushes."""
        while (expected := self._replies.get()) is not None:
            work, arrived = expected
            work.wait()
            arrived()


class AfterCopies:
    """Calls what must wait until a GPU's copies are done, in a thread of its own. A flag in host memory says when.

    The thread makes no call of CUDA's. Such a call waits while backward waits for room in a full queue of the GPU, and the room
    may only come after what is called here: two H200s stood still so.
    """

    def __init__(self, pause_seconds: float) -> None:
        """`pause_seconds` is the time between two looks at a flag."""
        self._pause_seconds = pause_seconds
        self._calls: queue.SimpleQueue[tuple[Callable[[], bool], Callable[[], None]]] = (
            queue.SimpleQueue()
        )
        Guarded("sending what a GPU has copied", self._run).start()

    def call(self, copied: Callable[[], bool], work: Callable[[], None]) -> None:
        """Have `work` called once `copied()`. Waits for nothing."""
        self._calls.put((copied, work))

    def _run(self) -> None:
        sleep_precisely()
        while True:
            copied, work = self._calls.get()
            while not copied():
                time.sleep(self._pause_seconds)
            work()


# The workers on other hosts, as a server sees them: a thread for each sets the flags that a worker here sets itself.


# Requests that a server can take in before it has looked at the first: buckets need not wait for each other.
REQUESTS_AHEAD = 16


class WorkerElsewhere:
    """One worker on another host."""

    def __init__(
        self,
        wire: Wire,
        worker: int,
        server: int,
        shared: SharedMapping,
        regions: Regions,
        own_buckets: list[int],
    ) -> None:
        """`server` is the own number; the regions have a row for the worker."""
        self._wire, self._worker, self._server = wire, worker, server
        self._config, self._control, self._regions = shared.config, shared.control, regions
        self._tags = wire.tags
        self._requests = deque(self._next_request() for _ in range(REQUESTS_AHEAD))
        self._gradients = {bucket: self._next_gradient(bucket) for bucket in own_buckets}
        self._under_way: dict[int, tuple[Tensor, Work]] = {}  # by bucket, the last reply
        self.stopped = False
        self._thread = Guarded(wire.name, self._serve_requests)
        self._thread.start()

    def reply(self, bucket: int) -> None:
        """Begin to send what the push of a bucket came to. Waits for nothing."""
        self._answer(bucket, self._result(bucket))

    def check(self) -> None:
        """Raises RuntimeError: the connection has failed."""
        self._wire.check()
        self._thread.check()

    def _answer(self, bucket: int, reply: Tensor) -> None:
        # The worker pushes again when it has the reply, and not before.
        self._gradients[bucket] = self._next_gradient(bucket)
        self._under_way[bucket] = (reply, self._wire.send(reply, bucket))

    def _result(self, bucket: int) -> Tensor:
        regions, worker, synchronous = self._regions, self._worker, self._config.synchronous
        if self._control.settings[worker, 0] == UPDATE:
            return (
                regions.weights[bucket] if synchronous else regions.weight_replies[worker][bucket]
            )
        if self._config.replies_own_gradient:
            return regions.pushed[worker][bucket]
        replies = regions.gradient_replies  # synchronously they are equal
        return replies[next(iter(replies)) if synchronous else worker][bucket]

    def _next_gradient(self, bucket: int) -> Work | None:
        return self._wire.receive(self._regions.pushed[self._worker][bucket], bucket)

    def _next_request(self) -> tuple[Tensor, Work]:
        request = torch.zeros(2 + len(NO_SETTINGS), dtype=torch.float64)
        return request, self._wire.receive(request, self._tags.request)

    def _serve_requests(self) -> None:
        kind = Demand.PUSH
        while kind != Demand.STOP:
            request, came = self._requests.popleft()
            came.wait()
            kind, number, *settings = request.tolist()
            bucket = int(number)
            if kind <= Demand.WEIGHTS and bucket not in self._gradients:
                raise ValueError(f"bucket {bucket} is another server's")
            if kind == Demand.PUSH:
                self._take_gradient(bucket, settings)
            elif kind == Demand.PROBE:
                self._send_back(bucket)
            elif kind == Demand.WEIGHTS:
                weights = self._regions.weights[bucket]
                came_here = torch.empty_like(weights, device="cpu")
                self._wire.receive(came_here, self._tags.weights(bucket)).wait()
                weights.copy_(came_here)
            else:
                self._wire.send(self._counts(), self._tags.request).wait()
            self._requests.append(self._next_request())
        self._part()
        self.stopped = True

    def _part(self) -> None:
        """Part from the worker."""
        self._wire.part()

    def _take_gradient(self, bucket: int, settings: list[float]) -> None:
        """Have the flag set when the gradient is there."""
        self._wait_for_gradient(bucket)
        self._control.settings[self._worker] = settings
        self._control.pushed[self._worker, bucket] += 1

    def _send_back(self, bucket: int) -> None:
        """Send a gradient back as it came."""
        self._wait_for_gradient(bucket)
        self._answer(bucket, self._regions.pushed[self._worker][bucket])

    def _wait_for_gradient(self, bucket: int) -> None:
        work = self._gradients[bucket]
        assert work is not None
        work.wait()

    def _counts(self) -> Tensor:
        control, row = self._control, self._server
        counts: list[Any] = [
            control.staleness_counts[row].sum(), control.staleness_sum[row], control.staleness_max[row]
        ]  # fmt: skip
        return torch.tensor(counts, dtype=torch.float64)


class Answering(Arithmetic):
    """An arithmetic whose replies to workers on other hosts are sent."""

    def __init__(self, inner: Arithmetic, elsewhere: Mapping[int, WorkerElsewhere]) -> None:
        self._inner, self._elsewhere = inner, elsewhere

    def serve(self, bucket: int, workers: list[int], number: int) -> None:
        """Serve, then begin to send."""
        self._inner.serve(bucket, workers, number)
        for worker in workers:
            if worker in self._elsewhere:
                self._elsewhere[worker].reply(bucket)


def workers_elsewhere(
    store: Store, server: int, shared: SharedMapping, own_buckets: list[int]
) -> dict[int, WorkerElsewhere]:
    """Meet the workers on other hosts, and give them rows in this server's regions. Returns them by number."""
    config, layout = shared.config, shared.layout
    theirs = config.elsewhere(config.places.server_hosts[server]) if config.places else []
    wires = {worker: Wire(store, worker, server, SERVER, len(layout.buckets)) for worker in theirs}
    assert shared.regions is not None
    base = torch.empty(
        Regions.size(config, layout, theirs), dtype=torch.uint8
    )  # takes pages as they are written
    shared.regions.add(Regions(base, config, layout, theirs), config.synchronous)
    return {
        worker: WorkerElsewhere(wire, worker, server, shared, shared.regions, own_buckets)
        for worker, wire in wires.items()
    }


# Workers and servers on different hosts that both keep gradients on GPUs: buckets travel by NCCL, requests by gloo.


class GpuWire:
    """The communicators of a worker and a server, as one of them sees them. Calls are ordered on the current stream."""

    def __init__(self, store: Store, worker: int, server: int, me: int) -> None:
        """Connect on the current GPU. `me` is WORKER or SERVER.

        Raises:
            RuntimeError: NCCL cannot connect the two.
        """
        self._me, self._peer = me, 1 - me
        # By who sends.
        nccl: Any = ProcessGroupNCCL
        self._groups = {
            sender: nccl(PrefixStore(f"{worker}-{server}-from-{sender}", store), me, 2, TIMEOUT)
            for sender in (WORKER, SERVER)
        }
        first = torch.zeros(1, device="cuda")
        for sender in (WORKER, SERVER):  # NCCL connects in the first call
            if sender == me:
                self.send(first)
            else:
                self.receive(first)
        torch.cuda.synchronize()

    def send(self, tensor: Tensor) -> None:
        """Enqueue the sending of a tensor (elements,), behind what the current stream has, which does not wait for its end."""
        self._groups[self._me].send([tensor.view(torch.uint8)], self._peer, 0)

    def receive(self, tensor: Tensor) -> None:
        """Make the current stream receive a tensor (elements,)."""
        self._groups[self._peer].recv([tensor.view(torch.uint8)], self._peer, 0).wait()

    def close(self) -> None:
        """Take the communicators apart. Nothing is under way."""
        torch.cuda.synchronize()
        for group in self._groups.values():
            group.abort()  # needs nothing from the other side


class GpuServerElsewhere(ServerElsewhere):
    """One server on a GPU of another host, as a worker sees it."""

    def __init__(self, wire: Wire, buckets: Sequence[int], gpu_wire: GpuWire) -> None:
        super().__init__(wire, buckets)
        self._gpu_wire, self._receiving = gpu_wire, torch.cuda.Stream()

    def exchange(
        self,
        kind: Demand,
        bucket: int,
        sent: Tensor,
        reply: Tensor,
        settings: Sequence[float],
        sending: torch.cuda.Stream,
    ) -> torch.cuda.Stream:
        """Enqueue a PUSH or PROBE behind what the stream `sending` has. Returns the stream that has the reply."""
        with self._one_at_a_time:
            self._under_way[bucket] = self._request(kind, bucket, settings)
        with torch.cuda.stream(sending):
            self._gpu_wire.send(sent)
        with torch.cuda.stream(self._receiving):
            self._gpu_wire.receive(reply)
        return self._receiving

    def close(self) -> None:
        """Part from the server."""
        super().close()
        self._gpu_wire.close()


class GpuWorkerElsewhere(WorkerElsewhere):
    """One worker on a GPU of another host, as a server sees it."""

    def __init__(
        self,
        wire: Wire,
        gpu_wire: GpuWire,
        worker: int,
        server: int,
        shared: SharedMapping,
        regions: Regions,
        own_buckets: list[int],
        device: torch.device,
    ) -> None:
        """`regions` lie on the server's GPU, `device`."""
        self._gpu_wire, self._device, self._receiving = (
            gpu_wire,
            device,
            CopyStream(torch.cuda.Stream()),
        )
        offset = device_address(shared.address) - shared.address
        self._flags = shared.address_of(shared.control.pushed[worker]) + offset
        self._pushes = dict.fromkeys(own_buckets, 0)  # of each bucket so far
        self._order: deque[int] = (
            deque()
        )  # buckets in the order in which the worker awaits the replies
        self._ready: dict[int, Tensor] = {}  # replies whose turn has not come
        super().__init__(wire, worker, server, shared, regions, own_buckets)

    def reply_from(self, stream: torch.cuda.Stream, bucket: int, reply: Tensor) -> None:
        """Send a reply, behind what the stream has, once its turn has come: an asynchronous server may serve in another order."""
        self._ready[bucket] = reply
        while self._order and self._order[0] in self._ready:
            with torch.cuda.stream(stream):
                self._gpu_wire.send(self._ready.pop(self._order.popleft()))

    def _serve_requests(self) -> None:
        torch.cuda.set_device(self._device)
        super()._serve_requests()

    def _part(self) -> None:
        super()._part()
        self._gpu_wire.close()

    def _next_gradient(self, bucket: int) -> Work | None:
        return None  # NCCL is told where to receive when the gradient is on its way

    def _take_gradient(self, bucket: int, settings: list[float]) -> None:
        self._control.settings[self._worker] = settings
        self._order.append(bucket)
        self._pushes[bucket] += 1
        self._receive(bucket)
        self._receiving.write_flag(self._flags + FLAG_BYTES * bucket, self._pushes[bucket])

    def _send_back(self, bucket: int) -> None:
        self._receive(bucket)
        with torch.cuda.stream(self._receiving.stream):
            self._gpu_wire.send(self._regions.pushed[self._worker][bucket])

    def _receive(self, bucket: int) -> None:
        with torch.cuda.stream(self._receiving.stream):
            self._gpu_wire.receive(self._regions.pushed[self._worker][bucket])


def gpu_workers_elsewhere(
    store: Store,
    server: int,
    shared: SharedMapping,
    regions: Regions,
    own_buckets: list[int],
    device: torch.device,
) -> dict[int, GpuWorkerElsewhere]:
    """Meet the workers on GPUs of other hosts. Returns them by number."""
    torch.cuda.set_device(device)  # of this thread
    config, found = shared.config, {}
    for worker in config.elsewhere(config.places.server_hosts[server]) if config.places else ():
        wire = Wire(store, worker, server, SERVER, len(shared.layout.buckets))
        gpu_wire = GpuWire(store, worker, server, SERVER)
        found[worker] = GpuWorkerElsewhere(
            wire, gpu_wire, worker, server, shared, regions, own_buckets, device
        )
    return found
