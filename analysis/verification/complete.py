"""Complete a record from the files of its cell's folder: the launching process and `verify` do so.

A value that every record should have is added here, and a row of METRICS says since which schema.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from analysis.cost import to_record
from analysis.prediction.recorded_forecast import with_forecast
from analysis.validity.effective import observe
from analysis.validity.gpu_samples import summary
from benchmarks.derived import FIELDS, IncompleteLines, RankLines, derived_values, reported
from benchmarks.record import CellFolder, Failure, Record, as_read, read_lines
from conf import groups
from conf.cell import Cell

# Dense peaks in 10¹² operations a second, {GPU: (half precision, TF32, float32)}: NVIDIA's data
# sheets of H200 (2024), H100 (2023) and A100 (2021); those of H200 and H100 name sparse ones, twice
# as high.
PEAK_TFLOPS = {
    "NVIDIA H200": (989.4, 494.7, 66.9),
    "NVIDIA H100 80GB HBM3": (989.4, 494.7, 66.9),
    "NVIDIA H100 PCIe": (756.0, 378.0, 51.2),
    "NVIDIA A100-SXM4-40GB": (312.0, 156.0, 19.5),
    "NVIDIA A100-SXM4-80GB": (312.0, 156.0, 19.5),
}
COLUMN = {"tf32": 1, "fp32": 2}  # else half precision


def device_use(record: Record, power_w: float | None) -> dict[str, float]:
    """Return metrics of a training cell; absent where model, GPU or power is not known.

    `power_w` is that of all its GPUs.
    """
    cell, used = record.cell, {}
    rate = record.metrics.get("throughput/images_per_second")
    if rate is None:
        return {}
    if power_w:
        used["energy/images_per_joule"] = rate / power_w
    gigaflop = groups.training_gigaflop(cell.model.name, cell.model.image_size)
    if gigaflop is not None:
        used["compute/tflops"] = gigaflop * rate / cell.world_size / 1e3
        peaks = PEAK_TFLOPS.get(str(record.ranks[0].get("name")) if record.ranks else "")
        if peaks is not None:
            used["compute/mfu"] = used["compute/tflops"] / peaks[COLUMN.get(cell.precision, 0)]
    return used


INCOMPLETE = "the lines of the ranks are incomplete: "


def lines_of_ranks(cell: Cell, folder: CellFolder) -> RankLines:
    """Return the lines of every rank of a cell."""
    return {rank: list(read_lines(folder.rank_lines(rank))) for rank in range(cell.world_size)}


def complete(
    record: Record,
    folder: CellFolder,
    lines: RankLines,
    known: Iterable[Record],
    folder_of: Callable[[Record], CellFolder],
) -> tuple[Record, str]:
    """Return the record with every value that its files give, and what its benchmark prints.

    The record is not yet judged. `lines` are those of its ranks. `known` are the other records of
    the study: they show whether an NCCL setting had an effect.
    A finished cell whose lines are incomplete becomes a failed one, without values of its lines.
    """
    output = ""
    try:
        values = as_read(derived_values(lines, record.cell) or {})
    except (IncompleteLines, TypeError, ValueError) as error:
        failure = record.failure or Failure("exception", None, f"{INCOMPLETE}{error}")
        record = dataclasses.replace(record, failure=failure)
        if record.state == "finished":
            record = dataclasses.replace(record, state="failed")
    else:
        output = values.get("output", "")
        record = dataclasses.replace(record, **{name: values.get(name, {}) for name in FIELDS})
    record = _with_reports(record, folder, lines)
    metrics, checks = summary(folder)
    power_w = checks.get("gpu_samples", {}).get("counted_power_w")
    metrics |= device_use(record, power_w)
    cost = to_record(folder, lines, record.started_at, record.ended_at)
    if cost is not None:
        record = dataclasses.replace(record, tables=record.tables | cost.tables)
        if record.state == "finished":
            metrics = dict(cost.metrics) | metrics
    record = dataclasses.replace(
        record, metrics=record.metrics | metrics, checks=record.checks | checks
    )
    record = dataclasses.replace(record, effective=observe(record, folder, known, folder_of))
    return with_forecast(record), output


def _with_reports(record: Record, folder: CellFolder, lines: RankLines) -> Record:
    """Add what ranks and servers said of themselves when they started.

    `versions_differ` are the versions, by rank, that are not the same on all; on one host their
    threads too.
    """
    cell = record.cell
    environment: dict[str, Any] = dict(record.environment)
    ranks, servers = [], []
    of_ranks: dict[str, list[str]] = {}
    for number in range(cell.world_size + cell.servers):
        own = lines.get(number)
        if own is None:
            own = list(read_lines(folder.rank_lines(number)))
        report = reported(own)
        if report is None:
            continue
        facts, versions = report
        environment.setdefault("versions", versions)
        if number >= cell.world_size:
            servers.append(facts)
            continue
        ranks.append(facts)
        if not cell.hosts:
            versions = versions | {"threads": str(facts.get("threads"))}
        for name, version in versions.items():
            of_ranks.setdefault(name, []).append(version)
    if servers:
        environment["servers"] = servers
    checks = dict(record.checks)
    if cell.world_size > 1:
        checks["versions_differ"] = {}
        for name, differing in of_ranks.items():
            if len(set(differing)) > 1:
                checks["versions_differ"][name] = differing
    return dataclasses.replace(record, environment=environment, ranks=ranks, checks=checks)
