"""What connected the hosts of a cell: link classes, the interfaces that gloo was given, the network devices that NCCL used."""

from collections.abc import Mapping
from typing import Any

from analysis.nccl.log import NcclLog
from analysis.study.provenance import facts_of_hosts, interface_of, mapping
from analysis.topology.model import NET, best_first, distinct_classes
from analysis.validity.evidence import SettingResult
from benchmarks.record import Record

HOSTS_UNEXPECTED = "hosts_unexpected"  # a code
GLOO = "TCP"


def links_of(record: Record) -> Mapping[str, str]:
    """Return the link class of every pair of GPUs that the record names: {"0-1": "NV18"}, with hosts {"a:0-1": "NV18"}."""
    if not record.cell.hosts:
        links: Mapping[str, str] = record.environment.get("links", {})
        return links
    return {
        f"{host}:{pair}": str(word)
        for host, facts in facts_of_hosts(record).items()
        for pair, word in mapping(facts.get("links")).items()
    }


def class_between(record: Record) -> str:
    """Return the distinct link classes of a cell, best first: `NV18`, with several hosts `NV18+NET`."""
    cell = record.cell
    if not cell.hosts:
        return distinct_classes(cell.gpus, record.environment.get("links", {}))
    facts = facts_of_hosts(record)
    inside = [distinct_classes(cell.gpus, mapping(facts[host].get("links"))) for host in cell.hosts]
    across = [NET] if len(cell.hosts) > 1 else []
    return "+".join(
        best_first(word for words in (*inside, *across) for word in words.split("+") if word)
    )


def gloo_between_hosts(record: Record) -> dict[str, Any]:
    """Return the link class and the transport of CPU workers on several hosts: `TCP/eth0`; empty on one host.

    Gloo does not say what it used. It was given one interface on each host, and uses no other.
    """
    if len(record.cell.every_host) < 2:
        return {}
    names = {host: interface_of(facts).name for host, facts in facts_of_hosts(record).items()}
    found = {"link_class": class_between(record)} if len(record.cell.hosts) > 1 else {}
    if not all(names.values()):
        return found
    ways = {f"{GLOO}/{name}" for name in names.values()}
    return found | {
        "transport": ways.pop() if len(ways) == 1 else f"{GLOO}/{'↔'.join(names.values())}"
    }


def nics_of_hosts(log: NcclLog, record: Record) -> dict[str, list[str]]:
    """Return {host: the network devices that NCCL used there}."""
    found: dict[str, set[str]] = {}
    for rank, names in log.nics.items():
        if rank < record.cell.world_size:
            found.setdefault(record.cell.places[rank].host, set()).update(names)
    return {host: sorted(names) for host, names in found.items()}


def hosts_seen(log: NcclLog | None, record: Record) -> list[SettingResult]:
    """Tell whether NCCL sees another number of hosts than the cell has: then it connects ranks otherwise than hosts must."""
    hosts = len(record.cell.hosts)
    if (
        log is None
        or not hosts
        or log.nodes in (None, hosts)
        or log.nranks != record.cell.world_size
    ):
        return []
    sees = f"NCCL sees the ranks on {log.nodes} host{'' if log.nodes == 1 else 's'}, and the cell has {hosts}"
    return [SettingResult(HOSTS_UNEXPECTED, sees, "suspect")]
