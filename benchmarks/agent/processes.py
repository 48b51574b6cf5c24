"""Find and end the processes of a cell: those whose environment has its token, however they were started."""

import ctypes
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from conf.process_env import (
    LAUNCHER,
    SHARED_MEMORY_FOLDER,
    STARTER,
    TOKEN,
    UMASK,
    shared_memory_prefix,
)

# proc(5); the words are psutil's.
STATES = {
    "S": "sleeping",
    "D": "disk-sleep",
    "T": "stopped",
    "t": "tracing-stop",
    "Z": "zombie",
    "X": "gone",
}
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
        text = Path(f"/proc/{pid}/stat").read_text(
            encoding="utf-8", errors="replace"
        )  # psutil reads several files
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
    """Remove the shared memory of a cell that ended before it had mapped it (trainers.memory)."""
    for path in SHARED_MEMORY_FOLDER.glob(f"{shared_memory_prefix(token)}*"):
        path.unlink(missing_ok=True)


# The environment of a cell's processes: what a launcher asks for, merged on the host with what is set there.


# At the beginning of a value: the folder of the cell on the host, which only the host knows.
CELL_FOLDER = "{cell}"


@dataclass(frozen=True)
class Variables:
    """What a cell needs in the environment of its processes on one host."""

    set: Mapping[str, str]  # whatever the host says
    defaults: Mapping[str, str]  # where the host says nothing, or sets it to nothing
    remove: Sequence[str]  # names; one that ends in * stands for all that begin so

    def to_dict(self) -> dict[str, Any]:
        """Return them as plain JSON types."""
        return {"set": dict(self.set), "defaults": dict(self.defaults), "remove": list(self.remove)}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Variables":
        """Return what `to_dict` made. Raises KeyError."""
        return Variables(plain["set"], plain["defaults"], plain["remove"])


def merged(
    asked: Variables, surrounding: Mapping[str, str], folder: str = CELL_FOLDER
) -> dict[str, str]:
    """Return the environment of a cell's processes where the variables `surrounding` are set and the cell has this folder."""
    prefixes = tuple(name[:-1] for name in asked.remove if name.endswith("*"))
    names = set(asked.remove)
    kept = {
        name: value
        for name, value in surrounding.items()
        if name not in names
        and not name.startswith(prefixes)
        and (value or name not in asked.defaults)
    }
    own = {
        name: folder + value.removeprefix(CELL_FOLDER) if value.startswith(CELL_FOLDER) else value
        for name, value in asked.set.items()
    }
    return {**asked.defaults, **with_absolute_path(kept), **own}


def with_absolute_path(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose PYTHONPATH is absolute: our processes have another working folder than the user's."""
    if "PYTHONPATH" not in variables:
        return {**variables}
    folders = (str(Path(folder).absolute()) for folder in variables["PYTHONPATH"].split(os.pathsep))
    return {**variables, "PYTHONPATH": os.pathsep.join(folders)}


# Change what the kernel shows as the environment of this process: /proc/PID/environ has it as it was when the program began.


def show_in_environ(name: str, value: str) -> None:
    """Replace the value of a variable in /proc/self/environ by one of the same length. os.environ is not touched.

    Raises:
        ValueError: this process did not begin with such a variable, or its value had another length.
    """
    text = Path("/proc/self/environ").read_bytes()
    found = re.search(rb"(?:^|\0)" + re.escape(name.encode()) + rb"=([^\0]*)", text)
    if not found or len(found[1]) != len(value.encode()):
        raise ValueError(
            f"{name}: this process did not begin with {len(value.encode())} characters in it"
        )
    # env_start, the 50th field of proc(5)'s stat; the name of the program, the 2nd, may hold spaces.
    start = int(
        Path("/proc/self/stat")
        .read_text(encoding="utf-8", errors="replace")
        .rpartition(")")[2]
        .split()[47]
    )
    ctypes.memmove(start + found.start(1), value.encode(), len(value.encode()))
