"""Wrong elements of a collective, counted on the device against an expectation that every rank computes for itself.

Every rank's input is known: small whole numbers, mixed from the element's place and the rank, whose sums are exact in every
dtype (what is too large for an integer wraps alike). No element is 0, so that what was never written is wrong; only of sums
over more than MOST_SUMMED ranks, which bfloat16 would round, each rank has a part and is 0 elsewhere.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.rank.ranks import Ranks

# Elements compared at once: bounds the memory that comparing takes.
CHUNK = {"cuda": 1 << 24, "cpu": 1 << 20}
MOST_SUMMED = (
    62  # numbers of 1 to 4: their sum is at most 256, up to which bfloat16 has every whole number
)


def mean_units(size: int) -> int:
    """Return how far a mean over `size` ranks may be from the exact one, in units of the dtype's precision.

    Each rank's part and each sum is rounded by half of a unit.
    """
    return max(2, min(size, MOST_SUMMED) // 2 + 1)


def known(
    rank: int,
    start: int,
    stop: int,
    dtype: torch.dtype,
    op: str,
    device: torch.device,
    size: int = 1,
) -> Tensor:
    """Return elements start to stop of the input of one of `size` ranks: 1 to 4; for products 1, and 2 at one in sixteen."""
    places = torch.arange(start, stop, device=device)
    mixed = ((places + (rank + 1) * 7919) * 2654435761).bitwise_right_shift_(16)
    if op == "prod":
        return (mixed.bitwise_and_(15) == 0).add(1).to(dtype)
    found = mixed.bitwise_and_(3).add_(1).to(dtype)
    turns = -(-size // MOST_SUMMED)
    return found.mul_((places + rank) % turns == 0) if turns > 1 and op in ("sum", "avg") else found


def fill(tensor: Tensor, rank: int, op: str, size: int) -> None:
    """Fill a tensor with the known input of one of `size` ranks."""
    for start, stop in _chunks(tensor):
        tensor[start:stop] = known(rank, start, stop, tensor.dtype, op, tensor.device, size)


def _chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    step = CHUNK[tensor.device.type]
    yield from (
        (start, min(start + step, tensor.numel())) for start in range(0, tensor.numel(), step)
    )


def wrong_elements(name: str, received: Tensor, op: str, root: int, ranks: Ranks) -> int:
    """Return how many elements of this rank's result differ from what the collective makes of the known inputs.

    `received` is the whole result. Of gather and reduce only the root has one; other ranks return 0.
    """
    rank, size = ranks.rank, ranks.world_size
    share = (
        received.numel() // size
        if name in ("all_gather", "all_to_all", "gather")
        else received.numel()
    )
    if name in ("gather", "reduce") and rank != root:
        return 0
    first = rank * share if name in ("reduce_scatter", "scatter", "all_to_all") else 0
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        return _differing(
            received,
            lambda start, stop: _reduced(first + start, first + stop, received, op, size),
            op,
            size,
        )
    if name in ("broadcast", "scatter", "send_recv"):
        sources = [(rank - 1) % size if name == "send_recv" else root]
    else:
        sources = list(range(size))
    wrong = 0
    for part, source in zip(received.split(share), sources, strict=True):

        def expected(start: int, stop: int, source: int = source) -> Tensor:
            return known(
                source, first + start, first + stop, received.dtype, op, received.device, size
            )

        wrong += _differing(part, expected, op, size)
    return wrong


def _reduced(start: int, stop: int, like: Tensor, op: str, size: int) -> Tensor:
    """Return elements start to stop of all ranks' inputs, reduced."""
    total = known(0, start, stop, like.dtype, op, like.device, size)
    for rank in range(1, size):
        other = known(rank, start, stop, like.dtype, op, like.device, size)
        if op == "prod":
            total.mul_(other)
        elif op in ("min", "max"):
            (torch.minimum if op == "min" else torch.maximum)(total, other, out=total)
        else:
            total.add_(other)
    return total.div_(size) if op == "avg" else total


def _differing(received: Tensor, expected: Callable[[int, int], Tensor], op: str, size: int) -> int:
    wrong = 0
    for start, stop in _chunks(received):
        mine, right = received[start:stop], expected(start, stop)
        if op == "avg":
            limit = mean_units(size) * torch.finfo(mine.dtype).eps * right.double()
            near = (mine.double() - right.double()).abs() <= limit
            wrong += int((~near).sum().item())  # NaN is not near
        else:
            wrong += int((mine != right).sum().item())
    return wrong
