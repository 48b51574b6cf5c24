"""How much rings can carry at once over given wires: the fractional packing of rings through all of some GPUs.

Every ring has a rate, the rates over a wire sum to no more than it carries in that direction, and the sum of all rates is
wanted. Wires carry the same in both directions, so each ring is run both ways round. Pairs of a GPU that go through one
port share what the port carries.

Up to 8 GPUs the answer is exact: a linear programme over all of their rings, by the revised simplex method with columns
made when they are needed (Gilmore and Gomory, Operations Research 9, 1961). Of more GPUs it is an upper bound: what the
GPU, or the group of GPUs with wires of their own, that can send least can send. The bound is exact where all wires are
alike. Plain Python: a plan loads no numpy.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

EXACT_GPUS = 8  # 2,520 rings
_DECIMALS = 3  # of GB/s: bandwidths that agree so far are equal
_PERTURBATION = 1e-9  # share by which equal wires are made to differ: the simplex method then never goes in a circle
_TINY = 1e-9

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Wires:
    """The wires between GPUs, by position. `gb_per_s` is symmetric; 0 means that there is no wire."""

    gb_per_s: Matrix  # per direction
    through_port: tuple[tuple[bool, ...], ...]  # pairs that share their GPU's port
    port_gb_per_s: tuple[float, ...]  # per direction

    def among(self, members: Sequence[int]) -> "Wires":
        """Return the wires between some of the GPUs."""
        return Wires(
            tuple(tuple(self.gb_per_s[a][b] for b in members) for a in members),
            tuple(tuple(self.through_port[a][b] for b in members) for a in members),
            tuple(self.port_gb_per_s[a] for a in members),
        )


def packed_gb_per_s(wires: Wires) -> float:
    """Return the GB/s of all rings together through every GPU of `wires`; 0 where no ring exists.

    Exact up to EXACT_GPUS GPUs, an upper bound for more.
    """
    size = len(wires.gb_per_s)
    most = bound_gb_per_s(wires)
    alike = {
        (wires.gb_per_s[a][b], wires.through_port[a][b]) for a, b in combinations(range(size), 2)
    }
    if (
        not most
        or not 2 < size <= EXACT_GPUS
        or (len(alike) == 1 and len(set(wires.port_gb_per_s)) == 1)
    ):
        return most
    return round(min(2 * _most_rings(wires), most), _DECIMALS)


def bound_gb_per_s(wires: Wires) -> float:
    """Return an upper bound of the packing, 0 where no ring exists.

    It is what the GPU that can send least can send: a ring leaves a GPU over two different wires, so a wire counts for no
    more than the GPU's others together. Where wires of their own join only groups of GPUs, it is also what the ports of a
    group can send.
    """
    size = len(wires.gb_per_s)
    if not has_ring(wires):
        return 0.0
    if size == 2:
        speed = wires.gb_per_s[0][1]
        return round(
            min(speed, *wires.port_gb_per_s) if wires.through_port[0][1] else speed, _DECIMALS
        )
    least = float("inf")
    for a in range(size):
        speeds = [speed for b, speed in enumerate(wires.gb_per_s[a]) if b != a]
        ported = sum(
            wires.gb_per_s[a][b] for b in range(size) if b != a and wires.through_port[a][b]
        )
        total = sum(speeds) - max(0.0, ported - wires.port_gb_per_s[a])
        least = min(least, total, 2 * (sum(speeds) - max(speeds)))
    groups = _groups(wires)
    if len(groups) > 1:
        least = min(least, *(sum(wires.port_gb_per_s[a] for a in group) for group in groups))
    return round(least, _DECIMALS)


def _groups(wires: Wires) -> list[set[int]]:
    """Return the GPUs that wires outside the ports join, as groups."""
    groups: list[set[int]] = []
    for a in range(len(wires.gb_per_s)):
        peers = {
            b
            for b, speed in enumerate(wires.gb_per_s[a])
            if speed > 0 and not wires.through_port[a][b]
        } | {a}
        touching = [group for group in groups if group & peers]
        groups = [group for group in groups if not group & peers] + [peers.union(*touching)]
    return groups


def has_ring(wires: Wires) -> bool:
    """Tell whether a ring through all GPUs exists (two GPUs: a wire)."""
    size = len(wires.gb_per_s)
    peers = [[b for b in range(size) if b != a and wires.gb_per_s[a][b] > 0] for a in range(size)]
    if size < 3:
        return size == 2 and bool(peers[0])
    if any(len(found) < 2 for found in peers):
        return False
    if all(len(found) > (size - 1) / 2 for found in peers):  # Dirac, Proceedings of the LMS 2, 1952
        return True
    reached = new = {0}
    while new:
        new = {b for a in new for b in peers[a]} - reached
        reached = reached | new
    if len(reached) < size:
        return False
    path, inside = [0], {0}

    def extend() -> bool:
        if len(path) == size:
            return 0 in peers[path[-1]]
        for to in peers[path[-1]]:
            if to not in inside:
                path.append(to)
                inside.add(to)
                if extend():
                    return True
                inside.remove(path.pop())
        return False

    return extend()


@functools.cache
def rings(size: int) -> tuple[tuple[int, ...], ...]:
    """Return every ring through positions 0 to size − 1 once, in lexicographic order; it begins at 0."""
    if size < 3:
        return (tuple(range(size)),)
    return tuple((0, *rest) for rest in permutations(range(1, size)) if rest[0] < rest[-1])


@functools.cache
def _crossed(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the pairs (as combinations lists them) that each ring crosses."""
    numbers = {pair: at for at, pair in enumerate(combinations(range(size), 2))}
    return tuple(
        tuple(
            numbers[min(a, b), max(a, b)] for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)
        )
        for ring in rings(size)
    )


def _most_rings(wires: Wires) -> float:
    """Return the largest sum of the rates of rings, each run one way round.

    The rows of the programme are wires and ports: the rates over a wire sum to at most its GB/s, and so do the rates
    through a port, counted once for each of a ring's two wires that pass it (half of them go out, half come in).
    """
    size = len(wires.gb_per_s)
    pairs = list(combinations(range(size), 2))
    limits = [wires.gb_per_s[a][b] for a, b in pairs]
    ported = [
        a for a in range(size) if any(wires.through_port[a][b] for b in range(size) if b != a)
    ]
    rows_of_pair = [
        (
            at,
            *(
                len(pairs) + ported.index(end)
                for end in pair
                if wires.through_port[pair[0]][pair[1]]
            ),
        )
        for at, pair in enumerate(pairs)
    ]
    limits += [wires.port_gb_per_s[a] for a in ported]
    columns = [ring for ring in _crossed(size) if all(limits[at] > 0 for at in ring)]
    rates = [
        limit * (1 + _PERTURBATION * at) for at, limit in enumerate(limits)
    ]  # of the basis; slacks at first
    count = len(limits)
    inverse = [[1.0 if a == b else 0.0 for b in range(count)] for a in range(count)]
    worth = [0.0] * count  # of the variables in the basis: a ring 1, a slack 0
    while True:
        prices = [
            sum(inverse[row][at] for row in range(count) if worth[row]) for at in range(count)
        ]
        slack = min(range(count), key=prices.__getitem__)
        if prices[slack] < -_TINY:  # a wire that need not be full
            entering, gain = [row[slack] for row in inverse], 0.0
        else:
            of_pair = [sum(prices[row] for row in rows) for rows in rows_of_pair]
            cheapest = min(columns, key=lambda ring: sum([of_pair[at] for at in ring]), default=())
            if not cheapest or sum(of_pair[at] for at in cheapest) > 1 - _TINY:
                return sum(rate for rate, one in zip(rates, worth, strict=True) if one)
            used = [row for at in cheapest for row in rows_of_pair[at]]
            entering, gain = [sum(row[at] for at in used) for row in inverse], 1.0
        leaving = min(
            (rates[row] / entering[row], row) for row in range(count) if entering[row] > _TINY
        )[1]  # fmt: skip
        pivot = entering[leaving]
        inverse[leaving] = [value / pivot for value in inverse[leaving]]
        rates[leaving] /= pivot
        for row in range(count):
            factor = entering[row]
            if row != leaving and factor:
                inverse[row] = [
                    a - factor * b for a, b in zip(inverse[row], inverse[leaving], strict=True)
                ]
                rates[row] -= factor * rates[leaving]
        worth[leaving] = gain
