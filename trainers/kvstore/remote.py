"""A worker and a server on different hosts: what they would write into shared memory travels as messages.

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
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from trainers.kvstore.buckets import BucketLayout
from trainers.kvstore.server import Arithmetic
from trainers.kvstore.shared_regions import UPDATE, Control, KvstoreConfig, Regions, SharedMapping
from trainers.optimizers import SETTINGS

# The supervisor ends what hangs; this ends what has no supervisor any more.
TIMEOUT = datetime.timedelta(hours=2)
WORKER, SERVER = 0, 1  # ranks in a pair's group
IFNAME, LOOPBACK = "GLOO_SOCKET_IFNAME", "lo"
# Requests that a server can take in before it has looked at the first: buckets need not wait for each other.
REQUESTS_AHEAD = 16
NO_SETTINGS = (0.0,) * (1 + SETTINGS)  # a row of Control.settings
COUNTS = 3  # updates, sum and maximum of their staleness
# After a failure: the main thread has this long to say it in its own words.
LAST_WORDS_SECONDS = 2.0


class Kind(IntEnum):
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
        """What a worker asks; the server's answer to COUNT and STOP."""
        return self.buckets

    def weights(self, bucket: int) -> int:
        """First weights of a bucket."""
        return self.buckets + 1 + bucket


class Wire:
    """The messages of a worker and a server, as one of them sees them."""

    def __init__(self, store: Store, worker: int, server: int, me: int) -> None:
        """Meet the other one in the store. `me` is WORKER or SERVER.

        Raises:
            RuntimeError: it does not come.
        """
        os.environ.setdefault(IFNAME, LOOPBACK)  # gloo alone would choose by the host's name
        self.name = f"the connection of worker {worker} and server {server}"
        self._group: Any = ProcessGroupGloo(PrefixStore(f"{worker}-{server}", store), me, 2, TIMEOUT)
        self._peer = 1 - me

    def send(self, tensor: Tensor, tag: int) -> Work:
        """Begin to send a tensor (elements,), which stays as it is until the work is done. Waits for nothing."""
        work: Work = self._group.send([tensor.view(torch.uint8)], self._peer, tag)
        return work

    def receive(self, tensor: Tensor, tag: int) -> Work:
        """Begin to receive into a tensor (elements,)."""
        work: Work = self._group.recv([tensor.view(torch.uint8)], self._peer, tag)
        return work


class Guarded:
    """A thread that waits for messages. What it raises is raised again by `check`; without a check it ends the process."""

    def __init__(self, what: str, work: Callable[[], None]) -> None:
        """`what` is what failed if it raises: `the connection to server 0`."""
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


class AfterCopies:
    """Calls what must wait until a GPU's copies are done, in a thread of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]]] = queue.SimpleQueue()
        Guarded("sending what a GPU has copied", self._run).start()

    def call(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """Have `work` called when everything is done that was enqueued on the stream. Waits for nothing."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        self._calls.put((event, work))

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            copied, work = self._calls.get()
            copied.synchronize()
            work()


class ServerElsewhere:
    """A server on another host, as a worker sees it."""

    def __init__(self, wire: Wire, buckets: Sequence[int], every_bucket: int) -> None:
        """`buckets` are those of the server, of `every_bucket` in all."""
        self._wire, self._tags, self.buckets = wire, Tags(every_bucket), buckets
        self._under_way: dict[int, tuple[Any, ...]] = {}  # by bucket, what must stay until the reply is here
        self._replies: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self._one_at_a_time = threading.Lock()
        self.thread = Guarded(wire.name, self._wait_for_replies)
        self.thread.start()

    def push(
        self,
        kind: Kind,
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
        request = self._request(Kind.WEIGHTS, bucket)
        self._under_way[bucket] = (*request, weights, self._wire.send(weights, self._tags.weights(bucket)))

    def ask(self, kind: Kind) -> list[float]:
        """Return the answer to COUNT or STOP: updates, sum and maximum of their staleness."""
        counts = torch.zeros(COUNTS, dtype=torch.float64)
        answer = self._wire.receive(counts, self._tags.request)
        with self._one_at_a_time:
            kept = self._request(kind)
        answer.wait()
        del kept
        return list(counts.tolist())

    def close(self) -> None:
        """Part from the server."""
        self.ask(Kind.STOP)
        self._replies.put(None)
        self.thread.join()

    def _request(self, kind: Kind, bucket: int = 0, settings: Sequence[float] = NO_SETTINGS) -> tuple[Any, Work]:
        request = torch.tensor([kind, bucket, *settings], dtype=torch.float64)
        return request, self._wire.send(request, self._tags.request)

    def _wait_for_replies(self) -> None:
        """Wait for the replies in the order of the pushes."""
        while (expected := self._replies.get()) is not None:
            work, arrived = expected
            work.wait()
            arrived()


class WorkerElsewhere:
    """A worker on another host, as a server sees it: a thread takes its gradients and sets the flag that it would have set."""

    def __init__(
        self,
        wire: Wire,
        worker: int,
        server: int,
        config: KvstoreConfig,
        control: Control,
        regions: Regions,
        own_buckets: list[int],
    ) -> None:
        """`server` is the own number; `regions` have a row for the worker."""
        self._wire, self._worker, self._server = wire, worker, server
        self._config, self._control, self._regions = config, control, regions
        self._tags = Tags(control.pushed.shape[1])
        self._requests = deque(self._next_request() for _ in range(REQUESTS_AHEAD))
        self._gradients = {bucket: self._next_gradient(bucket) for bucket in own_buckets}
        self._under_way: dict[int, tuple[Any, ...]] = {}
        self.stopped = False
        self.thread = Guarded(wire.name, self._serve_requests)
        self.thread.start()

    def reply(self, bucket: int) -> None:
        """Begin to send what the push of a bucket came to. Waits for nothing."""
        self._answer(bucket, self._result(bucket))

    def _answer(self, bucket: int, reply: Tensor) -> None:
        # The worker pushes again when it has the reply, and not before.
        self._gradients[bucket] = self._next_gradient(bucket)
        self._under_way[bucket] = (reply, self._wire.send(reply, bucket))

    def _result(self, bucket: int) -> Tensor:
        regions, worker, synchronous = self._regions, self._worker, self._config.synchronous
        if self._control.settings[worker, 0] == UPDATE:
            return regions.weights[bucket] if synchronous else regions.weight_replies[worker][bucket]
        if self._config.replies_own_gradient:
            return regions.pushed[worker][bucket]
        replies = regions.gradient_replies  # synchronously they are equal
        return replies[next(iter(replies)) if synchronous else worker][bucket]

    def _next_gradient(self, bucket: int) -> Work:
        return self._wire.receive(self._regions.pushed[self._worker][bucket], bucket)

    def _next_request(self) -> tuple[Tensor, Work]:
        request = torch.zeros(3 + SETTINGS, dtype=torch.float64)
        return request, self._wire.receive(request, self._tags.request)

    def _serve_requests(self) -> None:
        while not self.stopped:
            request, came = self._requests.popleft()
            came.wait()
            kind, number, *settings = request.tolist()
            bucket = int(number)
            if kind <= Kind.WEIGHTS and bucket not in self._gradients:
                raise ValueError(f"worker {self._worker} asks for bucket {bucket}, which is another server's")
            if kind in (Kind.PUSH, Kind.PROBE):
                self._gradients[bucket].wait()
                if kind == Kind.PUSH:
                    self._control.settings[self._worker] = settings
                    self._control.pushed[self._worker, bucket] += 1
                else:
                    self._answer(bucket, self._regions.pushed[self._worker][bucket])
            elif kind == Kind.WEIGHTS:
                self._wire.receive(self._regions.weights[bucket], self._tags.weights(bucket)).wait()
            else:
                control, row = self._control, self._server
                updates = control.staleness_counts[row].sum()
                counts = [updates, control.staleness_sum[row], control.staleness_max[row]]
                self._wire.send(torch.tensor(counts, dtype=torch.float64), self._tags.request).wait()
                self.stopped = kind == Kind.STOP
            self._requests.append(self._next_request())


def workers_elsewhere(
    store: Store, server: int, shared: SharedMapping, own_buckets: list[int]
) -> dict[int, WorkerElsewhere]:
    """Meet the workers on other hosts, and give them rows in this server's regions. Returns them by number."""
    config, layout = shared.config, shared.layout
    theirs = config.elsewhere(config.places.server_hosts[server]) if config.places else []
    if not theirs:
        return {}
    wires = {worker: Wire(store, worker, server, SERVER) for worker in theirs}
    assert shared.regions is not None
    base = torch.empty(Regions.size(config, layout, theirs), dtype=torch.uint8)  # takes pages as they are written
    shared.regions.add(Regions(base, config, layout, theirs), config.synchronous)
    return {
        worker: WorkerElsewhere(wire, worker, server, config, shared.control, shared.regions, own_buckets)
        for worker, wire in wires.items()
    }


def servers_elsewhere(store: Store, worker: int, config: KvstoreConfig, layout: BucketLayout) -> list[ServerElsewhere]:
    """Meet the servers on other hosts. Returns them in the order of their numbers."""
    found = []
    for server, host in enumerate(config.places.server_hosts if config.places else ()):
        if worker in config.elsewhere(host):
            buckets = [number for number, bucket in enumerate(layout.buckets) if bucket.server == server]
            found.append(ServerElsewhere(Wire(store, worker, server, WORKER), buckets, len(layout.buckets)))
    return found


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
