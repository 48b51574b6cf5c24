"""Half-precision communication hooks: the dtype that is sent instead of float32, and the rounding that it costs."""

from collections.abc import Iterable

from torch import Tensor

# The dtype that each comm_hook sends.
SENT = {"fp16": "float16", "bf16": "bfloat16"}
# Relative rounding of a gradient: four units in the last place, since casts and sums round in the format.
ROUNDING = {"fp16": 4 * 2.0**-11, "bf16": 4 * 2.0**-8}
# The smallest step between two numbers of the format, where it matters: float16 loses gradients below it.
SMALLEST_STEP = {"fp16": 2.0**-24}
SENT_BYTES = 2  # of an element


def share(tensors: Iterable[Tensor], comm_hook: str) -> float:
    """Return the share of these gradients' bytes that a hook sends: ½ of float32, all of what is half precision already."""
    if comm_hook not in SENT:
        return 1.0
    sizes = [(tensor.numel(), tensor.element_size()) for tensor in tensors]
    whole = sum(elements * size for elements, size in sizes)
    return sum(elements * min(size, SENT_BYTES) for elements, size in sizes) / whole if whole else 1.0
