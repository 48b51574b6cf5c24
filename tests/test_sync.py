"""`python -m launch sync`: whatever the store lacks comes from the records; twice changes nothing."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tracked import make_folder, make_record, make_sweep, rows, runs

from benchmarks.record import CellFolder, Failure, Validity, read_study
from conf.schema import Tracking
from launch.__main__ import main
from launch.tracking.later_values import update_values
from launch.tracking.note import summary_markdown
from launch.tracking.sync import SyncReport, sync
from launch.tracking.tracker import Tracker

OTHER = "b" * 32


@pytest.fixture
def study_dir(output_dir):
    """Two sweeps of a study, one with a failed cell; nothing of them in the store."""
    folder = output_dir / "scaling"
    failed = make_record(
        3, sweep_id=OTHER, state="failed", failure=Failure("hang", 1, "rank 1 went silent")
    )
    for record in (
        make_record(1),
        make_record(2, validity=Validity("invalid", {"noisy": "noise"})),
        failed,
    ):
        make_folder(folder, record)
    return folder


def open_store(study_dir):
    return Tracker.open(Tracking(), study_dir.parent, study_dir.name)


def parents(tracker):
    found = tracker._client.search_runs([tracker._experiment])
    return {
        run.data.tags["ringside.sweep_id"]: run
        for run in found
        if "mlflow.parentRunId" not in run.data.tags
    }


def test_everything_is_projected_once(study_dir):
    assert sync(study_dir) == SyncReport(projected=3, already=0, unreadable=[])
    before = rows(study_dir.parent / "mlflow.db")
    assert sync(study_dir) == SyncReport(projected=0, already=3, unreadable=[])
    assert rows(study_dir.parent / "mlflow.db") == before
    tracker = open_store(study_dir)
    found = parents(tracker)
    assert {sweep: run.info.status for sweep, run in found.items()} == {
        "a" * 32: "FINISHED",
        OTHER: "FAILED",
    }
    assert found["a" * 32].data.tags["cells"] == "2 finished (1 of them invalid)"
    assert found["a" * 32].info.run_name.startswith("2 cells · ")
    assert "**failed**: hang" in found[OTHER].data.tags["mlflow.note.content"]
    children = tracker._client.search_runs(
        [tracker._experiment], f"tags.`mlflow.parentRunId` = '{found[OTHER].info.run_id}'"
    )
    assert [run.data.tags["ringside.record_id"] for run in children] == [f"{3:032x}"]


def test_a_sweep_that_was_logged_is_left_as_it_is(study_dir):
    tracker = open_store(study_dir)
    own = [make_record(1), make_record(2)]
    tracker.start_sweep(make_sweep())
    for record in own:
        tracker.log(record, CellFolder(study_dir / f"cell-{record.record_id[-6:]}"))
    earlier = dataclasses.replace(
        own[0], sweep_id=OTHER
    )  # a cell that the sweep resumed: in its table, not its own
    tracker.finish_sweep(make_sweep(), [*own, earlier], "interrupted", "the table")
    update_values(tracker, study_dir, read_study(study_dir)[0], {})
    before = {
        run.info.run_id: (run.info.to_proto(), run.data.to_dictionary())
        for run in runs(tracker).values()
    }
    assert sync(study_dir) == SyncReport(projected=1, already=2, unreadable=[])
    after = {
        run.info.run_id: (run.info.to_proto(), run.data.to_dictionary())
        for run in runs(tracker).values()
    }
    assert before.items() <= after.items()


def test_a_sweep_whose_launcher_died_is_completed(study_dir):
    tracker = open_store(study_dir)
    tracker.start_sweep(make_sweep(cells=9))
    tracker.log(make_record(1), CellFolder(study_dir / "cell-000001"))
    run_id = tracker._parents["a" * 32]
    tracker._client.set_tag(run_id, "ringside.boot_id", "an earlier boot")
    assert sync(study_dir) == SyncReport(projected=2, already=1, unreadable=[])
    parent = parents(tracker)["a" * 32]
    assert parent.info.run_id == run_id and parent.info.status == "KILLED"
    link, _, table = parent.data.tags["mlflow.note.content"].partition("\n\n")
    assert link.startswith("[Compare these cells](#/compare-runs?runs=")
    assert table == summary_markdown([make_record(1), parent_of_two()])
    before = rows(study_dir.parent / "mlflow.db")
    sync(study_dir)
    assert rows(study_dir.parent / "mlflow.db") == before


def parent_of_two():
    return make_record(2, validity=Validity("invalid", {"noisy": "noise"}))


def test_a_sweep_that_another_launcher_is_writing_is_not_closed(study_dir):
    tracker = open_store(study_dir)
    tracker.start_sweep(make_sweep())
    tracker._client.set_tag(tracker._parents["a" * 32], "ringside.host", "another-host")
    assert sync(study_dir).projected == 3
    assert parents(tracker)["a" * 32].info.status == "RUNNING"


def test_a_damaged_record_does_not_stop_the_others(study_dir, capsys):
    for name, content in (("torn", '{"schema_ver'), ("newer", '{"schema_version": 99}')):
        (study_dir / name).mkdir()
        (study_dir / name / "record.json").write_text(content)
    make_folder(study_dir, make_record(4, sweep_id="x' OR 'y", cell=[]))
    make_folder(study_dir, make_record(5, cell={"gpus": 3}))
    attempt = make_folder(
        study_dir / "cell-000001", make_record(6, state="interrupted")
    )  # an earlier attempt, set aside
    assert attempt.parent.name == "cell-000001"
    for projected, already in ((4, 0), (0, 4)):
        assert main(["sync", str(study_dir)]) == 1
        out, err = capsys.readouterr()
        assert out == f"{projected} projected, {already} there already, 4 unreadable\n"
        assert len(err.splitlines()) == 4 and "Traceback" not in err
    (study_dir / "journal.jsonl").write_text(
        json.dumps({"kind": "sweep", "time": 1.0, "sweep_id": "a" * 32}) + "\n"
    )
    efficiency = {f"{1:032x}": {"scaling/efficiency": 0.9}}
    update_values(
        open_store(study_dir), study_dir, read_study(study_dir)[0], efficiency
    )  # the line of its sweep has no order


def test_exit_status(study_dir, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for wrong in (["sync", str(tmp_path / "none")], ["sync", str(tmp_path / "empty")],
                  ["sync", str(study_dir), "--uri", "foo://me:secret@x"]):  # fmt: skip
        assert main(wrong) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "secret" not in err
    with pytest.raises(SystemExit, match="2"):
        main(["sink"])
    capsys.readouterr()
    (tmp_path / "file").write_text("no database at all")
    assert main(["sync", str(study_dir), "--uri", f"sqlite:///{tmp_path}/file"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "is no SQLite file" in err


def test_the_command_writes_elsewhere_when_asked(study_dir):
    command = [sys.executable, "-m", "launch", "sync", study_dir, "--experiment", "elsewhere"]
    uri = f"sqlite:///{study_dir.parent}/mlflow.db".replace("%", "%25").replace("#", "%23")
    done = subprocess.run(
        [*command, "--uri", uri],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "3 projected, 0 there already, 0 unreadable\n",
        "",
    )
    tracker = Tracker.open(Tracking(experiment="elsewhere"), study_dir.parent, "scaling")
    assert len(tracker._client.search_runs([tracker._experiment])) == 5
