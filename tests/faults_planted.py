"""Runs inside the processes of a planted sweep: makes one of them misbehave at one point.

`faults.PlantedSweep` copies this file to PLANTED_FOLDER/sitecustomize.py. `planted.json` beside it
is {key: {"kind", "phase", "target", "process", "after"}}; a key is a cell's `bucket_cap_mb`, or
"launcher" for the phases of the launcher alone. Each strikes once: `struck-KEY.json` then holds the
time, and the lines that the cell's ranks had written. Imports the standard library only.
"""

import contextlib
import ctypes
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
# Phases that strike when they begin; the others after some iterations.
ENTERED = ("build", "profile", "exit")

# --- kinds of faults; each gets the process that it hits ---


def send(*signals):
    """Signal a process; later signals come from a process of their own, 0.3 s apart."""

    def strike(pid):
        if len(signals) > 1:
            later = "".join(f"sleep 0.3; kill -{number:d} {pid};" for number in signals[1:])
            subprocess.Popen(["/bin/sh", "-c", later], env={}, start_new_session=True)
        os.kill(pid, signals[0])

    return strike


def throw(text):
    def strike(pid):
        raise RuntimeError(text)

    return strike


def hold_the_gil(pid):
    while True:  # a signal ends one sleep
        ctypes.PyDLL(None).sleep(3600)  # unlike CDLL, a call of PyDLL keeps Python's lock


def another_collective(pid):
    """Wait in a broadcast from another rank, where all others are in an all_reduce."""
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())


def of_host(*command):
    """Run a command on the host of this rank, as the administrator of its wire."""

    def strike(pid):
        subprocess.run(command, check=True)

    return strike


def kill_host(pid):
    """Kill every process of this network namespace, this one last."""
    here = Path("/proc/self/ns/net").readlink()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "ns/net").readlink() == here and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk(pid):
    """Fill the disk of this host's TMPDIR. The name is one that tests expect to stay there."""
    with (Path(os.environ["TMPDIR"]) / "torchinductor_ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:  # no space is left, which is the fault
            pass


def wait_at_gate(pid):
    """Say who is here, wait for the file `go`, and do what the file `do` says."""
    (HERE / "arriving").write_text(str(pid))
    (HERE / "arriving").rename(HERE / "arrived")
    while not (HERE / "go").exists():
        time.sleep(0.02)
    if (HERE / "do").exists():
        exec((HERE / "do").read_text())


# On GPUs. STRANGER computes for so long that it outlives its cell.
STRANGER = """
import time, torch
square, end = torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16), time.time() + 8
while time.time() < end:
    square @ square
    torch.cuda.synchronize()
"""


def stranger(pid):
    """Start a process that is not of the cell and computes on this rank's GPU."""
    foreign = {}
    for name, value in os.environ.items():
        if not name.startswith(("RINGSIDE", "PYTHONPATH")):
            foreign[name] = value
    visible = foreign["CUDA_VISIBLE_DEVICES"].split(",")
    foreign["CUDA_VISIBLE_DEVICES"] = visible[int(os.environ["LOCAL_RANK"])]
    subprocess.Popen([sys.executable, "-c", STRANGER], env=foreign, start_new_session=True)


def illegal_access(pid):
    """Have a kernel write far outside of what the process owns; CUDA says so at a later call."""
    import torch
    from torch.cuda import _compile_kernel

    source = 'extern "C" __global__ void outside(float* where) { where[1LL << 40] = 1.0f; }'
    _compile_kernel(source, "outside")((1, 1, 1), (1, 1, 1), (torch.zeros(1, device="cuda"),))


def out_of_gpu_memory(pid):
    import torch

    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")


def message_that_nobody_sends(pid):
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1 << 20, device="cuda"), (dist.get_rank() + 1) % dist.get_world_size())


def another_collective_of_nccl(pid):
    """Enqueue a broadcast where all others enqueue an all_reduce.

    On two H200s nothing waits for long: each collective of this rank meets the one before it of
    the other, and ends.
    """
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(1 << 20, device="cuda"), dist.get_rank())


KINDS = {
    "SIGKILL": send(signal.SIGKILL),
    "SIGSTOP": send(signal.SIGSTOP),
    "SIGSEGV": lambda pid: ctypes.string_at(0),
    "SIGABRT": lambda pid: os.abort(),
    "SIGTERM": send(signal.SIGTERM),
    "SIGINT": send(signal.SIGINT),
    "SIGINT twice": send(signal.SIGINT, signal.SIGINT),
    "SIGHUP": send(signal.SIGHUP),
    "exit 0": lambda pid: os._exit(0),
    "exit 7": lambda pid: os._exit(7),
    "exception": throw("planted"),
    "exception like a peer's": throw("Connection closed by peer [127.0.0.1]:1"),
    "control characters": throw("planted \x1b[2J\x1b]0;title\x07 and \0 and \r end"),
    "sleep": lambda pid: time.sleep(3600),
    "GIL held": hold_the_gil,
    "wrong collective": another_collective,
    "MemoryError": lambda pid: bytearray(1 << 60),
    "gate": wait_at_gate,
    "host SIGKILL": kill_host,
    "wire cut": of_host("ip", "link", "set", "eth0", "down"),
    # A queue of one packet: nearly all are dropped.
    "packets lost": of_host(
        "sh", "-c", "tc qdisc change dev eth0 root tbf rate 8kbit burst 1600 limit 1600"
    ),
    "full disk": fill_disk,
    "stranger": stranger,
    "illegal access": illegal_access,
    "out of GPU memory": out_of_gpu_memory,
    "message that nobody sends": message_that_nobody_sends,
    "another collective of NCCL": another_collective_of_nccl,
}


def step_clock(who):
    """Have the time of day be that of the file `clock`, in hours from now, in the launcher or everywhere."""
    if who == "launcher" and "launch.py" not in " ".join(sys.orig_argv):
        return
    real = time.time

    def stepped():
        try:
            return real() + 3600 * float((HERE / "clock").read_text())
        except (OSError, ValueError):
            return real()

    time.time = stepped


def listening():
    """The addresses at which the launcher and everything that it started listen, on this host."""
    import psutil

    launcher = psutil.Process()
    while "launch.py" not in " ".join(launcher.cmdline()):
        launcher = launcher.parent()
    addresses = set()
    for process in [launcher, *launcher.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    addresses.add(connection.laddr.ip)
    return sorted(addresses)


def strike(key, plan, pid, cell=None):
    """Write the time, the lines of the cell's ranks and who listens, then do it; not where it
    struck before.
    """
    struck = HERE / f"struck-{key}.json"
    if struck.exists():
        return
    lines = {}
    if cell is not None:
        for path in (*cell.glob("ranks/*.jsonl"), *cell.glob("profile/ranks/*.jsonl")):
            text = path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1].decode().splitlines()
            lines[path.relative_to(cell).as_posix()] = whole
    temporary = struck.with_suffix(".writing")
    seen = {"listening": listening(), "time": time.time(), "pid": pid, "lines": lines}
    temporary.write_text(json.dumps(seen))
    temporary.rename(struck)
    KINDS[plan["kind"]](pid)


# --- in a rank or a server ---


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
        pid = os.getpid()
        if self.plan["target"] == "agent":
            pid = os.getppid()
        if self.plan["target"] == "host":
            pid = parent_of(os.getppid())
        if self.plan["target"] == "launcher":
            pid = parent_of(parent_of(os.getppid()))
        root = self.folder.parent if self.folder.name == "profile" else self.folder
        # What a host has not handed on yet goes with its agent, or with the launcher.
        of_several = len(json.loads((root / "cell.json").read_text()).get("hosts", ())) > 1
        counted = not of_several or self.plan["target"] in ("rank", "agent")
        strike(self.key, self.plan, pid, root if counted else None)


def parent_of(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))


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

    reporter.__init__, reporter.phase = planted_begin, planted_phase
    reporter.beat, reporter.line = planted_beat, planted_line


# --- in the launcher ---

# Phases of the launcher alone: what it calls there, and whether to strike before or after the call.
CALLED = {
    "compose": ("launch.compose", "requests_of", "before"),
    "spawn": ("launch.engines.local", "LocalEngine.start", "after"),
    "projection": ("launch.tracking.tracker", "Tracker.log", "before"),
    "report": ("launch.study.background", "StudyReport.write", "before"),
}


def plant_in_launcher(plan):
    """Return (module, what to do with it once it is imported)."""
    name, path, when = CALLED[plan["phase"]]

    def plant(module):
        *owners, last = path.split(".")
        owner = module
        for attribute in owners:
            owner = getattr(owner, attribute)
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


if __name__ == "sitecustomize":
    if "benchmarks.rank." in " ".join(sys.orig_argv):
        sys.meta_path.insert(0, AfterImport("benchmarks.rank.ranks", plant_in_rank))
    elif "launch.py" in " ".join(sys.orig_argv):
        of_launcher = json.loads((HERE / "planted.json").read_text()).get("launcher")
        if of_launcher:
            sys.meta_path.insert(0, AfterImport(*plant_in_launcher(of_launcher)))
