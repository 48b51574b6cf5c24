"""MXNet's kvstore=device: gradients are reduced on the GPUs, and so are weights updated.

`reduce=owner` is MXNet's own form: each bucket has an owner (the largest first, to the least loaded), which reduces it,
updates its weights and broadcasts them. `sharded`: every rank owns a share of each bucket: reduce-scatter, update of the
owned share, all-gather (Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, stage 2).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers import ring
from trainers.kvstore import collectives, sums
from trainers.kvstore.bucketed import SENT, Bucketed, arrays_of, gather, scatter
from trainers.kvstore.layout import Layout
from trainers.strategies import Alone, Probe, Strategy


class _OnDevices(Bucketed):
    """What both forms share: flat buckets of gradients and weights; some of them are this rank's to update."""

    layout: Layout
    flat_gradients: list[Tensor]
    flat_means: list[Tensor]
    flat_weights: list[Tensor]
    # What this rank owns: reduced gradients and the weights that they change, in equal order.
    owned_gradients: list[Tensor]
    owned_weights: list[Tensor]

    def set_up(self, order: list[int]) -> dict[int, list[int]]:
        """Flat buckets with the first weights. Collective."""
        device, world_size = self.parameters[0].device, dist.get_world_size()
        self.layout = Layout.of(arrays_of(self.parameters, self.comm_hook), order, self.cap_bytes)
        self.flat_gradients, self.flat_means = (
            collectives.padded(self.layout, world_size, kept=False, device=device) for _ in range(2)
        )
        self.flat_weights = collectives.padded(self.layout, world_size, kept=True, device=device)
        for bucket, flat in zip(self.layout.buckets, self.flat_weights, strict=True):
            gather(bucket, self.parameters, flat)
        self.works: dict[int, dist.Work] = {}
        self.own()
        self._momentum = [torch.zeros_like(weights) for weights in self.owned_weights]
        return self.layout.buckets_of()

    def own(self) -> None:
        """Set what this rank owns."""
        raise NotImplementedError

    def start_flat(self, number: int) -> None:
        """Begin to reduce a flat bucket."""
        raise NotImplementedError

    def reduced(self) -> None:
        """The current stream waits until this rank's own gradients are reduced."""
        raise NotImplementedError

    def spread(self, flats: list[Tensor], owned: list[Tensor]) -> None:
        """Bring what each rank owns to all."""
        raise NotImplementedError

    def start(self, number: int) -> None:
        """Gather the gradients of a bucket and begin to reduce them."""
        gather(self.layout.buckets[number], self.gradients(), self.flat_gradients[number])
        self.start_flat(number)

    def finish(self) -> None:
        """Reduced; mean gradients go to every `.grad` where they are asked for."""
        self.reduced()
        if self.only_gradients:
            self.spread(self.flat_means, self.owned_gradients)
            scatter(self.layout.buckets, self.flat_means, self.gradients())

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Update what is owned, bring it to all."""
        rate, mu, decay = self.settings()
        for weights, gradient, momentum in zip(self.owned_weights, self.owned_gradients, self._momentum, strict=True):
            sums.sgd(weights, gradient, momentum, rate, mu, decay)
        self.spread(self.flat_weights, self.owned_weights)
        scatter(self.layout.buckets, self.flat_weights, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """(n−1)/n of the bytes in the reduction, as many to bring means to all; half with a half-precision hook."""
        return collectives.ring_bytes(gradient_bytes * (0.5 if self.comm_hook in SENT else 1.0), world_size)

    def exchange_alone(self, parameters: list[nn.Parameter]) -> Alone:
        """Reduce every bucket and bring the means to all."""
        if not self.parameters or not hasattr(self, "layout"):
            self.parameters = parameters
            self.agree(list(reversed(range(len(parameters)))))
        alone = _Alone(self)
        alone.fill([torch.randn_like(parameter) for parameter in self.parameters])
        return alone

    def probes(self) -> list[Probe]:
        """Limit: the links between neighbours."""
        sent = sum(flat.nbytes for flat in self.flat_gradients)
        return [ring.probe(self.parameters[0].device, collectives.ring_bytes(sent, dist.get_world_size()))]


class Sharded(_OnDevices):
    """Every rank owns a share of each bucket."""

    def own(self) -> None:
        """Views of this rank's shares."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.owned_weights = collectives.shares(self.flat_weights, rank, world_size)
        self.owned_gradients = [
            torch.zeros_like(share) for share in collectives.shares(self.flat_gradients, rank, world_size)
        ]

    def start_flat(self, number: int) -> None:
        """Reduce-scatter."""
        self.works[number] = collectives.start_mean(self.owned_gradients[number], self.flat_gradients[number])

    def reduced(self) -> None:
        """The mean of this rank's shares is there."""
        for number, work in self.works.items():
            collectives.end_mean(work, self.owned_gradients[number])
        self.works.clear()

    def spread(self, flats: list[Tensor], owned: list[Tensor]) -> None:
        """All-gather."""
        collectives.all_shares(flats, owned)


class Owned(_OnDevices):
    """Every bucket has one owner."""

    def own(self) -> None:
        """Deal the buckets, the largest first, each to the least loaded rank."""
        loads = [0] * dist.get_world_size()
        self._owner: dict[int, int] = {}
        for number in sorted(range(len(self.flat_weights)), key=lambda number: -self.flat_weights[number].nbytes):
            self._owner[number] = loads.index(min(loads))
            loads[self._owner[number]] += self.flat_weights[number].nbytes
        mine = [number for number, owner in sorted(self._owner.items()) if owner == dist.get_rank()]
        self.owned_weights = [self.flat_weights[number] for number in mine]
        self.owned_gradients = [self.flat_gradients[number] for number in mine]

    def start_flat(self, number: int) -> None:
        """Reduce to the owner."""
        work = dist.reduce(
            self.flat_gradients[number],
            self._owner[number],
            collectives.operation(self.flat_gradients[number]),
            async_op=True,
        )
        assert work is not None
        self.works[number] = work

    def reduced(self) -> None:
        """The mean of this rank's buckets is there."""
        for number, work in self.works.items():
            work.wait()
            if not self.flat_gradients[number].is_cuda and self._owner[number] == dist.get_rank():
                self.flat_gradients[number].div_(dist.get_world_size())
        self.works.clear()

    def spread(self, flats: list[Tensor], owned: list[Tensor]) -> None:
        """Broadcast from the owners."""
        works = []
        mine = iter(owned)
        for number, flat in enumerate(flats):
            if self._owner[number] == dist.get_rank():
                source = next(mine)
                if source is not flat:
                    flat.copy_(source)
            works.append(dist.broadcast(flat, self._owner[number], async_op=True))
        for work in works:
            assert work is not None
            work.wait()


class _Alone(Alone):
    """The exchange on devices, inside its `gradients_only`."""

    def __init__(self, strategy: _OnDevices) -> None:
        self._strategy = strategy

    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Into the flat buckets."""
        for bucket, flat in zip(self._strategy.layout.buckets, self._strategy.flat_gradients, strict=True):
            gather(bucket, gradients, flat)

    def __call__(self) -> None:
        """Start all, end all."""
        strategy = self._strategy
        for number in range(len(strategy.layout.buckets)):
            strategy.start_flat(number)
        strategy.reduced()
        strategy.spread(strategy.flat_means, strategy.owned_gradients)

    def result(self) -> list[Tensor]:
        """Copies, in the parameters' shapes."""
        found = [torch.zeros_like(parameter) for parameter in self._strategy.parameters]
        scatter(self._strategy.layout.buckets, self._strategy.flat_means, found)
        return found


def on_devices(bucket_cap_mb: float, comm_hook: str, reduce: str) -> Strategy:
    """The form that the options ask for."""
    return (Owned if reduce == "owner" else Sharded)(bucket_cap_mb, comm_hook)


STRATEGY = on_devices
