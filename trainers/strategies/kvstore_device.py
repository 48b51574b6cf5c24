"""MXNet's kvstore=device: gradients are reduced on the GPUs, and so are weights updated.

`reduce=owner` is MXNet's own form: each bucket has an owner (the largest first, to the least
loaded), which reduces it, updates its weights and broadcasts them. `sharded`: every rank owns a
share of each bucket: reduce-scatter, update of the owned share, all-gather (Rajbhandari et al.
2020, "ZeRO", arXiv:1910.02054, stage 2).
"""

from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from trainers import collectives, optimizers, reference_probes
from trainers.kvstore import bucketed
from trainers.kvstore.bucketed import Bucketed, ring_bytes, scatter
from trainers.strategy import BucketExchange, ReferenceProbe, Strategy


class _OnDevices(Bucketed):
    """What both forms share: flat buckets, of which this rank updates what it owns."""

    # What this rank owns, in equal order: weights, and the mean gradients that change them. Views
    # or tensors (elements,). Set by `choose_owned`.
    owned_weights: list[Tensor]
    owned_gradients: list[Tensor]
    memory = collectives.PLAIN  # of the flat buckets

    def set_up(self, order: list[int]) -> None:
        """Make flat buckets with the first weights. Collective."""
        self.works: dict[int, dist.Work | None] = {}  # by bucket
        with collectives.allocating(self.memory, self.parameters[0].device):
            self.make_flats(order, dist.get_world_size())
            self.choose_owned()
        name = optimizers.name_of(self.optimizer)
        self._steps = [optimizers.FlatSteps(name, weights) for weights in self.owned_weights]

    @abstractmethod
    def choose_owned(self) -> None:
        """Set `owned_weights` and `owned_gradients`. Once, at the end of `set_up`."""

    @abstractmethod
    def wait_for_owned(self) -> None:
        """Make the current stream wait until the means are in `owned_gradients`."""

    @abstractmethod
    def send_owned(self, flats: list[Tensor], owned: list[Tensor]) -> None:
        """Bring what each rank owns to the flat buckets of all ranks."""

    def finish_buckets(self) -> None:
        """Wait for the means; bring them to all ranks if only gradients come back."""
        self.wait_for_owned()
        self.works.clear()
        if self.only_gradients:
            self.send_owned(self.flat_means, self.owned_gradients)

    def apply_weights(self) -> None:
        """Update what this rank owns and bring it to all ranks."""
        settings = optimizers.settings(self.optimizer)
        for steps, gradient in zip(self._steps, self.owned_gradients, strict=True):
            steps.begin()
            steps.take(gradient, settings)
        self.send_owned(self.flat_weights, self.owned_weights)
        scatter(self.layout.buckets, self.flat_weights, self.parameters)

    def state(self) -> list[Tensor]:
        """Return the flat weights, and what the optimizer's steps keep of those owned here."""
        state = list(self.flat_weights)
        for steps in self._steps:
            state += steps.state
        return state

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return (n−1)/n of the bytes for the reduction, and as many to bring the means to all."""
        return ring_bytes(self.sent_bytes(gradient_bytes), world_size)

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: the links between neighbours, and the wire between hosts."""
        sent, device = sum(flat.nbytes for flat in self.flat_sent), self.parameters[0].device
        ring = reference_probes.ring(device, ring_bytes(sent, dist.get_world_size()))
        host_bytes = ring_bytes(sent, len(self.hosts.ranks))
        return ring + reference_probes.between_hosts(self.hosts, device, host_bytes)


class Sharded(_OnDevices):
    """Every rank owns a share of each bucket."""

    def choose_owned(self) -> None:
        """Own this rank's shares of the flat buckets."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.owned_weights = bucketed.shares(self.flat_weights, rank, ranks)
        gradients = bucketed.shares(self.flat_sent, rank, ranks)
        self.owned_gradients = [gradient.new_zeros(gradient.shape) for gradient in gradients]

    def start_bucket(self, bucket: int) -> None:
        """Begin to reduce-scatter a bucket."""
        share, flat = self.owned_gradients[bucket], self.flat_sent[bucket]
        self.works[bucket] = bucketed.start_mean(share, flat)

    def wait_for_owned(self) -> None:
        """Wait for the means of this rank's shares."""
        for bucket, work in self.works.items():
            assert work is not None
            bucketed.end_mean(work, self.owned_gradients[bucket])

    def send_owned(self, flats: list[Tensor], owned: list[Tensor]) -> None:
        """All-gather the shares."""
        bucketed.all_shares(flats, owned)

    def bucket_exchange(self, size_bytes: int, dtype: str) -> BucketExchange:
        """Return a reduce-scatter of gradients and an all-gather of weights."""
        weight, ranks = self.parameters[0], dist.get_world_size()
        with collectives.allocating(self.memory, weight.device):
            flat = collectives.filled(size_bytes, dtype, weight.device, ranks)
            share = flat.new_empty(flat.numel() // ranks)
            weights = torch.zeros_like(flat, dtype=weight.dtype)
        own = weights.chunk(ranks)[dist.get_rank()]

        def run() -> None:
            operation = collectives.mean_operation(flat)
            collectives.wait(dist.reduce_scatter_tensor(share, flat, operation, async_op=True))
            collectives.wait(dist.all_gather_into_tensor(weights, own, async_op=True))

        return BucketExchange("reduce_scatter + all_gather", run)


class Owned(_OnDevices):
    """Every bucket has one owner."""

    def choose_owned(self) -> None:
        """Deal the buckets, the largest first, each to the least loaded rank."""
        loads = [0] * dist.get_world_size()
        sizes = [flat.nbytes for flat in self.flat_weights]
        self._owner: dict[int, int] = {}
        for bucket in sorted(range(len(sizes)), key=lambda bucket: -sizes[bucket]):
            self._owner[bucket] = loads.index(min(loads))
            loads[self._owner[bucket]] += sizes[bucket]
        own = [bucket for bucket in range(len(sizes)) if self._owner[bucket] == dist.get_rank()]
        self.owned_weights = [self.flat_weights[bucket] for bucket in own]
        self.owned_gradients = [self.flat_sent[bucket] for bucket in own]

    def start_bucket(self, bucket: int) -> None:
        """Begin to reduce a bucket to its owner."""
        flat = self.flat_sent[bucket]
        operation = collectives.mean_operation(flat)
        self.works[bucket] = dist.reduce(flat, self._owner[bucket], operation, async_op=True)

    def wait_for_owned(self) -> None:
        """Wait for the means of this rank's buckets."""
        for bucket, work in self.works.items():
            collectives.wait(work)
            if not self.flat_sent[bucket].is_cuda and self._owner[bucket] == dist.get_rank():
                self.flat_sent[bucket].div_(dist.get_world_size())

    def send_owned(self, flats: list[Tensor], owned: list[Tensor]) -> None:
        """Broadcast every bucket from its owner."""
        works = []
        sources = iter(owned)
        for bucket, flat in enumerate(flats):
            if self._owner[bucket] == dist.get_rank():
                source = next(sources)
                if source is not flat:
                    flat.copy_(source)
            works.append(dist.broadcast(flat, self._owner[bucket], async_op=True))
        for work in works:
            collectives.wait(work)

    def bucket_exchange(self, size_bytes: int, dtype: str) -> BucketExchange:
        """Return a reduce of gradients and a broadcast of weights; the owner is rank 0."""
        weight = self.parameters[0]
        with collectives.allocating(self.memory, weight.device):
            flat = collectives.filled(size_bytes, dtype, weight.device)
            weights = torch.zeros_like(flat, dtype=weight.dtype)

        def run() -> None:
            operation = collectives.mean_operation(flat)
            collectives.wait(dist.reduce(flat, 0, operation, async_op=True))
            collectives.wait(dist.broadcast(weights, 0, async_op=True))

        return BucketExchange("reduce + broadcast", run)


def on_devices(
    bucket_cap_mb: float, comm_hook: str, reduce: str, memory: str = collectives.PLAIN
) -> Strategy:
    """Make the strategy from the YAML's options."""
    form = Owned if reduce == "owner" else Sharded
    strategy = form(bucket_cap_mb, comm_hook)
    strategy.memory = memory
    return strategy
