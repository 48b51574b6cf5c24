"""Break a sweep on two hosts in each of its phases, and write down what was seen. Runs among the hosts of in_namespaces.sh.

    tests/in_namespaces.sh 1gbit -- python tests/faults_hosts.py FOLDER [FAULT…]

FOLDER/seen.json gets an entry for each fault in each phase: who was blamed and after how many seconds, what was left, whether a
line that was here is lost, how the other cell ended, and whether the same command then measured what was missing.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from faults_seen import until
from on_hosts import left

ROOT = Path(__file__).parent.parent
# The first cell has both hosts; the second only the one that stays.
COMMAND = [
    sys.executable, "launch.py", "-m", "engine=command", "engine.prefix=[ip,netns,exec,{host}]", "nodes=a+b,a", "gpus=0",
    "model=fmnist_cnn", "strategy=nccl_allreduce", "batch_size=16", "benchmark.max_seconds=1", "noise_pairs=0", "tracking=none",
    "report=false", "device=cpu",
]  # fmt: skip
PHASES = ("spawn", "build", "warm-up", "timed", "exposed")
SCRATCH = "ringside-*"


def pids(host):
    said = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True).stdout
    return [int(word) for word in said.split()]


def agent_of(host):
    """The agent of a host: the process there whose parent is not there."""
    there = pids(host)
    return next(pid for pid in there if psutil.Process(pid).ppid() not in there)


def set_wire(state):
    subprocess.run(["ip", "link", "set", "port-b", state], check=True)


def kill(*some):
    for pid in some:
        os.kill(pid, signal.SIGKILL)


FAULTS = {
    "link": lambda launcher: set_wire("down"),
    "agent": lambda launcher: kill(agent_of("b")),
    "host": lambda launcher: kill(*pids("b")),
    "launcher": lambda launcher: kill(launcher.pid),
}


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


def broken(folder, fault, phase):
    """Run a sweep, break it, run it again; return what was seen."""
    study = folder / "default"
    out = (folder / "out").open("w")
    command = [*COMMAND, f"output_dir={folder}"]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    until(lambda: reached(study, phase), 120, launcher)
    before = lines(study)
    struck = time.time()
    FAULTS[fault](launcher)
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
        "left": left(),
        "scratch": [path.name for path in Path(os.environ["TMPDIR"]).glob(SCRATCH)],
    }
    set_wire("up")
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    ended = [json.loads(path.read_text()) for path in study.glob("*/record.json")]
    kept = {one["record_id"] for one in records if one["state"] == "finished"} <= {one["record_id"] for one in ended}
    return seen | {"again": again.returncode, "finished": sorted(one["state"] for one in ended), "kept": kept}


def main(folder, *faults):
    folder = Path(folder)
    os.environ["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    seen = []
    for fault in faults or FAULTS:
        for phase in PHASES:
            inside = folder / f"{fault}-{phase}"
            inside.mkdir()
            seen.append(broken(inside, fault, phase))
            print(json.dumps(seen[-1]), flush=True)
            (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
