"""The control cells that explain another cell (analysis.findings.waterfall): what a planner adds,
how their runs are found.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from analysis.study.conditions import OF_SERVERS, Condition
from analysis.study.estimates import Member
from analysis.study.provenance import CONNECTIONS
from analysis.study.runs import Runs, merged_by
from analysis.study.study import Study
from conf import groups
from conf.cell import Cell

WITHOUT = "none"  # the strategy without exchange
# A control cell has the same images per rank, whether these were asked for or follow from the
# images per step.
FREE = ("global_batch_size", *OF_SERVERS)


def control_cells(cell: Cell) -> list[Cell]:
    """Return the control cells that explain one cell; none for one GPU, for strategy=none or
    without a training step.

    Each member alone, each of several hosts alone with its whole subset, and all without exchange.
    All keep model, batch size per rank, seed and repeat. `strategy=none` and one GPU use neither
    NCCL's settings nor, the first, servers. A profiler is left out: a trace explains the cell
    itself. They have no labels yet (conf.resolve.labelled).
    """
    trains = cell.benchmark["name"] == "throughput" and cell.strategy["name"] != WITHOUT
    if cell.world_size == 1 or not trains:
        return []
    # Alone, a GPU gets as many images as in the subset.
    untraced = dataclasses.replace(
        cell, global_batch_size=None, labels=(), profiler="none", profiler_options={}
    )
    plain = dataclasses.replace(untraced, nccl={})
    declared = cell.declared
    if declared:
        declared = {**declared, "strategy": groups.choice("strategy", WITHOUT).declared()}
    no_servers: dict[str, Any] = {"server_gpus": (), "server_hosts": ()}
    without = dataclasses.replace(
        plain, strategy={"name": WITHOUT}, declared=declared, **no_servers
    )
    controls = []
    for each in (without, plain):
        for on_host in _each_host(each):
            controls += [dataclasses.replace(on_host, gpus=(gpu,)) for gpu in cell.gpus]
    if len(cell.hosts) > 1 and len(cell.gpus) > 1:
        controls += _each_host(untraced)
    return [*controls, without]


def _each_host(cell: Cell) -> Iterator[Cell]:
    """Yield a cell on each of its hosts alone; servers on hosts of other ranks move there. On this
    machine it is the cell.
    """
    for host in cell.hosts:
        servers = tuple(host if server in cell.hosts else server for server in cell.server_hosts)
        yield dataclasses.replace(cell, hosts=(host,), server_hosts=servers)
    if not cell.hosts:
        yield cell


class ControlRuns:
    """The runs of a study's control cells, found by the condition that they share with the cell
    that they explain.
    """

    def __init__(self, study: Study) -> None:
        """Group strategy=none, the one-GPU cells and those of one host by their condition."""
        self._study = study
        without, alone, hosts = [], [], []
        for runs in study.timed:
            if runs.strategy == WITHOUT:
                without.append(runs)
            elif runs.world_size == 1:
                alone.append(runs)
            elif len(runs.cell.hosts) == 1:
                hosts.append(runs)
        self._without = merged_by(without, self._without_strategy, lambda runs: runs.gpus)
        self._alone = merged_by(alone, self._condition, lambda runs: runs.gpus[0])
        self._hosts = merged_by(hosts, self._on_host, lambda runs: runs.cell.hosts[0])

    def _condition(self, runs: Runs) -> Condition:
        return self._study.condition(runs, (*FREE, "nccl."), runs.batch_size)

    def _without_strategy(self, runs: Runs) -> Condition:
        return self._study.condition(runs, (*FREE, "nccl.", "strategy."), runs.batch_size)

    def _on_host(self, runs: Runs) -> Condition:
        # The GPUs of a host use links, and so NCCL's settings.
        return self._study.condition(runs, (*FREE, CONNECTIONS), runs.cell.gpus, runs.batch_size)

    def without(self, runs: Runs) -> Mapping[tuple[Member, ...], Runs]:
        """Return the runs with strategy=none, by subset."""
        return self._without.get(self._without_strategy(runs), {})

    def alone(self, runs: Runs) -> Mapping[Member, Runs]:
        """Return the runs of the same strategy on one GPU, by GPU."""
        return self._alone.get(self._condition(runs), {})

    def hosts(self, runs: Runs) -> Mapping[Member, Runs]:
        """Return the runs of the same strategy on each host alone with the same GPUs, if every host
        has some.
        """
        alone = self._hosts.get(self._on_host(runs), {})
        if not alone.keys() >= {*runs.cell.hosts}:
            return {}
        return {host: alone[host] for host in runs.cell.hosts}
