"""Labels: what findings and reports call cells. Nothing decides by a label; keys decide (Runs.key), labels are made last."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from analysis.study import provenance
from analysis.study.estimates import Member
from analysis.text import single_line
from benchmarks.record import Record
from conf.cell import Cell, compress_hosts, counted
from conf.options import to_text

if TYPE_CHECKING:
    from analysis.study.study import Runs, Study

BETWEEN = " · "  # the parts of a name
_GPU = re.compile(r"\bGPU(?=s?\b)")


def label(study: Study, runs: Runs, without: Sequence[str] = ()) -> str:
    """Return a label with only what varies in the study; if nothing varies, model · strategy, or the benchmark."""
    words = parts(study, runs, without)
    if not words and not runs.trains:
        return str(runs.cell.benchmark["name"])
    return BETWEEN.join(words) or f"{runs.cell.model.name}{BETWEEN}{runs.strategy}"


def parts(study: Study, runs: Runs, without: Sequence[str] = ()) -> list[str]:
    """Return the parts of a label: the options in which runs differ from others of the study, then where they ran."""
    options = [worded(name, runs.request[name]) for name in study.distinguishing(runs, without)]
    for name in study.telling_provenance:
        value = provenance.worded(runs.provenance.get(name))
        options.append(value if name == provenance.STUDY else f"{name} {value}")
    return options


def side_label(study: Study, runs: Runs, differing: Sequence[str], worded_difference: str) -> str:
    """Return the label of one side of a comparison: its GPUs, its label, and the NCCL setting that it left alone."""
    if differing[0].startswith("nccl.") and differing[0] not in runs.request:
        words = [*parts(study, runs), f"{worded_difference.removeprefix('NCCL_')} untouched"]
    else:
        words = [label(study, runs)]
    return BETWEEN.join([gpu_list(runs.gpus), *words])


def worded(name: str, value: str) -> str:
    """Return one option of a request for people: `compile`, `batch 256`, `P2P_LEVEL=LOC`, `comm_hook=bf16`."""
    words = {
        "batch_size": "batch",
        "global_batch_size": "global batch",
        "server_gpus": "server_gpus",
        "gpus": "gpus",
    }
    if name in words:
        return f"{words[name]} {value.strip('[]')}"
    if name in (
        "model.name",
        "strategy.name",
        "optimizer.name",
        "precision",
        "optimize",
        "benchmark.name",
        "device",
    ):
        return value
    if name == "hosts":
        return f"hosts {value}" if value else "this machine"
    if name == "server_hosts":
        return f"servers on {compress_hosts(json.loads(value)) if value.startswith('[') else value}"
    if name == "data":
        data: dict[str, Any] = (
            json.loads(value) if value.startswith("{") else {"name": value, "options": {}}
        )
        return " ".join(
            [
                f"data={data['name']}",
                *(f"{option}={one}" for option, one in data["options"].items()),
            ]
        )
    if name == "model.image_size":
        return f"{value} px"
    return f"{name.rpartition('.')[2].removeprefix('NCCL_')}={value}"


def gpu_ids(gpus: Sequence[Member]) -> str:
    """Return `0,3`, in rank order; with hosts `a · 0,3`, `a+b · 2 × 0,3`, or `a:0,b:3` where the hosts have other GPUs."""
    return _on_hosts(gpus, "")


def gpu_list(gpus: Sequence[Member]) -> str:
    """Return `gpus 0,3`, with hosts `a+b · 2 × gpus 0,3`."""
    return _on_hosts(gpus, "gpus ")


def _on_hosts(gpus: Sequence[Member], word: str) -> str:
    hosts: dict[str, list[str]] = {}
    for gpu in gpus:
        host, _, number = str(gpu).rpartition(":")
        hosts.setdefault(host, []).append(number)
    ids = [",".join(own) for own in hosts.values()]
    if len(set(ids)) > 1:
        return word + ",".join(map(str, gpus))
    if not ids or "" in hosts:
        return word + "".join(ids)
    return (
        f"{compress_hosts([*hosts])}{BETWEEN}{f'{len(hosts)} × ' * (len(hosts) > 1)}{word}{ids[0]}"
    )


def unit(device: str) -> str:
    """Return what one member of a subset is called: a GPU, or a CPU worker of a machine without GPUs."""
    return "GPU" if device == "cuda" else "CPU worker"


def of_unit(words: str, unit: str) -> str:
    """Return words about GPUs as words about CPU workers, where `unit` is not `GPU` or `GPUs`."""
    return words if unit.startswith("GPU") else _GPU.sub("CPU worker", words)


def several(names: Sequence[str]) -> str:
    """Return the first of several names, and how many more there are."""
    rest = len(names) - 1
    return names[0] + (f" and {rest} more {'cell' if rest == 1 else 'cells'}" if rest else "")


# Names of cells for people: what tells cells apart, a run's name, and names without what all share.


NAMES_BETWEEN, names_of_unit = BETWEEN, of_unit
KIND = (
    "model.name",
    "strategy.name",
    "benchmark.name",
    "hosts",
    "gpus",
)  # what a cell's name always tells
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
    return [
        {name: one.get(name, UNTOUCHED) for name in (*common, *told[_kind(one)])} for one in asked
    ]


def _asked(cell: Cell) -> dict[str, str]:
    """Flatten what a cell asks for: {"strategy.comm_hook": "bf16", "gpus": "0,3"}."""
    flat: dict[str, str] = {"hosts": "", **({"data": "synthetic"} if cell.trains else {})}
    for name, value in cell.to_dict().items():
        if name == "gpus":
            flat[name] = gpu_ids(value)
        elif name in ("hosts", "server_hosts"):
            flat[name] = compress_hosts(value)
        elif name == "data":
            flat |= {"data": value["name"]} | {
                f"data.{option}": to_text(one) for option, one in value["options"].items()
            }
        elif name not in NOT_ASKED:
            inside = (
                {f"{name}.{inner}": one for inner, one in value.items()}
                if isinstance(value, dict)
                else {name: value}
            )
            flat |= {option: to_text(one) for option, one in inside.items()}
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
            worded(name, value)
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
    first, *others = name.split(NAMES_BETWEEN)
    return f"{first} ({', '.join(others)})" if others else first


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return {name: name without the parts that all names share}; a single name stays whole."""
    parts = {name: name.split(NAMES_BETWEEN) for name in names}
    shared = _shared(parts)
    return {
        name: NAMES_BETWEEN.join(part for part in split if part not in shared) or name
        for name, split in parts.items()
    }


def shared_name(names: Iterable[str]) -> str:
    """Return the parts that all names share; empty where there is one name, or none that they share."""
    parts = list(dict.fromkeys(names))
    shared = _shared(parts)
    return (
        NAMES_BETWEEN.join(part for part in parts[0].split(NAMES_BETWEEN) if part in shared)
        if parts
        else ""
    )


def _shared(names: Collection[str]) -> set[str]:
    """Return the parts that all of several names have."""
    return (
        set.intersection(*(set(name.split(NAMES_BETWEEN)) for name in names))
        if len(names) > 1
        else set()
    )


def legend_names(names: Sequence[str], length: int) -> dict[str, str]:
    """Return {name: a name of at most `length` characters, where that tells it from the others}.

    What all names share goes first, then the parts that most of them share; a part that tells two names apart stays.
    """
    parts = {name: short.split(NAMES_BETWEEN) for name, short in short_names(names).items()}
    shared = Counter(part for own in parts.values() for part in set(own))
    for name, own in parts.items():
        others = [other for other in parts if other != name]
        for part in sorted(dict.fromkeys(own), key=lambda part: -shared[part]):
            left = [one for one in parts[name] if one != part]
            if (
                len(NAMES_BETWEEN.join(parts[name])) > length
                and left
                and left not in (parts[other] for other in others)
            ):
                parts[name] = left
    whole = {name: NAMES_BETWEEN.join(own) for name, own in parts.items()}
    cut = {name: single_line(text, length) for name, text in whole.items()}
    return cut if len(set(cut.values())) == len(cut) else whole


def run_name(record: Record) -> str:
    """Return the record's name, and which of several measurements of the cell it is."""
    return NAMES_BETWEEN.join([record.name, *record.run_suffixes])
