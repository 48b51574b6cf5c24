"""The machine that a plan is for, and the GPU subsets that one `gpus` list means on it."""

import dataclasses

from analysis.errors import UnreadableInput, said
from analysis.study.names import unit
from analysis.topology.model import Topology
from analysis.topology.source import load_topology, parse_topology
from analysis.topology.subsets import best, classes, worst, worst_order
from conf.options import Refused
from conf.schema import Config
from conf.subsets import GPU_WORD, GPUS, PLAIN_WORDS, expand
from launch.machine.devices import Device, Machine


def machine_of_topology(config: Config) -> Machine:
    """Return the machine of a topology file, to plan for it without being on it. Raises Refused."""
    gpus = _topology(config, None).gpus
    return Machine("cuda", tuple(Device(gpu) for gpu in gpus), gpus, 1)


def subsets(config: Config, machine: Machine, told: str | None = None) -> list[tuple[int, ...]]:
    """Return the ordered subsets that a request's `gpus` means on a machine; another host has `told` its topology as text.

    Raises:
        Refused: names a GPU that the machine does not have, or needs a topology that cannot be read.
    """
    typed = ",".join(config.gpus)
    tokens = GPUS.one_set(config.gpus, typed)
    if len(tokens) == 1 and GPU_WORD.fullmatch(tokens[0]):
        if tokens[0] in PLAIN_WORDS:
            return expand(tokens[0], machine.everyone)
        return _by_link(config, machine, told)
    subset = tuple(machine.device(token, typed).id for token in tokens)
    if not subset or len(set(subset)) < len(subset):
        raise Refused(
            f"gpus={typed}: names no {unit(machine.kind)}, or one twice; each may appear once in a subset"
        )
    return [subset]


def _by_link(config: Config, machine: Machine, told: str | None) -> list[tuple[int, ...]]:
    """Return what classes, classes:K, best:K, worst:K and worst_order:K mean; `classes` starts with one GPU alone, the baseline.

    advise:K is best:K here: launch.plan.advised asks the forecasts first.

    CPU workers are all alike: the first K are the best, the worst and the only class.
    """
    word, _, number = config.gpus[0].partition(":")
    size = int(number) if number else None
    everyone = machine.everyone
    if size is not None and not 1 <= size <= len(everyone):
        raise Refused(
            f"gpus={config.gpus[0]}: accepted is a size of 1 to {len(everyone)}, the {unit(machine.kind)}s of this machine"
        )
    if machine.kind == "cpu":
        return [everyone[:count] for count in ([size] if size else range(1, len(everyone) + 1))]
    topology = topology_of(config, machine, told)
    chosen = {"best": best, "advise": best, "worst": worst, "worst_order": worst_order}.get(word)
    if chosen is not None and size is not None:
        return [chosen(topology, size)]
    if size == 1 or len(everyone) == 1:
        return [everyone[:1]]
    found = classes(topology, size)
    members = [one.representative for one in found]
    if config.second_member:
        members += [one.second_member for one in found if one.second_member]
    return members if size else [everyone[:1], *members]


def topology_of(config: Config, machine: Machine, told: str | None) -> Topology:
    """Return the links between the machine's GPUs: CUDA_VISIBLE_DEVICES may hide some of the topology's. Raises Refused."""
    topology = _topology(config, told)
    ours = {device.id for device in machine.devices}
    topology = dataclasses.replace(
        topology, devices=tuple(gpu for gpu in topology.devices if gpu.index in ours)
    )
    if set(topology.gpus) != ours:
        here = ", ".join(str(device.id) for device in machine.devices)
        raise Refused(
            f"gpus={config.gpus[0]}: the topology has GPUs {', '.join(map(str, topology.gpus))}, the machine {here}"
        )
    return topology


def _topology(config: Config, told: str | None) -> Topology:
    """Return the topology of the file that was named, else that of a text, else of this machine. Raises Refused."""
    try:
        return (
            parse_topology(told)
            if told is not None and config.topology is None
            else load_topology(config.topology)
        )
    except (UnreadableInput, OSError) as error:
        typed = (
            f"topology={config.topology}" if config.topology else f"gpus={','.join(config.gpus)}"
        )
        raise Refused(f"{typed}: needs the machine's topology; {said(error)}") from None
