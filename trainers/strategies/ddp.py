"""All-reduce of gradient buckets while backward runs: torch's DistributedDataParallel.

Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704. On GPUs NCCL reduces; on CPU workers gloo.
"""

import inspect
import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from trainers import collectives, comm_hooks, reference_probes
from trainers.strategy import BucketExchange, ExchangeAlone, ReferenceProbe, SentBucket, Strategy

# torch 2.15 renamed the argument and warns of the old name.
SYNC_BUFFERS = "broadcast_buffers"
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    SYNC_BUFFERS = "forward_sync_buffers"
CACHES = 4  # of the L2 cache that the copies of a gradient fill together
# Random gradients start this small where gloo sums: each exchange multiplies them by the number of
# ranks, without overflow.
SUMMED_SCALE = 1e-30
POWERSGD = "powersgd"

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
StatefulHook = tuple[object, Hook]


@dataclass
class HookBucket:
    """The part of dist.GradBucket that torch's hooks read. Python cannot construct a GradBucket."""

    flat: Tensor  # (elements,)
    shapes: list[torch.Size]  # of the gradients in it
    position: int
    last: bool

    def buffer(self) -> Tensor:
        """Return the flat gradient of the bucket."""
        return self.flat

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer, one for each parameter."""
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def index(self) -> int:
        """Return the position in the order of exchange."""
        return self.position

    def is_last(self) -> bool:
        """Return whether no bucket follows."""
        return self.last


class NcclAllreduce(Strategy):
    """DDP with its own options; `comm_hook` compresses what is sent."""

    own_work_alone = True  # buckets and hook are the same, and nothing is sent to oneself

    def __init__(
        self,
        bucket_cap_mb: float | list[float],
        gradient_as_bucket_view: bool,
        static_graph: bool,
        broadcast_buffers: bool,
        comm_hook: str,
        powersgd_rank: int,
        memory: str = collectives.PLAIN,
    ) -> None:
        caps_mb = bucket_cap_mb if isinstance(bucket_cap_mb, list) else [bucket_cap_mb]
        argument = "bucket_cap_mb_list" if caps_mb is bucket_cap_mb else "bucket_cap_mb"
        self._caps_bytes = [cap_mb * (1 << 20) for cap_mb in caps_mb]
        self._arguments: dict[str, Any] = {
            argument: bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            SYNC_BUFFERS: broadcast_buffers,
        }
        self._comm_hook, self._powersgd_rank = comm_hook, powersgd_rank
        self._memory = memory
        self.exact = comm_hook != POWERSGD
        self.rounding = comm_hooks.ROUNDING.get(comm_hook, 0.0)
        self.smallest_step = comm_hooks.SMALLEST_STEP.get(comm_hook, 0.0)
        self.smallest_share = comm_hooks.SMALLEST_SHARE.get(comm_hook, 0.0)
        self._ddp: DistributedDataParallel | None = None
        self._has_graph = not static_graph
        # Of the bytes of float32; exact once the parameters are known.
        self._share = comm_hooks.SENT_BYTES.get(comm_hook, 4) / 4

    def _hook(self) -> StatefulHook | None:
        """Return a fresh (state, hook); None for DDP's own all-reduce."""
        if self._comm_hook in comm_hooks.SENT:
            return None, comm_hooks.HalfPrecision(self._comm_hook).reduce
        if self._comm_hook == comm_hooks.FP8:
            return None, comm_hooks.EightBit().reduce
        if self._comm_hook != POWERSGD:
            return None
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=self._powersgd_rank, start_powerSGD_iter=2
        )
        return state, powerSGD_hook.powerSGD_hook

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Wrap the model in DDP, which broadcasts rank 0's weights."""
        device = next(model.parameters()).device
        ids = [device.index] if device.type == "cuda" else None
        # Torch's own switch, read whenever DDP makes buckets, which it does again after the first
        # step. Where the GPU has no such memory, DDP says nothing and `allocating` raises.
        os.environ["DDP_DISABLE_COMM_MEM"] = "1" if self._memory == collectives.PLAIN else "0"
        collectives.allocating(self._memory, device)
        self._ddp = DistributedDataParallel(model, device_ids=ids, **self._arguments)
        hook = self._hook()
        if hook:
            self._ddp.register_comm_hook(*hook)
        return self._ddp

    def without_exchange(self) -> AbstractContextManager[None]:
        """Return DDP's no_sync: neither buckets nor all-reduce."""
        assert self._ddp is not None
        context: AbstractContextManager[None] = self._ddp.no_sync()
        return context

    def accumulating(self) -> AbstractContextManager[None]:
        """Return DDP's no_sync.

        But for the first micro-step of all: in its exchange DDP learns the static graph.
        """
        if self._has_graph:
            return self.without_exchange()
        self._has_graph = True
        return nullcontext()

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return 2(n−1)/n of what is sent, as a ring moves it (nccl-tests); NaN for PowerSGD."""
        share = float("nan") if self._comm_hook == POWERSGD else self._share
        return gradient_bytes * share * 2 * (world_size - 1) / world_size

    def buckets(self) -> list[SentBucket]:
        """Return the buckets of DDP's reducer, which rebuilds them in the order of arrival."""
        assert self._ddp is not None
        buckets = []
        for bucket in self._ddp.reducer._get_zeros_like_grad_buckets():
            flat = bucket.buffer()
            dtype = comm_hooks.SENT.get(self._comm_hook, str(flat.dtype).removeprefix("torch."))
            sent_bytes = None
            if self._comm_hook != POWERSGD:
                sent_bytes = round(comm_hooks.share([flat], self._comm_hook) * flat.nbytes)
            buckets.append(SentBucket(tuple(bucket.parameters()), flat.nbytes, sent_bytes, dtype))
        return buckets

    def bucket_exchange(self, size_bytes: int, dtype: str) -> BucketExchange | None:
        """Return an all-reduce; None for PowerSGD, whose matrices depend on the layers, and fp8."""
        if self._comm_hook in (POWERSGD, comm_hooks.FP8):
            return None
        assert self._ddp is not None
        device = next(self._ddp.parameters()).device
        with collectives.allocating(self._memory, device):
            flat = collectives.filled(size_bytes, dtype, device)

        def run() -> None:
            operation = collectives.mean_operation(flat)
            collectives.wait(dist.all_reduce(flat, operation, async_op=True))

        return BucketExchange("all_reduce", run)

    def exchange_alone(self, parameters: list[nn.Parameter]) -> ExchangeAlone:
        """Start all-reduces of all buckets, then wait for them, as DDP does after backward."""
        self._gradient_bytes = sum(parameter.nbytes for parameter in parameters)
        self._share = comm_hooks.share(parameters, self._comm_hook)
        self._device = parameters[0].device
        return DdpAlone(parameters, self._caps_bytes, self._hook(), self._memory)

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: links between neighbours, and the wire between hosts.

        None for PowerSGD.
        """
        if self._comm_hook == POWERSGD:
            return []
        ranks = dist.get_world_size()
        moved = self.bytes_moved(self._gradient_bytes, ranks)
        # gloo has one ring of all ranks, which leaves each host once; NCCL's trees need only pass
        # hosts as a ring of hosts does.
        ring = ranks if self._device.type == "cpu" else len(self.hosts.ranks)
        host_bytes = self.bytes_moved(self._gradient_bytes, ring)
        probes = reference_probes.ring(self._device, moved)
        return probes + reference_probes.between_hosts(self.hosts, self._device, host_bytes)


class DdpAlone(ExchangeAlone):
    """All-reduce of DDP's buckets.

    On a GPU several copies of the gradient take turns, so that together they are larger than the L2
    cache.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        caps_bytes: Sequence[float],
        hook: StatefulHook | None,
        memory: str = collectives.PLAIN,
    ) -> None:
        self._parameters, self._hook, self._memory = parameters, hook, memory
        self._groups = bucket_members(parameters, caps_bytes)
        copies, scale = 1, SUMMED_SCALE
        if parameters[0].is_cuda:
            gradient_bytes = sum(parameter.nbytes for parameter in parameters)
            cache_bytes = torch.cuda.get_device_properties(parameters[0].device).L2_cache_size
            copies, scale = 1 + int(CACHES * cache_bytes // gradient_bytes), 1.0
        self._copies = []
        for _ in range(copies):
            gradients = [torch.randn_like(parameter).mul_(scale) for parameter in parameters]
            self._copies.append(self._buckets(gradients))
        self._turns = itertools.cycle(self._copies)

    def _buckets(self, gradients: Sequence[Tensor]) -> list[HookBucket]:
        buckets = []
        for index, group in enumerate(self._groups):
            with collectives.allocating(self._memory, gradients[0].device):
                flat = torch.cat([gradients[member].flatten() for member in group])
            shapes = [gradients[member].shape for member in group]
            buckets.append(HookBucket(flat, shapes, index, index == len(self._groups) - 1))
        return buckets

    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Fill the copy that is exchanged next."""
        self._copies[0] = self._buckets(gradients)
        self._turns = itertools.cycle(self._copies)

    def __call__(self) -> None:
        """Start all buckets, then wait for all."""
        buckets = next(self._turns)
        if self._hook:
            for future in [self._hook[1](self._hook[0], bucket) for bucket in buckets]:
                future.wait()
            return
        # DDP needs the mean; gloo can only sum.
        operation = collectives.mean_operation(buckets[0].flat)
        for work in [dist.all_reduce(bucket.flat, operation, async_op=True) for bucket in buckets]:
            collectives.wait(work)

    def result(self) -> list[Tensor]:
        """Return copies in the parameters' shapes."""
        # gloo has summed, unless a half-precision hook has divided.
        divisor = 1 if self._hook or self._parameters[0].is_cuda else dist.get_world_size()
        means: dict[int, Tensor] = {}
        for group, bucket in zip(self._groups, self._copies[0], strict=True):
            for member, gradient in zip(group, bucket.gradients(), strict=True):
                means[member] = gradient / divisor
        return [means[index] for index in range(len(self._parameters))]


def bucket_members(parameters: Sequence[Tensor], caps_bytes: Sequence[float]) -> list[list[int]]:
    """Return DDP's buckets as numbers of parameters: the last first, one dtype each.

    The first of a dtype is full at the first of `caps_bytes`, …; further ones at the last. DDP has
    its small first bucket only if the cap is torch's default; ours is always given.
    """
    groups: list[list[int]] = []
    current: dict[torch.dtype, list[int]] = {}
    full: Counter[torch.dtype] = Counter()
    for index, parameter in reversed(list(enumerate(parameters))):
        group = current.setdefault(parameter.dtype, [])
        if not group:
            groups.append(group)
        group.append(index)
        cap_bytes = caps_bytes[min(full[parameter.dtype], len(caps_bytes) - 1)]
        if sum(parameters[member].nbytes for member in group) >= cap_bytes:
            del current[parameter.dtype]
            full[parameter.dtype] += 1
    return groups
