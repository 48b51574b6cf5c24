"""Find and end the processes of a cell, by the token in their environment, and set that up."""

import ctypes
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from conf.host import LAUNCHER, SHARED_MEMORY_FOLDER, STARTER, TOKEN, UMASK, shared_memory_prefix

ENDED = ("gone", psutil.STATUS_ZOMBIE)  # of the states: what does so runs no more
KILL_SECONDS = 10.0  # for killed processes to be gone
POLL_SECONDS = 0.05
# At the beginning of a value: the folder of the cell on the host, which only the host knows.
CELL_FOLDER = "{cell}"


def started_by_me(environment: Mapping[str, str], through_profiler: bool = False) -> dict[str, str]:
    """Return the environment of an agent that this process starts, itself or by a profiler."""
    if not through_profiler:
        return {**environment, STARTER: str(os.getpid())}
    # os.umask would have to change it, for every thread.
    status = Path("/proc/self/status").read_bytes()
    match = re.search(rb"^Umask:\s*([0-7]+)$", status, re.MULTILINE)
    umask = match[1].decode() if match else "022"
    return {**environment, LAUNCHER: str(os.getpid()), UMASK: umask}


def of(token: str) -> list[psutil.Process]:
    """Return every living process of this user that has the token, without the calling one."""
    carriers = []
    variable = f"{TOKEN}={token}".encode()
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            # Not through psutil's dict: a token must match even where other variables are
            # malformed.
            with open(f"/proc/{process.pid}/environ", "rb") as file:  # noqa: PTH123
                if variable in file.read().split(b"\0"):
                    carriers.append(process)
        except (psutil.Error, OSError):
            continue  # it ended, or belongs to somebody else
    return carriers


def end(token: str, grace_s: float) -> list[int]:
    """Ask every process of a token to stop and kill the rest after `grace_s` seconds.

    Returns the ids that survive.
    """
    deadline = time.monotonic() + grace_s
    remaining = of(token)
    for process in remaining:
        _send_signal(process, signal.SIGTERM)
    remaining = of(token)
    while remaining and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        remaining = of(token)
    deadline = time.monotonic() + KILL_SECONDS
    while remaining and time.monotonic() < deadline:
        for process in remaining:
            _send_signal(process, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
        remaining = of(token)
    return [process.pid for process in remaining]


def ask_for_stacks(token: str, pids: Sequence[int]) -> None:
    """Have ranks of a cell write the stacks of their threads to their logs (rank/stacks.py)."""
    for process in of(token):
        if process.pid in pids:
            _send_signal(process, signal.SIGUSR1)


def state(pid: int) -> str:
    """Return psutil's word for what a process does: 'stopped', 'running', …; or 'gone'."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def _send_signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)  # psutil refuses if the id now belongs to another process
    except psutil.Error:
        return


def signal_name(status: int) -> str:
    """Return the name of the signal that ended a process, from its exit status below 0."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def remove_shared_memory(token: str) -> None:
    """Remove the shared memory of a cell that ended before it had mapped it (trainers.memory)."""
    for path in SHARED_MEMORY_FOLDER.glob(f"{shared_memory_prefix(token)}*"):
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Variables:
    """What a cell needs in the environment of its processes on one host."""

    set: Mapping[str, str]  # whatever the host says
    defaults: Mapping[str, str]  # where the host says nothing, or sets it to nothing
    remove: Sequence[str]  # names; one that ends in * stands for all that begin so

    def to_dict(self) -> dict[str, Any]:
        """Return them as plain JSON types."""
        return {"set": dict(self.set), "defaults": dict(self.defaults), "remove": list(self.remove)}

    def with_set(self, added: Mapping[str, str]) -> "Variables":
        """Return them with further ones that are set."""
        return replace(self, set={**self.set, **added})

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Variables":
        """Return what `to_dict` made. Raises KeyError."""
        return Variables(plain["set"], plain["defaults"], plain["remove"])


def merged(
    asked: Variables, surrounding: Mapping[str, str], folder: str = CELL_FOLDER
) -> dict[str, str]:
    """Return the environment of a cell's processes: `surrounding`, changed as the cell asks.

    `folder` is that of the cell on the host.
    """
    prefixes = tuple(name[:-1] for name in asked.remove if name.endswith("*"))
    inherited = {}
    for name, value in surrounding.items():
        is_removed = name in asked.remove or name.startswith(prefixes)
        if not is_removed and (value or name not in asked.defaults):
            inherited[name] = value
    own = {}
    for name, value in asked.set.items():
        if value.startswith(CELL_FOLDER):
            value = folder + value.removeprefix(CELL_FOLDER)
        own[name] = value
    return {**asked.defaults, **with_absolute_path(inherited), **own}


def with_absolute_path(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose PYTHONPATH is absolute: our processes run in another folder."""
    if "PYTHONPATH" not in variables:
        return {**variables}
    folders = [str(Path(part).absolute()) for part in variables["PYTHONPATH"].split(os.pathsep)]
    return {**variables, "PYTHONPATH": os.pathsep.join(folders)}


def write_proc_environ(name: str, value: str) -> None:
    """Replace a variable's value in /proc/self/environ by one of the same length.

    The kernel shows there what the program began with. os.environ is not touched.

    Raises ValueError: this process did not begin with such a variable, or its value had another
    length.
    """
    data = value.encode()
    environ = Path("/proc/self/environ").read_bytes()
    match = re.search(rb"(?:^|\0)" + re.escape(name.encode()) + rb"=([^\0]*)", environ)
    if not match or len(match[1]) != len(data):
        raise ValueError(f"{name}: this process did not begin with {len(data)} characters in it")
    # env_start, the 50th field of proc(5)'s stat; the program's name, the 2nd, may hold spaces.
    text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    env_start = int(text.rpartition(")")[2].split()[47])
    ctypes.memmove(env_start + match.start(1), data, len(data))
