"""What launchers that died leave, and how the end of a rank is told, without ranks; with them: test_faulty_sweeps.py."""

import dataclasses
import io
import os
import signal
import subprocess
import sys
import time

import pytest
from build import ROOT, changed_cell, make_cell

from benchmarks import record as records
from benchmarks.agent import processes
from benchmarks.record import CellFolder, Lines
from launch.study.study_folder import StudyFolder, assemble
from trainers.kvstore.buckets import Array
from trainers.kvstore.shared_memory import KvstoreConfig, SharedMapping
from trainers.memory import new_path

# What a launcher knows of an attempt before it starts.
DETAILS = {"study": "s", "sweep_id": "c" * 32, "overrides": [], "drift": False, "environment": {}}
# What a launcher finds that others left, without ranks.


def begun(tmp_path, gone=True):
    """(study, cell, its folder) of an attempt that another process began; `gone`: that process has ended."""
    study, cell = StudyFolder(str(tmp_path), "s"), make_cell()
    with study.lock(cell):
        folder = study.begin(cell, "a" * 32, DETAILS)
    Lines(folder.rank_lines(0)).write("start", time.time() + 5, rank=0, pid=1, versions={})
    if gone:
        journal = study.folder / "journal.jsonl"
        text = journal.read_text().replace(f'"pid": {os.getpid()},', '"pid": 4194304,')
        journal.write_text(text)
    return StudyFolder(str(tmp_path), "s"), cell, folder


def test_what_a_dead_launcher_left_is_closed_once(tmp_path):
    study, cell, folder = begun(tmp_path)
    (closed,) = study.recover()
    assert (closed.state, closed.record_id) == ("interrupted", "a" * 32)
    assert closed.ended_at > time.time(), "the last sign of a rank"
    assert records.read(folder.record) == closed
    assert study.recover() == []
    assert study.finished(cell) is None


def test_a_record_keeps_its_words_where_the_locale_is_not_utf_8(tmp_path, monkeypatch):
    study, _, folder = begun(tmp_path)
    path = folder.attempt
    path.write_bytes(path.read_bytes().replace(b'"s"', '"größe"'.encode()))
    # What pathlib asks.
    monkeypatch.setattr(io, "text_encoding", lambda encoding, level=2: encoding or "latin-1")
    (closed,) = study.recover()
    assert closed.study == "größe"


DAMAGE = {
    "journal.jsonl": ['{"kind":"begin","time":1.0,"cell":"x","token":"t"}\n', '{"kind":"end","time":1.0}\n',
                      '{"kind":"begin","time":1.0,"cell":"../x","token":[],"process":7}\n'],
    "cell.json": ['{"labels":[{}]}', "[]", ""],
    "attempt.json": ['{"record_id":7,"environment":[]}', "null", '{"started_at":"x"'],
    "failures.json": ["[[["], "gpus.jsonl": ['{"kind":"sample","time":1,"gpus":7}\n'],
    "ranks/0.jsonl": ['{"kind":"start","time":1}\n', '{"kind":"result","time":1,"metrics":7}\n'],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"), [(name, one) for name, several in DAMAGE.items() for one in several]
)
def test_a_damaged_file_of_a_study_costs_nothing_else(tmp_path, name, content):
    study, cell, folder = begun(tmp_path)
    file = (study.folder if name == "journal.jsonl" else folder.path) / name
    file.write_text((content + file.read_text()) if name == "journal.jsonl" else content)
    study.recover()
    assert study.recover() == []
    with study.lock(cell):
        again = study.begin(cell, "b" * 32, DETAILS)
    kept = study.folder if name == "journal.jsonl" else again.path / "attempt-1"
    assert content in (kept / name).read_text(), "set aside, not lost"


def test_what_a_living_launcher_measures_is_left_alone(tmp_path):
    study, _, folder = begun(tmp_path, gone=False)
    assert study.recover() == []
    assert not folder.record.exists()


def test_a_cell_that_another_launcher_holds_is_not_closed(tmp_path):
    study, cell, folder = begun(tmp_path)
    with study.lock(cell) as ours:
        assert ours
        assert study.recover() == []
    assert not folder.record.exists()
    assert len(study.recover()) == 1


HOLDER = """
import sys, time
from pathlib import Path
from benchmarks.record import CellFolder
from launch.study import study_folder as study
with study._lock(CellFolder(Path(sys.argv[1]))) as ours:
    print(ours, flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_launcher_that_is_killed_is_free(tmp_path):
    study, cell = StudyFolder(str(tmp_path), "s"), make_cell()
    folder = study.folder / cell.folder
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "True\n"
        with study.lock(cell) as ours:
            assert not ours
        holder.kill()
    with study.lock(cell) as ours:
        assert ours


def test_a_launcher_that_died_between_record_and_journal_loses_nothing(tmp_path):
    study, cell, folder = begun(tmp_path)
    finished = assemble(folder, "finished", None, time.time(), [], CellFolder)
    records.write(folder, finished)
    assert study.recover() == []
    assert study.finished(cell) == finished
    said = (study.folder / "journal.jsonl").read_text()
    assert study.recover() == [] and (study.folder / "journal.jsonl").read_text() == said


def test_a_cell_is_not_done_before_its_profiled_pass_has_said_something(tmp_path):
    study, cell = StudyFolder(str(tmp_path), "s"), changed_cell(make_cell(), profiler="torch")
    with study.lock(cell):
        folder = study.begin(cell, "a" * 32, DETAILS)
    measured = assemble(folder, "finished", None, time.time(), [], CellFolder)
    records.write(folder, measured)  # before the pass: it is safe whatever happens there
    assert study.recover() == [] and study.finished(cell) is None
    unchecked = records.Validity(unchecked={"profiled": "gave no trace"})
    said = dataclasses.replace(measured, validity=unchecked)
    study.end(folder, said)
    assert study.finished(cell) == said


def test_an_attempt_is_set_aside_whole_even_by_two_launchers(tmp_path):
    study, cell, folder = begun(tmp_path)
    study.recover()
    aside = folder.path / ".aside"  # the first launcher died here
    aside.mkdir()
    folder.cell.rename(aside / "cell.json")
    study.begin(cell, "b" * 32, DETAILS)
    names = {path.name for path in (folder.path / "attempt-1").iterdir()}
    assert names >= {"cell.json", "attempt.json", "ranks", "logs", "record.json"}
    assert not aside.exists() and folder.cell.exists()


def test_an_open_attempt_without_its_journal_is_closed_before_the_next(tmp_path):
    study, cell, folder = begun(tmp_path)
    study.begin(cell, "b" * 32, DETAILS)
    left = records.read(folder.path / "attempt-1" / "record.json")
    assert (left.state, left.record_id) == ("interrupted", "a" * 32)


def test_a_process_whose_starter_has_ended_does_not_go_on():
    program = "from benchmarks.rank.worker import die_with_parent; die_with_parent(); print('on')"
    for starter, code in ((str(os.getpid()), 0), ("4194304", -signal.SIGKILL)):
        environment = {**os.environ, "RINGSIDE_STARTER": starter}
        run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment)
        assert run.returncode == code


def test_shared_memory_that_a_cell_left_is_removed_and_no_other(monkeypatch):
    config = KvstoreConfig((Array(10, "float32", "float32"),), (0,), 0, 1, 0)
    paths = []
    for token in ("a" * 32, "b" * 32):
        monkeypatch.setenv("RINGSIDE_TOKEN", token)
        paths.append(SharedMapping(new_path(), config, config.layout(), create=True).path)
    try:
        processes.remove_shared_memory("a" * 32)
        assert [path.exists() for path in paths] == [False, True]
    finally:
        processes.remove_shared_memory("b" * 32)
    assert not paths[1].exists()
