"""Copies between the members of a subset, and the interface of what times them: `gpus.Gpus` and `cpu_workers.Workers`.

Members are numbered by their place in the subset.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # compared at once: two such temporaries are 128 MiB


@dataclass(frozen=True)
class Copy:
    """One copy from a member's first buffer into a member's second, or within one member."""

    source: int
    target: int
    target_offset: int = 0  # bytes into the second buffer
    backwards: bool = False  # within one member: from its second buffer into its first


@dataclass(frozen=True)
class CopyMethod:
    """How some copies are made: path, size, number and side."""

    enabled: bool  # over peer access; CPU workers: over shared memory
    size_bytes: int
    iterations: int  # back to back
    read: bool = False  # true: the target fetches; false: the source writes

    def runner(self, copy: Copy) -> int:
        """Return the member that makes a copy."""
        return copy.target if self.read else copy.source


@dataclass(frozen=True)
class CopyTimes:
    """Times of copies that started together, over all iterations."""

    each_ms: list[float]
    all_ms: float  # until the last was done


@dataclass(frozen=True)
class Latency:
    """µs of one small copy."""

    gpu_us: float | None  # on the GPU, copies back to back; None between CPU workers
    cpu_us: float  # on the host: to enqueue one; between CPU workers: until it has arrived


class Links(Protocol):
    """Make and time copies. Between CPU workers every call is collective."""

    words: dict[str, str]  # what enabled and disabled mean here
    devices: list[dict[str, str]]  # name and bus_id of each member, where it has any
    late: int  # measurements that began before all of their copies were enqueued
    enqueued_by: str | None  # C or Python; None where nothing is enqueued

    def can_access(self, a: int, b: int) -> bool:
        """Return whether a member can address another's memory."""

    def time(self, copies: Sequence[Copy], how: CopyMethod) -> CopyTimes:
        """Time copies that start together."""

    def latency(self, copy: Copy, how: CopyMethod) -> Latency:
        """Time one small copy after the other."""

    def wrong_elements(self, copy: Copy, how: CopyMethod) -> int:
        """Copy a pattern that no other pair has, and count the int32 elements that did not arrive."""

    def close(self) -> None:
        """Free buffers and streams."""


def write_pattern(buffer: Tensor, number: int) -> None:
    """Fill int32 elements with the pattern of a number: distinct, without a period, the same on every device."""
    for chunk, pattern in _patterns(buffer, number):
        chunk.copy_(pattern)


def write_opposite(buffer: Tensor, number: int) -> None:
    """Fill elements so that each differs from the pattern."""
    for chunk, pattern in _patterns(buffer, number):
        torch.bitwise_not(pattern, out=chunk)


def differing(buffer: Tensor, number: int) -> int:
    """Return how many elements are not those of the pattern."""
    return sum(int((chunk != pattern).sum().item()) for chunk, pattern in _patterns(buffer, number))


def _patterns(buffer: Tensor, number: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, buffer.numel(), CHUNK_ELEMENTS):
        chunk = buffer[start : start + CHUNK_ELEMENTS]
        places = torch.arange(start, start + chunk.numel(), dtype=torch.int32, device=buffer.device)
        # Knuth's multiplicative hash, 2654435761 as int32: products wrap.
        yield chunk, places.mul_(-1640531535).add_(number * 0x01000193 % (1 << 31))
