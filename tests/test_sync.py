"""`python -m launch sync`: whatever the store lacks comes from the records."""

import dataclasses
import os

import pytest
from build import database_rows, make_sweep, tracked_folder, tracked_record, tracked_runs

from benchmarks.record import CellFolder, Failure, Validity
from conf.schema import Tracking
from launch.__main__ import main
from launch.tracking import mlflow_run
from launch.tracking.tracker import SyncReport, Tracker, sync
from launch.tracking.ui import WAITS, find_study

OTHER = "b" * 32


@pytest.fixture
def study_dir(output_dir):
    """Two sweeps of a study, one with a failed cell; nothing of them in the store."""
    folder = output_dir / "scaling"
    failed = tracked_record(
        3, sweep_id=OTHER, state="failed", failure=Failure("hang", 1, "rank 1 went silent")
    )
    for record in (
        tracked_record(1),
        tracked_record(2, validity=Validity("invalid", {"noisy": "noise"})),
        failed,
    ):
        tracked_folder(folder, record)
    return folder


def open_store(study_dir):
    return Tracker(Tracking(), study_dir.parent, study_dir.name)


def parents(tracker):
    stored = tracker._client.search_runs([tracker._experiment], "tags.`ringside.kind` = 'sweep'")
    return {run.data.tags["ringside.sweep_id"]: run for run in stored}


def test_everything_is_written_once(study_dir):
    assert sync(study_dir) == SyncReport(projected=3, already=0, unreadable=[])
    before = database_rows(study_dir.parent / "mlflow.db")
    assert sync(study_dir) == SyncReport(projected=0, already=3, unreadable=[])
    assert database_rows(study_dir.parent / "mlflow.db") == before
    tracker = open_store(study_dir)
    stored = parents(tracker)
    assert {sweep: run.info.status for sweep, run in stored.items()} == {
        "a" * 32: "FINISHED",
        OTHER: "FAILED",
    }
    assert stored["a" * 32].data.tags["cells"] == "2 finished (1 of them invalid)"
    assert stored["a" * 32].info.run_name.startswith("2 runs · ")
    assert "failed: hang" in stored[OTHER].data.tags["mlflow.note.content"]
    search = f"tags.`mlflow.parentRunId` = '{stored[OTHER].info.run_id}'"
    children = tracker._client.search_runs([tracker._experiment], search)
    assert [run.data.tags["ringside.record_id"] for run in children] == [f"{3:032x}"]


def test_a_sweep_that_was_logged_is_left_as_it_is(study_dir):
    tracker = open_store(study_dir)
    own = [tracked_record(1), tracked_record(2)]
    tracker.start_sweep(make_sweep())
    tracker.log(own, lambda record: CellFolder(study_dir / f"cell-{record.record_id[-6:]}"))
    earlier = dataclasses.replace(
        own[0], sweep_id=OTHER
    )  # resumed: in the sweep's table, not its own
    tracker.finish_sweep(make_sweep(), [*own, earlier], "interrupted", {})
    tracker.write_study([*own, tracked_record(3, sweep_id=OTHER)], {})
    before = {
        run.info.run_id: (run.info.to_proto(), run.data.to_dictionary())
        for run in tracked_runs(tracker).values()
    }
    assert sync(study_dir) == SyncReport(projected=1, already=2, unreadable=[])
    after = {
        run.info.run_id: (run.info.to_proto(), run.data.to_dictionary())
        for run in tracked_runs(tracker).values()
    }
    assert before.items() <= after.items()


def test_a_sweep_whose_launcher_died_is_completed(study_dir):
    tracker = open_store(study_dir)
    tracker.start_sweep(make_sweep(cells=9))
    tracker.log([tracked_record(1)], lambda _: CellFolder(study_dir / "cell-000001"))
    run_id = tracker._parents["a" * 32]
    tracker._client.set_tag(run_id, "ringside.boot_id", "an earlier boot")
    assert sync(study_dir) == SyncReport(projected=2, already=1, unreadable=[])
    parent = parents(tracker)["a" * 32]
    assert parent.info.run_id == run_id and parent.info.status == "KILLED"
    assert parent.data.tags["mlflow.note.content"].count("\n| resnet50") == 2
    before = database_rows(study_dir.parent / "mlflow.db")
    sync(study_dir)
    assert database_rows(study_dir.parent / "mlflow.db") == before


def test_a_sweep_that_another_launcher_is_writing_is_not_closed(study_dir):
    tracker = open_store(study_dir)
    tracker.start_sweep(make_sweep())
    tracker._client.set_tag(tracker._parents["a" * 32], "ringside.host", "another-host")
    assert sync(study_dir).projected == 3
    assert parents(tracker)["a" * 32].info.status == "RUNNING"


def test_a_damaged_record_does_not_stop_the_others(study_dir, capsys):
    for name, text in (("torn", '{"schema_ver'), ("newer", '{"schema_version": 99}')):
        (study_dir / name).mkdir()
        (study_dir / name / "record.json").write_text(text)
    tracked_folder(study_dir, tracked_record(4, sweep_id="x' OR 'y", cell=[]))
    tracked_folder(study_dir, tracked_record(5, cell={"gpus": 3}))
    tracked_folder(
        study_dir / "cell-000001", tracked_record(6, state="interrupted")
    )  # an earlier attempt, set aside
    for projected, already in ((4, 0), (0, 4)):
        assert main(["sync", str(study_dir)]) == 1
        out, err = capsys.readouterr()
        assert out == f"{projected} runs written to MLflow, {already} there before, 4 not written\n"
        assert len(err.splitlines()) == 4 and "Traceback" not in err


@pytest.mark.parametrize(
    "wrong",
    [
        {"series": {"x": [[float("inf"), 1.0]]}},
        {"series": {"x": [[step, 1.0] for step in range(100_001)]}},
        {"metrics": {"x" * 300: 1.0}},
    ],
    ids=["step", "points", "of MLflow"],
)
def test_a_record_that_mlflow_does_not_take_is_named(study_dir, capsys, monkeypatch, wrong):
    monkeypatch.setattr(mlflow_run, "NAME_LENGTH", 300)  # MLflow takes 250
    tracked_folder(study_dir, tracked_record(4, name="the wrong one", **wrong))
    assert main(["sync", str(study_dir)]) == 1
    out, err = capsys.readouterr()
    assert out == "3 runs written to MLflow, 0 there before, 1 not written\n"
    assert "record the wrong one cannot be written to MLflow: " in err and err.count("\n") == 1
    statuses = {run.info.status for run in tracked_runs(open_store(study_dir)).values()}
    assert "RUNNING" not in statuses


def test_exit_status(study_dir, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    wrong = [
        [str(tmp_path / "none")],
        [str(tmp_path / "empty")],
        [str(study_dir), "--uri", "foo://me:secret@x"],
    ]
    for arguments in wrong:
        assert main(["sync", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "secret" not in err
    with pytest.raises(SystemExit, match="2"):
        main(["sink"])
    capsys.readouterr()
    (tmp_path / "file").write_text("no database at all")
    assert main(["sync", str(study_dir), "--uri", f"sqlite:///{tmp_path}/file"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "is not an SQLite file" in err


def test_the_command_writes_elsewhere_when_asked(study_dir, capsys):
    uri = f"sqlite:///{study_dir.parent}/mlflow.db".replace("%", "%25").replace("#", "%23")
    assert main(["sync", str(study_dir), "--experiment", "elsewhere", "--uri", uri]) == 0
    assert capsys.readouterr() == ("3 runs written to MLflow, 0 there before, 0 not written\n", "")
    tracker = Tracker(Tracking(experiment="elsewhere"), study_dir.parent, "scaling")
    assert len(tracker._client.search_runs([tracker._experiment])) == 5


def test_the_pages_of_a_study_are_refused_in_one_sentence(study_dir, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = study_dir.parent
    (folder / "empty").mkdir()
    (folder / "mlflow.db").rename(folder / "later.db")

    def said(*arguments):
        assert main(["ui", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        *before, refusal = err.splitlines()
        assert out == "" and before in ([], [WAITS])
        return refusal

    assert "empty: holds no study; expected" in said(folder / "empty")
    assert "no run was written to MLflow yet; to write them: python -m launch sync" in said(folder)
    (folder / "later.db").rename(folder / "mlflow.db")
    assert "MLflow has no run of this study" in said(study_dir)
    sync(study_dir)
    assert "the pages of MLflow are not installed: pip install -e '.[ui]'" in said(folder)


def test_the_study_that_was_measured_last_is_shown(study_dir):
    other = study_dir.parent / "other"
    tracked_folder(other, tracked_record(9))
    for path in other.glob("*/record.json"):
        os.utime(path, (2e9, 2e9))
    assert [find_study(path).name for path in (study_dir, other.parent)] == ["scaling", "other"]
