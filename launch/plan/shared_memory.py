"""The shared memory of a cell's strategy: whether the machine has enough, before any process starts; that none is left."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence

from conf.cell import Cell
from conf.groups import choice
from conf.options import Refused
from conf.variables import SHARED_MEMORY_FOLDER as FOLDER
from conf.variables import shared_memory_prefix
from launch.engines.environment import ROOT

# Gradients of the largest torchvision model (vit_h_14, 632 million parameters), with room. Asking torch takes seconds;
# where this much is free for every rank, nobody needs to.
PLENTY_BYTES = 3_000_000_000


def remove(token: str) -> None:
    """Remove what a cell left, if it ended between making its shared memory and mapping it (trainers.shared_memory)."""
    for path in FOLDER.glob(f"{shared_memory_prefix(token)}*"):
        path.unlink(missing_ok=True)


def refuse_too_little(cells: Sequence[Cell], free_bytes: int | None = None) -> None:
    """Refuse cells that need more shared memory than is free now.

    Raises:
        Refused: says how much is needed and where.
    """
    free = shutil.disk_usage(FOLDER).free if free_bytes is None else free_bytes
    doubtful = [
        cell
        for cell in cells
        if choice("strategy", cell.strategy["name"]).rules.get("shared_memory")
        and free < PLENTY_BYTES * (2 * cell.world_size + 2)
    ]
    if not doubtful:
        return
    asked = json.dumps([cell.to_dict() for cell in doubtful])
    told = subprocess.run(
        [sys.executable, "-m", "trainers.needed_memory"],
        cwd=ROOT,
        input=asked,
        capture_output=True,
        text=True,
        check=False,
    )
    if told.returncode != 0:
        return  # a model that cannot be built says why when its cell runs
    for cell, needed in zip(doubtful, json.loads(told.stdout), strict=True):
        if needed > free:
            raise Refused(
                f"strategy={cell.strategy['name']}: {cell.name} needs {needed / 2**20:.0f} MiB of shared memory in {FOLDER}, "
                f"where {free / 2**20:.0f} MiB are free; accepted is a strategy with less, or a larger {FOLDER} "
                "(in a container: --shm-size)"
            )
