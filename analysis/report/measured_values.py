"""Read values of records: medians over runs with their range, rows of tables, finite numbers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from analysis.findings.model import Estimate
from analysis.findings.runs import middle, named
from analysis.findings.study import Study
from analysis.report.numbers import estimate, finite, of_metric
from benchmarks.record import Record
from benchmarks.record.metrics import interval

RATE = "throughput/images_per_second"
Group = tuple[Record, ...]  # runs of equal cells


def bounded(group: Sequence[Record], metric: str) -> Estimate | None:
    """Return the median over runs, with the interval of the run if it is only one."""
    value = middle(group, metric)
    if value is None:
        return None
    ends = interval(metric, group[0].within_run) if len(group) == 1 else None
    return Estimate(value, *ends) if ends else Estimate(value)


def records_of(study: Study, benchmark: str) -> list[Record]:
    """Return the usable records of a benchmark."""
    return [record for record in study.usable if named(record, "benchmark") == benchmark]


def first_records(records: Iterable[Record]) -> dict[str, Record]:
    """Return {benchmark: its first record}, in the order in which the benchmarks first ran."""
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(named(record, "benchmark"), record)
    return first


def mappings(table: object) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a record's table that are mappings."""
    for row in table if isinstance(table, list) else ():
        if isinstance(row, Mapping):
            yield row


def numbers(values: object) -> list[float]:
    """Return the finite numbers of a list."""
    return [one for value in values if (one := finite(value)) is not None] if isinstance(values, list) else []


def median_and_range(group: Group, metric: str) -> str:
    """Return the median of a metric over runs with the lowest and the highest: `377 (375 to 378)`; empty where no run has it."""
    values = [value for record in group if (value := record.metrics.get(metric)) is not None and math.isfinite(value)]
    if not values:
        return ""
    spread = (min(values), max(values)) if len(values) > 1 else (None, None)
    return estimate(Estimate(middle(group, metric) or 0.0, *spread), of_metric(metric))
