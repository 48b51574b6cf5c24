"""Conditions: which fields of a cell, and which facts of where it ran, comparable runs must share.

Efficiencies, curves, waterfalls, comparisons and links group by `Study.condition`. Each names
the options that are irrelevant to it; everything else separates. And the rate by which comparable
cells are compared: their benchmark's primary one, of which higher is faster. The rate of a time is
1 ÷ time, so that 5 % more always means 5 % more work in the same time. Benchmarks declare theirs in
their YAML, as `compared` (conf.groups). METHOD.md, "Comparisons".
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from analysis.study.provenance import CONNECTIONS
from conf import groups
from conf.cell import IMAGES, SAMPLES, Cell
from conf.options import Refused, to_text

IMAGES_PER_SECOND = "throughput/images_per_second"


@dataclass(frozen=True)
class Rate:
    """The primary rate of one benchmark."""

    name: str  # for people: exchanges/s
    metric: str  # what records have of it
    is_time: bool = False  # less of the metric is faster
    may_differ: tuple[str, ...] = ()  # options of the benchmark that leave the work as it is
    work: tuple[str, ...] = ()  # fields of the cell that change it

    def is_same_work(self, option: str) -> bool:
        """Return whether cells that differ in an option do the same amount of work."""
        group, _, name = option.partition(".")
        if group == "benchmark":
            return name in self.may_differ
        return option not in self.work

    def change(self, first: float, second: float) -> float:
        """Return by which share of the first the rate changes between two values of the metric."""
        if self.is_time:
            return first / second - 1
        return second / first - 1


@functools.cache
def _of_yaml(benchmark: str) -> Rate | None:
    try:
        return _declared(groups.choice("benchmark", benchmark).rules.get("compared"))
    except Refused:
        return None


def _declared(compared: Mapping[str, Any] | None) -> Rate | None:
    if not compared:
        return None
    return Rate(
        compared["rate"],
        compared["metric"],
        bool(compared["less_is_better"]),
        tuple(compared["may_differ"]),
        tuple(compared["work"]),
    )


@functools.cache
def _training_rates() -> dict[str, Rate]:
    """Return images per second, the rate of benchmarks that declare none, by what is counted."""
    images = _of_yaml("throughput")
    assert images is not None
    return {IMAGES: images, SAMPLES: replace(images, name=images.name.replace(IMAGES, SAMPLES))}


def is_of_training(name: str) -> bool:
    """Return whether the name of a rate is that of images or samples per second."""
    return name in [rate.name for rate in _training_rates().values()]


def primary_rate(cell: Cell) -> Rate:
    """Return the rate that a cell's benchmark declares: its record, or else its YAML."""
    rate = _declared(cell.declared.get("benchmark", {}).get("compared"))
    rate = rate or _of_yaml(cell.benchmark["name"])
    if rate is not None and rate != _training_rates()[IMAGES]:
        return rate
    if cell.model.inputs == IMAGES:
        return _training_rates()[IMAGES]
    return _training_rates()[SAMPLES]


# Runs of one cell may differ in these fields. A profiler has a pass of its own; the timed pass is
# the same with it.
INCIDENTAL = ("repeat", "seed", "labels", "profiler", "profiler_options")
DEVICES = ("hosts", "gpus")  # where ranks run: what is compared, and no part of a condition
OF_SERVERS = ("server_gpus", "server_hosts")  # where servers run follows from where ranks run
# One GPU uses neither links nor NCCL's settings. A name that ends in `.` or `_` stands for all that
# begin with it.
OF_LINKS = ("nccl.", CONNECTIONS)

# What runs of one study share that may be compared: the values of the names that differ in the
# study and are relevant, and what else must be equal (the GPUs, the images per rank).
Condition: TypeAlias = tuple[tuple[str | None, ...], tuple[Hashable, ...]]


def differing_names(keys: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names whose values differ between mappings, in order; an absent name is None."""
    differing = []
    for name in dict.fromkeys(itertools.chain(*keys)):
        if len({key.get(name) for key in keys}) > 1:
            differing.append(name)
    return tuple(differing)


def is_among(name: str, names: Collection[str]) -> bool:
    """Return whether a name is one of several, or begins with one that ends in `.` or `_`."""
    prefixes = tuple(prefix for prefix in names if prefix.endswith((".", "_")))
    return name in names or name.startswith(prefixes)


def irrelevant_to_curves(strong: bool) -> tuple[str, ...]:
    """Return what differs between points of a curve because their GPUs do; strong scaling: the
    images per rank too.
    """
    if strong:
        return (*OF_SERVERS, "batch_size")
    return OF_SERVERS


def irrelevant_to_baselines(strong: bool) -> tuple[str, ...]:
    """Return what may differ between a subset and the same cell on one of its GPUs."""
    return (*irrelevant_to_curves(strong), *OF_LINKS)


def request_of(cell: Cell) -> dict[str, str]:
    """Return what was asked of a cell as {"strategy.comm_hook": "bf16"}, without its devices and
    INCIDENTAL fields.

    CPU workers do not use NCCL, so its settings are left out for them. How long throughput is
    measured does not change it, so only the name of that benchmark stays. Of what YAML files
    declare, only the hash of the user's own code stays.
    """
    request: dict[str, str] = {}
    for field in dataclasses.fields(Cell):
        name, value = field.name, getattr(cell, field.name)
        if name in INCIDENTAL or name in DEVICES or value is None or value == ():
            continue
        if name == "declared":
            for group, rules in value.items():
                if "sha256" in rules:
                    request[f"{group}.sha256"] = to_text(rules["sha256"])
        elif name == "benchmark" and value["name"] == "throughput":
            request["benchmark.name"] = "throughput"
        elif name == "nccl" and cell.device == "cpu":
            continue
        elif name != "data" and (isinstance(value, dict) or dataclasses.is_dataclass(value)):
            if dataclasses.is_dataclass(value):
                value = vars(value)
            for option, chosen in value.items():
                if chosen is not None:
                    request[f"{name}.{option}"] = to_text(chosen)
        elif value != {}:
            request[name] = to_text(value)
    return request


def chosen_options(cell: Cell, group: str = "strategy") -> frozenset[tuple[str, str]]:
    """Return (option, value) of a cell's strategy or benchmark for each that is not its default.

    What `auto` means for this cell is its default too. Options of a strategy without a YAML here
    are all chosen.
    """
    given = json.dumps(getattr(cell, group), sort_keys=True)
    return _chosen_options(group, given, cell.device, cell.world_size)


@functools.lru_cache(maxsize=4096)
def _chosen_options(group: str, given: str, device: str, ranks: int) -> frozenset[tuple[str, str]]:
    options: dict[str, Any] = json.loads(given)
    try:
        defaults = groups.choice(group, options["name"]).options
    except Refused:
        defaults = {}
    chosen = set()
    for option, value in options.items():
        meant = []
        if option in defaults:
            meant.append(defaults[option])
        if "auto" in meant:
            try:
                resolved = groups.resolved(group, {**options, option: "auto"}, device, ranks)
                meant.append(resolved[option])
            except (Refused, KeyError, TypeError):  # an older record may lack what decides
                pass
        if option != "name" and value not in meant:
            chosen.add((option, to_text(value)))
    return frozenset(chosen)
