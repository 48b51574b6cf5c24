"""Published ladders: larger sizes from the first points, by the same links and the same waiting as cells.

    step(N, b) = s · b + fixed + c(N) + waiting(N)

s, ms for each image, comes from the first point; `fixed` from the second, the first on more hosts. A ladder that does not begin
with one host says no s, and needs none if its batch stays. c(N) is one all-reduce of all gradients over the network as described:
these runs do not overlap it with the backward pass (MXNET_HOROVOD_NUM_GROUPS=1). SHARP is not modelled. GPUs scatter as the
H200s of our records. The null model is the same without c and waiting. Nothing is fitted to the points that are forecast.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from analysis.prediction.draws import best
from analysis.prediction.links.model import DIRECT, NETWORK, ExchangeWire, KnownLinks, TimeCurve
from analysis.prediction.links.network import HostNetwork, read_network
from analysis.prediction.waiting import largest_normal

SPREAD_OF_GPUS = 0.003  # of the steps of equal GPUs: four H200s, tests/data/h200_x4/waterfall
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
    """Read a ladder. Raises OSError, and ValueError with the name of the file."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rungs = tuple(
            Rung(int(one["nodes"]), int(one["batch_size"]), float(one["images_per_second"])) for one in found["points"]
        )
        ladder = Ladder(
            str(found["system"]), str(found["round"]), int(found["gpus_per_node"]), read_network(found["network"]),
            float(found["gpu_link_gb_per_s"]), float(found["gradient_bytes"]),
            tuple(sorted(rungs, key=lambda one: one.nodes)), str(found["source"]), str(found.get("same_hosts", "")),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"{path}: no ladder ({type(error).__name__}: {error})") from None
    positive = all(min(one.nodes, one.batch_size, one.images_per_second) > 0 for one in rungs)
    if (
        len(rungs) < 2
        or not positive
        or min(ladder.gpus_per_node, ladder.gpu_link_gb_per_s, ladder.gradient_bytes) <= 0
    ):
        raise ValueError(f"{path}: a ladder needs two points or more, and every number above 0")
    return ladder


def climb(ladders: Sequence[Ladder]) -> list[RungForecast]:
    """Return a forecast of every point beyond the first two of its ladder, and of the same hosts with another network."""
    found = [one for ladder in ladders for one in _climbed(ladder)]
    named = sorted((one for one in ladders if one.same_hosts), key=lambda one: one.same_hosts)
    for _, group in groupby(named, key=lambda one: one.same_hosts):
        found += _crossed(list(group))
    return found


def _climbed(ladder: Ladder) -> list[RungForecast]:
    first, second, *others = ladder.rungs
    if first.nodes == 1:
        slope = (ladder.step_ms(first) - _together(ladder, first, ladder.step_ms(first))) / first.batch_size
        null_slope = ladder.step_ms(first) / first.batch_size
    elif len({one.batch_size for one in ladder.rungs}) == 1:
        slope = null_slope = 0.0
    else:
        return []
    fixed = ladder.step_ms(second) - slope * second.batch_size - _together(ladder, second, ladder.step_ms(second))
    null_fixed = ladder.step_ms(second) - null_slope * second.batch_size
    found = []
    for one in others:
        alone = slope * one.batch_size + fixed
        said = alone + _together(ladder, one, alone)
        null = null_slope * one.batch_size + null_fixed
        found.append(RungForecast(ladder, one, f"{first.nodes}, {second.nodes}", ladder.step_ms(one), said, null))
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
                found.append(RungForecast(other, one, base.system.rpartition(", ")[2], other.step_ms(one), said, step))
    return found


def _together(ladder: Ladder, rung: Rung, step_ms: float) -> float:
    """Return what several GPUs add to a step: one all-reduce, and waiting for the slowest."""
    waiting = SPREAD_OF_GPUS * step_ms * largest_normal(rung.nodes * ladder.gpus_per_node)
    return _exchange_ms(ladder, rung) + waiting


def _exchange_ms(ladder: Ladder, rung: Rung) -> float:
    """Return one all-reduce of all gradients."""
    ranks = ladder.gpus_per_node
    time_us = _LARGE * 2 * (ranks - 1) / ranks / ladder.gpu_link_gb_per_s / 1e3
    inside = TimeCurve("all_reduce", ExchangeWire(DIRECT), ranks, 1, (_LARGE,), (time_us,), ladder.system)
    wire = ExchangeWire(DIRECT if rung.nodes == 1 else NETWORK)
    links = KnownLinks((inside,))
    whole = rung.nodes * ranks
    return best(links.time("all_reduce", ladder.gradient_bytes, whole, wire, rung.nodes, ladder.network).ms)


def mean_errors(found: Sequence[RungForecast]) -> tuple[float, float]:
    """Return the mean absolute errors of forecasts and of the null model, as shares."""
    said = math.fsum(abs(one.said_ms / one.step_ms - 1) for one in found) / len(found)
    return said, math.fsum(abs(one.null_ms / one.step_ms - 1) for one in found) / len(found)
