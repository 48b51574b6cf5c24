"""Measuring outlives its terminal."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from build import ROOT
from rich.console import Console

from analysis.__main__ import main as analysis
from benchmarks import record as records
from launch.__main__ import main as launch
from launch.display.screen import ResilientStream
from launch.supervision.supervise import Stopping

CELL = (
    "gpus=0", "model=fmnist_cnn", "batch_size=4", "benchmark.max_seconds=0.1", "tracking=none",
    "benchmark.min_iterations=3", "benchmark.warmup_min_seconds=0", "report=false",
    "benchmark.warmup_max_seconds=0.1", "benchmark.exposed_rounds=0",
)  # fmt: skip


@pytest.fixture
def pipe():
    """A pipe as a text stream, and its reading end."""
    reading, writing = os.pipe()
    stream = open(writing, "w", buffering=1)  # noqa: PTH123, SIM115 (may fail)
    yield stream, reading
    with contextlib.suppress(OSError):
        stream.close()


def test_what_is_printed_to_a_reader_arrives(pipe):
    stream, reading = pipe
    Console(file=ResilientStream(stream)).print("one cell")
    assert os.read(reading, 100) == b"one cell\n"
    os.close(reading)


def test_printing_to_a_reader_that_left_is_dropped(pipe):
    stream, reading = pipe
    output = ResilientStream(stream)
    os.close(reading)
    for _ in range(2):
        Console(file=output).print("one cell")
    with pytest.raises(OSError, match="the output is gone"):
        output.fileno()


def test_no_output_at_all_is_no_error():
    output = ResilientStream(None)
    assert output.write("text") == 4 and not output.isatty() and output.encoding == "utf-8"


def test_a_character_that_the_terminal_lacks_is_a_question_mark():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=ResilientStream(stream), width=40).print("4 × H200 · ±2 %")
    assert stream.buffer.getvalue() == b"4 ? H200 ? ?2 %\n"


class Interrupted(io.RawIOBase):
    """A terminal at which Ctrl-C is pressed while something is written to it."""

    text = b""

    def writable(self):
        return True

    def write(self, data):
        if not self.text:
            signal.raise_signal(signal.SIGINT)
        self.text += bytes(data)
        return len(data)


def test_ctrl_c_while_something_is_printed_costs_neither():
    terminal = Interrupted()
    stream = io.TextIOWrapper(io.BufferedWriter(terminal), "utf-8")
    console = Console(file=ResilientStream(stream), width=80)
    stopping = Stopping(console)
    with stopping.listening():
        console.print("one cell")
        console.print("another")
    assert stopping() and terminal.text.endswith(b"one cell\nanother\n")


@pytest.mark.parametrize("target", [">/dev/full", ">&-"])
def test_a_plan_that_cannot_be_printed_ends_with_status_0(tmp_path, target):
    command = [sys.executable, str(ROOT / "launch.py"), *CELL, "dry_run=true"]
    words = ["sh", "-c", f'"$@" {target}', "sh", *command]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_sweep_goes_on_when_its_reader_and_its_terminal_are_gone(tmp_path):
    command = [sys.executable, str(ROOT / "launch.py"), *CELL]
    sweep = subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=-1, text=True)
    next(line for line in sweep.stdout if "started" in line)
    sweep.stdout.close()
    sweep.send_signal(signal.SIGHUP)
    assert (sweep.stderr.read(), sweep.wait(120)) == ("", 0)
    (record,), unreadable = records.read_study(tmp_path / "outputs" / "default")
    assert (record.state, unreadable) == ("finished", [])


def test_ctrl_c_while_launch_py_is_imported_shows_no_traceback(tmp_path):
    (tmp_path / "hydra.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")

    def heeds():  # a job in the background ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    words, around = [sys.executable, "launch.py", "gpus=0"], os.environ | {"PYTHONPATH": tmp_path}
    done = subprocess.run(
        words, cwd=ROOT, env=around, preexec_fn=heeds, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(("main", "typed"), [(analysis, "report"), (launch, "sync")])
def test_ctrl_c_in_a_command_after_a_sweep_is_one_line(main, typed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "is_dir", lambda path: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main([typed, str(tmp_path)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    package = main.__module__.partition(".")[0]
    assert err.startswith(f"python -m {package} {typed}: stopped; ")
    assert (out, err.count("\n")) == ("", 1)
