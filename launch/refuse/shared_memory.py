"""Shared memory of a cell's strategy: refuse a cell that needs more than is free."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.agent.processes import with_absolute_path
from benchmarks.request import refuse_too_little_shared
from conf.cell import Cell
from conf.groups import choice
from conf.host_limits import free_shared_memory
from launch.engines.environment import ROOT

# Gradients of the largest torchvision model (vit_h_14, 632 million parameters), rounded up. Where this is free for every
# rank, torch need not compute the exact size, which takes seconds.
PLENTY_BYTES = 3_000_000_000


def refuse_too_little(
    cells: Sequence[Cell], free_bytes: int | None = None, where: str = ""
) -> None:
    """Refuse cells that need more shared memory than is free now, here or on a host that `where` names.

    Raises:
        Refused: says how much is needed and where.
    """
    sharing = [
        cell
        for cell in cells
        if choice("strategy", cell.strategy["name"]).rules.get("shared_memory")
    ]
    if not sharing:
        return
    free = free_shared_memory() if free_bytes is None else free_bytes
    doubtful = [cell for cell in sharing if free < PLENTY_BYTES * (2 * len(cell.gpus) + 2)]
    if not doubtful:
        return
    answer = subprocess.run(
        [sys.executable, "-m", "trainers.needed_memory"],
        cwd=ROOT,
        env=with_absolute_path(os.environ),
        input=json.dumps([cell.to_dict() for cell in doubtful]),
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        return  # a model that cannot be built says why when its cell runs
    for cell, needed in zip(doubtful, json.loads(answer.stdout), strict=True):
        who = f"{where}strategy={cell.strategy['name']}: {cell.name}"
        refuse_too_little_shared(needed, free, who, "a strategy with less")
