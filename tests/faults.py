"""Sweeps with faults: what a fault is, and launchers whose cells or surroundings have some.

faults_planted.py runs inside the processes, faults_seen.py looks at what came of it.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from faults_seen import CACHES, ORPHANS_S, alive, ranks_alive, temporaries, tokens, until

from benchmarks import record as records

ROOT = Path(__file__).parent.parent
PLANTED = ROOT / "tests" / "faults_planted.py"
# In the order in which a sweep comes to them. What ranks call theirs: faults_planted.NAMES.
PHASES = (
    *("compose", "spawn", "build", "first step", "warm-up", "timed", "exchange", "limits"),
    *("exposed", "exit", "profile", "projection", "report"),
)
# Phases in which no rank of the cell runs.
OF_THE_LAUNCHER = ("compose", "spawn", "projection", "report")
# What a cell of two ranks costs is the import of torch, and once more for training.
CELL = ["model=fmnist_cnn", "batch_size=2", "tracking=none", "device=cpu", "engine.stop_grace_s=1"]
# Tiny windows.
TRAINING = [
    "benchmark.max_seconds=0.1", "benchmark.min_iterations=3", "benchmark.max_iterations=10",
    "benchmark.warmup_min_seconds=0", "benchmark.warmup_max_seconds=0.1",
    "benchmark.exchange_iterations=2", "benchmark.limit_iterations=0", "benchmark.exposed_rounds=0",
]  # fmt: skip
# Environment that forbids NVLink multicast: it must reach every rank.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True)
class Fault:
    """One kind of fault, where it strikes, and what must come of it."""

    kind: str
    phase: str  # PHASES
    target: str  # rank, server, agent, launcher, surroundings
    cause: str | None = None  # of the cell's record; None: the cell finishes
    rank: int | None = None  # that the record names
    status: int = 1  # of the launcher
    deadline_s: float | None = None  # of a hang
    process: int = 0  # the number of the rank or server that strikes
    after: int = 2  # iterations of the phase before it strikes
    may_finish: bool = False  # it may come too late to end the cell
    host: str = ""  # that the record names, where the cell has several

    @property
    def ends_the_cell(self):
        """Whether the cell has no other record than that of the fault, after a stopped launcher was run again."""
        return self.cause is not None and self.target != "launcher"


def cap_of(record):
    """The bucket_cap_mb by which a sweep's cells are told apart."""
    return int(record.cell.strategy["bucket_cap_mb"])


def of_caps(caps):
    """The override that asks for cells with these bucket_cap_mb."""
    return f"strategy.bucket_cap_mb={','.join(map(str, caps))}"


class PlantedSweep:
    """A sweep whose cells have faults: folder/out, folder/tmp (its TMPDIR), folder/plant."""

    def __init__(self, folder, faults, *overrides, healthy=()):
        """`faults` is {bucket_cap_mb of a cell, or "launcher": Fault}; `healthy` are the other cells' bucket_cap_mb."""
        self.faults, self.caps = faults, [*(key for key in faults if key != "launcher"), *healthy]
        self.output_dir, self.study_dir = folder / "out", folder / "out" / "default"
        self.scratch, self.plant = folder / "tmp", folder / "plant"
        for path in (self.output_dir, self.scratch, self.plant):
            path.mkdir(parents=True)
        shutil.copy(PLANTED, self.plant / "sitecustomize.py")
        self.replant(faults)
        self.overrides = [f"output_dir={self.output_dir}", of_caps(self.caps), *overrides]
        imports = [str(self.plant), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        paths = {"PYTHONPATH": os.pathsep.join(imports), "TMPDIR": str(self.scratch)}
        self.environment = {**os.environ, **NO_MULTICAST, **paths}
        self.processes, self._output, self._printed_before = [], folder / "output.txt", 0
        self._orphans, self._left = None, set()
        self.status = None  # of the last launcher that ended

    def replant(self, faults):
        self.faults = faults
        planted = {str(key): dataclasses.asdict(fault) for key, fault in faults.items()}
        (self.plant / "planted.json").write_text(json.dumps(planted))
        for path in self.plant.glob("struck-*.json"):
            path.unlink()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def start(self, *overrides, caps=None):
        """Start a launcher, with cells of other `bucket_cap_mb` than the sweep's if `caps` are given."""
        words = list(self.overrides)
        if caps:
            words[words.index(of_caps(self.caps))] = of_caps(caps)
        self._orphans, self._left = None, self.all_left() if self.processes else set()
        return self._launch([], [*words, *overrides])

    def _launch(self, before, words, **options):
        given = {word.partition("=")[0] for word in words}
        cell = [word for word in CELL if word.partition("=")[0] not in given]
        with self._output.open("ab") as output:
            self._printed_before = output.tell()
            process = subprocess.Popen(
                [*before, sys.executable, str(ROOT / "launch.py"), "-m", *cell, *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **{"cwd": ROOT, **options},
            )
        self.processes.append(process)
        return process

    def run(self, *overrides, caps=None, timeout_s=600):
        return self.wait(self.start(*overrides, caps=caps), timeout_s)

    def wait(self, process, timeout_s=600):
        """Wait for a launcher and return its exit status; None for one that does not end and is killed."""
        try:
            self.status = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.status = None
            self.end()
        return self.status

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
        for process in ranks_alive(self.tokens()):
            process.kill()

    # --- what is there afterwards ---

    @property
    def printed(self):
        """Everything that the last launcher printed."""
        return self._output.read_bytes()[self._printed_before :].decode(errors="replace")

    @property
    def everything_printed(self):
        return self._output.read_text(errors="replace")

    def tokens(self):
        """The tokens of every attempt that was begun."""
        journals = self.output_dir.glob("*/journal.jsonl")
        return set().union(*(tokens(path.parent) for path in journals))

    def struck(self, key):
        """What the plant of a fault wrote when it struck; None if it did not."""
        path = self.plant / f"struck-{key}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def records(self, key=None):
        """The records of a cell, or of the whole sweep, in the order of their start."""
        every = records.read_study(self.study_dir)[0] if self.study_dir.exists() else []
        return [record for record in every if key in (None, "launcher", cap_of(record))]

    def contradicted(self):
        """What verify says of the study where a value is not as its samples say, in a list."""
        words = [sys.executable, "-m", "analysis", "verify", str(self.study_dir)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        return [f"verify: {done.stdout[-500:]}{done.stderr}"] if done.returncode else []

    def others_finished(self, key):
        """Whether every other cell was finished, and those with a fault of their own have at least their record."""
        states = {}
        for record in self.records():
            states.setdefault(cap_of(record), []).append(record.state)
        for cap in self.caps:
            ends = cap in self.faults and self.faults[cap].ends_the_cell
            if cap == key and ends:
                continue
            if "finished" not in states.get(cap, []) and not (ends and cap in states):
                return False
        return True

    def alive(self):
        """Processes of the sweep's cells."""
        return ranks_alive(self.tokens())

    def orphans(self):
        """Processes that are there ORPHANS_S after the launcher's end; looked for once a launcher."""
        if self._orphans is None:
            deadline = time.monotonic() + ORPHANS_S
            self._orphans = self.alive()
            while self._orphans and time.monotonic() < deadline:
                time.sleep(0.05)
                self._orphans = self.alive()
        return self._orphans

    def left_files(self):
        """What the last launcher left in TMPDIR and in shared memory, and its temporaries in the output folder."""
        return sorted(self.all_left() - self._left)

    def all_left(self):
        """What all launchers left there, by name."""
        left = set(temporaries(self.output_dir))
        for path in Path("/dev/shm").iterdir():
            if any(token[:16] in path.name for token in self.tokens()):
                left.add(str(path))
        for path in self.scratch.parent.glob(f"{self.scratch.name}*/*"):
            if not CACHES.match(path.name):
                left.add(f"TMPDIR/{path.name}")
        return left


class SurroundingsSweep(PlantedSweep):
    """A launcher with mounts, limits and an environment of its own, and two cells.

    The first cell, or the launcher, waits at the gate of a phase; phase `start` has no gate. Mounts
    are in a mount namespace that a sleeping process holds: a test that is killed leaves none behind.
    """

    FAULTY, OTHER = 11, 12  # bucket_cap_mb of the cells
    LONGEST_S = 240.0

    def __init__(self, folder, phase, *options, rank=0):
        fault = Fault("gate", phase, "surroundings", process=rank, after=0)
        faults = {}
        if phase in OF_THE_LAUNCHER:
            faults["launcher"] = fault
        elif phase != "start":
            faults[self.FAULTY] = fault
        healthy = [cap for cap in (self.FAULTY, self.OTHER) if cap not in faults]
        options = ("gpus=0", "noise_pairs=0", *TRAINING, *options)
        super().__init__(folder, faults, *options, healthy=healthy)
        self.folder, self.phase, self.out = folder, phase, self.output_dir
        self.before = []  # commands that start the launcher: prlimit, a shell that closes its output
        self.passed = ()  # descriptors that it inherits
        self.uri = None  # of MLflow's store; None: the default
        self._holder, self._cleanup = None, []

    def start(self):
        self._orphans = None
        inside = [*self.inside(), *self.before]
        return self._launch(inside, self.overrides, cwd=self.folder, pass_fds=self.passed)

    def at_gate(self):
        """The id of the process that waits at the gate."""
        mark = self.plant / "arrived"
        until(mark.exists, 120, self.processes[0])
        return int(mark.read_text())

    def go(self, program=""):
        """Open the gate; who waits there runs a program first."""
        if program:
            (self.plant / "do").write_text(program)
        (self.plant / "go").touch()

    def alive(self):
        """Processes of this sweep, its launcher too."""
        return alive(str(self.plant))

    def at_end(self, action):
        """Do something when all is over, the last first."""
        self._cleanup.append(action)

    def end(self):
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        super().end()
        for action in reversed(self._cleanup):
            action()
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()

    def inside(self):
        """The command that enters the sweep's mounts."""
        if self._holder is None:
            return []
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--"]

    def mount(self, script):
        """Run lines of shell as root among the sweep's own mounts."""
        if os.geteuid() != 0:
            pytest.skip("needs root: mounts are made in a namespace of their own")
        if self._holder is None:
            command = ["unshare", "-m", "sh", "-c", "echo; exec sleep 3600"]
            self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
            self._holder.stdout.readline()
            seen_from_here = f"/proc/{self._holder.pid}/root"
            self.output_dir = Path(f"{seen_from_here}{self.output_dir}")
            self.study_dir = Path(f"{seen_from_here}{self.study_dir}")
        done = subprocess.run([*self.inside(), "sh", "-ec", script], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot be done on this machine: {script}: {done.stderr.strip()}")

    def lines(self):
        """Every whole line that a rank has written."""
        whole = set()
        for path in self.study_dir.glob("*/**/ranks/*.jsonl"):
            for line in path.read_bytes().split(b"\n"):
                if line[:1] == b"{" and line[-1:] == b"}":
                    whole.add(line)
        return whole
