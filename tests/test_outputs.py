"""Nothing of the user's own is ever replaced: such places are refused before any start."""

import os
import resource
import tempfile

import pytest

from conf.schema import Tracking
from launch.plan import plan
from launch.study.study_folder import StudyFolder
from launch.tracking.store import TrackingUnavailable
from launch.tracking.tracker import Tracker

CELL = ("gpus=0", "model=fmnist_cnn")


def refusal(launch, *arguments):
    code, out, err = launch(*CELL, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def link(path, tmp_path):
    target = tmp_path / "mine"
    target.write_text("mine")
    path.symlink_to(target)


def state(file):
    found = file.lstat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns


OCCUPIED = {
    "is a link": link,
    "is not a regular file": lambda path, _: os.mkfifo(path),
    "is not an SQLite file": lambda path, _: path.write_text("my thesis"),
}


@pytest.mark.parametrize("reason", OCCUPIED)
def test_a_store_is_made_only_where_nothing_or_a_store_is(launch, tmp_path, reason):
    (tmp_path / "outputs").mkdir()
    own = (f"tracking.uri=sqlite:///{tmp_path}/own.db",)
    for place, option in (("outputs/mlflow.db", ()), ("own.db", own)):
        file = tmp_path / place
        OCCUPIED[reason](file, tmp_path)
        before = state(file)
        assert reason in refusal(launch, *option)
        with pytest.raises(TrackingUnavailable, match=reason):  # python -m launch sync
            Tracker(Tracking(uri=f"sqlite:///{file}"), tmp_path / "outputs", "s")
        assert state(file) == before
        file.unlink()
        (tmp_path / "mine").unlink(missing_ok=True)
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == [".mlflow.db.lock"]


def test_a_lock_that_is_not_ours_is_left_alone(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".mlflow.db.lock").symlink_to(mine)
    with pytest.raises(TrackingUnavailable, match="is a link"):
        Tracker(Tracking(), tmp_path, "s")
    assert mine.read_text() == "mine" and not (tmp_path / "mlflow.db").exists()


def test_a_folder_that_is_a_link_or_no_folder_is_refused(launch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "outputs").mkdir()
    study = tmp_path / "outputs" / "default"
    study.symlink_to(elsewhere)
    assert "default is a link" in refusal(launch)
    study.unlink()
    study.touch()
    assert "default is not a folder" in refusal(launch)
    assert not any(elsewhere.iterdir())


def test_what_mlflow_writes_beside_the_store_is_no_link(launch, tmp_path):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "outputs" / "mlartifacts").symlink_to(tmp_path / "mine")
    assert "is a link" in refusal(launch)
    with pytest.raises(TrackingUnavailable, match="is a link"):  # python -m launch sync
        Tracker(Tracking(), tmp_path / "outputs", "s")
    assert not any((tmp_path / "mine").iterdir())
    assert not (tmp_path / "outputs" / "mlflow.db").exists()


def test_a_cell_that_becomes_a_link_after_the_plan_fails_alone(launch, tmp_path, monkeypatch):
    elsewhere, lock, cells = tmp_path / "elsewhere", StudyFolder.lock, []
    elsewhere.mkdir()

    def planted(study, cell):
        cells.append(study.folder / cell.folder)
        cells[-1].symlink_to(elsewhere)
        return lock(study, cell)

    monkeypatch.setattr(StudyFolder, "lock", planted)
    code, out, err = launch("-m", *CELL, "seed=1,2", "tracking=none", "report=false")
    assert (code, err, len(cells)) == (1, "", 2) and "2 failed" in out
    assert all(f"was not measured: {cell} is a link; it is left as it is" in out for cell in cells)
    assert not any(elsewhere.iterdir())


def in_a_circle(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    return f"{tmp_path}/circle"


@pytest.mark.parametrize("place", [in_a_circle, lambda _: "/dev/full", lambda _: "/dev/null/x"])
def test_a_place_that_cannot_be_written_is_one_line(launch, tmp_path, place):
    code, _, err = launch(*CELL, f"output_dir={place(tmp_path)}")
    assert (code, err.count("\n")) == (2, 1) and "cannot be written (" in err


def test_planning_writes_nothing(launch, monkeypatch):
    """No folder for temporary files, and any write would raise: a plan needs none."""
    monkeypatch.setattr(tempfile, "_mkstemp_inner", None)
    monkeypatch.setattr(tempfile, "mkdtemp", None)
    # It would refuse the limit itself.
    monkeypatch.setattr(plan, "too_small", list)
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, allowed[1]))
    try:
        plans = [launch(*CELL, *more, "dry_run=true") for more in ((), ("-m", "seed=1,2"))]
        code, _, err = launch(*CELL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert [(status, said) for status, _, said in plans] == [(0, "")] * 2
    assert err.startswith("launch.py: output_dir=outputs: cannot be written: ")
    assert (code, err.count("\n")) == (2, 1)
