"""Nothing of the user's own is ever replaced: places that results must not be written to are refused before any start."""

import os

import pytest

from conf.schema import Tracking
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
    "is no regular file": lambda path, _: os.mkfifo(path),
    "is an empty file": lambda path, _: path.touch(),
    "is no SQLite file": lambda path, _: path.write_text("my thesis"),
}


@pytest.mark.parametrize("reason", OCCUPIED)
def test_a_store_is_made_only_where_nothing_or_a_store_is(launch, tmp_path, reason):
    (tmp_path / "outputs").mkdir()
    for place, option in (("outputs/mlflow.db", ()), ("own.db", (f"tracking.uri=sqlite:///{tmp_path}/own.db",))):
        file = tmp_path / place
        OCCUPIED[reason](file, tmp_path)
        before = state(file)
        assert reason in refusal(launch, *option)
        with pytest.raises(TrackingUnavailable, match=reason):  # python -m launch sync
            Tracker.open(Tracking(uri=f"sqlite:///{file}"), tmp_path / "outputs", "s")
        assert state(file) == before
        file.unlink()
        (tmp_path / "mine").unlink(missing_ok=True)
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == [".mlflow.db.lock"]


def test_a_lock_that_is_not_ours_is_left_alone(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".mlflow.db.lock").symlink_to(mine)
    with pytest.raises(TrackingUnavailable, match="is a link"):
        Tracker.open(Tracking(), tmp_path, "s")
    assert mine.read_text() == "mine" and not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize("uri", ["ftp://x", "http://", "file:///etc", "sqlite://"])
def test_a_uri_that_no_store_can_have_is_refused(launch, uri):
    assert f"tracking.uri={uri}: accepted" in refusal(launch, f"tracking.uri={uri}", "dry_run=true")


@pytest.mark.parametrize("name", ["mlflow.db", "mlartifacts", "noise_floor.json"])
def test_a_study_cannot_have_the_name_of_what_lies_beside_it(launch, name):
    assert f"study={name}: accepted is another name" in refusal(launch, f"study={name}")


def test_a_folder_that_is_a_link_or_no_folder_is_refused(launch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "outputs").mkdir()
    study = tmp_path / "outputs" / "default"
    study.symlink_to(elsewhere)
    assert "default is a link" in refusal(launch)
    study.unlink()
    study.touch()
    assert "default is no folder" in refusal(launch)
    assert not any(elsewhere.iterdir())


@pytest.mark.parametrize("number", ["inf", "nan", "-inf"])
def test_numbers_are_finite(launch, number):
    assert f"engine.cell_timeout_s={number}: accepted is" in refusal(launch, f"engine.cell_timeout_s={number}")
