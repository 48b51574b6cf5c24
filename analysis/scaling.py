"""Scaling efficiency against one-GPU baselines.

Efficiency = measured rate / (N × rate of the slowest member alone), with the images per GPU unchanged (weak scaling) or the
images per step unchanged (strong scaling, where `global_batch_size` was asked for).
"""

from collections.abc import Iterable
from statistics import median
from typing import Any

from benchmarks.record import Record

RATE = "throughput/images_per_second"


def condition(record: Record) -> tuple[Any, ...]:
    """What must be equal between a cell and its baseline: the kind of GPU, torch, and all that was asked but
    the GPUs, NCCL's settings, the repeat and a profiler, which has a pass of its own."""
    different = {"gpus", "nccl", "repeat", "seed", "labels", "server_gpus", "profiler", "profiler_options"} | (
        {"batch_size"} if record.cell.get("global_batch_size") else set()
    )
    asked = sorted((name, repr(value)) for name, value in record.cell.items() if name not in different)
    hardware = sorted({str(rank.get("name")) for rank in record.ranks})
    return (*asked, *hardware, record.environment.get("versions", {}).get("torch"))


def baselines(record: Record, records: Iterable[Record]) -> dict[int, float]:
    """{GPU: images/sec alone} for the members of a record's subset that have one; the median of several runs."""
    members = set(record.cell["gpus"])
    wanted = condition(record)
    rates: dict[int, list[float]] = {}
    for other in records:
        gpus = other.cell["gpus"]
        if (
            len(gpus) == 1
            and gpus[0] in members
            and other.usable
            and RATE in other.metrics
            and condition(other) == wanted
        ):
            rates.setdefault(gpus[0], []).append(other.metrics[RATE])
    return {gpu: median(values) for gpu, values in rates.items()}


def efficiency(record: Record, records: Iterable[Record]) -> float | None:
    """Share of ideal scaling against the slowest member that has a baseline; None for one GPU or without any baseline."""
    alone = baselines(record, records)
    count = len(record.cell["gpus"])
    if count == 1 or not alone or RATE not in record.metrics:
        return None
    return record.metrics[RATE] / (count * min(alone.values()))
