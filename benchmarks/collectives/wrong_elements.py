"""Wrong elements of a collective, counted on the device: every rank computes what it should get.

Every rank's input is known: small whole numbers, mixed from the element's place and the rank, whose
sums are exact in every dtype (what is too large for an integer wraps alike). No element is 0, so
that what was never written is wrong. Only of sums over more than MOST_SUMMED ranks, which bfloat16
would round, each rank has a part and is 0 elsewhere.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.rank.ranks import Ranks

# Elements compared at once: bounds the memory that comparing takes.
CHUNK = {"cuda": 1 << 24, "cpu": 1 << 20}
# Numbers of 1 to 4: their sum is at most 256, up to which bfloat16 has every whole number.
MOST_SUMMED = 62


def known_input(
    rank: int,
    start: int,
    stop: int,
    dtype: torch.dtype,
    op: str,
    device: torch.device,
    size: int = 1,
) -> Tensor:
    """Return elements start to stop of the input of one of `size` ranks: 1 to 4.

    For products 1, and 2 at one in sixteen.
    """
    indices = torch.arange(start, stop, device=device)
    mixed = ((indices + (rank + 1) * 7919) * 2654435761).bitwise_right_shift_(16)
    if op == "prod":
        return (mixed.bitwise_and_(15) == 0).add(1).to(dtype)
    values = mixed.bitwise_and_(3).add_(1).to(dtype)
    turns = -(-size // MOST_SUMMED)
    if turns > 1 and op in ("sum", "avg"):
        values.mul_((indices + rank) % turns == 0)
    return values


def fill(tensor: Tensor, rank: int, op: str, size: int) -> None:
    """Fill a tensor with the known input of one of `size` ranks."""
    for start, stop in _chunks(tensor):
        tensor[start:stop] = known_input(rank, start, stop, tensor.dtype, op, tensor.device, size)


def wrong_elements(name: str, received: Tensor, op: str, root: int, ranks: Ranks) -> int:
    """Return how many elements of this rank's result are not what the known inputs make.

    `received` is the whole result. Of gather and reduce only the root has one: 0 elsewhere.
    """
    rank, size = ranks.rank, ranks.world_size
    if name in ("gather", "reduce") and rank != root:
        return 0
    share = received.numel()
    if name in ("all_gather", "all_to_all", "gather"):
        share //= size
    first = 0
    if name in ("reduce_scatter", "scatter", "all_to_all"):
        first = rank * share
    dtype, device = received.dtype, received.device
    if name in ("all_reduce", "reduce", "reduce_scatter"):

        def reduced(start: int, stop: int) -> Tensor:
            total = known_input(0, first + start, first + stop, dtype, op, device, size)
            for peer in range(1, size):
                part = known_input(peer, first + start, first + stop, dtype, op, device, size)
                if op == "prod":
                    total.mul_(part)
                elif op == "min":
                    torch.minimum(total, part, out=total)
                elif op == "max":
                    torch.maximum(total, part, out=total)
                else:
                    total.add_(part)
            return total.div_(size) if op == "avg" else total

        return _differing(received, reduced, op, size)
    sources = range(size)
    if name in ("broadcast", "scatter"):
        sources = range(root, root + 1)
    elif name == "send_recv":
        sources = range((rank - 1) % size, (rank - 1) % size + 1)
    wrong = 0
    for part, source in zip(received.split(share), sources, strict=True):

        def sent(start: int, stop: int, source: int = source) -> Tensor:
            return known_input(source, first + start, first + stop, dtype, op, device, size)

        wrong += _differing(part, sent, op, size)
    return wrong


def _differing(received: Tensor, expected: Callable[[int, int], Tensor], op: str, size: int) -> int:
    # How far a mean may be off, in units of the dtype's precision: each rank's part and each sum
    # is rounded by half of one.
    units = max(2, min(size, MOST_SUMMED) // 2 + 1)
    wrong = 0
    for start, stop in _chunks(received):
        own, right = received[start:stop], expected(start, stop)
        differs = own != right
        if op == "avg":
            limit = units * torch.finfo(own.dtype).eps * right.double()
            differs = ~((own.double() - right.double()).abs() <= limit)  # so is NaN
        wrong += int(differs.sum().item())
    return wrong


def _chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    step = CHUNK[tensor.device.type]
    for start in range(0, tensor.numel(), step):
        yield start, min(start + step, tensor.numel())
