"""What a cell really used, from its NCCL logs: transport, channels, settings, algorithms.

It is compared with what the cell requested.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from analysis.input_files import UnreadableInput
from analysis.nccl.log import NcclLog, describe_transport, parse_nccl_log
from analysis.study.conditions import request_of
from analysis.study.provenance import facts_of_hosts, interface_of
from analysis.study.study import Study
from analysis.topology.model import NET, best_first, distinct_classes
from analysis.validity.fast_paths import NEED_LINES, asked_of_nccl
from analysis.validity.nccl_settings import Evidence, SettingResult, check_setting
from benchmarks.record import CellFolder, Record
from benchmarks.record.folder import ONCE, read_text

MOST_WARNINGS = 20


def read_logs(folder: CellFolder, hosts: Sequence[str] = ()) -> NcclLog | None:
    """Read NCCL's logs of one cell, a file for each rank; None if none can be read.

    `hosts` are those of the cell: an agent puts the number of its host before the names of files,
    from the second host on.
    """
    once, texts, of_files = {}, [], []
    try:
        for path in folder.nccl_logs():
            if path.name.endswith(ONCE):
                once[path.name.removesuffix(ONCE)] = read_text(path)
        for path in folder.nccl_logs():
            if path.name.endswith(ONCE):
                continue
            process = path.stem.rpartition(".")[2]
            texts.append(once.get(process, "") + read_text(path))
            prefix = re.match(r"([0-9]+)-", path.name)
            if prefix and int(prefix[1]) < len(hosts):
                of_files.append(hosts[int(prefix[1])])
            else:
                of_files += hosts[:1]
        if texts:
            return parse_nccl_log(*texts, hosts=of_files)
    except (UnreadableInput, EOFError, zlib.error):
        return None  # what rests on the logs is then unchecked
    return None


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
    requested = record.cell.nccl
    if record.cell.device != "cuda":
        findings = []
        for name, value in requested.items():
            text = f"{name}={value}: not applicable, CPU workers communicate through gloo"
            findings.append(SettingResult("setting_ignored", text, "not applicable", name))
        return gloo_between_hosts(record) | {"findings": list(map(dataclasses.asdict, findings))}
    hosts, links = record.cell.every_host, links_of(record)
    log, tuning = read_logs(folder, hosts), read_logs(folder.tuning, hosts)
    effective: dict[str, Any] = {}
    link_class = class_between(record)
    if link_class:
        effective["link_class"] = link_class
    evidence = None
    if log is not None:
        effective |= _used(log, links, record)
        evidence = Evidence(requested, log, links, record.cell.members)
        if not NEED_LINES.isdisjoint(asked_of_nccl(record.cell)):
            lines = (*log.paths, *(tuning.paths if tuning else ()))
            effective["nccl"]["paths"] = list(dict.fromkeys(lines))[:MOST_WARNINGS]
    if tuning is not None and tuning.algorithms:
        effective["choices"] = choices_of(tuning)
    findings = []
    study = Study.of(())
    if requested:
        study = Study.of(known)
    for name, value in requested.items():
        reference_log, choices = None, None
        reference = _without(record, name, study)
        if reference:
            reference_log = read_logs(folder_of(reference), hosts)
        if name in ("NCCL_ALGO", "NCCL_PROTO"):
            choices = tuning  # the timed pass logs no choice of algorithm
        findings += check_setting(name, value, evidence, reference_log, choices)
    findings += hosts_seen(log, record)
    if findings:
        effective["findings"] = [dataclasses.asdict(finding) for finding in findings]
    return effective


def choices_of(log: NcclLog) -> list[dict[str, Any]]:
    """Return NCCL's choices as a record has them: function, bytes, algorithm, protocol."""
    rows = []
    for choice in log.algorithms:
        row = {"function": choice.function, "bytes": choice.size}
        rows.append(row | {"algorithm": choice.algorithm, "protocol": choice.protocol})
    return rows


def _used(log: NcclLog, links: Mapping[str, str], record: Record) -> dict[str, Any]:
    used: dict[str, Any] = {}
    if log.transports:
        used["transport"] = describe_transport(log, links, record.cell.members)
    if log.channels.get("collective") is not None:
        used["channels"] = log.channels["collective"]
    used["nccl"] = {
        "version": log.version,
        "channels": log.channels,
        "settings": log.settings,
        "transports": log.transports,
        "multicast": log.multicast,
        "warnings": log.warnings[:MOST_WARNINGS],
    }
    if log.no_peer_access:
        used["nccl"]["no_peer_access"] = log.no_peer_access[:MOST_WARNINGS]
    if record.cell.every_host:
        nics: dict[str, set[str]] = {}  # the network devices that NCCL used on each host
        for rank, names in log.nics.items():
            if rank < record.cell.world_size:
                nics.setdefault(record.cell.places[rank].host, set()).update(names)
        used["nccl"]["nodes"] = log.nodes
        used["nccl"]["nics"] = {host: sorted(names) for host, names in nics.items()}
    return used


def _without(record: Record, setting: str, study: Study) -> Record | None:
    """Return the newest finished record of the same cell without one NCCL setting."""
    wanted = request_of(record.cell)
    wanted.pop(f"nccl.{setting}", None)
    for candidate in reversed(study.records):
        is_same = candidate.cell.members == record.cell.members
        if candidate.state == "finished" and is_same and study.single(candidate).request == wanted:
            return candidate
    return None


def links_of(record: Record) -> Mapping[str, str]:
    """Return the link class of every pair of GPUs: {"0-1": "NV18"}, with hosts {"a:0-1": …}."""
    links: dict[str, str] = {}
    for host, facts in facts_of_hosts(record).items():
        for pair, word in facts.get("links", {}).items():
            if record.cell.hosts:
                pair = f"{host}:{pair}"
            links[pair] = word
    return links


def class_between(record: Record) -> str:
    """Return the distinct link classes of a cell, best first: `NV18`, several hosts `NV18+NET`."""
    cell = record.cell
    if not cell.hosts:
        return distinct_classes(cell.gpus, record.environment.get("links", {}))
    facts = facts_of_hosts(record)
    classes: set[str] = set()
    for host in cell.hosts:
        classes.update(distinct_classes(cell.gpus, facts[host].get("links", {})).split("+"))
    if len(cell.hosts) > 1:
        classes.add(NET)
    return "+".join(best_first(classes - {""}))


def gloo_between_hosts(record: Record) -> dict[str, Any]:
    """Return the link class and the transport of CPU workers on several hosts: `TCP/eth0`.

    Gloo does not say what it used. It was given one interface on each host, and uses no other.
    """
    if len(record.cell.every_host) < 2:
        return {}
    used = {}
    if len(record.cell.hosts) > 1:
        used["link_class"] = class_between(record)
    names = [interface_of(facts)[0] for facts in facts_of_hosts(record).values()]
    if len(set(names)) == 1:
        names = names[:1]
    if all(names):
        used["transport"] = f"TCP/{'↔'.join(names)}"
    return used


def hosts_seen(log: NcclLog | None, record: Record) -> list[SettingResult]:
    """Tell whether NCCL sees another number of hosts than the cell has."""
    hosts = len(record.cell.hosts)
    if log is None or not hosts or log.nodes in (None, hosts):
        return []
    if log.nranks != record.cell.world_size:
        return []
    nodes = f"{log.nodes} hosts"
    if log.nodes == 1:
        nodes = "1 host"
    sees = f"NCCL sees the ranks on {nodes}, and the run has {hosts}"
    return [SettingResult("hosts_unexpected", sees, "suspect")]
