"""The bandwidth of a set of GPUs: what the rings that NCCL can pack onto its wires carry together.

This is the one bandwidth of a set in Ringside: `best` and `worst` rank by it, `subsets` and `place`
print it, and findings compare exchanges with it. Each ring has a rate, the rates over a wire sum to
no more than it carries in that direction, and the sum of all rates is maximised. NCCL runs several
rings at once, so this is more than the best ring alone.

Rings cross NVLinks alone wherever such a ring exists, otherwise PCIe too. Through an NVSwitch, and
over PCIe, all wires of a GPU share its port. What PCIe switches and sockets share is in no topology
and is not counted, nor are wires through GPUs outside the set.

Up to 8 GPUs the answer is exact, by a linear programme over all of their rings. Of more GPUs it is
an upper bound: what the GPU, or the group of GPUs with wires of their own, that can send least can
send. The bound is exact where all wires are alike.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from typing import Any

from analysis.topology.model import NVLINK_GB_PER_S, Topology, nvlink_count, quality

EXACT_GPUS = 8  # 2,520 rings
_DECIMALS = 3  # of GB/s: bandwidths that agree so far are equal
_PERTURBATION = 1e-9  # share by which equal wires differ: the simplex method then never cycles
_TINY = 1e-9
_MOST_NVLINKS = 18  # of any GPU before Blackwell: equal pairs that need more meet in a switch

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class SetBandwidth:
    """What packed rings carry, in GB/s per direction.

    `nominal`: from link counts and data sheets, not measured; `exact`: else an upper bound.
    """

    gb_per_s: float
    over_nvlink: bool  # over NVLinks alone
    nominal: bool
    exact: bool

    @property
    def shown_gb_per_s(self) -> float | None:
        """The GB/s where they are known: a path over PCIe has no nominal speed."""
        return self.gb_per_s if self.over_nvlink or not self.nominal else None

    def describe(self) -> str:
        """Return `100 GB/s nominal`, `at most 372.1 GB/s measured`, or `over PCIe`."""
        if self.shown_gb_per_s is None:
            return "over PCIe"
        text = f"{self.gb_per_s:.1f} GB/s measured"
        if self.nominal:
            text = f"{self.gb_per_s:g} GB/s nominal"
        return text if self.exact else f"at most {text}"

    def to_json(self) -> dict[str, Any]:
        """Return `{"rings_gb_per_s": 100.0, "rings_are": "nominal"}`, empty if not known.

        `rings_at_most_gb_per_s` is an upper bound.
        """
        if self.shown_gb_per_s is None:
            return {}
        name = "rings_gb_per_s" if self.exact else "rings_at_most_gb_per_s"
        return {name: self.gb_per_s, "rings_are": "nominal" if self.nominal else "measured"}


@dataclass(frozen=True)
class Wires:
    """The wires between GPUs, by position. `gb_per_s` is symmetric; 0 means: no wire."""

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


@dataclass(frozen=True)
class MachineWires:
    """All wires of a machine by the position of its GPUs, and its NVLinks alone, None without."""

    nvlinks: Wires | None
    every: Wires
    nominal: bool

    @staticmethod
    def of(
        topology: Topology | None, matrix: Sequence[Sequence[float]] | None = None
    ) -> "MachineWires":
        """Return wires with the measured GB/s of a matrix in the topology's order, else nominal.

        A matrix alone does not say which pairs share a port: each GPU then sends no more than to
        its fastest peer.
        """
        if topology is None:
            speeds = _slower_direction(matrix or ())
            all_pairs = [[True] * len(speeds) for _ in speeds]
            return MachineWires(None, _wires(speeds, all_pairs), nominal=False)
        nominal = matrix is None
        speeds = _nominal(topology) if matrix is None else _slower_direction(matrix)
        switch = _meet_in_switch(topology)
        through_port = []
        nvlink_speeds = []
        for a in topology.gpus:
            words = [topology.link_between(a, b) if a != b else "" for b in topology.gpus]
            is_nvlink = [nvlink_count(word) is not None for word in words]
            through_port.append([switch or not direct for direct in is_nvlink])
            row = speeds[topology.gpus.index(a)]
            nvlink_speeds.append(
                [gb if direct else 0.0 for gb, direct in zip(row, is_nvlink, strict=True)]
            )
        every = _wires(speeds, through_port)
        if not any(map(any, nvlink_speeds)):
            return MachineWires(None, every, nominal)
        nvlinks = _wires(nvlink_speeds, [[switch] * len(row) for row in nvlink_speeds])
        return MachineWires(nvlinks, every, nominal)

    def bandwidth(self, members: Sequence[int], quick: bool = False) -> SetBandwidth:
        """Return the bandwidth of the GPUs at these positions, if `quick` by the bound alone."""
        nvlinks = self.nvlinks.among(members) if self.nvlinks is not None else None
        over_nvlink = nvlinks is not None and has_ring(nvlinks)
        wires = nvlinks if nvlinks is not None and over_nvlink else self.every.among(members)
        exact = len(members) == 2 or (len(members) <= EXACT_GPUS and not quick)
        speed = packed_gb_per_s(wires) if exact else bound_gb_per_s(wires)
        return SetBandwidth(speed, over_nvlink, self.nominal, exact)


def set_bandwidth(
    topology: Topology | None, gpus: Sequence[int], matrix: Sequence[Sequence[float]] | None = None
) -> SetBandwidth:
    """Return the bandwidth of a set of GPU ids.

    `matrix` holds the measured GB/s in the topology's order; without a topology GPUs are 0, 1, …
    """
    ids = topology.gpus if topology else range(len(matrix or ()))
    return MachineWires.of(topology, matrix).bandwidth([ids.index(gpu) for gpu in gpus])


def packed_gb_per_s(wires: Wires) -> float:
    """Return the GB/s of all rings together through every GPU of `wires`; 0 where no ring exists.

    Exact up to EXACT_GPUS GPUs, an upper bound for more.
    """
    size = len(wires.gb_per_s)
    bound = bound_gb_per_s(wires)
    if not bound or size == 2 or size > EXACT_GPUS:
        return bound
    kinds = {
        (wires.gb_per_s[a][b], wires.through_port[a][b]) for a, b in combinations(range(size), 2)
    }
    if len(kinds) == 1 and len(set(wires.port_gb_per_s)) == 1:
        return bound
    return round(min(2 * _most_rings(wires), bound), _DECIMALS)


def bound_gb_per_s(wires: Wires) -> float:
    """Return an upper bound of the packing, 0 where no ring exists.

    It is what the GPU that can send least can send: a ring leaves a GPU over two different wires,
    so a wire counts for no more than the GPU's others together. Where wires of their own join only
    groups of GPUs, it is also what the ports of a group can send.
    """
    size = len(wires.gb_per_s)
    if not has_ring(wires):
        return 0.0
    if size == 2:
        speed = wires.gb_per_s[0][1]
        if wires.through_port[0][1]:
            speed = min(speed, *wires.port_gb_per_s)
        return round(speed, _DECIMALS)
    bound = float("inf")
    for a in range(size):
        peers = [b for b in range(size) if b != a]
        speeds = [wires.gb_per_s[a][b] for b in peers]
        ported = sum(wires.gb_per_s[a][b] for b in peers if wires.through_port[a][b])
        sent = sum(speeds) - max(0.0, ported - wires.port_gb_per_s[a])
        bound = min(bound, sent, 2 * (sum(speeds) - max(speeds)))
    groups = _directly_joined(wires)
    if len(groups) > 1:
        for group in groups:
            bound = min(bound, sum(wires.port_gb_per_s[a] for a in group))
    return round(bound, _DECIMALS)


def _directly_joined(wires: Wires) -> list[set[int]]:
    """Return the groups of GPUs that wires outside the ports join."""
    groups: list[set[int]] = []
    for a, speeds in enumerate(wires.gb_per_s):
        joined = {a}
        for b, speed in enumerate(speeds):
            if speed > 0 and not wires.through_port[a][b]:
                joined.add(b)
        apart = []
        for group in groups:
            if group & joined:
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return groups


def has_ring(wires: Wires) -> bool:
    """Tell whether a ring through all GPUs exists; for two GPUs: a wire."""
    size = len(wires.gb_per_s)
    peers = [[b for b in range(size) if b != a and wires.gb_per_s[a][b] > 0] for a in range(size)]
    if size < 3:
        return size == 2 and bool(peers[0])
    fewest = min(map(len, peers))
    if fewest < 2 or 2 * fewest >= size:  # Dirac, Proceedings of the LMS 2, 1952
        return fewest >= 2
    reached: set[int] = set()
    frontier = {0}
    while frontier:
        reached |= frontier
        frontier = {b for a in frontier for b in peers[a]} - reached
    if len(reached) < size:
        return False
    path = [0]

    def extend() -> bool:
        if len(path) == size:
            return 0 in peers[path[-1]]
        for peer in peers[path[-1]]:
            if peer not in path:
                path.append(peer)
                if extend():
                    return True
                path.pop()
        return False

    return extend()


@functools.cache
def rings(size: int) -> tuple[tuple[int, ...], ...]:
    """Return every ring through positions 0 to size - 1 once, from 0, in lexicographic order."""
    if size < 3:
        return (tuple(range(size)),)
    return tuple((0, *rest) for rest in permutations(range(1, size)) if rest[0] < rest[-1])


@functools.cache
def _pairs_of_rings(size: int) -> tuple[tuple[int, ...], ...]:
    """Return the pairs that each ring crosses, as their numbers in `combinations`."""
    numbers = {pair: number for number, pair in enumerate(combinations(range(size), 2))}
    crossed = []
    for ring in rings(size):
        steps = pairwise((*ring, ring[0]))
        crossed.append(tuple(numbers[min(a, b), max(a, b)] for a, b in steps))
    return tuple(crossed)


def _most_rings(wires: Wires) -> float:
    """Return the largest sum of the rates of rings, each run one way round.

    The rows of the programme are wires and ports: the rates over a wire sum to at most its GB/s,
    and so do the rates through a port, counted once for each of a ring's two wires that pass it
    (half of them go out, half come in). It is solved by the revised simplex method, whose columns
    are made when they are needed (Gilmore and Gomory, Operations Research 9, 1961). Plain Python:
    importing scipy takes longer than most plans.
    """
    size = len(wires.gb_per_s)
    pairs = list(combinations(range(size), 2))
    limits = [wires.gb_per_s[a][b] for a, b in pairs]
    usable = [ring for ring in _pairs_of_rings(size) if all(limits[pair] > 0 for pair in ring)]
    limits += wires.port_gb_per_s
    rows_of_pair = []
    for row, (a, b) in enumerate(pairs):
        shares_port = wires.through_port[a][b]
        rows_of_pair.append([row, len(pairs) + a, len(pairs) + b] if shares_port else [row])
    rows = range(len(limits))
    rates = [limit * (1 + _PERTURBATION * row) for row, limit in enumerate(limits)]
    inverse = [[float(row == column) for column in rows] for row in rows]  # of the basis
    is_ring = [False for _ in rows]  # whether the basis has a ring in this row, else a slack
    while True:
        priced = [inverse[row] for row in rows if is_ring[row]]
        prices = [sum([weights[row] for weights in priced]) for row in rows]
        slack = min(rows, key=prices.__getitem__)
        enters_ring = prices[slack] >= -_TINY
        if enters_ring:
            price_of_pair = [sum(prices[row] for row in used) for used in rows_of_pair]
            cheapest = min(usable, key=lambda ring: sum([price_of_pair[pair] for pair in ring]))
            if sum(price_of_pair[pair] for pair in cheapest) > 1 - _TINY:
                return sum(rates[row] for row in rows if is_ring[row])
            crossed = [row for pair in cheapest for row in rows_of_pair[pair]]
            entering = [sum(weights[row] for row in crossed) for weights in inverse]
        else:  # a wire that need not be full
            entering = [weights[slack] for weights in inverse]
        candidates = [row for row in rows if entering[row] > _TINY]
        leaving = min(candidates, key=lambda row: rates[row] / entering[row])
        pivot = entering[leaving]
        inverse[leaving] = [weight / pivot for weight in inverse[leaving]]
        rates[leaving] /= pivot
        is_ring[leaving] = enters_ring
        for row in rows:
            factor = entering[row]
            if row != leaving and factor:
                pivot_row = zip(inverse[row], inverse[leaving], strict=True)
                inverse[row] = [weight - factor * change for weight, change in pivot_row]
                rates[row] -= factor * rates[leaving]


def _wires(speeds: Sequence[Sequence[float]], through_port: Sequence[Sequence[bool]]) -> Wires:
    """Return wires whose ports carry what the fastest pair through them does."""
    ports = []
    for row, ported in zip(speeds, through_port, strict=True):
        ports.append(
            max((gb for gb, shared in zip(row, ported, strict=True) if shared), default=0.0)
        )
    return Wires(tuple(map(tuple, speeds)), tuple(map(tuple, through_port)), tuple(ports))


def _slower_direction(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    size = len(matrix)
    speeds = [[0.0] * size for _ in range(size)]
    for a, b in combinations(range(size), 2):
        speeds[a][b] = speeds[b][a] = min(matrix[a][b], matrix[b][a])
    return speeds


def _nominal(topology: Topology) -> list[list[float]]:
    """Return GB/s by link class. PCIe classes are in their order only."""
    speeds = [[0.0] * len(topology.gpus) for _ in topology.gpus]
    for (i, a), (j, b) in combinations(enumerate(topology.devices), 2):
        word = topology.link_between(a.index, b.index)
        count = nvlink_count(word)
        if count is None:
            speed = quality(word)
        else:
            per_link = [gpu.nvlink_gb_per_s for gpu in (a, b) if gpu.nvlink_gb_per_s]
            speed = count * min(per_link, default=NVLINK_GB_PER_S)
        speeds[i][j] = speeds[j][i] = speed
    return speeds


def _meet_in_switch(topology: Topology) -> bool:
    """Tell whether the NVLinks of a GPU lead into a switch, from their number if not known."""
    if topology.nvswitch is not None:
        return topology.nvswitch
    counts = {nvlink_count(topology.link_between(a, b)) for a, b in combinations(topology.gpus, 2)}
    if len(counts) != 1:
        return False
    return (counts.pop() or 0) * (len(topology.gpus) - 1) > _MOST_NVLINKS
