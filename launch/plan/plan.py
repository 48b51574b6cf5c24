"""From requests to an ordered list of cells. Everything that can be wrong with a request is found here, before any start."""

import dataclasses
import importlib.util
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.errors import UnreadableInput
from analysis.findings.control_cells import controls
from analysis.topology.model import Topology
from analysis.topology.source import load_topology
from analysis.topology.subsets import best, classes, worst
from benchmarks.request import refuse
from conf import nccl
from conf.cell import Cell
from conf.gpus import PLAIN_WORDS, WORD, by_link, expand, one_subset
from conf.groups import choice
from conf.options import Refused
from conf.resolve import CheckedConfig, checked, resolve, without_effect
from conf.schema import Config
from launch.machine.devices import Device, Machine, look
from launch.plan.peer_access import refuse_without_peers
from launch.plan.shared_memory import refuse_too_little
from launch.profile.nsys import Nsys, find


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
    nsys: Nsys | None = None


# A sweep has one of each of these.
SHARED = (
    "study",
    "output_dir",
    "tracking",
    "engine",
    "validity",
    "device",
    "repeats",
    "resume",
    "dry_run",
    "topology",
    "tuning_pass",
    "sample_gpus",
    "report",
)


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
    tools: dict[str | None, Nsys | None] = {}  # nsys, by what was asked
    for request in requests:
        config, told = checked(request.config)
        nccl.refuse_multicast(config.nccl_variables, surrounding)
        machine = machine or _machine(config, surrounding)
        _library(config)
        notices += told
        if idle := without_effect(config.benchmark["name"], request.overrides):
            notices.append(
                f"benchmark={config.benchmark['name']} trains nothing: {', '.join(idle)} changes nothing in it"
            )
        config = _with_profiler(config, surrounding, tools)
        for subset in _subsets(config, machine):
            cell = resolve(config, subset, machine.kind, everyone=machine.everyone)
            refuse(cell, machine.memory_bytes)
            refuse_without_peers(cell, machine)
            listed += [*(controls(cell) if config.waterfall else []), cell]
    assert machine is not None
    if first.topology and first.dry_run:
        notices.append(f"planned for the machine of topology={first.topology}, not for this one")
    elif machine.kind == "cpu":
        notices.append(
            f"no GPU is used ({machine.why}): {machine.cores} cores give CPU workers 0 to {len(machine.everyone) - 1} "
            "(gpus=all), gloo communicates, images are small"
        )
        if any(by_link(request.config.gpus) for request in requests):
            notices.append("CPU workers have no links: the first are the best, the worst and the only class")
        if any(cell.nccl for cell in listed):
            notices.append("NCCL settings are not applicable to CPU workers: they are recorded and have no effect")
    listed, dropped = _alone_once(listed)
    if dropped:
        notices.append("NCCL settings do not reach a GPU alone: each is measured once, without them")
    unique = list({cell.key: cell for cell in listed}.values())
    twice = len(listed) - len(unique)
    if twice and not any(request.config.waterfall for request in requests):  # control cells explain several cells
        notices.append(f"{twice} {'cell was' if twice == 1 else 'cells were'} asked for twice and measured once")
    if not (first.topology and first.dry_run):  # then it is another machine's memory
        refuse_too_little(unique)
    order = _ordered(unique, first.repeats, first.seed)
    return Plan(first, machine, order, list(dict.fromkeys(notices)), next(iter(tools.values()), None))


def _with_profiler(
    config: CheckedConfig, surrounding: Mapping[str, str], tools: dict[str | None, Nsys | None]
) -> CheckedConfig:
    """The configuration with `profiler=auto` resolved; a nsys that is needed is looked for once. Raises Refused."""
    name = config.profiler["name"]
    if name not in ("auto", "nsys") or not choice("benchmark", config.benchmark["name"]).trains:
        return config
    asked = config.profiler["nsys_path"]
    if tools and asked not in tools:
        raise Refused(f"profiler.nsys_path={_shown([*tools, asked])}: a sweep has one; run one sweep for each")
    if not tools.get(asked):
        try:
            tools[asked] = find(asked, surrounding)
        except Refused:
            elsewhere = config.topology and config.dry_run  # nsys is that machine's
            if (name == "nsys" or asked) and not elsewhere:
                raise
            tools[asked] = None
    chosen = "nsys" if name == "nsys" or tools[asked] else "torch"
    return dataclasses.replace(config, profiler=config.profiler | {"name": chosen})


def _alone_once(cells: list[Cell]) -> tuple[list[Cell], bool]:
    """Where a sweep of NCCL's settings has GPUs alone in it, these once, without settings; and whether any was dropped."""
    plain = {dataclasses.replace(cell, nccl={}).key for cell in cells if cell.world_size == 1 and not cell.nccl}
    found, dropped = [], False
    for cell in cells:
        if cell.world_size == 1 and cell.nccl and dataclasses.replace(cell, nccl={}).key in plain:
            dropped = True
        else:
            found.append(cell)
    return found, dropped


def _compared_with_others(cell: Cell) -> tuple[bool, int]:
    """What others are compared with sorts first: one-GPU baselines, then cells with fewer NCCL settings."""
    return cell.world_size > 1, len(cell.nccl)


def _ordered(cells: list[Cell], repeats: int, seed: int) -> list[Planned]:
    """As listed, but what others are compared with first: a sweep that is stopped has it, and rows have their efficiency at once.

    Repeated lists are shuffled each time, later ones without that order, so that drift falls on all alike; they end with
    their first cell again, under a repeat of its own that no list reaches.
    """
    if repeats == 1:
        return [Planned(cell) for cell in sorted(cells, key=_compared_with_others)]
    order: list[Planned] = []
    for repeat in range(repeats):
        turn = [dataclasses.replace(cell, repeat=repeat) for cell in cells]
        random.Random(f"{seed}/{repeat}").shuffle(turn)
        if repeat == 0:
            turn.sort(key=_compared_with_others)  # stable: the rest stays shuffled
        order += [Planned(cell) for cell in turn]
    return [*order, Planned(dataclasses.replace(order[0].cell, repeat=-repeats), drift=True)]


def _machine(config: Config, surrounding: Mapping[str, str]) -> Machine:
    """This machine; to plan only, the machine of a topology file."""
    if config.topology is None or not config.dry_run:
        return look(config.device, surrounding)
    gpus = _topology(config).gpus
    return Machine("cuda", tuple(Device(gpu) for gpu in gpus), gpus, 1)


def _topology(config: Config) -> Topology:
    try:
        return load_topology(config.topology)
    except (UnreadableInput, OSError) as error:
        asked = f"topology={config.topology}" if config.topology else f"gpus={','.join(config.gpus)}"
        raise Refused(f"{asked}: needs the machine's topology; {error}") from None


def _subsets(config: Config, machine: Machine) -> list[tuple[int, ...]]:
    """The ordered subsets that one `gpus` list means here."""
    typed = ",".join(config.gpus)
    tokens = one_subset(config.gpus, typed)
    if len(tokens) == 1 and WORD.fullmatch(tokens[0]):
        if tokens[0] in PLAIN_WORDS:
            return expand(tokens[0], machine.everyone)
        return _by_topology(config, machine)
    subset = tuple(machine.device(token, typed).id for token in tokens)
    if not subset or len(set(subset)) < len(subset):
        raise Refused(f"gpus={typed}: names no GPU, or one twice; each may appear once in a subset")
    return [subset]


def _by_topology(config: Config, machine: Machine) -> list[tuple[int, ...]]:
    """What classes, classes:K, best:K and worst:K mean; `classes` starts with one GPU alone, the baseline.

    CPU workers are all alike: the first K are the best, the worst and the only class.
    """
    word, _, number = config.gpus[0].partition(":")
    size = int(number) if number else None
    if size is not None and not 1 <= size <= len(machine.everyone):
        raise Refused(
            f"gpus={config.gpus[0]}: accepted is a size of 1 to {len(machine.everyone)}, the GPUs of this machine"
        )
    if machine.kind == "cpu":
        everyone = machine.everyone
        return [everyone[:count] for count in ([size] if size else range(1, len(everyone) + 1))]
    topology = _topology(config)
    ours = {device.id for device in machine.devices}  # CUDA_VISIBLE_DEVICES may leave some of the machine's
    topology = dataclasses.replace(topology, devices=tuple(gpu for gpu in topology.devices if gpu.index in ours))
    if set(topology.gpus) != ours:
        here = ", ".join(str(device.id) for device in machine.devices)
        raise Refused(
            f"gpus={config.gpus[0]}: the topology has GPUs {', '.join(map(str, topology.gpus))}, the machine {here}"
        )
    if word in ("best", "worst") and size is not None:
        return [(best if word == "best" else worst)(topology, size)]
    if size == 1 or len(machine.everyone) == 1:
        return [machine.everyone[:1]]
    found = classes(topology, size)
    members = [one.representative for one in found]
    if config.second_member:
        members += [one.second_member for one in found if one.second_member]
    return members if size else [machine.everyone[:1], *members]


def _library(config: Config) -> None:
    if importlib.util.find_spec(config.model.library) is None and config.model.library != "ringside":
        raise Refused(
            f"model.library={config.model.library}: not installed; accepted here after `pip install '.[{config.model.library}]'`"
        )


def _shown(values: Sequence[Any]) -> str:
    return ",".join(dict.fromkeys(str(value) for value in values))
