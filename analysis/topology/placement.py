"""Choose K GPUs and the order of their ranks.

Sets are ranked by their bandwidth: what the rings that NCCL can pack onto their wires carry together (analysis.topology.wires).
The order comes after that: the ring with the best slowest link, then the one with the largest sum, since rank order decides
which links a single ring crosses. The worst set stands in its best order; the worst order is that of the best set.

Links count by their class, or by a measured peer-to-peer matrix. On machines of up to 8 GPUs every set is ranked exactly,
and equal sets by their best ring. On larger ones sets are ranked by an upper bound of their bandwidth (what the GPU that can
send least can send), and the first sets of that ranking by their exact bandwidth where they have up to 8 GPUs: a heuristic.
The order is always exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from analysis.topology.link_classes import best_first, describe_counts, quality
from analysis.topology.model import Topology
from analysis.topology.packing import EXACT_GPUS
from analysis.topology.ring_order import ring_order, ring_value
from analysis.topology.wires import MachineWires, SetBandwidth, set_bandwidth

MOST_GPUS = 16  # 2^16 subsets x 16 ends: a second and some megabytes; one more GPU doubles both
_SCALE = 1_000_000  # weights become whole numbers, so that equal sums compare equal
_REFINED = 16  # sets of a larger machine whose exact bandwidth is computed


@dataclass(frozen=True)
class Ring:
    """GPUs in ring order and the weights of its links, each to the next and the last to the first (two GPUs: one).

    `links` counts link classes and is empty without a topology; GB/s of links are None without a measured matrix.
    `bandwidth` is that of the set, whatever its order: all rings that fit, not this one.
    """

    order: tuple[int, ...]
    links: dict[str, int]
    slowest_gb_per_s: float | None
    sum_gb_per_s: float | None
    bandwidth: SetBandwidth | None = None

    def describe(self) -> str:
        """Describe the ring: `0-1-2-3 (3 x NV2 + 1 x NV1)`, with measured numbers if there are any."""
        parts = [describe_counts(self.links)] if self.links else []
        if self.slowest_gb_per_s is not None:
            parts.append(
                f"slowest link {self.slowest_gb_per_s:.1f} GB/s, sum {self.sum_gb_per_s:.1f} GB/s"
            )
        return "-".join(map(str, self.order)) + (f" ({'; '.join(parts)})" if parts else "")

    def to_json(self) -> dict[str, Any]:
        """Return one JSON object; what was not measured, or is not known, is absent."""
        shown: dict[str, Any] = {"gpus": list(self.order), "links": self.links}
        if self.slowest_gb_per_s is not None:
            shown |= {"slowest_gb_per_s": self.slowest_gb_per_s, "sum_gb_per_s": self.sum_gb_per_s}
        return shown | (self.bandwidth.to_json() if self.bandwidth else {})


@dataclass(frozen=True)
class Placement:
    """The best set in its best order, the worst set in its best order, and the best set in its worst order."""

    best: Ring
    worst: Ring
    worst_order: Ring
    reason: str  # one sentence that says why


def place(
    topology: Topology | None, count: int, matrix: Sequence[Sequence[float]] | None = None
) -> Placement:
    """Find the best and the worst set of `count` GPUs, and the worst order of the best.

    Args:
        topology: link classes; None when only a matrix is known.
        count: GPUs to choose.
        matrix: measured GB/s from each GPU (row) to each other, in the topology's order, else of GPUs 0, 1, …; the
            slower direction of a pair counts.

    Raises:
        ValueError: more GPUs asked for than there are or than can be searched, or neither source given.
    """
    if topology is None and matrix is None:
        raise ValueError("no machine to place on; accepted are a topology and a measured matrix")
    names = topology.gpus if topology else tuple(range(len(matrix or ())))
    if matrix is not None and len(matrix) != len(names):
        raise ValueError(
            f"a matrix of {len(matrix)} GPUs; accepted is one of {len(names)}, as the topology has"
        )
    if not 1 <= count <= len(names):
        raise ValueError(
            f"--gpus {count}: accepted are 1 to {len(names)}, the GPUs of this machine"
        )
    if len(names) > MOST_GPUS:
        raise ValueError(
            f"a machine of {len(names)} GPUs; accepted are at most {MOST_GPUS}, for which the search is short"
        )
    weights, wires = _weights(topology, matrix, names), MachineWires.of(topology, matrix)
    best_set, worst_set = _best_and_worst(wires, weights, count)

    def ring(members: Sequence[int], in_worst_order: bool = False) -> Ring:
        order = [names[at] for at in ring_order(weights, members, in_worst_order)]
        return _ring(
            topology, matrix, names, order, wires.bandwidth(members) if count > 1 else None
        )

    best = ring(best_set)
    worst = best if worst_set == best_set else ring(worst_set)
    return Placement(best, worst, ring(best_set, in_worst_order=True), _reason(best, worst, count))


def best_ring(topology: Topology, gpus: Sequence[int]) -> Ring:
    """Return the given GPUs (2 to MOST_GPUS) in their best order, with the nominal bandwidth of the set."""
    chosen = sorted(gpus)
    weights = _weights(topology, None, chosen)
    order = [chosen[at] for at in ring_order(weights, range(len(chosen)))]
    return _ring(topology, None, chosen, order, set_bandwidth(topology, chosen))


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


def _best_and_worst(
    wires: MachineWires, weights: list[list[int]], count: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions of the best and of the worst set, smallest first among equals."""
    sets = list(combinations(range(len(weights)), count))
    if count == 1 or len(sets) == 1:
        return sets[0], sets[0]
    if len(weights) <= EXACT_GPUS:
        value = {one: wires.bandwidth(one).gb_per_s for one in sets}
        high, low = max(value.values()), min(value.values())
        rank = {
            one: ring_value(weights, ring_order(weights, one))
            for one in sets
            if value[one] in (high, low)
        }
        best = max(
            (one for one in sets if value[one] == high), key=rank.__getitem__
        )  # of equals the first
        return best, min((one for one in sets if value[one] == low), key=rank.__getitem__)
    bound = {one: wires.bandwidth(one, quick=True).gb_per_s for one in sets}
    high_first = sorted(sets, key=lambda one: (-bound[one], one))[:_REFINED]
    low_first = sorted(sets, key=lambda one: (bound[one], one))[:_REFINED]
    exact = {one: wires.bandwidth(one).gb_per_s for one in {*high_first, *low_first}}
    return max(high_first, key=exact.__getitem__), min(low_first, key=exact.__getitem__)


def _ring(
    topology: Topology | None,
    matrix: Sequence[Sequence[float]] | None,
    names: Sequence[int],
    order: list[int],
    bandwidth: SetBandwidth | None,
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
    return Ring(
        tuple(order),
        counts,
        min(measured, default=None),
        math.fsum(measured) if measured else None,
        bandwidth,
    )


def _reason(best: Ring, worst: Ring, count: int) -> str:
    """Explain the choice in one sentence."""
    if count == 1:
        return "One GPU has no links, so every choice is the same."
    kind = "pair" if count == 2 else f"set of {count} GPUs"
    assert best.bandwidth is not None and worst.bandwidth is not None
    high, low = best.bandwidth, worst.bandwidth
    one, other = best.describe(), worst.describe()
    if high == low and (best.links, best.slowest_gb_per_s) == (worst.links, worst.slowest_gb_per_s):
        return f"Every {kind} of this machine is as good as {one}."
    if high == low:
        return f"Every {kind} can pack rings of the same bandwidth{_of(high)}; {one} has the best ring, {other} the worst."
    return f"{one} is the best {kind}: its rings carry most{_of(high)}; the worst, {other}, carries least{_of(low)}."


def _of(bandwidth: SetBandwidth) -> str:
    shown = bandwidth.shown_gb_per_s
    return "" if shown is None else f" ({bandwidth.describe()})"
