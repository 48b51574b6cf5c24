"""MXNet's kvstore=device: gradients are reduced on the GPUs, and so are weights updated.

`reduce=owner` is MXNet's own form: each bucket has an owner (the largest first, to the least loaded), which reduces it,
updates its weights and broadcasts them. `sharded`: every rank owns a share of each bucket: reduce-scatter, update of the
owned share, all-gather (Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, stage 2).
"""

from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from trainers import collectives as one_bucket
from trainers import reference_probes as net_probe
from trainers import reference_probes as ring_probe
from trainers.kvstore import bucketed as sharding
from trainers.kvstore.bucketed import Bucketed, arrays_of, gather, scatter
from trainers.kvstore.buckets import BucketLayout
from trainers.strategy import BucketExchange, ReferenceProbe, Strategy


class _OnDevices(Bucketed):
    """What both forms share: flat buckets of gradients and weights, of which this rank updates those that it owns."""

    flat_weights: list[Tensor]  # for each bucket (at least elements,)
    # What this rank owns, in equal order: weights, and the mean gradients that change them. Views or tensors (elements,).
    owned_weights: list[Tensor]
    owned_gradients: list[Tensor]

    def set_up(self, order: list[int]) -> None:
        """Make flat buckets with the first weights. Collective."""
        device, world_size = self.parameters[0].device, dist.get_world_size()
        self.layout = BucketLayout.of(
            arrays_of(self.parameters, self.comm_hook), order, self.cap_bytes
        )
        self.flat_sent, self.flat_means = (
            sharding.padded(self.layout, world_size, in_weight_dtype=False, device=device)
            for _ in range(2)
        )
        self.flat_weights = sharding.padded(
            self.layout, world_size, in_weight_dtype=True, device=device
        )
        for bucket, flat in zip(self.layout.buckets, self.flat_weights, strict=True):
            gather(bucket, self.parameters, flat)
        self.works: dict[int, dist.Work] = {}
        self.choose_owned()
        self._steps = [self.steps_of(weights) for weights in self.owned_weights]

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
        if self.only_gradients:
            self.send_owned(self.flat_means, self.owned_gradients)

    def apply_weights(self) -> None:
        """Update what this rank owns and bring it to all ranks."""
        settings = self.settings()
        for steps, gradient in zip(self._steps, self.owned_gradients, strict=True):
            steps.begin()
            steps.take(gradient, settings)
        self.send_owned(self.flat_weights, self.owned_weights)
        scatter(self.layout.buckets, self.flat_weights, self.parameters)

    def state(self) -> list[Tensor]:
        """Return the flat weights, and what the optimizer's steps keep of those that this rank owns."""
        return [*self.flat_weights, *(tensor for steps in self._steps for tensor in steps.state)]

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return (n−1)/n of the bytes for the reduction, and as many to bring the means to all."""
        return sharding.ring_bytes(self.sent_bytes(gradient_bytes), world_size)

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: the links between neighbours, and the wire between hosts."""
        sent, device = sum(flat.nbytes for flat in self.flat_sent), self.parameters[0].device
        found = ring_probe.probes(device, sharding.ring_bytes(sent, dist.get_world_size()))
        return found + net_probe.net_probe_probes(
            self.hosts, device, sharding.ring_bytes(sent, len(self.hosts.ranks))
        )


class Sharded(_OnDevices):
    """Every rank owns a share of each bucket."""

    def choose_owned(self) -> None:
        """Own this rank's shares of the flat buckets."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.owned_weights = sharding.shares(self.flat_weights, rank, world_size)
        self.owned_gradients = [
            torch.zeros_like(share) for share in sharding.shares(self.flat_sent, rank, world_size)
        ]

    def start_bucket(self, bucket: int) -> None:
        """Begin to reduce-scatter a bucket."""
        self.works[bucket] = sharding.start_mean(
            self.owned_gradients[bucket], self.flat_sent[bucket]
        )

    def wait_for_owned(self) -> None:
        """Wait for the means of this rank's shares."""
        for number, work in self.works.items():
            sharding.end_mean(work, self.owned_gradients[number])
        self.works.clear()

    def send_owned(self, flats: list[Tensor], owned: list[Tensor]) -> None:
        """All-gather the shares."""
        sharding.all_shares(flats, owned)

    def bucket_exchange(self, size_bytes: int, dtype: str) -> BucketExchange:
        """Return a reduce-scatter of gradients and an all-gather of weights."""
        weight = self.parameters[0]
        return one_bucket.sharded(size_bytes, dtype, weight.dtype, weight.device)


class Owned(_OnDevices):
    """Every bucket has one owner."""

    def choose_owned(self) -> None:
        """Deal the buckets, the largest first, each to the least loaded rank."""
        loads = [0] * dist.get_world_size()
        self._owner: dict[int, int] = {}
        for number in sorted(
            range(len(self.flat_weights)), key=lambda number: -self.flat_weights[number].nbytes
        ):
            self._owner[number] = loads.index(min(loads))
            loads[self._owner[number]] += self.flat_weights[number].nbytes
        own = [number for number, owner in sorted(self._owner.items()) if owner == dist.get_rank()]
        self.owned_weights = [self.flat_weights[number] for number in own]
        self.owned_gradients = [self.flat_sent[number] for number in own]

    def start_bucket(self, bucket: int) -> None:
        """Begin to reduce a bucket to its owner."""
        work = dist.reduce(
            self.flat_sent[bucket],
            self._owner[bucket],
            sharding.mean_operation(self.flat_sent[bucket]),
            async_op=True,
        )
        assert work is not None
        self.works[bucket] = work

    def wait_for_owned(self) -> None:
        """Wait for the means of this rank's buckets."""
        for number, work in self.works.items():
            work.wait()
            if not self.flat_sent[number].is_cuda and self._owner[number] == dist.get_rank():
                self.flat_sent[number].div_(dist.get_world_size())
        self.works.clear()

    def send_owned(self, flats: list[Tensor], owned: list[Tensor]) -> None:
        """Broadcast every bucket from its owner."""
        works = []
        sources = iter(owned)
        for number, flat in enumerate(flats):
            if self._owner[number] == dist.get_rank():
                source = next(sources)
                if source is not flat:
                    flat.copy_(source)
            works.append(dist.broadcast(flat, self._owner[number], async_op=True))
        for work in works:
            assert work is not None
            work.wait()

    def bucket_exchange(self, size_bytes: int, dtype: str) -> BucketExchange:
        """Return a reduce of gradients and a broadcast of weights; the owner is rank 0."""
        weight = self.parameters[0]
        return one_bucket.owned(size_bytes, dtype, weight.dtype, weight.device)


def on_devices(bucket_cap_mb: float, comm_hook: str, reduce: str) -> Strategy:
    """Make the strategy from the YAML's options."""
    return (Owned if reduce == "owner" else Sharded)(bucket_cap_mb, comm_hook)
