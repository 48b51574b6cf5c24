"""CPU staging as it is usually written: copy to the host, gloo all-reduce, update, copy back. The reference, not overlapped."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers import ring
from trainers.kvstore import sums
from trainers.kvstore.bucketed import SENT, Bucketed, arrays_of, gather, scatter
from trainers.kvstore.collectives import ring_bytes
from trainers.kvstore.layout import Layout
from trainers.kvstore.memory import views
from trainers.strategies import Alone, Probe


class GlooStaging(Bucketed):
    """Every rank holds the whole mean gradient in host memory and updates all weights itself."""

    def __init__(self, bucket_cap_mb: float, comm_hook: str, only_gradients: bool) -> None:
        super().__init__(bucket_cap_mb, comm_hook, only_gradients)
        self.layout: Layout | None = None

    def set_up(self, order: list[int]) -> dict[int, list[int]]:
        """Buffers on the device and on the host, where weights are kept too."""
        device = self.parameters[0].device
        self.layout = layout = Layout.of(arrays_of(self.parameters, self.comm_hook), order, self.cap_bytes)

        def buffer(size_bytes: int, where: torch.device) -> Tensor:
            pinned = where.type == "cpu" and device.type == "cuda"
            return torch.zeros(size_bytes, dtype=torch.uint8, device=where, pin_memory=pinned)

        host = torch.device("cpu")
        self.sent = views(buffer(layout.push_bytes, device), layout, kept=False, push=True)
        self._staged = views(buffer(layout.push_bytes, host), layout, kept=False, push=True)
        self.means = views(buffer(layout.pull_bytes, device), layout, kept=False)
        self._answers = views(buffer(layout.pull_bytes, device), layout, kept=True)
        self._weights = views(buffer(layout.pull_bytes, host), layout, kept=True)
        self._momentum = [torch.zeros_like(flat) for flat in self._weights]
        for bucket, answer, weights in zip(layout.buckets, self._answers, self._weights, strict=True):
            gather(bucket, self.parameters, answer)
            weights.copy_(answer)
        return layout.buckets_of()

    def start(self, number: int) -> None:
        """Gather the gradients of a bucket; all else happens at the end."""
        assert self.layout is not None
        gather(self.layout.buckets[number], self.gradients(), self.sent[number])

    def exchange_flat(self) -> None:
        """Down, over gloo, up."""
        for sent, staged in zip(self.sent, self._staged, strict=True):
            staged.copy_(sent)
        for work in [dist.all_reduce(staged, async_op=True) for staged in self._staged]:
            assert work is not None
            work.wait()
        for number, staged in enumerate(self._staged):
            staged.div_(dist.get_world_size())
            if self.only_gradients:
                self.means[number].copy_(staged)
            else:
                gradient = staged.to(torch.float32)
                sums.sgd(self._weights[number], gradient, self._momentum[number], *self.settings())
                self._answers[number].copy_(self._weights[number])

    def finish(self) -> None:
        """All of it; mean gradients go to `.grad`."""
        assert self.layout is not None
        self.exchange_flat()
        if self.only_gradients:
            scatter(self.layout.buckets, self.means, self.gradients())

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """The host's weights become this rank's."""
        assert self.layout is not None
        scatter(self.layout.buckets, self._answers, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """2(n−1)/n of the bytes through the network stack, as a ring moves them."""
        return ring_bytes(gradient_bytes * (0.5 if self.comm_hook in SENT else 1.0), world_size)

    def exchange_alone(self, parameters: list[nn.Parameter]) -> Alone:
        """Down, over gloo, up, for every bucket."""
        if self.layout is None:
            self.parameters = parameters
            self.agree(list(reversed(range(len(parameters)))))
        alone = _Alone(self)
        alone.fill([torch.randn_like(parameter) for parameter in self.parameters])
        return alone

    def probes(self) -> list[Probe]:
        """Limit: gloo between neighbours."""
        sent = sum(flat.nbytes for flat in self.sent)
        return [ring.probe(torch.device("cpu"), ring_bytes(sent, dist.get_world_size()))]


class _Alone(Alone):
    """The exchange of gloo staging, inside its `gradients_only`."""

    def __init__(self, strategy: GlooStaging) -> None:
        self._strategy = strategy

    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Into the flat buckets on the device."""
        assert self._strategy.layout is not None
        for bucket, flat in zip(self._strategy.layout.buckets, self._strategy.sent, strict=True):
            gather(bucket, gradients, flat)

    def __call__(self) -> None:
        """One exchange."""
        self._strategy.exchange_flat()

    def result(self) -> list[Tensor]:
        """Copies, in the parameters' shapes."""
        assert self._strategy.layout is not None
        found = [torch.zeros_like(parameter) for parameter in self._strategy.parameters]
        scatter(self._strategy.layout.buckets, self._strategy.means, found)
        return found
