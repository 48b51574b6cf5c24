"""Half-precision communication hooks: what is sent instead of a float32 gradient, and what that costs in digits."""

from collections.abc import Iterable

from torch import Tensor

# comm_hook: the dtype that is sent.
SENT = {"fp16": "float16", "bf16": "bfloat16"}
# Relative rounding of a gradient: four units in the last place of the format, since casts and sums round in it.
ROUNDING = {"fp16": 4 * 2.0**-11, "bf16": 4 * 2.0**-8}
SENT_BYTES = 2


def share(tensors: Iterable[Tensor], comm_hook: str) -> float:
    """What a hook leaves of the bytes of these gradients: ½ of float32, all of what is half precision already."""
    if comm_hook not in SENT:
        return 1.0
    sizes = [(tensor.numel(), tensor.element_size()) for tensor in tensors]
    whole = sum(elements * size for elements, size in sizes)
    return sum(elements * min(size, SENT_BYTES) for elements, size in sizes) / whole if whole else 1.0
