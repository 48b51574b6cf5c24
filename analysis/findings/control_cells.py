"""The control cells that explain another cell (analysis.findings.waterfall): what a planner adds, how their runs are found."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from analysis.findings.baselines import OF_SERVERS
from analysis.study.estimates import Member
from analysis.study.provenance import CONNECTIONS
from analysis.study.study import Runs, Study, merged
from conf import groups
from conf.cell import Cell

WITHOUT = "none"  # the strategy without exchange


def control_cells(cell: Cell) -> list[Cell]:
    """Return the control cells that explain one cell; none for one GPU, for strategy=none or without a training step.

    Each member alone, each of several hosts alone with its whole subset, and all without exchange. All keep model, batch size
    per rank, seed and repeat. `strategy=none` and one GPU use neither NCCL's settings nor, the first, servers. A profiler is left
    out: a trace explains the cell itself. They have no labels yet (conf.resolve.labelled).
    """
    if (
        cell.world_size == 1
        or cell.strategy["name"] == WITHOUT
        or cell.benchmark["name"] != "throughput"
    ):
        return []
    # Alone, a GPU gets as many images as in the subset.
    untraced = dataclasses.replace(
        cell, global_batch_size=None, labels=(), profiler="none", profiler_options={}
    )
    alike = dataclasses.replace(untraced, nccl={})
    declared = cell.declared and {
        **cell.declared,
        "strategy": groups.choice("strategy", WITHOUT).declared(),
    }
    no_servers: dict[str, Any] = {"server_gpus": (), "server_hosts": ()}
    without = dataclasses.replace(
        alike, strategy={"name": WITHOUT}, declared=declared, **no_servers
    )
    alone = [
        dataclasses.replace(on_host, gpus=(gpu,))
        for one in (without, alike)
        for on_host in _each_host(one)
        for gpu in cell.gpus
    ]
    hosts = list(_each_host(untraced)) if len(cell.hosts) > 1 and len(cell.gpus) > 1 else []
    return [*alone, *hosts, without]


def _each_host(cell: Cell) -> Iterator[Cell]:
    """Yield a cell on each of its hosts alone; servers on hosts of other ranks move there. On this machine it is the cell."""
    for host in cell.hosts:
        servers = tuple(host if one in cell.hosts else one for one in cell.server_hosts)
        yield dataclasses.replace(cell, hosts=(host,), server_hosts=servers)
    if not cell.hosts:
        yield cell


class ControlRuns:
    """The runs of a study's control cells, found by what they share with the cell that they explain."""

    def __init__(self, study: Study) -> None:
        """Sort strategy=none, the one-GPU cells and those of one host by their condition."""
        self._study = study
        self._free = [name for name in study.varied if name.startswith("nccl.")] + [
            "global_batch_size",
            *OF_SERVERS,
        ]
        self._strategy = [name for name in study.varied if name.startswith("strategy.")]
        without: dict[tuple[Any, ...], dict[tuple[Member, ...], list[Runs]]] = defaultdict(
            lambda: defaultdict(list)
        )
        alone: dict[tuple[Any, ...], dict[Member, list[Runs]]] = defaultdict(
            lambda: defaultdict(list)
        )
        hosts: dict[tuple[Any, ...], dict[Member, list[Runs]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for runs in study.timed:
            if runs.strategy == WITHOUT:
                without[self._key(runs, self._strategy)][runs.gpus].append(runs)
            elif runs.world_size == 1:
                alone[self._key(runs)][runs.gpus[0]].append(runs)
            elif len(runs.cell.hosts) == 1:
                hosts[self._key_of_host(runs)][runs.cell.hosts[0]].append(runs)
        self._without = {
            key: {gpus: merged(one) for gpus, one in found.items()}
            for key, found in without.items()
        }
        self._alone = {
            key: {gpu: merged(one) for gpu, one in found.items()} for key, found in alone.items()
        }
        self._hosts = {
            key: {host: merged(one) for host, one in found.items()} for key, found in hosts.items()
        }

    def _key(self, runs: Runs, left_out: Iterable[str] = ()) -> tuple[Any, ...]:
        # A control cell has the same images per rank, whether these were asked for or follow from the images per step.
        return runs.batch_size, *self._study.condition(runs, (*self._free, *left_out))

    def _key_of_host(self, runs: Runs) -> tuple[Any, ...]:
        # The GPUs of a host use links, and so NCCL's settings.
        free = ("global_batch_size", *OF_SERVERS, CONNECTIONS)
        return runs.cell.gpus, runs.batch_size, *self._study.condition(runs, free)

    def without(self, runs: Runs) -> Mapping[tuple[Member, ...], Runs]:
        """Return the runs with strategy=none, by subset."""
        return self._without.get(self._key(runs, self._strategy), {})

    def hosts(self, runs: Runs) -> Mapping[Member, Runs]:
        """Return the runs of the same strategy on each host alone with the same GPUs; empty unless every host has some."""
        known = self._hosts.get(self._key_of_host(runs), {})
        return (
            {host: known[host] for host in runs.cell.hosts}
            if known.keys() >= {*runs.cell.hosts}
            else {}
        )

    def alone(self, runs: Runs) -> Mapping[Member, Runs]:
        """Return the runs of the same strategy on one GPU, by GPU."""
        return self._alone.get(self._key(runs), {})
