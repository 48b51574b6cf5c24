"""Half-precision communication hooks: the dtype that is sent instead of float32.

`HalfPrecision` is what DDP calls. The strategies with buckets of their own cast as they fill them.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

# The dtype that each comm_hook sends.
SENT = {"fp16": "float16", "bf16": "bfloat16"}
# Relative rounding of a gradient: four units in the last place, since casts and sums round in the
# format.
ROUNDING = {"fp16": 4 * 2.0**-11, "bf16": 4 * 2.0**-8}
# The smallest step between two numbers of the format, where it matters: float16 loses gradients
# below it.
SMALLEST_STEP = {"fp16": 2.0**-24}
SENT_BYTES = 2  # of an element


def share(tensors: Iterable[Tensor], comm_hook: str) -> float:
    """Return the share of these gradients' bytes that a hook sends.

    It is ½ of float32, and all of what is half precision already.
    """
    if comm_hook not in SENT:
        return 1.0
    whole = sent = 0
    for tensor in tensors:
        whole += tensor.numel() * tensor.element_size()
        sent += tensor.numel() * min(tensor.element_size(), SENT_BYTES)
    return sent / whole if whole else 1.0


class HalfPrecision:
    """DDP's hook for fp16 and bf16: torch's fp16_compress_hook, without what that adds to a step.

    torch's hook allocates what it sends in every step, and casts back in a callback, for which each
    bucket takes a stream of torch's pool. Here the buffers stay, and the hook of the last bucket
    casts all of them back on the stream of backward.
    """

    def __init__(self, comm_hook: str) -> None:
        self._dtype: torch.dtype = getattr(torch, SENT[comm_hook])
        self._buffers: dict[int, Tensor] = {}  # by the number of the bucket: what is sent
        self._begun: list[tuple[Tensor, Tensor, dist.Work, torch.futures.Future[Tensor]]] = []

    def reduce(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Begin to reduce a bucket; behind the last one, end all.

        The future has the bucket's mean gradient (elements,).
        """
        gradient = bucket.buffer()
        sent = gradient
        if gradient.dtype != self._dtype:
            sent = self._buffers.get(bucket.index(), sent)
            if sent.dtype != self._dtype or sent.shape != gradient.shape:
                sent = torch.empty_like(gradient, dtype=self._dtype)
                self._buffers[bucket.index()] = sent
        # Divided before it is summed, so that float16 does not overflow; cast by the same kernel.
        torch.mul(gradient, 1 / dist.get_world_size(), out=sent)
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None
        devices = [gradient.device] if gradient.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._begun.append((gradient, sent, work, future))
        if bucket.is_last():
            begun, self._begun = self._begun, []
            for gradient, sent, work, _ in begun:
                work.wait()
                if sent is not gradient:
                    gradient.copy_(sent)
            # Not earlier: a future remembers the stream of the moment, for which DDP waits.
            for gradient, _, _, ended in begun:
                ended.set_result(gradient)
        return future
