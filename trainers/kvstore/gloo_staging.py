"""CPU staging as it is usually written: copy to the host, gloo all-reduce, update, copy back. The reference, not overlapped."""

import torch
import torch.distributed as dist
from torch import Tensor

from trainers import ring_probe
from trainers.kvstore import cpu_sums
from trainers.kvstore.bucketed import Bucketed, arrays_of, gather, scatter
from trainers.kvstore.buckets import Layout
from trainers.kvstore.sharding import ring_bytes
from trainers.kvstore.shared_regions import views
from trainers.strategy import Probe


class GlooStaging(Bucketed):
    """Every rank holds the whole mean gradient in host memory and updates all weights itself."""

    def set_up(self, order: list[int]) -> None:
        """Buffers on the device and on the host, where weights are kept too."""
        device = self.parameters[0].device
        self.layout = layout = Layout.of(arrays_of(self.parameters, self.comm_hook), order, self.cap_bytes)

        def buffer(size_bytes: int, where: torch.device) -> Tensor:
            pinned = where.type == "cpu" and device.type == "cuda"
            return torch.zeros(size_bytes, dtype=torch.uint8, device=where, pin_memory=pinned)

        host = torch.device("cpu")
        self.flat_sent = views(buffer(layout.push_bytes, device), layout, kept=False, push=True)
        self._staged = views(buffer(layout.push_bytes, host), layout, kept=False, push=True)
        self.flat_means = views(buffer(layout.pull_bytes, device), layout, kept=False)
        self._answers = views(buffer(layout.pull_bytes, device), layout, kept=True)
        self._weights = views(buffer(layout.pull_bytes, host), layout, kept=True)
        self._momentum = [torch.zeros_like(flat) for flat in self._weights]
        for bucket, answer, weights in zip(layout.buckets, self._answers, self._weights, strict=True):
            gather(bucket, self.parameters, answer)
            weights.copy_(answer)

    def start_flat(self, bucket: int) -> None:
        """Everything happens at the end."""

    def finish_flat(self) -> None:
        """Down, over gloo, up."""
        for sent, staged in zip(self.flat_sent, self._staged, strict=True):
            staged.copy_(sent)
        for work in [dist.all_reduce(staged, async_op=True) for staged in self._staged]:
            assert work is not None
            work.wait()
        for number, staged in enumerate(self._staged):
            staged.div_(dist.get_world_size())
            if self.only_gradients:
                self.flat_means[number].copy_(staged)
            else:
                gradient = staged.to(torch.float32)
                cpu_sums.sgd(self._weights[number], gradient, self._momentum[number], *self.settings())
                self._answers[number].copy_(self._weights[number])

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """The host's weights become this rank's."""
        scatter(self.layout.buckets, self._answers, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """2(n−1)/n of the bytes through the network stack, as a ring moves them."""
        return ring_bytes(self.sent_bytes(gradient_bytes), world_size)

    def probes(self) -> list[Probe]:
        """Limit: gloo between neighbours."""
        sent = sum(flat.nbytes for flat in self.flat_sent)
        return ring_probe.probes(torch.device("cpu"), ring_bytes(sent, dist.get_world_size()))
