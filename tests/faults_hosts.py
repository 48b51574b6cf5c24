"""Break a sweep on two hosts in each of its phases, and write down what was seen: among the hosts of in_namespaces.sh, or on
the two nodes of the Slurm that .ci/slurm starts.

    PYTHONPATH=. tests/in_namespaces.sh 1gbit -- python tests/faults_hosts.py FOLDER [FAULT…]
    PYTHONPATH=. RINGSIDE_TEST_SLURM=WHERE python tests/faults_hosts.py FOLDER [FAULT…]

FOLDER/seen.json gets an entry for each fault in each phase: who was blamed and after how many seconds, what was left, whether a
line that was here is lost, how the other cell ended, and whether the same command then measured what was missing.
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
from on_hosts import LEFT_S, left

ROOT = Path(__file__).parent.parent
SHORT = [
    "gpus=0", "model=fmnist_cnn", "strategy=nccl_allreduce", "batch_size=16", "benchmark.max_seconds=1", "noise_pairs=0",
    "tracking=none", "report=false", "device=cpu",
]  # fmt: skip
PHASES = ("spawn", "build", "warm-up", "timed", "exposed")
SCRATCH = "ringside-*"


def kill(*some):
    for pid in some:
        os.kill(pid, signal.SIGKILL)


class Namespaces:
    """Two hosts that are network namespaces, a and b; b is the one that is broken."""

    # The first cell has both hosts; the second only the one that stays.
    command = ("engine=command", "engine.prefix=[ip,netns,exec,{host}]", "nodes=a+b,a")
    around = os.environ

    def __init__(self):
        self.faults = {
            "link": lambda launcher: self._set_wire("down"),
            "agent": lambda launcher: kill(self._agent()),
            "host": lambda launcher: kill(*self._pids()),
            "launcher": lambda launcher: kill(launcher.pid),
        }

    def mend(self):
        self._set_wire("up")

    def left(self):
        return left()

    def _pids(self):
        said = subprocess.run(["ip", "netns", "pids", "b"], capture_output=True, text=True, check=True).stdout
        return [int(word) for word in said.split()]

    def _agent(self):
        """The agent of the host: the process there whose parent is not there."""
        there = self._pids()
        return next(pid for pid in there if psutil.Process(pid).ppid() not in there)

    def _set_wire(self, state):
        subprocess.run(["ip", "link", "set", "port-b", state], check=True)


class SlurmNodes:
    """Two nodes of a Slurm, n1 and n2, in an allocation of our own; n2 is the one that is broken."""

    command = ("engine=slurm", "nodes=n1+n2,n1")

    def __init__(self, folder, slurm):
        self._slurm, self._mark = Path(slurm), f"ringside-faults-{folder.name}"
        self.around = {**os.environ, "SLURM_CONF": f"{slurm}/slurm.conf", "MARK": self._mark}
        self.faults = {
            "slurmd": lambda launcher: kill(int((self._slurm / "n2" / "pid").read_text())),
            "step": lambda launcher: kill(self._step()),
            "agent": lambda launcher: kill(self._agent().pid),
            "scancel": lambda launcher: self._said("scancel", self._job),
            "launcher": lambda launcher: kill(launcher.pid),
        }
        self._job = ""
        self._allocate()

    def mend(self):
        """Start the daemon of the node again where it is gone, and allocate again what was cancelled."""
        if not psutil.pid_exists(int((self._slurm / "n2" / "pid").read_text())):
            self._said("slurmd", "-N", "n2")
        if not self._said("squeue", "--noheader", "--job", self._job, "--format=%i").strip():
            self._allocate()

    def left(self):
        """Processes with our mark, and steps, that are not gone some seconds later."""
        deadline = time.monotonic() + LEFT_S
        while (found := self._marked() + self._steps()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def end(self):
        self._said("scancel", self._job)

    def _said(self, *words):
        done = subprocess.run(words, env=self.around, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    def _allocate(self):
        said = self._said("salloc", "--nodes=2", "--exclusive", "--no-shell")
        self._job = re.search(r"job allocation ([0-9]+)", said)[1]
        self.around |= {
            "SLURM_JOB_ID": self._job, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": f"{os.cpu_count()}(x2)"
        }  # fmt: skip

    def _processes(self):
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                around = one.environ()
                if around.get("MARK") == self._mark:
                    yield one, around

    def _marked(self):
        return [" ".join(one.cmdline()) for one, _ in self._processes()]

    def _steps(self):
        listed = self._said("squeue", "--steps", "--noheader", "--format=%i").split()
        return [step for step in listed if not step.endswith(".extern")]

    def _agent(self):
        """The agent of n2: the process there whose parent is not there."""
        there = {one.pid: one for one, around in self._processes() if around.get("SLURMD_NODENAME") == "n2"}
        return next(one for one in there.values() if one.ppid() not in there)

    def _step(self):
        return self._agent().ppid()


def lines(study, where="*"):
    """The whole lines that ranks have written, by file."""
    found = {}
    for path in study.glob(f"{where}/**/ranks/*.jsonl"):
        text = path.read_bytes()
        found[path.relative_to(study)] = text[: text.rfind(b"\n") + 1]
    return found


def reached(study, phase):
    """Whether rank 1, on host b, is in a phase."""
    if phase == "spawn":
        return bool(list(study.glob("*2x*/attempt.json")))
    return any(
        f'"phase": "{phase}"'.encode() in text for path, text in lines(study, "*2x*").items() if path.stem == "1"
    )


def broken(folder, fault, phase, hosts):
    """Run a sweep, break it, run it again; return what was seen."""
    study = folder / "default"
    out = (folder / "out").open("w")
    command = [sys.executable, "launch.py", "-m", *hosts.command, *SHORT, f"output_dir={folder}"]
    launcher = subprocess.Popen(command, cwd=ROOT, env=hosts.around, stdout=out, stderr=subprocess.STDOUT)
    until(lambda: reached(study, phase), 120, launcher)
    before = lines(study)
    struck = time.time()
    hosts.faults[fault](launcher)
    status = launcher.wait(120)
    records = [json.loads(path.read_text()) for path in study.glob("*/record.json")]
    first = next((one for one in records if len(one["cell"]["hosts"]) == 2), None)
    now = lines(study)
    seen = {
        "fault": fault,
        "phase": phase,
        "status": status,
        "cause": first and (first["failure"] or {}).get("cause"),
        "said": first and (first["failure"] or {}).get("message"),
        "noticed_s": first and round(first["ended_at"] - struck, 1),
        "other_cell": [one["state"] for one in records if len(one["cell"]["hosts"]) == 1],
        "lost_lines": sum(len(text) for path, text in before.items() if not now.get(path, b"").startswith(text)),
        "left": hosts.left(),
        "scratch": [path.name for path in Path(os.environ["TMPDIR"]).glob(SCRATCH)],
    }
    hosts.mend()
    again = subprocess.run(command, cwd=ROOT, env=hosts.around, capture_output=True, text=True, check=False)
    ended = [json.loads(path.read_text()) for path in study.glob("*/record.json")]
    kept = {one["record_id"] for one in records if one["state"] == "finished"} <= {one["record_id"] for one in ended}
    return seen | {"again": again.returncode, "finished": sorted(one["state"] for one in ended), "kept": kept}


def main(folder, *faults):
    folder = Path(folder)
    os.environ["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    slurm = os.environ.get("RINGSIDE_TEST_SLURM")
    hosts = SlurmNodes(folder, slurm) if slurm else Namespaces()
    seen = []
    for fault in faults or hosts.faults:
        for phase in PHASES:
            inside = folder / f"{fault}-{phase}"
            inside.mkdir()
            seen.append(broken(inside, fault, phase, hosts))
            print(json.dumps(seen[-1]), flush=True)
            (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
