"""Equivalence classes of GPU subsets: two subsets are in one class if their links look the same.

That is: the subgraphs they induce, labelled with link classes, are isomorphic. Measuring one member of each class
measures the machine: 56 subsets instead of 247 on a DGX-1, one per size where all GPUs meet in switches. With
`affinity`, pairs on one NUMA node and pairs on two differ as well; with `nics`, so do GPUs and pairs with other
relations to the NICs.

The method is exact. Colour refinement (Weisfeiler-Leman, with numpy over all subsets of a size at once) gives every
subset a value that isomorphic subsets share, and an order of its GPUs; subsets with equal matrices in that order are
isomorphic, and only the few different matrices with one value are compared by search.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

from analysis.topology.link_classes import best_first, quality
from analysis.topology.model import Topology
from analysis.topology.placement import place

MOST_SUBSETS = (
    500_000  # of one question: more would not be measured, and would take minutes to sort
)
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the constants of splitmix64
LabelMatrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SubsetClass:
    """One class. `links` counts the pairs of each link class, best first; members are sorted GPU ids."""

    size: int
    links: dict[str, int]
    representative: tuple[int, ...]
    members: int
    second_member: tuple[int, ...] | None  # None when the class has one member only

    def to_json(self, second_member: bool = False) -> dict[str, Any]:
        """Return the object of `--json`, with another member if asked."""
        shown: dict[str, Any] = {
            "size": self.size,
            "links": self.links,
            "representative": list(self.representative),
            "members": self.members,
        }
        if second_member:
            shown["second_member"] = (
                None if self.second_member is None else list(self.second_member)
            )
        return shown


def classes(
    topology: Topology, size: int | None = None, *, affinity: bool = False, nics: bool = False
) -> list[SubsetClass]:
    """Return every class of subsets of `size` GPUs, or of two and more; sorted by size, then best links first.

    Raises ValueError if the machine has no subset of that size, or more than can be sorted.
    """
    count = len(topology.gpus)
    if size is not None and not 1 <= size <= count:
        raise ValueError(f"--size {size}: accepted are 1 to {count}, the GPUs of this machine")
    sizes = range(2, count + 1) if size is None else (size,)
    asked = sum(comb(count, k) for k in sizes)
    if asked > MOST_SUBSETS:
        raise ValueError(
            f"{asked} subsets of {count} GPUs are too many to sort; accepted is one small --size"
        )
    labels = _labels(topology, affinity=affinity, nics=nics)
    found = [one for k in sizes for one in _classes_of_size(topology, labels, k)]
    return sorted(found, key=_best_links_first)


def best(topology: Topology, k: int) -> tuple[int, ...]:
    """Return the k GPUs whose rings carry most together, in the order of their best ring (see placement)."""
    return place(topology, k).best.order


def worst(topology: Topology, k: int) -> tuple[int, ...]:
    """Return the k GPUs whose rings carry least together, in the order of their best ring."""
    return place(topology, k).worst.order


def worst_order(topology: Topology, k: int) -> tuple[int, ...]:
    """Return the GPUs of `best` in the order of their worst ring: only the order differs from `best`."""
    return place(topology, k).worst_order.order


def _best_links_first(one: SubsetClass) -> tuple[int, float, float, tuple[int, ...]]:
    """Order by the worst link first, since a collective waits for it; then by the sum."""
    slowest = min((quality(word) for word in one.links), default=0.0)
    total = sum(quality(word) * pairs for word, pairs in one.links.items())
    return one.size, -slowest, -total, one.representative


def _labels(topology: Topology, *, affinity: bool, nics: bool) -> LabelMatrix:
    """Return numbers for the labels of each ordered pair of GPUs; on the diagonal, of each GPU."""

    def label(a: int, b: int) -> tuple[object, ...]:
        parts: list[object] = ["self" if a == b else topology.link_between(a, b)]
        if affinity and a != b:
            # The relation, not the node's number: sockets 0 and 1 are alike.
            nodes = {
                (topology.gpu(gpu).numa_affinity, topology.gpu(gpu).cpu_affinity) for gpu in (a, b)
            }
            parts.append("unknown" if (None, None) in nodes else len(nodes))
        if nics:
            parts.append(
                sorted(
                    (topology.link_between(a, nic), topology.link_between(b, nic))
                    for nic in topology.nics
                )
            )
        return tuple(parts)

    texts = [[repr(label(a, b)) for b in topology.gpus] for a in topology.gpus]
    numbers = {
        text: number
        for number, text in enumerate(sorted({text for row in texts for text in row}), start=1)
    }
    return tuple(tuple(numbers[text] for text in row) for row in texts)


def _classes_of_size(topology: Topology, labels: LabelMatrix, size: int) -> Iterator[SubsetClass]:
    """Yield classes in the order of their first members; members are visited in lexicographic order."""
    positions = list(combinations(range(len(topology.gpus)), size))
    values, ordered = _refine(labels, positions)
    first_with: dict[bytes, int] = {}  # matrix -> class
    rivals: dict[
        int, list[tuple[int, LabelMatrix, tuple[int, ...]]]
    ] = {}  # value -> classes: number, matrix, colours
    members: list[list[Any]] = []  # per class: first member, second, count
    for subset, value, (key, matrix, colours) in zip(positions, values, ordered, strict=True):
        number = first_with.get(key)
        if number is None:
            plain = tuple(map(tuple, matrix.tolist()))
            shades = tuple(colours.tolist())
            known = rivals.setdefault(value, [])
            number = next(
                (at for at, other, shade in known if _isomorphic(plain, shades, other, shade)), None
            )
            if number is None:
                number = len(members)
                known.append((number, plain, shades))
                members.append([None, None, 0])
            first_with[key] = number
        entry = members[number]
        entry[2] += 1
        if entry[2] <= 2:
            entry[entry[2] - 1] = tuple(topology.gpus[at] for at in subset)
    for first, second, count in members:
        words = [topology.link_between(a, b) for a, b in combinations(first, 2)]
        yield SubsetClass(
            size, {word: words.count(word) for word in best_first(words)}, first, count, second
        )


def _refine(
    labels: LabelMatrix, positions: list[tuple[int, ...]]
) -> tuple[list[int], Iterator[tuple[bytes, Any, Any]]]:
    """Return for every subset: a value that isomorphic subsets share; its label matrix in colour order, and the colours."""
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
    for _ in range(
        min(3, chosen.shape[1])
    ):  # three rounds separate nearly all; the search separates the rest
        both = mix(pairs ^ (colours[:, None, :] * np.uint64(_MIX[1])))
        colours = mix(colours * np.uint64(_MIX[2]) + both.sum(axis=2, dtype=np.uint64))
    order = np.argsort(colours, axis=1, kind="stable")
    rows = np.arange(len(positions))[:, None, None]
    ordered = np.ascontiguousarray(
        matrix[rows, order[:, :, None], order[:, None, :]].astype(np.uint16)
    )
    shades = np.take_along_axis(colours, order, axis=1)
    values = mix(colours).sum(axis=1, dtype=np.uint64).tolist()
    return values, ((one.tobytes(), one, shade) for one, shade in zip(ordered, shades, strict=True))


def _isomorphic(
    a: LabelMatrix, colours_a: tuple[int, ...], b: LabelMatrix, colours_b: tuple[int, ...]
) -> bool:
    """Tell whether some permutation that keeps colours turns matrix a into matrix b."""
    if colours_a != colours_b:  # both sorted: other colours, other graph
        return False
    size = len(a)
    image: list[int] = []

    def extend() -> bool:
        at = len(image)
        if at == size:
            return True
        for candidate in range(size):
            if (
                colours_b[candidate] != colours_a[at]
                or candidate in image
                or a[at][at] != b[candidate][candidate]
            ):
                continue
            if all(
                a[at][k] == b[candidate][to] and a[k][at] == b[to][candidate]
                for k, to in enumerate(image)
            ):
                image.append(candidate)
                if extend():
                    return True
                image.pop()
        return False

    return extend()
