"""Work grows with the records and not with their square, and what a user waits for can be ended."""

import contextlib
import io
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from build import ROOT, make_record, steps
from faults_seen import ranks_alive, tokens, until
from rich.console import Console

from analysis.__main__ import main
from analysis.study.study import Study
from benchmarks.record import CellFolder, Validity, read_study, write
from conf.command_line import read
from launch import compose, sweep
from launch.display.screen import Screen
from launch.machine.devices import torch_version
from launch.study import background
from launch.study.background import Forecasts

COUNTS = 4, 8, 16  # cells of two GPUs, of two runs each
METRICS = {"step/ms_median": 9.0, "strategy/cost_ms": 1.0, "comm/exchange_ms": 2.0}
SIGNALS = signal.SIGINT, signal.SIGTERM


def command(folder, cells, report="false"):
    """A sweep of so many batch sizes on one and on two CPU workers."""
    sizes = f"batch_size=range(8,{8 * cells + 8},8)"
    where = (f"output_dir={str(folder)!r}", "study=done", "tracking=none", f"report={report}")
    model = ("model=fmnist_cnn", "device=cpu", "noise_pairs=0")
    return ["-m", "gpus=0,0+1", sizes, *model, *where]


def finished(folder, cells):
    """Write the records of every cell of `command`, as this machine would give them."""
    requests, _ = compose.requests_of(read(command(folder, cells)), os.environ)
    planned, _, here = sweep.prepared(requests, os.environ, {})
    versions = {"python": platform.python_version(), "torch": torch_version()}
    for number, cell in enumerate(entry.cell for entry in planned.cells):
        rate = 100.0 * cell.batch_size / (1 + 0.1 * len(cell.gpus))
        record = make_record(
            record_id=f"{number:032x}", cell=cell, cell_key=cell.key, name=cell.name, study="done",
            environment=here.facts(cell, CellFolder(folder)) | {"versions": versions},
            failure=None, validity=Validity(), ranks=[], started_at=1_795_000_000.0 + 100 * number,
            ended_at=1_795_000_050.0 + 100 * number,
            metrics={**METRICS, "throughput/images_per_second": rate}, model={"gradient_bytes": 1e6},
        )  # fmt: skip
        write(CellFolder(folder / "done" / cell.folder).make(), record)
    return folder / "done"


def resumed(folder, cells, report="false"):
    """Give the command again in this process: its status, and what it printed."""
    requests, _ = compose.requests_of(read(command(folder, cells, report)), os.environ)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = sweep.run(requests, [], time.monotonic())
    return status, said.getvalue()


def is_linear(counts, least, middle, most):
    """Whether three counts lie on a line, but for 10 %: a square would give twice as much."""
    first, second, third = counts
    return (most - middle) / (third - second) <= 1.1 * (middle - least) / (second - first)


def test_cells_that_are_done_are_settled_in_one_go(tmp_path):
    taken = []
    for cells in COUNTS:
        folder = tmp_path / str(cells)
        finished(folder, cells)
        if not taken:  # once uncounted: it imports
            status, said = resumed(folder, cells)
            assert (status, said.count("done before")) == (0, 2 * cells + 1)
            assert re.search(rf"{2 * cells} runs in \S+ s, {2 * cells} done before", said)
        taken.append(steps(resumed, folder, cells))
    assert is_linear(COUNTS, *taken), taken


@pytest.mark.parametrize("command", ["verify", "seconds"])
def test_a_command_takes_as_much_for_each_record(tmp_path, capsys, command):
    taken, of = [], {"verify": "verify"}  # its other functions take thousands of lines a record
    for cells in COUNTS:
        study = finished(tmp_path / str(cells), cells)
        assert main([command, str(study)]) == 0
        taken.append(steps(main, [command, str(study)], of=of.get(command, "")))
    capsys.readouterr()
    assert is_linear(COUNTS, *taken), taken


@pytest.mark.parametrize("signum", SIGNALS)
@pytest.mark.parametrize("phase", ["records are read", "cells are shown"])
def test_a_signal_while_done_cells_are_settled_ends_it(tmp_path, monkeypatch, signum, phase):
    """Nothing further is shown; the records stay, and the last lines say where they are."""
    study, shown = finished(tmp_path, 6), []
    if phase == "records are read":
        monkeypatch.setattr(sweep, "find_finished", lambda *_: signal.raise_signal(signum) or {})
    else:

        def show(screen, index):
            shown.append(index)
            if len(shown) == 3:
                signal.raise_signal(signum)

        monkeypatch.setattr(Screen, "_print_settled", show)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        status, said = resumed(tmp_path, 6, "true")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert (status, said.count("stopping: ")) == (130, 1)
    assert len(shown) in (0, 3) and not (study / "report").exists()
    assert "what was measured is kept" in said
    if shown:
        assert f"records  {study}" in said and "12 of 12 runs" in said
    assert len(list(study.glob("*/record.json"))) == 12


IN_REPORT = """
from launch.study.background import StudyReport

def write(self, subjects):
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal({signum})
    time.sleep(0.3)
    signal.raise_signal({signum})
    time.sleep(60)

StudyReport.write = write
"""
# While the ranks of a cell are being stopped.
IN_STOP = """
from benchmarks.agent import processes
from launch.supervision.watch import Watch

def update(self):
    Watch.update = lambda self: None
    signal.raise_signal({signum})

def end(token, grace_s):
    time.sleep(0.3)
    signal.raise_signal({signum})
    time.sleep(60)

Watch.update, processes.end = update, end
"""
START = """
import contextlib, runpy, signal, sys, time
{program}
sys.argv[0] = "launch.py"
runpy.run_path("launch.py", run_name="__main__")
"""


@pytest.mark.parametrize("signum", SIGNALS)
@pytest.mark.parametrize(("program", "cells"), [(IN_REPORT, 2), (IN_STOP, 3)])
def test_a_second_signal_ends_a_launcher_at_once(tmp_path, program, cells, signum):
    """The third size is not done."""
    study = finished(tmp_path, 2)
    script = START.format(program=program.format(signum=int(signum)))
    typed = [sys.executable, "-c", script, *command(tmp_path, cells)]
    began = time.monotonic()
    done = subprocess.run(typed, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (130, "") and time.monotonic() - began < 60
    assert done.stdout.splitlines()[-1].startswith("stopped at once: what was measured is kept")
    assert len(list(study.glob("*/record.json"))) == 4
    assert until(lambda: not ranks_alive(tokens(study)), 10)


def test_a_real_launcher_leaves_within_seconds_of_a_signal(tmp_path):
    finished(tmp_path, 200)
    typed = [sys.executable, "launch.py", *command(tmp_path, 200, "true")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for signum in SIGNALS:
        with subprocess.Popen(typed, cwd=ROOT, **pipes) as launcher:
            next(line for line in launcher.stdout if "done before" in line)
            began = time.monotonic()
            launcher.send_signal(signum)
            said, err = launcher.communicate(timeout=60)
        assert (launcher.returncode, err) == (130, "") and time.monotonic() - began < 10
        assert said.count("done before") < 399 and "what was measured is kept" in said
        assert "400 of 400 runs" in said and not (tmp_path / "done" / "report").exists()


def test_a_large_study_is_not_made_again_for_each_cell(tmp_path, monkeypatch):
    """Looking at a study may take a twentieth of the time; until then rows say what records do."""
    finished(tmp_path, 6)
    requests, _ = compose.requests_of(read(command(tmp_path, 6)), os.environ)
    cells = sweep.prepared(requests, os.environ, {})[0].cells
    measured = read_study(tmp_path / "done")[0]
    monkeypatch.setattr(background, "SLOW_S", -1.0)
    monkeypatch.setattr(background, "REST", 1e9)
    monkeypatch.setattr(background, "LARGE", 0)
    of, made = Study.of, []
    monkeypatch.setattr(Study, "of", lambda *given, **named: made.append(1) or of(*given, **named))
    printed = io.StringIO()
    with Screen(cells, measured, Console(file=printed, width=200)) as shown:
        for index, record in enumerate(measured):
            shown.settle(index, "finished", record)
    assert len(made) == 2, "at the first cell, and at the end"
    assert printed.getvalue().count("images/s") == len(measured)
    made.clear()
    forecasts = Forecasts("auto", lambda job: job())
    for number, record in enumerate(measured, 1):
        forecasts.learn(measured[:number])
        forecast = forecasts.before(record.cell, record.environment, measured[:number])
        assert forecast["cells"] == 1
    assert len(made) == 2, "for the first forecast, and for the errors of its model"


# issue 35 has 15 s for a report of 2,000 configurations; here are 10,000
LIMITS_S = {"report": 25, "verify": 10, "seconds": 15, "compare": 15, "resume": 75}
MOST_BYTES = 1 << 30


@pytest.mark.campaign
@pytest.mark.parametrize("name", LIMITS_S)
def test_ten_times_the_records_take_ten_times_the_time(tmp_path, name):
    """CPU seconds and memory of 1,000 and of 10,000 records, with the goals of issue 35."""
    used = []
    for cells in (500, 5000):
        folder = tmp_path / str(cells)
        study = finished(folder, cells)
        words = ["-m", "analysis", name, str(study)]
        if name == "compare":
            words += [f"B={shutil.copytree(study, folder / 'other')}"]
        elif name == "resume":
            words = ["launch.py", *command(folder, cells, "true")]
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        assert (status, usage.ru_maxrss << 10 < MOST_BYTES) == (0, True)
        used.append(usage.ru_utime + usage.ru_stime)
    assert used[1] <= min(10.5 * used[0], LIMITS_S[name]), used
