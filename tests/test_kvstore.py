"""Every strategy in real gloo ranks and servers: synchronous ones give the weights of all-reduce, asynchronous ones converge."""

import numpy as np
import pytest
from rank_cases import ADAMW, FAR, HALF, SYNCHRONOUS


@pytest.fixture
def found(forked):
    return forked


def _distance(one, other):
    """Largest difference of two lists of weights, against the largest weight."""
    first, second = (
        np.concatenate([np.asarray(array) for array in weights]) for weights in (one, other)
    )
    return float(np.abs(first - second).max() / np.abs(second).max())


@pytest.mark.parametrize("name", [f"{name}_2" for name in SYNCHRONOUS] + [
    "staged_4", "staged_sharded_4", "device_4", "device_owner_4", "sync_4_4"
])  # fmt: skip
def test_synchronous_strategies_give_the_weights_of_all_reduce(found, name):
    ranks, reference = found(name), found("allreduce_4" if "_4" in name else "allreduce_2")
    assert len(ranks) == len(reference)
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"]
        assert _distance(rank["weights"], reference[0]["weights"]) < 2e-6


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
@pytest.mark.parametrize("name", HALF)
def test_half_precision_stays_within_its_rounding(found, name, hook):
    ranks, reference = found(f"{name}_{hook}"), found(f"allreduce_{hook}")
    exact = found("allreduce_2")[0]["weights"]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    limit = {"fp16": 1e-3, "bf16": 8e-3}[hook]
    assert 0 < _distance(ranks[0]["weights"], exact) < limit
    assert _distance(reference[0]["weights"], exact) < limit


@pytest.mark.parametrize("name", ADAMW)
def test_adamw_gives_the_weights_of_torchs_own_over_all_reduce(found, name):
    ranks, reference = found(f"{name}_adamw"), found("allreduce_adamw")
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert _distance(ranks[0]["weights"], reference[0]["weights"]) < 1e-5
    assert _distance(found("allreduce_2")[0]["weights"], reference[0]["weights"]) > 0.01, (
        "SGD's are others"
    )


def test_an_asynchronous_server_counts_the_steps_of_adamw(found):
    assert (
        _distance(found("async_alone_adamw")[0]["weights"], found("alone_adamw")[0]["weights"])
        < 1e-5
    )


@pytest.mark.parametrize("name", [f"{name}_2" for name in SYNCHRONOUS])
def test_gradients_only_and_the_exchange_alone_bring_the_mean(found, name):
    for rank in found(name):
        assert rank["error"] < 1e-6 and rank["spread"] > 0.1
        # Arrays without a gradient are no part of an exchange that was set up in a step.
        assert [pair for pair in rank["returned"] if pair != [0, 0]] == [[1.5, 1.5]] * 5
        assert rank["drift"] > 0
        assert rank["probes"]
        assert all(share > 0 for _, share, _ in rank["probes"])
    first, second = found(name)
    if not name.removesuffix("_2").endswith(
        "_gpu"
    ):  # there every rank goes on from its own weights
        assert first["after"] == second["after"]


@pytest.mark.parametrize("name", FAR)
def test_servers_on_other_hosts_give_what_servers_on_one_host_give(found, name):
    for far, reference in zip(found(name), found(FAR[name][0]), strict=True):
        assert far["losses"] == reference["losses"] and far["weights"] == reference["weights"]
        assert far.get("after") == reference.get("after") and far.get("returned") == reference.get(
            "returned"
        )
        if "probes" in far:
            assert [name for name, _, reference in far["probes"] if reference] == ["net_link"] * 3


def test_a_slow_worker_far_away_holds_back_nobody(found):
    first, second = found("async_far")
    assert first["facts"] == second["facts"]
    assert first["facts"]["staleness/max"] > 15  # of the push that the slow worker held back
    assert first["facts"]["staleness/updates"] == 2 * 30 * 2  # a bucket of each server
    assert first["losses"][-1] < 0.97 * first["losses"][0]


def test_servers_far_away_keep_the_bound_on_staleness(found):
    assert 0 < found("async_far_3")[0]["facts"]["staleness/max"] <= 3


def test_asynchronous_with_one_worker_is_synchronous(found):
    assert _distance(found("async_alone")[0]["weights"], found("alone")[0]["weights"]) < 2e-6
    assert found("async_alone")[0]["facts"]["staleness/max"] == 0


@pytest.mark.parametrize("bound", [None, 1, 3])
def test_asynchronous_converges_and_tells_its_staleness(found, bound):
    ranks = found(f"async_{bound}")
    for rank in ranks:
        assert rank["losses"][-1] < 0.9 * rank["losses"][0]
    facts = ranks[0]["facts"]
    assert 0 < facts["staleness/mean"] <= facts["staleness/max"]
    assert facts["staleness/updates"] % 60 == 0
    if bound is not None:
        assert facts["staleness/max"] <= bound
    else:
        assert facts["staleness/max"] > 3  # the slow rank sees many updates of the other


def test_asynchronous_exchange_alone_returns_the_own_gradient(found):
    for number, rank in enumerate(found("async_device")):
        assert [pair for pair in rank["returned"] if pair != [0, 0]] == [[number + 1.0] * 2] * 5
