"""Names of cells for people: labels within a study, what tells cells apart, and short names.

Nothing decides by a name; keys decide (Runs.key), names are made last.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from analysis.study import provenance
from analysis.study.conditions import differing_names
from analysis.text import count, join_words, single_line
from benchmarks.record import Record
from conf.cell import Cell, Member, compress_hosts
from conf.options import to_text

if TYPE_CHECKING:
    from analysis.study.runs import Runs
    from analysis.study.study import Study

BETWEEN = " · "  # the parts of a name
NCCL = "nccl."
OPTIMIZER = "optimizer.name"  # its other settings follow from it
# What a cell's name always says.
KIND = ("model.name", "strategy.name", "benchmark.name", "hosts", "gpus")
UNTOUCHED = "default"  # what a cell has of a setting that it leaves alone and another cell changes
NOT_IN_NAMES = ("repeat", "labels", "declared", "places")
# Options whose value says what it is, and those with another word before it.
BARE_VALUES = (
    "benchmark.name",
    "benchmark.run",
    "device",
    "model.name",
    "optimize",
    "optimizer.name",
    "precision",
    "strategy.name",
)
WORDS = {
    "batch_size": "batch",
    "global_batch_size": "global batch",
    "server_gpus": "server GPU",
    "gpus": "gpus",
}
MOST_HOSTS = 4  # that are named in a sentence
HASH_LENGTH = 8  # digits of a hash
_GPU = re.compile(r"\bGPU(?=s?\b)")


def label(study: Study, runs: Runs, without: Sequence[str] = ()) -> str:
    """Return what varies in the study as a label; else model · strategy, or the benchmark."""
    words = parts(study, runs, without)
    if not words and runs.cell.trains:
        words = [runs.cell.model.name, runs.strategy]
    elif not words and runs.cell.runs_script:
        words = [runs.cell.model.name]
    return BETWEEN.join(words) or str(runs.cell.benchmark["name"])


def parts(study: Study, runs: Runs, without: Sequence[str] = ()) -> list[str]:
    """Return the parts of a label: what was asked otherwise than of others, then where runs ran."""
    words = []
    for name in study.naming_options_of(runs, without):
        words.append(format_option(name, runs.request[name]))
    for name in study.naming_provenance:
        value = provenance.worded(runs.provenance.get(name))
        if name != provenance.STUDY:
            value = f"{name} {value}"
        words.append(value)
    return words


def side_label(study: Study, runs: Runs, differing: Sequence[str], difference: str) -> str:
    """Return the label of one cell of a comparison, with the NCCL setting that it left alone."""
    words = [label(study, runs)]
    if differing[0].startswith(NCCL) and differing[0] not in runs.request:
        words = [*parts(study, runs), f"{difference.removeprefix('NCCL_')} {UNTOUCHED}"]
    return BETWEEN.join([gpu_list(runs.gpus), *words])


def format_option(name: str, value: str) -> str:
    """Return one option of a request for people: `compile`, `batch 256`, `comm_hook=bf16`."""
    if name in WORDS:
        return f"{WORDS[name]} {value.strip('[]')}"
    if name in BARE_VALUES and value != "max":  # of optimize, which no reader takes for a name
        return value
    if name == "hosts" and not value:
        return "this machine"
    if name == "hosts":
        return f"hosts {value}"
    if name == "server_hosts":
        if value.startswith("["):
            value = compress_hosts(json.loads(value))
        return f"servers on {value}"
    if name == "data":
        data: dict[str, Any] = {"name": value, "options": {}}
        if value.startswith("{"):
            data = json.loads(value)
        text = f"data={data['name']}"
        for option, chosen in data["options"].items():
            text += f" {option}={chosen}"
        return text
    if name == "model.image_size":
        return f"{value} px"
    if name.endswith(".sha256"):
        return f"code {value[:HASH_LENGTH]}"
    return f"{name.rpartition('.')[2].removeprefix('NCCL_')}={value}"


def gpu_ids(gpus: Sequence[Member], word: str = "") -> str:
    """Return `0,3`, in rank order; with hosts `a · 0,3`, `a+b · 2 × 0,3`, or `a:0,b:3`.

    `word` stands before the ids.
    """
    hosts = _by_host(gpus)
    ids = list(map(",".join, hosts.values()))
    if len(set(ids)) > 1:  # the hosts have other GPUs
        return word + ",".join(map(str, gpus))
    if not ids or "" in hosts:
        return word + "".join(ids)
    times = ""
    if len(hosts) > 1:
        times = f"{len(hosts)} × "
    return f"{compress_hosts([*hosts])}{BETWEEN}{times}{word}{ids[0]}"


def _by_host(gpus: Sequence[Member]) -> dict[str, list[str]]:
    of_host: dict[str, list[str]] = defaultdict(list)
    for gpu in gpus:
        host, _, device = str(gpu).rpartition(":")
        of_host[host].append(device)
    return of_host


def gpu_list(gpus: Sequence[Member]) -> str:
    """Return `gpus 0,3`, with hosts `a+b · 2 × gpus 0,3`."""
    return gpu_ids(gpus, "gpus ")


def named_gpus(gpus: Sequence[Member]) -> str:
    """Return `GPUs 0,3`, `GPU 0 of host a`, `GPU 0 of each host, a and b`, or `GPUs a:0,b:3`."""
    of_host = _by_host(gpus)
    devices, *others = of_host.values()
    if any(each != devices for each in others):
        return f"GPUs {gpu_ids(gpus)}"
    words = f"GPU {devices[0]}" if len(devices) == 1 else f"GPUs {','.join(devices)}"
    if "" in of_host:
        return words
    hosts = join_words([*of_host], MOST_HOSTS)
    return f"{words} of host {hosts}" if len(of_host) == 1 else f"{words} of each host, {hosts}"


def unit(device: str) -> str:
    """Return what one member of a subset is called: a GPU, or a CPU worker."""
    if device == "cuda":
        return "GPU"
    return "CPU worker"


def of_unit(words: str, unit: str) -> str:
    """Return words about GPUs as words about CPU workers, where `unit` is not `GPU` or `GPUs`."""
    if unit.startswith("GPU"):
        return words
    words = words.replace("with peer access", "through shared memory")
    return _GPU.sub("CPU worker", words)


def several(names: Sequence[str]) -> str:
    """Return the first of several names, and how many more there are."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {count(len(names) - 1, 'more configuration')}"


def unit_of(study: Study) -> str:
    """Return what is counted: GPUs, or the CPU workers of a study without GPUs."""
    return unit_of_cells(record.cell for record in study.records)


def unit_of_cells(cells: Iterable[Cell]) -> str:
    """Return what is counted in some cells: GPUs, or CPU workers where none has a GPU."""
    for cell in cells:
        if cell.device == "cuda":
            return "GPUs"
    return "CPU workers"


def ran_alone(study: Study) -> bool:
    """Return whether every cell was asked for on one GPU: nothing scales or goes over links."""
    return all(record.cell.world_size == 1 for record in (*study.records, *study.replaced))


def varying(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """Return for each cell what tells it from the others, {option: value}; repeats are not told
    apart.

    First what of KIND differs, then every other option in which cells with the same KIND differ. An
    option that follows from the model or the GPUs is left out.
    """
    kind_of = operator.itemgetter(*KIND, OPTIMIZER)
    options = list(map(_options, cells))
    of_kind: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for each in options:
        of_kind[kind_of(each)].append(each)
    within = {kind: differing_names(members) for kind, members in of_kind.items()}
    common = []
    for name, *values in zip((*KIND, OPTIMIZER), *map(kind_of, options), strict=True):
        if len(set(values)) > 1:
            common.append(name)
    differing = []
    for each in options:
        names = (*common, *within[kind_of(each)])
        differing.append({name: each.get(name, UNTOUCHED) for name in names})
    return differing


def _options(cell: Cell) -> dict[str, str]:
    """Return everything that a cell asks for: {"strategy.comm_hook": "bf16", "gpus": "0,3"}."""
    options = {OPTIMIZER: "sgd", "hosts": ""}
    if cell.trains:
        options["data"] = "synthetic"
    for name, value in cell.to_dict().items():
        if name in NOT_IN_NAMES:
            continue
        if name == "gpus":
            options[name] = gpu_ids(value)
        elif name in ("hosts", "server_hosts"):
            options[name] = compress_hosts(value)
        elif name == "data":
            options["data"] = value["name"]
            for option, chosen in value["options"].items():
                options[f"data.{option}"] = to_text(chosen)
        elif isinstance(value, dict):
            for option, chosen in value.items():
                options[f"{name}.{option}"] = to_text(chosen)
        else:
            options[name] = to_text(value)
    return options


def with_what_differs(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with labels for every option in which they differ: no two have one name."""
    labelled = []
    for cell, options in zip(cells, varying(cells), strict=True):
        labels = list(cell.labels)
        for name, value in options.items():
            if name not in KIND and not name.startswith(NCCL):
                labels.append(format_option(name, value))
        labelled.append(dataclasses.replace(cell, labels=tuple(dict.fromkeys(labels))))
    return labelled


def run_name(record: Record) -> str:
    """Return the record's name, and which of several measurements of the cell it is."""
    return BETWEEN.join([record.name, *record.cell.run_suffixes(record.drift)])


def spoken(name: str) -> str:
    """Return a name as part of a sentence: `nccl_allreduce (comm_hook=fp16, gpus 0,3)`."""
    first, *rest = name.split(BETWEEN)
    if not rest:
        return first
    return f"{first} ({', '.join(rest)})"


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return {name: name without the parts that all names share}; a single name stays whole."""
    listed = list(names)
    shared = shared_name(listed).split(BETWEEN)
    short = {}
    for name in listed:
        rest = [part for part in name.split(BETWEEN) if part not in shared]
        short[name] = BETWEEN.join(rest) or name
    return short


def shared_name(names: Iterable[str]) -> str:
    """Return the parts that all names share; empty where there is one name, or none is shared."""
    first, *rest = dict.fromkeys(names) or [""]
    shared = first.split(BETWEEN)
    if not rest:
        return ""
    for name in rest:
        parts = name.split(BETWEEN)
        shared = [part for part in shared if part in parts]
    return BETWEEN.join(shared)


def legend_names(names: Sequence[str], length: int) -> dict[str, str]:
    """Return {name: a name of at most `length` characters, where that tells it from the others}.

    What all names share goes first, then the parts that most of them share; a part that tells two
    names apart stays.
    """
    whole = short_names(names)
    shared: Counter[str] = Counter()
    for short in whole.values():
        shared.update(set(short.split(BETWEEN)))
    for name in whole:
        parts = whole[name].split(BETWEEN)
        for part in sorted(dict.fromkeys(parts), key=lambda part: -shared[part]):
            rest = [each for each in parts if each != part]
            shorter = BETWEEN.join(rest)
            if len(BETWEEN.join(parts)) > length and rest and shorter not in whole.values():
                whole[name], parts = shorter, rest
    cut = {name: single_line(text, length) for name, text in whole.items()}
    if len(set(cut.values())) < len(cut):
        return whole
    return cut
