"""From requests to an ordered list of cells. Everything that can be wrong with a request is found here, before any start."""

import dataclasses
import importlib.util
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf import nccl
from conf.cell import Cell, checked, resolve
from conf.gpus import PLAIN_WORDS, WORD, expand
from conf.knobs import Refused
from conf.schema import Config
from launch.machine import Machine, look


@dataclass(frozen=True)
class Request:
    """One combination of a sweep as Hydra composed it."""

    config: Config
    overrides: list[str]


@dataclass(frozen=True)
class Planned:
    """A cell in its place in the order."""

    cell: Cell
    drift: bool = False  # the first cell once more, at the end of a repeated list


@dataclass(frozen=True)
class Plan:
    """The cells of one invocation, in the order they will run, and what the user should be told."""

    config: Config  # of the first request: study, folders, deadlines and tracking are the same for all
    machine: Machine
    cells: list[Planned]
    notices: list[str] = field(default_factory=list)


# A sweep has one of each of these.
SHARED = ("study", "output_dir", "tracking", "engine", "validity", "device", "repeats", "resume", "dry_run")


def plan(requests: Sequence[Request], surrounding: Mapping[str, str]) -> Plan:
    """Check every request against the schema and this machine, and put the cells in order.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    first = requests[0].config
    for name in SHARED:
        values = [getattr(request.config, name) for request in requests]
        if any(value != values[0] for value in values):
            raise Refused(f"{name}={_shown(values)}: a sweep has one {name}; run one sweep for each")
    notices: list[str] = []
    machine = None
    listed: list[Cell] = []
    for request in requests:
        config, told = checked(request.config)
        nccl.against_surroundings(config.nccl, surrounding)
        machine = machine or look(config.device, surrounding)
        _library(config)
        notices += told
        listed += [resolve(config, subset, machine.kind) for subset in _subsets(config.gpus, machine)]
    assert machine is not None
    if machine.kind == "cpu":
        notices.append(
            f"no GPU is used: {machine.cores} cores give CPU workers 0 to {len(machine.everyone) - 1} (gpus=all), "
            "gloo communicates, images are small"
        )
        if any(cell.nccl for cell in listed):
            notices.append("NCCL settings are not applicable to CPU workers: they are recorded and have no effect")
    unique = list({cell.key: cell for cell in listed}.values())
    if len(unique) < len(listed):
        notices.append(f"{len(listed) - len(unique)} cells were asked for twice and are measured once")
    return Plan(first, machine, _ordered(unique, first.repeats, first.seed), list(dict.fromkeys(notices)))


def _ordered(cells: list[Cell], repeats: int, seed: int) -> list[Planned]:
    """As listed, one-GPU baselines first; repeated lists are shuffled each time, and end with their first cell again."""
    if repeats == 1:
        return [Planned(cell) for cell in sorted(cells, key=lambda cell: cell.world_size > 1)]
    order: list[Planned] = []
    for repeat in range(repeats):
        turn = [dataclasses.replace(cell, repeat=repeat) for cell in cells]
        random.Random(f"{seed}/{repeat}").shuffle(turn)
        order += [Planned(cell) for cell in turn]
    return [*order, Planned(dataclasses.replace(order[0].cell, repeat=repeats), drift=True)]


def _subsets(tokens: Sequence[str], machine: Machine) -> list[tuple[int, ...]]:
    """The ordered subsets that one `gpus` list means here."""
    typed = ",".join(tokens)
    if len(tokens) == 1 and WORD.fullmatch(tokens[0]):
        if tokens[0] in PLAIN_WORDS:
            return expand(tokens[0], machine.everyone)
        raise Refused(f"gpus={typed}: needs the machine's topology, which this version cannot read yet")
    subset = tuple(machine.device(token, typed).id for token in tokens)
    if not subset or len(set(subset)) < len(subset):
        raise Refused(f"gpus={typed}: names no GPU, or one twice; each may appear once in a subset")
    return [subset]


def _library(config: Config) -> None:
    if importlib.util.find_spec(config.model.library) is None and config.model.library != "ringside":
        raise Refused(
            f"model.library={config.model.library}: not installed; accepted here after `pip install '.[{config.model.library}]'`"
        )


def _shown(values: Sequence[Any]) -> str:
    return ",".join(dict.fromkeys(str(value) for value in values))
