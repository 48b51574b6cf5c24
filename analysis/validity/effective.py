"""What a cell really used, from the NCCL logs in its folder: transport, channels, settings, algorithms.

It is compared with what the cell requested.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from analysis.errors import UnreadableInput
from analysis.nccl.log import NcclLog, parse_nccl_log
from analysis.nccl.transports import describe_transport
from analysis.study.conditions import request_of
from analysis.study.estimates import Member
from analysis.study.provenance import facts_of_hosts, interface_of
from analysis.study.study import Study
from analysis.topology.model import NET, best_first, distinct_classes
from analysis.validity.nccl_settings import Evidence, SettingResult, check_setting
from benchmarks.record import CellFolder, Record
from benchmarks.record.folder import ONCE, read_text

HOSTS_UNEXPECTED = "hosts_unexpected"  # a code
GLOO = "TCP"


def read_logs(folder: CellFolder, hosts: Sequence[str] = ()) -> NcclLog | None:
    """Read NCCL's logs of one cell, a file for each rank; None if none can be read.

    `hosts` are those of the cell: an agent puts the number of its host before the names of files,
    from the second host on.
    """
    once, texts, of_files = {}, [], []
    try:
        paths = folder.nccl_logs()
        for path in paths:
            if path.name.endswith(ONCE):
                once[path.name.removesuffix(ONCE)] = read_text(path)
        for path in paths:
            if path.name.endswith(ONCE):
                continue
            process = path.stem.rpartition(".")[2]
            texts.append(once.get(process, "") + read_text(path))
            if hosts:
                of_files.append(_host_of(path.name, hosts))
        if not texts:
            return None
        return parse_nccl_log(*texts, hosts=of_files)
    except (UnreadableInput, EOFError, zlib.error):
        return None


def _host_of(name: str, hosts: Sequence[str]) -> str:
    number = re.match(r"([0-9]+)-", name)
    if number and int(number[1]) < len(hosts):
        return hosts[int(number[1])]
    return hosts[0]


def observe(
    record: Record,
    folder: CellFolder,
    known: Iterable[Record],
    folder_of: Callable[[Record], CellFolder],
) -> dict[str, Any]:
    """Return the `effective` part of a record: `transport`, `link_class`, `nccl`, `findings`, …

    `known` are the other records of the study: the same cell without a setting shows whether the
    setting had an effect. CPU workers have `findings` only; on several hosts also the interfaces
    that gloo was given.
    """
    if record.cell.device != "cuda":
        return gloo_between_hosts(record) | {
            "findings": [_not_applicable(name, value) for name, value in record.cell.nccl.items()]
        }
    links, gpus, hosts = links_of(record), record.cell.members, record.cell.every_host
    log, tuning = read_logs(folder, hosts), read_logs(folder.tuning, hosts)
    effective: dict[str, Any] = {}
    link_class = class_between(record)
    if link_class:
        effective["link_class"] = link_class
    if log is not None:
        effective |= _used(log, links, gpus)
        if hosts:
            effective["nccl"] |= {"nodes": log.nodes, "nics": nics_of_hosts(log, record)}
    if tuning is not None and tuning.algorithms:
        effective["choices"] = []
        for choice in tuning.algorithms:
            effective["choices"].append(
                {
                    "function": choice.function,
                    "bytes": choice.size,
                    "algorithm": choice.algorithm,
                    "protocol": choice.protocol,
                }
            )
    evidence = None
    if log is not None:
        evidence = Evidence(record.cell.nccl, log, links, gpus, env_logged=True)
    findings: list[SettingResult] = []
    study = Study.of(known if record.cell.nccl else ())
    for name, value in record.cell.nccl.items():
        reference = without(record, name, study)
        reference_log = read_logs(folder_of(reference), hosts) if reference else None
        # the timed pass logs no choice of algorithm; the tuning pass does
        choices = tuning if name in ("NCCL_ALGO", "NCCL_PROTO") else None
        findings += check_setting(name, value, evidence, reference_log, choices)
    findings += hosts_seen(log, record)
    if findings:
        effective["findings"] = [dataclasses.asdict(finding) for finding in findings]
    return effective


def _used(log: NcclLog, links: Mapping[str, str], gpus: Sequence[Member]) -> dict[str, Any]:
    """Return what the log says that NCCL used."""
    used: dict[str, Any] = {}
    if log.transports:
        used["transport"] = describe_transport(log, links, gpus)
    channels = log.channels.get("collective")
    if channels is not None:
        used["channels"] = channels
    used["nccl"] = {
        "version": log.version,
        "channels": log.channels,
        "settings": log.settings,
        "transports": log.transports,
        "multicast": log.multicast,
        "warnings": log.warnings[:20],
    }
    return used


def _not_applicable(name: str, value: str) -> dict[str, str]:
    sentence = f"{name}={value}: not applicable, CPU workers communicate through gloo"
    return {
        "code": "setting_ignored",
        "sentence": sentence,
        "severity": "not applicable",
        "setting": name,
    }


def without(record: Record, setting: str, study: Study) -> Record | None:
    """Return the newest finished record of a study with the same cell without one NCCL setting; None if there is none."""
    wanted = {
        name: value for name, value in request_of(record.cell).items() if name != f"nccl.{setting}"
    }
    same = [
        other
        for other in study.records
        if other.state == "finished"
        and other.cell.members == record.cell.members
        and study.single(other).request == wanted
    ]
    return same[-1] if same else None


# What connected the hosts of a cell: link classes, the interfaces of gloo, the network devices of
# NCCL.


def links_of(record: Record) -> Mapping[str, str]:
    """Return the link class of every pair of GPUs that the record names: {"0-1": "NV18"}, with hosts {"a:0-1": "NV18"}."""
    if not record.cell.hosts:
        links: Mapping[str, str] = record.environment.get("links", {})
        return links
    return {
        f"{host}:{pair}": str(word)
        for host, facts in facts_of_hosts(record).items()
        for pair, word in facts.get("links", {}).items()
    }


def class_between(record: Record) -> str:
    """Return the distinct link classes of a cell, best first: `NV18`, with several hosts `NV18+NET`."""
    cell = record.cell
    if not cell.hosts:
        return distinct_classes(cell.gpus, record.environment.get("links", {}))
    facts = facts_of_hosts(record)
    inside = [distinct_classes(cell.gpus, facts[host].get("links", {})) for host in cell.hosts]
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
