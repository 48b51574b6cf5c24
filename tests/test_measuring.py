"""The real measurement in two real ranks: every metric of the contract, what is counted, and faults that the checks find.

Each of the two ranks measures all cases of `measuring.CASES` one after the other.
"""

import math

import pytest
import torch
from build import DDP, target_of

from benchmarks.record import read_lines
from benchmarks.training import derive
from trainers.comm_hooks import BLOCK, ROUNDING, SCALE_BYTES, SMALLEST_SHARE, packed, unpacked
from trainers.strategy import Hosts, load

PARAMETERS = 1_199_882
METRICS = {
    "throughput/images_per_second", "throughput/images_per_second_per_gpu",
    "step/ms_median", "step/ms_p95", "comm/exchange_ms", "comm/algbw_gb_per_s", "comm/busbw_gb_per_s",
    "strategy/cost_ms", "stage/ring_ms",
}  # fmt: skip


@pytest.fixture
def measured(forked):
    """(what rank 0 found, what rank 1 found, the folder with their lines)."""
    return *forked("measuring"), forked.folder / "measuring"


def lines(measured, case):
    return [list(read_lines(measured[2] / case / "ranks" / f"{rank}.jsonl")) for rank in (0, 1)]


def blocks(lines, purpose):
    return [line for line in lines if line["kind"] == "block" and line["purpose"] == purpose]


def test_every_metric_of_the_contract_is_there_and_finite(measured):
    metrics, within_run = measured[0]["ddp"]["metrics"], measured[0]["ddp"]["within_run"]
    assert set(metrics) >= METRICS
    assert all(math.isfinite(value) for value in metrics.values())
    for name in (
        "throughput/images_per_second",
        "step/ms_median",
        "comm/exchange_ms",
        "strategy/cost_ms",
    ):
        assert within_run[name]["low"] <= metrics[name] <= within_run[name]["high"], name
    assert metrics["step/ms_median"] <= metrics["step/ms_p95"]


def test_every_rank_found_the_same(measured):
    assert measured[0]["ddp"] == measured[1]["ddp"]
    assert measured[0]["none"] == measured[1]["none"]


@pytest.mark.parametrize("case", ["ddp", "none", "bf16_weights"])
def test_images_are_those_of_the_timed_windows_and_nothing_else(measured, case):
    metrics, said = measured[0][case]["metrics"], lines(measured, case)
    timed = [blocks(of_rank, "timed") for of_rank in said]
    steps = sum(len(block["ms"]) for block in timed[0])
    images = sum(block["images"] for of_rank in timed for block in of_rank)
    assert metrics["throughput/images"] == images == steps * 2 * 2
    assert metrics["step/iterations"] == steps
    seconds = max(sum(sum(block["ms"]) for block in of_rank) for of_rank in timed) / 1e3
    assert metrics["throughput/seconds"] == pytest.approx(seconds)
    assert metrics["throughput/images_per_second"] == pytest.approx(images / seconds)
    assert metrics["throughput/images_per_second_per_gpu"] * 2 == pytest.approx(images / seconds)
    slowest = []
    for a, b in zip(*timed, strict=True):
        slowest += map(max, a["ms"], b["ms"])
    assert metrics["step/ms_median"] == pytest.approx(sorted(slowest)[len(slowest) // 2], rel=0.5)
    assert min(slowest) <= metrics["step/ms_median"] <= max(slowest)
    series = measured[0][case]["series"]["throughput/images_per_second"]
    assert len(series) == len(timed[0]) and series[-1][0] == steps


def test_samples_outside_the_timed_windows_are_kept_and_not_counted(measured):
    said = lines(measured, "ddp")[0]
    assert blocks(said, "first") and blocks(said, "warm-up") and blocks(said, "exchange")
    purposes = [line.get("purpose") for line in said]
    order = [name for name in purposes if name in ("timed", "exchange", "without exchange")]
    assert order == ["timed", "without exchange", "without exchange", "timed", "exchange"]
    phases = [line["phase"] for line in said if line["kind"] == "phase"]
    assert phases[3:8] == ["check", "timed", "exposed", "timed", "compare"]
    checks = measured[0]["ddp"]["checks"]
    assert checks["replicas_equal"] is True, "steps without exchange left no trace"
    assert all(block["lead_in_ms"] > 0 for block in blocks(said, "timed"))


def test_the_bandwidth_is_that_of_the_whole_gradient(measured):
    metrics, model = measured[0]["ddp"]["metrics"], measured[0]["ddp"]["model"]
    assert model["parameters"] == PARAMETERS
    assert model["gradient_bytes"] == 4 * PARAMETERS
    seconds = metrics["comm/exchange_ms"] / 1e3
    assert metrics["comm/algbw_gb_per_s"] == pytest.approx(4 * PARAMETERS / seconds / 1e9)
    assert metrics["comm/busbw_gb_per_s"] == pytest.approx(metrics["comm/algbw_gb_per_s"])
    assert metrics["comm/bytes_moved"] == 4 * PARAMETERS


@pytest.mark.parametrize("hook, share", [("fp16", 0.5), ("bf16", 0.5), ("fp8", 0.25 * 260 / 256)])
def test_a_hook_of_fewer_digits_moves_fewer_bytes(measured, hook, share):
    plain, hooked = measured[0]["ddp"]["metrics"], measured[0][hook]["metrics"]
    assert hooked["comm/bytes_moved"] == plain["comm/bytes_moved"] * share
    rates = (hooked["comm/algbw_gb_per_s"], hooked["comm/busbw_gb_per_s"])
    assert rates[0] == pytest.approx(rates[1] / share)
    assert measured[0][hook]["checks"]["replicas_equal"] is True


def test_a_hook_whose_size_is_not_known_says_so():
    options = DDP | {"comm_hook": "powersgd"}
    strategy = load(options, target_of("strategy", "nccl_allreduce"), Hosts(((0,),)))
    assert math.isnan(strategy.bytes_moved(1e6, 2))
    assert not strategy.exact


def test_fp8_rounds_no_gradient_by_more_than_its_bound():
    generator = torch.Generator().manual_seed(0)
    for trial in range(1000):
        ranks = 2 + trial % 7
        spread = 10.0 ** torch.randn(ranks, 2, BLOCK, generator=generator)  # in a block, too
        local = torch.randn(ranks, 2, BLOCK, generator=generator) * spread
        mean = unpacked(packed(torch.stack([unpacked(packed(blocks)) for blocks in local]).mean(0)))
        allowed = ROUNDING["fp8"] * local.abs().mean(0) + SMALLEST_SHARE["fp8"] * local.abs().max()
        assert ((mean - local.mean(0)).abs() <= allowed).all()
    assert packed(local[0]).shape == (2, BLOCK + SCALE_BYTES)
    for value in (0.0, 1e-40, 3e38, math.nan):
        there_and_back = unpacked(packed(torch.full((1, BLOCK), value)))
        assert there_and_back[0, 0].item() == pytest.approx(
            value, rel=2**-4, abs=1e-37, nan_ok=True
        )


def test_half_precision_weights_have_half_the_gradient(measured):
    assert measured[0]["bf16_weights"]["model"]["gradient_bytes"] == 2 * PARAMETERS


def test_the_exchanged_gradient_is_the_mean(measured):
    for case in ("ddp", "small buckets"):
        facts = measured[0][case]["checks"]
        assert facts["gradient_error"] < 1e-5
        assert facts["gradient_spread"] > 0.1, "the ranks see different data"
        assert facts["replicas_equal"] is True
        assert len(facts["losses"]) == 2 and facts["losses"][0] != facts["losses"][1]
    for case in ("fp16", "bf16", "fp8", "bf16_weights"):
        facts = measured[0][case]["checks"]
        assert facts["gradient_error"] < facts["gradient_tolerance"], case
    assert measured[0]["bf16"]["checks"]["gradient_error"] < 1e-2


def test_the_communicators_of_a_rank_are_counted_and_that_of_the_timed_exchange_named(measured):
    of_ddp, of_none = (measured[0][case]["checks"]["communicators"] for case in ("ddp", "none"))
    assert of_ddp == {"count": 1, "timed": ["default_pg"]}
    assert of_none == {"count": 1, "timed": []}, "only the ranks' own barriers"
    counted = measured[0]["ddp"]["checks"]["counted"]["timed"]
    assert counted["images"] == 2 * counted["steps"] and counted["updates"] == counted["steps"]


def test_no_exchange_has_no_communication(measured):
    found = measured[0]["none"]
    assert not [name for name in found["metrics"] if name.startswith("comm/")]
    assert "gradient_error" not in found["checks"] and "replicas_equal" not in found["checks"]


def test_the_slowest_rank_sets_the_rate(measured):
    metrics = measured[0]["slow rank"]
    assert metrics == measured[1]["slow rank"]
    assert metrics["throughput/images"] == 2 * 8 * 10
    assert 0.30 <= metrics["throughput/seconds"] < 0.5
    assert metrics["throughput/images_per_second"] < 2 * 8 / 0.03
    assert metrics["step/ms_median"] >= 30
    assert metrics["ranks/spread"] > 0.5


@pytest.mark.parametrize(
    ("held", "busy_ms", "idle_share"),
    [
        ([[8.0, 7.0, 9.0], [6.0, 8.5, 7.0]], 8.5, pytest.approx(0.15)),
        ([[10.5] * 3, [9.0] * 3], 10.5, 0.0),
        ([[12.0] * 3, [9.0] * 3], 12.0, None),  # the hold overfilled the launch queue
    ],
)
def test_a_gpu_is_idle_for_the_part_of_a_step_in_which_it_computes_nothing(
    held, busy_ms, idle_share
):
    lines = {rank: [{"kind": "held", "time": 0.0, "ms": ms}] for rank, ms in enumerate(held)}
    metrics = derive.busy(lines, 10.0)
    assert (metrics["gpu/busy_ms"], metrics.get("gpu/idle_share")) == (busy_ms, idle_share)
    assert derive.busy({0: [], 1: []}, 10.0) == {}
