"""The control cells that explain another cell (analysis.findings.waterfall): what a planner adds, how their runs are found."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from analysis.findings.runs import Runs, merged
from analysis.findings.study import Study
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


class ControlRuns:
    """The runs of a study's control cells, found by what they share with the cell that they explain."""

    def __init__(self, study: Study) -> None:
        """Sort strategy=none and the one-GPU cells by their condition."""
        self._study = study
        self._free = [name for name in study.varied if name.startswith("nccl.")] + ["global_batch_size", "server_gpus"]
        self._strategy = [name for name in study.varied if name.startswith("strategy.")]
        without: dict[tuple[Any, ...], dict[tuple[int, ...], list[Runs]]] = defaultdict(lambda: defaultdict(list))
        alone: dict[tuple[Any, ...], dict[int, list[Runs]]] = defaultdict(lambda: defaultdict(list))
        for runs in study.timed:
            if runs.strategy == WITHOUT:
                without[self._key(runs, self._strategy)][runs.gpus].append(runs)
            elif runs.world_size == 1:
                alone[self._key(runs)][runs.gpus[0]].append(runs)
        self._without = {key: {gpus: merged(one) for gpus, one in found.items()} for key, found in without.items()}
        self._alone = {key: {gpu: merged(one) for gpu, one in found.items()} for key, found in alone.items()}

    def _key(self, runs: Runs, left_out: Iterable[str] = ()) -> tuple[Any, ...]:
        # A control cell has the same images per rank, whether these were asked for or follow from the images per step.
        return runs.batch_size, *self._study.condition(runs, (*self._free, *left_out))

    def without(self, runs: Runs) -> Mapping[tuple[int, ...], Runs]:
        """Return the runs with strategy=none, by subset."""
        return self._without.get(self._key(runs, self._strategy), {})

    def alone(self, runs: Runs) -> Mapping[int, Runs]:
        """Return the runs of the same strategy on one GPU, by GPU."""
        return self._alone.get(self._key(runs), {})
