"""Choose K GPUs and their ring order: the ring with the best slowest link, then the one with the largest sum.

A ring collective moves at the pace of its slowest link, hence the order of the criteria; rank order decides which links
the ring crosses. Links count by their class, or by a measured peer-to-peer matrix. The search is exact up to 16 GPUs:
Held and Karp's dynamic programme over subsets (J. SIAM 10, 1962), first for the bottleneck, then for the sum among the
rings that do not fall below it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from analysis.topology.link_classes import best_first, describe_counts, quality
from analysis.topology.model import Topology

MOST_GPUS = 16  # 2^16 subsets x 16 ends: a second and some megabytes; one more GPU doubles both
_SCALE = 1_000_000  # weights become whole numbers, so that equal sums compare equal


@dataclass(frozen=True)
class Ring:
    """GPUs in ring order and the weights of its links, each to the next and the last to the first (two GPUs: one).

    `links` counts link classes and is empty without a topology; GB/s are None without a measured matrix.
    """

    order: tuple[int, ...]
    links: dict[str, int]
    slowest_gb_per_s: float | None
    sum_gb_per_s: float | None

    def describe(self) -> str:
        """Describe the ring: `0-1-2-3 (3 x NV2 + 1 x NV1)`, with measured numbers if there are any."""
        parts = [describe_counts(self.links)] if self.links else []
        if self.slowest_gb_per_s is not None:
            parts.append(f"slowest link {self.slowest_gb_per_s:.1f} GB/s, sum {self.sum_gb_per_s:.1f} GB/s")
        return "-".join(map(str, self.order)) + (f" ({'; '.join(parts)})" if parts else "")

    def to_json(self) -> dict[str, Any]:
        """Return one JSON object; what was not measured is absent."""
        shown: dict[str, Any] = {"gpus": list(self.order), "links": self.links}
        if self.slowest_gb_per_s is not None:
            shown |= {"slowest_gb_per_s": self.slowest_gb_per_s, "sum_gb_per_s": self.sum_gb_per_s}
        return shown


@dataclass(frozen=True)
class Placement:
    """The best ring, the worst one, and one sentence that says why."""

    best: Ring
    worst: Ring
    reason: str


def place(topology: Topology | None, count: int, matrix: Sequence[Sequence[float]] | None = None) -> Placement:
    """Find the best and the worst ring of `count` GPUs.

    Args:
        topology: link classes; None when only a matrix is known.
        count: GPUs to choose.
        matrix: measured GB/s from each GPU (row) to each other, in the topology's order, else of GPUs 0, 1, …; the
            slower direction of a pair counts.

    Raises:
        ValueError: more GPUs asked for than there are or than can be searched, or neither source given.
    """
    if topology is None and matrix is None:
        raise ValueError("place: expected a topology or a measured matrix")
    names = topology.gpus if topology else tuple(range(len(matrix or ())))
    if matrix is not None and len(matrix) != len(names):
        raise ValueError(f"place: a matrix of {len(matrix)} GPUs, but the topology has {len(names)}")
    if not 1 <= count <= len(names):
        raise ValueError(f"place: {count} of {len(names)} GPUs; ask for 1 to {len(names)}")
    if len(names) > MOST_GPUS:
        raise ValueError(f"place: {len(names)} GPUs; the search is exact and takes at most {MOST_GPUS}")
    weights = _weights(topology, matrix, names)
    best, worst = (
        _ring(topology, matrix, names, [names[at] for at in _search(weights, count, sign)]) for sign in (1, -1)
    )
    return Placement(best, worst, _reason(best, worst, count))


def _weights(
    topology: Topology | None, matrix: Sequence[Sequence[float]] | None, names: Sequence[int]
) -> list[list[int]]:
    """Return symmetric whole-number weights; the diagonal is not used."""
    size = len(names)

    def weight(a: int, b: int) -> float:
        if a == b:
            return 0.0
        if matrix is not None:
            return min(matrix[a][b], matrix[b][a])
        assert topology is not None
        return quality(topology.link_between(names[a], names[b]))

    return [[round(weight(a, b) * _SCALE) for b in range(size)] for a in range(size)]


def _search(weights: list[list[int]], count: int, sign: int) -> list[int]:
    """Return the positions of the best ring (sign 1) or the worst (sign -1), smallest ids first among equals.

    Best: the highest bottleneck, then the largest sum. Worst is its mirror image: the lowest bottleneck, then the
    smallest sum among the rings that have it.
    """
    size = len(weights)
    if count == 1:
        return [0]
    if count == 2:
        pairs = [[a, b] for a in range(size) for b in range(a + 1, size)]
        return max(pairs, key=lambda pair: (sign * weights[pair[0]][pair[1]], -pair[0], -pair[1]))
    links = sorted({weights[a][b] for a in range(size) for b in range(a)})
    if sign > 0:
        # The bottleneck is one of the weights: the largest for which a ring without any lower link exists.
        low, high = 0, len(links) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if _longest(weights, count, links[middle], None):
                low = middle
            else:
                high = middle - 1
        found = _longest(weights, count, links[low], None)
    else:
        # Any link can be in a ring, so the lowest bottleneck is the lowest link; at least one such link must be in it.
        mirrored = [[-weight for weight in row] for row in weights]
        found = _longest(mirrored, count, None, -links[0])
    assert found is not None  # every complete graph has a ring
    return found


def _longest(weights: list[list[int]], count: int, floor: int | None, must: int | None) -> list[int] | None:
    """Ring of `count` positions with the largest sum, without links below `floor` and with one of weight `must`.

    The ring starts at its smallest position. value[layer][mask, last] is the best path through the positions of `mask`
    that ends at `last`; layer 1 holds the paths that crossed a `must` link (all of them when nothing must be).
    """
    import numpy as np

    size = len(weights)
    impossible = -(2**62)
    link = np.array(weights, dtype=np.int64)
    if floor is not None:
        link[link < floor] = impossible
    np.fill_diagonal(link, impossible)
    is_must = link == must if must is not None else np.ones_like(link, dtype=bool)
    value = np.full((2, 1 << size, size), impossible, dtype=np.int64)
    for at in range(size):
        value[0, 1 << at, at] = 0
    masks = np.arange(1 << size)
    bits = np.array([mask.bit_count() for mask in range(1 << size)])
    lowest = masks & -masks

    def add(first: Any, second: Any) -> Any:
        """Add, impossible if either part is."""
        return np.where((first == impossible) | (second == impossible), impossible, first + second)

    for length in range(1, count):
        for to in range(size):
            grow = masks[(bits == length) & (masks >> to & 1 == 0) & (lowest < 1 << to)]
            if not len(grow):
                continue
            before, after = add(value[0, grow], link[:, to]), add(value[1, grow], link[:, to])
            value[1, grow | 1 << to, to] = np.maximum(
                after.max(axis=1), np.where(is_must[:, to], before, impossible).max(axis=1)
            )
            value[0, grow | 1 << to, to] = np.where(is_must[:, to], impossible, before).max(axis=1)
    complete = masks[bits == count]
    starts = np.array([int(mask & -mask).bit_length() - 1 for mask in complete])
    closing, must_close = link[starts], is_must[starts]
    closed = np.maximum(
        add(value[1, complete], closing), np.where(must_close, add(value[0, complete], closing), impossible)
    )
    top = closed.max()
    if top == impossible:
        return None
    winners = complete[(closed == top).any(axis=1)]
    return min(_retrace(value, link, is_must, int(mask), int(top), impossible) for mask in winners)


def _retrace(value: Any, link: Any, is_must: Any, mask: int, total: int, impossible: int) -> list[int]:
    """Walk one best ring backwards, taking the smallest position that still reaches the total.

    A ring reads the same both ways, so the walk from the start over the closing link gives the ring itself.
    """
    start = (mask & -mask).bit_length() - 1
    ring, here, left, layer = [start], start, total, 1
    while mask != 1 << start:
        for last in range(len(link)):
            if last == start or not mask >> last & 1 or link[last, here] == impossible:
                continue
            rest = left - int(link[last, here])
            # A must link leads to layer 1 from either layer; every other link stays in its layer.
            below = (1, 0) if layer and is_must[last, here] else (layer,)
            reached = [one for one in below if int(value[one, mask, last]) == rest]
            if reached:
                ring.append(last)
                here, left, layer = last, rest, reached[0]
                mask ^= 1 << last
                break
        else:
            raise AssertionError("the dynamic programme's value has no path")
    return ring


def _ring(
    topology: Topology | None, matrix: Sequence[Sequence[float]] | None, names: Sequence[int], order: list[int]
) -> Ring:
    if len(order) < 2:
        return Ring(tuple(order), {}, None, None)
    closed = [*order, order[0]] if len(order) > 2 else order
    steps = list(pairwise(closed))
    words = [topology.link_between(a, b) for a, b in steps] if topology else []
    measured: list[float] = []
    if matrix is not None:
        at = {name: position for position, name in enumerate(names)}
        measured = [min(matrix[at[a]][at[b]], matrix[at[b]][at[a]]) for a, b in steps]
    counts = {word: words.count(word) for word in best_first(words)}
    return Ring(tuple(order), counts, min(measured, default=None), math.fsum(measured) if measured else None)


def _reason(best: Ring, worst: Ring, count: int) -> str:
    """Explain the choice in one sentence."""
    if count == 1:
        return "One GPU has no links, so every choice is the same."
    kind = "pair" if count == 2 else f"ring of {count} GPUs"
    if best.slowest_gb_per_s is not None and worst.slowest_gb_per_s is not None:
        slowest, other = f"{best.slowest_gb_per_s:.1f} GB/s", f"{worst.slowest_gb_per_s:.1f} GB/s"
        same = (best.slowest_gb_per_s, best.sum_gb_per_s) == (worst.slowest_gb_per_s, worst.sum_gb_per_s)
    else:
        slowest, other = list(best.links)[-1], list(worst.links)[-1]
        same = best.links == worst.links
    if same:
        return f"Every {kind} of this machine has the same links ({best.describe()}), so any choice is as good."
    return (
        f"{best.describe()} is the best {kind}: no other has a slowest link above {slowest}, and of those that "
        f"reach it none has a larger sum; the worst, {worst.describe()}, is held back by {other}."
    )
