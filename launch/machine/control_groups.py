"""The control groups that this process is in: what a container or a job may limit."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

GROUPS, MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


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
