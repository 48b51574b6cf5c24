"""Copies between many members at once: what is left of each one's rate. METHOD.md, "Links between GPUs"."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.p2p.copies import Copy, How, Wires, gb_per_s
from benchmarks.rank.reporter import Reporter
from benchmarks.timing import statistics

GRAIN_BYTES = 16  # parts of a buffer begin at multiples of it


@dataclass(frozen=True)
class Pattern:
    """Copies that run at once."""

    name: str  # matching, one_to_all, all_to_one
    number: int  # of the round, or the place of the one
    copies: tuple[Copy, ...]
    size_bytes: int


def patterns(count: int, size_bytes: int) -> Iterator[Pattern]:
    """Every pair of perfect matchings both ways; each member to all others at once; all others to each.

    Where several write to one member, each has its own part of the target's buffer.
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


def at_once(ids: Sequence[int], wires: Wires, asked: dict[str, Any], reporter: Reporter) -> list[dict[str, Any]]:
    """Each pattern's copies at once, and each copy alone (in a matching: its pair, both ways), in turn; medians of the repeats.

    A copy's rate is that of its own events; the total is all bytes ÷ the time until the last is done.
    """
    enabled = asked["p2p"] != "disabled"
    rows = []
    for pattern in patterns(len(ids), int(asked["bytes"])):
        if pattern.size_bytes < GRAIN_BYTES:
            continue
        how = How(enabled, pattern.size_bytes, int(asked["iterations"]), read=asked["direction"] == "read")
        counted = pattern.size_bytes * how.iterations
        width = 2 if pattern.name == "matching" else 1
        together: list[list[float]] = [[] for _ in pattern.copies]
        alone: list[list[float]] = [[] for _ in pattern.copies]
        totals = []
        for repeat in range(int(asked["repeats"])):
            timed = wires.time(pattern.copies, how)
            totals.append(gb_per_s(counted * len(pattern.copies), timed.all_ms))
            for start in range(0, len(pattern.copies), width):
                lone = wires.time(pattern.copies[start : start + width], how)
                for place, ms in enumerate(lone.each_ms, start):
                    alone[place].append(gb_per_s(counted, ms))
                    together[place].append(gb_per_s(counted, timed.each_ms[place]))
            reporter.beat()
            last = {"together": [one[-1] for one in together], "alone": [one[-1] for one in alone]}
            reporter.line("p2p", pattern=pattern.name, number=pattern.number, repeat=repeat, total=totals[-1], **last)
        copies = [
            {
                "from": ids[copy.source],
                "to": ids[copy.target],
                "gb_per_s": statistics.median(rates),
                "alone_gb_per_s": statistics.median(lonely),
            }
            for copy, rates, lonely in zip(pattern.copies, together, alone, strict=True)
        ]
        number = pattern.number if pattern.name == "matching" else ids[pattern.number]
        rows.append(
            {
                "pattern": pattern.name,
                "number": number,
                "bytes": pattern.size_bytes,
                "total_gb_per_s": statistics.median(totals),
                "copies": copies,
            }
        )
    return rows


def contention(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The lowest total of each pattern, and what the worst-off copy keeps of its rate alone."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(row["pattern"] for row in rows):
        ours = [row for row in rows if row["pattern"] == name]
        found[f"p2p/{name}_gb_per_s"] = min(row["total_gb_per_s"] for row in ours)
        kept = [copy["gb_per_s"] / copy["alone_gb_per_s"] for row in ours for copy in row["copies"]]
        found[f"p2p/{name}_share"] = min(kept)
    return found


def matchings(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every pair of `count` members occurs once (the circle method).

    With an odd count one member is idle in each round.
    """
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in rounds if pairs]
