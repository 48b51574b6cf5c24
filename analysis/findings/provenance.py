"""Where a record was made: which machine, with which software. Records that differ in it are not compared."""

from collections.abc import Mapping
from typing import Any

from benchmarks.record import Record

SURROUNDINGS = ("machine", "driver", "torch", "CUDA", "NCCL")


class Machines:
    """Which records are of one machine: one host, and no GPU id stands for two GPUs."""

    def __init__(self) -> None:
        self._known: list[tuple[str, dict[int, str], str]] = []

    def name(self, record: Record) -> str:
        """`vm`, and `vm (2)` for another machine of that name."""
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
    listed = part(record.environment, "gpu").get("gpus")
    known = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    planned = record.environment.get("planned_uuids")
    mine = dict(zip(record.cell.gpus, planned, strict=False)) if isinstance(planned, list) else {}
    return {one["id"]: str(one["uuid"]) for one in known if type(one.get("id")) is int and "uuid" in one} | mine


def part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested object of a record; empty where it is absent or something else."""
    found = whole.get(name)
    return found if isinstance(found, dict) else {}


def surroundings(record: Record, machines: Machines) -> dict[str, str]:
    """The machine and the software of a record, by SURROUNDINGS; '' where the record does not say."""
    environment = record.environment
    versions, gpu = part(environment, "versions"), part(environment, "gpu")
    known = {
        "machine": machines.name(record),
        "driver": gpu.get("driver") if record.cell.device == "cuda" else None,
        "torch": versions.get("torch"),
        "CUDA": versions.get("cuda"),
        "NCCL": versions.get("nccl") if record.cell.device == "cuda" else None,
    }
    return {name: "" if value is None else str(value) for name, value in known.items()}
