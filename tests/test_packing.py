"""The bandwidth of a set: rings packed onto its wires, against a linear programme over all Hamiltonian cycles."""

import random
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog

from analysis.topology.model import Gpu, Topology
from analysis.topology.packing import Wires, bound_gb_per_s, has_ring, packed_gb_per_s
from analysis.topology.smi_text import parse_topology_text
from analysis.topology.wires import MachineWires, set_bandwidth

DATA = Path(__file__).parent / "data"
DGX1, PCIE, H200 = (
    parse_topology_text((DATA / f"topo_{name}.txt").read_text())
    for name in ("dgx1_v100", "a100_pcie_x4", "h200_x8")
)


def programme(wires):
    """Both directions of every ring, with a rate each: the sum of the rates, by scipy."""
    size = len(wires.gb_per_s)
    directed = {pair: at for at, pair in enumerate(permutations(range(size), 2))}
    rings = {(0, *rest) for rest in permutations(range(1, size))}
    rows = np.zeros((len(directed) + 2 * size, len(rings)))
    for column, ring in enumerate(sorted(rings)):
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
            rows[directed[a, b], column] += 1
            if wires.through_port[a][b]:
                rows[len(directed) + a, column] += 1  # out of the port
                rows[len(directed) + size + b, column] += 1  # into the port
    limits = [wires.gb_per_s[a][b] for a, b in directed] + 2 * list(wires.port_gb_per_s)
    return -linprog(-np.ones(len(rings)), A_ub=rows, b_ub=limits, method="highs").fun


def check(wires):
    expected = programme(wires)
    assert packed_gb_per_s(wires) == pytest.approx(expected, abs=2e-3)
    assert bound_gb_per_s(wires) >= expected - 2e-3
    assert has_ring(wires) == (expected > 0)


@pytest.mark.parametrize("size", range(2, 8))
def test_dgx1(size):
    machine = MachineWires.of(DGX1)
    for members in list(combinations(range(8), size))[:: 3 if size > 3 else 1]:
        for wires in (machine.nvlinks, machine.every):
            check(wires.among(members))


def test_pcie_and_nvswitch_machines():
    for topology, sizes in ((PCIE, (2, 3, 4)), (H200, (2, 4, 6))):
        machine = MachineWires.of(topology)
        for size in sizes:
            check(machine.every.among(range(size)))


@pytest.mark.parametrize("seed", range(24))
def test_random_machines(seed):
    chance = random.Random(seed)
    size = 3 + seed % 4
    speeds = ([0, 25, 50], [25, 50], range(1, 100))[seed % 3]
    matrix, shared = ([[0.0] * size for _ in range(size)] for _ in range(2))
    for a, b in combinations(range(size), 2):
        matrix[a][b] = matrix[b][a] = float(chance.choice(speeds))
        shared[a][b] = shared[b][a] = chance.random() < (seed % 4) / 3
    ports = tuple(float(chance.choice([20, 50, 100])) for _ in range(size))
    check(Wires(tuple(map(tuple, matrix)), tuple(tuple(map(bool, row)) for row in shared), ports))


@pytest.mark.parametrize(
    ("gpus", "gb_per_s"),
    [
        ((0, 3), 50), ((0, 1), 25), ((0, 1, 2, 3), 100), (range(8), 150),
        ((0, 1, 4, 5, 6, 7), 50), ((0, 1, 2, 4, 5, 6), 100),
    ],
)  # fmt: skip
def test_dgx1_by_hand(gpus, gb_per_s):
    """Three rings of 25 GB/s, both ways round, cover all six NVLinks of each of the 8 GPUs."""
    found = set_bandwidth(DGX1, gpus)
    assert (found.gb_per_s, found.over_nvlink, found.nominal) == (gb_per_s, True, True)


def test_rings_over_pcie_have_no_nominal_speed():
    found = set_bandwidth(DGX1, (0, 5))
    assert (found.over_nvlink, found.shown_gb_per_s, found.to_json()) == (False, None, {})
    assert found.describe() == "over PCIe"
    measured = set_bandwidth(
        PCIE, (0, 1, 2), [[0, 270, 20, 20], [270, 0, 20, 20], [20, 20, 0, 270], [20, 20, 270, 0]]
    )
    assert measured.to_json() == {"rings_gb_per_s": 20.0, "rings_are": "measured"}


def test_a_switch_gives_a_gpu_its_port_and_a_mesh_every_wire():
    assert set_bandwidth(H200, range(8)).gb_per_s == 450
    links = {frozenset(pair): "NV4" for pair in combinations(range(4), 2)}
    mesh = Topology(
        tuple(Gpu(gpu) for gpu in range(4)),
        (),
        links,
        None,
        "four A100s that NVLinks join directly",
    )
    assert set_bandwidth(mesh, range(4)).gb_per_s == 300
    one_slow = [[0.0 if a == b else 390.0 for b in range(8)] for a in range(8)]
    one_slow[0][1] = one_slow[1][0] = 100.0
    assert set_bandwidth(H200, (0, 1), one_slow).gb_per_s == 100
    assert set_bandwidth(H200, (0, 1, 2, 3), one_slow).gb_per_s == 390  # rings go round it
    assert set_bandwidth(None, (0, 1, 2, 3), one_slow).gb_per_s == 390


def test_more_than_eight_gpus_have_an_upper_bound():
    links = {
        frozenset((a, b)): DGX1.link_between(a % 8, b % 8) if a // 8 == b // 8 else "SYS"
        for a, b in combinations(range(16), 2)
    }
    two = Topology(tuple(Gpu(gpu) for gpu in range(16)), (), links, None, "two DGX-1")
    found = MachineWires.of(two).bandwidth(range(9))
    assert (found.over_nvlink, found.exact) == (False, False)
    assert found.gb_per_s == 8, "the ninth GPU has a PCIe port alone"
    assert (
        "at most 450"
        in set_bandwidth(
            Topology(
                tuple(map(Gpu, range(9))),
                (),
                dict.fromkeys(map(frozenset, combinations(range(9), 2)), "NV18"),
                None,
                "",
            ),
            range(9),
        ).describe()
    )
