"""What a section of a report is: sentences, figures and tables that answer one question.

The functions below read what several sections say of records.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.report.figure import Figure
from analysis.report.numbers import estimate, of_metric
from analysis.report.table import Table
from analysis.study import intervals
from analysis.study.estimates import Estimate, Findings
from analysis.study.runs import named
from analysis.study.study import Study
from benchmarks.record import Record, finite

RATE = "throughput/images_per_second"


@dataclass(frozen=True)
class Section:
    """One question and its answer.

    Sections with the same anchor stand together, under the title of the first.
    """

    anchor: str  # names it in links to the page
    title: str
    lines: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    commands: tuple[str, ...] = ()
    finding: tuple[str, ...] = ()  # for the first screen of a study that counts no images

    @property
    def is_empty(self) -> bool:
        """Whether it shows nothing."""
        return not (self.lines or self.figures or self.tables or self.commands)

    def joined(self, section: "Section") -> "Section":
        """Return one section with all that two hold, under the title of the first."""
        return replace(
            self,
            lines=self.lines + section.lines,
            figures=self.figures + section.figures,
            tables=self.tables + section.tables,
            commands=self.commands + section.commands,
        )

    def translated(self, translate: Callable[[str], str]) -> "Section":
        """Return the section with `translate` applied to its texts."""
        figures = []
        for figure in self.figures:
            figures.append(replace(figure, caption=translate(figure.caption)))
        return replace(
            self,
            lines=tuple(map(translate, self.lines)),
            figures=tuple(figures),
            tables=tuple(table.translated(translate) for table in self.tables),
        )


# A question that this study does not ask has no section.
SectionFunction = Callable[[Study, Findings], Section | None]
Group = tuple[Record, ...]  # runs of equal cells


def bounded(study: Study, group: Sequence[Record], metric: str) -> Estimate | None:
    """Return the median over runs of equal cells, with the interval of the next run if known."""
    values = []
    for record in group:
        value = record.metrics.get(metric)
        if value is not None and math.isfinite(value):
            values.append(value)
    floor = study.single(group[0]).floor(metric) if group[0].usable else None
    return intervals.interval(values, metric, floor) if values else None


def median_and_interval(study: Study, group: Group, metric: str) -> str:
    """Return `377 (375 to 378)`, the median over runs; empty where no run has the metric."""
    value = bounded(study, group, metric)
    return "" if value is None else estimate(value, of_metric(metric))


def about_intervals(study: Study, subject: str) -> str:
    """Return ` Bars: 95 % intervals for the next run, …`, to end a caption; empty without them."""
    floors = [runs.floor(RATE) for runs in study.runs if runs.values(RATE)]
    basis = intervals.rests_on(floor.runs for floor in floors if floor is not None)
    if not basis:
        return ""
    return f" {subject} 95 % intervals {intervals.WORDS}, {basis} of equal cells."


def in_parentheses(study: Study) -> str:
    """Return the sentence about intervals that ends the caption of a table."""
    return about_intervals(study, "Ranges are")


def bars(study: Study) -> str:
    """Return the sentence about intervals that ends the caption of a figure."""
    return about_intervals(study, "Bars:")


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
    if isinstance(table, list):
        yield from (row for row in table if isinstance(row, Mapping))


def finite_numbers(values: object) -> list[float]:
    """Return the finite numbers of a list."""
    numbers = map(finite, values) if isinstance(values, list) else ()
    return [number for number in numbers if number is not None]
