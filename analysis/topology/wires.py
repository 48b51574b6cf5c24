"""The bandwidth of a set of GPUs: what the rings that NCCL can pack onto its wires carry together.

This is the one bandwidth of a set in Ringside: `best` and `worst` rank by it, `subsets` and `place` print it, and findings
compare exchanges with it. NCCL runs several rings at once, so it is not that of the best ring alone.

Rings cross NVLinks alone wherever such a ring exists, otherwise PCIe too. Through an NVSwitch, and over PCIe, all wires of
a GPU share its port. What PCIe switches and sockets share is in no topology and is not counted, nor are wires through
GPUs outside the set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.topology.link_classes import NVLINK_GB_PER_S, nvlink_count, quality
from analysis.topology.model import Topology
from analysis.topology.packing import (
    EXACT_GPUS,
    Matrix,
    Wires,
    bound_gb_per_s,
    has_ring,
    packed_gb_per_s,
)

_MOST_NVLINKS = (
    18  # of any GPU before Blackwell: where equal pairs would need more, they meet in a switch
)


@dataclass(frozen=True)
class SetBandwidth:
    """What packed rings carry, in GB/s per direction. `nominal`: from link counts and data sheets, not measured."""

    gb_per_s: float
    over_nvlink: bool  # over NVLinks alone
    nominal: bool
    exact: bool  # else an upper bound

    @property
    def shown_gb_per_s(self) -> float | None:
        """The GB/s where they are known: there is no nominal speed of a path over PCIe between sockets."""
        return self.gb_per_s if self.over_nvlink or not self.nominal else None

    def describe(self) -> str:
        """Return `100 GB/s nominal`, `at most 372.1 GB/s measured`, or `over PCIe` where no number is known."""
        if self.shown_gb_per_s is None:
            return "over PCIe"
        number = (
            f"{self.gb_per_s:g} GB/s nominal"
            if self.nominal
            else f"{self.gb_per_s:.1f} GB/s measured"
        )
        return number if self.exact else f"at most {number}"

    def to_json(self) -> dict[str, Any]:
        """Return `{"rings_gb_per_s": 100.0, "rings_are": "nominal"}`; `rings_at_most_gb_per_s` is an upper bound.

        Empty where no number is known.
        """
        if self.shown_gb_per_s is None:
            return {}
        name = "rings_gb_per_s" if self.exact else "rings_at_most_gb_per_s"
        return {name: self.gb_per_s, "rings_are": "nominal" if self.nominal else "measured"}


@dataclass(frozen=True)
class MachineWires:
    """All wires of a machine, by the position of its GPUs, and its NVLinks alone (None where there is none)."""

    nvlinks: Wires | None
    every: Wires
    nominal: bool

    @staticmethod
    def of(
        topology: Topology | None, matrix: Sequence[Sequence[float]] | None = None
    ) -> "MachineWires":
        """Return wires with the measured GB/s of a matrix, in the topology's order; without one, with nominal GB/s.

        A matrix alone does not say which pairs share a port: each GPU then sends no more than to its fastest peer.
        """
        if topology is None:
            speeds = _slower_direction(matrix or ())
            return MachineWires(
                None, _wires(speeds, [[True] * len(speeds) for _ in speeds]), nominal=False
            )
        words = [
            [topology.link_between(a, b) if a != b else "" for b in topology.gpus]
            for a in topology.gpus
        ]
        direct = [[nvlink_count(word) is not None for word in row] for row in words]
        speeds = _nominal(topology, words) if matrix is None else _slower_direction(matrix)
        switch = _meet_in_switch(topology, words)
        every = _wires(speeds, [[switch or not one for one in row] for row in direct])
        only = [
            [gb if one else 0.0 for gb, one in zip(*rows, strict=True)]
            for rows in zip(speeds, direct, strict=True)
        ]
        nvlinks = (
            _wires(only, [[switch] * len(words) for _ in words]) if any(map(any, direct)) else None
        )
        return MachineWires(nvlinks, every, nominal=matrix is None)

    def bandwidth(self, members: Sequence[int], quick: bool = False) -> SetBandwidth:
        """Return the bandwidth of the GPUs at these positions: exact up to 8 GPUs, an upper bound for more, or if `quick`."""
        chosen, over_nvlink = self.among(members)
        exact = len(members) <= EXACT_GPUS and (not quick or len(members) == 2)
        speed = packed_gb_per_s(chosen) if exact else bound_gb_per_s(chosen)
        return SetBandwidth(speed, over_nvlink, self.nominal, exact)

    def among(self, members: Sequence[int]) -> tuple[Wires, bool]:
        """Return the wires that rings through these positions cross, and whether they are NVLinks alone."""
        direct = self.nvlinks.among(members) if self.nvlinks is not None else None
        if direct is not None and has_ring(direct):
            return direct, True
        return self.every.among(members), False


def set_bandwidth(
    topology: Topology | None, gpus: Sequence[int], matrix: Sequence[Sequence[float]] | None = None
) -> SetBandwidth:
    """Return the bandwidth of a set of GPU ids. `matrix` holds the measured GB/s in the topology's order."""
    names = topology.gpus if topology else tuple(range(len(matrix or ())))
    return MachineWires.of(topology, matrix).bandwidth([names.index(gpu) for gpu in gpus])


def _wires(speeds: Sequence[Sequence[float]], shared: Sequence[Sequence[bool]]) -> Wires:
    """Return wires whose ports carry what the fastest pair through them does."""
    ports = [
        max((gb for gb, one in zip(*rows, strict=True) if one), default=0.0)
        for rows in zip(speeds, shared, strict=True)
    ]
    return Wires(tuple(map(tuple, speeds)), tuple(map(tuple, shared)), tuple(ports))


def _slower_direction(matrix: Sequence[Sequence[float]]) -> Matrix:
    places = range(len(matrix))
    return tuple(
        tuple(min(matrix[a][b], matrix[b][a]) if a != b else 0.0 for b in places) for a in places
    )


def _nominal(topology: Topology, words: Sequence[Sequence[str]]) -> Matrix:
    """Return GB/s by link class; an NVLink of an unknown GPU counts as 25 GB/s. PCIe classes are in their order only."""

    def speed(a: int, b: int) -> float:
        count = nvlink_count(words[a][b])
        if count is None:
            return quality(words[a][b]) if a != b else 0.0
        known = [
            gpu.nvlink_gb_per_s
            for gpu in (topology.devices[a], topology.devices[b])
            if gpu.nvlink_gb_per_s
        ]
        return count * min(known, default=NVLINK_GB_PER_S)

    return tuple(tuple(speed(a, b) for b in range(len(words))) for a in range(len(words)))


def _meet_in_switch(topology: Topology, words: Sequence[Sequence[str]]) -> bool:
    """Tell whether the NVLinks of a GPU lead into a switch. Where the source cannot tell, the number of links does."""
    if topology.nvswitch is not None:
        return topology.nvswitch
    counts = [
        nvlink_count(word) for a, row in enumerate(words) for b, word in enumerate(row) if a != b
    ]
    return len(set(counts)) == 1 and (counts[0] or 0) * (len(words) - 1) > _MOST_NVLINKS
