"""Strategies whose workers push gradients to servers and pull weights: CPU staging and the parameter servers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.kvstore import server_process
from trainers.kvstore.bucketed import Bucketed, arrays_of, gather, scatter
from trainers.kvstore.shared_regions import KvstoreConfig, needed_bytes
from trainers.kvstore.worker import HostMemory, Peers, Worker
from trainers.strategy import Probe


class PushPull(Bucketed):
    """All workers share servers, which are threads in every worker (`servers=0`) or processes of their own."""

    def __init__(
        self,
        bucket_cap_mb: float,
        comm_hook: str,
        threads: int | str,
        servers: int = 0,
        bigarray_bound: int = 0,
        synchronous: bool = True,
        max_staleness: int | None = None,
        server_gpus: Any = None,
        only_gradients: bool = False,
    ) -> None:
        """Options of the YAML files; `server_gpus` other than None: servers keep weights on GPUs, where there are any."""
        super().__init__(bucket_cap_mb, comm_hook, only_gradients)
        self.synchronous = self.exact = synchronous
        self._threads, self._servers, self._bigarray_bound = threads, servers, bigarray_bound
        self._max_staleness, self._server_gpu = max_staleness, server_gpus is not None
        self.worker: Worker | None = None

    def terms(self, parameters: Sequence[Tensor], order: Sequence[int], workers: int, on_gpu: bool) -> KvstoreConfig:
        """What an exchange of these parameters is made of."""
        # A synchronous answer is one for all GPUs; else each worker needs its own, to read in place or untorn.
        copies = 1 if self.synchronous and on_gpu else workers
        return KvstoreConfig(
            arrays_of(parameters, self.comm_hook), tuple(order), self.cap_bytes, workers, self._servers,
            self._bigarray_bound, self.synchronous, self._max_staleness, self._server_gpu and on_gpu, on_gpu, copies,
        )  # fmt: skip

    def set_up(self, order: list[int]) -> None:
        """Shared memory, servers, first weights. Collective."""
        device = self.parameters[0].device
        peers = Peers(dist.get_rank(), dist.get_world_size())
        terms = self.terms(self.parameters, order, peers.size, device.type == "cuda")
        self.worker = Worker(terms, peers, device, self._threads)
        self.layout, self.flat_sent, self.flat_means = self.worker.layout, self.worker.sent, self.worker.means
        self.worker.ask_for(self.only_gradients)
        self.worker.begin(self._flat_weights(), self.settings())

    def _flat_weights(self) -> list[Tensor]:
        found = []
        for bucket in self.layout.buckets:
            first = self.parameters[bucket.parts[0].array]
            found.append(torch.empty(bucket.elements, dtype=first.dtype, device=first.device))
            gather(bucket, self.parameters, found[-1])
        return found

    def switch(self, only_gradients: bool) -> None:
        """Change what comes back."""
        super().switch(only_gradients)
        if self.worker:
            self.worker.ask_for(only_gradients)

    def start_flat(self, bucket: int) -> None:
        """Push a bucket."""
        assert self.worker is not None
        self.worker.push(bucket)

    def finish_flat(self) -> None:
        """Wait for every answer."""
        assert self.worker is not None
        self.worker.answered()

    def pipelined(self) -> Callable[[], None] | None:
        """Asynchronous workers with GPUs: each bucket leaves again as soon as its own answer is there."""
        worker = self.worker
        if self.synchronous or worker is None or not worker.on_gpu:
            return None

        def exchange() -> None:
            for bucket in range(len(self.layout.buckets)):
                worker.push(bucket, after_answer=True)
            worker.answered(one_behind=True)

        return exchange

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """The servers' weights become this worker's."""
        assert self.worker is not None
        scatter(self.layout.buckets, self.worker.weights, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Every byte of the gradient goes out once (and as many come back)."""
        return self.sent_bytes(gradient_bytes)

    def probes(self) -> list[Probe]:
        """Limits: the host link of all GPUs at once and the host's memory, or the link of the servers' GPUs."""
        worker = self.worker
        assert worker is not None
        if worker.terms.server_gpu:
            return [Probe("server_link", lambda: worker.all_at_once(True, False), 1.0)]
        found = []
        if worker.on_gpu:
            found = [
                Probe("host_link", lambda: worker.all_at_once(True, True), 1.0),
                Probe("device_to_host", lambda: worker.all_at_once(True, False), 1.0, limit=False),
                Probe("host_to_device", lambda: worker.all_at_once(False, True), 1.0, limit=False),
            ]
        if worker.summed_bytes():
            found.append(Probe("host_memory", HostMemory(worker, linked=False), 1.0))
            if worker.on_gpu:
                found.append(Probe("all_at_once", HostMemory(worker, linked=True), 1.0, limit=False))
        if not self._servers:
            found.append(Probe("sum", worker.sum_alone, 1.0, limit=False))
        return found

    def shared_bytes(self, parameters: list[nn.Parameter], workers: int, on_gpu: bool) -> int:
        """Gradients of every worker, weights, and what is handed back."""
        terms = self.terms(parameters, range(len(parameters)), workers, on_gpu)
        return needed_bytes(terms, terms.layout())

    def facts(self) -> dict[str, float]:
        """Staleness of the updates so far, where they are asynchronous. Collective."""
        if self.synchronous or self.worker is None:
            return {}
        self.worker.peers.barrier()  # every worker's updates are in
        return self.worker.staleness()

    def close(self) -> None:
        """End the servers. Collective."""
        if self.worker:
            self.worker.close()
        elif self._servers and dist.get_rank() == 0:
            server_process.dismiss()


class SynchronousServers(PushPull):
    """MXNet's kvstore=dist_sync and dist_sync_device: servers in processes of their own; an update waits for all workers."""

    def __init__(
        self,
        servers: int,
        bigarray_bound: int,
        bucket_cap_mb: float,
        comm_hook: str,
        threads: int | str = 1,
        server_gpus: Any = None,
    ) -> None:
        """Take the options of the YAML. `server_gpus` is given where servers keep weights on GPUs; they need one thread."""
        super().__init__(
            bucket_cap_mb, comm_hook, threads, servers, bigarray_bound, synchronous=True, server_gpus=server_gpus
        )


class AsynchronousServers(PushPull):
    """MXNet's kvstore=dist_async and dist_async_device: the same servers; each push is applied when it arrives."""

    def __init__(
        self,
        servers: int,
        bigarray_bound: int,
        bucket_cap_mb: float,
        comm_hook: str,
        max_staleness: int | None,
        threads: int | str = 1,
        server_gpus: Any = None,
    ) -> None:
        """Take the options of the YAML, as SynchronousServers does. `max_staleness` is in updates; None: no bound."""
        super().__init__(
            bucket_cap_mb, comm_hook, threads, servers, bigarray_bound, synchronous=False,
            max_staleness=max_staleness, server_gpus=server_gpus,
        )  # fmt: skip
