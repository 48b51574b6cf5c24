"""Choose K GPUs and the order of their ranks.

Sets are ranked by what the rings that NCCL can pack onto their wires carry together (METHOD.md,
"Links and lost time"): rings cross NVLinks alone wherever such a ring exists, otherwise PCIe too.
Through an NVSwitch, and over PCIe, all wires of a GPU share its port. What PCIe switches and
sockets share is in no topology and is not counted, nor are wires through GPUs outside the set.

The order comes after that: the ring with the best slowest link, then the one with the largest sum.
The worst set stands in its best order; the worst order is that of the best set.

Up to 8 GPUs every set and every ring is tried. On larger machines sets are ranked by an upper
bound, and the first of them again by their bandwidth; more than 8 GPUs stay in order of ids.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from typing import TYPE_CHECKING, Any

from analysis.topology.model import (
    NVLINK_GB_PER_S,
    Topology,
    count_classes,
    describe_counts,
    nvlink_count,
    quality,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

MOST_GPUS = 16  # 12,870 sets of 8
EXACT_GPUS = 8  # 2,520 rings
REFINED_SETS = 16  # of a machine with more GPUs: these are ranked again
WEIGHT_SCALE = 1_000_000  # weights become whole numbers, so that equal sums compare equal
DECIMALS = 3  # of GB/s: bandwidths that agree so far are equal
MOST_NVLINKS = 18  # of any GPU before Blackwell: equal pairs that need more meet in a switch

Matrix = Sequence[Sequence[float]]  # measured GB/s from each GPU (row) to each peer
Members = tuple[int, ...]  # positions of a set's GPUs


@dataclass(frozen=True)
class SetBandwidth:
    """What packed rings carry."""

    gb_per_s: float  # per direction
    over_nvlink: bool  # over NVLinks alone
    nominal: bool  # from link counts and data sheets, not measured
    exact: bool  # else an upper bound

    @property
    def shown_gb_per_s(self) -> float | None:
        """The GB/s where they are known: a path over PCIe has no nominal speed."""
        return self.gb_per_s if self.over_nvlink or not self.nominal else None

    def describe(self) -> str:
        """Return `100 GB/s nominal`, `at most 372.1 GB/s measured`, or `no NVLink ring`."""
        if self.shown_gb_per_s is None:
            return "no NVLink ring"
        text = f"{self.gb_per_s:.1f} GB/s measured"
        if self.nominal:
            text = f"{self.gb_per_s:g} GB/s nominal"
        return text if self.exact else f"at most {text}"

    def to_json(self) -> dict[str, Any]:
        """Return `{"rings_gb_per_s": 100.0, "rings_are": "nominal"}`; empty if not known."""
        if self.shown_gb_per_s is None:
            return {}
        name = "rings_gb_per_s" if self.exact else "rings_at_most_gb_per_s"
        return {name: self.gb_per_s, "rings_are": "nominal" if self.nominal else "measured"}


@dataclass(frozen=True)
class Wires:
    """The wires between GPUs, by position."""

    gb_per_s: "Array"  # (gpus, gpus) per direction, symmetric; 0: no wire
    through_port: "Array"  # (gpus, gpus), whether the pair shares its GPUs' ports
    port_gb_per_s: "Array"  # (gpus,) per direction

    @staticmethod
    def of(speeds: "Array", through_port: "Array") -> "Wires":
        """Return wires whose ports carry what their fastest pair does."""
        return Wires(speeds, through_port, (speeds * through_port).max(axis=1, initial=0.0))

    def among(self, members: Sequence[int]) -> "Wires":
        """Return the wires between some of the GPUs."""
        chosen = list(members)
        speeds, shared = self.gb_per_s[chosen][:, chosen], self.through_port[chosen][:, chosen]
        return Wires(speeds, shared, self.port_gb_per_s[chosen])


@dataclass(frozen=True)
class MachineWires:
    """All wires of a machine by the position of its GPUs, and its NVLinks alone, None without."""

    nvlinks: Wires | None
    every: Wires
    nominal: bool

    @staticmethod
    def of(topology: Topology | None, matrix: Matrix | None = None) -> "MachineWires":
        """Return wires with the measured GB/s of a matrix in the topology's order, else nominal.

        The slower direction of a pair counts. A matrix alone does not say which pairs share a port:
        each GPU then sends no more than to its fastest peer.
        """
        import numpy as np

        if matrix is not None:
            speeds = np.minimum(matrix, np.transpose(matrix)).astype(float)
            np.fill_diagonal(speeds, 0.0)
        if topology is None:
            return MachineWires(None, Wires.of(speeds, np.ones(speeds.shape, bool)), nominal=False)
        count = len(topology.gpus)
        nominal, is_nvlink = np.zeros((count, count)), np.zeros((count, count), bool)
        link_counts = set()  # of NVLinks between two GPUs
        for (i, a), (j, b) in combinations(enumerate(topology.devices), 2):
            word = topology.link_between(a.index, b.index)
            links = nvlink_count(word)
            speed = quality(word)  # PCIe classes are in their order only
            if links is not None:
                per_link = [gpu.nvlink_gb_per_s for gpu in (a, b) if gpu.nvlink_gb_per_s]
                speed = links * min(per_link, default=NVLINK_GB_PER_S)
            link_counts.add(links or 0)
            nominal[i, j] = nominal[j, i] = speed
            is_nvlink[i, j] = is_nvlink[j, i] = links is not None
        if matrix is None:
            speeds = nominal
        meet_in_switch = topology.nvswitch
        if meet_in_switch is None:
            links_of_gpu = max(link_counts, default=0) * (count - 1)
            meet_in_switch = len(link_counts) == 1 and links_of_gpu > MOST_NVLINKS
        switch = np.full((count, count), meet_in_switch)
        every, nvlinks = Wires.of(speeds, switch | ~is_nvlink), None
        if is_nvlink.any():
            nvlinks = Wires.of(speeds * is_nvlink, switch)
        return MachineWires(nvlinks, every, nominal=matrix is None)

    def bandwidth(self, members: Sequence[int], quick: bool = False) -> SetBandwidth:
        """Return the bandwidth of the GPUs at these positions, if `quick` by the bound alone."""
        wires, over_nvlink = self.every.among(members), False
        if self.nvlinks is not None:
            nvlinks = self.nvlinks.among(members)
            if has_ring(nvlinks):
                wires, over_nvlink = nvlinks, True
        exact = len(members) == 2 or (len(members) <= EXACT_GPUS and not quick)
        speed = packed_gb_per_s(wires) if exact else bound_gb_per_s(wires)
        return SetBandwidth(speed, over_nvlink, self.nominal, exact)


def set_bandwidth(
    topology: Topology | None, gpus: Sequence[int], matrix: Matrix | None = None
) -> SetBandwidth:
    """Return the bandwidth of a set of GPU ids; without a topology they are 0, 1, …"""
    members = list(gpus)
    if topology:
        members = [topology.gpus.index(gpu) for gpu in gpus]
    return MachineWires.of(topology, matrix).bandwidth(members)


@functools.cache
def _steps(size: int) -> tuple["Array", "Array"]:
    """Return the two ends of each step of every ring through positions 0 to size - 1, (rings, size)
    each. Every ring is there once, from 0, in lexicographic order.
    """
    import numpy as np

    orders = []
    for rest in permutations(range(1, size)):
        if size < 3 or rest[0] < rest[-1]:
            orders.append((0, *rest))
    starts = np.array(orders)
    return starts, np.roll(starts, -1, axis=1)


def has_ring(wires: Wires) -> bool:
    """Tell whether a ring through all GPUs exists; of more than EXACT_GPUS, whether one may."""
    import numpy as np

    joined = wires.gb_per_s > 0
    size = len(joined)
    if size < 2:
        return False
    fewest_peers = joined.sum(axis=1).min()
    if 2 * fewest_peers >= size or size == 2:  # Dirac, Proceedings of the LMS 2, 1952
        return bool(fewest_peers)
    reached = np.linalg.matrix_power(joined + np.eye(size), size)
    if fewest_peers < 2 or not reached.all():
        return False
    return size > EXACT_GPUS or bool(joined[_steps(size)].all(axis=1).any())


def bound_gb_per_s(wires: Wires) -> float:
    """Return an upper bound of the packing, 0 where no ring exists.

    It is what the GPU that can send least can send: a ring leaves a GPU over two different wires,
    so a wire counts for no more than the GPU's others together. Where wires of their own join only
    groups of GPUs, it is also what the ports of a group can send.
    """
    import numpy as np

    if not has_ring(wires):
        return 0.0
    speeds = wires.gb_per_s
    sums, through_ports = speeds.sum(axis=1), (speeds * wires.through_port).sum(axis=1)
    beyond_ports = np.maximum(0.0, through_ports - wires.port_gb_per_s)
    bound = (sums - beyond_ports).min()
    if len(speeds) > 2:
        bound = min(bound, 2 * (sums - speeds.max(axis=1)).min())
    own_wires = (speeds > 0) & ~wires.through_port
    groups = np.linalg.matrix_power(own_wires + np.eye(len(speeds)), len(speeds)) > 0
    for group in groups:
        if not group.all():
            bound = min(bound, wires.port_gb_per_s[group].sum())
    return round(float(bound), DECIMALS)


def packed_gb_per_s(wires: Wires) -> float:
    """Return the GB/s of all rings together through every GPU of `wires`; 0 where no ring exists.

    Exact up to EXACT_GPUS GPUs, an upper bound for more. Of the linear programme a column is a ring
    that runs one way round. The rates over a wire sum to at most its GB/s, and so do the rates
    through a port, counted once for each of a ring's two wires that pass it (half of them go out,
    half come in).
    """
    import numpy as np

    size, bound = len(wires.gb_per_s), bound_gb_per_s(wires)
    a, b = np.triu_indices(size, 1)
    kinds_of_wires = {*zip(wires.gb_per_s[a, b], wires.through_port[a, b], strict=True)}
    are_equal = len(kinds_of_wires) == 1 and len({*wires.port_gb_per_s}) == 1
    if not bound or size == 2 or size > EXACT_GPUS or are_equal:
        return bound
    from scipy.optimize import linprog

    starts, ends = _steps(size)
    usable = (wires.gb_per_s[starts, ends] > 0).all(axis=1)
    ring_count, first_port = usable.sum(), size * size  # rows: a wire each, then a port each
    rates = np.zeros((first_port + size, ring_count))
    column = np.arange(ring_count)
    for start, end in zip(starts[usable].T, ends[usable].T, strict=True):
        wire = size * np.minimum(start, end) + np.maximum(start, end)
        rates[wire, column] += 1
        for port in (first_port + start, first_port + end):
            rates[port, column] += wires.through_port[start, end]
    limits = np.concatenate((wires.gb_per_s.ravel(), wires.port_gb_per_s))
    programme = linprog(np.full(ring_count, -1.0), A_ub=rates, b_ub=limits)
    return round(min(-2 * float(programme.fun), bound), DECIMALS)


@dataclass(frozen=True)
class Ring:
    """GPUs in ring order, each linked to the next and the last to the first."""

    order: tuple[int, ...]
    links: dict[str, int]  # counts of link classes; empty without a topology
    slowest_gb_per_s: float | None  # of its links; None without a measured matrix
    sum_gb_per_s: float | None
    bandwidth: SetBandwidth | None = None  # of the set, whatever its order

    @property
    def speed(self) -> str:
        """The bandwidth in brackets, where it is known."""
        if self.bandwidth is None or self.bandwidth.shown_gb_per_s is None:
            return ""
        return f" ({self.bandwidth.describe()})"

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
        if best.bandwidth != worst.bandwidth:
            return (
                f"{best.describe()} is the best {kind}: its rings are the fastest{best.speed}; "
                f"the worst is {worst.describe()}{worst.speed}."
            )
        if (best.links, best.slowest_gb_per_s) == (worst.links, worst.slowest_gb_per_s):
            return f"Every {kind} of this machine is as good as {best.describe()}."
        return (
            f"Every {kind} can pack rings of the same bandwidth{best.speed}; "
            f"{best.describe()} has the best ring, {worst.describe()} the worst."
        )


def choose_gpus(topology: Topology | None, count: int, matrix: Matrix | None = None) -> Placement:
    """Return the best and the worst set of `count` GPUs, and the worst order of the best.

    `matrix` is in the topology's order, else of GPUs 0, 1, …; the slower way of a pair counts.

    Raises ValueError: more GPUs than there are or than can be searched, or neither source given.
    """
    if topology is None and matrix is None:
        raise ValueError("no machine to place on; expected a topology and a measured matrix")
    gpus = len(topology.gpus if topology else matrix or ())
    if matrix is not None and len(matrix) != gpus:
        raise ValueError(
            f"a matrix of {len(matrix)} GPUs; expected one of {gpus}, as the topology has"
        )
    if not 1 <= count <= gpus:
        raise ValueError(
            f"--gpus {count}: the machine has {gpus} GPUs; expected a number from 1 to {gpus}"
        )
    if gpus > MOST_GPUS:
        raise ValueError(
            f"a machine of {gpus} GPUs; expected at most {MOST_GPUS}, for which the search is short"
        )
    machine = _MachineRings(topology, matrix)
    best, worst = machine.best_and_worst(count)
    return Placement(machine.ring(best), machine.ring(worst), machine.ring(best, True))


def best_ring(topology: Topology, gpus: Sequence[int]) -> Ring:
    """Return 2 to MOST_GPUS GPUs in their best order, with the nominal bandwidth of the set."""
    members = [topology.gpus.index(gpu) for gpu in sorted(gpus)]
    return _MachineRings(topology, None).ring(members)


class _MachineRings:
    """A machine's GPUs by position: their wires, and the weights that order its rings."""

    def __init__(self, topology: Topology | None, matrix: Matrix | None) -> None:
        import numpy as np

        self.topology = topology
        self.wires = MachineWires.of(topology, matrix)
        weights = self.wires.every.gb_per_s  # measured
        self.ids: Sequence[int] = range(len(weights))
        if topology:
            self.ids = topology.gpus
        if topology and matrix is None:
            weights = np.zeros(weights.shape)
            for (i, a), (j, b) in combinations(enumerate(self.ids), 2):
                weights[i, j] = weights[j, i] = quality(topology.link_between(a, b))
        self.weights = np.rint(weights * WEIGHT_SCALE)

    def order(self, members: Sequence[int], in_worst: bool = False) -> list[int]:
        """Return the best ring through these positions, or the worst; of equals the smallest first.

        Best: the highest slowest link, then the largest sum. Worst: the lowest slowest link, then
        the smallest sum. More than EXACT_GPUS positions keep their order.
        """
        import numpy as np

        if len(members) > EXACT_GPUS:
            return list(members)
        starts, ends = _steps(len(members))
        links = self.weights[np.ix_(members, members)][starts, ends]
        slowest, sums = links.min(axis=1), links.sum(axis=1)
        first = np.lexsort((sums, slowest) if in_worst else (-sums, -slowest))[0]
        return [members[position] for position in starts[first]]

    def best_and_worst(self, count: int) -> tuple[Members, Members]:
        """Return the positions of the best and of the worst set, smallest first among equals."""
        sets = list(combinations(range(len(self.ids)), count))
        if count == 1 or len(sets) == 1:
            return sets[0], sets[0]
        if len(self.ids) <= EXACT_GPUS:
            ranks = {}
            for members in sets:
                order = self.order(members)
                links = [self.weights[a, b] for a, b in _links(order)]
                ranks[members] = self.wires.bandwidth(members).gb_per_s, min(links), sum(links)
            return max(sets, key=ranks.__getitem__), min(sets, key=ranks.__getitem__)
        bounds, speeds = {}, {}
        for members in sets:
            bounds[members] = self.wires.bandwidth(members, quick=True).gb_per_s
        highest = sorted(sets, key=bounds.__getitem__, reverse=True)[:REFINED_SETS]
        lowest = sorted(sets, key=bounds.__getitem__)[:REFINED_SETS]
        for members in {*highest, *lowest}:
            speeds[members] = self.wires.bandwidth(members).gb_per_s
        return max(highest, key=speeds.__getitem__), min(lowest, key=speeds.__getitem__)

    def ring(self, members: Sequence[int], in_worst_order: bool = False) -> Ring:
        order = self.order(members, in_worst_order)
        ids = tuple(self.ids[position] for position in order)
        if len(ids) < 2:
            return Ring(ids, {}, None, None)
        words, speeds = [], []
        for a, b in _links(order):
            if self.topology:
                words.append(self.topology.link_between(self.ids[a], self.ids[b]))
            speeds.append(float(self.wires.every.gb_per_s[a, b]))
        links, bandwidth = count_classes(words), self.wires.bandwidth(members)
        if self.wires.nominal:
            return Ring(ids, links, None, None, bandwidth)
        return Ring(ids, links, min(speeds), math.fsum(speeds), bandwidth)


def _links(order: Sequence[int]) -> list[tuple[int, int]]:
    """Return the two ends of each link of a ring; two GPUs have one link."""
    links = list(pairwise([*order, order[0]]))
    return links[:1] if len(order) == 2 else links
