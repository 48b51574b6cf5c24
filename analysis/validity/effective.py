"""What a cell really used, from the NCCL logs in its folder: transport, channels, settings, algorithms.

It is compared with what the cell requested.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from analysis.errors import UnreadableInput
from analysis.nccl.log import NcclLog, parse_nccl_log
from analysis.nccl.transports import describe_transport
from analysis.study.estimates import Member
from analysis.study.study import Study, request_of
from analysis.validity.evidence import Evidence, SettingResult
from analysis.validity.hosts import (
    class_between,
    gloo_between_hosts,
    hosts_seen,
    links_of,
    nics_of_hosts,
)
from analysis.validity.settings import check_setting
from benchmarks.record import CellFolder, Record
from benchmarks.record.folder import ONCE, read_text


def read_logs(folder: CellFolder, hosts: Sequence[str] = ()) -> NcclLog | None:
    """Read NCCL's logs of one cell, a file for each rank; None if none can be read.

    `hosts` are those of the cell: an agent puts the number of its host before the names of files, from the second host on.
    """
    try:
        found = folder.nccl_logs()
        once = {
            path.name.removesuffix(ONCE): read_text(path)
            for path in found
            if path.name.endswith(ONCE)
        }
        paths = [path for path in found if not path.name.endswith(ONCE)]
        of_files = [_host_of(path.name, hosts) for path in paths] if hosts else ()
        texts = [once.get(path.stem.rpartition(".")[2], "") + read_text(path) for path in paths]
        return parse_nccl_log(*texts, hosts=of_files) if texts else None
    except (UnreadableInput, EOFError, zlib.error):
        return None


def _host_of(name: str, hosts: Sequence[str]) -> str:
    found = re.match(r"([0-9]+)-", name)
    return hosts[int(found[1])] if found and int(found[1]) < len(hosts) else hosts[0]


def observe(
    record: Record,
    folder: CellFolder,
    known: Iterable[Record],
    folder_of: Callable[[Record], CellFolder],
) -> dict[str, Any]:
    """Return the `effective` part of a record: `transport`, `link_class`, `nccl`, `findings`, …

    `known` are the other records of the study: the same cell without a setting shows whether the setting had an effect.
    CPU workers have `findings` only; on several hosts also the interfaces that gloo was given.
    """
    if record.cell.device != "cuda":
        return gloo_between_hosts(record) | {
            "findings": [_not_applicable(name, value) for name, value in record.cell.nccl.items()]
        }
    links, gpus, hosts = links_of(record), record.cell.members, record.cell.every_host
    log, tuning = read_logs(folder, hosts), read_logs(folder.tuning, hosts)
    effective: dict[str, Any] = {}
    if link_class := class_between(record):
        effective["link_class"] = link_class
    if log is not None:
        effective |= _used(log, links, gpus)
        if hosts:
            effective["nccl"] |= {"nodes": log.nodes, "nics": nics_of_hosts(log, record)}
    if tuning is not None and tuning.algorithms:
        effective["choices"] = [
            {
                "function": c.function,
                "bytes": c.size,
                "algorithm": c.algorithm,
                "protocol": c.protocol,
            }
            for c in tuning.algorithms
        ]
    evidence = (
        None if log is None else Evidence(record.cell.nccl, log, links, gpus, env_logged=True)
    )
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
        effective["findings"] = [
            {
                "code": one.code,
                "sentence": one.sentence,
                "severity": one.severity,
                "setting": one.setting,
            }
            for one in findings
        ]
    return effective


def _used(log: NcclLog, links: Mapping[str, str], gpus: Sequence[Member]) -> dict[str, Any]:
    """Return what the log says that NCCL used."""
    used: dict[str, Any] = {}
    if log.transports:
        used["transport"] = describe_transport(log, links, gpus)
    if (channels := log.channels.get("collective")) is not None:
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
