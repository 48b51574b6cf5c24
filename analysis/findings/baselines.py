"""Scaling efficiency of one record against one-GPU baselines, while a sweep runs: without scipy, which takes a second to import.

Efficiency = measured rate / (N × rate of the slowest member alone), with the images per GPU unchanged (weak scaling) or the
images per step unchanged (strong scaling, where `global_batch_size` was asked for).
"""

import json
from collections.abc import Iterable
from statistics import median
from typing import Any

from analysis.findings.provenance import part
from benchmarks.record import Record
from conf.cell import Cell

RATE = "throughput/images_per_second"
# A profiler has a pass of its own: the timed one is the same.
INCIDENTAL = ("repeat", "seed", "labels", "profiler", "profiler_options")


def condition(record: Record) -> tuple[Any, ...]:
    """What must be equal between a cell and its baseline: the machine, the software, and all that was asked but the GPUs,
    NCCL's settings, the repeat and a profiler, which has a pass of its own.
    """
    different = ("server_gpus", "batch_size") if record.cell.global_batch_size else ("server_gpus",)
    asked = sorted(item for item in flat(record.cell).items() if not no_matter(item[0], different))
    hardware = [str(record.environment.get("host")), *sorted({str(rank.get("name")) for rank in record.ranks})]
    versions, driver = part(record.environment, "versions"), part(record.environment, "gpu").get("driver")
    return (*asked, *hardware, driver, *(versions.get(name) for name in ("torch", "cuda", "nccl")))


def no_matter(name: str, different: Iterable[str]) -> bool:
    """Whether an asked thing may differ between a cell and its baseline: one GPU does not use NCCL's settings."""
    return name in different or name.startswith("nccl.")


def baselines(record: Record, records: Iterable[Record]) -> dict[int, float]:
    """{GPU: images/sec alone} for the members of a record's subset that have one; the median of several runs.

    Of several attempts at a cell the last usable one counts. A GPU is known by its UUID, where records have one.
    """
    members, wanted = uuids(record), condition(record)
    rates: dict[int, dict[tuple[str, bool], float]] = {}
    for other in sorted(records, key=lambda one: one.started_at):
        gpus = other.cell.gpus
        if len(gpus) != 1 or gpus[0] not in members or not other.usable or RATE not in other.metrics:
            continue
        if uuids(other)[gpus[0]] == members[gpus[0]] and condition(other) == wanted:
            rates.setdefault(gpus[0], {})[other.cell_key, other.drift] = other.metrics[RATE]
    return {gpu: median(values.values()) for gpu, values in rates.items()}


def uuids(record: Record) -> dict[int, str | None]:
    """{GPU: its UUID} of a record's subset; None for CPU workers."""
    gpus, planned = record.cell.gpus, record.environment.get("planned_uuids")
    known = planned if isinstance(planned, list) and len(planned) == len(gpus) else [None] * len(gpus)
    return {gpu: None if one is None else str(one) for gpu, one in zip(gpus, known, strict=True)}


def efficiency(record: Record, records: Iterable[Record]) -> float | None:
    """Share of ideal scaling against the slowest member that has a baseline; None for one GPU or without any baseline."""
    alone = baselines(record, records)
    count = len(record.cell.gpus)
    if count == 1 or not alone or RATE not in record.metrics:
        return None
    return record.metrics[RATE] / (count * min(alone.values()))


def flat(cell: Cell) -> dict[str, str]:
    """Flatten a cell's request to {"strategy.comm_hook": "bf16"}, without its GPUs and INCIDENTAL fields.

    How long throughput is measured does not change what it is: of that benchmark only the name counts.
    """
    made: dict[str, str] = {}
    for name, value in cell.to_dict().items():
        if name in INCIDENTAL or name == "gpus" or value in (None, [], ()):
            continue
        if name == "declared":  # of what the YAML says, only a change of the user's own code makes another cell
            hashes = {group: rules["sha256"] for group, rules in value.items() if "sha256" in rules}
            made |= {f"{group}.sha256": text(one) for group, one in hashes.items()}
        elif name == "benchmark" and isinstance(value, dict) and value.get("name") == "throughput":
            made["benchmark.name"] = "throughput"
        elif isinstance(value, dict):
            made |= {f"{name}.{inner}": text(one) for inner, one in value.items() if one is not None}
        else:
            made[name] = text(value)
    return made


def text(value: Any) -> str:
    """Equal values as equal text."""
    if type(value) in (int, float):
        return repr(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
