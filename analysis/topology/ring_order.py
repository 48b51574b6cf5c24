"""The order of the ranks within a set of GPUs: the ring with the best slowest link, then the one with the largest sum.

The order is exact. Every ring of up to 8 GPUs is tried. Of up to 16, Held and Karp's dynamic programme over subsets
(J. SIAM 10, 1962) finds the bottleneck first, then the sum among the rings that do not fall below it.
"""

from collections.abc import Sequence
from typing import Any

from analysis.topology.packing import EXACT_GPUS, rings

Weights = Sequence[Sequence[int]]  # symmetric, whole numbers; the diagonal is not used


def ring_value(weights: Weights, order: Sequence[int]) -> tuple[int, int]:
    """Return the slowest link of a ring and the sum of its links; two GPUs have one link."""
    links = [weights[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    return min(links), sum(links[:1] if len(order) == 2 else links)


def ring_order(weights: Weights, members: Sequence[int], worst: bool = False) -> list[int]:
    """Return the best ring through these positions, or the worst; of equals the smallest positions first.

    Best: the highest bottleneck, then the largest sum. Worst is its mirror image: the lowest bottleneck, then the
    smallest sum among the rings that have it.
    """
    inside = [[weights[a][b] for b in members] for a in members]
    links = sorted({inside[a][b] for a in range(len(members)) for b in range(a)})
    if len(links) < 2:  # every ring is as good
        return list(members)
    if len(members) <= EXACT_GPUS:
        best = (min if worst else max)(
            rings(len(members)), key=lambda ring: ring_value(inside, ring)
        )
        return [members[at] for at in best]
    if worst:
        # Any link can be in a ring, so the lowest bottleneck is the lowest link; at least one such link must be in it.
        found = _longest([[-weight for weight in row] for row in inside], None, -links[0])
    else:
        # The bottleneck is one of the weights: the largest for which a ring without any lower link exists.
        low, high = 0, len(links) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if _longest(inside, links[middle], None) else (low, middle - 1)
            )
        found = _longest(inside, links[low], None)
    assert found is not None  # every complete graph has a ring
    return [members[at] for at in found]


def _longest(weights: Weights, floor: int | None, must: int | None) -> list[int] | None:
    """Return the ring with the largest sum, without links below `floor` and with one of weight `must`; None if there is none.

    The ring starts at 0. value[layer][mask, last] is the best path through the positions of `mask` that ends at `last`;
    layer 1 holds the paths that crossed a `must` link (all of them when nothing must be).
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
    value[0, 1, 0] = 0
    masks = np.arange(1, 1 << size, 2)  # position 0 is in every path
    bits = np.array([int(mask).bit_count() for mask in masks])

    def add(first: Any, second: Any) -> Any:
        """Add, impossible if either part is."""
        return np.where((first == impossible) | (second == impossible), impossible, first + second)

    for length in range(1, size):
        for to in range(1, size):
            grow = masks[(bits == length) & (masks >> to & 1 == 0)]
            before, after = add(value[0, grow], link[:, to]), add(value[1, grow], link[:, to])
            value[1, grow | 1 << to, to] = np.maximum(
                after.max(axis=1), np.where(is_must[:, to], before, impossible).max(axis=1)
            )
            value[0, grow | 1 << to, to] = np.where(is_must[:, to], impossible, before).max(axis=1)
    full = (1 << size) - 1
    closed = np.maximum(
        add(value[1, full], link[0]), np.where(is_must[0], add(value[0, full], link[0]), impossible)
    )
    top = int(closed.max())
    return None if top == impossible else _retrace(value, link, is_must, full, top, impossible)


def _retrace(
    value: Any, link: Any, is_must: Any, mask: int, total: int, impossible: int
) -> list[int]:
    """Walk one best ring backwards, taking the smallest position that still reaches the total.

    A ring reads the same both ways, so the walk from the start over the closing link gives the ring itself.
    """
    ring, here, left, layer = [0], 0, total, 1
    while mask != 1:
        for last in range(1, len(link)):
            if not mask >> last & 1 or link[last, here] == impossible:
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
