"""Equivalence classes of GPU subsets: the subgraphs they induce, labelled with link classes, are
isomorphic. Measuring one member of each measures the machine: 56 subsets instead of 247 on a DGX-1.

The method is exact. Colour refinement (Weisfeiler-Leman, with numpy over all subsets of a size at
once) gives every subset a value that isomorphic subsets share, and an order of its GPUs; only the
few different matrices with one value are compared by search.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

from analysis.topology.model import Topology, best_first, count_classes, quality

MOST_SUBSETS = 500_000  # of one request: more would not be measured, and would take minutes to sort
MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64
ROUNDS = 3  # of refinement: they separate nearly all; the search separates the rest


@dataclass(frozen=True)
class SubsetClass:
    """One class. `links` counts the pairs of each link class, best first; members are sorted."""

    size: int
    links: dict[str, int]
    representative: tuple[int, ...]
    members: int
    second_member: tuple[int, ...] | None  # None when the class has one member only


def subset_classes(topology: Topology, size: int | None = None) -> list[SubsetClass]:
    """Return every class of subsets of `size` GPUs, or of two and more; by size, best links first.

    Raises ValueError: the machine has no subset of that size, or more than can be sorted.
    """
    gpus = len(topology.gpus)
    if size is not None and not 1 <= size <= gpus:
        raise ValueError(
            f"--size {size}: the machine has {gpus} GPUs; expected a number from 1 to {gpus}"
        )
    sizes = range(2, gpus + 1) if size is None else [size]
    subsets = sum(comb(gpus, k) for k in sizes)
    if subsets > MOST_SUBSETS:
        raise ValueError(
            f"{subsets} subsets of {gpus} GPUs are too many to sort; expected one small --size"
        )
    words = best_first(topology.links.values())
    labels = [[0] * gpus for _ in range(gpus)]
    for (i, a), (j, b) in combinations(enumerate(topology.gpus), 2):
        labels[i][j] = labels[j][i] = 1 + words.index(topology.link_between(a, b))

    def best_links_first(subset: SubsetClass) -> tuple[int, float, float, tuple[int, ...]]:
        """Order by the worst link first, since a collective waits for it; then by the sum."""
        weights = []
        for word, pairs in subset.links.items():
            weights += [quality(word)] * pairs
        return subset.size, -min(weights, default=0.0), -sum(weights), subset.representative

    found: list[SubsetClass] = []
    for k in sizes:
        found += _classes_of_size(topology, labels, k)
    return sorted(found, key=best_links_first)


def _classes_of_size(
    topology: Topology, labels: Sequence[Sequence[int]], size: int
) -> list[SubsetClass]:
    """Return the classes in the order of their first members, visited in lexicographic order."""
    positions = list(combinations(range(len(topology.gpus)), size))
    values, matrices, colours = _refine(labels, positions)
    first_of: dict[bytes, int] = {}  # by matrix: the first subset of its class
    rivals: dict[int, list[int]] = defaultdict(list)  # by value: the first subsets of its classes
    members: dict[int, list[int]] = defaultdict(list)  # of the class of a first subset

    def graph(index: int) -> tuple[Any, Any]:
        return matrices[index].tolist(), colours[index].tolist()

    for index, value in enumerate(values):
        key = matrices[index].tobytes()
        if key not in first_of:
            same = (rival for rival in rivals[value] if _isomorphic(graph(index), graph(rival)))
            first_of[key] = next(same, index)
            if first_of[key] == index:
                rivals[value].append(index)
        members[first_of[key]].append(index)
    found = []
    for of_class in members.values():
        shown = []
        for index in of_class[:2]:
            shown.append(tuple(topology.gpus[at] for at in positions[index]))
        links = count_classes(topology.link_between(a, b) for a, b in combinations(shown[0], 2))
        second = shown[1] if len(shown) > 1 else None
        found.append(SubsetClass(size, links, shown[0], len(of_class), second))
    return found


def _refine(
    labels: Sequence[Sequence[int]], positions: Sequence[tuple[int, ...]]
) -> tuple[list[int], Any, Any]:
    """Return for every subset a value that isomorphic subsets share, its matrix of labels in the
    order of its colours, and these, sorted.
    """
    import numpy as np

    chosen = np.array(positions, dtype=np.intp).reshape(len(positions), -1)
    matrix = np.array(labels, dtype=np.uint64)[chosen[:, :, None], chosen[:, None, :]]

    def mix(values: Any) -> Any:
        """Scatter 64-bit values so that sums of them stand for multisets."""
        values = (values + np.uint64(MIX[0])) * np.uint64(MIX[1])
        values ^= values >> np.uint64(31)
        values *= np.uint64(MIX[2])
        return values ^ (values >> np.uint64(29))

    pairs = mix(matrix)
    colours = mix(np.einsum("sii->si", matrix))
    for _ in range(ROUNDS):
        # A GPU's new colour mixes its own with the multiset of (link, colour of its other end).
        seen = mix(pairs ^ (colours[:, None, :] * np.uint64(MIX[1])))
        colours = mix(colours * np.uint64(MIX[2]) + seen.sum(axis=2, dtype=np.uint64))
    order = np.argsort(colours, axis=1, kind="stable")
    rows = np.arange(len(positions))[:, None, None]
    ordered = np.ascontiguousarray(matrix[rows, order[:, :, None], order[:, None, :]])
    values = mix(colours).sum(axis=1, dtype=np.uint64).tolist()
    return values, ordered, np.take_along_axis(colours, order, axis=1)


def _isomorphic(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    """Tell whether some permutation that keeps colours turns one matrix into the other."""
    (matrix_a, colours_a), (matrix_b, colours_b) = a, b
    if colours_a != colours_b:  # both sorted: other colours, other graph
        return False
    image: list[int] = []  # the positions of b that stand for the first positions of a

    def extend() -> bool:
        at = len(image)
        if at == len(matrix_a):
            return True
        for candidate in range(len(matrix_a)):
            if candidate in image or colours_b[candidate] != colours_a[at]:
                continue
            image.append(candidate)
            # Links are symmetric, so a row says what its column does.
            row = [matrix_b[candidate][peer] for peer in image]
            if row == matrix_a[at][: at + 1] and extend():
                return True
            image.pop()
        return False

    return extend()
