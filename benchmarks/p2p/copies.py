"""Copies between the members of a subset, and the interface of what times them: `gpus.Gpus` and `cpu_workers.Workers`.

Members are numbered by their place in the subset.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.p2p.derive import gb_per_s
from benchmarks.rank.ranks import Reporter
from benchmarks.record import Kind

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


# Times of copies between many members at once, and of each copy alone. README.md.


GRAIN_BYTES = 16  # parts of a buffer begin at multiples of it


@dataclass(frozen=True)
class Pattern:
    """Copies that run at once."""

    name: str  # matching, one_to_all, all_to_one
    number: int  # of the round; else the place of the one member
    copies: tuple[Copy, ...]
    size_bytes: int


def patterns(count: int, size_bytes: int) -> Iterator[Pattern]:
    """Yield each round of a perfect matching both ways, each member to all others, and all others to each.

    Where several copies write to one member, each has its own part of the target's buffer.
    """
    for number, pairs in enumerate(matchings(count)):
        both = tuple(copy for a, b in pairs for copy in (Copy(a, b), Copy(b, a)))
        yield Pattern("matching", number, both, size_bytes)
    if count < 3:
        return  # then one to all is one to one
    part = size_bytes // (count - 1) // GRAIN_BYTES * GRAIN_BYTES
    for one in range(count):
        others = [other for other in range(count) if other != one]
        yield Pattern("one_to_all", one, tuple(Copy(one, other) for other in others), part)
        inward = tuple(Copy(other, one, place * part) for place, other in enumerate(others))
        yield Pattern("all_to_one", one, inward, part)


def measure(ids: Sequence[int], links: Links, asked: dict[str, Any], reporter: Reporter) -> None:
    """Alternate all copies of a pattern at once with each copy (in a matching: each pair, both ways) alone; write every time."""
    enabled = asked["p2p"] != "disabled"
    for pattern in patterns(len(ids), int(asked["bytes"])):
        if pattern.size_bytes < GRAIN_BYTES:
            continue
        how = CopyMethod(
            enabled, pattern.size_bytes, int(asked["iterations"]), read=asked["direction"] == "read"
        )
        width = 2 if pattern.name == "matching" else 1
        counted_bytes = pattern.size_bytes * how.iterations  # of one copy
        facts: dict[str, Any] = {
            "pattern": pattern.name,
            "number": pattern.number,
            "of": pattern.number if pattern.name == "matching" else ids[pattern.number],
            "bytes": pattern.size_bytes,
            "counted_bytes": counted_bytes,
            "copies": [[ids[copy.source], ids[copy.target]] for copy in pattern.copies],
        }
        for repeat in range(int(asked["repeats"])):
            opened = time.perf_counter()
            timed = links.time(pattern.copies, how)
            alone_ms: list[float] = []
            for start in range(0, len(pattern.copies), width):
                alone_ms += links.time(pattern.copies[start : start + width], how).each_ms
            window_ms = (time.perf_counter() - opened) * 1e3
            reporter.beat()
            times: dict[str, Any] = {
                "total_ms": timed.all_ms,
                "together_ms": timed.each_ms,
                "alone_ms": alone_ms,
            }
            rates = _rates(counted_bytes, **times)
            reporter.line(Kind.P2P, repeat=repeat, window_ms=window_ms, **facts, **times, **rates)


def _rates(
    counted_bytes: int, total_ms: float, together_ms: list[float], alone_ms: list[float]
) -> dict[str, Any]:
    """Return the times as GB/s, under the names that lines of this kind always had."""
    return {
        "total": gb_per_s(counted_bytes * len(together_ms), total_ms),
        "together": [gb_per_s(counted_bytes, ms) for ms in together_ms],
        "alone": [gb_per_s(counted_bytes, ms) for ms in alone_ms],
    }


def matchings(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which every pair of `count` members occurs once (the circle method).

    With an odd count one member is idle in each round.
    """
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(
            sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)
        )
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in rounds if pairs]
