"""Read values of records: medians over runs with the interval of the next run, rows of tables, finite numbers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from analysis.report.numbers import estimate, of_metric
from analysis.study.estimates import Estimate
from analysis.study.intervals import WORDS, interval, rests_on
from analysis.study.study import Study, named
from benchmarks.record import Record, finite

RATE = "throughput/images_per_second"
Group = tuple[Record, ...]  # runs of equal cells


def bounded(study: Study, group: Sequence[Record], metric: str) -> Estimate | None:
    """Return the median over runs of equal cells, with the interval of the next run where it is known."""
    found = (record.metrics.get(metric) for record in group)
    values = [value for value in found if value is not None and math.isfinite(value)]
    floor = study.single(group[0]).floor(metric) if group[0].usable else None
    return interval(values, metric, floor) if values else None


def about_intervals(study: Study) -> str:
    """Return what the intervals of a study are: `95 % intervals for the next run, from 12 runs`; empty where it has none."""
    floors = (runs.floor(RATE) for runs in study.runs if runs.values(RATE))
    known = rests_on(floor.runs for floor in floors if floor is not None)
    return f"95 % intervals {WORDS}, {known} of equal cells" if known else ""


def in_parentheses(study: Study) -> str:
    """Return ` Ranges are 95 % intervals for the next run.`, a sentence to end a caption; empty where there are none."""
    return f" Ranges are {about}." if (about := about_intervals(study)) else ""


def bars(study: Study) -> str:
    """Return ` Bars: 95 % intervals for the next run.`, a sentence of a figure's caption; empty where there are none."""
    return f" Bars: {about}." if (about := about_intervals(study)) else ""


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
    return (
        [one for value in values if (one := finite(value)) is not None]
        if isinstance(values, list)
        else []
    )


def median_and_interval(study: Study, group: Group, metric: str) -> str:
    """Return `377 (375 to 378)`, the median over runs with the interval of the next run; empty where no run has the metric."""
    found = bounded(study, group, metric)
    return "" if found is None else estimate(found, of_metric(metric))
