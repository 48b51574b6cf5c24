"""Sweeps with faults: what a fault is, a launcher whose cells have some, and where to look afterwards.

faults_planted.py is what runs inside the processes, faults_seen.py what is looked at.
"""

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

from faults_seen import CACHES, ORPHANS_S, alive, temporaries, tokens

from benchmarks import record as records

ROOT = Path(__file__).parent.parent
PLANTED = ROOT / "tests" / "faults_planted.py"
# In the order in which a sweep comes to them. The names that ranks have for theirs: faults_planted.NAMES.
PHASES = (
    "compose", "spawn", "build", "first step", "warm-up", "timed", "exchange", "limits", "exposed", "exit", "profile",
    "projection", "report",
)  # fmt: skip
OF_THE_LAUNCHER = (
    "compose",
    "spawn",
    "projection",
    "report",
)  # phases in which no rank of the cell runs
# What a cell of two ranks costs is the import of torch, and once more for training.
CELL = ["model=fmnist_cnn", "batch_size=2", "tracking=none", "device=cpu", "engine.stop_grace_s=1"]
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

    @property
    def ends_the_cell(self):
        """Whether the cell has no other record than that of the fault, after a launcher that was stopped was run again."""
        return self.cause is not None and self.target != "launcher"


def cap_of(record):
    """The bucket_cap_mb by which a sweep's cells are told apart."""
    return int(record.cell.strategy["bucket_cap_mb"])


def of_caps(caps):
    """The override that asks for cells with these bucket_cap_mb."""
    return f"strategy.bucket_cap_mb={','.join(map(str, caps))}"


class PlantedSweep:
    """A sweep whose cells have faults: folder/out, folder/tmp (its TMPDIR), folder/plant."""

    def __init__(self, folder, faults, *overrides, healthy=(), also=(), environment=()):
        """`faults` is {bucket_cap_mb of a cell, or "launcher": Fault}, `healthy` the bucket_cap_mb of cells without one.

        `also` are modules (paths) with kinds of the caller's own, `environment` is for the launcher.
        """
        self.faults, self.caps = faults, [*(key for key in faults if key != "launcher"), *healthy]
        self.output_dir, self.study_dir = folder / "out", folder / "out" / "default"
        self.scratch, self.plant = folder / "tmp", folder / "plant"
        for path in (self.output_dir, self.scratch, self.plant):
            path.mkdir(parents=True)
        shutil.copy(PLANTED, self.plant / "sitecustomize.py")
        for path in also:
            shutil.copy(path, self.plant)
        self.replant(faults)
        self.overrides = [f"output_dir={self.output_dir}", of_caps(self.caps), *overrides]
        imports = [str(self.plant), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        paths = {"PYTHONPATH": os.pathsep.join(imports), "TMPDIR": str(self.scratch)}
        self.environment = {**os.environ, **NO_MULTICAST, **paths, **dict(environment)}
        self.processes, self._said, self._told = [], folder / "said.txt", 0
        self._orphans, self._left = None, set()
        self.status = None  # of the last launcher that ended

    def replant(self, faults):
        """Plant other faults for the next launcher."""
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
        asked = [
            of_caps(caps) if caps and one == of_caps(self.caps) else one for one in self.overrides
        ]
        self._orphans, self._left = None, self.all_left() if self.processes else set()
        with self._said.open("ab") as said:
            self._told = said.tell()
            process = subprocess.Popen(
                [sys.executable, "launch.py", "-m", *CELL, *asked, *overrides],
                cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def run(self, *overrides, caps=None, timeout_s=600):
        """Run a launcher to its end; return its exit status."""
        return self.wait(self.start(*overrides, caps=caps), timeout_s)

    def wait(self, process, timeout_s=600):
        """Wait for a launcher and return its exit status; None for one that has to be killed because it does not end."""
        try:
            self.status = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.status = None
            self.end()
        return self.status

    def end(self):
        """Kill what still runs of this sweep."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
        for process in alive(self.tokens()):
            process.kill()

    # --- what is there afterwards ---

    @property
    def said(self):
        """Everything that the last launcher printed."""
        return self._said.read_bytes()[self._told :].decode(errors="replace")

    @property
    def everything_said(self):
        """What all launchers printed."""
        return self._said.read_text(errors="replace")

    def tokens(self):
        """The tokens of every attempt that was begun."""
        return set().union(
            *(tokens(path.parent) for path in self.output_dir.glob("*/journal.jsonl"))
        )

    def struck(self, key):
        """What the plant of a fault wrote when it struck; None if it did not."""
        path = self.plant / f"struck-{key}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def records(self, key=None):
        """The records of a cell, or of the whole sweep, in the order of their start."""
        found = records.read_study(self.study_dir)[0] if self.study_dir.exists() else []
        return [one for one in found if key in (None, "launcher", cap_of(one))]

    def others_finished(self, key):
        """Whether every other cell was finished, and those with a fault of their own have at least their record."""
        states = {}
        for one in self.records():
            states.setdefault(cap_of(one), []).append(one.state)
        return all(
            "finished" in states.get(cap, [])
            or (cap in self.faults and self.faults[cap].ends_the_cell and cap in states)
            for cap in self.caps
            if cap != key or not self.faults[cap].ends_the_cell
        )

    def orphans(self):
        """Processes of the sweep's cells that are there ORPHANS_S after its launcher's end; looked for once."""
        if self._orphans is None:
            deadline = time.monotonic() + ORPHANS_S
            while (left := alive(self.tokens())) and time.monotonic() < deadline:
                time.sleep(0.05)
            self._orphans = left
        return self._orphans

    def left_files(self):
        """What the last launcher left in TMPDIR and in shared memory, and its temporaries in the output folder."""
        return sorted(self.all_left() - self._left)

    def all_left(self):
        """What all launchers left there, by name."""
        marks = {token[:16] for token in self.tokens()}
        shared = {
            str(path)
            for path in Path("/dev/shm").iterdir()
            if any(mark in path.name for mark in marks)
        }
        scratch = {
            f"TMPDIR/{path.name}" for path in self.scratch.iterdir() if not CACHES.match(path.name)
        }
        return scratch | shared | set(temporaries(self.output_dir))
