"""Faults of the surroundings: disk, memory, limits, clock, MLflow's store, nsys, standard streams.

CASES is the table. A kind is a generator over a SurroundingsSweep. Before its first `yield` it
prepares the sweep; after it, the fault is planted (at the gate, or, in the phase `start`, before
the launcher starts); after the second, the launcher has ended and the fault is healed.
"""

import contextlib
import functools
import os
import socket
import sqlite3
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

MIB = 1 << 20
HOG = "blocks = []\nwhile True: blocks.append(b'x' * (1 << 24))"  # its pages are touched: the process itself is killed
KVSTORE = ("strategy=cpu_staged",)


@dataclass(frozen=True)
class Case:
    """One fault at one phase, and what must come of it."""

    plant: object
    phase: str
    says: str  # in what the launcher printed; a regular expression
    status: tuple = (1,)
    options: tuple = ()
    value: object = None  # given to the planting function
    finished: int = 0  # cells that the first launcher finishes at least
    rank: int = 0  # that waits at the gate
    cause: str | None = None  # of the failed cell, where it has a record

    @property
    def name(self):
        value = "" if self.value is None else f"-{self.value}"
        return f"{self.plant.__name__}{value}@{self.phase}"


# --- the disk ---------------------------------------------------------------------------------------------------------


def disk_full(sweep, free_kib):
    """output_dir has no more than so many KiB left."""
    size = free_kib if sweep.phase == "start" else 64 << 10
    sweep.mount(f"mount -t tmpfs -o size={max(size, 4)}k none {sweep.out}")
    ballast = sweep.output_dir / "ballast"
    yield
    if sweep.phase != "start":
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(ballast, max(0, ballast.stat().st_size - (free_kib << 10)))
    yield
    sweep.mount(f"mount -o remount,size=64m {sweep.out}")
    ballast.unlink(missing_ok=True)


def file_size(sweep, kib):
    """No file of the launcher, or of the rank at the gate, may grow beyond so many KiB."""
    yield from limited(sweep, "fsize", kib << 10)


def disk_fails(sweep, _):
    """The disk answers with errors, and the kernel makes its file system read-only, with files open for writing."""
    image = sweep.folder / "disk"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    made = subprocess.run(["mkfs.ext4", "-qF", image], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mkfs.ext4: {made.stderr}")
    sweep.mount(f"mount -o loop {image} {sweep.out}; rmdir {sweep.out}/lost+found")
    sweep.at_end(lambda: sweep.mount(f"umount -l {sweep.out} || true"))
    yield
    sweep.mount(f"mount -o remount,{'ro' if sweep.phase == 'start' else 'abort'} {sweep.out}")
    yield
    sweep.mount(
        f"umount {sweep.out}; e2fsck -fy {image} >&2 || true; mount -o loop {image} {sweep.out}"
    )


def unmounted(sweep, _):
    disk = sweep.folder / "disk"
    disk.mkdir()
    sweep.mount(f"mount -t tmpfs none {disk}; mount --bind {disk} {sweep.out}")
    yield
    sweep.mount(f"umount -l {sweep.out}")
    yield
    beneath = [path.name for path in sweep.out.iterdir()]
    assert not beneath, f"written beneath the mount point: {beneath}"
    sweep.mount(f"mount --bind {disk} {sweep.out}")


# --- memory -----------------------------------------------------------------------------------------------------------


def shared_memory_full(sweep, _):
    sweep.mount("mount -t tmpfs -o size=64m none /dev/shm")
    yield
    sweep.mount("cat /dev/zero > /dev/shm/ballast || true 2>&-")
    yield
    sweep.mount("rm /dev/shm/ballast")


def oom_killed(sweep, _):
    """The kernel kills rank 1 for the memory of its control group."""
    group = control_group(sweep, "memory")
    yield
    pid = sweep.at_gate()
    limit = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / limit).write_text(str(256 * MIB))
    (group / "cgroup.procs").write_text(str(pid))
    sweep.go(HOG)
    yield


def no_memory(sweep, _):
    yield
    sweep.go("bytearray(1 << 60)")
    yield


def address_space(sweep, mib):
    yield from limited(sweep, "as", mib * MIB)


# --- limits -----------------------------------------------------------------------------------------------------------


def limited(sweep, name, value):
    """Set a limit of prlimit for the launcher and all it starts, or for whoever waits at the gate."""
    yield
    if sweep.phase == "start":
        sweep.before = ["prlimit", f"--{name}={value}"]
    else:
        pid = (sweep.plant / "arrived").read_text().strip()
        subprocess.run(["prlimit", f"--pid={pid}", f"--{name}={value}"], check=True)
    yield
    sweep.before = []


def descriptors(sweep, count):
    """A process may have so many files open; at a gate, no further one."""
    if sweep.phase == "start":
        yield from limited(sweep, "nofile", count)
    else:
        yield
        pid = sweep.at_gate()
        highest = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
        subprocess.run(
            ["prlimit", f"--pid={pid}", f"--nofile={highest + 1 + count}:20000"], check=True
        )
        yield


def processes(sweep, count):
    """The control group of the launcher may have so many tasks; at a gate, so many further ones."""
    group = control_group(sweep, "pids")
    sweep.before = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    yield
    now = 0 if sweep.phase == "start" else int((group / "pids.current").read_text())
    (group / "pids.max").write_text(str(now + count))
    yield
    sweep.before = []


def control_group(sweep, controller):
    if os.geteuid() != 0:
        pytest.skip("needs root: control groups")
    name = f"ringside-{os.getpid()}-{time.monotonic_ns()}"
    for group in (Path("/sys/fs/cgroup") / controller / name, Path("/sys/fs/cgroup") / name):
        with contextlib.suppress(OSError):
            group.mkdir()
            if any(group.glob(f"{controller}.*max*")):
                sweep.at_end(functools.partial(emptied, group))
                return group
            group.rmdir()
    pytest.skip(f"no control group of {controller} can be made here")


def emptied(group):
    with contextlib.suppress(OSError):
        for _ in range(50):
            if not (group / "cgroup.procs").read_text():
                break
            time.sleep(0.1)
        group.rmdir()


# --- the clock --------------------------------------------------------------------------------------------------------


def clock_step(sweep, who_and_hours):
    """The clock of the launcher, or of everyone, jumps."""
    who, hours = who_and_hours.split(":")
    with (sweep.plant / "sitecustomize.py").open("a") as file:
        file.write(f"\n\nstep_clock({who!r})\n")
    yield
    (sweep.plant / "clock").write_text(hours)
    yield


# --- MLflow's store ---------------------------------------------------------------------------------------------------


def made_store(sweep):
    """The store, which `start` finds made."""
    file = sweep.output_dir / "mlflow.db"
    if sweep.phase == "start":
        from launch.tracking import store

        store.connect(store.store_uri(None, sweep.out), sweep.out / "mlartifacts")
    return file


def store_locked(sweep, seconds):
    file = made_store(sweep)
    yield
    held, planted = threading.Event(), threading.Thread(target=lambda: hold(file, seconds, held))
    planted.start()
    held.wait()
    yield
    planted.join()


def hold(file, seconds, held):
    with contextlib.closing(sqlite3.connect(file, timeout=30, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        held.set()
        time.sleep(seconds)
        connection.execute("ROLLBACK")


def store_damaged(sweep, offset):
    file = made_store(sweep)
    yield
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(os.urandom(1 << 16))
    yield
    file.unlink()


def store_read_only(sweep, _):
    if sweep.phase == "start":
        made_store(sweep)
    sweep.mount("true")
    yield
    file = sweep.out / "mlflow.db"
    sweep.mount(f"mount --bind {file} {file}; mount -o remount,bind,ro {file}")
    yield
    sweep.mount(f"umount -l {sweep.out / 'mlflow.db'}")


def store_removed(sweep, _):
    made_store(sweep)
    yield
    (sweep.output_dir / "mlflow.db").unlink()
    yield


class Relay:
    """Passes connections on to a server, until it is `gone`."""

    def __init__(self, port):
        self.target, self.gone, self.open = port, False, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self.listener.accept()
                if self.gone:
                    ours.close()
                    continue
                theirs = socket.create_connection(("127.0.0.1", self.target))
                self.open += [ours, theirs]
                for ends in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self.pass_on, args=ends, daemon=True).start()

    def pass_on(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def leave(self):
        self.gone = True
        for one in self.open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def server_gone(sweep, back):
    """MLflow's server goes away, and comes back when the launcher has ended or (`soon`) after a second."""
    relay = Relay(sweep.port)
    sweep.at_end(relay.listener.close)
    sweep.uri = f"http://127.0.0.1:{relay.port}"
    sweep.overrides += [f"tracking.uri={sweep.uri}", f"study={sweep.folder.name}"]
    sweep.study_dir = sweep.output_dir / sweep.folder.name
    yield
    relay.leave()
    if back == "soon":
        threading.Timer(1.0, lambda: setattr(relay, "gone", False)).start()
    yield
    relay.gone = False


# --- Nsight Systems ---------------------------------------------------------------------------------------------------

NSYS = """#!/bin/sh
if [ "$1" = --version ]; then {version}; exit 0; fi
if [ "$1" = export ]; then exit 1; fi
while [ "${{1#-}}" != "$1" ] || [ "$1" = profile ]; do shift; done
{run}
"""
SAYS_VERSION = 'echo "NVIDIA Nsight Systems version 2025.3.2.1-0"'
FAKES = {
    "crashes": (SAYS_VERSION, "kill -SEGV $$"),
    "hangs": (SAYS_VERSION, "exec sleep 3600"),
    "leaves no report": (SAYS_VERSION, 'exec "$@"'),
    "ignores TERM": (SAYS_VERSION, "trap '' TERM INT; \"$@\"; while :; do sleep 0.2; done"),
    "says no version": ("echo hello", "exit 1"),
}


def nsys(sweep, fault):
    """Nsight Systems is not there, or does not do what it should."""
    folder = sweep.folder / "bin"
    folder.mkdir()

    def put(name):
        version, run = FAKES[name]
        (folder / "nsys").write_text(NSYS.format(version=version, run=run))
        (folder / "nsys").chmod(0o755)
        sweep.environment |= {"PATH": os.environ["PATH"], "NSYS": str(folder / "nsys")}

    yield
    if fault == "is missing":
        sweep.environment["PATH"] = str(folder)
        sweep.environment.pop("NSYS", None)
    else:
        put(fault)
    yield
    put("leaves no report")  # it works, as far as the study goes


# --- standard streams, TMPDIR, HOME, PATH -----------------------------------------------------------------------------


def stream(sweep, redirection):
    """A standard stream of the launcher is closed, full, or has lost its reader."""
    sweep.before = ["sh", "-c", f'exec "$@" {redirection}', "sh"]
    yield
    yield
    sweep.before = []


def reader_gone(sweep, _):
    """Who reads the launcher's output leaves."""
    reading, writing = os.pipe()
    # sh has no descriptors above 9.
    sweep.before = ["bash", "-c", f'exec "$@" >&{writing} 2>&1', "bash"]
    sweep.passed = (writing,)
    yield
    os.close(writing)
    os.close(reading)
    yield
    sweep.before, sweep.passed = [], ()


def variable(sweep, name_and_state):
    """TMPDIR, HOME or PATH is missing, a file, or cannot be written."""
    name, state = name_and_state.split(":")
    path = sweep.folder / "variable"
    yield
    if state == "unset":
        sweep.environment.pop(name, None)
    else:
        sweep.environment[name] = str(path)
    if state == "file":
        path.write_text("a file")
    if state == "read-only":
        path.mkdir()
        sweep.mount(f"mount -t tmpfs -o ro none {path}")
    if state == "full":
        path.mkdir()
        sweep.mount(f"mount -t tmpfs -o size=4k none {path}; echo > {path}/ballast")
    yield
    sweep.environment[name] = str(sweep.scratch) if name == "TMPDIR" else os.environ.get(name, "")


# --- the table --------------------------------------------------------------------------------------------------------

NO_SPACE, READ_ONLY = "there is no space left", "read-only"
MLFLOW = ("tracking=mlflow",)
REPORT = ("report=true",)
TORCH, BY_NSYS = ("profiler=torch",), ("profiler=nsys", "engine.start_timeout_s=60")
DISK_GONE = f"{READ_ONLY}|input/output error"
NO_PROCESS = "no further process or thread|start new thread"
CASES = [
    Case(disk_full, "exit", NO_SPACE, value=0),
    Case(disk_full, "projection", NO_SPACE, options=MLFLOW, value=0, finished=1),
    Case(disk_full, "report", NO_SPACE, (0,), MLFLOW + REPORT, value=0, finished=2),
    Case(disk_full, "profile", NO_SPACE, options=TORCH, value=0, finished=1),
    Case(file_size, "start", "ulimit -f", (2,), value=16),
    Case(file_size, "start", "ulimit -f", (2,), value=64),
    Case(file_size, "timed", "may not be larger", value=1, finished=1),
    Case(file_size, "projection", "may not be larger|input/output error", (0,), MLFLOW, 64, 2),
    Case(file_size, "report", "may not be larger", (0,), REPORT, value=4, finished=2),
    Case(disk_fails, "start", READ_ONLY, (2,)),
    Case(disk_fails, "build", DISK_GONE),
    Case(disk_fails, "timed", DISK_GONE),
    Case(disk_fails, "exit", DISK_GONE),
    Case(disk_fails, "projection", DISK_GONE, options=MLFLOW, finished=1),
    Case(disk_fails, "report", DISK_GONE, (0,), REPORT, finished=2),
    Case(unmounted, "timed", "is gone"),
    Case(unmounted, "exit", "is gone"),
    Case(unmounted, "projection", "is gone", options=MLFLOW, finished=1),
    Case(shared_memory_full, "start", "/dev/shm is full"),
    Case(shared_memory_full, "start", "0 MiB are free", (2,), KVSTORE, "staged"),
    Case(shared_memory_full, "build", "shared memory in /dev/shm", options=KVSTORE, value="staged"),
    Case(oom_killed, "timed", "want of memory", (1,), ("gpus=0+1",), None, 1, 1, "oom"),
    Case(no_memory, "build", "raised MemoryError", finished=1, cause="oom"),
    Case(no_memory, "timed", "raised MemoryError", finished=1, cause="oom"),
    Case(address_space, "start", "ulimit -v", (2,), value=300),
    Case(address_space, "start", "ulimit -v", (2,), value=3000),
    Case(descriptors, "start", "ulimit -n", (2,), value=12),
    Case(descriptors, "start", "ulimit -n", (2,), value=64),
    Case(descriptors, "timed", "", (0,), value=0, finished=2),
    Case(descriptors, "projection", "files open|cannot be", (0, 1), MLFLOW, 0, finished=1),
    Case(processes, "start", NO_PROCESS, (1, 2), value=2),
    Case(processes, "start", NO_PROCESS, (1, 2), value=6),
    Case(processes, "timed", "", (0, 1), value=0),
    Case(processes, "projection", NO_PROCESS, (0, 1), MLFLOW, 0, finished=1),
    Case(clock_step, "build", "", (0,), MLFLOW, "launcher:1", 2),
    Case(clock_step, "timed", "", (0,), MLFLOW, "everyone:-1", 2),
    Case(clock_step, "timed", "", (0,), MLFLOW, "launcher:-1", 2),
    Case(store_locked, "start", "", (0,), MLFLOW, 5, 2),
    Case(store_locked, "timed", "", (0,), MLFLOW, 5, 2),
    Case(store_locked, "start", "is locked by another process", (0,), MLFLOW, 45, 2),
    Case(store_locked, "projection", "is locked by another process", (0,), MLFLOW, 45, 2),
    Case(store_damaged, "start", "is not an SQLite file", (2,), MLFLOW, 0),
    Case(store_damaged, "timed", "cannot be used: DatabaseError", (0,), MLFLOW, 0, 2),
    Case(store_damaged, "timed", "cannot be used: DatabaseError", (0,), MLFLOW, 4096, 2),
    Case(store_read_only, "start", "readonly|read-only", (0,), MLFLOW, finished=2),
    Case(store_read_only, "timed", "", (0,), MLFLOW, finished=2),
    Case(store_removed, "timed", "is gone", (0,), MLFLOW, finished=2),
    Case(store_removed, "report", "is gone", (0,), (*MLFLOW, *REPORT), finished=2),
    Case(server_gone, "start", "cannot be used", (0,), MLFLOW, "late", 2),
    Case(server_gone, "timed", "cannot be used", (0,), MLFLOW, "late", 2),
    Case(server_gone, "projection", "cannot be used", (0,), MLFLOW, "late", 2),
    Case(server_gone, "timed", "", (0,), MLFLOW, "soon", 2),
    Case(nsys, "start", "nsys is not on PATH", (2,), BY_NSYS, "is missing"),
    Case(nsys, "start", "does not say a version", (2,), BY_NSYS, "says no version"),
    Case(nsys, "start", "SIGSEGV", (0,), BY_NSYS, "crashes", 2),
    Case(nsys, "start", "did not report within", (0,), BY_NSYS, "hangs", 2),
    Case(nsys, "start", "left no report", (0,), BY_NSYS, "leaves no report", 2),
    Case(nsys, "start", "did not end within", (0,), BY_NSYS, "ignores TERM", 2),
    Case(reader_gone, "timed", "", (0,), finished=2),
]
for kib in (0, 8, 24, 64):
    CASES.append(Case(disk_full, "start", NO_SPACE, (1, 2), value=kib))
for phase in ("build", "timed"):
    CASES.append(Case(disk_full, phase, NO_SPACE, value=0))
    CASES.append(Case(disk_full, phase, NO_SPACE, value=8))
for how in (">&-", "2>&-", ">&- 2>&-", ">/dev/full 2>/dev/full", "<&-", "<&- >&- 2>&-"):
    CASES.append(Case(stream, "start", "", (0,), value=how, finished=2))
for name in (
    *("TMPDIR:missing", "TMPDIR:file", "TMPDIR:read-only", "TMPDIR:full", "HOME:missing"),
    *("HOME:file", "HOME:unset", "PATH:missing", "PATH:unset"),
):
    CASES.append(Case(variable, "start", "", (0,), value=name, finished=2))
