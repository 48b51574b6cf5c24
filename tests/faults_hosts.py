"""Break a sweep on two nodes in some of its phases, and write down what was seen, for test_hosts.

    RINGSIDE_TEST_SLURM=WHERE python tests/faults_hosts.py FOLDER FAULT PHASE…

Nodes are those of the Slurm that .ci/slurm starts. FOLDER/seen.json has an entry for each phase: who was blamed, what was left, whether a line is lost,
how the other cell ended, and whether the same command then measured what was missing.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from faults_seen import until
from on_hosts import LEFT_S

ROOT = Path(__file__).parent.parent
SHORT = [
    "gpus=0", "model=fmnist_cnn", "strategy=nccl_allreduce", "batch_size=16", "noise_pairs=0",
    "benchmark.max_seconds=1", "tracking=none", "report=false", "device=cpu",
]  # fmt: skip
ENDS_S = 120.0  # for a phase to be reached, and for a broken sweep to end


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


class SlurmNodes:
    """n1 and n2 in an allocation of our own, one for each phase; n2 is the one that is broken."""

    command = ("engine=slurm", "nodes=n1+n2,n1")

    def __init__(self, folder, slurm):
        self._slurm, self._mark, self._job = Path(slurm), f"ringside-faults-{folder.name}", ""
        # Where daemons and questions belong.
        self._outside = {**os.environ, "SLURM_CONF": f"{slurm}/slurm.conf"}
        self.around = self._outside | {"MARK": self._mark}
        self.faults = {
            "slurmd": lambda launcher: kill(self._slurmd()),
            "slurmd-stop": lambda launcher: os.kill(self._slurmd(), signal.SIGTERM),
            "step": lambda launcher: kill(self._agent().ppid()),
            "agent": lambda launcher: kill(self._agent().pid),
            "scancel": lambda launcher: self._answer("scancel", self._job),
            "launcher": lambda launcher: kill(launcher.pid),
        }

    def begin(self):
        """Allocate both nodes."""
        answer = self._answer("salloc", "--nodes=2", "--exclusive", "--no-shell")
        allocation = re.search(r"job allocation ([0-9]+)", answer)
        assert allocation, f"no allocation: {answer}"
        self._job = allocation[1]
        self.around |= {"SLURM_JOB_ID": self._job, "SLURM_JOB_NODELIST": "n[1-2]"}
        self.around |= {"SLURM_JOB_CPUS_PER_NODE": f"{os.cpu_count()}(x2)"}

    def mend(self):
        """Start the daemon of the node where it is gone; allocate again what was cancelled."""
        if not self._slurmd():
            self._answer("slurmd", "-N", "n2")
        state = self._answer("squeue", "--noheader", "--job", self._job, "--format=%T")
        if state.strip() != "RUNNING":
            self.end()
            self.begin()

    def end(self):
        """Give the allocation back, and wait until both nodes are free."""
        idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
        self._answer("scancel", self._job)
        until(lambda: self._answer(*idle).strip() == "2", 60)

    def left(self):
        """Processes with our mark."""
        return [" ".join(process.cmdline()) for process, _ in self._processes()]

    def _answer(self, *words):
        options = {"env": self._outside, "text": True, "timeout": 60}
        done = subprocess.run(words, capture_output=True, **options)
        return done.stdout + done.stderr

    def _slurmd(self):
        """The daemon of n2; None if it is gone."""
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            pid = int((self._slurm / "n2" / "pid").read_text())
            return pid if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else None

    def _processes(self):
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                around = process.environ()
                if around.get("MARK") == self._mark:
                    yield process, around

    def _agent(self):
        """The agent of n2: the process there whose parent is not there."""
        there = {}
        for process, around in self._processes():
            if around.get("SLURMD_NODENAME") == "n2":
                there[process.pid] = process
        return next(process for process in there.values() if process.ppid() not in there)


def lines(study, where="*"):
    """The whole lines that ranks have written, by file."""
    whole = {}
    for path in study.glob(f"{where}/**/ranks/*.jsonl"):
        text = path.read_bytes()
        whole[path.relative_to(study)] = text[: text.rfind(b"\n") + 1]
    return whole


def reached(study, phase):
    """Whether rank 1, on host b, is in a phase."""
    if phase == "spawn":
        return bool(list(study.glob("*2x*/attempt.json")))
    mark = f'"phase": "{phase}"'.encode()
    return any(mark in text for path, text in lines(study, "*2x*").items() if path.stem == "1")


def records(study):
    return [json.loads(path.read_text()) for path in study.glob("*/record.json")]


def broken(folder, fault, phase, hosts):
    """Run a sweep, break it, run it again; return what was seen."""
    study = folder / "default"
    command = [sys.executable, "launch.py", "-m", *hosts.command, *SHORT, f"output_dir={folder}"]
    options = {"cwd": ROOT, "env": hosts.around, "stderr": subprocess.STDOUT}
    launcher = subprocess.Popen(command, stdout=(folder / "out").open("w"), **options)
    try:
        until(lambda: reached(study, phase), ENDS_S, launcher)
        before = lines(study)
        hosts.faults[fault](launcher)
        launcher.wait(ENDS_S)
    finally:
        launcher.kill()
    deadline = time.monotonic() + LEFT_S
    while hosts.left() and time.monotonic() < deadline:
        time.sleep(0.2)
    first, now = records(study), lines(study)
    seen = {"left": hosts.left(), "other_cell": [], "failure": None, "lost_lines": 0}
    seen["scratch"] = [path.name for path in Path(os.environ["TMPDIR"]).glob("ringside-*")]
    for path, text in before.items():
        if not now.get(path, b"").startswith(text):
            seen["lost_lines"] += len(text)
    for record in first:
        if len(record["cell"]["hosts"]) == 2:
            seen["failure"] = record["failure"]
        else:
            seen["other_cell"].append(record["state"])
    hosts.mend()
    again = subprocess.run(command, stdout=subprocess.PIPE, timeout=2 * ENDS_S, **options)
    every = records(study)
    finished = {record["record_id"] for record in first if record["state"] == "finished"}
    seen |= {"again": again.returncode, "states": sorted(record["state"] for record in every)}
    return seen | {"kept": finished <= {record["record_id"] for record in every}}


def main(folder, fault, *phases):
    folder = Path(folder)
    os.environ["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    hosts = SlurmNodes(folder, os.environ["RINGSIDE_TEST_SLURM"])
    seen = {}
    for phase in phases:
        inside = folder / phase
        inside.mkdir()
        hosts.begin()
        try:
            seen[phase] = broken(inside, fault, phase, hosts)
        finally:
            hosts.end()
        (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
