"""Where disk, memory or processes run out, or the clock is set, no number is wrong."""

import errno
import io
import os
import re
import resource
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from build import tracked_record
from rich.console import Console

from analysis.validity.gpu_samples import summary
from benchmarks.agent.sampler import Sampler
from benchmarks.record import CellFolder, Failure, Lines
from benchmarks.record.lines import now
from benchmarks.record.safe_files import because
from conf.schema import Tracking
from launch.machine.devices import too_small
from launch.study.study_folder import StudyFolder, Sweep
from launch.supervision.failure import ResourceSnapshot
from launch.tracking.tracker import MlflowWriter

ENDED = Failure("killed", 1, "rank 1 was ended by SIGKILL in phase 'timed'")


@pytest.mark.parametrize(
    ("number", "path", "says"),
    [
        (errno.ENOSPC, None, "there is no space left"),
        (errno.EROFS, "/x", "its file system is read-only"),
        (errno.EFBIG, None, "a file may not be larger than"),
        (errno.EMFILE, None, "files open here (ulimit -n)"),
        (errno.EAGAIN, None, "no further process or thread may be started"),
        (errno.ENOENT, "/tmp/nowhere/a", "/tmp/nowhere is gone"),
        (errno.ENOENT, None, "No such file"),
        (errno.EIO, None, "its disk answers with an input/output error"),
        (errno.EACCES, "/x", "Permission denied (/x)"),
    ],
)
def test_the_reason_of_an_error_is_plain(number, path, says):
    said = because(OSError(number, os.strerror(number), path))
    assert said.startswith(says) or says in because(OSError(number, "", path))


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from launch import sweep
from launch.study.study_folder import StudyFolder
with sweep._refused('output_dir=out: cannot be written'):
    StudyFolder(sys.argv[1], 's').note('sweep')
"""


def test_a_file_size_limit_is_told_before_any_start(tmp_path):
    """A real limit, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True)
    said = "cannot be written: a file may not be larger than 0 bytes here (ulimit -f)"
    assert done.stderr.splitlines()[-1] == f"conf.options.Refused: output_dir=out: {said}"


def test_a_failure_says_what_the_machine_lacked(tmp_path, monkeypatch):
    before = ResourceSnapshot.take()
    assert before.explain(ENDED, tmp_path) == ENDED
    gone = before.explain(ENDED, tmp_path / "nowhere").message
    assert "is gone: removed, or no longer mounted" in gone
    killed = ResourceSnapshot(before.oom_kills - 1, before.pids_refused).explain(ENDED, tmp_path)
    assert (killed.cause, killed.rank) == ("oom", 1)
    assert killed.message.endswith(
        "; the kernel killed a process meanwhile because memory was short"
    )
    hang = Failure("hang", 1, "rank 1 gave no sign")
    assert ResourceSnapshot(before.oom_kills - 1, 0).explain(hang, tmp_path).cause == "hang"
    refused = ResourceSnapshot(before.oom_kills, before.pids_refused - 1).explain(ENDED, tmp_path)
    assert refused.cause == "killed" and refused.message.endswith("(pids.max of the control group)")
    monkeypatch.setattr("benchmarks.agent.scratch.FULL_BYTES", 1 << 60)
    full = before.explain(ENDED, tmp_path).message
    said = f"; there is no space left on the file system of {tmp_path}; /dev/shm is full"
    assert full.endswith(said)


def test_an_error_of_the_studys_files_costs_only_mlflow(tmp_path):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    study, console = StudyFolder(str(tmp_path), "s"), Console(file=io.StringIO(), width=500)
    writer = MlflowWriter(Tracking(), study, Sweep.begin("s", [], 1), console)
    writer._tracker = SimpleNamespace(log=refuse)
    writer.log(tracked_record())
    said = "files open here (ulimit -n); the sweep goes on without MLflow"
    assert said in console.file.getvalue()


def test_without_a_thread_nothing_is_sampled_and_nothing_fails(tmp_path, monkeypatch):
    sampler = Sampler(CellFolder(tmp_path).make(), [], "t")

    def refuse():
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sampler._thread, "start", refuse)
    with sampler:
        pass


@pytest.mark.parametrize(("name", "value"), [("nofile", 100), ("as", 1 << 30), ("fsize", 1 << 20)])
def test_a_limit_that_no_cell_could_bear_is_refused(name, value, monkeypatch):
    assert too_small() == []
    kinds = {getattr(resource, f"RLIMIT_{name.upper()}"): (value, value)}
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda asked: kinds.get(asked) or real(asked))
    (sentence,) = too_small()
    assert re.match(r"ulimit -. is \d+ here .*; expected \d+ or more, or unlimited", sentence)


# The clock.


def test_the_time_of_day_may_be_set_while_a_sweep_runs(monkeypatch):
    before = now()
    assert abs(before - time.time()) < 60
    monkeypatch.setattr(time, "time", lambda: before - 3600)
    assert 0 <= now() - before < 60


def test_every_process_of_a_sweep_has_the_launchers_clock():
    program = "from benchmarks.record.lines import beginning; print(beginning())"
    said = subprocess.check_output(
        [sys.executable, "-c", program], env={**os.environ, "RINGSIDE_CLOCK": "1234.5"}
    )
    assert float(said) == 1234.5


def test_samples_of_a_clock_that_was_set_back_say_nothing(tmp_path):
    """As an earlier Ringside wrote them."""
    folder = CellFolder(tmp_path).make()
    rank, cpu = Lines(folder.rank_lines(0)), Lines(folder.cpu_samples)
    for at, name in ((100.0, "timed"), (103.0, "exchange"), (-3400.0, "compare")):
        rank.write("phase", at, phase=name)
    rank.write("result", -3399.0)
    for at in (99, 102, -3399, -3398):
        cpu.write("sample", at, cores=2, busy_s=1.0, own_s=1.0)
    assert summary(folder)[1] == {"cpu_samples": {"cores": 2, "others_share": {}}}
