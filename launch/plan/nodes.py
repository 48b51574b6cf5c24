"""Which hosts a sweep may use, which it wants, and what `gpus=` means on each of them (conf.subsets has the grammar)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.topology.fabric import Switches, placement_classes
from conf.groups import SERVER_NODES
from conf.options import Refused
from conf.resolve import named_hosts
from conf.schema import Config
from conf.subsets import host_sets, is_name, listed_hosts
from launch.engines import slurm
from launch.engines.submit import hosts_of_job
from launch.machine.devices import Machine
from launch.machine.fleet import Fleet
from launch.plan.subsets import subsets
from launch.refuse.engines import refuse_one_host_only

CLASSES = "classes"


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
        sets = host_sets(_without_classes(config), names)
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


def _without_classes(config: Config) -> list[str]:
    """Return the set of a request, `all` for classes: every host must be looked at."""
    return ["all"] if config.nodes == [CLASSES] else config.nodes


def _server_nodes(config: Config) -> list[str]:
    """Return the hosts that a request names for its servers. Raises Refused."""
    asked = config.strategy.get(SERVER_NODES) if isinstance(config.strategy, Mapping) else None
    return named_hosts(asked) if asked is not None else []


def placements(
    config: Config, names: Sequence[str], hosts: Mapping[str, PlannedHost], fabric: str
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Yield (hosts, the subset on each) of every cell that a request means.

    `names` are those of host_names, `fabric` is what Slurm says of the switches between them.

    Raises:
        Refused: a subset that not every host of its set has, or more ranks than the slots of a host.
    """
    slots = (
        {one.name: one for one in listed_hosts(config.hosts) if one.slots}
        if config.hosts is not None
        else {}
    )
    for chosen in (
        _classes(hosts, names, fabric)
        if config.nodes == [CLASSES]
        else host_sets(config.nodes, names)
    ):
        for subset in _alike(config, [hosts[name] for name in chosen]):
            for listed in (slots[name] for name in chosen if name in slots):
                if len(subset) > (listed.slots or 0):
                    raise Refused(
                        f"gpus={','.join(map(str, subset))}: is {len(subset)} ranks on each host, and {listed.name} has "
                        f"slots={listed.slots} in line {listed.line} of hosts={config.hosts}"
                    )
            yield chosen, subset


def _classes(
    hosts: Mapping[str, PlannedHost], names: Sequence[str], fabric: str
) -> list[tuple[str, ...]]:
    """Return one set for each way in which switches join hosts, of every size. Raises Refused."""
    switches, kinds = Switches.read(fabric), {name: hosts[name].topology for name in names}
    try:
        found = [
            placement_classes(names, size, switches, kinds) for size in range(1, len(names) + 1)
        ]
    except ValueError as error:
        raise Refused(f"nodes=classes: {error}") from None
    return [one.representative for of_size in found for one in of_size]


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
