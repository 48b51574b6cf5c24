"""The workers on other hosts, as a server sees them: a thread for each sets the flags that a worker here sets itself."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store, Work  # type: ignore[attr-defined]

from trainers.kvstore.remote.messages import NO_SETTINGS, SERVER, Demand, Guarded, Wire
from trainers.kvstore.server import Arithmetic
from trainers.kvstore.shared_regions import UPDATE, Regions, SharedMapping

# Requests that a server can take in before it has looked at the first: buckets need not wait for each other.
REQUESTS_AHEAD = 16


class WorkerElsewhere:
    """One worker on another host."""

    def __init__(
        self, wire: Wire, worker: int, server: int, shared: SharedMapping, regions: Regions, own_buckets: list[int]
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
            return regions.weights[bucket] if synchronous else regions.weight_replies[worker][bucket]
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
    base = torch.empty(Regions.size(config, layout, theirs), dtype=torch.uint8)  # takes pages as they are written
    shared.regions.add(Regions(base, config, layout, theirs), config.synchronous)
    return {
        worker: WorkerElsewhere(wire, worker, server, shared, shared.regions, own_buckets)
        for worker, wire in wires.items()
    }
