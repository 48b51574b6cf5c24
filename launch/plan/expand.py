"""What `nodes=` and `gpus=` mean on the hosts that there are: the ordered subsets of each cell.

conf.subsets has the grammar.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.input_files import UnreadableInput, said
from analysis.study.names import unit
from analysis.topology.model import Topology
from analysis.topology.placement import choose_gpus
from analysis.topology.readers import parse_topology, read_topology
from analysis.topology.subset_classes import subset_classes
from conf.groups import SERVER_NODES
from conf.options import Refused
from conf.resolve import named_hosts
from conf.schema import Config
from conf.subsets import GPU_WORD, GPUS, PLAIN_WORDS, expand, host_sets, is_name, listed_hosts
from launch.engines import inside_job, slurm
from launch.engines.slurm import hosts_of_job
from launch.machine.devices import Device, Machine
from launch.plan.refusals import refuse_one_host_only


@dataclass(frozen=True)
class PlannedHost:
    """A host as a plan sees it: its devices, and the text of its topology where it was asked for
    it."""

    machine: Machine
    topology: str | None = None  # None: this machine's, or that of a file


def machine_of_topology(config: Config) -> Machine:
    """Return the machine of a topology file, to plan for it without being on it. Raises Refused."""
    gpus = _topology(config, None).gpus
    return Machine("cuda", tuple(map(Device, gpus)), gpus, 1)


def subsets(
    config: Config, machine: Machine, topology_text: str | None = None
) -> list[tuple[int, ...]]:
    """Return the ordered subsets that a request's `gpus` means on a machine.

    `topology_text` is the topology of another host. Words by link (classes, classes:K, best:K,
    worst:K, worst_order:K) need a topology; CPU workers are all alike: the first K are the best,
    the worst and the only class.

    Raises Refused: names a GPU that the machine does not have, or needs a topology that cannot be
    read.
    """
    typed = ",".join(config.gpus)
    tokens = GPUS.one_set(config.gpus, typed)
    if len(tokens) == 1 and tokens[0] in PLAIN_WORDS:
        return expand(tokens[0], machine.all_gpus)
    if len(tokens) == 1 and GPU_WORD.fullmatch(tokens[0]):
        return _by_link(config, machine, topology_text)
    subset = tuple(machine.device(token, typed).id for token in tokens)
    if not subset or len(set(subset)) < len(subset):
        raise Refused(
            f"gpus={typed}: names no {unit(machine.kind)}, or one twice; each may appear once in "
            "a subset"
        )
    return [subset]


def _by_link(config: Config, machine: Machine, topology_text: str | None) -> list[tuple[int, ...]]:
    """Return what a word by link means; `classes` starts with one GPU alone, the baseline."""
    word, _, digits = config.gpus[0].partition(":")
    size = None
    if digits:
        size = int(digits)
    all_gpus = machine.all_gpus
    if size is not None and not 1 <= size <= len(all_gpus):
        raise Refused(
            f"gpus={config.gpus[0]}: this machine has {len(all_gpus)} {unit(machine.kind)}s; "
            f"expected {word}:N with N from 1 to {len(all_gpus)}"
        )
    if machine.kind == "cpu":
        if size:
            return [all_gpus[:size]]
        return [all_gpus[: index + 1] for index in range(len(all_gpus))]
    topology = _topology(config, topology_text)
    # CUDA_VISIBLE_DEVICES may hide some of the topology's.
    ids = {device.id for device in machine.devices}
    visible = tuple(gpu for gpu in topology.devices if gpu.index in ids)
    topology = dataclasses.replace(topology, devices=visible)
    if set(topology.gpus) != ids:
        raise Refused(
            f"gpus={config.gpus[0]}: the topology has GPUs {', '.join(map(str, topology.gpus))}, "
            f"the machine {', '.join(map(str, sorted(ids)))}"
        )
    if word != "classes" and size is not None:
        placement = choose_gpus(topology, size)
        rings = {"worst": placement.worst, "worst_order": placement.worst_order}
        return [rings.get(word, placement.best).order]
    if size == 1 or len(all_gpus) == 1:
        return [all_gpus[:1]]
    link_classes = subset_classes(topology, size)
    members = []
    if not size:
        members.append(all_gpus[:1])
    members += [link_class.representative for link_class in link_classes]
    for link_class in link_classes:
        if config.second_member and link_class.second_member:
            members.append(link_class.second_member)
    return members


def _topology(config: Config, topology_text: str | None) -> Topology:
    """Return the topology of the file, else of the text, else of this machine. Raises Refused."""
    try:
        if topology_text is not None and config.topology is None:
            return parse_topology(topology_text)
        return read_topology(config.topology)
    except (UnreadableInput, OSError) as error:
        why = f"gpus={','.join(config.gpus)}: needs the machine's topology"
        if config.topology:
            why = f"topology={config.topology}: cannot be read as a topology"
        raise Refused(f"{why}; {said(error)}") from None


def host_names(configs: Sequence[Config], surroundings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts that numbers and words of nodes= count, in order.

    They are those of the file that hosts= names, those of the Slurm allocation, or all that nodes=
    names.

    Raises Refused: the file is wrong, there is no allocation, or nothing names a host.
    """
    listed = _listed(configs[0], surroundings)
    if listed is not None:
        return listed
    names: dict[str, None] = {}
    for config in configs:
        names |= dict.fromkeys(filter(is_name, config.nodes))
    if names:
        return tuple(names)
    if configs[0].engine.name == "slurm":  # a dry run, outside the job
        return tuple(f"host{index + 1}" for index in range(hosts_of_job(configs)))
    raise Refused(
        f"nodes={','.join(configs[0].nodes)}: the names of the hosts are missing; write nodes=a,b, "
        "or add hosts=FILE, a file with one host per line"
    )


def _listed(config: Config, surroundings: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the hosts of the file or of the allocation; None where nodes= names them."""
    if config.hosts is not None:
        return tuple(host.name for host in listed_hosts(config.hosts))
    if config.engine.name == "env":
        return tuple(surroundings[inside_job.NODES].split())
    if config.engine.name != "slurm" or (config.dry_run and slurm.NODES not in surroundings):
        return None
    return slurm.host_names(surroundings)


def wanted_hosts(configs: Sequence[Config], surroundings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts on which the cells of a sweep run, those of ranks first; empty for this
    machine alone.

    Raises Refused: a host that is not known, more hosts than there are, several where only one can
    be, or what host_names refuses.
    """
    if not any(config.nodes for config in configs):
        return ()
    names, first = host_names(configs, surroundings), configs[0]
    wanted: set[str] = set()
    server_hosts: dict[str, None] = {}
    for config in configs:
        sets = host_sets(config.nodes, names)
        refuse_one_host_only(config, sets)
        wanted.update(*sets)
        if isinstance(config.strategy, Mapping) and config.strategy.get(SERVER_NODES) is not None:
            server_hosts |= dict.fromkeys(named_hosts(config.strategy[SERVER_NODES]))
    for name in server_hosts:
        if name in names or _listed(first, surroundings) is None:
            continue
        where = "this job"
        if first.hosts:
            where = f"hosts={first.hosts}"
        raise Refused(
            f"strategy.{SERVER_NODES}={'+'.join(server_hosts)}: host {name} is not in {where}; "
            "expected auto and hosts that are"
        )
    rank_hosts = [name for name in names if name in wanted]
    return tuple(dict.fromkeys([*rank_hosts, *server_hosts]))


def placements(
    config: Config, names: Sequence[str], hosts: Mapping[str, PlannedHost]
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Yield (hosts, the subset on each) of every cell that a request means; `names` are those of
    host_names.

    Raises Refused: a subset that not every host of its set has, or more ranks than the slots of a
    host.
    """
    slots = {}
    if config.hosts is not None:
        slots = {host.name: host for host in listed_hosts(config.hosts) if host.slots}
    for chosen in host_sets(config.nodes, names):
        of_first: list[tuple[int, ...]] = []
        for name in chosen:
            try:
                of_host = subsets(config, hosts[name].machine, hosts[name].topology)
            except Refused as error:
                raise Refused(f"host {name}: {error}") from None
            of_first = of_first or of_host
            if of_host != of_first:
                texts = []
                for sets in (of_first, of_host):
                    text = ",".join(map(str, sets[0]))
                    if len(sets) > 1:
                        text += f" and {len(sets) - 1} more"
                    texts.append(text)
                raise Refused(
                    f"gpus={','.join(config.gpus)}: means {texts[0]} on host {chosen[0]} and "
                    f"{texts[1]} on host {name}; expected a subset that is the same on every "
                    "host, such as gpus=0"
                )
        for subset in of_first:
            for name in chosen:
                if name in slots and len(subset) > (slots[name].slots or 0):
                    raise Refused(
                        f"gpus={','.join(map(str, subset))}: is {len(subset)} ranks on each host, "
                        f"and {name} has slots={slots[name].slots} in line {slots[name].line} of "
                        f"hosts={config.hosts}"
                    )
            yield chosen, subset
