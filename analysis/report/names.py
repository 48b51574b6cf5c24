"""Names of cells for people: what tells cells apart, a run's name, and names without what all share."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from analysis.findings import labels
from analysis.findings.study import Study
from analysis.report.text import single_line
from benchmarks.record import Record
from conf.cell import Cell, counted, folded
from conf.options import canonical

BETWEEN, of_unit = labels.BETWEEN, labels.of_unit
KIND = ("model.name", "strategy.name", "benchmark.name", "hosts", "gpus")  # what a cell's name always tells
OPTIMIZER = "optimizer.name"  # its other settings follow from it
NCCL = "nccl."
UNTOUCHED = "default"  # what a cell has of a setting that it leaves alone and another one changes
NOT_ASKED = ("repeat", "labels", "declared", "places")


def unit_of(study: Study) -> str:
    """Return what is counted: GPUs, or the CPU workers of a study without GPUs."""
    return unit_of_cells(record.cell for record in study.records)


def unit_of_cells(cells: Iterable[Cell]) -> str:
    """Return what is counted in some cells: GPUs, or CPU workers where none has a GPU."""
    return "GPUs" if any(cell.device == "cuda" for cell in cells) else "CPU workers"


def ran_alone(study: Study) -> bool:
    """Tell whether every cell was asked for on one GPU: then nothing scales, and nothing goes over links."""
    return all(record.cell.world_size == 1 for record in (*study.records, *study.replaced))


def things_of(*studies: Study) -> str:
    """Return what the cells of studies count: images, or samples where a model trains on something else."""
    return counted(record.cell for study in studies for record in study.records)


def differing(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """Return for each cell what tells it from the others, {option: value}; repeats of a cell are not told apart.

    First what of KIND differs, then every other option in which cells with the same KIND differ. An option that follows from
    the model or the GPUs is left out.
    """
    asked = [_asked(cell) for cell in cells]
    alike: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for one in asked:
        alike[_kind(one)].append(one)
    told = {kind: _varied(members) for kind, members in alike.items()}
    common = [name for name in (*KIND, OPTIMIZER) if len({one[name] for one in asked}) > 1]
    return [{name: one.get(name, UNTOUCHED) for name in (*common, *told[_kind(one)])} for one in asked]


def _asked(cell: Cell) -> dict[str, str]:
    """Flatten what a cell asks for: {"strategy.comm_hook": "bf16", "gpus": "0,3"}."""
    flat: dict[str, str] = {"hosts": "", **({"data": "synthetic"} if cell.trains else {})}
    for name, value in cell.to_dict().items():
        if name == "gpus":
            flat[name] = labels.gpu_ids(value)
        elif name in ("hosts", "server_hosts"):
            flat[name] = folded(value)
        elif name == "data":
            flat |= {"data": value["name"]} | {
                f"data.{option}": canonical(one) for option, one in value["options"].items()
            }
        elif name not in NOT_ASKED:
            inside = (
                {f"{name}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {name: value}
            )
            flat |= {option: canonical(one) for option, one in inside.items()}
    return {OPTIMIZER: "sgd"} | flat


def _kind(asked: dict[str, str]) -> tuple[str, ...]:
    return tuple(asked[name] for name in (*KIND, OPTIMIZER))


def _varied(members: Sequence[dict[str, str]]) -> list[str]:
    """Return the options in which some of several cells differ."""
    names = dict.fromkeys(name for one in members for name in one)
    return [name for name in names if len({one.get(name) for one in members}) > 1]


def with_what_differs(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with labels for every option in which they differ, so that no two have the same name."""
    told = [
        [
            labels.worded(name, value)
            for name, value in options.items()
            if name not in KIND and not name.startswith(NCCL)
        ]
        for options in differing(cells)
    ]
    return [
        dataclasses.replace(cell, labels=tuple(dict.fromkeys((*cell.labels, *words))))
        for cell, words in zip(cells, told, strict=True)
    ]


def spoken(name: str) -> str:
    """Return a name as part of a sentence: `nccl_allreduce (comm_hook=fp16, gpus 0,3)`."""
    first, *others = name.split(BETWEEN)
    return f"{first} ({', '.join(others)})" if others else first


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return {name: name without the parts that all names share}; a single name stays whole."""
    parts = {name: name.split(BETWEEN) for name in names}
    shared = _shared(parts)
    return {name: BETWEEN.join(part for part in split if part not in shared) or name for name, split in parts.items()}


def shared_name(names: Iterable[str]) -> str:
    """Return the parts that all names share; empty where there is one name, or none that they share."""
    parts = list(dict.fromkeys(names))
    shared = _shared(parts)
    return BETWEEN.join(part for part in parts[0].split(BETWEEN) if part in shared) if parts else ""


def _shared(names: Collection[str]) -> set[str]:
    """Return the parts that all of several names have."""
    return set.intersection(*(set(name.split(BETWEEN)) for name in names)) if len(names) > 1 else set()


def legend_names(names: Sequence[str], length: int) -> dict[str, str]:
    """Return {name: a name of at most `length` characters, where that tells it from the others}.

    What all names share goes first, then the parts that most of them share; a part that tells two names apart stays.
    """
    parts = {name: short.split(BETWEEN) for name, short in short_names(names).items()}
    shared = Counter(part for own in parts.values() for part in set(own))
    for name, own in parts.items():
        others = [other for other in parts if other != name]
        for part in sorted(dict.fromkeys(own), key=lambda part: -shared[part]):
            left = [one for one in parts[name] if one != part]
            if len(BETWEEN.join(parts[name])) > length and left and left not in (parts[other] for other in others):
                parts[name] = left
    whole = {name: BETWEEN.join(own) for name, own in parts.items()}
    cut = {name: single_line(text, length) for name, text in whole.items()}
    return cut if len(set(cut.values())) == len(cut) else whole


def run_name(record: Record) -> str:
    """Return the record's name, and which of several measurements of the cell it is."""
    return BETWEEN.join([record.name, *record.marks])
