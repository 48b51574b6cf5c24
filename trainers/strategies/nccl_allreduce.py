"""All-reduce of gradient buckets while backward runs: torch's DistributedDataParallel.

Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704. On GPUs NCCL reduces; on CPU workers gloo does.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trainers.strategies import Strategy

# Share of a gradient's bytes that a hook sends.
WIRE_SHARE = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}
# Four units in the last place of the format that is sent: casts and sums round in it.
ROUNDING = {"fp16": 4 * 2.0**-11, "bf16": 4 * 2.0**-8}
# torch 2.15 renamed the argument and warns of the old name.
_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


@dataclass
class Bucket:
    """What torch's communication hooks read of a dist.GradBucket, which Python cannot construct."""

    flat: Tensor
    shapes: list[torch.Size]
    number: int
    last: bool

    def buffer(self) -> Tensor:
        """The flat gradient of the bucket."""
        return self.flat

    def set_buffer(self, flat: Tensor) -> None:
        """Replace it."""
        self.flat = flat

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one for each parameter."""
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def index(self) -> int:
        """Position in the order of exchange."""
        return self.number

    def is_last(self) -> bool:
        """Whether no bucket follows."""
        return self.last


class NcclAllreduce(Strategy):
    """DDP with its own options; `comm_hook` compresses what is sent."""

    def __init__(
        self,
        bucket_cap_mb: float,
        gradient_as_bucket_view: bool,
        static_graph: bool,
        broadcast_buffers: bool,
        comm_hook: str,
        powersgd_rank: int,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            SYNC_BUFFERS: broadcast_buffers,
        }
        self._comm_hook = comm_hook
        self._powersgd_rank = powersgd_rank
        self.exact = comm_hook != "powersgd"
        self.rounding = ROUNDING.get(comm_hook, 0.0)
        self._ddp: DistributedDataParallel | None = None

    def _hook(self) -> tuple[object, Hook] | None:
        """A fresh (state, hook); None for DDP's own all-reduce."""
        if self._comm_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None, matrix_approximation_rank=self._powersgd_rank, start_powerSGD_iter=2
            )
            return state, powerSGD_hook.powerSGD_hook
        hooks: dict[str, Hook] = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        return (None, hooks[self._comm_hook]) if self._comm_hook in hooks else None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Wrap the model in DDP; weights are broadcast from rank 0."""
        device = next(model.parameters()).device
        self._ddp = DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None, **self._arguments
        )
        if hook := self._hook():
            self._ddp.register_comm_hook(*hook)
        return self._ddp

    def without_exchange(self) -> AbstractContextManager[None]:
        """DDP's no_sync: neither buckets nor all-reduce."""
        assert self._ddp is not None
        context: AbstractContextManager[None] = self._ddp.no_sync()
        return context

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """2(n−1)/n of the bytes on the wire, as a ring moves them (nccl-tests, PERFORMANCE.md); NaN for PowerSGD."""
        share = WIRE_SHARE.get(self._comm_hook, float("nan"))
        return gradient_bytes * share * 2 * (world_size - 1) / world_size

    def exchange_alone(self, parameters: list[nn.Parameter]) -> Callable[[], None]:
        """All-reduce every bucket, started one after the other and then awaited, as DDP does at the end of backward.

        On a GPU several copies of the gradient take turns, so that together they are larger than the L2 cache.
        """
        gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        copies = 1
        if parameters[0].is_cuda:
            cache_bytes = torch.cuda.get_device_properties(parameters[0].device).L2_cache_size
            copies = 1 + int(4 * cache_bytes // gradient_bytes)
        turns = itertools.cycle([list(self._buckets(parameters)) for _ in range(copies)])
        hook = self._hook()
        # The mean, as DDP needs it; gloo can only sum.
        operation = dist.ReduceOp.AVG if parameters[0].is_cuda else dist.ReduceOp.SUM

        def exchange() -> None:
            if hook:
                for future in [hook[1](hook[0], bucket) for bucket in next(turns)]:
                    future.wait()
            else:
                for work in [dist.all_reduce(bucket.flat, operation, async_op=True) for bucket in next(turns)]:
                    assert work is not None
                    work.wait()

        return exchange

    def _buckets(self, parameters: list[nn.Parameter]) -> Iterator[Bucket]:
        """Random gradients in DDP's buckets: last parameters first, one dtype each, full at `bucket_cap_mb`.

        DDP's small first bucket is only there where the cap is left to torch's default; ours is always given.
        """
        cap_bytes = self._arguments["bucket_cap_mb"] * (1 << 20)
        groups: list[list[nn.Parameter]] = []
        open_groups: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in reversed(parameters):
            group = open_groups.setdefault(parameter.dtype, [])
            if not group:
                groups.append(group)
            group.append(parameter)
            if sum(member.numel() * member.element_size() for member in group) >= cap_bytes:
                del open_groups[parameter.dtype]
        for number, group in enumerate(groups):
            # Tiny where gloo sums: each exchange multiplies by the number of ranks, and must not overflow.
            scale = 1.0 if group[0].is_cuda else 1e-30
            flat = torch.cat([torch.randn_like(parameter).flatten() for parameter in group]).mul_(scale)
            yield Bucket(flat, [parameter.shape for parameter in group], number, number == len(groups) - 1)


STRATEGY = NcclAllreduce
