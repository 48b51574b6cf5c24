"""The control cells that explain another one (analysis.findings.waterfall), for a planner to add."""

import dataclasses

from conf import groups
from conf.cell import Cell

WITHOUT = "none"  # the strategy without exchange


def controls(cell: Cell) -> list[Cell]:
    """The control cells that explain one cell, for a planner to add; none for one GPU, no strategy or no training step.

    All keep model, batch size per rank, seed and repeat. `strategy=none` uses neither NCCL's settings nor servers.
    """
    if cell.world_size == 1 or cell.strategy["name"] == WITHOUT or cell.benchmark["name"] != "throughput":
        return []
    labels = cell.labels
    if cell.global_batch_size is not None:  # alone, a GPU gets what it gets in the subset
        labels = tuple(one for one in labels if not one.startswith("global batch "))
        labels = (f"batch {cell.batch_size}", *labels)
    labels = tuple(one for one in labels if not one.startswith("profiler="))  # a trace explains the cell itself
    alike = dataclasses.replace(
        cell, nccl={}, global_batch_size=None, labels=labels, profiler="none", profiler_options={}
    )
    options = {f"{name}={value}" for name, value in cell.strategy.items()}
    declared = cell.declared and {**cell.declared, "strategy": groups.choice("strategy", WITHOUT).declared()}
    without = dataclasses.replace(
        alike,
        strategy={"name": WITHOUT},
        declared=declared,
        server_gpus=(),
        labels=tuple(one for one in labels if one not in options),
    )
    alone = [dataclasses.replace(one, gpus=(gpu,)) for one in (without, alike) for gpu in cell.gpus]
    return [*alone, without]
