"""MLflow's store: its URI; one that fails or is held is known soon and costs no measurement."""

import contextlib
import dataclasses
import io
import os
import shlex
import shutil
import socket
import sqlite3
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from build import make_sweep, tracked_folder, tracked_record, tracked_runs
from rich.console import Console

from benchmarks import record as records
from benchmarks.record import CellFolder, safe_files
from conf.schema import Tracking
from conf.secrets import without_credentials
from launch.study.study_folder import ProcessIdentity, StudyFolder, Sweep
from launch.tracking import store
from launch.tracking.store import TrackingUnavailable, WrongUri, connect, sqlite_file, store_uri
from launch.tracking.tracker import MlflowWriter, Tracker

SECRET = "hunter2-secret"


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://me:{SECRET}@host/db",
        f"cannot reach http://me:a/{SECRET}@host:5000, really",
        f"https://{SECRET}@host",
        f"mysql+pymysql://host/db?user=me&password={SECRET}&x=1",
        f"http:/me:{SECRET}@host",
    ],
)
def test_credentials_are_removed(text):
    assert SECRET not in without_credentials(text) and "***" in without_credentials(text)
    plain = "tracking.uri=sqlite:////a/b.db gpus=0,3 http://host:5000/path?x=1"
    assert without_credentials(plain) == plain


WRONG = "foo://bar mlruns /somewhere file:///somewhere sqlite:/x sqlite:// sqlite:///:memory:"


@pytest.mark.parametrize("uri", ["", *WRONG.split(), "http:x", "http://"])
def test_a_wrong_uri_is_refused_with_what_is_accepted(tmp_path, uri):
    with pytest.raises(WrongUri, match=r"expected (sqlite:///FILE|http://HOST)"):
        Tracker(Tracking(uri=uri), tmp_path, "scaling")


def test_a_sqlite_path_does_not_follow_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store_uri("sqlite:///x/m.db", tmp_path) == f"sqlite:///{tmp_path}/x/m.db"
    assert store_uri(None, Path("out")) == f"sqlite:///{tmp_path}/out/mlflow.db"


@pytest.mark.parametrize("is_new", [False, True])
def test_a_store_makes_no_folder_of_an_encoded_name(tmp_path, store_template, is_new):
    """In an output folder that is a link."""
    name = "Müller (copy) #1, 100% of me@home?"
    output_dir = tmp_path / name / "out"
    for folder in (output_dir.parent, tmp_path / "large disk"):
        folder.mkdir()
    output_dir.symlink_to(tmp_path / "large disk")
    if not is_new:
        shutil.copy(store_template, output_dir / "mlflow.db")
    uri = store_uri(None, output_dir)
    connect(uri, output_dir / "mlartifacts").search_experiments()
    assert store_uri(uri, tmp_path) == uri and sqlite_file(uri) == output_dir / "mlflow.db"
    assert {path.name for path in tmp_path.iterdir()} == {name, "large disk"}
    assert [path.name for path in (tmp_path / "large disk").iterdir()] == ["mlflow.db"]


def refused(tracking, folder, within_s=5):
    """The sentence with which a store is given up, known soon."""
    began = time.monotonic()
    with pytest.raises(TrackingUnavailable) as caught:
        Tracker(tracking, folder, "scaling")
    assert time.monotonic() - began < within_s
    sentence = str(caught.value)
    assert "\n" not in sentence and SECRET not in sentence and "Traceback" not in sentence
    return sentence


def test_a_locked_store_is_given_up_and_written_later(output_dir, monkeypatch, capfd):
    tracker = Tracker(Tracking(), output_dir, "scaling")
    monkeypatch.setattr(store, "LOCK_WAIT_S", 0.5)
    record = tracked_record(1)
    folder = CellFolder(tracked_folder(output_dir / "scaling", record))
    database = sqlite3.connect(output_dir / "mlflow.db", isolation_level=None)
    with contextlib.closing(database) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        assert "is locked by another process" in refused(Tracking(), output_dir)
        with pytest.raises(TrackingUnavailable, match="is locked by another process"):
            tracker.log([record], lambda _: folder)
        holder.execute("ROLLBACK")
    assert tracker.log([record], lambda _: folder)[0]
    assert capfd.readouterr() == ("", "")


def test_waiting_is_bounded_by_default_and_by_the_user(monkeypatch):
    monkeypatch.setattr(os, "environ", {"MLFLOW_HTTP_REQUEST_TIMEOUT": "77"})
    store.silence_mlflow()
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"


class Broken(BaseHTTPRequestHandler):
    """A server that answers 500, 200 with a page, or nothing, by the first part of the path."""

    def do_GET(self):
        if self.path.startswith("/hang"):
            self.server.ended.wait(30)
            return
        self.send_response(500 if self.path.startswith("/500") else 200)
        self.end_headers()
        self.wfile.write(b"<html>")

    do_POST = do_GET

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    server.daemon_threads, server.ended = True, threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.ended.set()
    server.shutdown()
    server.server_close()


def test_a_broken_server_is_given_up_soon(server, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    for kind, reason in {"500": "too many 500", "page": "", "hang": "Read timed out"}.items():
        sentence = refused(Tracking(uri=f"http://me:{SECRET}@{server}/{kind}"), tmp_path, 8)
        assert sentence.startswith(f"the tracking store http://***@{server}/{kind} cannot be used")
        assert reason in sentence
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert "Connection refused" in refused(Tracking(uri=uri), tmp_path, 8)
    assert capfd.readouterr() == ("", "")


def test_a_store_that_cannot_be_is_given_up_soon(tmp_path):
    (tmp_path / "file").write_text("no folder")
    refused(Tracking(uri=f"sqlite:///{tmp_path}/file/m.db"), tmp_path)
    assert "is not an SQLite file" in refused(Tracking(uri=f"sqlite:///{tmp_path}/file"), tmp_path)
    refused(Tracking(), tmp_path / "file")
    assert "***@" in refused(Tracking(uri=f"postgresql+nodriver://me:{SECRET}@host/db"), tmp_path)


def test_what_vanished_is_not_made_anew_and_what_was_deleted_is_named(output_dir):
    tracker = Tracker(Tracking(), output_dir, "scaling")
    tracker._client.delete_experiment(tracker._experiment)
    assert "restore it" in refused(Tracking(), output_dir)
    (output_dir / "mlflow.db").unlink()
    with pytest.raises(TrackingUnavailable, match="is gone"):
        tracker.start_sweep(make_sweep())
    assert not (output_dir / "mlflow.db").exists()


@pytest.fixture
def sweep(output_dir, monkeypatch):
    """The writer of a sweep and its two records; the lock of the store is waited for a moment."""
    monkeypatch.setattr(store, "STORE_LOCK_WAIT_S", 0.2)
    study = StudyFolder(str(output_dir), "s")
    measured = []
    for number in (1, 2):
        cell = dataclasses.replace(tracked_record().cell, seed=number)
        record = tracked_record(number, name=f"cell {number}", study="s", cell=cell)
        folder = CellFolder(study.folder / record.cell.folder)
        folder.path.mkdir()
        records.write(folder, record)
        measured.append(record)
    own = Sweep(measured[0].sweep_id, "s", [], measured[0].started_at, 2, ProcessIdentity.own())
    console = Console(file=io.StringIO(), width=1000)
    return MlflowWriter(Tracking(), study, own, console), measured, console


@pytest.mark.parametrize("held_from", ["the start", "the second cell"])
def test_a_store_that_another_launcher_held_is_written_in_the_end(sweep, output_dir, held_from):
    writer, measured, console = sweep
    with contextlib.ExitStack() as holder:
        lock = safe_files.locked(output_dir / ".mlflow.db.lock")
        if held_from == "the start":
            assert holder.enter_context(lock)
        writer.open()
        writer.log(measured[0])
        if held_from != "the start":
            assert holder.enter_context(lock)
        writer.log(measured[1])
    writer.close(measured, [], measured, stopping=lambda: False, report=None)
    stored = tracked_runs(writer._tracker)
    assert {"cell 1", "cell 2"} < stored.keys() and len(stored) == 3
    assert all(run.info.status == "FINISHED" for run in stored.values())
    assert console.file.getvalue().count("another process has held") == 1
    assert "python -m launch ui" in writer.where()[0]


def test_what_a_holder_keeps_is_left_to_sync(sweep, output_dir):
    writer, measured, _ = sweep
    with safe_files.locked(output_dir / ".mlflow.db.lock"):
        writer.open()
        writer.close(measured, [], measured, stopping=lambda: False, report=None)
    assert "python -m launch sync" in writer.where()[0]


def test_the_same_failure_is_printed_once(sweep, output_dir):
    writer, measured, console = sweep
    writer.open()
    (output_dir / "mlflow.db").unlink()
    for record in measured:
        writer.log(record)
    writer.close(measured, [], measured, stopping=lambda: False, report=None)
    assert console.file.getvalue().count("note: ") == console.file.getvalue().count("is gone") == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_its_commands_can_be_copied_where_a_path_has_a_space(tmp_path, enabled):
    study = StudyFolder(str(tmp_path / "my results"), "s")
    [line] = MlflowWriter(Tracking(enabled), study, None, None).where()
    assert str(study.folder) in shlex.split(line)
