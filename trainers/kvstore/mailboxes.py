"""Strategies whose workers push gradients to servers and pull weights: CPU staging and the parameter servers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.kvstore import process
from trainers.kvstore.bucketed import SENT, Bucketed, arrays_of, gather, scatter
from trainers.kvstore.memory import Terms, needed_bytes
from trainers.kvstore.worker import HostMemory, Peers, Worker
from trainers.strategies import Alone, Probe


class Mailboxes(Bucketed):
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

    def terms(self, parameters: Sequence[Tensor], order: Sequence[int], workers: int, on_gpu: bool) -> Terms:
        """What an exchange of these parameters is made of."""
        # A synchronous answer is one for all GPUs; else each worker needs its own, to read in place or untorn.
        copies = 1 if self.synchronous and on_gpu else workers
        return Terms(
            arrays_of(parameters, self.comm_hook), tuple(order), self.cap_bytes, workers, self._servers,
            self._bigarray_bound, self.synchronous, self._max_staleness, self._server_gpu and on_gpu, copies,
        )  # fmt: skip

    def set_up(self, order: list[int]) -> dict[int, list[int]]:
        """Shared memory, servers, first weights. Collective."""
        device = self.parameters[0].device
        peers = Peers(dist.get_rank(), dist.get_world_size())
        terms = self.terms(self.parameters, order, peers.size, device.type == "cuda")
        self.worker = Worker(terms, peers, device, self._threads)
        self.buckets = self.worker.layout.buckets
        self.worker.ask_for(self.only_gradients)
        self.worker.begin(self._flat_weights(), self.settings())
        return self.worker.layout.buckets_of()

    def _flat_weights(self) -> list[Tensor]:
        found = []
        for bucket in self.buckets:
            first = self.parameters[bucket.parts[0].array]
            found.append(torch.empty(bucket.elements, dtype=first.dtype, device=first.device))
            gather(bucket, self.parameters, found[-1])
        return found

    def switch(self, only_gradients: bool) -> None:
        """Change what comes back."""
        super().switch(only_gradients)
        if self.worker:
            self.worker.ask_for(only_gradients)

    def start(self, number: int) -> None:
        """Gather the gradients of a bucket and push them."""
        assert self.worker is not None
        gather(self.buckets[number], self.gradients(), self.worker.sent[number])
        self.worker.push(number)

    def finish(self) -> None:
        """Wait for every answer; mean gradients go to `.grad`."""
        assert self.worker is not None
        self.worker.answered()
        if self.only_gradients:
            scatter(self.buckets, self.worker.means, self.gradients())

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """The servers' weights become this worker's."""
        assert self.worker is not None
        scatter(self.buckets, self.worker.weights, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Every byte of the gradient goes out once (and as many come back); half of them with a half-precision hook."""
        return gradient_bytes * (0.5 if self.comm_hook in SENT else 1.0)

    def exchange_alone(self, parameters: list[nn.Parameter]) -> Alone:
        """Push and pull every bucket. What comes back is the mean gradient; asynchronously, the worker's own."""
        if self.worker is None:
            self.parameters = parameters
            self.agree(list(reversed(range(len(parameters)))))
        assert self.worker is not None
        alone = _Alone(self.worker, self.parameters)
        alone.fill([torch.randn_like(parameter) for parameter in self.parameters])
        return alone

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
            found.append(Probe("host_memory", HostMemory(worker), 1.0))
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
            process.dismiss()


class _Alone(Alone):
    """The exchange of a Mailboxes strategy, inside its `gradients_only`."""

    def __init__(self, worker: Worker, parameters: list[nn.Parameter]) -> None:
        self._worker, self._parameters = worker, parameters

    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Into the worker's own buffers."""
        for bucket, sent in zip(self._worker.layout.buckets, self._worker.sent, strict=True):
            gather(bucket, gradients, sent)

    def __call__(self) -> None:
        """Push all, pull all."""
        for number in range(len(self._worker.sent)):
            self._worker.push(number)
        self._worker.answered()

    def result(self) -> list[Tensor]:
        """Copies, in the parameters' shapes."""
        found = [torch.zeros_like(parameter) for parameter in self._parameters]
        scatter(self._worker.layout.buckets, self._worker.means, found)
        return found
