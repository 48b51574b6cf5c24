"""Break a sweep on two hosts in each of its phases, and write down what was seen: among the hosts of in_namespaces.sh, or on
the two nodes of the Slurm that .ci/slurm starts.

    PYTHONPATH=. tests/in_namespaces.sh 1gbit -- python tests/faults_hosts.py FOLDER [FAULT[:PHASE]…]
    PYTHONPATH=. RINGSIDE_TEST_SLURM=WHERE python tests/faults_hosts.py FOLDER [FAULT[:PHASE]…]

FOLDER/seen.json gets an entry for each fault in each phase: who was blamed and after how many seconds, what was left, whether a
line that was here is lost, how the other cell ended, and whether the same command then measured what was missing. A table of
it is printed at the end.
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
ANSWER_S = 60.0  # of a command of Slurm
IDLE_S = 60.0  # for both nodes of Slurm to be free again
ENDS_S = 120.0  # for a phase to be reached, and for a broken sweep to end


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
            "agent": lambda launcher: kill(self._agent()),
            "host": lambda launcher: kill(*self._pids()),
            "launcher": lambda launcher: kill(launcher.pid),
        }

    def begin(self):
        """Do nothing: they are there."""

    mend = end = begin

    def left(self):
        return left()

    def _pids(self):
        said = subprocess.run(
            ["ip", "netns", "pids", "b"], capture_output=True, text=True, check=True
        ).stdout
        return [int(word) for word in said.split()]

    def _agent(self):
        """The agent of the host: the process there whose parent is not there."""
        there = self._pids()
        return next(pid for pid in there if psutil.Process(pid).ppid() not in there)


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

    def _agent(self):
        """The agent of n2: the process there whose parent is not there."""
        there = {
            one.pid: one
            for one, around in self._processes()
            if around.get("SLURMD_NODENAME") == "n2"
        }
        return next(one for one in there.values() if one.ppid() not in there)


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
        f'"phase": "{phase}"'.encode() in text
        for path, text in lines(study, "*2x*").items()
        if path.stem == "1"
    )


def gone(hosts):
    """What is left of ours LEFT_S seconds later, and after how many seconds nothing was."""
    began = time.monotonic()
    while (found := hosts.left()) and time.monotonic() < began + LEFT_S:
        time.sleep(0.2)
    return {"left": found, "gone_s": None if found else round(time.monotonic() - began, 1)}


def broken(folder, fault, phase, hosts):
    """Run a sweep, break it, run it again; return what was seen."""
    study = folder / "default"
    out = (folder / "out").open("w")
    command = [sys.executable, "launch.py", "-m", *hosts.command, *SHORT, f"output_dir={folder}"]
    launcher = subprocess.Popen(
        command, cwd=ROOT, env=hosts.around, stdout=out, stderr=subprocess.STDOUT
    )
    try:
        until(lambda: reached(study, phase), ENDS_S, launcher)
        before = lines(study)
        struck = time.time()
        hosts.faults[fault](launcher)
        status = launcher.wait(ENDS_S)
    finally:
        launcher.kill()
    after = gone(hosts)
    records = [json.loads(path.read_text()) for path in study.glob("*/record.json")]
    first = next((one for one in records if len(one["cell"]["hosts"]) == 2), None)
    failure = (first and first["failure"]) or {}
    now = lines(study)
    seen = {
        "status": status,
        "state": first and first["state"],
        "cause": failure.get("cause"),
        "said": failure.get("message"),
        "noticed_s": round(first["ended_at"] - struck, 1) if failure else None,
        "other_cell": [one["state"] for one in records if len(one["cell"]["hosts"]) == 1],
        "lost_lines": sum(
            len(text) for path, text in before.items() if not now.get(path, b"").startswith(text)
        ),
        **after,
        "scratch": [path.name for path in Path(os.environ["TMPDIR"]).glob(SCRATCH)],
    }
    hosts.mend()
    again = subprocess.run(
        command,
        cwd=ROOT,
        env=hosts.around,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * ENDS_S,
    )
    ended = [json.loads(path.read_text()) for path in study.glob("*/record.json")]
    kept = {one["record_id"] for one in records if one["state"] == "finished"} <= {
        one["record_id"] for one in ended
    }
    return seen | {
        "again": again.returncode,
        "finished": sorted(one["state"] for one in ended),
        "kept": kept,
    }


HEAD = ("fault", "phase", "state", "cause", "host", "noticed after s", "left running", "gone after s", "files left",
        "lost lines", "the other cell", "the same command again")  # fmt: skip


def table(seen):
    """A line for each fault in each phase, as Markdown."""
    rows = [HEAD, ["---"] * len(HEAD)]
    for one in seen:
        found = [one["fault"], one["phase"]]
        if "error" in one:
            rows.append([*found, one["error"]])
            continue
        host = re.search(r"host (\w+) is lost", one["said"] or "")
        again = f"{one['again']}, {'+'.join(one['finished'])}" + (
            "" if one["kept"] else ", measured twice"
        )
        rows.append([
            *found, one["state"] or "no record", one["cause"] or "–", host[1] if host else "–", one["noticed_s"] or "–",
            len(one["left"]), one["gone_s"], len(one["scratch"]), one["lost_lines"], *one["other_cell"], again,
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def main(folder, *words):
    folder = Path(folder)
    os.environ["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    slurm = os.environ.get("RINGSIDE_TEST_SLURM")
    hosts = SlurmNodes(folder, slurm) if slurm else Namespaces()
    seen = []
    for fault, _, one in (word.partition(":") for word in words or hosts.faults):
        for phase in [one] if one else PHASES:
            inside = folder / f"{fault}-{phase}"
            inside.mkdir()
            seen.append({"fault": fault, "phase": phase})
            try:
                hosts.begin()
                seen[-1] |= broken(inside, fault, phase, hosts)
                hosts.end()
            except (AssertionError, subprocess.TimeoutExpired) as error:
                seen[-1]["error"] = str(error)
                hosts.end()
            print(json.dumps(seen[-1]), flush=True)
            (folder / "seen.json").write_text(json.dumps(seen))
    print(table(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
