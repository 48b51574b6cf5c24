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
        return name in self.may_differ if group == "benchmark" else option not in self.work

    def change(self, first: float, second: float) -> float:
        """Return the change from one value of the metric to another, as a share of the first rate."""
        if self.is_time:
            return first / second - 1
        return second / first - 1


def _declared(compared: Mapping[str, Any]) -> Rate:
    return Rate(
        str(compared["rate"]),
        str(compared["metric"]),
        bool(compared["less_is_better"]),
        tuple(compared["may_differ"]),
        tuple(compared["work"]),
    )


@functools.cache
def _of_yaml(benchmark: str) -> Rate | None:
    try:
        compared = groups.choice("benchmark", benchmark).rules.get("compared")
    except Refused:
        return None
    return _declared(compared) if compared else None


@functools.cache
def images_rate() -> Rate:
    """Return images per second, the rate of benchmarks that declare no rate."""
    rate = _of_yaml("throughput")
    assert rate is not None
    return rate


@functools.cache
def samples_rate() -> Rate:
    """Return the same rate of models that train on something else: samples per second."""
    return replace(images_rate(), name=images_rate().name.replace(IMAGES, SAMPLES))


def is_of_training(name: str) -> bool:
    """Return whether the name of a rate is that of images or samples per second."""
    return name in (images_rate().name, samples_rate().name)


def primary_rate(cell: Cell) -> Rate:
    """Return the rate that a cell's benchmark declares; a record of schema 2 declares nothing, so
    its YAML decides.
    """
    compared = cell.declared.get("benchmark", {}).get("compared")
    rate = _declared(compared) if compared else _of_yaml(cell.benchmark["name"])
    if rate is None or rate == images_rate():
        return images_rate() if cell.model.inputs == IMAGES else samples_rate()
    return rate
