"""A server on another host, as a worker sees it: buckets leave while backward runs, and a thread takes in the replies."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from trainers.kvstore.remote.messages import COUNTS, NO_SETTINGS, Demand, Guarded, Wire
from trainers.prctl import sleep_precisely


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
    """Calls what must wait until a GPU's copies are done, in a thread of its own. A flag in host memory says when.

    The thread makes no call of CUDA's. Such a call waits while backward waits for room in a full queue of the GPU, and the room
    may only come after what is called here: two H200s stood still so.
    """

    def __init__(self, pause_seconds: float) -> None:
        """`pause_seconds` is the time between two looks at a flag."""
        self._pause_seconds = pause_seconds
        self._calls: queue.SimpleQueue[tuple[Callable[[], bool], Callable[[], None]]] = queue.SimpleQueue()
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
