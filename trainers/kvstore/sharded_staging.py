"""CPU staging in two levels: GPUs reduce-scatter among themselves, each stages its share, its threads update it, and an
all-gather brings the weights to all. Host traffic is 1/n of full staging (the shape of BytePS, Jiang et al. 2020, OSDI).
"""

import torch
import torch.distributed as dist
from torch import nn

from trainers import ring_probe
from trainers.kvstore import sharding
from trainers.kvstore.bucketed import Bucketed, arrays_of, gather, scatter
from trainers.kvstore.buckets import Array, Layout
from trainers.kvstore.shared_regions import KvstoreConfig, needed_bytes
from trainers.kvstore.worker import Peers, Worker
from trainers.strategy import Probe


class ShardedStaging(Bucketed):
    """Every rank is the only worker of its own server, for its share of each bucket."""

    def __init__(self, bucket_cap_mb: float, comm_hook: str, threads: int | str, only_gradients: bool) -> None:
        super().__init__(bucket_cap_mb, comm_hook, only_gradients)
        self._threads = threads
        self.worker: Worker | None = None

    def set_up(self, order: list[int]) -> None:
        """Flat buckets, this rank's server, first weights. Collective."""
        rank, world_size, device = dist.get_rank(), dist.get_world_size(), self.parameters[0].device
        self.layout = Layout.of(arrays_of(self.parameters, self.comm_hook), order, self.cap_bytes)
        self._works: dict[int, dist.Work] = {}
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.flat_sent = sharding.padded(self.layout, world_size, kept=False, device=device)
        self.flat_means = sharding.padded(self.layout, world_size, kept=False, device=device)
        self.flat_weights = sharding.padded(self.layout, world_size, kept=True, device=device)
        for bucket, flat in zip(self.layout.buckets, self.flat_weights, strict=True):
            gather(bucket, self.parameters, flat)
        terms, _ = self._terms(self.layout, world_size, device.type == "cuda")
        self.worker = Worker(terms, Peers(0, 1), device, self._threads)
        self.worker.ask_for(self.only_gradients)
        self.worker.begin(sharding.shares(self.flat_weights, rank, world_size), self.settings())

    @staticmethod
    def _terms(layout: Layout, world_size: int, on_gpu: bool) -> tuple[KvstoreConfig, Layout]:
        """A rank's shares as arrays of their own, each in its own bucket."""
        arrays = []
        for bucket in layout.buckets:
            kind = layout.arrays[bucket.parts[0].array]
            arrays.append(Array(sharding.share_of(bucket, world_size), kind.kept, kind.sent))
        terms = KvstoreConfig(
            tuple(arrays), tuple(range(len(arrays))), cap_bytes=0, workers=1, servers=0, worker_gpu=on_gpu
        )
        return terms, terms.layout()

    def switch(self, only_gradients: bool) -> None:
        """Change what comes back."""
        super().switch(only_gradients)
        if self.worker:
            self.worker.ask_for(only_gradients)

    def start_flat(self, bucket: int) -> None:
        """Reduce-scatter and stage what lies in a flat bucket."""
        assert self.worker is not None
        share = self.worker.sent[bucket]
        work = sharding.start_mean(share, self.flat_sent[bucket])
        if self._stream is None:
            self._works[bucket] = work  # gloo would wait here
            return
        with torch.cuda.stream(self._stream):
            sharding.end_mean(work, share)
            self.worker.push(bucket)

    def finish_flat(self) -> None:
        """Every rank's answers, in the flat buckets of all ranks."""
        assert self.worker is not None
        for number, work in sorted(self._works.items()):
            sharding.end_mean(work, self.worker.sent[number])
            self.worker.push(number)
        self._works.clear()
        self.worker.answered()
        if self.only_gradients:
            sharding.all_shares(self.flat_means, self.worker.means)
        else:
            sharding.all_shares(self.flat_weights, self.worker.weights)

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """The servers' weights become this rank's."""
        scatter(self.layout.buckets, self.flat_weights, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Over the links between GPUs: (n−1)/n of the bytes out in the reduce-scatter, as many in the all-gather of means."""
        return sharding.ring_bytes(self.sent_bytes(gradient_bytes), world_size)

    def probes(self) -> list[Probe]:
        """Limits: the links between GPUs, the host link with 1/n of the bytes of full staging."""
        worker = self.worker
        assert worker is not None
        sent = sum(flat.nbytes for flat in self.flat_sent)
        found = ring_probe.probes(worker.device, sharding.ring_bytes(sent, dist.get_world_size()))
        if worker.on_gpu:
            found.append(Probe("host_link", lambda: worker.all_at_once(True, True), 1.0))
        return found

    def shared_bytes(self, parameters: list[nn.Parameter], workers: int, on_gpu: bool) -> int:
        """Gradients, weights and answers of every rank's own shares: together as much as one rank's whole."""
        layout = Layout.of(arrays_of(parameters, self.comm_hook), range(len(parameters)), self.cap_bytes)
        return workers * needed_bytes(*self._terms(layout, workers, on_gpu))

    def close(self) -> None:
        """End the server."""
        if self.worker:
            self.worker.close()
