"""Where a record was made: on which machine, with which software. Records that differ in it are not compared."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.record import Record

PROVENANCE = ("machine", "driver", "torch", "CUDA", "NCCL")


class Machines:
    """Names machines: one name for one host, as long as no GPU id stands for two GPUs."""

    def __init__(self) -> None:
        self._known: list[tuple[str, dict[int, str], str]] = []  # name, {GPU: UUID}, host

    def name(self, record: Record) -> str:
        """Return `vm`, or `vm (2)` for another machine with the host name `vm`."""
        host = str(record.environment.get("host", "unknown host"))
        gpus = _uuids(record)
        for name, known, name_of_host in self._known:
            if name_of_host == host and all(known.get(gpu, uuid) == uuid for gpu, uuid in gpus.items()):
                known.update(gpus)
                return name
        number = 1 + sum(name_of_host == host for _, _, name_of_host in self._known)
        name = host if number == 1 else f"{host} ({number})"
        self._known.append((name, dict(gpus), host))
        return name


def _uuids(record: Record) -> dict[int, str]:
    """Return {GPU: UUID} as far as a record knows them."""
    listed = mapping(record.environment.get("gpu")).get("gpus")
    gpus = [mapping(one) for one in listed] if isinstance(listed, list) else []
    planned = record.environment.get("planned_uuids")
    of_cell = dict(zip(record.cell.gpus, planned, strict=False)) if isinstance(planned, list) else {}
    return {one["id"]: str(one["uuid"]) for one in gpus if type(one.get("id")) is int and "uuid" in one} | of_cell


def provenance(record: Record, machines: Machines) -> dict[str, str]:
    """Return the machine and the software of a record, by PROVENANCE; '' where the record does not say."""
    environment = record.environment
    versions, driver = mapping(environment.get("versions")), mapping(environment.get("gpu")).get("driver")
    on_gpus = record.cell.device == "cuda"
    known = {
        "machine": machines.name(record),
        "driver": driver if on_gpus else None,
        "torch": versions.get("torch"),
        "CUDA": versions.get("cuda"),
        "NCCL": versions.get("nccl") if on_gpus else None,
    }
    return {name: "" if value is None else str(value) for name, value in known.items()}


def mapping(value: object) -> Mapping[str, Any]:
    """Return a value if it is a mapping, else an empty one: a record's environment and tables may hold anything."""
    return value if isinstance(value, Mapping) else {}


def hardware(record: Record) -> str:
    """Return `4 × NVIDIA H200`, or the CPU that workers ran on: all GPUs of the machine, not only those of the subset."""
    gpus = mapping(record.environment.get("gpu")).get("gpus")
    if record.cell.device == "cuda" and isinstance(gpus, list) and gpus:
        kinds = Counter(str(mapping(gpu).get("name", "unknown GPU")) for gpu in gpus)
        return " + ".join(f"{count} × {name}" for name, count in sorted(kinds.items()))
    cpu = mapping(record.environment.get("cpu"))
    return f"CPU workers on {cpu.get('model') or 'an unknown CPU'}"


def installation(record: Record) -> str:
    """Describe the machine and the software of a record in one line."""
    versions = mapping(record.environment.get("versions"))
    parts = [hardware(record), f"host {record.environment.get('host', 'unknown')}"]
    driver = mapping(record.environment.get("gpu")).get("driver")
    parts += [f"driver {driver}"] if driver else []
    parts += [f"torch {versions['torch']}"] if "torch" in versions else []
    return ", ".join(parts)
