"""Find and end the processes of a cell: those whose environment has its token, however they were started."""

import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from conf.variables import LAUNCHER, SHARED_MEMORY_FOLDER, STARTER, TOKEN, UMASK, shared_memory_prefix

# proc(5); the words are psutil's.
STATES = {"S": "sleeping", "D": "disk-sleep", "T": "stopped", "t": "tracing-stop", "Z": "zombie", "X": "gone"}
ENDED = ("gone", "zombie")  # of the states: what does so runs no more


def started_by_me(environment: Mapping[str, str], through_profiler: bool = False) -> dict[str, str]:
    """Return the environment of an agent that the calling process starts, itself or through a profiler."""
    if through_profiler:
        return {**environment, LAUNCHER: str(os.getpid()), UMASK: _umask()}
    return {**environment, STARTER: str(os.getpid())}


def _umask() -> str:
    """Return this process's umask in octal digits. os.umask would have to change it, for every thread."""
    said = re.search(rb"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_bytes(), re.MULTILINE)
    return said[1].decode() if said else "022"


def of(token: str) -> list[psutil.Process]:
    """Return every living process of this user whose environment has the token, without the calling one."""
    found = []
    wanted = f"{TOKEN}={token}".encode()
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            # Read whole, not through psutil's dict: a token must match even where other variables are malformed.
            with open(f"/proc/{process.pid}/environ", "rb") as file:  # noqa: PTH123
                if wanted in file.read().split(b"\0"):
                    found.append(process)
        except (psutil.Error, OSError):
            continue  # it ended, or belongs to somebody else
    return found


def end(token: str, grace_s: float) -> list[int]:
    """Ask every process of a token to stop, and kill those that remain after `grace_s` seconds. Return the ids that survive."""
    deadline = time.monotonic() + grace_s
    for process in of(token):
        _signal(process, signal.SIGTERM)
    while (left := of(token)) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        for process in left:
            _signal(process, signal.SIGKILL)
        time.sleep(0.05)
        left = of(token)
    return [process.pid for process in left]


def ask_for_stacks(token: str, pids: list[int]) -> None:
    """Have ranks of a cell write to their logs where each of their threads stands (benchmarks.rank.worker)."""
    for process in of(token):
        if process.pid in pids:
            _signal(process, signal.SIGUSR1)


def state(pid: int) -> str:
    """Return what the kernel says that a process does: 'stopped', 'disk-sleep', 'running', …; 'gone' if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")  # psutil reads several files
    except OSError:
        return "gone"
    return STATES.get(text.rpartition(")")[2][1:2], "running")


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)  # psutil refuses if the id now belongs to another process
    except psutil.Error:
        return


def signal_name(status: int) -> str:
    """Return the name of the signal that ended a process, from its exit status as subprocess has it, below 0."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def remove_shared_memory(token: str) -> None:
    """Remove the shared memory of a cell that ended before it had mapped it (trainers.shared_memory)."""
    for path in SHARED_MEMORY_FOLDER.glob(f"{shared_memory_prefix(token)}*"):
        path.unlink(missing_ok=True)
