"""What a sweep does beside its cells: the store is opened and written, and the report's imports.
What it leaves for its end: the cells of a host that was lost.

The ranks are lines of a script (fake_engine); launcher, store, report and signals are real.
"""

import contextlib
import io
import os
import signal
import sqlite3
import sys
import threading
import time

import pytest
from build import configuration
from fake_engine import FakeEngine, ends, is_done
from faults_seen import until

from benchmarks.record import CellFolder, read_lines, read_study, safe_files
from conf import schema
from launch import sweep
from launch.study.background import NEEDED, BackgroundQueue, StudyReport
from launch.supervision.watch import Watch
from launch.tracking import store, tracker


class Engine(FakeEngine):
    """Begins with `opening`, and starts no process. Every cell follows the same script."""

    def __init__(self, *steps, opening=lambda first: None):
        super().__init__()
        self.script, self.open = steps, opening

    def start(self, cell_pass):
        self.steps[:] = self.script
        return super().start(cell_pass)

    def lost(self, cell):
        return None

    def close(self):
        pass


def starts(job):
    for number in job.numbers:
        job.write(number, "start", rank=number, pid=100 + number, versions={})


class Run:
    """One sweep in this process: exit status, what it printed, its records, and the store's."""

    def __init__(self, status, said, output_dir):
        self.status, self.said = status, said
        self.study = output_dir / "default"
        self.records, _ = read_study(self.study)
        self.states = [record.state for record in self.records]

    def stored(self):
        return stored(self.study.parent)


def stored(output_dir):
    """Return the status of every complete run of a cell in the store."""
    with contextlib.closing(sqlite3.connect(output_dir / "mlflow.db")) as opened:
        tags = opened.execute("SELECT run_uuid, key, value FROM tags").fetchall()
        states = dict(opened.execute("SELECT run_uuid, status FROM runs").fetchall())
    cells = {run for run, key, value in tags if (key, value) == ("ringside.kind", "cell")}
    return [states[run] for run, key, _ in tags if key == "ringside.projected" and run in cells]


@pytest.fixture
def run(hydra, tmp_path, monkeypatch):
    """Run a sweep of one cell, or of two, whose ranks follow a script."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(store, "STORE_LOCK_WAIT_S", 5.0)

    def sweep_of(engine, folder=tmp_path, cells=1, *options):
        typed = ["model=fmnist_cnn", "gpus=0,1", f"output_dir={str(folder)!r}", *options]
        composed = []
        for number in range(cells):
            overrides = [*typed, f"batch_size={2**number}"]
            composed.append(schema.Request(configuration(*overrides), overrides))
        real = sweep.prepared

        def prepared(*arguments):
            planned, _, here = real(*arguments)
            return planned, engine, here

        monkeypatch.setattr(sweep, "prepared", prepared)
        said = io.StringIO()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with contextlib.redirect_stdout(said):
                status = sweep.run(composed, typed, time.monotonic())
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Run(status, said.getvalue(), folder)

    return sweep_of


def interrupts(*_):
    os.kill(os.getpid(), signal.SIGINT)


def test_a_cell_does_not_wait_for_the_store_and_its_run_is_written(run, output_dir):
    with contextlib.ExitStack() as held:
        assert held.enter_context(safe_files.locked(output_dir / ".mlflow.db.lock"))
        ranks_begin = (starts, lambda job: held.close())  # only now can the store be opened
        done = run(Engine(*ranks_begin, is_done, ends(0)), output_dir, 2, "report=false")
    assert done.states == ["finished", "finished"] and done.status == 0
    assert done.stored() == ["FINISHED", "FINISHED"]
    assert "note: " not in done.said.replace("note: no NVIDIA GPU", "")
    kinds = [line["kind"] for line in read_lines(done.study / "journal.jsonl")]
    of_cells = [kind for kind in kinds if kind in ("sweep", "begin", "end")]
    assert of_cells == ["sweep", *["begin", "end"] * 2]


def test_cells_that_do_not_fit_the_job_are_told_once_and_not_started(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "does_not_fit", lambda cell, *_: f"{cell.name} is not started")
    done = run(Engine(starts, is_done, ends(0)), tmp_path, 2, "report=false", "tracking=none")
    assert (done.states, done.status) == ([], 130)
    assert done.said.count("is not started") == 1


def test_a_store_that_cannot_be_opened_is_told_once_and_costs_no_record(run, tmp_path):
    damaged = store.SQLITE + 1000 * b"not a page of it"
    (tmp_path / "mlflow.db").write_bytes(damaged)
    done = run(Engine(starts, is_done, ends(0)), tmp_path, 2, "report=false")
    assert done.states == ["finished", "finished"] and done.status == 0
    for words in ("cannot be used: DatabaseError: ", "the sweep goes on without MLflow"):
        assert done.said.count(words) == 1
    assert "python -m launch sync" in done.said
    assert (tmp_path / "mlflow.db").read_bytes() == damaged


def test_a_store_that_is_lost_meanwhile_is_told_and_every_record_is_kept(run, output_dir):
    def loses_it(job):
        if len(job.engine.jobs) == 2:
            until(lambda: stored(output_dir), 20)  # the run of the first cell
            (output_dir / "mlflow.db").unlink()

    done = run(Engine(starts, loses_it, is_done, ends(0)), output_dir, 2, "report=false")
    assert len(done.records) == 2 and "is gone; the sweep goes on without MLflow" in done.said
    assert "python -m launch sync" in done.said and not (output_dir / "mlflow.db").exists()


@pytest.mark.parametrize("broken", ["an import", "its folder"])
def test_a_report_that_fails_is_told_in_the_end(run, output_dir, monkeypatch, broken):
    # Its imports are made beside the cell.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    if broken == "an import":
        monkeypatch.setitem(sys.modules, "jinja2", None)
    else:
        (output_dir / "default" / "report").mkdir(parents=True)
        (output_dir / "default" / "report" / "mine.txt").write_text("mine")
    done = run(Engine(starts, is_done, ends(0)), output_dir)
    assert done.said.count("the report could not be written: ") == 1
    assert done.states == ["finished"] and done.stored() == ["FINISHED"]


# How many cells have a record where Ctrl-C comes then.
PHASES = {
    "the store is opened": {0}, "a cell starts": {1}, "a cell runs": {1},
    "a run is written": {1, 2}, "the report": {2},
}  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_in_each_phase_keeps_what_was_measured(run, output_dir, monkeypatch, phase):
    held, steps, opening = contextlib.ExitStack(), [starts, is_done, ends(0)], lambda first: None
    once = iter([interrupts])  # a second Ctrl-C ends the process at once
    real_log, real_write = tracker.Tracker.log, StudyReport.write
    if phase == "the store is opened":
        assert held.enter_context(safe_files.locked(output_dir / ".mlflow.db.lock"))
        threading.Timer(0.5, held.close).start()
        opening = interrupts
    elif phase == "a cell starts":
        steps.insert(0, interrupts)
    elif phase == "a cell runs":
        steps.insert(1, interrupts)
    elif phase == "a run is written":
        monkeypatch.setattr(
            tracker.Tracker, "log", lambda *run: next(once, bool)() or real_log(*run)
        )
        steps.append(lambda job: time.sleep(0.3))
    else:
        monkeypatch.setattr(
            StudyReport, "write", lambda self, subjects: interrupts() or real_write(self, subjects)
        )
    began = time.monotonic()
    done = run(Engine(*steps, opening=opening), output_dir, 2, "report=false")
    assert done.status == 130 and time.monotonic() - began < 20
    assert done.said.count("stopping: ") == 1
    assert len(done.records) in PHASES[phase]
    if phase == "a run is written" and "incomplete; to complete it: " in done.said:
        return  # it came while the sweep was closed
    states = {"interrupted": "KILLED", "finished": "FINISHED"}
    assert "sync" not in done.said
    assert sorted(done.stored()) == sorted(states[state] for state in done.states)


def test_jobs_take_turns_on_one_thread_and_one_that_fails_stops_no_other():
    done, beside = [], BackgroundQueue()
    for number in range(3):
        beside.submit(lambda number=number: done.append((number, threading.get_ident())))
    beside.submit(lambda: 1 / 0)
    beside.submit(lambda: done.append((3, threading.get_ident())))
    with pytest.raises(ZeroDivisionError):
        beside.finish()
    assert [number for number, _ in done] == [0, 1, 2, 3]
    assert len({thread for _, thread in done} | {threading.get_ident()}) == 2


def test_without_a_further_thread_jobs_are_done_at_once(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done, beside = [], BackgroundQueue()
    beside.submit(lambda: done.append(1))
    assert done == [1]
    beside.finish()


@pytest.mark.parametrize("asked, cores, parts", [(True, 2, 3), (True, 1, 0), (False, 2, 0)])
def test_imports_for_the_report_stop_when_ranks_begin(tmp_path, monkeypatch, asked, cores, parts):
    imported = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr("importlib.import_module", imported.append)
    StudyReport(tmp_path, asked, print).prepare(may_go_on=lambda: len(imported) < 3)
    assert imported == [*NEEDED[:parts]]


QUIET = [
    ([None, None], 4, False), (["first step", None], 4, False),
    (["first step", "warm-up"], 4, True), (["timed", "timed"], 64, True),
    (["connect", None], 3, True), ([None], 1, False), (["something"], 64, True),
]  # fmt: skip


@pytest.mark.parametrize("phases, cores, quiet", QUIET)
def test_quiet_is_for_ranks_that_measure_soon_or_leave_no_core_idle(
    tmp_path, monkeypatch, phases, cores, quiet
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    watch = Watch(CellFolder(tmp_path), len(phases))
    for rank, phase in zip(watch.ranks, phases, strict=True):
        rank.pid, rank.phase = (None, "") if phase is None else (1000, phase)
    assert watch.needs_quiet == quiet


def test_torch_is_imported_while_earlier_records_are_compared_and_only_for_cells_to_measure(
    run, tmp_path, monkeypatch
):
    happened, compared = [], sweep.find_finished
    monkeypatch.setattr(
        sweep, "find_finished", lambda *asked: happened.append("compares") or compared(*asked)
    )
    for cells in (1, 2, 2):
        happened.append(cells)
        engine = Engine(starts, is_done, ends(0), opening=lambda first: happened.append("opens"))
        run(engine, tmp_path, cells, "report=false", "tracking=none")
    measures = ["opens", "compares", "opens"]
    assert happened == [1, *measures, 2, *measures, 2, "compares"]


class LosesAHost(Engine):
    """Its host is lost for cells of batch 1."""

    def lost(self, cell):
        return "host b is lost: its wire is cut" if cell.batch_size == 1 else None


def test_a_cell_of_a_lost_host_is_skipped_and_the_others_are_measured(run, tmp_path):
    engine = LosesAHost(starts, is_done, ends(0))
    done = run(engine, tmp_path, 2, "report=false", "tracking=none", "noise_pairs=0")
    assert (done.status, [record.cell.batch_size for record in done.records]) == (1, [2])
    assert "batch 1 was not measured: host b is lost: its wire is cut" in done.said
    assert "1 of 2 runs in " in done.said and ", 1 skipped: node_lost" in done.said
