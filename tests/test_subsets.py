"""Subset classes: the machines' numbers, and agreement with networkx on small random graphs."""

import random
from itertools import combinations

import networkx
import pytest
from build import DATA

from analysis.topology.model import Gpu, Topology
from analysis.topology.readers import parse_topology_text
from analysis.topology.subset_classes import subset_classes

DGX1 = parse_topology_text((DATA / "topo_dgx1_v100.txt").read_text())


def machine(count, word):
    """A topology from a function of two GPU ids."""
    links = {frozenset(pair): word(*pair) for pair in combinations(range(count), 2)}
    return Topology(tuple(Gpu(gpu) for gpu in range(count)), (), links, None, "test")


def test_second_member_has_the_links_of_its_class():
    for one in subset_classes(DGX1):
        assert (one.second_member is None) == (one.members == 1)
        if one.second_member is not None:
            words = [DGX1.link_between(a, b) for a, b in combinations(one.second_member, 2)]
            assert {word: words.count(word) for word in words} == one.links


@pytest.mark.parametrize(("seed", "count"), [(0, 5), (1, 5), (2, 7), (3, 7)])
def test_classes_agree_with_networkx(seed, count):
    chance = random.Random(seed)
    words = ["NV2", "SYS"] if seed % 2 else ["NV1", "NV2", "SYS"]
    topology = machine(count, lambda a, b: chance.choice(words))
    for size in (3, 4, 5):
        members: dict[networkx.Graph, int] = {}
        for subset in combinations(range(count), size):
            graph = networkx.Graph()
            for a, b in combinations(subset, 2):
                graph.add_edge(a, b, word=topology.link_between(a, b))
            for other in members:
                if networkx.is_isomorphic(graph, other, edge_match=dict.__eq__):
                    members[other] += 1
                    break
            else:
                members[graph] = 1
        found = subset_classes(topology, size)
        assert sorted(subset.members for subset in found) == sorted(members.values())
        representatives = {subset.representative for subset in found}
        assert representatives == {tuple(sorted(graph)) for graph in members}


def test_classes_that_colour_refinement_cannot_tell_apart():
    """A ring of six and two triangles: every GPU sees the same words, yet they are different machines."""
    joined = {frozenset((a, (a + 1) % 6)) for a in range(6)}
    for triangle in ((6, 7, 8), (9, 10, 11)):
        joined |= {frozenset(pair) for pair in combinations(triangle, 2)}
    topology = machine(12, lambda a, b: "NV1" if frozenset((a, b)) in joined else "SYS")
    members = {subset.representative: subset.members for subset in subset_classes(topology, 6)}
    assert members[0, 1, 2, 3, 4, 5] == members[6, 7, 8, 9, 10, 11] == 1


@pytest.mark.parametrize(("kind", "count"), [("switch", 15), ("two DGX-1", 1680)])
def test_sixteen_gpus(kind, count):
    def word(a, b):
        if kind == "switch":
            return "NV18"
        return DGX1.link_between(a % 8, b % 8) if a // 8 == b // 8 else "SYS"

    found = subset_classes(machine(16, word))
    assert sum(one.members for one in found) == 65_519
    assert len(found) == count


def test_too_many_subsets_are_refused():
    with pytest.raises(ValueError, match="too many"):
        subset_classes(machine(24, lambda a, b: "SYS"))
    assert sum(one.members for one in subset_classes(machine(24, lambda a, b: "SYS"), 2)) == 276
