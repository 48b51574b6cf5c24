"""Names of cells for people: a run's name, without what all names share, and what the ranks are called."""

from collections.abc import Iterable

from analysis.findings import labels
from analysis.findings.study import Study
from benchmarks.record import Record

BETWEEN = labels.BETWEEN


def unit_of(study: Study) -> str:
    """Return what is counted: GPUs, or the CPU workers of a study without GPUs."""
    return "GPUs" if any(record.cell.device == "cuda" for record in study.records) else "CPU workers"


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return {name: name without the parts that all names share}; a single name stays whole."""
    parts = {name: name.split(BETWEEN) for name in names}
    shared = set.intersection(*map(set, parts.values())) if len(parts) > 1 else set()
    return {name: BETWEEN.join(part for part in split if part not in shared) or name for name, split in parts.items()}


def run_name(record: Record) -> str:
    """Return the record's name, and which of several measurements of the cell it is."""
    return BETWEEN.join([record.name, *record.marks])
