"""Every strategy in real gloo ranks and servers: the weights of all-reduce, or convergence."""

import numpy as np
import pytest
from rank_cases import ADAMW, EVERY, FAR, HALF, SYNCHRONOUS


def distance(weights, reference):
    """Largest difference of two lists of weights, against the largest weight."""
    first, second = (np.concatenate(arrays) for arrays in (weights, reference))
    return float(np.abs(first - second).max() / np.abs(second).max())


def means(rank):
    """What the exchange alone returned; arrays without a gradient are no part of it."""
    return [pair for pair in rank["returned"] if pair != [0, 0]]


@pytest.mark.parametrize("name", [f"{name}_2" for name in SYNCHRONOUS])
def test_synchronous_strategies_give_the_weights_and_the_mean_of_all_reduce(forked, name):
    ranks, (reference, _) = forked(name), forked("allreduce_2")
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"]
        assert distance(rank["weights"], reference["weights"]) < 2e-6
        assert rank["error"] < 1e-6 and rank["spread"] > 0.1 and rank["drift"] > 0
        assert means(rank) == [[1.5, 1.5]] * 5
        assert rank["probes"] and all(share > 0 for _, share, _ in rank["probes"])
    if not name.endswith("_gpu_2"):  # there every rank goes on from its own weights
        assert ranks[0]["after"] == ranks[1]["after"]


@pytest.mark.parametrize(
    "name", ["staged_4", "staged_sharded_4", "device_4", "device_owner_4", "sync_4_4"]
)
def test_four_ranks_give_the_weights_of_all_reduce(forked, name):
    ranks, reference = forked(name), forked("allreduce_4")
    assert len(ranks) == 4
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"]
        assert distance(rank["weights"], reference[0]["weights"]) < 2e-6


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in EVERY if name.startswith("every_")])
def test_every_strategy_gives_the_weights_of_one_process(forked, name):
    """Shards, micro-steps and local SGD on three and four ranks: test_synchronising."""
    workers, optimizer = name.split("_")[-2:]
    ranks, (alone,) = forked(name), forked(f"one_process_{workers}_{optimizer}")
    assert len(ranks) == int(workers)
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"]
        assert distance(rank["weights"], alone["weights"]) < (
            1e-5 if optimizer == "adamw" else 2e-6
        )


@pytest.mark.parametrize(("hook", "limit"), [("fp16", 1e-3), ("bf16", 8e-3)])
@pytest.mark.parametrize("name", ["allreduce", *HALF])
def test_half_precision_stays_within_its_rounding(forked, name, hook, limit):
    first, second = forked(f"{name}_{hook}")
    assert first["weights"] == second["weights"]
    assert 0 < distance(first["weights"], forked("allreduce_2")[0]["weights"]) < limit


def test_fp8_stays_within_its_rounding(forked):
    first, second = forked("allreduce_fp8")
    assert first["weights"] == second["weights"]
    assert 0 < distance(first["weights"], forked("allreduce_2")[0]["weights"]) < 0.1


@pytest.mark.parametrize("name", ADAMW)
def test_adamw_gives_the_weights_of_torchs_own_over_all_reduce(forked, name):
    (first, second), (reference, _) = forked(f"{name}_adamw"), forked("allreduce_adamw")
    assert first["weights"] == second["weights"]
    assert distance(first["weights"], reference["weights"]) < 1e-5
    sgd = forked("allreduce_2")[0]["weights"]
    assert distance(sgd, reference["weights"]) > 0.01, "SGD's are different"


@pytest.mark.parametrize("name", FAR)
def test_servers_on_other_hosts_give_what_servers_on_one_host_give(forked, name):
    for rank, reference in zip(forked(name), forked(FAR[name][0]), strict=True):
        for fact in ("losses", "weights", "after", "returned"):
            assert rank.get(fact) == reference.get(fact)
        if "probes" in rank:
            references = [probe for probe, _, is_reference in rank["probes"] if is_reference]
            assert references == ["net_link"] * 3


def test_a_slow_worker_far_away_holds_back_nobody(forked):
    first, second = forked("async_far")
    assert first["facts"] == second["facts"]
    assert first["facts"]["staleness/max"] > 15  # of the push that the slow worker held back
    assert first["facts"]["staleness/updates"] == 2 * 30 * 2  # a bucket of each server
    assert first["losses"][-1] < 0.97 * first["losses"][0]
    assert 0 < forked("async_far_3")[0]["facts"]["staleness/max"] <= 3, "the bound is kept"


@pytest.mark.parametrize(("suffix", "limit"), [("", 2e-6), ("_adamw", 1e-5)])
def test_asynchronous_with_one_worker_is_synchronous(forked, suffix, limit):
    (served,), (alone,) = forked(f"async_alone{suffix}"), forked(f"alone{suffix}")
    assert distance(served["weights"], alone["weights"]) < limit
    assert served["facts"]["staleness/max"] == 0


@pytest.mark.parametrize("bound", [None, 1, 3])
def test_asynchronous_converges_and_tells_its_staleness(forked, bound):
    ranks = forked(f"async_{bound}")
    for rank in ranks:
        assert rank["losses"][-1] < 0.9 * rank["losses"][0]
    facts = ranks[0]["facts"]
    assert 0 < facts["staleness/mean"] <= facts["staleness/max"]
    assert facts["staleness/updates"] % 60 == 0
    if bound is None:
        assert facts["staleness/max"] > 3  # the slow rank sees many updates of its peer
    else:
        assert facts["staleness/max"] <= bound


def test_asynchronous_exchange_alone_returns_the_own_gradient(forked):
    for number, rank in enumerate(forked("async_device")):
        assert means(rank) == [[number + 1.0] * 2] * 5
