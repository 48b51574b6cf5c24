"""Published ladders: larger sizes from the first points, by the same links and the same waiting as cells.

    step(N, b) = s · b + fixed + c(N) + waiting(N)

s, ms for each image, comes from the first point; `fixed` from the second, the first on more hosts. A ladder that does not begin
with one host says no s, and needs none if its batch stays. c(N) is one all-reduce of all gradients over the network as described:
these runs do not overlap it with the backward pass (MXNET_HOROVOD_NUM_GROUPS=1). SHARP is not modelled. GPUs scatter as the
H200s of our records. The null model is the same without c and waiting. Nothing is fitted to the points that are forecast.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from analysis.input_files import read_text
from analysis.prediction.asked import MOST_BATCH, MOST_GPUS
from analysis.prediction.draws import best
from analysis.prediction.links.model import DIRECT, NETWORK, ExchangeWire, KnownLinks, TimeCurve
from analysis.prediction.links.network import HostNetwork, read_network
from analysis.prediction.waiting import largest_normal
from benchmarks.record import finite

SPREAD_OF_GPUS = 0.003  # of the steps of equal GPUs: four H200s, tests/data/h200_x4/waterfall
_LARGEST_BYTES = 1 << 20  # of a file
_MOST = 1e12  # of a rate, of bytes
_WORDS = ("system", "round", "network", "source", "same_hosts")
_LARGE = 1e9  # bytes of the one message that says the bandwidth between the GPUs of a host


@dataclass(frozen=True)
class Rung:
    """One published point."""

    nodes: int
    batch_size: int  # images of a GPU
    images_per_second: float


@dataclass(frozen=True)
class Ladder:
    """A system at several sizes, and what is published of its wires."""

    system: str
    round: str
    gpus_per_node: int
    network: HostNetwork
    gpu_link_gb_per_s: float  # between the GPUs of a host, by NCCL's constants for its links
    gradient_bytes: float
    rungs: tuple[Rung, ...]  # ascending
    source: str
    same_hosts: str = ""  # ladders with the same name differ in their network alone

    def step_ms(self, rung: Rung) -> float:
        """Return the step of a published rate."""
        return rung.nodes * self.gpus_per_node * rung.batch_size * 1e3 / rung.images_per_second


@dataclass(frozen=True)
class RungForecast:
    """A published point beside its forecast, in ms."""

    ladder: Ladder
    rung: Rung
    from_what: str
    step_ms: float  # published
    said_ms: float
    null_ms: float


def read_ladder(path: Path) -> Ladder:
    """Read a ladder. Raises OSError, and ValueError with the name of the file and of the field."""
    text = read_text(path, _LARGEST_BYTES)
    try:
        return _ladder(json.loads(text))
    except json.JSONDecodeError:
        raise ValueError(f"{path}: no ladder (it is no JSON)") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no ladder ({error})") from None


def _ladder(found: Any) -> Ladder:
    """Return the ladder of a JSON object. Raises ValueError."""
    points = found.get("points") if isinstance(found, Mapping) else None
    if (
        not isinstance(points, list)
        or len(points) < 2
        or not all(isinstance(one, Mapping) for one in points)
    ):
        raise ValueError("points is no list of two objects or more")
    sizes = [
        (_whole(one, "nodes", MOST_GPUS), _whole(one, "batch_size", MOST_BATCH)) for one in points
    ]
    rungs = [
        Rung(*size, _number(one, "images_per_second", _MOST))
        for size, one in zip(sizes, points, strict=True)
    ]
    words = {name: found.get(name, "" if name == "same_hosts" else None) for name in _WORDS}
    if wrong := next((name for name, word in words.items() if not isinstance(word, str)), None):
        raise ValueError(f"{wrong} is no text")
    return Ladder(
        words["system"], words["round"], _whole(found, "gpus_per_node", MOST_GPUS), read_network(words["network"]),
        _number(found, "gpu_link_gb_per_s", _MOST), _number(found, "gradient_bytes", _MOST),
        tuple(sorted(rungs, key=lambda one: one.nodes)), words["source"], words["same_hosts"],
    )  # fmt: skip


def _number(found: Mapping[str, Any], name: str, most: float) -> float:
    """Return a number of an object. Raises ValueError."""
    value = finite(found.get(name))
    if value is None or not 1 / most <= value <= most:
        raise ValueError(
            f"{name} is {found.get(name)!r:.60}; accepted is a number above 0, at most {most:g}"
        )
    return value


def _whole(found: Mapping[str, Any], name: str, most: int) -> int:
    """Return a whole number of an object. Raises ValueError."""
    value = found.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name} is {value!r:.60}; accepted is a whole number from 1 to {most}")
    return value


def climb(ladders: Sequence[Ladder]) -> list[RungForecast]:
    """Return a forecast of every point beyond the first two of its ladder, and of the same hosts with another network."""
    found = [one for ladder in ladders for one in _climbed(ladder)]
    named = sorted((one for one in ladders if one.same_hosts), key=lambda one: one.same_hosts)
    for _, group in groupby(named, key=lambda one: one.same_hosts):
        found += _crossed(list(group))
    return found


def _climbed(ladder: Ladder) -> list[RungForecast]:
    """Return a forecast of the points of a ladder after the first two, which say how a step grows. Raises ValueError."""
    first, second, *others = ladder.rungs
    if first.nodes == 1:
        slope = (
            ladder.step_ms(first) - _together(ladder, first, ladder.step_ms(first))
        ) / first.batch_size
        null_slope = ladder.step_ms(first) / first.batch_size
    elif len({one.batch_size for one in ladder.rungs}) == 1:
        slope = null_slope = 0.0
    else:
        return []
    fixed = (
        ladder.step_ms(second)
        - slope * second.batch_size
        - _together(ladder, second, ladder.step_ms(second))
    )
    null_fixed = ladder.step_ms(second) - null_slope * second.batch_size
    found = []
    for one in others:
        alone = slope * one.batch_size + fixed
        said = alone + _together(ladder, one, alone)
        null = null_slope * one.batch_size + null_fixed
        if min(alone, null) <= 0:
            raise ValueError(
                f"{ladder.system}: by its first two points a step of {one.batch_size} images takes no time"
            )
        found.append(
            RungForecast(
                ladder, one, f"{first.nodes}, {second.nodes}", ladder.step_ms(one), said, null
            )
        )
    return found


def _crossed(alike: Sequence[Ladder]) -> list[RungForecast]:
    """Return every network of the same hosts from the first of them; the null model says that a network changes nothing."""
    base, found = alike[0], []
    for other in alike[1:]:
        for one in other.rungs:
            there = next((rung for rung in base.rungs if rung.nodes == one.nodes), None)
            if there is not None and there.batch_size == one.batch_size:
                step = base.step_ms(there)
                said = step - _exchange_ms(base, there) + _exchange_ms(other, one)
                found.append(
                    RungForecast(
                        other, one, base.system.rpartition(", ")[2], other.step_ms(one), said, step
                    )
                )
    return found


def _together(ladder: Ladder, rung: Rung, step_ms: float) -> float:
    """Return what several GPUs add to a step: one all-reduce, and waiting for the slowest."""
    waiting = SPREAD_OF_GPUS * step_ms * largest_normal(rung.nodes * ladder.gpus_per_node)
    return _exchange_ms(ladder, rung) + waiting


def _exchange_ms(ladder: Ladder, rung: Rung) -> float:
    """Return one all-reduce of all gradients."""
    ranks = ladder.gpus_per_node
    time_us = _LARGE * 2 * (ranks - 1) / ranks / ladder.gpu_link_gb_per_s / 1e3
    inside = TimeCurve(
        "all_reduce", ExchangeWire(DIRECT), ranks, 1, (_LARGE,), (time_us,), ladder.system
    )
    wire = ExchangeWire(DIRECT if rung.nodes == 1 else NETWORK)
    links = KnownLinks((inside,))
    whole = rung.nodes * ranks
    return best(
        links.time("all_reduce", ladder.gradient_bytes, whole, wire, rung.nodes, ladder.network).ms
    )


def mean_errors(found: Sequence[RungForecast]) -> tuple[float, float]:
    """Return the mean absolute errors of forecasts and of the null model, as shares."""
    said = math.fsum(abs(one.said_ms / one.step_ms - 1) for one in found) / len(found)
    return said, math.fsum(abs(one.null_ms / one.step_ms - 1) for one in found) / len(found)
