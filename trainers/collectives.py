"""The groups of a cell's ranks, memory for NCCL, and JSON that ranks exchange."""

import contextlib
import functools
import json
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.strategy import Hosts

Group = dist.ProcessGroup | None  # None: all ranks
# Values start small where gloo sums them, so that float32 does not overflow in some hundred calls
# on a few ranks.
SMALL = 1e-30
PLAIN = "plain"  # memory of the buffers that NCCL moves; else registered
MOST_BYTES = 1 << 24  # of a JSON message; the largest are a number for each of a model's arrays
Json = TypeVar("Json", str, list[Any], dict[str, Any])


@dataclass(frozen=True)
class Peers:
    """Ranks that share servers and memory: all ranks, those of one host, or one alone."""

    rank: int  # among them
    size: int
    group: Group = None

    @staticmethod
    def of_host(groups: "HostGroups | None") -> "Peers":
        """Return the ranks of this host; without groups, all ranks."""
        if groups is None:
            return Peers(dist.get_rank(), dist.get_world_size())
        return Peers(groups.place, groups.here, groups.inside)

    def barrier(self) -> None:
        """Wait for all. Collective."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1), group=self.group)


class HostGroups:
    """Two groups of a rank: `inside` has the ranks of its host, `rail` its likes on every host.

    `rail` is None where there is one host. It is never torch's group of all ranks: a server's
    thread may use it while the rank uses that. Every rank makes its own groups only, so that this
    takes as long on many hosts as on few.
    """

    def __init__(self, hosts: Hosts) -> None:
        """Make the groups. Collective."""
        rank = dist.get_rank()
        mine = hosts.ranks[hosts.host_of(rank)]
        self.place = mine.index(rank)  # on the host
        self.here, self.hosts = len(mine), len(hosts.ranks)
        self.inside, self.rail = dist.group.WORLD, None
        self._own: list[dist.ProcessGroup] = []
        if self.hosts > 1:
            rail = [ranks[self.place] for ranks in hosts.ranks]
            for name, members in (("inside", list(mine)), ("rail", rail)):
                group = dist.new_group(members, use_local_synchronization=True, group_desc=name)
                assert isinstance(group, dist.ProcessGroup)  # else this rank would be none of them
                self._own.append(group)
            self.inside, self.rail = self._own

    @staticmethod
    def across(hosts: Hosts) -> "HostGroups | None":
        """Return the groups of ranks on several hosts; None where all are on one. Collective."""
        return HostGroups(hosts) if len(hosts.ranks) > 1 else None

    def close(self) -> None:
        """Take the groups apart, after the last use on this rank."""
        for group in self._own:
            dist.destroy_process_group(group)


def mean_operation(tensor: Tensor) -> "dist.ReduceOp.RedOpType":
    """Return the mean on GPUs, and on CPUs the sum, since gloo has no mean: the caller divides."""
    return dist.ReduceOp.AVG if tensor.is_cuda else dist.ReduceOp.SUM


def wait(work: dist.Work | None) -> None:
    """Make the current stream wait for a collective; on a CPU worker the thread waits."""
    assert work is not None
    work.wait()


def allocating(memory: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which this thread allocates plain or registered memory. Collective.

    Raises RuntimeError: torch has no registered memory on this GPU.
    """
    if memory == PLAIN:
        return contextlib.nullcontext()
    assert dist.group.WORLD is not None
    pool = _registered_pool(dist.group.WORLD._get_backend(device), device)
    return torch.cuda.use_mem_pool(pool, device)


@functools.cache
def _registered_pool(backend: Any, device: torch.device) -> torch.cuda.MemPool:
    if not backend.supports_tensor_alloc(device):
        raise RuntimeError(
            "memory=registered: torch allocates memory by NCCL only on GPUs that could use NVLink "
            "multicast, and this one could not; possible here: plain"
        )
    dist.all_reduce(torch.zeros(1, device=device))  # the first call makes the communicator
    pool = torch.cuda.MemPool(backend.mem_allocator)
    # Whatever the pool will hold, too. Not as symmetric memory, which NCCL may bind to multicast.
    backend.register_mem_pool(pool)
    return pool


def filled(size_bytes: int, dtype: str, device: torch.device, multiple_of: int = 1) -> Tensor:
    """Return at least so many bytes of values (elements,), random on GPUs, whose power they change.

    What a forecast times of one bucket lies in it.
    """
    kind: torch.dtype = getattr(torch, dtype)
    elements = max(1, -(-size_bytes // (kind.itemsize * multiple_of))) * multiple_of
    if device.type == "cuda":
        return torch.randn(elements, device=device).to(kind)
    return torch.full((elements,), SMALL, dtype=kind)


# JSON in tensors of bytes, on the host.
def broadcast_json(value: Json, group: Group = None) -> Json:
    """Return the value of a group's first rank. Every rank gives one of the same type. Collective.

    Raises ValueError: what came is no such value.
    """
    mine = _packed(value)
    size = torch.tensor([len(mine)])
    dist.broadcast(size, group=group, group_src=0)
    _check_size(int(size), "the first rank")
    message = mine
    if dist.get_rank(group) != 0:
        message = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(message, group=group, group_src=0)
    return _unpacked(message, type(value), "the first rank")


def all_gather_json(value: Json) -> list[Json]:
    """Return the values of all ranks, in their order. Each gives one of the same type. Collective.

    Raises ValueError: what came from one is no such value.
    """
    mine, ranks = _packed(value), range(dist.get_world_size())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    for rank, size in enumerate(sizes):
        _check_size(int(size), f"rank {rank}")
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    messages = [torch.zeros(longest, dtype=torch.uint8) for _ in ranks]
    dist.all_gather(messages, padded)
    values = []
    for rank in ranks:
        message = messages[rank][: int(sizes[rank])]
        values.append(_unpacked(message, type(value), f"rank {rank}"))
    return values


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _check_size(size: int, who: str) -> None:
    if not 0 < size <= MOST_BYTES:
        raise ValueError(f"{who} tells {size} bytes; expected 1 to {MOST_BYTES}")


def _unpacked(message: Tensor, kind: type[Json], who: str) -> Json:
    try:
        value = json.loads(message.numpy().tobytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{who} tells {len(message)} bytes that are no JSON") from None
    if not isinstance(value, kind):
        raise ValueError(f"{who} tells a {type(value).__name__}; expected a {kind.__name__}")
    return value


def begun(device: torch.device) -> Counter[str]:
    """Return how many collectives of a device this rank has begun so far, by the group's name."""
    counts: Counter[str] = Counter()
    for group in dist.distributed_c10d._world.pg_map:
        with contextlib.suppress(RuntimeError):  # a group without a backend of this device
            backend: Any = group._get_backend(device)
            counts[group.group_desc] += backend._get_sequence_number_for_group()
    return counts
