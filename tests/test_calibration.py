"""What a forecast needs of a cell: buckets, moments of a step, collectives, residuals."""

import json
import random
import subprocess
import sys

import msgspec
import pytest
from build import BENCHMARK, ROOT, make_cell, options_of
from calibrating import BUCKETS, SHORT_OF_TIME, SLEPT_MS, SLOW_MS, STRATEGIES
from derived_results import write_record

from analysis.verification.verify_study import verify
from benchmarks.record import CellFolder, read, read_lines, read_study
from benchmarks.record.shapes import TABLES
from benchmarks.training import derive as derive
from conf.cell import Cell

LINES = ROOT / "tests" / "data" / "raw_lines" / "h200_x2"
CAP_BYTES = BUCKETS["bucket_cap_mb"] * (1 << 20)
MOMENTS = ("forward_ms", "backward_ms", "exchange_ms", "update_ms")


@pytest.fixture
def found(forked):
    """What rank 0 found, by case."""
    return forked("calibrating")[0]


@pytest.mark.parametrize("case", STRATEGIES)
def test_the_buckets_are_all_gradients_in_the_dtype_that_travels(found, case):
    rows, hook = found[case]["buckets"]["rows"], STRATEGIES[case].get("comm_hook")
    gradient_bytes = [row["gradient_bytes"] for row in rows]
    assert len(rows) > 1 and sum(gradient_bytes) == found[case]["gradient_bytes"]
    dtype = {"fp16": "float16", "bf16": "bfloat16", None: "float32"}[hook]
    for row in rows:
        sent = row["gradient_bytes"] // (2 if hook else 1)
        assert sent <= row["bytes"] < sent + 4096 and row["dtype"] == dtype, "shares are padded"
    assert gradient_bytes[0] >= CAP_BYTES > gradient_bytes[-1], "they are those of bucket_cap_mb"


@pytest.mark.parametrize("case", ["ddp", "ddp_fp16"])
def test_the_buckets_of_ddp_are_those_that_it_logs(found, case):
    logged = [int(size) for size in found[case]["logged"].split(", ")]
    assert [row["gradient_bytes"] for row in found[case]["buckets"]["rows"]] == logged


def test_one_rank_has_buckets_and_moments_and_no_collectives(forked):
    ((alone,), both) = forked("calibrating_alone"), forked("calibrating")[0]["ddp"]
    rows = alone["timeline"]["rows"]
    assert alone["buckets"] == both["buckets"] and alone["bucket_exchange"] == {}
    assert [(row["rank"], row["exchange"]) for row in rows] == [(0, False), (0, True)]
    assert all(None not in row["ready_ms"] for row in rows)


@pytest.mark.parametrize("case", [*STRATEGIES, "slept"])
def test_moments_of_a_step_come_in_their_order_on_each_rank_with_the_exchange_and_without(
    found, case
):
    rows = found[case]["timeline"]["rows"]
    order = [(row["rank"], row["exchange"]) for row in rows]
    assert order == [(0, False), (0, True), (1, False), (1, True)]
    for row in rows:
        assert not row["unknown"] and row["steps"] == 3
        ready_ms = row["ready_ms"]
        assert len(ready_ms) == len(found[case]["buckets"]["rows"]) and ready_ms == sorted(ready_ms)
        assert 0 < row["forward_ms"] < ready_ms[0] and ready_ms[-1] < row["backward_ms"]
        assert row["backward_ms"] <= row["exchange_ms"] <= row["update_ms"]


def test_a_bucket_whose_layer_is_late_is_ready_late_and_those_before_it_are_not(found):
    for row in found["slept"]["timeline"]["rows"]:
        first, last = row["ready_ms"]
        assert last - first >= SLEPT_MS and row["backward_ms"] >= last
        assert row["forward_ms"] < first


def test_without_buckets_the_rest_of_a_step_is_observed_and_what_is_unknown_is_said(found):
    rows = found["none"]["timeline"]["rows"]
    order = [(row["rank"], row["exchange"]) for row in rows]
    assert order == [(0, False), (1, False)], "it has no other steps"
    for row in rows:
        assert row["unknown"] == {"ready_ms": "the strategy sends no buckets"}
        assert row["ready_ms"] == [] and all(row[moment] > 0 for moment in MOMENTS)
    for case in ("none", "staged"):
        table = found[case]["bucket_exchange"]
        assert table["rows"] == [] and "collectives alone" in table["unknown"]
        msgspec.convert({"bucket_exchange": table}, TABLES)


def test_steps_that_were_compiled_again_have_no_times(found):
    for row in found["recompiled"]["timeline"]["rows"]:
        assert set(row["unknown"]) == {*MOMENTS, "ready_ms"} and row["ready_ms"] == []
        assert "another graph" in row["unknown"]["ready_ms"]
        assert all(row[moment] is None for moment in MOMENTS)


@pytest.mark.parametrize("case", SHORT_OF_TIME)
def test_what_there_is_no_time_for_is_left_out(found, case):
    assert ("rows" in found[case]["timeline"]) == (case == "a timeline")
    of_buckets = {row["bytes"] for row in found[case]["buckets"]["rows"]}
    exchanged = {row["bytes"] for row in found[case]["bucket_exchange"]["rows"]}
    assert {64 << 10, 1 << 20} | of_buckets <= exchanged


def test_nothing_stays_on_the_model(found):
    assert not any(case["left"] for case in found.values() if "left" in case)


@pytest.mark.parametrize(
    ("case", "operation"),
    [
        ("ddp", "all_reduce"),
        ("ddp_fp16", "all_reduce"),
        ("device", "reduce_scatter + all_gather"),
        ("device_owner", "reduce + broadcast"),
        ("two_hosts", "all_reduce"),
    ],
)
def test_a_strategys_own_collectives_are_timed_at_the_sizes_of_its_buckets(found, case, operation):
    table, buckets = found[case]["bucket_exchange"], found[case]["buckets"]["rows"]
    sizes = {row["bytes"] for row in buckets}
    assert table["operation"] == operation
    expected = sorted({64 << 10, 1 << 20, 4 * max(sizes)} | sizes)
    assert [row["bytes"] for row in table["rows"]] == expected
    assert all(row["ms"] > 0 and row["calls"] >= 3 for row in table["rows"])
    assert {row["dtype"] for row in table["rows"]} == {buckets[0]["dtype"]}


def test_a_slow_collective_is_slow_at_its_size_alone(found):
    *others, largest = found["slow"]["bucket_exchange"]["rows"]
    assert largest["ms"] >= SLOW_MS
    assert largest["ms"] - max(row["ms"] for row in others) > SLOW_MS / 2


def test_a_calibration_comes_last_and_its_numbers_follow_from_the_lines(forked):
    forked("calibrating")
    folder = forked.folder / "calibrating" / "whole" / "cells"
    (cell,) = map(CellFolder, folder.iterdir())
    lines = read_lines(cell.rank_lines(0))
    phases = [line["phase"] for line in lines if line["kind"] == "phase"]
    assert phases[-2:] == ["timeline", "bucket exchange"] and "references" in phases
    record = write_record(cell, 1)
    assert {"buckets", "timeline", "bucket_exchange", "residuals"} <= record.tables.keys()
    checked = verify(folder)
    assert checked.recomputed == 1 and checked.right
    content = json.loads(cell.record.read_text())
    content["tables"]["timeline"]["rows"][1]["ready_ms"][0] += 0.01
    cell.record.write_text(json.dumps(content))
    (wrong,) = verify(folder).differences
    assert wrong.field == "tables timeline.rows.1.ready_ms.0"
    write_record(cell, 1)


def timed(*windows):
    facts = {"kind": "block", "time": 0.0, "purpose": "timed"}
    return {0: [facts | {"ms": list(window)} for window in windows]}


def test_residuals_tell_how_steps_scatter_and_how_long_they_remember():
    chance, steps = random.Random(1), [50.0]
    for _ in range(4000):
        steps.append(50 + 0.6 * (steps[-1] - 50) + chance.gauss(0, 1))
    table = derive.residuals(timed(steps[:2000], steps[2000:]), make_cell(gpus=(0,)))
    (row,) = table["rows"]
    assert table["purpose"] == "timed" and (row["rank"], row["n"]) == (0, 4001)
    assert row["mean_ms"] == pytest.approx(50, abs=0.2)
    assert row["sd_ms"] == pytest.approx(1.25, abs=0.05)
    assert row["acf"][:3] == pytest.approx([0.6, 0.36, 0.216], abs=0.06) and len(row["acf"]) == 10
    quantiles = dict(zip(table["probabilities"], row["quantiles_ms"], strict=True))
    assert quantiles[0.95] - quantiles[0.5] == pytest.approx(1.645 * 1.25, abs=0.12)
    assert (quantiles[0.0], quantiles[1.0]) == (min(steps), max(steps))


def test_neighbours_across_windows_are_no_pairs():
    table = derive.residuals(timed([1.0] * 4, [3.0] * 4), make_cell(gpus=(0,)))
    assert table["rows"][0]["acf"] == [1.0, 1.0], "within a window all are alike"


def test_lines_of_older_records_give_residuals_of_steps_that_wait_for_nobody():
    folder = CellFolder(next(LINES.glob("resnet50-nccl_allreduce-gpus0-1-*")))
    lines = {rank: [*read_lines(folder.rank_lines(rank))] for rank in range(2)}
    record = read(folder.record)
    table = derive.residuals(lines, record.cell)
    assert table["purpose"] == "without exchange"
    assert [row["rank"] for row in table["rows"]] == [0, 1]
    middles = record.tables.get("ranks/own_ms", [54.3, 54.3])
    for row, middle in zip(table["rows"], middles, strict=True):
        assert row["quantiles_ms"][5] == pytest.approx(middle, rel=0.01) and 0 < row["sd_ms"] < 0.3
    assert derive.calibration_tables(lines, record.cell).keys() == {"residuals"}


def test_a_cell_that_asks_for_no_more_than_usual_keeps_its_key():
    former = make_cell()
    for asked, said in (("auto", None), ("timeline", None), ("all", "all"), ("none", "none")):
        options = options_of("benchmark", BENCHMARK | {"calibrate": asked})
        assert options.get("calibrate") == said
        cell = Cell.from_dict(former.to_dict() | {"benchmark": options})
        assert (cell.key == former.key) is (said is None)


# On GPUs: python -m pytest -n 0 -m multi_gpu tests/test_calibration.py

MOST_SECONDS = 1.5
PHASES = ("timeline", "bucket exchange")


@pytest.mark.multi_gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["nccl_allreduce", "kvstore_device"])
def test_two_gpus_calibrate_in_a_second_and_a_half(tmp_path, strategy):
    command = [sys.executable, "launch.py", "-m", "gpus=0,1", "model=resnet50", "noise_pairs=0"]
    command += ["tracking=none", "report=false", f"output_dir={tmp_path}", f"strategy={strategy}"]
    command += ["nccl.p2p_level=null,LOC", "benchmark.max_seconds=2", "benchmark.calibrate=all"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    records, _ = read_study(tmp_path / "default")
    assert len(records) == 2
    largest = {}
    for record in records:
        calibrated_as_measured(record)
        largest[bool(record.cell.nccl)] = record.tables["bucket_exchange"]["rows"][-1]["ms"]
    assert largest[True] > 5 * largest[False], "LOC goes through host memory"


def calibrated_as_measured(record):
    """Assert that a record's calibration fits its own windows, and took no longer than it may."""
    tables, step_ms = record.tables, record.metrics["step/ms_median"]
    seconds = [row["seconds"] for row in tables["seconds"]["rows"] if row["part"] in PHASES]
    assert sum(seconds) < MOST_SECONDS
    sent = [row["bytes"] for row in tables["buckets"]["rows"]]
    assert sum(sent) == pytest.approx(record.model["gradient_bytes"], rel=0.001)
    for row in tables["timeline"]["rows"]:
        assert not row["unknown"] and row["ready_ms"] == sorted(row["ready_ms"])
        assert row["forward_ms"] < row["ready_ms"][0] and row["ready_ms"][-1] <= row["backward_ms"]
        assert row["update_ms"] == pytest.approx(step_ms, rel=0.1 if row["exchange"] else 0.2)
    alone = {row["bytes"]: row["ms"] for row in tables["bucket_exchange"]["rows"]}
    one_after_the_other = sum(alone[size] for size in sent)  # in a step the buckets overlap
    assert 0.5 < one_after_the_other / record.metrics["comm/exchange_ms"] < 2.5
