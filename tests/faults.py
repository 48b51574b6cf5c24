"""Sweeps with faults for tests: what plants a fault in a rank, the launcher's command, and what can be seen of its processes.

`PLANT` is put on the ranks' PYTHONPATH: it makes a rank misbehave at a step of its own.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.record import read_lines

ROOT = Path(__file__).parent.parent
# What a cell of two ranks costs is the import of torch, and once more for training.
CELL = ["model=fmnist_cnn", "batch_size=2", "tracking=none", "device=cpu", "engine.stop_grace_s=1"]
# Environment that forbids NVLink multicast: it must reach every rank.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
PLANT = """
import json, os, sys, threading, time

def plant(fault, rank):
    while not hasattr(sys.modules.get("benchmarks.rank.reporter"), "Reporter"):
        time.sleep(0.005)
    from benchmarks.rank.reporter import Reporter
    real, steps = Reporter.beat, [0]
    def beat(self, iterations=1):  # after every step or exchange
        steps[0] += 1
        if fault == "slow":
            if steps[0] == 1 and rank == 0:
                import subprocess
                subprocess.Popen(["sleep", "600"], start_new_session=True)
            time.sleep(0.2)
        real(self, iterations)
        if steps[0] == 3 and fault == "exception":
            raise RuntimeError("planted in step 3")
        if steps[0] == 3 and fault == "leave":
            os._exit(0)
        if steps[0] == 3 and fault == "segmentation":
            import ctypes
            ctypes.string_at(0)
    Reporter.beat = beat

def begin():  # in a forked rank, which is not yet told which one it is
    def wait():
        while "RANK" not in os.environ:
            time.sleep(0.005)
        with open(os.path.join(sys.orig_argv[3], "cell.json")) as file:
            cell = json.load(file)
        planted = json.loads(os.environ["PLANTED"])
        fault, rank = planted.get(str(int(cell["strategy"]["bucket_cap_mb"])), ("none", 0))
        slow = fault == "slow" and int(os.environ["RANK"]) < len(cell["gpus"]) == 2
        if slow or rank == int(os.environ["RANK"]) and fault != "slow":
            plant(fault, int(os.environ["RANK"]))
    threading.Thread(target=wait, daemon=True).start()

if "benchmarks.rank.agent" in sys.orig_argv:
    os.register_at_fork(after_in_child=begin)
"""


def start(output_dir, planted, faults, *overrides):
    """A launcher in its own session; its text goes to a file."""
    environment = {**os.environ, **NO_MULTICAST, "PYTHONPATH": str(planted), "PLANTED": json.dumps(faults)}
    output_dir.mkdir(exist_ok=True)
    said = (output_dir / f"said-{time.monotonic_ns()}.txt").open("w+")
    process = subprocess.Popen(
        [sys.executable, "launch.py", "-m", *CELL, f"output_dir={output_dir}", *overrides],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return process, Path(said.name)


def until(condition, seconds, process=None):
    """Poll until a condition holds and return what it returned."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s, or the launcher ended before")


def stepping(folder):
    """{rank: pid} of a cell whose two ranks step, else None."""
    pids = {}
    for number in (0, 1):
        lines = list(read_lines(folder / "ranks" / f"{number}.jsonl"))
        if not any(line["kind"] == "beat" for line in lines):
            return None
        pids[number] = next(line["pid"] for line in lines if line["kind"] == "start")
    return pids


def server_of(folder):
    """The process of a cell's first server."""
    return next(line["pid"] for line in read_lines(folder / "ranks" / "2.jsonl") if line["kind"] == "start")


def cell_folders(output_dir):
    """{bucket_cap_mb: folder} of the cells of all studies that have begun."""
    found = {}
    for path in output_dir.glob("*/*/cell.json"):
        if (path.parent / "attempt.json").exists():
            found[int(json.loads(path.read_text())["strategy"]["bucket_cap_mb"])] = path.parent
    return found


def tokens(study):
    return {line["token"] for line in read_lines(study / "journal.jsonl") if line["kind"] == "begin"}


def alive(tokens):
    """Processes that carry one of the tokens."""
    marks = {f"RINGSIDE_TOKEN={token}".encode() for token in tokens}
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
                if marks & set(environ.split(b"\0")):
                    found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def environment_of(pid):
    pairs = (pair.partition(b"=") for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return {name.decode(): value.decode() for name, _, value in pairs if name}
