"""What was asked of a cell, in words that are the same for every version of Ringside, and names made of them.

A cell's key is a hash of everything that its version knows, so a new option changes every key. Here options that have their
default are left out, and so is the hash of code: that is what may differ between two studies.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from analysis.findings import labels
from analysis.findings.runs import request_of
from analysis.findings.strategy_options import chosen_options
from analysis.findings.study import OF_TRAINING
from conf.cell import Cell

CellId = tuple[tuple[int, ...], frozenset[tuple[str, str]]]  # the GPUs in rank order, and what was asked
ALWAYS = ("model.name", "strategy.name", "benchmark.name")
_WITH_DEFAULTS = ("strategy", "benchmark")


def cell_id(cell: Cell) -> CellId:
    """Return what makes cells of several studies the same cell."""
    request = {name: value for name, value in request_of(cell).items() if not name.endswith(".sha256")}
    for group in _WITH_DEFAULTS:
        chosen = {f"{group}.{option}" for option, _ in chosen_options(cell, group)} | {f"{group}.name"}
        request = {name: value for name, value in request.items() if name in chosen or not name.startswith(f"{group}.")}
    request.pop("benchmark.format", None)  # how the output is printed
    return cell.gpus, frozenset(request.items())


def names(cells: Iterable[CellId]) -> dict[CellId, str]:
    """Return a name for each cell: its model and strategy or its benchmark, what else varies among the cells, its GPUs."""
    listed = [*cells]
    values = defaultdict[str, set[str | None]](set)
    for _, asked in listed:
        told = dict(asked)
        for name in {one for _, each in listed for one, _ in each}:
            values[name].add(told.get(name))
    varied = [name for name in values if len(values[name]) > 1]
    return {one: _name(one[0], dict(one[1]), varied) for one in listed}


def _name(gpus: Sequence[int], told: Mapping[str, str], varied: Sequence[str]) -> str:
    trains = told["model.name"] != "none"
    first = [told["model.name"], told["strategy.name"]] if trains else []
    if told["benchmark.name"] != "throughput":
        first.insert(0, told["benchmark.name"])
    follows = [group for group in ("model.", "benchmark.") if f"{group}name" in varied]
    others = [
        labels.worded(name, told[name])
        for name in sorted(varied)
        if name in told
        and name not in ALWAYS
        and not (name.startswith("model.") and follows)
        and (trains or name not in OF_TRAINING)
    ]
    return labels.BETWEEN.join([*first, *others, labels.gpu_list(gpus)])
