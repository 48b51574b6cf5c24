"""Workers and servers on different hosts that both keep gradients on GPUs: buckets travel by NCCL, requests by gloo.

Each pair has two communicators of these two ranks, one for each direction: what is enqueued on one runs in order, and a reply
would hold back the gradients behind it. Sends and receives of two ranks match without any order among pairs, so no worker
waits for another. A server enqueues a receive when the worker says that the send is enqueued: its GPU waits for no worker
that still computes.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupNCCL, Store, Work  # type: ignore[attr-defined]

from trainers.kvstore.cuda_copies import CopyStream, device_address
from trainers.kvstore.remote.messages import SERVER, TIMEOUT, WORKER, Demand, Wire
from trainers.kvstore.remote.servers import ServerElsewhere
from trainers.kvstore.remote.workers import WorkerElsewhere
from trainers.kvstore.server import FLAG_BYTES
from trainers.kvstore.shared_regions import Regions, SharedMapping


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
        self._gpu_wire, self._device, self._receiving = gpu_wire, device, CopyStream(torch.cuda.Stream())
        offset = device_address(shared.address) - shared.address
        self._flags = shared.address_of(shared.control.pushed[worker]) + offset
        self._pushes = dict.fromkeys(own_buckets, 0)  # of each bucket so far
        self._order: deque[int] = deque()  # buckets in the order in which the worker awaits the replies
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
    store: Store, server: int, shared: SharedMapping, regions: Regions, own_buckets: list[int], device: torch.device
) -> dict[int, GpuWorkerElsewhere]:
    """Meet the workers on GPUs of other hosts. Returns them by number."""
    torch.cuda.set_device(device)  # of this thread
    config, found = shared.config, {}
    for worker in config.elsewhere(config.places.server_hosts[server]) if config.places else ():
        wire = Wire(store, worker, server, SERVER, len(shared.layout.buckets))
        gpu_wire = GpuWire(store, worker, server, SERVER)
        found[worker] = GpuWorkerElsewhere(wire, gpu_wire, worker, server, shared, regions, own_buckets, device)
    return found
