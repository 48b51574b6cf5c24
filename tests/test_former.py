"""Records of older schemas: read with today's names, the numbers unchanged."""

import json
from pathlib import Path

import pytest
from records import make_record

from benchmarks.record import SCHEMA_VERSION, CellFolder, read, write
from benchmarks.record.former import DROPPED, LAST_OLD_NAMES, computed_otherwise

DATA = Path(__file__).parent / "data"
PATHS = sorted(DATA.rglob("record.json"))
FORMER = [
    path for path in PATHS if json.loads(path.read_text())["schema_version"] <= LAST_OLD_NAMES
]


def test_every_number_of_a_real_record_is_read_with_todays_name():
    seen, costs = set(), 0
    for path in FORMER:
        raw, record = json.loads(path.read_text()), read(path)
        seen.add(record.schema_version)
        assert record.schema_version == raw["schema_version"], (
            "it says with which meaning it was measured"
        )
        assert not [name for name in record.metrics if name.endswith(("ci_low", "ci_high"))]
        old = {name: value for name, value in raw["metrics"].items() if name not in DROPPED}
        ends = sum(map(len, record.within_run.values()))
        assert len(record.metrics) + ends == len(old), path
        if "comm/exposed_ms" in old:
            costs += 1
            assert record.metrics["strategy/cost_ms"] == old["comm/exposed_ms"]
            assert record.within_run["strategy/cost_ms"]["low"] == old["comm/exposed_ms_ci_low"]
            assert "comm/exposed_ms" not in record.metrics
        if "throughput/ci_low" in old:
            found = record.within_run["throughput/images_per_second"]
            assert (found["low"], found["high"]) == (
                old["throughput/ci_low"],
                old["throughput/ci_high"],
            )
    assert {2, 3} <= seen and costs > 70


def test_a_record_that_was_read_and_written_again_is_the_same(tmp_path):
    record = read(next(path for path in FORMER if "ci_low" in path.read_text()))
    assert read(write(CellFolder(tmp_path), record)) == record


def test_todays_records_are_read_as_they_are(tmp_path):
    metrics = {
        "comm/exposed_ms": 0.04,
        "comm/hidden_share": 0.9,
        "strategy/cost_ms": 0.6,
        "mine/ci_low": 1.0,
    }
    record = make_record(
        metrics=metrics, within_run={"strategy/cost_ms": {"low": 0.5, "high": 0.7, "groups": 20.0}}
    )
    assert read(write(CellFolder(tmp_path), record)) == record


@pytest.mark.parametrize(("schema", "value", "otherwise"), [
    (3, "within_run step/ms_median.low", True), (SCHEMA_VERSION, "within_run step/ms_median.low", False),
    (3, "metrics step/ms_median", False),
])  # fmt: skip
def test_what_was_computed_otherwise_is_told_by_the_schema(schema, value, otherwise):
    assert bool(computed_otherwise(schema, value)) is otherwise


@pytest.mark.parametrize(("changes", "apart"), [
    ({}, {"replicas_differ"}),
    ({"gpus": [0]}, {"replicas_differ"}),
    ({"device": "cpu"}, {"replicas_differ", "throttled", "wrong_gpu"}),
])  # fmt: skip
def test_a_check_that_had_nothing_to_look_at_is_told_apart_from_one_that_could_not_run(
    tmp_path, changes, apart
):
    content = json.loads(FORMER[-1].read_text())
    reasons = {
        "replicas_differ": "one rank has nothing to agree with",
        "throttled": "the GPUs were not sampled in the timed window",
        "wrong_gpu": "CPU workers have no GPU UUID" if "device" in changes else "no identity",
    }
    content |= {"state": "finished", "cell": content["cell"] | changes}
    content["validity"] = {"verdict": "valid", "codes": {}, "unchecked": reasons}
    (tmp_path / "record.json").write_text(json.dumps(content))
    found = read(tmp_path / "record.json").validity
    assert set(found.not_applicable) == apart and set(found.unchecked) == set(reasons) - apart
    assert found.said == (
        "valid" if apart == set(reasons) else f"valid, {len(reasons) - len(apart)} unchecked"
    )
