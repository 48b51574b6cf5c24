"""Choose K GPUs and the order of their ranks.

Sets are ranked by their bandwidth (analysis.topology.bandwidth). The order comes after that: the
ring with the best slowest link, then the one with the largest sum. The worst set stands in its best
order; the worst order is that of the best set. Links count by their class, or by a measured
peer-to-peer matrix.

Up to 8 GPUs every set and every ring is tried. On larger machines sets are ranked by the upper
bound of their bandwidth, and the first sets of that ranking again by their bandwidth. More than 8
GPUs stay in the order of their ids: NCCL searches its own rings anyway.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from analysis.topology.bandwidth import EXACT_GPUS, MachineWires, SetBandwidth, rings, set_bandwidth
from analysis.topology.model import Topology, count_classes, describe_counts, quality

MOST_GPUS = 16  # 12,870 sets of 8
SCALE = 1_000_000  # weights become whole numbers, so that equal sums compare equal
REFINED = 16  # sets of a larger machine that are ranked again

Matrix = Sequence[Sequence[float]]
Members = tuple[int, ...]  # positions of a set's GPUs
Weights = Sequence[Sequence[int]]  # symmetric, whole numbers; the diagonal is not used


@dataclass(frozen=True)
class Ring:
    """GPUs in ring order, each linked to the next and the last to the first."""

    order: tuple[int, ...]
    links: dict[str, int]  # counts of link classes; empty without a topology
    slowest_gb_per_s: float | None  # of its links; None without a measured matrix
    sum_gb_per_s: float | None
    bandwidth: SetBandwidth | None = None  # of the set, whatever its order

    def describe(self) -> str:
        """Return `0-1-2-3 (3 x NV2 + 1 x NV1)`, with measured numbers if there are any."""
        parts = []
        if self.links:
            parts.append(describe_counts(self.links))
        if self.slowest_gb_per_s is not None:
            parts.append(
                f"slowest link {self.slowest_gb_per_s:.1f} GB/s, sum {self.sum_gb_per_s:.1f} GB/s"
            )
        order = "-".join(map(str, self.order))
        return f"{order} ({'; '.join(parts)})" if parts else order

    def to_json(self) -> dict[str, Any]:
        """Return one JSON object; what was not measured, or is not known, is absent."""
        content: dict[str, Any] = {"gpus": list(self.order), "links": self.links}
        if self.slowest_gb_per_s is not None:
            content["slowest_gb_per_s"] = self.slowest_gb_per_s
            content["sum_gb_per_s"] = self.sum_gb_per_s
        if self.bandwidth is not None:
            content |= self.bandwidth.to_json()
        return content


@dataclass(frozen=True)
class Placement:
    """The best and the worst set in their best order, and the best set in its worst order."""

    best: Ring
    worst: Ring
    worst_order: Ring

    def rings(self) -> dict[str, Ring]:
        """Return the three rings by their names in JSON and in `gpus=`."""
        return {"best": self.best, "worst": self.worst, "worst_order": self.worst_order}

    @property
    def reason(self) -> str:
        """One sentence that explains the choice."""
        best, worst, count = self.best, self.worst, len(self.best.order)
        if count == 1:
            return "One GPU has no links, so every choice is the same."
        kind = "pair" if count == 2 else f"set of {count} GPUs"
        brackets = []
        for ring in (best, worst):
            bracket = ""
            if ring.bandwidth is not None and ring.bandwidth.shown_gb_per_s is not None:
                bracket = f" ({ring.bandwidth.describe()})"
            brackets.append(bracket)
        if best.bandwidth != worst.bandwidth:
            return (
                f"{best.describe()} is the best {kind}: its rings carry most{brackets[0]}; "
                f"the worst, {worst.describe()}, carries least{brackets[1]}."
            )
        if (best.links, best.slowest_gb_per_s) == (worst.links, worst.slowest_gb_per_s):
            return f"Every {kind} of this machine is as good as {best.describe()}."
        return (
            f"Every {kind} can pack rings of the same bandwidth{brackets[0]}; "
            f"{best.describe()} has the best ring, {worst.describe()} the worst."
        )


def choose_gpus(topology: Topology | None, count: int, matrix: Matrix | None = None) -> Placement:
    """Return the best and the worst set of `count` GPUs, and the worst order of the best.

    `matrix` holds measured GB/s from each GPU (row) to each peer, in the topology's order, else of
    GPUs 0, 1, …; the slower direction of a pair counts.

    Raises:
        ValueError: more GPUs than there are or than can be searched, or neither source given.
    """
    if topology is None and matrix is None:
        raise ValueError("no machine to place on; expected a topology and a measured matrix")
    ids = _ids(topology, matrix)
    if matrix is not None and len(matrix) != len(ids):
        raise ValueError(
            f"a matrix of {len(matrix)} GPUs; expected one of {len(ids)}, as the topology has"
        )
    if not 1 <= count <= len(ids):
        raise ValueError(f"--gpus {count}: expected 1 to {len(ids)}, the GPUs of this machine")
    if len(ids) > MOST_GPUS:
        raise ValueError(
            f"a machine of {len(ids)} GPUs; expected at most {MOST_GPUS}, for which the search "
            "is short"
        )
    weights, wires = _weights(topology, matrix, ids), MachineWires.of(topology, matrix)
    best_set, worst_set = _best_and_worst(wires, weights, count)

    def ring_of(members: Members, in_worst_order: bool = False) -> Ring:
        order = [ids[at] for at in ring_order(weights, members, in_worst_order)]
        bandwidth = wires.bandwidth(members) if count > 1 else None
        return _ring(topology, matrix, order, bandwidth)

    return Placement(ring_of(best_set), ring_of(worst_set), ring_of(best_set, True))


def _ids(topology: Topology | None, matrix: Matrix | None) -> Sequence[int]:
    return topology.gpus if topology else range(len(matrix or ()))


def best_ring(topology: Topology, gpus: Sequence[int]) -> Ring:
    """Return 2 to MOST_GPUS GPUs in their best order, with the nominal bandwidth of the set."""
    chosen = sorted(gpus)
    order = ring_order(_weights(topology, None, chosen), range(len(chosen)))
    bandwidth = set_bandwidth(topology, chosen)
    return _ring(topology, None, [chosen[at] for at in order], bandwidth)


def _weights(topology: Topology | None, matrix: Matrix | None, ids: Sequence[int]) -> Weights:
    weights = [[0] * len(ids) for _ in ids]
    for (i, a), (j, b) in combinations(enumerate(ids), 2):
        weight = 0.0
        if matrix is not None:
            weight = min(matrix[i][j], matrix[j][i])
        elif topology is not None:
            weight = quality(topology.link_between(a, b))
        weights[i][j] = weights[j][i] = round(weight * SCALE)
    return weights


def _best_and_worst(wires: MachineWires, weights: Weights, count: int) -> tuple[Members, Members]:
    """Return the positions of the best and of the worst set, smallest first among equals."""
    sets = list(combinations(range(len(weights)), count))
    if count == 1 or len(sets) == 1:
        return sets[0], sets[0]
    if len(weights) <= EXACT_GPUS:
        ranks = {}
        for members in sets:
            ring = ring_value(weights, ring_order(weights, members))
            ranks[members] = wires.bandwidth(members).gb_per_s, ring
        return max(sets, key=ranks.__getitem__), min(sets, key=ranks.__getitem__)
    bounds, speeds = {}, {}
    for members in sets:
        bounds[members] = wires.bandwidth(members, quick=True).gb_per_s
    highest = sorted(sets, key=bounds.__getitem__, reverse=True)[:REFINED]
    lowest = sorted(sets, key=bounds.__getitem__)[:REFINED]
    for members in {*highest, *lowest}:
        speeds[members] = wires.bandwidth(members).gb_per_s
    return max(highest, key=speeds.__getitem__), min(lowest, key=speeds.__getitem__)


def _ring(
    topology: Topology | None,
    matrix: Matrix | None,
    order: Sequence[int],
    bandwidth: SetBandwidth | None,
) -> Ring:
    if len(order) < 2:
        return Ring(tuple(order), {}, None, None)
    words, speeds = [], []
    ids = _ids(topology, matrix)
    for a, b in pairwise([*order, order[0]]):
        if topology:
            words.append(topology.link_between(a, b))
        if matrix is not None:
            i, j = ids.index(a), ids.index(b)
            speeds.append(min(matrix[i][j], matrix[j][i]))
        if len(order) == 2:
            break  # one link, not two
    links = count_classes(words)
    if matrix is None:
        return Ring(tuple(order), links, None, None, bandwidth)
    return Ring(tuple(order), links, min(speeds), math.fsum(speeds), bandwidth)


def ring_value(weights: Weights, order: Sequence[int]) -> tuple[int, int]:
    """Return the slowest link of a ring and the sum of its links; two GPUs have one link."""
    links = [weights[a][b] for a, b in pairwise(order)]
    if len(order) != 2:
        links.append(weights[order[-1]][order[0]])
    return min(links), sum(links)


def ring_order(weights: Weights, members: Sequence[int], worst: bool = False) -> list[int]:
    """Return the best ring through these positions, or the worst; of equals the smallest first.

    Best: the highest slowest link, then the largest sum. Worst: the lowest slowest link, then the
    smallest sum. More than EXACT_GPUS positions keep their order.
    """
    links = {weights[a][b] for a, b in combinations(members, 2)}
    if len(members) > EXACT_GPUS or len(links) < 2:  # every ring is as good
        return list(members)
    inside = []
    for a in members:
        inside.append([weights[a][b] for b in members])
    choose: Callable[..., tuple[int, ...]] = min if worst else max
    order = choose(rings(len(members)), key=lambda ring: ring_value(inside, ring))
    return [members[at] for at in order]
