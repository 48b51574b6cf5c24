"""How many cores this process can keep busy: those that it may run on, or fewer where a control group limits their time."""

import contextlib
import math
import os
from collections.abc import Iterator

from launch.machine.control_groups import control_groups


def usable_cores() -> int:
    """Return the number of cores. Of a limit of 1.5 cores (docker --cpus=1.5) these are 2."""
    return min([len(os.sched_getaffinity(0)), *map(math.ceil, _limits())])


def _limits() -> Iterator[float]:
    """Yield the time of how many cores each control group around this process may use, where it is limited."""
    groups = ((folder, top) for inner, top in control_groups("cpu") for folder in (inner, *inner.parents))
    for folder in (folder for folder, top in groups if folder.is_relative_to(top)):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):  # of version 2, and 1
            with contextlib.suppress(OSError, ValueError):
                quota, period = " ".join((folder / name).read_text(encoding="ascii") for name in names).split()
                if quota not in ("max", "-1"):
                    yield max(1.0, int(quota) / int(period))
