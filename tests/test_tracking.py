"""Records in MLflow: the names of the contract, children of parents, twice as once, and a store that fails soon."""

import dataclasses
import math
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cells import changed_cell
from tracked import make_folder, make_record, make_sweep, rows, runs

from benchmarks.record import CellFolder, Failure, Validity
from conf.schema import Tracking
from launch.machine.secrets import without_credentials
from launch.study.identity import ProcessIdentity
from launch.tracking import siblings, store
from launch.tracking.note import cut_to, summary_markdown
from launch.tracking.projection import escaped, project
from launch.tracking.store import TrackingUnavailable, WrongUri, connect, sqlite_file, store_uri
from launch.tracking.tracker import Tracker

SECRET = "hunter2-secret"


@pytest.fixture
def tracker(output_dir):
    return Tracker.open(Tracking(), output_dir, "scaling")


def test_a_sweep_is_a_parent_with_its_cells(tracker, output_dir):
    good = make_record(1)
    repeated = make_record(
        2, drift=True, cell=changed_cell(good.cell, repeat=-3, global_batch_size=512, nccl={})
    )
    failed = make_record(
        3,
        name="bad",
        state="failed",
        failure=Failure("oom", 1, "rank 1 ran out of memory"),
        metrics={},
    )
    stopped = make_record(
        4, name="stopped", state="interrupted", validity=Validity("invalid", {"noisy": "noise"})
    )
    everything = [good, repeated, failed, stopped]
    tracker.start_sweep(make_sweep(4))
    (parent,) = runs(tracker).values()
    assert parent.info.status == "RUNNING" and parent.info.run_name.startswith("4 cells · 2026-")
    for record in everything:
        assert tracker.log(record, CellFolder(make_folder(output_dir / "scaling", record)))
    tracker.finish_sweep(make_sweep(4), everything, "failed", summary_markdown(everything))
    tracker.describe(everything)

    found = {
        run.data.tags.get("ringside.record_id", "parent"): run
        for run in tracker._client.search_runs(["1"])
    }
    assert len(found) == 5
    child, repeat, bad, cut_short = (found[one.record_id] for one in everything)
    names = {one: run.info.run_name for one, run in found.items() if one != "parent"}
    assert (
        names == siblings.names(everything)
        and names[repeated.record_id] == "global batch 512 · drift"
    )
    assert child.data.params == {
        "model": "resnet50", "strategy": "nccl_allreduce", "benchmark": "throughput", "gpus": "0,3", "world_size": "2",
        "batch_size": "256", "precision": "bf16", "optimize": "eager", "device": "cuda", "seed": "0", "repeat": "0",
        "image_size": "224", "nccl.p2p_level": "LOC", "strategy.bucket_cap_mb": "25", "strategy.comm_hook": "none",
        "model.parameters": "25557032", "model.gradient_bytes": "102228128", "global_batch_size": "default",
    }  # fmt: skip
    assert child.data.metrics == {**good.metrics, "step/ms": 50.0}
    expected = {
        "validity": "valid", "validity.codes": "", "transport": "SHM", "link_class": "NV18", "cell_id": good.cell_key,
        "state": "finished", "ringside.record_id": good.record_id, "ringside.sweep_id": good.sweep_id,
        "mlflow.parentRunId": parent.info.run_id, "role": "first", "gpu": "NVIDIA H200", "driver": "580.159.04",
        "nccl": "2.28.9", "torch": "2.11.0+cu130", "commit": "c" * 40, "host": "node7", "cpu": "Xeon",
    }  # fmt: skip
    assert expected.items() <= child.data.tags.items()
    assert (child.info.status, child.info.start_time, child.info.end_time) == (
        "FINISHED", round(good.started_at * 1000), round(good.ended_at * 1000),
    )  # fmt: skip
    history = tracker._client.get_metric_history(child.info.run_id, "step/ms")
    assert [(point.step, point.value) for point in history] == [(0, 51.0), (1, 50.0), (2, 50.0)]
    listed = {item.path for top in ("", "ranks", "logs", "nccl")
              for item in tracker._client.list_artifacts(child.info.run_id, top) if not item.is_dir}  # fmt: skip
    assert listed == {"record.json", "topology.txt", "ranks/0.jsonl", "logs/0.log", "nccl/0.log"}
    assert (output_dir / "mlartifacts" / child.info.run_id / "artifacts" / "record.json").is_file()

    assert (
        repeat.data.params["global_batch_size"] == "512"
        and repeat.data.params["nccl.p2p_level"] == "default"
    )
    assert (repeat.data.params["repeat"], repeat.data.tags["role"]) == ("0", "drift")
    assert (bad.info.status, cut_short.info.status) == ("FAILED", "KILLED")
    assert (
        bad.data.tags["failure.cause"] == "oom" and cut_short.data.tags["validity.codes"] == "noisy"
    )
    assert "ran out of memory" in bad.data.tags["mlflow.note.content"]
    parent = tracker._client.get_run(parent.info.run_id)
    assert parent.info.status == "FAILED" and "| 5,000 |" in parent.data.tags["mlflow.note.content"]
    assert parent.data.tags["cells"] == "2 finished, 1 failed, 1 interrupted"
    assert parent.data.metrics == {
        "cells/valid": 2, "cells/suspect": 0, "cells/invalid": 0, "cells/failed": 1, "cells/interrupted": 1,
        "best/images_per_second": 5000,
    }  # fmt: skip
    assert parent.data.params["nccl.p2p_level"] == "LOC | default"
    assert (parent.data.tags["host"], parent.data.tags["best.cell"]) == ("node7", good.name)


def test_logging_twice_changes_nothing(tracker, output_dir):
    record = make_record(1)
    folder = make_folder(output_dir / "scaling", record)
    tracker.start_sweep(make_sweep())
    assert tracker.log(record, CellFolder(folder))
    tracker.finish_sweep(make_sweep(), [record], "finished", "table")
    before = rows(output_dir / "mlflow.db")
    again = Tracker.open(Tracking(), output_dir, "scaling")
    again.start_sweep(make_sweep())
    assert not again.log(record, CellFolder(folder))
    again.finish_sweep(make_sweep(), [record], "finished", "table")
    assert rows(output_dir / "mlflow.db") == before


@pytest.mark.parametrize("at", ["log_artifact", "log_batch", "set_tag", "set_terminated"])
def test_a_half_written_run_is_completed(tracker, output_dir, monkeypatch, at):
    record = make_record(1)
    folder = make_folder(output_dir / "scaling", record)
    tracker.start_sweep(make_sweep())

    def die(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tracker._client, at, die)
        tracker.log(record, CellFolder(folder))
    run = runs(tracker)[record.name]
    assert run.info.status == ("FINISHED" if at == "set_tag" else "RUNNING")
    tracker._client.set_tag(
        run.info.run_id, "ringside.boot_id", "an earlier boot"
    )  # so the next start closes it as KILLED
    assert Tracker.open(Tracking(), output_dir, "scaling").log(record, CellFolder(folder))
    found = runs(tracker)
    assert len(found) == 2 and found[record.name].info.status == "FINISHED"
    assert found[record.name].data.metrics["throughput/images_per_second"] == 5000.0
    assert found[record.name].data.params["gpus"] == "0,3"


LAUNCHER = """
import sys
from pathlib import Path
from conf.schema import Tracking
from launch.study.identity import Sweep
from launch.tracking.tracker import Tracker
tracker = Tracker.open(Tracking(), Path(sys.argv[1]), "scaling")
tracker.start_sweep(Sweep.begin("scaling", [], 1))
print("ready", flush=True)
sys.stdin.read()
"""


def launcher(folder):
    root = Path(__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, folder], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_only_a_dead_launcher_s_runs_are_closed(output_dir):
    process = launcher(output_dir)
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    (run,) = runs(Tracker.open(Tracking(), output_dir, "scaling")).values()
    assert run.info.status == "RUNNING"
    process.kill()
    process.communicate()
    tracker = Tracker.open(Tracking(), output_dir, "another")  # any study of the store
    assert tracker._client.get_run(run.info.run_id).info.status == "KILLED"


def test_launchers_that_meet_on_a_fresh_store_both_succeed(tmp_path):
    processes = [launcher(tmp_path / "out") for _ in range(2)]
    ended = [process.communicate(timeout=100) for process in processes]
    assert [
        (process.returncode, out, err) for process, (out, err) in zip(processes, ended, strict=True)
    ] == [(0, "ready\n", "")] * 2
    file = tmp_path / "out" / "mlflow.db"
    assert (
        file.stat().st_mode == (file.parent / ".mlflow.db.lock").stat().st_mode
    )  # what the umask leaves
    assert len(rows(file)["runs"]) == 2
    assert {path.name for path in file.parent.iterdir()} == {"mlflow.db", ".mlflow.db.lock"}


def test_a_process_is_known_by_more_than_its_pid():
    own = ProcessIdentity.own()
    assert not own.gone
    assert dataclasses.replace(own, started=own.started - 100).gone
    assert dataclasses.replace(own, boot_id="another").gone
    assert not dataclasses.replace(own, host="elsewhere", pid=1 << 22).gone


def test_numbers_that_are_not_finite_are_named_not_logged(tracker, output_dir):
    record = make_record(
        1, metrics={"a": math.nan, "b": math.inf, "c": 1.0}, series={"d": [[0, "nan"], [1, 2.0]]}
    )
    tracker.log(record, CellFolder(make_folder(output_dir / "scaling", record)))
    run = runs(tracker)[record.name]
    assert run.data.metrics == {"c": 1.0, "d": 2.0}
    assert run.data.tags["ringside.nonfinite"] == "a,b,d"


def test_a_series_does_not_hide_the_metric_of_its_name():
    name = "throughput/images_per_second"
    projection = project(make_record(1, metrics={name: 7.0}, series={name: [[0, 1.0], [1, 2.0]]}))
    assert [row[0] for row in projection.metrics] == [name, f"{name}/window", f"{name}/window"]


def test_the_numbers_of_the_contract_come_before_the_others():
    metrics = {
        "step/first_ms": 1.0,
        "warmup/iterations": 10.0,
        "comm/busbw_gb_per_s": 12.0,
        "throughput/images": 9.0,
    }
    order = [row[0] for row in project(make_record(1, metrics=metrics, series={})).metrics]
    assert order == [
        "throughput/images",
        "comm/busbw_gb_per_s",
        "step/first_ms",
        "warmup/iterations",
    ]


HOSTILE = "a\nb|c`d`<script>alert(1)</script>\x1b[31m" + "x" * 10_000


def test_hostile_strings_are_kept_harmless(tracker, output_dir):
    strategy = {"name": HOSTILE, "../../etc=passwd%": HOSTILE}
    record = make_record(
        1,
        name=HOSTILE,
        cell=changed_cell(make_record().cell, strategy=strategy, nccl={"NCCL_\n'": HOSTILE}),
        state="failed",
        failure=Failure(HOSTILE, None, HOSTILE),
        validity=Validity("invalid", {HOSTILE: HOSTILE}),
        metrics={"a[0]=%|": 1.0, "/../x": 2.0},
        series={},
        effective={"transport": [HOSTILE], "link_class": {"0-1": "NV18"}},
        study=HOSTILE,
    )
    folder = make_folder(output_dir / "scaling", record)
    (folder / "link.log").symlink_to("/etc/passwd")
    (folder / "nccl" / "0.log").unlink()
    (folder / "nccl").rmdir()
    (folder / "nccl").symlink_to(folder / "logs")
    (folder / "large.log").write_bytes(b"x" * ((16 << 20) + 1))
    sweep = dataclasses.replace(make_sweep(), study=HOSTILE, overrides=[HOSTILE])
    tracker.start_sweep(sweep)
    tracker.log(record, CellFolder(folder))
    tracker.finish_sweep(sweep, [record], "failed", summary_markdown([record] * 50))
    found = tracker._client.search_runs([tracker._experiment])
    assert len(found) == 2 and all(
        run.info.run_name.isprintable() and len(run.info.run_name) <= 250 for run in found
    )
    child, parent = sorted(found, key=lambda run: "mlflow.parentRunId" not in run.data.tags)
    assert (
        sorted(child.data.metrics.values()) == [1.0, 2.0]
        and child.data.tags["ringside.left_out"] == "large.log"
    )
    kept = {item.path for item in tracker._client.list_artifacts(child.info.run_id)}
    assert kept == {"record.json", "topology.txt", "ranks", "logs"}
    for run in found:
        assert "<script" not in run.data.tags["mlflow.note.content"]
    assert parent.data.tags["mlflow.note.content"].endswith("summary.md\n")
    whole = tracker._client.download_artifacts(parent.info.run_id, "summary.md")
    assert len(Path(whole).read_text().splitlines()) == 52


def test_the_summary_is_one_row_for_each_record():
    metrics = {
        "throughput/images_per_second": 4652.4,
        "throughput/images_per_second_per_gpu": 2326.2, "scaling/efficiency": 0.981, "comm/busbw_gb_per_s": 12.345,
        "comm/exchange_ms": 2.5, "comm/ideal_ratio": 0.912,
        "strategy/cost_ms": 0.1234,
    }  # fmt: skip
    next_run = {
        f"{1:032x}": {
            "throughput/ci_low": 4640.0,
            "throughput/ci_high": 4671.0,
            "throughput/ci_runs": 12.0,
        }
    }
    bad = make_record(
        2,
        name="a|b<c",
        state="failed",
        failure=Failure("hang", 1, "rank 1 was `silent`"),
        metrics={},
    )
    *lines, empty, below, other, reference = summary_markdown(
        [make_record(1, metrics=metrics), bad], next_run
    ).splitlines()
    assert (empty, below, other) == (
        "",
        "± for the next run (95 %), from 12 runs of equal cells",
        "",
    )
    assert (
        reference
        == "reference: the exchange's own bytes in the largest pieces, without any waiting"
    )
    assert len(lines) == 4 and all(line.replace("\\|", "").count("|") == 13 for line in lines)
    assert lines[2] == (
        "| resnet50 · nccl_allreduce · gpus 0,3 · P2P_LEVEL=LOC | 4,652 | ±\xa00.33\xa0% | 2,326 | 98.1\xa0% | 2.50 "
        "| 91.2\xa0% | 12.3 | 0.123 | SHM | NV18 | valid |"
    )
    assert lines[3].startswith("| a\\|b&lt;c | – | – |")
    assert lines[3].endswith("| **failed**: hang of rank 1, rank 1 was \\`silent\\` |")
    assert escaped("\x1b]0;\r\n\\|[x](y)*") == "\\\\x1b\\]0;  \\\\\\|\\[x\\](y)\\*"
    assert len(cut_to("line\n" * 5000, 8000)) <= 8000


def test_the_summary_says_once_what_all_names_begin_with():
    base = make_record().cell
    names = [
        "resnet50 · nccl_allreduce · gpus 0,3",
        "resnet50 · nccl_allreduce · gpus 0,3 · ALGO=Ring",
    ]
    lines = summary_markdown(
        [make_record(i, name=name) for i, name in enumerate(names)]
    ).splitlines()
    assert lines[:2] == ["Every cell: resnet50 · nccl_allreduce", ""]
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| gpus 0,3", "| gpus 0,3 · ALGO=Ring"]
    same = [
        make_record(0),
        make_record(1, cell=changed_cell(base, repeat=1)),
        make_record(2, name="resnet18 · none"),
    ]
    assert (
        summary_markdown(same)
        .splitlines()[3]
        .startswith("| resnet50 · nccl_allreduce · gpus 0,3 · P2P_LEVEL=LOC · rep")
    )
    assert summary_markdown([]).count("\n") == 2


def test_the_summary_has_the_headline_of_another_benchmark():
    cell = changed_cell(make_record().cell, benchmark={"name": "overhead"})
    metrics = {"step/first_ms": 2.0, "overhead/share": 0.0012}
    ends = {f"{1:032x}": {"overhead/share_ci_low": -0.0005, "overhead/share_ci_high": 0.003}}
    lines = summary_markdown(
        [make_record(1, cell=cell, metrics=metrics), make_record(2, name="x")], ends
    ).splitlines()
    assert lines[0].startswith("| cell | result | images/s |") and all(
        line.count("|") == 9 for line in lines
    )
    assert "| overhead 0.12\xa0% (−0.05 to 0.30 for the next run) | – |" in lines[2] and lines[
        3
    ].startswith("| x | – | 5,000 |")


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


def test_text_without_credentials_stays():
    text = "tracking.uri=sqlite:////a/b.db gpus=0,3 http://host:5000/path?x=1"
    assert without_credentials(text) == text


@pytest.mark.parametrize(
    "uri",
    [
        "foo://bar",
        "mlruns",
        "/somewhere",
        "file:///somewhere",
        "sqlite:/x",
        "sqlite://",
        "sqlite:///:memory:",
        "http:x",
        "http://",
        "",
    ],
)
def test_a_wrong_uri_is_refused_with_what_is_accepted(tmp_path, uri):
    with pytest.raises(WrongUri, match=r"accepted (are|is) (sqlite:///FILE|http://HOST)"):
        Tracker.open(Tracking(uri=uri), tmp_path, "scaling")


def test_a_sqlite_path_does_not_follow_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store_uri("sqlite:///x/m.db", tmp_path) == f"sqlite:///{tmp_path}/x/m.db"
    assert store_uri(None, Path("out")) == f"sqlite:///{tmp_path}/out/mlflow.db"


@pytest.mark.parametrize("name", ["Müller (copy) #1", "100% of me@home?"])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_store_makes_no_folder_of_the_name_that_its_address_would_have_encoded(
    tmp_path, store_template, name, is_new
):
    output_dir = tmp_path / name / "out"
    output_dir.mkdir(parents=True)
    if not is_new:
        shutil.copy(store_template, output_dir / "mlflow.db")
    uri = store_uri(None, output_dir)
    connect(uri, output_dir / "mlartifacts").search_experiments()
    assert store_uri(uri, tmp_path) == uri and sqlite_file(uri) == output_dir / "mlflow.db"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert [path.name for path in output_dir.iterdir()] == ["mlflow.db"]


def test_a_new_store_is_made_in_an_output_dir_that_is_a_link(tmp_path):
    (tmp_path / "large disk").mkdir()
    (tmp_path / "outputs").symlink_to(tmp_path / "large disk")
    Tracker.open(Tracking(), tmp_path / "outputs", "scaling")
    assert (tmp_path / "large disk" / "mlflow.db").is_file()


def refused(tracking, folder, within_s):
    """The sentence with which a store is given up, known soon."""
    began = time.monotonic()
    with pytest.raises(TrackingUnavailable) as caught:
        Tracker.open(tracking, folder, "scaling")
    assert time.monotonic() - began < within_s
    sentence = str(caught.value)
    assert "\n" not in sentence and SECRET not in sentence and "Traceback" not in sentence
    return sentence


def test_a_locked_store_is_given_up_and_written_later(tracker, output_dir, monkeypatch, capfd):
    monkeypatch.setattr(store, "LOCK_WAIT_S", 0.5)
    record = make_record(1)
    folder = make_folder(output_dir / "scaling", record)
    holder = sqlite3.connect(output_dir / "mlflow.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert "is locked by another process" in refused(Tracking(), output_dir, 5)
    with pytest.raises(TrackingUnavailable, match="is locked by another process"):
        tracker.log(record, CellFolder(folder))
    holder.execute("ROLLBACK")
    holder.close()
    assert tracker.log(record, CellFolder(folder))
    assert capfd.readouterr() == ("", "")


def test_waiting_is_bounded_by_default_and_by_the_user(monkeypatch):
    monkeypatch.setattr(os, "environ", {"MLFLOW_HTTP_REQUEST_TIMEOUT": "77", "DO_NOT_TRACK": "0"})
    store.silence_mlflow()
    assert (
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
        and os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"
    )
    assert "MLFLOW_DISABLE_TELEMETRY" not in os.environ
    assert store.LOCK_WAIT_S == 20 and store.QUIET["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "10"


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
    said_by = {
        "500": "does not answer: too many 500",
        "page": "cannot be used: ",
        "hang": "does not answer: Read timed out",
    }
    for kind, said in said_by.items():
        sentence = refused(Tracking(uri=f"http://me:{SECRET}@{server}/{kind}"), tmp_path, 8)
        assert sentence.startswith(f"the tracking store http://***@{server}/{kind} {said}")
    assert capfd.readouterr() == ("", "")


def test_an_absent_server_is_given_up_soon(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert "Connection refused" in refused(Tracking(uri=uri), tmp_path, 8)


def test_a_store_that_cannot_be_is_given_up_soon(tmp_path):
    (tmp_path / "file").write_text("no folder")
    refused(Tracking(uri=f"sqlite:///{tmp_path}/file/m.db"), tmp_path, 5)
    assert "is no SQLite file" in refused(Tracking(uri=f"sqlite:///{tmp_path}/file"), tmp_path, 5)
    refused(Tracking(), tmp_path / "file", 5)
    assert "***@" in refused(
        Tracking(uri=f"postgresql+nodriver://me:{SECRET}@host/db"), tmp_path, 5
    )


def test_a_store_that_vanished_is_not_made_anew(tracker, output_dir):
    (output_dir / "mlflow.db").unlink()
    with pytest.raises(TrackingUnavailable, match="is gone"):
        tracker.start_sweep(make_sweep())
    assert not (output_dir / "mlflow.db").exists()


def test_a_run_that_a_user_deleted_stays_deleted(tracker, output_dir):
    record = make_record(1)
    folder = make_folder(output_dir / "scaling", record)
    tracker.log(record, CellFolder(folder))
    tracker._client.delete_run(runs(tracker)[record.name].info.run_id)
    assert not tracker.log(record, CellFolder(folder))
    assert record.name not in runs(tracker)


def test_a_deleted_experiment_is_named(tracker, output_dir):
    tracker._client.delete_experiment(tracker._experiment)
    assert "restore it" in refused(Tracking(), output_dir, 5)
