"""Placement: the best and the worst set and order, against brute force and on the captured machines."""

import json
import random
from itertools import combinations, permutations
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.commands.place import read_matrix
from analysis.errors import UnreadableInput
from analysis.topology.placement import place
from analysis.topology.smi_text import parse_topology_text
from analysis.topology.wires import set_bandwidth

DATA = Path(__file__).parent / "data"
DGX1 = parse_topology_text((DATA / "topo_dgx1_v100.txt").read_text())
H200 = parse_topology_text((DATA / "topo_h200_x8.txt").read_text())


def symmetric(count, seed, values):
    chance = random.Random(seed)
    matrix = [[0.0] * count for _ in range(count)]
    for a, b in combinations(range(count), 2):
        matrix[a][b] = matrix[b][a] = float(chance.choice(values))
    return matrix


def ring_values(matrix, order):
    links = [matrix[a][b] for a, b in zip(order, (*order[1:], order[0]), strict=True)]
    return (min(links), links[0]) if len(order) == 2 else (min(links), sum(links))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_best_and_worst_equal_brute_force(seed, count):
    """Of all sets, ranked by bandwidth; among equal sets and within one, by the slowest link and the sum of every order."""
    matrix = symmetric(6, seed, [1, 2, 3] if seed % 2 else range(1, 100))
    every = {
        members: (
            set_bandwidth(None, members, matrix).gb_per_s,
            [ring_values(matrix, o) for o in permutations(members)],
        )
        for members in combinations(range(6), count)
    }
    placement = place(None, count, matrix)
    best, worst = (
        max((gb, max(rings)) for gb, rings in every.values()),
        min((gb, max(rings)) for gb, rings in every.values()),
    )
    for ring, expected in ((placement.best, best), (placement.worst, worst)):
        assert (ring.bandwidth.gb_per_s, ring_values(matrix, ring.order)) == expected
        assert (ring.slowest_gb_per_s, ring.sum_gb_per_s) == expected[1]
        assert len(set(ring.order)) == count
    assert set(placement.worst_order.order) == set(placement.best.order)
    assert ring_values(matrix, placement.worst_order.order) == min(
        every[tuple(sorted(placement.best.order))][1]
    )


def test_sets_are_ranked_by_all_rings_that_fit():
    """The best single ring of six GPUs leaves GPU 0 of 0,1,4,5,6,7 one NVLink to GPU 1: half of what four other sets carry."""
    placement = place(DGX1, 6)
    assert placement.best.bandwidth.gb_per_s == 100
    assert placement.worst.bandwidth.gb_per_s == 50
    assert set_bandwidth(DGX1, (0, 1, 4, 5, 6, 7)).gb_per_s == 50
    placements = [place(DGX1, count) for count in range(2, 9)]
    assert [one.best.bandwidth.gb_per_s for one in placements] == [50, 50, 100, 50, 100, 100, 150]
    assert [one.worst.bandwidth.shown_gb_per_s for one in placements] == [
        None,
        None,
        None,
        None,
        50,
        100,
        150,
    ]


@pytest.mark.parametrize(
    ("count", "order", "links"),
    [
        (1, (0,), {}),
        (2, (0, 3), {"NV2": 1}),
        (4, (0, 1, 2, 3), {"NV2": 3, "NV1": 1}),
        (8, (0, 3, 2, 1, 5, 6, 7, 4), {"NV2": 8}),
    ],
)
def test_dgx1(count, order, links):
    best = place(DGX1, count).best
    assert (best.order, best.links) == (order, links)


def test_the_reason_names_what_the_rings_carry_and_the_worst_choice():
    placement = place(DGX1, 4)
    assert placement.worst_order.links == {"NV2": 1, "NV1": 3}
    assert "is the best set of 4 GPUs: its rings carry most (100 GB/s nominal)" in placement.reason
    assert "0-1-2-7" in placement.reason and "SYS" in placement.reason


def test_where_all_links_are_equal_the_reason_says_so():
    placement = place(H200, 4)
    assert placement.best.order == (0, 1, 2, 3)
    assert placement.reason.startswith("Every set of 4 GPUs of this machine is as good")


def test_measured_bandwidths_decide_over_classes():
    matrix = [[0.0 if a == b else 392.0 for b in range(8)] for a in range(8)]
    matrix[0][1] = 100.0  # one direction is slow: the pair is
    placement = place(H200, 2, matrix)
    assert placement.best.order == (0, 2)
    assert placement.worst.order == (0, 1)
    assert placement.worst.slowest_gb_per_s == 100.0
    assert "100.0 GB/s" in placement.reason


def test_order_matters_on_four_gpus():
    """Two NVLink pairs: a ring crosses sockets twice when pairs stay together, four times when they do not."""
    a100 = parse_topology_text((DATA / "topo_a100_pcie_x4.txt").read_text())
    placement = place(a100, 4)
    assert (placement.best.order, placement.best.links) == ((0, 1, 2, 3), {"NV12": 2, "SYS": 2})
    assert placement.worst == placement.best, "all four GPUs are one set"
    assert (placement.worst_order.order, placement.worst_order.links) == ((0, 2, 1, 3), {"SYS": 4})


def test_sixteen_gpus_are_exact():
    matrix = symmetric(16, 1, [10, 20, 50])
    for a in range(16):
        matrix[a][(a + 1) % 16] = matrix[(a + 1) % 16][a] = 90.0
    assert place(None, 16, matrix).best.order == tuple(range(16))


def test_of_more_than_eight_gpus_the_order_is_the_dynamic_programmes():
    """Nine GPUs are too many to try every ring: the programme's values are those of brute force on a ring of eight and one."""
    matrix = symmetric(9, 5, [10, 20, 50])
    for at in range(8):
        matrix[8][at] = matrix[at][8] = 30.0
    placement = place(None, 9, matrix)
    every = [
        ring_values(matrix, (8, *order)) for order in permutations(range(8)) if order[0] < order[-1]
    ]
    assert ring_values(matrix, placement.best.order) == max(every)
    assert ring_values(matrix, placement.worst_order.order) == min(every)


def test_a_larger_machine_is_ranked_by_a_bound():
    matrix = [
        [0.0 if a == b else 10.0 if a < 4 and b < 4 else 50.0 for b in range(10)] for a in range(10)
    ]
    placement = place(None, 4, matrix)
    assert placement.worst.order == (0, 1, 2, 3)
    assert (placement.best.bandwidth.gb_per_s, placement.worst.bandwidth.gb_per_s) == (50, 30)


@pytest.mark.parametrize("count", [0, 9, -2])
def test_impossible_counts_are_refused(count):
    with pytest.raises(
        ValueError, match=f"--gpus {count}: accepted are 1 to 8, the GPUs of this machine"
    ):
        place(DGX1, count)


def test_p2p_json_at_any_depth_or_bare():
    matrix = [[1500.0, 392.0], [391.0, 1500.0]]
    expected = [[0.0, 392.0], [391.0, 0.0]]
    contract = {
        "devices": ["a", "b"],
        "access": {"0-1": True},
        "matrices": {"unidirectional_enabled": matrix},
    }
    for document in (contract, {"result": {"p2p": contract}}, matrix):
        assert read_matrix(json.dumps(document), "file") == expected


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
        (
            '{"matrices": {"bidirectional_enabled": [[1, 2], [2, 1]]}}',
            "no matrices.unidirectional_enabled",
        ),
    ],
)
def test_unreadable_p2p(text, message):
    with pytest.raises(UnreadableInput, match=message):
        read_matrix(text, "file")


def test_command(tmp_path, capsys):
    file = str(DATA / "topo_dgx1_v100.txt")
    assert main(["place", "--gpus", "4", "--topology", file, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    links = {"links": {"NV2": 3, "NV1": 1}}
    assert (
        shown["best"]
        == {"gpus": [0, 1, 2, 3], "rings_gb_per_s": 100.0, "rings_are": "nominal"} | links
    )
    assert shown["worst"] == {"gpus": [0, 1, 2, 7], "links": {"NV2": 1, "NV1": 1, "SYS": 2}}
    assert shown["worst_order"]["links"] == {"NV2": 1, "NV1": 3}
    assert main(["place", "--gpus", "4", "--topology", file]) == 0
    out = capsys.readouterr().out
    assert "0,1,2,3" in out and "100 GB/s nominal" in out and "worst order" in out
    (tmp_path / "p2p.json").write_text(json.dumps(symmetric(8, 3, [10, 20])))
    assert (
        main(["place", "--gpus", "3", "--topology", file, "--p2p", str(tmp_path / "p2p.json")]) == 0
    )
    assert "sum GB/s" in capsys.readouterr().out
    (tmp_path / "p2p.json").write_text(json.dumps(symmetric(4, 3, [10, 20])))
    assert (
        main(["place", "--gpus", "3", "--topology", file, "--p2p", str(tmp_path / "p2p.json")]) == 2
    )
    assert (
        "a matrix of 4 GPUs; accepted is one of 8, as the topology has" in capsys.readouterr().err
    )
    assert main(["place", "--gpus", "9", "--topology", file]) == 2
