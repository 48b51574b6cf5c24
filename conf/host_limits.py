"""How many cores and how much memory this process may use: what the host has, or what its control groups leave of it."""

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from conf.process_env import SHARED_MEMORY_FOLDER

MEMORY = Path("/proc/meminfo")
GROUPS, MOUNTED = (
    Path("/proc/self/cgroup"),
    Path("/sys/fs/cgroup"),
)  # the control groups of this process
# Where a control group says how much memory its processes may have, and have; and the counts of what Linux takes back of it.
OF_MEMORY = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),  # of version 2, and 1
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def free_shared_memory() -> int:
    """Return how many bytes this process can still take in SHARED_MEMORY_FOLDER; 0 where there is none.

    What lies there is memory too: a folder may be larger than what is left of that.
    """
    try:
        free = shutil.disk_usage(SHARED_MEMORY_FOLDER).free
    except OSError:
        return 0
    memory = free_memory()
    return free if memory is None else min(free, memory)


def free_memory() -> int | None:
    """Return how many bytes of memory this process can still take, or fewer where a control group limits it; None: not known."""
    available = kernel_count(MEMORY, "MemAvailable:")
    return min([available << 10, *_left_in_groups()]) if available else None


def _left_in_groups() -> Iterator[int]:
    """Yield how many bytes are left in each control group around this process whose memory is limited."""
    for folder in _around("memory"):
        for limit, used, freed in OF_MEMORY:
            with contextlib.suppress(OSError, ValueError):
                most, now = (
                    int((folder / name).read_text(encoding="ascii")) for name in (limit, used)
                )
                yield max(
                    0,
                    most - now + sum(kernel_count(folder / "memory.stat", name) for name in freed),
                )


def usable_cores() -> int:
    """Return how many cores this process can keep busy: those that it may run on, or fewer where a group limits their time.

    Of a limit of 1.5 cores (docker --cpus=1.5) these are 2.
    """
    return min([len(os.sched_getaffinity(0)), *map(math.ceil, _limits_of_cores())])


def _limits_of_cores() -> Iterator[float]:
    """Yield the time of how many cores each control group around this process may use, where it is limited."""
    for folder in _around("cpu"):
        for names in (
            ["cpu.max"],
            ["cpu.cfs_quota_us", "cpu.cfs_period_us"],
        ):  # of version 2, and 1
            with contextlib.suppress(OSError, ValueError):
                quota, period = " ".join(
                    (folder / name).read_text(encoding="ascii") for name in names
                ).split()
                if quota not in ("max", "-1"):
                    yield max(1.0, int(quota) / int(period))


def _around(controller: str) -> Iterator[Path]:
    """Yield the folder of each control group around this process that may limit it, the innermost first."""
    for inner, top in control_groups(controller):
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top))


def kernel_count(file: Path, name: str) -> int:
    """Return the number behind a name in a file of the kernel; 0 where it is not there."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[0] == name:
                return int(words[1])
    return 0


def control_groups(controller: str) -> Iterator[tuple[Path, Path]]:
    """Yield (folder of the group, top of its hierarchy) of this process, where a controller such as `cpu` may limit it.

    Version 2 has one hierarchy for all controllers, version 1 one for each. Folders may not be there in a container.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in GROUPS.read_text(encoding="utf-8", errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                top = MOUNTED / controller if controllers else MOUNTED
                yield top / path.lstrip("/"), top
