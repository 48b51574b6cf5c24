"""What the machine lacked when a cell failed, as a rank without memory often dies silently."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import Failure
from conf.host_limits import control_groups, kernel_count
from conf.process_env import SHARED_MEMORY_FOLDER

FULL_BYTES = 64 << 10  # less is no room: a rank's line may be larger


@dataclass(frozen=True)
class ResourceSnapshot:
    """Counts of the kernel when a cell was started; `explain` compares them with those of now."""

    oom_kills: int
    pids_refused: int

    @staticmethod
    def take() -> "ResourceSnapshot":
        """Return the counts of now."""
        refused = 0
        for folder, _ in control_groups("pids"):
            refused = refused or kernel_count(folder / "pids.events", "max")
        return ResourceSnapshot(kernel_count(Path("/proc/vmstat"), "oom_kill"), refused)

    def explain(self, failure: Failure, folder: Path) -> Failure:
        """Return the failure with what the machine lacks; SIGKILL for memory makes an `oom`."""
        now = ResourceSnapshot.take()
        cause = failure.cause
        sentences = [failure.message]
        disk = _disk_exhaustion(folder)
        if disk:
            sentences.append(disk)
        if _is_full(SHARED_MEMORY_FOLDER):
            sentences.append("/dev/shm is full")
        if now.pids_refused > self.pids_refused:
            sentences.append(
                "no further process or thread may be started here (pids.max of the control group)"
            )
        if now.oom_kills > self.oom_kills and cause in ("killed", "start"):
            cause = "oom"
            sentences.append("the kernel killed a process for want of memory meanwhile")
        return dataclasses.replace(failure, cause=cause, message="; ".join(sentences))


def _disk_exhaustion(folder: Path) -> str:
    """Return what is wrong with the file system of a folder; empty if nothing is seen."""
    try:
        flags = os.statvfs(folder).f_flag
    except OSError:
        return f"{folder} is gone: removed, or no longer mounted"
    if flags & os.ST_RDONLY:
        return f"the file system of {folder} is read-only"
    if _is_full(folder):
        return f"there is no space left on the file system of {folder}"
    return ""


def _is_full(folder: Path) -> bool:
    """Return whether there is no room left; False where it cannot be told."""
    try:
        system = os.statvfs(folder)
    except OSError:
        return False
    return system.f_bavail * system.f_frsize < FULL_BYTES
