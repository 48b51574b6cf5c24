"""Faults of the surroundings: disk, shared memory, limits, clock, MLflow's store, nsys, standard streams. KINDS is the table.

A kind is a generator over a place. Before its first `yield` it prepares the place; after it, the fault is planted (at the gate,
or, in the phase `start`, before the launcher starts); after the second, the launcher has ended and the fault is healed.
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
STORE = ("tracking.enabled=true",)
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
    def failed_rank(self):
        """The rank that the record names."""
        return self.rank if self.cause else None

    @property
    def name(self):
        value = "" if self.value is None else f"-{self.value}"
        return f"{self.plant.__name__}{value}@{self.phase}"


# --- the disk ---------------------------------------------------------------------------------------------------------


def disk_full(place, free_kib):
    """output_dir has no more than so many KiB left."""
    size = free_kib if place.phase == "start" else 64 << 10
    place.mount(f"mount -t tmpfs -o size={max(size, 4)}k none {place.out}")
    ballast = place.output_dir / "ballast"
    yield
    if place.phase != "start":
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(ballast, max(0, ballast.stat().st_size - (free_kib << 10)))
    yield
    place.mount(f"mount -o remount,size=64m {place.out}")
    ballast.unlink(missing_ok=True)


def file_size(place, kib):
    """No file of the launcher, or of the rank at the gate, may grow beyond so many KiB."""
    yield from limited(place, "fsize", kib << 10)


def disk_fails(place, _):
    """The disk answers with errors, and the kernel makes its file system read-only, with files open for writing."""
    image = place.folder / "disk"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    made = subprocess.run(["mkfs.ext4", "-qF", image], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mkfs.ext4: {made.stderr}")
    place.mount(f"mount -o loop {image} {place.out}; rmdir {place.out}/lost+found")
    place.at_end(lambda: place.mount(f"umount -l {place.out} || true"))
    yield
    place.mount(f"mount -o remount,{'ro' if place.phase == 'start' else 'abort'} {place.out}")
    yield
    place.mount(
        f"umount {place.out}; e2fsck -fy {image} >&2 || true; mount -o loop {image} {place.out}"
    )


def unmounted(place, _):
    """output_dir's file system is taken away."""
    disk = place.folder / "disk"
    disk.mkdir()
    place.mount(f"mount -t tmpfs none {disk}; mount --bind {disk} {place.out}")
    yield
    place.mount(f"umount -l {place.out}")
    yield
    beneath = [path.name for path in place.out.iterdir()]
    assert not beneath, f"written beneath the mount point: {beneath}"
    place.mount(f"mount --bind {disk} {place.out}")


# --- memory -----------------------------------------------------------------------------------------------------------


def shared_memory_full(place, _):
    """/dev/shm has no page left."""
    place.mount("mount -t tmpfs -o size=64m none /dev/shm")
    yield
    place.mount("cat /dev/zero > /dev/shm/ballast || true 2>&-")
    yield
    place.mount("rm /dev/shm/ballast")


def oom_killed(place, _):
    """The kernel kills rank 1 for the memory of its control group."""
    group = control_group(place, "memory")
    yield
    pid = place.at_gate()
    limit = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / limit).write_text(str(256 * MIB))
    (group / "cgroup.procs").write_text(str(pid))
    place.go(HOG)
    yield


def no_memory(place, _):
    """Python raises MemoryError in a rank."""
    yield
    place.go("bytearray(1 << 60)")
    yield


def address_space(place, mib):
    """No process may have more than so many MiB of addresses."""
    yield from limited(place, "as", mib * MIB)


# --- limits -----------------------------------------------------------------------------------------------------------


def limited(place, name, value):
    """Set a limit of prlimit for the launcher and all it starts, or for whoever waits at the gate."""
    yield
    if place.phase == "start":
        place.before = ["prlimit", f"--{name}={value}"]
    else:
        subprocess.run(
            [
                "prlimit",
                f"--pid={(place.plant / 'arrived').read_text().strip()}",
                f"--{name}={value}",
            ],
            check=True,
        )
    yield
    place.before = []


def descriptors(place, count):
    """A process may have so many files open; at a gate, no further one."""
    if place.phase == "start":
        yield from limited(place, "nofile", count)
    else:
        yield
        pid = place.at_gate()
        highest = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
        subprocess.run(
            ["prlimit", f"--pid={pid}", f"--nofile={highest + 1 + count}:20000"], check=True
        )
        yield


def processes(place, count):
    """The control group of the launcher may have so many tasks; at a gate, so many further ones."""
    group = control_group(place, "pids")
    place.before = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    yield
    now = 0 if place.phase == "start" else int((group / "pids.current").read_text())
    (group / "pids.max").write_text(str(now + count))
    yield
    place.before = []


def control_group(place, controller):
    """A control group of our own."""
    if os.geteuid() != 0:
        pytest.skip("needs root: control groups")
    name = f"ringside-{os.getpid()}-{time.monotonic_ns()}"
    for group in (Path("/sys/fs/cgroup") / controller / name, Path("/sys/fs/cgroup") / name):
        with contextlib.suppress(OSError):
            group.mkdir()
            if any(group.glob(f"{controller}.*max*")):
                place.at_end(functools.partial(emptied, group))
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


def clock_step(place, who_and_hours):
    """The clock of the launcher, or of everyone, jumps."""
    who, hours = who_and_hours.split(":")
    with (place.plant / "sitecustomize.py").open("a") as file:
        file.write(f"\n\nimport faults_gate\nfaults_gate.step_clock({who!r})\n")
    yield
    (place.plant / "clock").write_text(hours)
    yield


# --- MLflow's store ---------------------------------------------------------------------------------------------------


def made_store(place):
    """The store, which `start` finds made."""
    file = place.output_dir / "mlflow.db"
    if place.phase == "start":
        from launch.tracking import store

        store.connect(store.store_uri(None, place.out), place.out / "mlartifacts")
    return file


def store_locked(place, seconds):
    """Another process holds the store's lock."""
    file = made_store(place)
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


def store_damaged(place, offset):
    """There is rubbish in the store's file."""
    file = made_store(place)
    yield
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(os.urandom(1 << 16))
    yield
    file.unlink()


def store_read_only(place, _):
    """The store's file cannot be written."""
    if place.phase == "start":
        made_store(place)
    place.mount("true")
    yield
    file = place.out / "mlflow.db"
    place.mount(f"mount --bind {file} {file}; mount -o remount,bind,ro {file}")
    yield
    place.mount(f"umount -l {place.out / 'mlflow.db'}")


def store_removed(place, _):
    """The store's file is removed."""
    made_store(place)
    yield
    (place.output_dir / "mlflow.db").unlink()
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


def server_gone(place, back):
    """MLflow's server goes away, and comes back when the launcher has ended or (`soon`) after a second."""
    relay = Relay(place.port)
    place.at_end(relay.listener.close)
    place.uri = f"http://127.0.0.1:{relay.port}"
    place.overrides += [f"tracking.uri={place.uri}", f"study={place.folder.name}"]
    place.study_dir = place.output_dir / place.folder.name
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


def nsys(place, fault):
    """Nsight Systems is not there, or does not do what it should."""
    folder = place.folder / "bin"
    folder.mkdir()

    def put(name):
        version, run = FAKES[name]
        (folder / "nsys").write_text(NSYS.format(version=version, run=run))
        (folder / "nsys").chmod(0o755)
        place.environment |= {"PATH": os.environ["PATH"], "NSYS": str(folder / "nsys")}

    yield
    if fault == "is missing":
        place.environment["PATH"] = str(folder)
        place.environment.pop("NSYS", None)
    else:
        put(fault)
    yield
    put("leaves no report")  # it works, as far as the study goes


# --- standard streams, TMPDIR, HOME, PATH -----------------------------------------------------------------------------


def stream(place, redirection):
    """A standard stream of the launcher is closed, full, or has lost its reader."""
    place.before = ["sh", "-c", f'exec "$@" {redirection}', "sh"]
    yield
    yield
    place.before = []


def reader_gone(place, _):
    """Who reads the launcher's output leaves."""
    reading, writing = os.pipe()
    place.before = [
        "bash",
        "-c",
        f'exec "$@" >&{writing} 2>&1',
        "bash",
    ]  # sh has no descriptors above 9
    place.passed = (writing,)
    yield
    os.close(writing)
    os.close(reading)
    yield
    place.before, place.passed = [], ()


def variable(place, name_and_state):
    """TMPDIR, HOME or PATH is missing, a file, or cannot be written."""
    name, state = name_and_state.split(":")
    path = place.folder / "variable"
    yield
    if state == "unset":
        place.environment.pop(name, None)
    else:
        place.environment[name] = str(path)
    if state == "file":
        path.write_text("a file")
    if state == "read-only":
        path.mkdir()
        place.mount(f"mount -t tmpfs -o ro none {path}")
    if state == "full":
        path.mkdir()
        place.mount(f"mount -t tmpfs -o size=4k none {path}; echo > {path}/ballast")
    yield
    place.environment[name] = str(place.scratch) if name == "TMPDIR" else os.environ.get(name, "")


# --- the table --------------------------------------------------------------------------------------------------------

NO_SPACE, READ_ONLY = "there is no space left", "read-only"
MLFLOW = ("tracking=mlflow",)
REPORT = ("report=true",)
TORCH, BY_NSYS = ("profiler=torch",), ("profiler=nsys", "engine.start_timeout_s=60")
CASES = (
    *(Case(disk_full, "start", NO_SPACE, (1, 2), value=kib) for kib in (0, 8, 24, 64)),
    *(
        Case(disk_full, phase, NO_SPACE, value=kib)
        for phase in ("build", "timed")
        for kib in (0, 8)
    ),
    Case(disk_full, "exit", NO_SPACE, value=0),
    Case(disk_full, "projection", NO_SPACE, options=MLFLOW, value=0, finished=1),
    Case(disk_full, "report", NO_SPACE, (0,), MLFLOW + REPORT, value=0, finished=2),
    Case(disk_full, "profile", NO_SPACE, options=TORCH, value=0, finished=1),
    *(Case(file_size, "start", "ulimit -f", (2,), value=kib) for kib in (16, 64)),
    Case(file_size, "timed", "may not be larger", value=1, finished=1),
    Case(file_size, "projection", "may not be larger|input/output error", (0,), MLFLOW, 64, 2),
    Case(file_size, "report", "may not be larger", (0,), REPORT, value=4, finished=2),
    Case(disk_fails, "start", READ_ONLY, (2,)),
    *(
        Case(disk_fails, phase, f"{READ_ONLY}|input/output error")
        for phase in ("build", "timed", "exit")
    ),
    Case(disk_fails, "projection", f"{READ_ONLY}|input/output error", options=MLFLOW, finished=1),
    Case(disk_fails, "report", f"{READ_ONLY}|input/output error", (0,), REPORT, finished=2),
    *(Case(unmounted, phase, "is gone") for phase in ("timed", "exit")),
    Case(unmounted, "projection", "is gone", options=MLFLOW, finished=1),
    Case(shared_memory_full, "start", "/dev/shm is full"),
    Case(shared_memory_full, "start", "0 MiB are free", (2,), KVSTORE, "staged"),
    Case(shared_memory_full, "build", "shared memory in /dev/shm", options=KVSTORE, value="staged"),
    Case(
        oom_killed,
        "timed",
        "want of memory",
        options=("gpus=0+1",),
        rank=1,
        finished=1,
        cause="oom",
    ),
    *(
        Case(no_memory, phase, "raised MemoryError", finished=1, cause="oom")
        for phase in ("build", "timed")
    ),
    *(Case(address_space, "start", "ulimit -v", (2,), value=mib) for mib in (300, 3000)),
    *(Case(descriptors, "start", "ulimit -n", (2,), value=count) for count in (12, 64)),
    Case(descriptors, "timed", "", (0,), value=0, finished=2),
    Case(descriptors, "projection", "files open|cannot be", (0, 1), MLFLOW, 0, finished=1),
    *(
        Case(
            processes, "start", "no further process or thread|start new thread", (1, 2), value=count
        )
        for count in (2, 6)
    ),
    Case(processes, "timed", "", (0, 1), value=0),
    Case(
        processes,
        "projection",
        "no further process or thread|start new thread",
        (0, 1),
        MLFLOW,
        0,
        finished=1,
    ),
    *(
        Case(clock_step, phase, "", (0,), MLFLOW, f"{who}:{hours}", 2)
        for phase, who, hours in (
            ("build", "launcher", 1),
            ("timed", "everyone", -1),
            ("timed", "launcher", -1),
        )
    ),
    Case(store_locked, "start", "", (0,), MLFLOW, 5, 2),
    Case(store_locked, "timed", "", (0,), MLFLOW, 5, 2),
    Case(store_locked, "start", "is locked by another process", (0,), MLFLOW, 45, 2),
    Case(store_locked, "projection", "is locked by another process", (0,), MLFLOW, 45, 2),
    Case(store_damaged, "start", "is no SQLite file", (2,), MLFLOW, 0),
    Case(store_damaged, "timed", "is damaged: move", (0,), MLFLOW, 0, 2),
    Case(store_damaged, "timed", "is damaged: move", (0,), MLFLOW, 4096, 2),
    Case(store_read_only, "start", "readonly|read-only", (0,), MLFLOW, finished=2),
    Case(store_read_only, "timed", "", (0,), MLFLOW, finished=2),
    Case(store_removed, "timed", "is gone", (0,), MLFLOW, finished=2),
    Case(store_removed, "report", "is gone", (0,), (*MLFLOW, *REPORT), finished=2),
    *(
        Case(server_gone, phase, "does not answer", (0,), MLFLOW, "late", 2)
        for phase in ("start", "timed", "projection")
    ),
    Case(server_gone, "timed", "", (0,), MLFLOW, "soon", 2),
    Case(nsys, "start", "nsys is not on PATH", (2,), BY_NSYS, "is missing"),
    Case(nsys, "start", "does not say a version", (2,), BY_NSYS, "says no version"),
    Case(nsys, "start", "SIGSEGV", (0,), BY_NSYS, "crashes", 2),
    Case(nsys, "start", "did not report within", (0,), BY_NSYS, "hangs", 2),
    Case(nsys, "start", "left no report", (0,), BY_NSYS, "leaves no report", 2),
    Case(nsys, "start", "did not end within", (0,), BY_NSYS, "ignores TERM", 2),
    *(
        Case(stream, "start", "", (0,), value=how, finished=2)
        for how in (">&-", "2>&-", ">&- 2>&-", ">/dev/full 2>/dev/full", "<&-", "<&- >&- 2>&-")
    ),
    Case(reader_gone, "timed", "", (0,), finished=2),
    *(
        Case(variable, "start", "", (0,), value=f"{name}:{state}", finished=2)
        for name, state in (
            ("TMPDIR", "missing"),
            ("TMPDIR", "file"),
            ("TMPDIR", "read-only"),
            ("TMPDIR", "full"),
            ("HOME", "missing"),
            ("HOME", "file"),
            ("HOME", "unset"),
            ("PATH", "missing"),
            ("PATH", "unset"),
        )
    ),
)
