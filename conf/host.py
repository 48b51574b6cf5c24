"""What the processes of a cell share with their host: names of variables and files, and how many
cores and how much memory they may use: what the host has, or what control groups leave of it."""

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# Every process of a cell carries the cell's token in this variable: so those that outlive it are
# found.
TOKEN = "RINGSIDE_TOKEN"
# Of an agent, which belongs to no cell; as long as a token, which takes its place.
NO_TOKEN = "0" * 32
# Id of the process that started this one: so a process notices that its parent ended before it
# could ask the kernel to be killed with it.
STARTER = "RINGSIDE_STARTER"
# Id of the launching process, where a profiler stands between it and the agent and may outlive it.
LAUNCHER = "RINGSIDE_LAUNCHER"
# Seconds by which the clock of a host may be off that of the launcher.
CLOCK_BOUND = "RINGSIDE_CLOCK_BOUND"
# Its umask in octal digits, which such a profiler does not hand on.
UMASK = "RINGSIDE_UMASK"
# GPUs that the ranks of a rehearsal share: each has that of its planned id modulo this number.
SHARED_GPUS = "RINGSIDE_SHARED_GPUS"
SHARED_MEMORY_FOLDER = Path("/dev/shm")
TOKEN_DIGITS = 16  # of the token in a file's name: 64 bits tell the cells of a machine apart
MEMORY = Path("/proc/meminfo")
GROUPS = Path("/proc/self/cgroup")  # the control groups of this process
MOUNTED = Path("/sys/fs/cgroup")
# Files of a control group of version 2, then of version 1: how much memory its processes may have,
# and have; and counts in memory.stat of what Linux takes back of it.
MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
CORE_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def shared_memory_prefix(token: str) -> str:
    """Return how the names of a cell's files in SHARED_MEMORY_FOLDER begin."""
    return f"ringside-{token[:TOKEN_DIGITS]}-"


def free_shared_memory() -> int:
    """Return how many bytes this process can still take in SHARED_MEMORY_FOLDER; 0 where there is
    none.

    What lies there is memory too: a folder may be larger than what is left of that.
    """
    try:
        free = shutil.disk_usage(SHARED_MEMORY_FOLDER).free
    except OSError:
        return 0
    memory = free_memory()
    return free if memory is None else min(free, memory)


def free_memory() -> int | None:
    """Return how many bytes of memory this process can still take, with the limits of its control
    groups; None: unknown."""
    free = kernel_count(MEMORY, "MemAvailable:") << 10
    if not free:
        return None
    for folder in _limiting_groups("memory"):
        for limit, usage, prefix in MEMORY_FILES:
            with contextlib.suppress(OSError, ValueError):
                left = int((folder / limit).read_text("ascii"))
                left -= int((folder / usage).read_text("ascii"))
                for name in ("inactive_file", "active_file"):
                    left += kernel_count(folder / "memory.stat", prefix + name)
                free = min(free, max(0, left))
    return free


def usable_cores() -> int:
    """Return how many cores this process can keep busy: those that it may run on, or fewer where a
    group limits their time.

    Of a limit of 1.5 cores (docker --cpus=1.5) these are 2.
    """
    cores = len(os.sched_getaffinity(0))
    for folder in _limiting_groups("cpu"):
        for names in CORE_FILES:
            with contextlib.suppress(OSError, ValueError):
                texts = [(folder / name).read_text("ascii") for name in names]
                quota, period = " ".join(texts).split()
                if quota not in ("max", "-1"):
                    cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _limiting_groups(controller: str) -> Iterator[Path]:
    """Yield the folder of each control group around this process that may limit it, the innermost
    first."""
    for group, top in control_groups(controller):
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield folder


def kernel_count(file: Path, name: str) -> int:
    """Return the number behind a name in a file of the kernel; 0 where it is not there."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[0] == name:
                return int(words[1])
    return 0


def control_groups(controller: str) -> Iterator[tuple[Path, Path]]:
    """Yield (folder of the group, top of its hierarchy) of this process, where a controller such as
    `cpu` may limit it.

    Version 2 has one hierarchy for all controllers, version 1 one for each. Folders may not be
    there in a container.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in GROUPS.read_text(encoding="utf-8", errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                top = MOUNTED / controller if controllers else MOUNTED
                yield top / path.lstrip("/"), top
