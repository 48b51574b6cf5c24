"""What ranks tell each other on the host: JSON in tensors of bytes.

torch's object collectives unpickle what a peer sends, and a pickle can run any code. JSON cannot; it is bounded, and its type
is checked. What has no type in JSON travels as text: bytes as their hex digits.
"""

import json
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

MOST_BYTES = 1 << 24  # of one message; the largest so far are a number for each of a model's arrays
Told = TypeVar("Told", str, list[Any], dict[str, Any])


def by_first(value: Told, group: dist.ProcessGroup | None = None) -> Told:
    """Return the value of a group's first rank, None: of rank 0. Every rank gives one of the same type. Collective.

    Raises:
        ValueError: what came is no such value.
    """
    mine = _packed(value)
    size = torch.tensor([len(mine)])
    dist.broadcast(size, group=group, group_src=0)
    _refuse_size(int(size), "the first rank")
    came = mine if dist.get_rank(group) == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(came, group=group, group_src=0)
    return _unpacked(came, type(value), "the first rank")


def by_all(value: Told) -> list[Told]:
    """Return the values of all ranks, in their order. Each gives one of the same type. Collective.

    Raises:
        ValueError: what came from one is no such value.
    """
    mine, ranks = _packed(value), range(dist.get_world_size())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    for rank, size in enumerate(sizes):
        _refuse_size(int(size), f"rank {rank}")
    longest = max(int(size) for size in sizes)
    came = [torch.zeros(longest, dtype=torch.uint8) for _ in ranks]
    dist.all_gather(came, torch.cat([mine, torch.zeros(longest - len(mine), dtype=torch.uint8)]))
    return [_unpacked(came[rank][: int(sizes[rank])], type(value), f"rank {rank}") for rank in ranks]


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _refuse_size(size: int, who: str) -> None:
    if not 0 < size <= MOST_BYTES:
        raise ValueError(f"{who} tells {size} bytes; accepted are 1 to {MOST_BYTES}")


def _unpacked(came: Tensor, kind: type[Told], who: str) -> Told:
    try:
        value = json.loads(came.numpy().tobytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{who} tells {len(came)} bytes that are no JSON") from None
    if not isinstance(value, kind):
        raise ValueError(f"{who} tells a {type(value).__name__}; accepted is a {kind.__name__}")
    return value
