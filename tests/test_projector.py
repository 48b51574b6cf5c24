"""What a sweep does while another launcher holds the store, and what it says of a store that fails."""

import contextlib
import dataclasses
import io
import shlex
import threading

import pytest
from records import make_record
from rich.console import Console
from tracked import runs

from benchmarks import record as records
from benchmarks.record import CellFolder, own_files
from conf.schema import Tracking
from launch.study.identity import ProcessIdentity, Sweep
from launch.study.study import StudyFolder
from launch.tracking import projector, store
from launch.tracking.projector import Projector


@pytest.fixture
def sweep(output_dir, monkeypatch):
    """Two measured records of a sweep, and its projector; the lock of the store is waited for a moment."""
    monkeypatch.setattr(store, "STORE_LOCK_WAIT_S", 0.2)
    study = StudyFolder(str(output_dir), "s")
    measured = []
    for number in (1, 2):
        record = dataclasses.replace(
            make_record(), record_id=f"{number:032x}", name=f"cell {number}", study="s"
        )
        record = dataclasses.replace(record, cell=dataclasses.replace(record.cell, seed=number))
        folder = CellFolder(study.folder / record.cell.folder)
        folder.path.mkdir()
        records.write(folder, record)
        measured.append(record)
    asked = Sweep(measured[0].sweep_id, "s", [], measured[0].started_at, 2, ProcessIdentity.own())
    console = Console(file=io.StringIO(), width=1000)
    return Projector(Tracking(), study, asked, console), measured, console


@pytest.mark.parametrize("held_from", ["the start", "the second cell"])
def test_a_store_that_another_launcher_holds_is_written_in_the_end(sweep, output_dir, held_from):
    projector, measured, console = sweep
    holder = contextlib.ExitStack()
    lock = own_files.locked(output_dir / ".mlflow.db.lock")
    if held_from == "the start":
        assert holder.enter_context(lock)
    projector.open()
    projector.log(measured[0])
    if held_from != "the start":
        assert holder.enter_context(lock)
    projector.log(measured[1])
    threading.Timer(1.0, holder.close).start()
    projector.close(measured, [], measured, stopping=lambda: False, report=None)
    found = runs(projector._tracker)
    assert {"seed=1", "seed=2"} < found.keys() and len(found) == 3
    assert all(run.info.status == "FINISHED" for run in found.values())
    assert console.file.getvalue().count("another process has held") == 1
    assert "mlflow ui" in projector.where()[0]


def test_a_user_who_stops_does_not_wait_for_the_holder(sweep, output_dir):
    projector, measured, _ = sweep
    with own_files.locked(output_dir / ".mlflow.db.lock"):
        projector.open()
        projector.close(measured, [], measured, stopping=lambda: True, report=None)
    assert "python -m launch sync" in projector.where()[0]


def test_waiting_for_a_holder_ends(sweep, output_dir, monkeypatch):
    one, measured, _ = sweep
    monkeypatch.setattr(projector, "LAST_WAIT_S", 0.1)
    with own_files.locked(output_dir / ".mlflow.db.lock"):
        one.open()
        one.close(measured, [], measured, stopping=lambda: False, report=None)
    assert "python -m launch sync" in one.where()[0]


@pytest.mark.parametrize("enabled", [True, False])
def test_its_commands_can_be_copied_where_a_path_has_a_space(tmp_path, enabled):
    study = StudyFolder(str(tmp_path / "my results"), "s")
    [line] = Projector(Tracking(enabled), study, None, None).where()
    named = store.store_uri(None, study.folder.parent) if enabled else str(study.folder)
    assert named in shlex.split(line)


def test_the_same_failure_is_told_once(sweep, output_dir):
    projector, measured, console = sweep
    projector.open()
    (output_dir / "mlflow.db").unlink()
    for record in measured:
        projector.log(record)
    projector.close(measured, [], measured, stopping=lambda: False, report=None)
    assert console.file.getvalue().count("note: ") == console.file.getvalue().count("is gone") == 1
