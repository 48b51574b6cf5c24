"""The control cells that explain another cell (analysis.findings.waterfall), for a planner to add."""

import dataclasses

from conf import groups
from conf.cell import Cell

WITHOUT = "none"  # the strategy without exchange


def control_cells(cell: Cell) -> list[Cell]:
    """Return the control cells that explain one cell; none for one GPU, for strategy=none or without a training step.

    All keep model, batch size per rank, seed and repeat. `strategy=none` uses neither NCCL's settings nor servers. A
    profiler is left out: a trace explains the cell itself. They have no labels yet (conf.resolve.labelled).
    """
    if cell.world_size == 1 or cell.strategy["name"] == WITHOUT or cell.benchmark["name"] != "throughput":
        return []
    # Alone, a GPU gets as many images as in the subset.
    alike = dataclasses.replace(cell, nccl={}, global_batch_size=None, labels=(), profiler="none", profiler_options={})
    declared = cell.declared and {**cell.declared, "strategy": groups.choice("strategy", WITHOUT).declared()}
    without = dataclasses.replace(alike, strategy={"name": WITHOUT}, declared=declared, server_gpus=())
    alone = [dataclasses.replace(one, gpus=(gpu,)) for one in (without, alike) for gpu in cell.gpus]
    return [*alone, without]
