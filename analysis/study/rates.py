"""Each benchmark's primary rate, and the options in which two comparable cells may differ.

A higher rate is faster. The rate of a time is 1 ÷ time, so that 5 % more always means 5 % more work
in the same time. Benchmarks declare theirs in their YAML, as `compared` (conf.groups). METHOD.md,
"Comparisons".
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from conf import groups
from conf.cell import IMAGES, SAMPLES, Cell
from conf.options import Refused

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
