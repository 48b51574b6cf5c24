"""`benchmark=exchange` is MXNet's tools/bandwidth/measure.py: the same arrays and arithmetic, and errors are noticed."""

import math
from types import SimpleNamespace

import pytest
import torch
from build import composed_cell, exchange_cell
from rank_cases import CASES, SERVERS, STRATEGIES

from benchmarks.rank.ranks import Block, Reporter
from benchmarks.record import CellFolder, read_lines
from benchmarks.training import derive
from benchmarks.training.exchange import gradients_like, references
from trainers import needed_memory, reference_probes
from trainers.models import sizes
from trainers.strategy import ReferenceProbe

# The same arrays.


@pytest.mark.parametrize(
    ("asked", "arrays", "total_mb"),
    [
        (["model=resnet200"], 205, 257.991328),
        (["model=inception_v3", "model.options.aux_logits=false"], 96, 95.200544),
    ],
)
def test_weights_are_the_arrays_that_mxnet_counts(hydra, asked, arrays, total_mb):
    cell = composed_cell(*asked, "benchmark=exchange", "benchmark.keys=weights")
    found = sizes(gradients_like(cell, "weights", torch.device("meta")))
    assert found["arrays"] == arrays
    assert f"{found['gradient_bytes'] / 1e6:.6f}" == f"{total_mb:.6f}"
    everything = sizes(gradients_like(cell, "all", torch.device("meta")))
    assert everything["arrays"] > arrays  # batch norm too


# Real exchanges.


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_exchange_returns_the_mean_and_is_compared_with_a_reference(forked, name, per_key):
    one, other = forked(f"exchange_{name}_{per_key}")
    metrics, facts = one["metrics"], one["checks"]
    assert 0 <= metrics["comm/error"] < 1e-6 and facts["exchange_error"] < 1e-6
    assert metrics["comm/busbw_gb_per_s"] == pytest.approx(
        metrics["comm/bytes_moved"] / metrics["comm/exchange_ms"] / 1e6
    )
    assert metrics["comm/ideal_ms"] == metrics[f"reference/{facts['reference']}_ms"] > 0
    assert metrics["comm/ideal_ratio"] == pytest.approx(
        metrics["comm/ideal_ms"] / metrics["comm/exchange_ms"]
    )
    if name != "cpu_staged":  # the others go through gloo, whose ring is no reference
        assert metrics["stage/ring_ms"] > 0 and facts["reference"] == "memory_copy"
    assert one["model"] == {"parameters": 1_199_882, "arrays": 8, "gradient_bytes": 4 * 1_199_882}
    assert one == other


@pytest.mark.parametrize("name", SERVERS)
def test_the_exchange_with_servers(forked, name):
    for found in forked(f"exchange_{name}"):
        assert found["checks"]["exchange_error"] < 1e-6
        assert found["metrics"]["comm/bytes_moved"] == found["model"]["gradient_bytes"]
        assert "output" not in found


def test_of_several_ways_the_fastest_is_the_reference(tmp_path):
    times = {
        "ring": [4.0, 4.0], "ring gather": [3.0, 5.0], "ring reduce": [9.0, 9.0], "sum": [1.0, 1.0],
    }  # fmt: skip
    ways = ((1.0, ""), (0.5, "gather"), (0.4, "reduce"))
    probes = [ReferenceProbe("ring", lambda: None, share, way=way) for share, way in ways]
    probes.append(ReferenceProbe("sum", lambda: None, 1.0, reference=False))
    spans = iter(times.values())
    clock = SimpleNamespace(
        block=lambda run, iterations, beat: Block(next(spans), 1.0, 1.0, 10.0, 10.0)
    )
    folder = CellFolder(tmp_path).make()
    references(SimpleNamespace(probes=lambda: probes), 2, clock, Reporter(folder, 0))
    lines = {0: list(read_lines(folder.rank_lines(0)))}
    metrics, binding = derive.references(lines, {"comm/exchange_ms": 8.0}, synchronous=True)
    assert metrics == {
        "reference/ring_ms": 2.0,
        "stage/sum_ms": 1.0,
        "comm/ideal_ms": 2.0,
        "comm/ideal_ratio": 0.25,
    }
    assert binding == "ring" and [
        line["purpose"] for line in lines[0] if line["kind"] == "block"
    ] == list(times)


def test_each_way_around_the_ring_is_scaled_by_what_a_rank_sends(monkeypatch):
    """Four ranks on GPUs that are not there: 4,000 bytes, of which each rank has a quarter."""
    monkeypatch.setattr(reference_probes, "MESSAGE_BYTES", {"cuda": 4000})
    monkeypatch.setattr(reference_probes.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(reference_probes.dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(reference_probes.torch, "ones", lambda size, device: torch.zeros(size))
    found = {
        probe.way: probe.share for probe in reference_probes.ring(torch.device("cuda"), 12_000.0)
    }
    # A message is 4,000 bytes; a gather passes on 3 shares of 1,000, an all-reduce 3 twice.
    assert found == {"": 3.0, "gather": 4.0, "all-reduce": 2.0}


def test_one_rank_alone_has_no_reference_between_ranks(forked):
    (found,) = forked("exchange_one_rank")
    assert found["metrics"]["comm/exchange_ms"] > 0 and found["checks"]["exchange_error"] == 0
    assert "comm/ideal_ms" not in found["metrics"]


@pytest.mark.parametrize("name", ["bf16_hook", "bf16_weights"])
def test_half_precision_is_right_within_its_rounding(forked, name):
    facts = forked(f"exchange_{name}")[0]["checks"]
    assert 1e-4 < facts["exchange_error"] < facts["exchange_tolerance"] < 0.1


@pytest.mark.parametrize(("fault", "least"), [("sums", 0.5), ("one_bias", 0.1)])
def test_a_wrong_exchange_is_noticed(forked, fault, least):
    for found in forked(f"exchange_{fault}"):
        assert found["checks"]["exchange_error"] > least > found["checks"]["exchange_tolerance"]


def test_one_element_that_is_no_number_is_noticed(forked):
    facts = forked("exchange_nan")[0]["checks"]
    assert math.isnan(facts["exchange_error"])


def test_a_compression_with_loss_is_not_held_to_the_mean(forked):
    found = forked("exchange_lossy")[0]
    assert "exchange_error" not in found["checks"] and found["metrics"]["comm/error"] > 0.5


# Shared memory.


@pytest.mark.parametrize("name", ["cpu_staged_False", "sharded", *SERVERS])
def test_a_cell_maps_as_much_shared_memory_as_it_is_said_to_need(forked, name):
    case, found = CASES[f"exchange_{name}"], forked(f"exchange_{name}")
    mapped = [rank["mapped_bytes"] for rank in found]
    # Sharded staging has a file for each rank, the others have one for all.
    mapped_bytes = sum(mapped) if name == "sharded" else mapped[0]
    assert needed_memory.needed(exchange_cell(case))[0] == mapped_bytes > 4 * 1_199_882
