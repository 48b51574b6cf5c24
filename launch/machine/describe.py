"""Describe the host that this runs on, as one JSON object that the launcher of a sweep reads (launch.machine.fleet).

    python -m launch.machine.describe auto|cpu|cuda

The argument is `device=` of the sweep. Without torch, and without the values of variables that look like secrets.
"""

import dataclasses
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.host.interfaces import interfaces
from benchmarks.record.encoding import encoded
from benchmarks.record.visible import one_line
from conf import nccl
from conf.options import Refused
from conf.variables import free_memory, free_shared_memory
from launch.machine.devices import look, torch_version
from launch.machine.facts import boot_id, facts, left_out, nccl_configuration, variables
from launch.machine.limits import too_small
from launch.machine.versions import nccl_version

FORM = 1  # of the description: an agent of another Ringside is told by it
INFINIBAND = Path("/sys/class/infiniband")


def description(device: str, surrounding: Mapping[str, str]) -> dict[str, Any]:
    """Return what a launcher must know of this host, as plain JSON types; {"refused": …} where `device=` cannot be had here."""
    surrounding = nccl.with_configuration_files(surrounding, nccl_configuration(surrounding))
    try:
        machine = look(device, surrounding)
    except Refused as error:
        return {"form": FORM, "refused": str(error)}
    versions = {"python": platform.python_version(), "torch": torch_version(), "nccl": nccl_version() or ""}
    return {
        "form": FORM,
        "machine": dataclasses.asdict(machine),
        "facts": facts(),
        "variables": variables(surrounding),
        "left_out": left_out(surrounding),
        "versions": {name: value for name, value in versions.items() if value},
        "kernel": platform.release(),
        "boot_id": boot_id(),
        "interfaces": [one.to_dict() for one in interfaces()],
        "infiniband": infiniband(),
        "free_memory_bytes": free_memory(),
        "shared_memory_bytes": free_shared_memory(),
        "too_small": too_small(),
    }


def infiniband(folder: Path = INFINIBAND) -> list[dict[str, str]]:
    """Return {"device", "port", "rate", "state"} of every InfiniBand port of this host, as the kernel has it."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        texts = {name: _text(port / name) for name in ("rate", "state")}
        found.append({"device": port.parent.parent.name, "port": port.name, **texts})
    return found


def _text(path: Path) -> str:
    try:
        return one_line(path.read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return ""


def main(arguments: list[str]) -> int:
    """Print the description. Returns the exit status."""
    if len(arguments) != 1 or arguments[0] not in ("auto", "cpu", "cuda"):
        print("usage: python -m launch.machine.describe auto|cpu|cuda", file=sys.stderr)
        return 2
    sys.stdout.buffer.write(encoded(description(arguments[0], os.environ)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
