"""What a cell really used, from the NCCL logs in its folder: transport, channels, settings, algorithms, and how that
compares with what was asked.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from analysis.errors import UnreadableInput
from analysis.findings.baselines import INCIDENTAL
from analysis.nccl.log import parse_nccl_log
from analysis.nccl.model import NcclLog
from analysis.nccl.transports import describe_transport
from analysis.topology.link_classes import distinct_classes
from analysis.validity.settings import SettingResult, check_settings
from benchmarks.record import Record

# Folder inside a cell's for the untimed pass whose logs name every collective's algorithm and protocol.
TUNING_FOLDER = "tuning"


def read_logs(folder: Path) -> NcclLog | None:
    """NCCL's logs of one cell (`<cell>/nccl/*.log`, a file for each rank); None where there is none to read."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted((folder / "nccl").glob("*.log"))]
    try:
        return parse_nccl_log(*texts) if texts else None
    except UnreadableInput:
        return None


def observe(
    record: Record, folder: Path, known: Iterable[Record], folder_of: Callable[[Record], Path]
) -> dict[str, Any]:
    """The `effective` part of a record: `transport`, `link_class`, `nccl`, `findings`, …; only findings on CPU workers.

    `known` are the other records of the study: the same cell without a setting tells whether it had an effect.
    """
    if record.cell["device"] != "cuda":
        return {"findings": [_not_applicable(name, value) for name, value in record.cell["nccl"].items()]}
    links: Mapping[str, str] = record.environment.get("links", {})
    gpus = record.cell["gpus"]
    effective: dict[str, Any] = {}
    if link_class := distinct_classes(gpus, links):
        effective["link_class"] = link_class
    log = read_logs(folder)
    tuning = read_logs(folder / TUNING_FOLDER)
    if log is not None:
        if log.transports:
            effective["transport"] = describe_transport(log, links, gpus)
        if (channels := log.channels.get("collective")) is not None:
            effective["channels"] = channels
        effective["nccl"] = {
            "version": log.version,
            "channels": log.channels,
            "settings": log.settings,
            "transports": log.transports,
            "multicast": log.multicast,
            "warnings": log.warnings[:20],
        }
    if tuning is not None and tuning.algorithms:
        effective["choices"] = [
            {"function": c.function, "bytes": c.size, "algorithm": c.algorithm, "protocol": c.protocol}
            for c in tuning.algorithms
        ]
    findings: list[SettingResult] = []
    others = list(known)
    for name, value in record.cell["nccl"].items():
        reference = without(record, name, others)
        reference_log = read_logs(folder_of(reference)) if reference else None
        found = check_settings(record.cell["nccl"], log, reference_log, links, gpus=gpus, env_logged=True)
        found = [one for one in found if one.setting in (name, None)]
        if (
            name in ("NCCL_ALGO", "NCCL_PROTO") and tuning is not None
        ):  # the timed pass logs no choice; the tuning pass does
            found = [one for one in found if one.code != "algorithm_unexpected"]
            found += [
                one
                for one in check_settings({name: value}, tuning, None, links, gpus=gpus)
                if one.code == "algorithm_unexpected"
            ]
        findings += found
    if findings:
        effective["findings"] = [
            {"code": one.code, "sentence": one.sentence, "severity": one.severity, "setting": one.setting}
            for one in findings
        ]
    return effective


def _not_applicable(name: str, value: str) -> dict[str, str]:
    sentence = f"{name}={value}: not applicable, CPU workers communicate through gloo"
    return {"code": "setting_ignored", "sentence": sentence, "severity": "unchecked", "setting": name}


def without(record: Record, setting: str, known: Iterable[Record]) -> Record | None:
    """The newest finished record of the same cell without one NCCL setting."""
    wanted = _condition(record.cell, setting)
    same = [other for other in known if other.state == "finished" and _condition(other.cell, None) == wanted]
    return same[-1] if same else None


def _condition(cell: Mapping[str, Any], removed: str | None) -> dict[str, Any]:
    kept = {name: value for name, value in cell.items() if name not in INCIDENTAL}
    return {**kept, "nccl": {name: value for name, value in cell["nccl"].items() if name != removed}}
