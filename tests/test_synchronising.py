"""Ways to synchronise less, rarer or in shares: each is a one-process training but for rounding."""

import pytest
import torch
import torchvision
from build import composed_cell, make_cell, make_record, strategy_of
from synchronising import ACCUMULATING, OPTIMIZERS, cell_of

from analysis.prediction.query import Workload, query_of
from analysis.prediction.strategies import exchange_of, refuse_unknown
from analysis.validity.checks import CHECKS
from benchmarks.timing.statistics import levelled
from conf.cell import Cell
from conf.schema import ValidityLimits
from trainers.needed_memory import needed
from trainers.strategies.fsdp import blocks_of

# Float32 sums of a few thousand terms in another order, over some steps.
ROUNDING = 2e-6
RANKS = [
    2,
    pytest.param(3, marks=pytest.mark.campaign),
    pytest.param(4, marks=pytest.mark.campaign),
]


@pytest.fixture(params=RANKS)
def by_rank(request, forked):
    return forked(f"synchronising_{request.param}")


def test_micro_steps_are_the_step_of_the_whole_batch(by_rank):
    for found in by_rank:
        for name in ACCUMULATING:
            for optimizer in OPTIMIZERS:
                assert found["accumulated"][f"{name} {optimizer}"] < ROUNDING


def test_bytes_of_an_image_fall_to_one_part_in_so_many_micro_steps(by_rank):
    found = by_rank[0]["accumulated"]
    once = found["1 micro-steps"]
    assert once["bytes"] > 0
    for count in (2, 4, 8):
        several = found[f"{count} micro-steps"]
        assert several["bytes"] == once["bytes"] and several["early"] == 0
        assert several["images"] == count * once["images"]


def judged(sent, **fields):
    cell = make_cell(**fields)
    record = make_record(cell=cell, checks={"sent": sent})
    check = next(check for check in CHECKS if check.code == "accumulated_nothing")
    return check.judge(record, ValidityLimits())


def test_an_exchange_in_every_micro_step_is_invalid(by_rank):
    fault = by_rank[0]["accumulated"]["fault"]
    assert judged(fault, accumulate=8) == f"{fault['early']} collectives" and fault["early"] == 7
    assert not judged({"early": 0}, accumulate=8)
    assert judged({}, accumulate=8).severity == "unchecked"
    assert judged({}).severity == "not applicable"


def test_batch_size_is_of_a_micro_step_and_the_global_one_of_a_step(hydra):
    cell = composed_cell("accumulate=4", "batch_size=32")
    assert cell.batch_size == 128 and cell.labels == ("batch 32", "accumulate=4")
    assert Cell.from_dict(cell.to_dict()) == cell and "accumulate" not in make_cell().to_dict()
    assert composed_cell("accumulate=4", "global_batch_size=64").batch_size == 32


def test_local_sgd_is_a_hand_written_one(by_rank):
    for found in by_rank:
        for name, error in found["local"].items():
            assert error < ROUNDING, name
    assert {"period 1", "warm-up", "nesterov adamw"} <= set(by_rank[0]["local"])


def test_shards_are_a_training_of_one_process(by_rank):
    names = {
        f"{name} {optimizer}" for name in ("fsdp", "zero2", "hsdp") for optimizer in OPTIMIZERS
    }
    for found in by_rank:
        errors = {n: e for n, e in found["sharded"].items() if not n.endswith("states")}
        assert set(errors) >= names and max(errors.values()) < ROUNDING, errors


def test_model_states_of_a_rank_are_those_of_the_zero_paper(by_rank):
    """Table 1 of arXiv 1910.02054 in float32: weights, gradients and K numbers each, ÷ ranks."""
    for name in ("fsdp", "zero2"):
        for optimizer, numbers in (("sgd", 1), ("adamw", 2)):
            found = [rank["sharded"][f"{name} {optimizer} states"] for rank in by_rank]
            _, whole, padded = found[0]
            states = sum(states for states, _, _ in found)
            # Weights and gradients have rows that the ranks divide: on two 14 for 13.
            assert states == pytest.approx(2 * padded + numbers * whole, rel=0.01)
            if len(by_rank) == 2:
                assert states == pytest.approx((2 + numbers) * whole, rel=0.05)


def facts(by_rank, case):
    found = by_rank[0]["cells"][case]
    return found["checks"], found["metrics"]


def test_whole_cells_are_as_asked(forked):
    by_rank = forked("synchronising_2")
    for case in ("average", "fragments", "fsdp"):
        checks, metrics = facts(by_rank, case)
        assert checks["replicas_equal"] and checks["iterations_missing"] == 0, case
        assert checks["gradient_error"] <= checks["gradient_tolerance"], case
        assert checks["gradient_spread"] > 0.1 and checks["exchange_error"] == 0, case
        assert checks["weights_still"] == 0 and "strategy/cost_ms" in metrics, case
        assert metrics["memory/peak_gib"] > 0 and metrics["comm/bytes_moved"] > 0, case
    checks, metrics = facts(by_rank, "average")
    assert metrics["step/iterations"] % 4 == 0 < metrics["step/iterations"]
    assert metrics["comm/bytes_per_image"] == metrics["comm/bytes_moved"] / 8 / 4
    assert checks["average_worst"]["error"] <= checks["average_worst"]["tolerance"]


def test_weights_that_are_equal_and_no_mean_are_invalid(forked):
    strategy = strategy_of({"name": "local_sgd", "period": 4})
    for case, outcome in (("average", False), ("wrong", True)):
        checks, _ = facts(forked("synchronising_2"), case)
        record = make_record(cell=make_cell(strategy=strategy), checks=checks)
        assert checks["replicas_equal"]
        check = next(check for check in CHECKS if check.code == "weights_not_average")
        assert bool(check.judge(record, ValidityLimits())) == outcome


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ({"name": "fsdp"}, "strategy=fsdp: the model has no repeated blocks to shard by"),
        ({"name": "hsdp", "shard_size": 3}, "strategy.shard_size=3: does not divide 2 ranks"),
        ({"name": "local_sgd", "fragments": 9}, "strategy.fragments=9: the model has 8 parameters"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(strategy, sentence):
    cell = make_cell(strategy=strategy_of(strategy))
    if "shard_size" in strategy:
        cell = cell_of(2, strategy)
    assert needed(cell)[1].startswith(sentence)


def test_blocks_of_known_networks():
    with torch.device("meta"):
        networks = (torchvision.models.resnet50(), torchvision.models.vit_b_16())
    assert [len(blocks_of(network)) for network in networks] == [16, 12]


def test_forecasts_are_made_or_refused():
    given = {"name": "local_sgd", "period": 8}
    query = query_of(make_cell(strategy=strategy_of(given)), Workload("m", 1e6))
    assert exchange_of(query).collective == "all_reduce"
    assert not exchange_of(query).during_backward
    gathering = query_of(make_cell(strategy=strategy_of({"name": "hsdp"})), Workload("m", 1e6))
    with pytest.raises(
        ValueError, match="forecasts do not model when forward and backward of hsdp wait"
    ):
        refuse_unknown(gathering)


def test_whole_periods_are_levelled():
    assert levelled([1.0, 1.0, 4.0, 2.0, 2.0, 5.0, 9.0], 3) == [2, 2, 2, 3, 3, 3, 9]
    assert levelled([1.0, 2.0], 1) == [1.0, 2.0]
