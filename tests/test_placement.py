"""Sets of GPUs: their bandwidth against a linear programme, best and worst against brute force."""

import json
import random
from itertools import combinations, permutations, product

import numpy as np
import pytest
from build import DATA
from scipy.optimize import linprog

from analysis.input_files import UnreadableInput
from analysis.native.p2p import parse_bandwidths
from analysis.topology.model import Gpu, Topology
from analysis.topology.placement import (
    MachineWires,
    Wires,
    bound_gb_per_s,
    choose_gpus,
    has_ring,
    packed_gb_per_s,
    set_bandwidth,
)
from analysis.topology.readers import parse_topology_text

DGX1, PCIE, H200 = (
    parse_topology_text((DATA / f"topo_{name}.txt").read_text())
    for name in ("dgx1_v100", "a100_pcie_x4", "h200_x8")
)


def symmetric(count, seed, values):
    chance = random.Random(seed)
    matrix = [[0.0] * count for _ in range(count)]
    for a, b in combinations(range(count), 2):
        matrix[a][b] = matrix[b][a] = float(chance.choice(values))
    return matrix


def ring_values(matrix, order):
    links = [matrix[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    return (min(links), links[0]) if len(order) == 2 else (min(links), sum(links))


@pytest.mark.parametrize(("seed", "count"), list(product(range(2), (2, 3, 4, 6))))
def test_best_and_worst_equal_brute_force(seed, count):
    """By bandwidth; among equal sets and within one, by slowest link and sum of an order."""
    matrix = symmetric(6, seed, [1, 2, 3] if seed % 2 else range(1, 100))
    orders, ranking = {}, []
    for members in combinations(range(6), count):
        orders[members] = [ring_values(matrix, order) for order in permutations(members)]
        bandwidth = set_bandwidth(None, members, matrix).gb_per_s
        ranking.append((bandwidth, max(orders[members])))
    placement = choose_gpus(None, count, matrix)
    for ring, expected in ((placement.best, max(ranking)), (placement.worst, min(ranking))):
        assert (ring.bandwidth.gb_per_s, ring_values(matrix, ring.order)) == expected
        assert (ring.slowest_gb_per_s, ring.sum_gb_per_s) == expected[1]
        assert len(set(ring.order)) == count
    best = tuple(sorted(placement.best.order))
    assert tuple(sorted(placement.worst_order.order)) == best
    assert ring_values(matrix, placement.worst_order.order) == min(orders[best])


def test_measured_bandwidths_decide_over_classes():
    matrix = [[0.0 if a == b else 392.0 for b in range(8)] for a in range(8)]
    matrix[0][1] = 100.0  # one direction is slow: the pair is
    placement = choose_gpus(H200, 2, matrix)
    assert (placement.best.order, placement.worst.order) == ((0, 2), (0, 1))
    assert placement.worst.slowest_gb_per_s == 100.0 and "100.0 GB/s" in placement.reason


def test_a_larger_machine_is_ranked_by_a_bound_and_keeps_the_order_of_its_ids():
    speeds = [[10.0 if a < 4 and b < 4 else 50.0 for b in range(10)] for a in range(10)]
    placement = choose_gpus(None, 4, speeds)
    assert placement.worst.order == (0, 1, 2, 3)
    assert (placement.best.bandwidth.gb_per_s, placement.worst.bandwidth.gb_per_s) == (50, 30)
    for ring in choose_gpus(None, 9, symmetric(10, 1, [10, 20, 50])).rings().values():
        assert list(ring.order) == sorted(ring.order) and len(ring.order) == 9


def test_p2p_json_of_the_command_of_a_record_or_bare():
    matrix = [[1500.0, 392.0], [391.0, 1500.0]]
    contract = {"devices": ["a", "b"], "matrices": {"unidirectional_enabled": matrix}}
    for document in (contract, {"tables": {"p2p": contract}}, matrix):
        assert parse_bandwidths(json.dumps(document)) == [[0.0, 392.0], [391.0, 0.0]]


def test_the_command_refuses_a_matrix_of_another_machine(tmp_path, refusal):
    """tests/golden/place.txt and refusals.txt have what else it answers."""
    (tmp_path / "p2p.json").write_text(json.dumps(symmetric(4, 3, [10, 20])))
    topology, matrix = DATA / "topo_dgx1_v100.txt", tmp_path / "p2p.json"
    said = refusal("place", "--topology", topology, "--gpus", "3", "--p2p", matrix)
    assert "a matrix of 4 GPUs; expected one of 8, as the topology has" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "no matrices.unidirectional_enabled"),
        ("[]", "not square"),
        ("[[1, 2]]", "not square"),
        ("[[1, null], [2, 1]]", "GPU 0 to GPU 1 is None"),
        ("[[1, 0], [2, 1]]", "GPU 0 to GPU 1 is 0"),
        ("[[1, NaN], [2, 1]]", "GPU 0 to GPU 1 is nan"),
        ('{"matrices": {"bidirectional_enabled": [[1, 2], [2, 1]]}}', "no matrices.unidirectional"),
    ],
)  # fmt: skip
def test_unreadable_p2p(text, message):
    with pytest.raises(UnreadableInput, match=message):
        parse_bandwidths(text)


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


@pytest.mark.parametrize("topology", [DGX1, PCIE, H200], ids=["dgx1", "pcie", "nvswitch"])
def test_rings_of_machines(topology):
    machine = MachineWires.of(topology)
    for size in range(2, min(len(topology.gpus), 6) + 1):
        for members in list(combinations(range(len(topology.gpus)), size))[::9]:
            for wires in filter(None, (machine.nvlinks, machine.every)):
                check(wires.among(members))


@pytest.mark.parametrize("seed", range(16))
def test_random_machines(seed):
    chance = random.Random(seed)
    size = 3 + seed % 4
    speeds = ([0, 25, 50], [25, 50], range(1, 100))[seed % 3]
    matrix, shared = ([[0.0] * size for _ in range(size)] for _ in range(2))
    for a, b in combinations(range(size), 2):
        matrix[a][b] = matrix[b][a] = float(chance.choice(speeds))
        shared[a][b] = shared[b][a] = chance.random() < (seed % 4) / 3
    ports = tuple(float(chance.choice([20, 50, 100])) for _ in range(size))
    check(Wires(np.array(matrix), np.array(shared, bool), np.array(ports)))


def test_rings_over_pcie_have_no_nominal_speed():
    found = set_bandwidth(DGX1, (0, 5))
    assert (found.over_nvlink, found.shown_gb_per_s, found.to_json()) == (False, None, {})
    assert found.describe() == "no NVLink ring"
    matrix = [[0, 270, 20, 20], [270, 0, 20, 20], [20, 20, 0, 270], [20, 20, 270, 0]]
    measured = set_bandwidth(PCIE, (0, 1, 2), matrix)
    assert measured.to_json() == {"rings_gb_per_s": 20.0, "rings_are": "measured"}


def test_a_switch_gives_a_gpu_its_port_and_a_mesh_every_wire():
    assert set_bandwidth(H200, range(8)).gb_per_s == 450
    four_a100 = joined(4, lambda a, b: "NV4")
    assert set_bandwidth(four_a100, range(4)).gb_per_s == 300
    one_slow = [[0.0 if a == b else 390.0 for b in range(8)] for a in range(8)]
    one_slow[0][1] = one_slow[1][0] = 100.0
    assert set_bandwidth(H200, (0, 1), one_slow).gb_per_s == 100
    assert set_bandwidth(H200, (0, 1, 2, 3), one_slow).gb_per_s == 390  # rings go round it
    assert set_bandwidth(None, (0, 1, 2, 3), one_slow).gb_per_s == 390


def joined(count, word):
    """A machine of GPUs alone; `word` gives the link class of a pair."""
    links = {frozenset(pair): word(*pair) for pair in combinations(range(count), 2)}
    return Topology(tuple(map(Gpu, range(count))), (), links, None, "")


def test_more_than_eight_gpus_have_an_upper_bound():
    def two_dgx1(a, b):
        return DGX1.link_between(a % 8, b % 8) if a // 8 == b // 8 else "SYS"

    found = MachineWires.of(joined(16, two_dgx1)).bandwidth(range(9))
    assert (found.over_nvlink, found.exact) == (False, False)
    assert found.gb_per_s == 8, "the ninth GPU has a PCIe port alone"
    assert "at most 450" in set_bandwidth(joined(9, lambda a, b: "NV18"), range(9)).describe()
