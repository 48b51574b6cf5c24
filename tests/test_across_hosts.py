"""Strategies in real gloo ranks that are told to be on several hosts: they give what all-reduce gives on one."""

import numpy as np
import pytest
from rank_cases import ACROSS

RANKS = {"2x2": 4, "2x1": 2, "3x1": 3}
REFERENCES = {4: "allreduce_4", 2: "allreduce_2", 3: "across_allreduce_3"}


def distance(one, other):
    """Largest difference of two lists of weights, against the largest weight."""
    first, second = (np.concatenate([np.asarray(array) for array in weights]) for weights in (one, other))
    return float(np.abs(first - second).max() / np.abs(second).max())


@pytest.mark.parametrize("hosts", RANKS)
@pytest.mark.parametrize("name", ACROSS)
def test_several_hosts_give_the_weights_of_one(forked, name, hosts):
    ranks, reference = forked(f"across_{name}_{hosts}"), forked(REFERENCES[RANKS[hosts]])
    assert len(ranks) == RANKS[hosts]
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"]
        assert distance(rank["weights"], reference[0]["weights"]) < 2e-6


@pytest.mark.parametrize("hosts", RANKS)
@pytest.mark.parametrize("name", ACROSS)
def test_gradients_only_and_the_exchange_alone_bring_the_mean_of_all_hosts(forked, name, hosts):
    for rank in forked(f"across_{name}_{hosts}"):
        assert rank["error"] < 1e-6 and rank["spread"] > 0.1
        mean = (1 + RANKS[hosts]) / 2
        assert [pair for pair in rank["returned"] if pair != [0, 0]] == [[mean, mean]] * 5
        assert rank["drift"] > 0
        between = [share for probe, share, reference in rank["probes"] if probe == "net_link" and reference]
        assert len(between) == 1 and between[0] > 0


@pytest.mark.parametrize("workers", [1, 2])
def test_hierarchical_on_one_host_is_an_all_reduce(forked, workers):
    ranks, reference = forked(f"hierarchical_{workers}"), forked("alone" if workers == 1 else "allreduce_2")
    for rank in ranks:
        assert distance(rank["weights"], reference[0]["weights"]) < 2e-6
        assert "net_link" not in [probe for probe, _, _ in rank["probes"]]
