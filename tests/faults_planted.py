"""Runs inside the processes of a planted sweep: makes one of them misbehave at a point of its own. Standard library only.

`faults.PlantedSweep` copies this file to PLANTED_FOLDER/sitecustomize.py. `planted.json` beside it says what is planted:
`{key: {"kind", "phase", "target", "process", "after"}}`; a key is a cell's `bucket_cap_mb`, or "launcher" for the phases of the
launcher alone. Each strikes once: `struck-KEY.json` then holds the time, and the lines that the cell's ranks had written.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# What ranks call a phase, and what servers do; a phase that is not here has its own name.
NAMES = {"limits": "references", "profile": "profiled pass"}
OF_SERVERS = {"build": "waiting for workers", "exchange": "serving"}
ENTERED = (
    "build",
    "profile",
    "exit",
)  # phases that strike when they begin; the others after some iterations

# --- one function for each kind; it gets the process that it hits ------------------------------------------------


def send(*numbers):
    """Signal a process; the second and later signals come from a process of their own, 0.3 s apart."""

    def strike(pid):
        if len(numbers) > 1:
            later = "".join(f"sleep 0.3; kill -{number:d} {pid};" for number in numbers[1:])
            subprocess.Popen(["/bin/sh", "-c", later], env={}, start_new_session=True)
        os.kill(pid, numbers[0])

    return strike


def segmentation_fault(pid):
    ctypes.string_at(0)


def leave(status):
    return lambda pid: os._exit(status)


def throw(text):
    def strike(pid):
        raise RuntimeError(text)

    return strike


def sleep(pid):
    time.sleep(3600)


def hold_the_gil(pid):
    while True:  # a signal ends one sleep
        ctypes.PyDLL(None).sleep(3600)  # unlike CDLL, a call of PyDLL keeps Python's lock


def another_collective(pid):
    """Wait in a broadcast from another rank, where all others are in an all_reduce."""
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())


def out_of_memory(pid):
    bytearray(1 << 60)


CONTROL = "planted \x1b[2J\x1b]0;title\x07 and \0 and \r end"
KINDS = {
    "SIGKILL": send(signal.SIGKILL),
    "SIGSTOP": send(signal.SIGSTOP),
    "SIGSEGV": segmentation_fault,
    "SIGABRT": lambda pid: os.abort(),
    "SIGTERM": send(signal.SIGTERM),
    "SIGINT": send(signal.SIGINT),
    "SIGINT twice": send(signal.SIGINT, signal.SIGINT),
    "SIGHUP": send(signal.SIGHUP),
    "exit 0": leave(0),
    "exit 7": leave(7),
    "exception": throw("planted"),
    "exception like a peer's": throw("Connection closed by peer [127.0.0.1]:1"),
    "control characters": throw(CONTROL),
    "sleep": sleep,
    "GIL held": hold_the_gil,
    "wrong collective": another_collective,
    "MemoryError": out_of_memory,
}


def kind(name):
    """The function of a kind; `module.function` of a file that was copied here, for kinds that others add."""
    if name in KINDS:
        return KINDS[name]
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


# --- the strike ----------------------------------------------------------------------------------------------------


def strike(key, plan, pid, cell=None):
    """Note the time and the lines of the cell's ranks, then do it; not where it struck before."""
    done = HERE / f"struck-{key}.json"
    if done.exists():
        return
    written = [*cell.glob("ranks/*.jsonl"), *cell.glob("profile/ranks/*.jsonl")] if cell else []
    lines = {path.relative_to(cell).as_posix(): whole_lines(path) for path in written}
    temporary = done.with_suffix(".writing")
    temporary.write_text(json.dumps({"time": time.time(), "pid": pid, "lines": lines}))
    temporary.rename(done)
    kind(plan["kind"])(pid)


def whole_lines(path):
    text = path.read_bytes()
    return text[: text.rfind(b"\n") + 1].decode().splitlines()


def parent_of(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))


# --- in a rank or a server -----------------------------------------------------------------------------------------


class Planted:
    """What this rank does when its reporter enters the phase of its fault."""

    def __init__(self, reporter, rank):
        self.folder = reporter.folder.path  # of the cell, or of its profiled pass
        cell = json.loads((self.folder / "cell.json").read_text())
        self.key = str(int(cell["strategy"]["bucket_cap_mb"]))
        self.plan = json.loads((HERE / "planted.json").read_text()).get(self.key)
        self.mine = bool(self.plan) and self.plan["process"] == rank
        self.inside, self.beats = False, 0

    def enters(self, phase):
        if self.mine:
            planted = self.plan["phase"]
            names = OF_SERVERS if self.plan["target"] == "server" else NAMES
            self.inside, self.beats = phase == names.get(planted, planted), 0
            if self.inside and (planted in ENTERED or self.plan["after"] == 0):
                self.strikes()

    def counts(self, iterations):
        if self.mine and self.inside:
            self.beats += iterations
            if self.beats >= self.plan["after"]:
                self.strikes()

    def strikes(self):
        self.inside = False
        agent = os.getppid()
        pid = {"agent": agent, "launcher": parent_of(parent_of(agent))}.get(
            self.plan["target"], os.getpid()
        )
        root = self.folder.parent if self.folder.name == "profile" else self.folder
        strike(self.key, self.plan, pid, root)


def plant_in_rank(module):
    """Have the Reporter tell what this rank does."""
    reporter = module.Reporter
    begin, phase, beat, line = reporter.__init__, reporter.phase, reporter.beat, reporter.line

    def planted_begin(self, folder, rank):
        begin(self, folder, rank)
        self.planted = Planted(self, rank)

    def planted_phase(self, name):
        phase(self, name)
        self.planted.enters(name)

    def planted_beat(self, iterations=1):
        beat(self, iterations)
        self.planted.counts(iterations)

    def planted_line(self, kind, **content):
        line(self, kind, **content)
        if str(getattr(kind, "value", kind)) == "done":
            self.planted.enters("exit")

    reporter.__init__, reporter.phase, reporter.beat, reporter.line = (
        planted_begin,
        planted_phase,
        planted_beat,
        planted_line,
    )


# --- in the launcher -----------------------------------------------------------------------------------------------

# Phases of the launcher alone: what it calls there, and whether the fault strikes before or after the call.
CALLED = {
    "compose": ("launch.cli.compose", "requests_of", "before"),
    "spawn": ("launch.engines.local", "LocalEngine.start", "after"),
    "projection": ("launch.tracking.tracker", "Tracker.log", "before"),
    "report": ("launch.study.background", "write_report", "before"),
}


def plant_in_launcher(plan):
    """Return (module, what to do with it once it is imported)."""
    name, path, when = CALLED[plan["phase"]]

    def plant(module):
        *owners, last = path.split(".")
        owner = module
        for one in owners:
            owner = getattr(owner, one)
        real = getattr(owner, last)

        def planted(*arguments, **named):
            if when == "before":
                strike("launcher", plan, os.getpid())
            result = real(*arguments, **named)
            if when == "after":
                strike("launcher", plan, os.getpid())
            return result

        setattr(owner, last, planted)

    return name, plant


class AfterImport:
    """Finds one module as Python would, and does something with it once it is imported."""

    def __init__(self, name, then):
        self.name, self.then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executed(module):
            execute(module)
            self.then(module)

        spec.loader.exec_module = executed
        return spec


def install():
    arguments = " ".join(sys.orig_argv)
    if "benchmarks.rank." in arguments:
        sys.meta_path.insert(0, AfterImport("benchmarks.rank.ranks", plant_in_rank))
    elif "launch.py" in arguments:
        plan = json.loads((HERE / "planted.json").read_text()).get("launcher")
        if plan:
            sys.meta_path.insert(0, AfterImport(*plant_in_launcher(plan)))


if __name__ == "sitecustomize":
    install()
