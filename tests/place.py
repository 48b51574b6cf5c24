"""A sweep whose surroundings fail: a launcher with mounts, limits and an environment of its own, stopped at a gate meanwhile.

Mounts are in a mount namespace that a sleeping process holds: a test that is killed leaves none behind.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from faults import CELL, OF_THE_LAUNCHER, ROOT, Fault, PlantedSweep
from faults_seen import ORPHANS_S, until

GATE = ROOT / "tests" / "faults_gate.py"
FAULTY, OTHER = 11, 12  # bucket_cap_mb of the cells
OPTIONS = (
    "gpus=0", "noise_pairs=0", "benchmark.max_seconds=0.1", "benchmark.min_iterations=3", "benchmark.max_iterations=10",
    "benchmark.warmup_min_seconds=0", "benchmark.warmup_max_seconds=0.1", "benchmark.exchange_iterations=2",
    "benchmark.limit_iterations=0", "benchmark.exposed_rounds=0",
)  # fmt: skip
LONGEST_S = 240.0


class Place(PlantedSweep):
    """One launcher with two cells; the first, or the launcher, waits at the gate of a phase. Phase `start` has no gate."""

    def __init__(self, folder, phase, *options, rank=0):
        fault = Fault("faults_gate.wait", phase, "surroundings", process=rank, after=0)
        faults = (
            {} if phase == "start" else {"launcher" if phase in OF_THE_LAUNCHER else FAULTY: fault}
        )
        healthy = [cap for cap in (FAULTY, OTHER) if cap not in faults]
        super().__init__(folder, faults, *OPTIONS, *options, healthy=healthy, also=(GATE,))
        self.folder, self.phase, self.out = folder, phase, self.output_dir
        self.before = []  # commands that start the launcher: prlimit, a shell that closes its output
        self.passed = ()  # descriptors that it inherits
        self.uri = None  # of MLflow's store; None: the default
        self._holder, self._cleanup = None, []

    # --- running ---

    def start(self):
        with self._said.open("ab") as said:
            process = subprocess.Popen(
                [*self.inside(), *self.before, sys.executable, str(ROOT / "launch.py"), "-m", *CELL, *self.overrides],
                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                start_new_session=True, pass_fds=self.passed,
            )  # fmt: skip
        self.processes.append(process)
        return process

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

    def begins_again(self):
        """Forget what was said: what follows is said without the fault."""
        self._said = self.folder / "said_again.txt"

    def alive(self):
        """Processes of this sweep, its launcher too."""
        found, mark = [], str(self.plant).encode()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if (
                    mark in Path(f"/proc/{process.pid}/environ").read_bytes()
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def orphans(self):
        deadline = time.monotonic() + ORPHANS_S
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

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

    # --- mounts ---

    def inside(self):
        """The command that enters the place's mounts."""
        return (
            []
            if self._holder is None
            else ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--"]
        )

    def seen(self, path):
        """A path of the place as this process reaches it."""
        return path if self._holder is None else Path(f"/proc/{self._holder.pid}/root{path}")

    def mount(self, script):
        """Run lines of shell as root among the place's own mounts."""
        if os.geteuid() != 0:
            pytest.skip("needs root: mounts are made in a namespace of their own")
        if self._holder is None:
            command = ["unshare", "-m", "sh", "-c", "echo; exec sleep 3600"]
            self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
            self._holder.stdout.readline()
            self.output_dir, self.study_dir = self.seen(self.out), self.seen(self.study_dir)
        done = subprocess.run([*self.inside(), "sh", "-ec", script], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot be done on this machine: {script}: {done.stderr.strip()}")

    # --- what is there afterwards ---

    def lines(self):
        """Every whole line that a rank has written."""
        files = self.study_dir.glob("*/**/ranks/*.jsonl")
        return {
            line
            for path in files
            for line in path.read_bytes().split(b"\n")
            if line[:1] == b"{" and line[-1:] == b"}"
        }
