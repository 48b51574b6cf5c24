"""What `nodes=` and `gpus=` mean on the hosts that there are: the ordered subsets of each cell (conf.subsets has the grammar)."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.errors import UnreadableInput, said
from analysis.study.names import unit
from analysis.topology.model import Topology
from analysis.topology.placement import choose_gpus
from analysis.topology.readers import parse_topology, read_topology
from analysis.topology.subsets import classes
from conf.groups import SERVER_NODES
from conf.options import Refused
from conf.resolve import named_hosts
from conf.schema import Config
from conf.subsets import GPU_WORD, GPUS, PLAIN_WORDS, expand, host_sets, is_name, listed_hosts
from launch.engines import slurm
from launch.engines.submit import hosts_of_job
from launch.machine.devices import Device, Machine
from launch.machine.fleet import Fleet
from launch.plan.refusals import refuse_one_host_only


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
            return expand(tokens[0], machine.all_gpus)
        return _by_link(config, machine, told)
    subset = tuple(machine.device(token, typed).id for token in tokens)
    if not subset or len(set(subset)) < len(subset):
        raise Refused(
            f"gpus={typed}: names no {unit(machine.kind)}, or one twice; each may appear once in a subset"
        )
    return [subset]


def _by_link(config: Config, machine: Machine, told: str | None) -> list[tuple[int, ...]]:
    """Return what classes, classes:K, best:K, worst:K and worst_order:K mean; `classes` starts with one GPU alone, the baseline.

    CPU workers are all alike: the first K are the best, the worst and the only class.
    """
    word, _, number = config.gpus[0].partition(":")
    size = int(number) if number else None
    all_gpus = machine.all_gpus
    if size is not None and not 1 <= size <= len(all_gpus):
        raise Refused(
            f"gpus={config.gpus[0]}: accepted is a size of 1 to {len(all_gpus)}, the {unit(machine.kind)}s of this machine"
        )
    if machine.kind == "cpu":
        return [all_gpus[:count] for count in ([size] if size else range(1, len(all_gpus) + 1))]
    topology = topology_of(config, machine, told)
    if word != "classes" and size is not None:
        placement = choose_gpus(topology, size)
        rings = {"worst": placement.worst, "worst_order": placement.worst_order}
        return [rings.get(word, placement.best).order]
    if size == 1 or len(all_gpus) == 1:
        return [all_gpus[:1]]
    found = classes(topology, size)
    members = [one.representative for one in found]
    if config.second_member:
        members += [one.second_member for one in found if one.second_member]
    return members if size else [all_gpus[:1], *members]


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
            else read_topology(config.topology)
        )
    except (UnreadableInput, OSError) as error:
        typed = (
            f"topology={config.topology}" if config.topology else f"gpus={','.join(config.gpus)}"
        )
        raise Refused(f"{typed}: needs the machine's topology; {said(error)}") from None


@dataclass(frozen=True)
class PlannedHost:
    """A host as a plan sees it: its devices, and the text of its topology where it told it."""

    name: str
    machine: Machine
    topology: str | None = None  # None: this machine's, or that of a file


def planned_hosts(fleet: Fleet) -> dict[str, PlannedHost]:
    """Return hosts that have told what they have, by name."""
    return {
        one.name: PlannedHost(one.name, one.machine, str(one.facts.get("topology", "")))
        for one in fleet
    }


def host_names(configs: Sequence[Config], surroundings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts that numbers and words of nodes= count, in order.

    They are those of the file that hosts= names, those of the Slurm allocation, or all that nodes= names.

    Raises:
        Refused: the file is wrong, there is no allocation, or nothing names a host.
    """
    if (listed := _listed(configs[0], surroundings)) is not None:
        return listed
    named = dict.fromkeys(name for config in configs for name in config.nodes if is_name(name))
    if (
        not named and configs[0].engine.name == "slurm"
    ):  # a dry run; which hosts the job will have is not known yet
        named = dict.fromkeys(f"host{number + 1}" for number in range(hosts_of_job(configs)))
    if not named:
        raise Refused(
            f"nodes={','.join(configs[0].nodes)}: no host is known; name them, as in nodes=a,b, or a file of them with hosts=FILE"
        )
    return tuple(named)


def _listed(config: Config, surroundings: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the hosts of the file or of the allocation; None where nodes= itself names them. Raises Refused."""
    if config.hosts is not None:
        return tuple(host.name for host in listed_hosts(config.hosts))
    if config.engine.name != "slurm" or (config.dry_run and slurm.NODES not in surroundings):
        return None
    return slurm.host_names(surroundings)


def wanted_hosts(configs: Sequence[Config], surroundings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts on which the cells of a sweep run, those of ranks first; empty for this machine alone.

    Raises:
        Refused: a host that is not known, more hosts than there are, several where only one can be, or what host_names
            refuses.
    """
    if not any(config.nodes for config in configs):
        return ()
    names, first = host_names(configs, surroundings), configs[0]
    wanted: set[str] = set()
    for config in configs:
        sets = host_sets(config.nodes, names)
        refuse_one_host_only(config, sets)
        wanted.update(*sets)
    of_servers = dict.fromkeys(name for config in configs for name in _server_nodes(config))
    unknown = [name for name in of_servers if name not in names]
    if unknown and _listed(first, surroundings) is not None:
        where = f"hosts={first.hosts}" if first.hosts else "this job of Slurm"
        raise Refused(
            f"strategy.{SERVER_NODES}={'+'.join(of_servers)}: host {unknown[0]} is not in {where}; accepted are auto and hosts "
            "that are"
        )
    return tuple(dict.fromkeys([*(name for name in names if name in wanted), *of_servers]))


def _server_nodes(config: Config) -> list[str]:
    """Return the hosts that a request names for its servers. Raises Refused."""
    asked = config.strategy.get(SERVER_NODES) if isinstance(config.strategy, Mapping) else None
    return named_hosts(asked) if asked is not None else []


def placements(
    config: Config, names: Sequence[str], hosts: Mapping[str, PlannedHost]
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Yield (hosts, the subset on each) of every cell that a request means.

    `names` are those of host_names.

    Raises:
        Refused: a subset that not every host of its set has, or more ranks than the slots of a host.
    """
    slots = (
        {one.name: one for one in listed_hosts(config.hosts) if one.slots}
        if config.hosts is not None
        else {}
    )
    for chosen in host_sets(config.nodes, names):
        for subset in _alike(config, [hosts[name] for name in chosen]):
            for listed in (slots[name] for name in chosen if name in slots):
                if len(subset) > (listed.slots or 0):
                    raise Refused(
                        f"gpus={','.join(map(str, subset))}: is {len(subset)} ranks on each host, and {listed.name} has "
                        f"slots={listed.slots} in line {listed.line} of hosts={config.hosts}"
                    )
            yield chosen, subset


def _alike(config: Config, hosts: Sequence[PlannedHost]) -> list[tuple[int, ...]]:
    """Return the subsets that `gpus` means on a set of hosts: the same on each. Raises Refused."""
    first, *others = hosts
    found = _subsets(config, first)
    for host in others:
        if (there := _subsets(config, host)) != found:
            raise Refused(
                f"gpus={','.join(config.gpus)}: means {_shown(found)} on host {first.name} and {_shown(there)} on host "
                f"{host.name}; accepted is a subset that is the same on every host, such as gpus=0"
            )
    return found


def _subsets(config: Config, host: PlannedHost) -> list[tuple[int, ...]]:
    """Return the subsets that `gpus` means on one host. Raises Refused, which names the host."""
    try:
        return subsets(config, host.machine, host.topology)
    except Refused as error:
        raise Refused(f"host {host.name}: {error}") from None


def _shown(found: Sequence[tuple[int, ...]]) -> str:
    """Return the first of several subsets, and how many more there are."""
    rest = len(found) - 1
    return ",".join(map(str, found[0])) + (f" and {rest} more" if rest else "")
