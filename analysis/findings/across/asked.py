"""What was asked of a cell, in words that are the same for every version of Ringside, and names made of them.

A cell's key is a hash of everything that its version knows, so a new option changes every key. Here options that have their
default are left out, and so is the hash of code: that is what may differ between two studies.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from analysis.findings import labels
from analysis.findings.baselines import OF_SERVERS
from analysis.findings.model import Member
from analysis.findings.runs import request_of
from analysis.findings.strategy_options import chosen_options
from analysis.findings.study import OF_TRAINING
from conf.cell import Cell
from conf.options import canonical

AskedFor = frozenset[tuple[str, str]]  # (option, value)
CellId = tuple[tuple[Member, ...], AskedFor]  # the GPUs in rank order, and what was asked; no GPUs: of a curve
ALWAYS = ("model.name", "strategy.name", "benchmark.name")
_WITH_DEFAULTS = ("strategy", "benchmark")


def cell_id(cell: Cell, hosts: Mapping[str, str] = MappingProxyType({})) -> CellId:
    """Return what makes cells of several studies the same cell.

    `hosts` gives hosts other names: those of one study are compared with those of another by their places.
    """
    request = {name: value for name, value in request_of(cell).items() if not name.endswith(".sha256")}
    for group in _WITH_DEFAULTS:
        chosen = {f"{group}.{option}" for option, _ in chosen_options(cell, group)} | {f"{group}.name"}
        request = {name: value for name, value in request.items() if name in chosen or not name.startswith(f"{group}.")}
    request.pop("benchmark.format", None)  # how the output is printed
    if "server_hosts" in request:
        request["server_hosts"] = canonical([hosts.get(host, host) for host in cell.server_hosts])
    placed = dataclasses.replace(cell, hosts=tuple(hosts.get(host, host) for host in cell.hosts))
    return placed.members, frozenset(request.items())


def curve_id(cell: Cell) -> CellId:
    """Return what makes curves of several studies the same curve: what their cells ask besides the GPUs."""
    _, asked = cell_id(cell)
    follows = OF_SERVERS if cell.global_batch_size is None else (*OF_SERVERS, "batch_size")
    return (), frozenset(item for item in asked if item[0] not in follows)


def names(cells: Iterable[CellId]) -> dict[CellId, str]:
    """Return a name for each cell: its model and strategy or its benchmark, what else varies among the cells, its GPUs.

    An option varies where two cells of one benchmark differ in it.
    """
    asked = {one: dict(one[1]) for one in cells}
    together: dict[str, list[dict[str, str]]] = defaultdict(list)
    for told in asked.values():
        together[told["benchmark.name"]].append(told)
    varied = {benchmark: _varied(members) for benchmark, members in together.items()}
    return {one: _name(one[0], told, varied[told["benchmark.name"]]) for one, told in asked.items()}


def _varied(members: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the options in which some of several cells differ."""
    known = {name for told in members for name in told}
    return {name for name in known if len({told.get(name) for told in members}) > 1}


def _name(gpus: Sequence[Member], told: Mapping[str, str], varied: Collection[str]) -> str:
    trains = told["model.name"] != "none"
    first = [told["model.name"], told["strategy.name"]] if trains else []
    if told["benchmark.name"] != "throughput":
        first.insert(0, told["benchmark.name"])
    others = [
        labels.worded(name, told[name])
        for name in sorted({*varied} & {*told} - {*ALWAYS})
        if not (name.startswith("model.") and "model.name" in varied) and (trains or name not in OF_TRAINING)
    ]
    return labels.BETWEEN.join([*first, *others, *([labels.gpu_list(gpus)] if gpus else [])])
