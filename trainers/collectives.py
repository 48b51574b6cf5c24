"""The groups of a cell's ranks: those of one host, which share its memory, and those that meet across hosts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.hosts import Hosts
from trainers.strategy import BucketExchange


@dataclass(frozen=True)
class Peers:
    """Ranks that share servers and memory: all ranks, those of one host, or one alone."""

    rank: int  # among them
    size: int
    group: dist.ProcessGroup | None = None  # None: all ranks

    def barrier(self) -> None:
        """Wait for all. Collective."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1), group=self.group)

    def from_rank_zero(self, text: str) -> str:
        """Return the first one's text. Collective.

        Raises:
            ValueError: what came is no text.
        """
        return by_first(text, self.group) if self.size > 1 else text


class HostGroups:
    """Two groups of a rank: `inside` has the ranks of its host, `rail` those with its place on every host.

    `rail` is None where there is one host. It is never torch's group of all ranks: a server's thread may use it while the rank
    uses that. Every rank makes its own groups only, so that this takes as long on many hosts as on few.
    """

    def __init__(self, hosts: Hosts) -> None:
        """Make the groups. Collective."""
        rank = dist.get_rank()
        mine = hosts.ranks[hosts.host_of(rank)]
        self.place = mine.index(rank)  # on the host
        self.here, self.hosts = len(mine), len(hosts.ranks)
        self._made: list[dist.ProcessGroup] = []
        self.inside = self._group_of(mine) if self.hosts > 1 else dist.group.WORLD
        self.rail = (
            self._group_of([ranks[self.place] for ranks in hosts.ranks]) if self.hosts > 1 else None
        )

    @staticmethod
    def across(hosts: Hosts) -> "HostGroups | None":
        """Return the groups of ranks on several hosts; None where all are on one. Collective."""
        return HostGroups(hosts) if len(hosts.ranks) > 1 else None

    def _group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)  # else this rank would be none of them
        self._made.append(group)
        return group

    def peers(self) -> Peers:
        """Return the ranks of this host as peers."""
        return Peers(self.place, self.here, self.inside)

    def close(self) -> None:
        """Take the groups apart, after the last use on this rank."""
        for group in self._made:
            dist.destroy_process_group(group)


# The collectives that exchange one bucket, in buffers of their own: what a forecast times by itself, by bytes.


Group = dist.ProcessGroup | None  # None: all ranks
# Values start small where gloo sums them, so that float32 does not overflow in some hundred calls on a few ranks.
SMALL = 1e-30


def all_reduce(
    size_bytes: int, dtype: str, device: torch.device, group: Group = None
) -> BucketExchange:
    """Return an all-reduce."""
    flat = _filled(size_bytes, dtype, device, 1)

    def run() -> None:
        _wait(dist.all_reduce(flat, _operation(flat), group, async_op=True))

    return BucketExchange("all_reduce", run)


def sharded(
    size_bytes: int, dtype: str, returned: torch.dtype, device: torch.device
) -> BucketExchange:
    """Return a reduce-scatter, and an all-gather of as many elements of the dtype `returned`."""
    ranks = dist.get_world_size()
    flat = _filled(size_bytes, dtype, device, ranks)
    share, weights = flat.new_empty(flat.numel() // ranks), torch.zeros_like(flat, dtype=returned)
    own = weights.chunk(ranks)[dist.get_rank()]

    def run() -> None:
        _wait(dist.reduce_scatter_tensor(share, flat, _operation(flat), async_op=True))
        _wait(dist.all_gather_into_tensor(weights, own, async_op=True))

    return BucketExchange("reduce_scatter + all_gather", run)


def owned(
    size_bytes: int, dtype: str, returned: torch.dtype, device: torch.device
) -> BucketExchange:
    """Return a reduce to rank 0, and a broadcast of as many elements of the dtype `returned`."""
    flat = _filled(size_bytes, dtype, device, 1)
    weights = torch.zeros_like(flat, dtype=returned)

    def run() -> None:
        _wait(dist.reduce(flat, 0, _operation(flat), async_op=True))
        _wait(dist.broadcast(weights, 0, async_op=True))

    return BucketExchange("reduce + broadcast", run)


def in_two_levels(
    size_bytes: int,
    dtype: str,
    device: torch.device,
    inside: Group,
    rail: Group,
    place: int,
    here: int,
) -> BucketExchange:
    """Return a reduction inside a host of `here` ranks, one of this rank's share on its rail, and an all-gather inside."""
    flat = _filled(size_bytes, dtype, device, here)
    share = flat.chunk(here)[place]
    # As trainers.strategies.hierarchical: gloo's own reduce-scatter is an all-reduce of a copy.
    scatter = "reduce_scatter" if flat.is_cuda else "all_reduce"
    steps = [
        *([scatter] if here > 1 else []),
        *(["all_reduce"] if rail else []),
        *(["all_gather"] if here > 1 else []),
    ]

    def run() -> None:
        if here > 1 and flat.is_cuda:
            _wait(dist.reduce_scatter_tensor(share, flat, _operation(flat), inside, async_op=True))
        elif here > 1:
            _wait(dist.all_reduce(flat, group=inside, async_op=True))
        if rail is not None:
            _wait(dist.all_reduce(share, _operation(share), rail, async_op=True))
        if here > 1:
            _wait(dist.all_gather_into_tensor(flat, share, inside, async_op=True))

    return BucketExchange(" + ".join(steps), run)


def _filled(size_bytes: int, dtype: str, device: torch.device, multiple_of: int) -> Tensor:
    """Return values (elements,), as many as a multiple of some number; random on GPUs, whose power depends on them."""
    of: torch.dtype = getattr(torch, dtype)
    elements = max(1, -(-size_bytes // (of.itemsize * multiple_of))) * multiple_of
    return (
        torch.randn(elements, device=device).to(of)
        if device.type == "cuda"
        else torch.full((elements,), SMALL, dtype=of)
    )


def _operation(tensor: Tensor) -> "dist.ReduceOp.RedOpType":
    """Return the mean on GPUs, and the sum on CPUs: gloo has no mean."""
    return dist.ReduceOp.AVG if tensor.is_cuda else dist.ReduceOp.SUM


def _wait(work: dist.Work | None) -> None:
    """Make the current stream wait for a collective; on a CPU worker the thread waits."""
    assert work is not None
    work.wait()


# What ranks tell each other on the host: JSON in tensors of bytes.


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
    return [
        _unpacked(came[rank][: int(sizes[rank])], type(value), f"rank {rank}") for rank in ranks
    ]


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
