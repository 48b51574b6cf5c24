"""Strategies in real gloo ranks that are told to be on several hosts: they give what all-reduce gives on one."""

import numpy as np
import pytest
import torch
from build import BUSY, changed_cell, make_cell, several_hosts_cells, strategy_of
from derived_results import write_record
from rank_cases import ACROSS, HOSTS

from analysis.validity.checks import judge
from benchmarks.rank.ranks import Ranks
from benchmarks.record import CellFolder
from conf.groups import choice
from conf.options import Refused
from conf.schema import ValidityLimits
from launch.plan.refusals import refuse_too_little
from trainers import needed_memory

RANKS = {place: sum(map(len, hosts)) for place, hosts in HOSTS.items()}
REFERENCES = {4: "allreduce_4", 2: "allreduce_2", 3: "across_reference_3"}
CASES = [(name, place) for name, (_, places) in ACROSS.items() for place in places]


def distance(one, other):
    """Largest difference of two lists of weights, against the largest weight."""
    first, second = (
        np.concatenate([np.asarray(array) for array in weights]) for weights in (one, other)
    )
    return float(np.abs(first - second).max() / np.abs(second).max())


@pytest.mark.parametrize("name, place", CASES)
def test_several_hosts_give_the_weights_of_one(forked, name, place):
    ranks, reference = forked(f"across_{name}_{place}"), forked(REFERENCES[RANKS[place]])
    assert len(ranks) == RANKS[place]
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"]
        assert distance(rank["weights"], reference[0]["weights"]) < 2e-6


@pytest.mark.parametrize("name, place", CASES)
def test_gradients_only_and_the_exchange_alone_bring_the_mean_of_all_hosts(forked, name, place):
    for rank in forked(f"across_{name}_{place}"):
        assert rank["error"] < 1e-6 and rank["spread"] > 0.1
        mean = (1 + RANKS[place]) / 2
        returned = [pair for pair in rank["returned"] if pair != [0, 0]]
        assert set(map(tuple, returned)) == {(mean, mean)} and len(returned) >= 5
        assert rank["drift"] > 0


@pytest.mark.parametrize("name, place", CASES)
def test_the_wire_between_hosts_is_a_reference(forked, name, place):
    for rank in forked(f"across_{name}_{place}"):
        between = [
            share for probe, share, reference in rank["probes"] if probe == "net_link" and reference
        ]
        assert len(set(between)) == 1 and between[0] > 0


@pytest.mark.parametrize("name", ["hierarchical", "staged"])
@pytest.mark.parametrize("hook, limit", [("fp16", 1e-3), ("bf16", 8e-3)])
def test_half_precision_stays_within_its_rounding_between_hosts_too(forked, name, hook, limit):
    first, second = forked(f"across_{name}_{hook}")
    assert first["weights"] == second["weights"]
    assert 0 < distance(first["weights"], forked("allreduce_2")[0]["weights"]) < limit


def test_servers_of_several_hosts_take_the_steps_of_adamw(forked):
    first, second = forked("across_staged_adamw")
    assert first["weights"] == second["weights"]
    assert distance(first["weights"], forked("allreduce_adamw")[0]["weights"]) < 1e-5


@pytest.mark.parametrize("workers", [1, 2])
def test_hierarchical_on_one_host_is_an_all_reduce(forked, workers):
    ranks, reference = (
        forked(f"hierarchical_{workers}"),
        forked("alone" if workers == 1 else "allreduce_2"),
    )
    for rank in ranks:
        assert distance(rank["weights"], reference[0]["weights"]) < 2e-6
        assert "net_link" not in [probe for probe, _, _ in rank["probes"]]


@pytest.mark.parametrize("staging", ["full", "sharded"])
def test_a_host_needs_the_shared_memory_of_its_own_ranks(staging):
    cell = make_cell((0, 1), strategy=strategy_of({"name": "cpu_staged", "staging": staging}))
    several = changed_cell(cell, hosts=("a", "b"))
    assert several.world_size == 4
    assert needed_memory.needed(several)[0] == needed_memory.needed(cell)[0] > 0


def test_the_host_with_the_most_shared_memory_counts(memory_needed):
    cell = make_cell((0, 1), strategy=strategy_of({"name": "kvstore_dist_sync", "servers": 1}))
    first, second = (changed_cell(cell, hosts=["a", "b"], server_hosts=[host]) for host in "ab")
    assert needed_memory.needed(first)[0] == needed_memory.needed(second)[0] > 4 * 1_199_882 * 2
    with pytest.raises(Refused, match=r"^host b: strategy=kvstore_dist_sync: "):
        refuse_too_little([second], needed_memory.needed(second)[0] - 1, "host b: ")
    refuse_too_little([second], needed_memory.needed(second)[0])


@pytest.mark.parametrize("name", several_hosts_cells(2, 2))
def test_every_check_of_a_cell_holds_on_several_hosts(forked, name):
    found = forked("cells_on_hosts")[0][name]
    cell = several_hosts_cells(2, 2)[name]
    record = write_record(
        CellFolder(forked.folder / "cells_on_hosts" / name / "cells" / cell.key), 1
    )
    assert not judge(record, ValidityLimits()).codes.keys() - BUSY - {"wrong_peers"}
    checks = found["checks"]
    if name == "throughput":
        assert checks["replicas_equal"] and checks["batches_differ"]
        assert checks["gradient_error"] <= checks["gradient_tolerance"] < checks["gradient_spread"]
    if name in ("throughput", "exchange"):
        assert checks["exchange_error"] <= checks["exchange_tolerance"]
        assert found["metrics"]["reference/net_link_ms"] > 0
    if name == "collectives":
        assert checks["wrong_elements"] == 0


def test_benchmarks_with_shared_memory_of_all_ranks_keep_to_one_host():
    ranks = Ranks(0, 2, torch.device("cpu"), several_hosts=True)
    with pytest.raises(ValueError, match="ranks on several hosts share no memory"):
        ranks.map_shared(8)
    kept = {
        name: choice("benchmark", name).several_hosts
        for name in ("p2p", "host_link", "jacobi", *several())
    }
    assert kept == {"p2p": False, "host_link": False, "jacobi": False} | dict.fromkeys(
        several(), True
    )


def several():
    return [cell.benchmark["name"] for cell in several_hosts_cells(2, 2).values()]
