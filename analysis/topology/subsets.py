"""Equivalence classes of GPU subsets: two subsets are in one class if their links look the same.

That is: the subgraphs they induce, labelled with link classes, are isomorphic. Measuring one member
of each class measures the machine: 56 subsets instead of 247 on a DGX-1, one per size where all
GPUs meet in switches. With `affinity`, pairs on one NUMA node and pairs on two differ as well; with
`nics`, so do GPUs and pairs with other relations to the NICs.

The method is exact. Colour refinement (Weisfeiler-Leman, with numpy over all subsets of a size at
once) gives every subset a value that isomorphic subsets share, and an order of its GPUs; subsets
with equal matrices in that order are isomorphic, and only the few different matrices with one value
are compared by search.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

from analysis.topology.model import Topology, count_classes, quality

MOST_SUBSETS = 500_000  # of one request: more would not be measured, and would take minutes to sort
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64
_ROUNDS = 3  # of refinement: they separate nearly all; the search separates the rest
LabelMatrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SubsetClass:
    """One class. `links` counts the pairs of each link class, best first; members are sorted."""

    size: int
    links: dict[str, int]
    representative: tuple[int, ...]
    members: int
    second_member: tuple[int, ...] | None  # None when the class has one member only

    def to_json(self, second_member: bool = False) -> dict[str, Any]:
        """Return the object of `--json`, if wanted with a second member."""
        content: dict[str, Any] = {
            "size": self.size,
            "links": self.links,
            "representative": list(self.representative),
            "members": self.members,
        }
        if second_member:
            content["second_member"] = list(self.second_member) if self.second_member else None
        return content


@dataclass
class _OpenClass:
    """A class while subsets are sorted into it."""

    matrix: LabelMatrix
    colours: tuple[int, ...]
    members: list[tuple[int, ...]]  # the first two
    count: int = 0


def classes(
    topology: Topology, size: int | None = None, *, affinity: bool = False, nics: bool = False
) -> list[SubsetClass]:
    """Return every class of subsets of `size` GPUs, or of two and more; by size, best links first.

    Raises:
        ValueError: the machine has no subset of that size, or more than can be sorted.
    """
    gpus = len(topology.gpus)
    if size is not None and not 1 <= size <= gpus:
        raise ValueError(f"--size {size}: accepted are 1 to {gpus}, the GPUs of this machine")
    sizes = range(2, gpus + 1) if size is None else (size,)
    subsets = sum(comb(gpus, k) for k in sizes)
    if subsets > MOST_SUBSETS:
        raise ValueError(
            f"{subsets} subsets of {gpus} GPUs are too many to sort; accepted is one small --size"
        )
    labels = _labels(topology, affinity=affinity, nics=nics)
    subset_classes: list[SubsetClass] = []
    for k in sizes:
        subset_classes += _classes_of_size(topology, labels, k)
    return sorted(subset_classes, key=_best_links_first)


def _best_links_first(subset: SubsetClass) -> tuple[int, float, float, tuple[int, ...]]:
    """Order by the worst link first, since a collective waits for it; then by the sum."""
    slowest = min((quality(word) for word in subset.links), default=0.0)
    total = sum(quality(word) * pairs for word, pairs in subset.links.items())
    return subset.size, -slowest, -total, subset.representative


def _labels(topology: Topology, *, affinity: bool, nics: bool) -> LabelMatrix:
    """Return numbers for the labels of each ordered pair of GPUs; on the diagonal, of each GPU."""

    def label(a: int, b: int) -> str:
        parts: list[object] = ["self" if a == b else topology.link_between(a, b)]
        if affinity and a != b:
            # The relation, not the node's number: sockets 0 and 1 are alike.
            homes = {(topology.gpu(x).numa_affinity, topology.gpu(x).cpu_affinity) for x in (a, b)}
            parts.append("unknown" if (None, None) in homes else len(homes))
        if nics:
            reach = [
                (topology.link_between(a, n), topology.link_between(b, n)) for n in topology.nics
            ]
            parts.append(sorted(reach))
        return repr(tuple(parts))

    texts = [[label(a, b) for b in topology.gpus] for a in topology.gpus]
    distinct = sorted({text for row in texts for text in row})
    numbers = {text: number for number, text in enumerate(distinct, start=1)}
    return tuple(tuple(numbers[text] for text in row) for row in texts)


def _classes_of_size(topology: Topology, labels: LabelMatrix, size: int) -> Iterator[SubsetClass]:
    """Yield classes in the order of their first members, visited in lexicographic order."""
    positions = list(combinations(range(len(topology.gpus)), size))
    values, matrices = _refine(labels, positions)
    class_of_matrix: dict[bytes, _OpenClass] = {}
    rivals: dict[int, list[_OpenClass]] = {}  # by value
    open_classes: list[_OpenClass] = []
    for subset, value, (matrix, colours) in zip(positions, values, matrices, strict=True):
        key = matrix.tobytes()
        subset_class = class_of_matrix.get(key)
        if subset_class is None:
            rows = tuple(map(tuple, matrix.tolist()))
            shades = tuple(colours.tolist())
            for rival in rivals.setdefault(value, []):
                if _isomorphic(rows, shades, rival.matrix, rival.colours):
                    subset_class = rival
                    break
            else:
                subset_class = _OpenClass(rows, shades, [])
                rivals[value].append(subset_class)
                open_classes.append(subset_class)
            class_of_matrix[key] = subset_class
        subset_class.count += 1
        if len(subset_class.members) < 2:
            subset_class.members.append(tuple(topology.gpus[at] for at in subset))
    for subset_class in open_classes:
        first, *rest = subset_class.members
        links = count_classes(topology.link_between(a, b) for a, b in combinations(first, 2))
        yield SubsetClass(size, links, first, subset_class.count, rest[0] if rest else None)


def _refine(
    labels: LabelMatrix, positions: list[tuple[int, ...]]
) -> tuple[list[int], Iterator[tuple[Any, Any]]]:
    """Return for every subset a value that isomorphic subsets share, its matrix and its colours.

    The label matrix is in the order of the colours, which are sorted.
    """
    import numpy as np

    chosen = np.array(positions, dtype=np.intp).reshape(len(positions), -1)
    matrix = np.array(labels, dtype=np.uint64)[chosen[:, :, None], chosen[:, None, :]]

    def mix(values: Any) -> Any:
        """Scatter 64-bit values so that sums of them stand for multisets."""
        values = (values + np.uint64(_MIX[0])) * np.uint64(_MIX[1])
        values ^= values >> np.uint64(31)
        values *= np.uint64(_MIX[2])
        return values ^ (values >> np.uint64(29))

    pairs = mix(matrix)
    colours = mix(np.einsum("sii->si", matrix))
    for _ in range(min(_ROUNDS, chosen.shape[1])):
        seen = mix(pairs ^ (colours[:, None, :] * np.uint64(_MIX[1])))
        colours = mix(colours * np.uint64(_MIX[2]) + seen.sum(axis=2, dtype=np.uint64))
    order = np.argsort(colours, axis=1, kind="stable")
    rows = np.arange(len(positions))[:, None, None]
    ordered = matrix[rows, order[:, :, None], order[:, None, :]].astype(np.uint16)
    ordered = np.ascontiguousarray(ordered)
    shades = np.take_along_axis(colours, order, axis=1)
    values = mix(colours).sum(axis=1, dtype=np.uint64).tolist()
    return values, zip(ordered, shades, strict=True)


def _isomorphic(
    a: LabelMatrix, colours_a: tuple[int, ...], b: LabelMatrix, colours_b: tuple[int, ...]
) -> bool:
    """Tell whether some permutation that keeps colours turns matrix a into matrix b."""
    if colours_a != colours_b:  # both sorted: other colours, other graph
        return False
    image: list[int] = []  # the positions of b that stand for the first positions of a

    def fits(candidate: int) -> bool:
        at = len(image)
        if colours_b[candidate] != colours_a[at] or candidate in image:
            return False
        if a[at][at] != b[candidate][candidate]:
            return False
        for k, peer in enumerate(image):
            if a[at][k] != b[candidate][peer] or a[k][at] != b[peer][candidate]:
                return False
        return True

    def extend() -> bool:
        if len(image) == len(a):
            return True
        for candidate in range(len(a)):
            if fits(candidate):
                image.append(candidate)
                if extend():
                    return True
                image.pop()
        return False

    return extend()
