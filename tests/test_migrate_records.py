"""`.ci/migrate_records` gives records of schema 1 to 3 the names of schema 4; elsewhere they are refused."""

import copy
import json
import subprocess
import sys

import pytest
from build import REAL, ROOT

from benchmarks.record import RecordError, read

OLD_METRICS = {
    "throughput/images_per_second": 9000.5, "throughput/ci_low": 8999.5, "throughput/ci_high": 9001.5,
    "comm/exposed_ms": 0.7, "comm/exposed_ms_ci_low": 0.6, "comm/exposed_ms_ci_high": 0.8,
    "limit/ring_ms": 0.4, "comm/overlap_fraction": 0.9, "trace/exposed_disagreement_ms": 0.1, "jacobi/norm": 2.5,
}  # fmt: skip
NEW_METRICS = {
    "throughput/images_per_second": 9000.5, "strategy/cost_ms": 0.7, "reference/ring_ms": 0.4, "jacobi/norm": 2.5,
}  # fmt: skip
WITHIN_RUN = {
    "throughput/images_per_second": {"low": 8999.5, "high": 9001.5}, "strategy/cost_ms": {"low": 0.6, "high": 0.8},
}  # fmt: skip


def old_record(**changes):
    """A record as schema 2 has it."""
    record = copy.deepcopy(REAL) | {"schema_version": 2, "metrics": OLD_METRICS}
    for name in ("within_run", "tables", "raw_sha256"):
        record.pop(name, None)
    record["validity"] = {
        "verdict": "valid",
        "codes": {"limit_exceeded": "ring, 110 %"},
        "unchecked": {},
    }
    record["checks"] = {"limit": "ring", "half_width": 0.01}
    for name in ("labels", "server_gpus", "profiler_options", "declared"):
        record["cell"].pop(name, None)
    return record | changes


def migrated(folder, *records):
    """Migrate a study of these records: (exit status, its sentences, the records in the files)."""
    for number, record in enumerate(records):
        (folder / f"{number}").mkdir()
        (folder / f"{number}" / "record.json").write_text(json.dumps(record))
    command = [sys.executable, ROOT / ".ci" / "migrate_records", folder]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr, sorted(folder.glob("*/record.json"))


def test_an_older_record_is_refused_with_the_command_that_migrates_it(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(old_record()))
    with pytest.raises(RecordError) as refusal:
        read(tmp_path / "record.json")
    sentence = str(refusal.value)
    assert sentence.startswith(
        f"{tmp_path / 'record.json'}: schema_version=2 is older than 4, the oldest known here"
    )
    assert ".ci/migrate_records FOLDER" in sentence and "\n" not in sentence


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_every_number_keeps_its_value_under_the_name_of_today(tmp_path, schema):
    status, _, (path,) = migrated(tmp_path, old_record(schema_version=schema))
    record = read(path)
    assert (status, record.schema_version) == (0, 4)
    assert (record.metrics, record.within_run) == (NEW_METRICS, WITHIN_RUN)
    assert record.checks == {"reference": "ring", "half_width": 0.01, "own_work_alone": True}
    assert record.validity.codes == {"reference_exceeded": "ring, 110 %"}
    assert (record.tables, record.raw_sha256, record.predicted) == ({}, {}, {})
    assert record.cell.key == read_cell_key(schema)


def read_cell_key(schema):
    """The key of the record's cell: `migrate` changes none."""
    from conf.cell import Cell

    return Cell.from_dict(old_record(schema_version=schema)["cell"]).key


@pytest.mark.parametrize(("changes", "apart"), [
    ({}, {"replicas_differ"}),
    ({"device": "cpu"}, {"replicas_differ", "throttled", "wrong_gpu"}),
])  # fmt: skip
def test_a_check_that_had_nothing_to_look_at_is_told_apart_from_one_that_could_not_run(
    tmp_path, changes, apart
):
    reasons = {
        "replicas_differ": "one rank has nothing to agree with",
        "throttled": "clocks, power and memory of the GPUs were not read in the timed window",
        "wrong_gpu": "CPU workers have no GPU UUID" if changes else "no identity",
    }
    record = old_record(validity={"verdict": "valid", "codes": {}, "unchecked": reasons})
    record["cell"] |= changes
    _, _, (path,) = migrated(tmp_path, record)
    validity = read(path).validity
    assert set(validity.not_applicable) == apart and set(validity.unchecked) == set(reasons) - apart


def test_todays_records_stay_and_a_damaged_one_is_named(tmp_path):
    today = json.dumps(REAL)
    status, said, (first, second, third) = migrated(
        tmp_path, REAL, old_record(metrics=[1]), old_record()
    )
    assert first.read_text() == today and read(third).schema_version == 4
    assert status == 1 and "1 records brought to schema 4, 1 damaged" in said
    assert str(second) in said and json.loads(second.read_text()) == old_record(metrics=[1])
