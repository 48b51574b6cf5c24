"""A table of a report, written as CSV for programs and as Markdown; a template writes HTML, and papers has LaTeX.

Every text comes from records, so none is trusted: each form escapes what would mean something in it.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from analysis.report.numbers import NumberFormat, central, estimate, interval, of_metric
from analysis.study.estimates import Estimate
from analysis.text import markdown, single_line
from benchmarks.record import metrics

Value = str | int | float | Estimate | None


@dataclass(frozen=True)
class Column:
    """One column: `key` heads it in CSV, `heading` elsewhere; `kind` is text, or says how numbers are written."""

    key: str
    heading: str
    kind: str | NumberFormat = "text"  # text, one of KINDS, or a format of its own
    bounded: bool = False  # values are Estimates: CSV has the ends of their intervals too
    shown: bool = True  # to people; what another column says already is for CSV alone


def metric_column(
    key: str, metric: str, *, heading: str = "", bounded: bool = False, things: str = "images"
) -> Column:
    """Return the column of a metric, as the table of metrics (benchmarks.record.metrics) has it: its heading, its decimals.

    `things` are what the cells count (analysis.study.names.things_of).
    """
    entry = metrics.metric(metric).of(things)
    return Column(key, heading or entry.column or entry.title, of_metric(metric), bounded)


@dataclass(frozen=True)
class Table:
    """Rows in order. `name` is that of its files; `caption` a sentence."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    marked: frozenset[int] = field(
        default_factory=frozenset
    )  # rows whose numbers are suspect or invalid

    @cached_property
    def for_people(self) -> "Table":
        """Return the table without columns that are for CSV alone, and without empty columns."""
        kept = [
            place
            for place, column in enumerate(self.columns)
            if column.shown
            and (not self.rows or any(row[place] not in (None, "") for row in self.rows))
        ]
        columns = tuple(self.columns[place] for place in kept)
        return replace(
            self,
            columns=columns,
            rows=tuple(tuple(row[place] for place in kept) for row in self.rows),
        )

    def head(self, most: int) -> Iterator[tuple[bool, list[tuple[str, str, bool]]]]:
        """Yield the first rows: (marked, [(text, interval, is a number)])."""
        for number, row in enumerate(self.rows[:most]):
            yield (
                number in self.marked,
                [_parts(value, c) for value, c in zip(row, self.columns, strict=True)],
            )


def _parts(value: Value, column: Column) -> tuple[str, str, bool]:
    if column.kind == "text" or isinstance(value, str):
        return single_line(value or ""), "", False
    return central(value, column.kind), interval(value, column.kind), True


def to_csv(table: Table) -> str:
    """Return every row, with numbers unrounded and without units; an interval is two more columns. Shares are parts of one."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = [
        (c.key, f"{c.key}_low", f"{c.key}_high") if c.bounded else (c.key,) for c in table.columns
    ]
    writer.writerow([name for names in heads for name in names])
    for row in table.rows:
        cells: list[object] = []
        for value, column in zip(row, table.columns, strict=True):
            ends = value if isinstance(value, Estimate) else None
            cells.append(_csv_cell(ends.value if ends else value))
            if column.bounded:
                cells += [
                    "" if one is None else one
                    for one in ((ends.low, ends.high) if ends else (None, None))
                ]
        writer.writerow(cells)
    return out.getvalue()


def _csv_cell(value: Value) -> object:
    """Return a value for CSV. A spreadsheet runs text that begins like a formula: an apostrophe keeps it text."""
    if not isinstance(value, str):
        return "" if value is None else value
    text = single_line(value)
    return f"'{text}" if text.lstrip()[:1] in ("=", "+", "-", "@", "|", "%") else text


def _joined(value: Value, column: Column) -> str:
    if column.kind != "text" and not isinstance(value, str):
        return estimate(value, column.kind)
    return _parts(value, column)[0]


def to_markdown(table: Table, most: int) -> str:
    """Return the first rows as a pipe table."""
    table = table.for_people
    lines = [[markdown(column.heading) for column in table.columns]]
    lines.append(["---" if column.kind == "text" else "---:" for column in table.columns])
    for row in table.rows[:most]:
        lines.append(
            [
                markdown(_joined(value, column))
                for value, column in zip(row, table.columns, strict=True)
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
