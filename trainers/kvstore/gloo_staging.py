"""CPU staging as it is usually written: copy to the host, gloo all-reduce, update, copy back. A reference without overlap."""

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.kvstore.bucketed import Bucketed, arrays_of, gather, scatter
from trainers.kvstore.buckets import BucketLayout
from trainers.kvstore.sharding import ring_bytes
from trainers.kvstore.shared_regions import views
from trainers.peers import net_probe, ring_probe
from trainers.strategy import ReferenceProbe


class GlooStaging(Bucketed):
    """Every rank gets the whole mean gradient in host memory and updates all weights itself."""

    def set_up(self, order: list[int]) -> None:
        """Make buffers on the device and on the host; the host keeps the weights."""
        device = self.parameters[0].device
        self.layout = layout = BucketLayout.of(arrays_of(self.parameters, self.comm_hook), order, self.cap_bytes)

        def buffer(size_bytes: int, where: torch.device) -> Tensor:
            pinned = where.type == "cpu" and device.type == "cuda"
            return torch.zeros(size_bytes, dtype=torch.uint8, device=where, pin_memory=pinned)

        host = torch.device("cpu")
        self.flat_sent = views(buffer(layout.push_bytes, device), layout, in_weight_dtype=False, push=True)
        self._staged = views(buffer(layout.push_bytes, host), layout, in_weight_dtype=False, push=True)
        self.flat_means = views(buffer(layout.pull_bytes, device), layout, in_weight_dtype=False)
        self._device_weights = views(buffer(layout.pull_bytes, device), layout, in_weight_dtype=True)
        self._weights = views(buffer(layout.pull_bytes, host), layout, in_weight_dtype=True)
        self._steps = [self.steps_of(flat) for flat in self._weights]
        for bucket, on_device, weights in zip(layout.buckets, self._device_weights, self._weights, strict=True):
            gather(bucket, self.parameters, on_device)
            weights.copy_(on_device)

    def start_bucket(self, bucket: int) -> None:
        """Do nothing: all buckets are exchanged at the end."""

    def finish_buckets(self) -> None:
        """Copy to the host, all-reduce over gloo, update, copy back."""
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
                self._steps[number].begin()
                self._steps[number].take(gradient, self.settings())
                self._device_weights[number].copy_(self._weights[number])

    def apply_weights(self) -> None:
        """Take the host's weights."""
        scatter(self.layout.buckets, self._device_weights, self.parameters)

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return 2(n−1)/n of the bytes, which a ring moves through the network stack."""
        return ring_bytes(self.sent_bytes(gradient_bytes), world_size)

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: gloo between neighbours, and between hosts."""
        sent, host = sum(flat.nbytes for flat in self.flat_sent), torch.device("cpu")
        in_ring = ring_bytes(sent, dist.get_world_size())  # gloo has one of all ranks, which leaves each host once
        return [*ring_probe.probes(host, in_ring), *net_probe.probes(self.hosts, host, in_ring)]
