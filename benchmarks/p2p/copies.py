"""Copies between the members of a subset, which copies run at once, and the pattern they carry.

Members are numbered by their place in the subset.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # compared at once: two such temporaries are 128 MiB
GRAIN_BYTES = 16  # parts of a buffer begin at multiples of it


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


class CopiesAtOnce(NamedTuple):
    """Copies that start together."""

    pattern: str  # matching, one_to_all, all_to_one
    position: int  # of the round of a matching, else of the member
    copies: list[Copy]
    copy_bytes: int


def patterns(count: int, size_bytes: int) -> Iterator[CopiesAtOnce]:
    """Yield each round of a matching both ways, each member to all others, and all others to each.

    Where several copies write to one member, each has its own part of the target's buffer.
    """
    for index, pairs in enumerate(matchings(count)):
        both_ways: list[Copy] = []
        for a, b in pairs:
            both_ways += [Copy(a, b), Copy(b, a)]
        yield CopiesAtOnce("matching", index, both_ways, size_bytes)
    if count < 3:
        return  # then one to all is one to one
    part = size_bytes // (count - 1) // GRAIN_BYTES * GRAIN_BYTES
    if not part:
        return
    for index in range(count):
        outward: list[Copy] = []
        inward: list[Copy] = []
        for peer in range(count):
            if peer != index:
                outward.append(Copy(index, peer))
                inward.append(Copy(peer, index, len(inward) * part))
        yield CopiesAtOnce("one_to_all", index, outward, part)
        yield CopiesAtOnce("all_to_one", index, inward, part)


def matchings(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which every pair of `count` members occurs once.

    The circle method; with an odd count one member is idle in each round.
    """
    seats = list(range(count + count % 2))  # an odd count: the last seat is empty
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = []
        for a, b in zip(seats[: len(seats) // 2], reversed(seats), strict=False):
            if max(a, b) < count:
                pairs.append((min(a, b), max(a, b)))
        if pairs:
            rounds.append(sorted(pairs))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def write_pattern(buffer: Tensor, seed: int) -> None:
    """Fill int32 elements with the pattern of a seed: distinct, the same on every device."""
    for chunk, pattern in _pattern_chunks(buffer, seed):
        chunk.copy_(pattern)


def write_opposite(buffer: Tensor, seed: int) -> None:
    """Fill elements so that each differs from the pattern."""
    for chunk, pattern in _pattern_chunks(buffer, seed):
        torch.bitwise_not(pattern, out=chunk)


def differing(buffer: Tensor, seed: int) -> int:
    """Return how many elements are not those of the pattern."""
    chunks = _pattern_chunks(buffer, seed)
    return sum(int((chunk != pattern).sum().item()) for chunk, pattern in chunks)


def _pattern_chunks(buffer: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, buffer.numel(), CHUNK_ELEMENTS):
        chunk = buffer[start : start + CHUNK_ELEMENTS]
        stop = start + chunk.numel()
        indices = torch.arange(start, stop, dtype=torch.int32, device=buffer.device)
        # Knuth's multiplicative hash, 2654435761 as int32: products wrap.
        yield chunk, indices.mul_(-1640531535).add_(seed * 0x01000193 % (1 << 31))
