"""A server on another host, as a worker sees it: buckets leave while backward runs, and a thread takes in the replies."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from trainers.kvstore.remote.messages import COUNTS, NO_SETTINGS, Demand, Guarded, Wire


class ServerElsewhere:
    """One server on another host."""

    def __init__(self, wire: Wire, buckets: Sequence[int]) -> None:
        """`buckets` are those of the server."""
        self._wire, self._tags, self.buckets = wire, wire.tags, buckets
        self._under_way: dict[int, tuple[Any, ...]] = {}  # by bucket, what must stay until the reply is here
        self._replies: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
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
        self._under_way[bucket] = (*request, weights, self._wire.send(weights, self._tags.weights(bucket)))

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

    def _request(self, kind: Demand, bucket: int = 0, settings: Sequence[float] = NO_SETTINGS) -> tuple[Tensor, Work]:
        request = torch.tensor([kind, bucket, *settings], dtype=torch.float64)
        return request, self._wire.send(request, self._tags.request)

    def _wait_for_replies(self) -> None:
        """Wait for the replies in the order of the pushes."""
        while (expected := self._replies.get()) is not None:
            work, arrived = expected
            work.wait()
            arrived()


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
