"""The hardware of a record."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.record import Record


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


def short_hardware(record: Record) -> str:
    """Return `4 × H200`, or `CPU workers`, for names."""
    if record.cell.device != "cuda":
        return "CPU workers"
    found = hardware(record)
    return "GPUs" if found.startswith("CPU workers") else found.replace("NVIDIA ", "").replace("GeForce ", "")
