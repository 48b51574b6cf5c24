"""`python -m analysis verify --mlflow`: what MLflow's store has of a run otherwise than its record is named."""

import json
import sqlite3

from planted import edit_json
from tracked import make_folder, make_record

from analysis.__main__ import main
from conf.schema import Tracking
from launch.__main__ import main as launch_main
from launch.tracking.compare import compare
from launch.tracking.sync import sync

EDITS = {
    "metrics throughput/images_per_second": "latest_metrics SET value = 7.0 WHERE key = 'throughput/images_per_second'",
    "series step/ms step 0": "metrics SET value = 52.0 WHERE key = 'step/ms' AND step = 0",
    "params gpus": "params SET value = '0,1' WHERE key = 'gpus'",
    "tags validity": "tags SET value = 'suspect' WHERE key = 'validity'",
    "status": "runs SET status = 'FAILED' WHERE name = 'first run'",
}


def test_edits_of_the_store_and_of_records_are_found_and_named(output_dir, capsys):
    study = output_dir / "scaling"
    for number in (1, 2):
        make_folder(study, make_record(number))
    assert launch_main(["compare", str(study)]) == 2, "no store or no experiment"
    sync(study)
    found = compare(study, Tracking())
    assert (found.right, found.runs, found.missing) == (True, 2, []) and found.values > 40
    make_folder(study, make_record(3))
    path = study / "cell-000002" / "record.json"
    edit_json(path, lambda one: one["metrics"].update({"comm/busbw_gb_per_s": 13.0}))
    capsys.readouterr()
    assert main(["verify", str(study), "--mlflow", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (difference,) = [one for one in told["differences"] if one["file"] == "MLflow"]
    assert (difference["field"], difference["recorded"], difference["recomputed"]) == (
        "metrics comm/busbw_gb_per_s",
        12.5,
        13.0,
    )
    assert [count for name, count in told["not_compared"].items() if "MLflow" in name] == [1]
    edit_json(path, lambda one: one["metrics"].update({"comm/busbw_gb_per_s": 12.5}))
    with sqlite3.connect(output_dir / "mlflow.db") as connection:
        for edit in EDITS.values():
            connection.execute(f"UPDATE {edit}")
    found = compare(study, Tracking())
    assert {one.field for one in found.differences} == set(EDITS) and len(
        found.differences
    ) == 2 * len(EDITS)


def test_a_store_that_is_not_there_is_refused_and_not_made(tmp_path, capsys):
    make_folder(tmp_path / "study", make_record(1))
    for uri in ([], ["--uri", "foo://x"], ["--uri", f"sqlite:///{tmp_path}/other.db"]):
        assert launch_main(["compare", str(tmp_path / "study"), *uri]) == 2
    assert "there is no such store" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.db"))
