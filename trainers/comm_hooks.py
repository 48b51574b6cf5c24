"""Communication hooks: gradients are sent in fewer bytes than those of float32.

`HalfPrecision` and `EightBit` are what DDP calls. The strategies with buckets of their own cast to
half precision as they fill them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

FP8 = "fp8"
BLOCK = 256  # elements that share a scale
SCALE_BYTES = 4
MOST = 448.0  # of float8_e4m3fn: 3 bits of mantissa, least normal number 2**-6
# The dtype that each comm_hook sends.
SENT = {"fp16": "float16", "bf16": "bfloat16"}
# Relative rounding of a gradient: four units in the last place, since casts and sums round in the
# format. With fp8 the local gradient is rounded by 2**-4 of itself, then the mean of these.
ROUNDING = {"fp16": 4 * 2.0**-11, "bf16": 4 * 2.0**-8, FP8: 2.0**-4 * (2 + 2.0**-4)}
# The smallest step between two numbers of the format, where it matters: float16 loses gradients
# below it.
SMALLEST_STEP = {"fp16": 2.0**-24}
# The same, as a share of the largest gradient: half a step below the least normal number, twice.
SMALLEST_SHARE = {FP8: 2 * 2.0**-10 / MOST}
# Of an element.
SENT_BYTES = {"fp16": 2.0, "bf16": 2.0, FP8: 1 + SCALE_BYTES / BLOCK}


def share(tensors: Iterable[Tensor], comm_hook: str) -> float:
    """Return the share of these gradients' bytes that a hook sends.

    With half precision it is ½ of float32, and all of what is half precision already.
    """
    if comm_hook not in SENT_BYTES:
        return 1.0
    whole = sent = 0.0
    for tensor in tensors:
        whole += tensor.numel() * tensor.element_size()
        sent += tensor.numel() * min(tensor.element_size(), SENT_BYTES[comm_hook])
    return sent / whole if whole else 1.0


# What a hook has begun of a bucket: its gradient, what the collective fills, the collective, and
# what becomes the mean.
Begun: TypeAlias = tuple[Tensor, Tensor, dist.Work, torch.futures.Future[Tensor]]


class BucketHook(ABC):
    """A hook of DDP: the hook of the last bucket ends the exchange of all."""

    def __init__(self) -> None:
        self._begun: list[Begun] = []

    def reduce(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Begin to reduce a bucket; behind the last one, end all.

        The future has the bucket's mean gradient (elements,).
        """
        gradient = bucket.buffer()
        received, work = self._begin(gradient, bucket.index())
        assert work is not None
        devices = [gradient.device] if gradient.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._begun.append((gradient, received, work, future))
        if bucket.is_last():
            begun, self._begun = self._begun, []
            self._end(begun)
            # Not earlier: a future remembers the stream of the moment, for which DDP waits.
            for gradient, _, _, ended in begun:
                ended.set_result(gradient)
        return future

    @abstractmethod
    def _begin(self, gradient: Tensor, number: int) -> tuple[Tensor, dist.Work | None]:
        """Start a collective of bucket `number`. Return what it fills, and the collective."""

    @abstractmethod
    def _end(self, begun: Sequence[Begun]) -> None:
        """Leave in each gradient the mean over the ranks."""


class HalfPrecision(BucketHook):
    """DDP's hook for fp16 and bf16: torch's fp16_compress_hook, without what that adds to a step.

    torch's hook allocates what it sends in every step, and casts back in a callback, for which each
    bucket takes a stream of torch's pool. Here the buffers stay, and the hook of the last bucket
    casts all of them back on the stream of backward.
    """

    def __init__(self, comm_hook: str) -> None:
        super().__init__()
        self._dtype: torch.dtype = getattr(torch, SENT[comm_hook])
        self._buffers: dict[int, Tensor] = {}  # by the number of the bucket: what is sent

    def _begin(self, gradient: Tensor, number: int) -> tuple[Tensor, dist.Work | None]:
        sent = gradient
        if gradient.dtype != self._dtype:
            sent = self._buffers.get(number, sent)
            if sent.dtype != self._dtype or sent.shape != gradient.shape:
                sent = torch.empty_like(gradient, dtype=self._dtype)
                self._buffers[number] = sent
        # Divided before it is summed, so that float16 does not overflow; cast by the same kernel.
        torch.mul(gradient, 1 / dist.get_world_size(), out=sent)
        return sent, dist.all_reduce(sent, async_op=True)

    def _end(self, begun: Sequence[Begun]) -> None:
        for gradient, sent, work, _ in begun:
            work.wait()
            if sent is not gradient:
                gradient.copy_(sent)


class EightBit(BucketHook):
    """DDP's hook for fp8: an all-reduce in two collectives of bytes, with a scale for each block.

    Every rank gets its share of the elements from all, adds them up in float32 and sends the mean
    to all.
    """

    def _begin(self, gradient: Tensor, number: int) -> tuple[Tensor, dist.Work | None]:
        of_all = dist.get_world_size() * BLOCK
        padded = functional.pad(gradient.float(), (0, -gradient.numel() % of_all))
        own = packed(padded.view(-1, BLOCK))
        of_ranks = torch.empty_like(own)
        return of_ranks, dist.all_to_all_single(of_ranks, own, async_op=True)

    def _end(self, begun: Sequence[Begun]) -> None:
        gathers = []
        for _, of_ranks, work, _ in begun:
            work.wait()
            values = unpacked(of_ranks).view(dist.get_world_size(), -1, BLOCK)
            mean = packed(values.mean(0))
            means = torch.empty_like(of_ranks)
            gathers.append((means, dist.all_gather_into_tensor(means, mean, async_op=True)))
        for (gradient, *_), (means, gather) in zip(begun, gathers, strict=True):
            assert gather is not None
            gather.wait()
            gradient.copy_(unpacked(means).flatten()[: gradient.numel()])


def packed(values: Tensor) -> Tensor:
    """Return blocks of float32 (blocks, BLOCK) as bytes (blocks, BLOCK + 4): float8 and a scale."""
    scales = values.abs().amax(1, keepdim=True) / MOST
    scales.clamp_min_(torch.finfo(torch.float32).tiny)
    eight = (values / scales).to(torch.float8_e4m3fn)
    return torch.cat([eight.view(torch.uint8), scales.view(torch.uint8)], 1)


def unpacked(blocks: Tensor) -> Tensor:
    """Return the values (blocks, BLOCK) in float32 of what `packed` returned."""
    eight = blocks[:, :BLOCK].view(torch.float8_e4m3fn)
    return eight.float() * blocks[:, BLOCK:].contiguous().view(torch.float32)
