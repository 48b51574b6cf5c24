"""The two nodes of the Slurm that .ci/slurm starts, as hosts that faults_hosts.py breaks."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from faults_seen import until

ROOT = Path(__file__).parent.parent
ANSWER_S = 60.0  # of a command of Slurm
IDLE_S = 60.0  # for both nodes to be free again
MEANWHILE_S = 120.0


class SlurmNodes:
    """n1 and n2 in an allocation of our own, one for each fault; n2 is the one that is broken."""

    command = ("engine=slurm", "nodes=n1+n2,n1")

    def __init__(self, folder, slurm):
        self._slurm, self._mark = Path(slurm), f"ringside-faults-{folder.name}"
        self._outside = {
            **os.environ,
            "SLURM_CONF": f"{slurm}/slurm.conf",
        }  # where daemons and questions belong
        self.around = self._outside | {"MARK": self._mark}
        self.faults = {
            "slurmd": lambda launcher: os.kill(self._slurmd(), signal.SIGKILL),
            "slurmd-stop": lambda launcher: os.kill(self._slurmd(), signal.SIGTERM),
            "step": lambda launcher: os.kill(self._agent().ppid(), signal.SIGKILL),
            "agent": lambda launcher: os.kill(self._agent().pid, signal.SIGKILL),
            "scancel": lambda launcher: self._said("scancel", self._job),
            "launcher": lambda launcher: os.kill(launcher.pid, signal.SIGKILL),
        }
        self._job = ""

    def begin(self):
        """Allocate both nodes."""
        said = self._said("salloc", "--nodes=2", "--exclusive", "--no-shell")
        if not (found := re.search(r"job allocation ([0-9]+)", said)):
            raise AssertionError(f"no allocation: {said}")
        self._job = found[1]
        self.around |= {
            "SLURM_JOB_ID": self._job, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": f"{os.cpu_count()}(x2)"
        }  # fmt: skip

    def meanwhile(self, fault, command):
        """What is seen before anything is mended: steps that Slurm still lists, and how a new sweep goes without the daemon."""
        seen = {"steps": self._steps()}
        if not fault.startswith("slurmd"):
            return seen
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=self.around, capture_output=True, text=True, timeout=MEANWHILE_S,
            check=False,
        )  # fmt: skip
        said = (done.stdout + done.stderr).strip().splitlines()
        return seen | {
            "new_sweep": [
                done.returncode,
                round(time.monotonic() - began, 1),
                said[-1] if said else "",
            ]
        }

    def mend(self):
        """Start the daemon of the node again where it is gone, and allocate again what was cancelled."""
        if not self._slurmd():
            self._said("slurmd", "-N", "n2")
        if (
            self._said("squeue", "--noheader", "--job", self._job, "--format=%T").strip()
            != "RUNNING"
        ):
            self.end()
            self.begin()

    def end(self):
        """Give the allocation back, and wait until both nodes are free."""
        self._said("scancel", self._job)
        until(
            lambda: (
                self._said("sinfo", "--noheader", "--states=idle", "--format=%D").strip() == "2"
            ),
            IDLE_S,
        )

    def left(self):
        """Processes with our mark."""
        return [" ".join(one.cmdline()) for one, _ in self._processes()]

    def _said(self, *words):
        done = subprocess.run(
            words, env=self._outside, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
        return done.stdout + done.stderr

    def _slurmd(self):
        """The daemon of n2; None if it is gone."""
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            pid = int((self._slurm / "n2" / "pid").read_text())
            return pid if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else None

    def _processes(self):
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                around = one.environ()
                if around.get("MARK") == self._mark:
                    yield one, around

    def _steps(self):
        listed = self._said("squeue", "--steps", "--noheader", "--format=%i").split()
        return [step for step in listed if not step.endswith(".extern")]

    def _agent(self):
        """The agent of n2: the process there whose parent is not there."""
        there = {
            one.pid: one
            for one, around in self._processes()
            if around.get("SLURMD_NODENAME") == "n2"
        }
        return next(one for one in there.values() if one.ppid() not in there)
