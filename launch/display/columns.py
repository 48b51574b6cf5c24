"""The columns of a sweep's table that say what each cell asks for, and a cell's verdict in words."""

from collections.abc import Sequence

from analysis.report.numbers import ABSENT
from analysis.study.names import KIND, NCCL, varying
from benchmarks.record import Record
from conf.cell import Cell, compress_hosts
from launch.plan.order import PlannedCell

GPUS, SETTINGS = "GPUs", "NCCL"
MOST_SETTINGS = 3  # of NCCL's that have a column each; a preset sets many at once
# Options that have a column of another name.
RENAMED = (*KIND, "batch_size", "precision", "optimize")


def request_columns(cells: Sequence[PlannedCell]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return what all cells have in common, by name, and {column: texts} of what tells them apart.

    The GPUs always have a column.
    """
    texts = [_request(planned.cell) for planned in cells]
    columns = {name: [request[name] for request in texts] for name in texts[0]}
    columns |= _setting_columns([planned.cell for planned in cells])
    common = {
        name: values[0]
        for name, values in columns.items()
        if name != GPUS and len(set(values)) == 1 and values[0] != ABSENT
    }
    differences = varying([planned.cell for planned in cells])
    for name in dict.fromkeys(name for options in differences for name in options):
        if name not in RENAMED and not name.startswith(NCCL):
            column = name.rpartition(".")[2]
            columns[column] = [options.get(name, ABSENT) for options in differences]
    if any(planned.cell.repeat > 0 for planned in cells):
        columns["repeat"] = [_repeat(planned) for planned in cells]
    else:
        columns["run"] = [" ".join(planned.run_suffixes) for planned in cells]
    different = {
        name: values for name, values in columns.items() if name == GPUS or len(set(values)) > 1
    }
    return common, different


def _request(cell: Cell) -> dict[str, str]:
    """Return what a cell asks for, by column."""
    request = {
        "model": cell.model.name,
        "benchmark": str(cell.benchmark["name"]),
        "strategy": str(cell.strategy["name"]),
        "nodes": compress_hosts(cell.hosts) or ABSENT,
        GPUS: ",".join(map(str, cell.gpus)),
        SETTINGS: _settings(cell, list(cell.nccl)),
        "batch": str(cell.batch_size),
        "precision": cell.precision,
        "optimize": cell.optimize,
    }
    if not cell.trains:
        for name in ("model", "strategy", "batch", "precision", "optimize"):
            request[name] = ABSENT
    return request


def _settings(cell: Cell, variables: Sequence[str]) -> str:
    settings = [f"{_short(name)}={cell.nccl[name]}" for name in sorted(variables)]
    return " ".join(settings) or ABSENT


def _short(variable: str) -> str:
    return variable.removeprefix("NCCL_")


def _setting_columns(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return a column for each NCCL setting in which cells differ, and one for the others."""
    differing_names = []
    for name in dict.fromkeys(name for cell in cells for name in sorted(cell.nccl)):
        if len({cell.nccl.get(name) for cell in cells}) > 1:
            differing_names.append(name)
    if len(differing_names) > MOST_SETTINGS:
        return {}
    shared = [[name for name in cell.nccl if name not in differing_names] for cell in cells]
    columns = {
        SETTINGS: [_settings(cell, names) for cell, names in zip(cells, shared, strict=True)]
    }
    for name in differing_names:
        columns[_short(name)] = [cell.nccl.get(name, ABSENT) for cell in cells]
    return columns


def _repeat(planned: PlannedCell) -> str:
    return " ".join(planned.run_suffixes) if planned.drift else str(planned.cell.repeat)


def verdict(record: Record | None) -> str:
    """Return a record's verdict with its codes; of a failed cell the cause."""
    if record is None:
        return ""
    failure, validity = record.failure, record.validity
    if record.state == "finished":
        if not validity.codes:
            return validity.said
        codes = f"{validity.verdict}: {', '.join(validity.codes)}"
        return validity.said.replace(validity.verdict, codes, 1)
    if failure is None or failure.cause == record.state:
        return ""
    if failure.rank is None:
        return failure.cause
    return f"{failure.cause}, rank {failure.rank}"
