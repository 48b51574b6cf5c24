"""What the machine lacked when a cell failed: a rank that finds no memory or disk often dies without a word about it."""

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import Failure
from conf.host_limits import control_groups, kernel_count
from conf.process_env import SHARED_MEMORY_FOLDER

FULL_BYTES = 64 << 10  # less is no room: a rank's line may be larger


@dataclass(frozen=True)
class Shortage:
    """Counts of the kernel when a cell was started; `explain` compares them with those of now."""

    oom_kills: int
    pids_refused: int

    @staticmethod
    def watched() -> "Shortage":
        """Return the counts of now."""
        return Shortage(kernel_count(Path("/proc/vmstat"), "oom_kill"), _pids_refused())

    def explain(self, failure: Failure, folder: Path) -> Failure:
        """Return the failure of a cell with what the machine lacks; one that SIGKILL and a want of memory ended is an `oom`."""
        now = Shortage.watched()
        lacked = [_of_disk(folder), "/dev/shm is full" if _full(SHARED_MEMORY_FOLDER) else ""]
        if now.pids_refused > self.pids_refused:
            lacked.append(
                "no further process or thread may be started here (pids.max of the control group)"
            )
        cause = failure.cause
        if now.oom_kills > self.oom_kills and cause in ("killed", "start"):
            cause = "oom"
            lacked.append("the kernel killed a process for want of memory meanwhile")
        return dataclasses.replace(
            failure, cause=cause, message="; ".join([failure.message, *filter(None, lacked)])
        )


def _of_disk(folder: Path) -> str:
    """Return what is wrong with the file system of a folder; empty if nothing is seen."""
    try:
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            return f"the file system of {folder} is read-only"
    except OSError:
        return f"{folder} is gone: removed, or no longer mounted"
    return f"there is no space left on the file system of {folder}" if _full(folder) else ""


def _full(folder: Path) -> bool:
    """Return whether there is no room left; False where it cannot be told."""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize < FULL_BYTES
    return False


def _pids_refused() -> int:
    """Return how often the control group of this process refused a new process or thread; 0 where there is none."""
    counts = (kernel_count(folder / "pids.events", "max") for folder, _ in control_groups("pids"))
    return next(filter(None, counts), 0)
