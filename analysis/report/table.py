"""A table: columns that say what they show of a row; for terminals, pages, papers and programs.

Every text comes from records, so none is trusted: each form escapes what would mean something in
it.
"""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from analysis.report.numbers import NumberFormat, central, estimate, interval, of_metric
from analysis.study.estimates import Estimate
from analysis.text import markdown, single_line
from benchmarks.record import metrics

if TYPE_CHECKING:
    import rich.table

Value = str | int | float | Estimate | None
TEXT = "text"
TEXT_LENGTH = 3000  # characters of a text on the page


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    key: str  # heads the column in CSV and JSON
    heading: str  # … and for people
    value: Callable[[Any], Value] | str | None = None  # an attribute's path, or row.get(key)
    kind: str | NumberFormat = TEXT  # TEXT, a key of numbers.KINDS, or a format of its own
    bounded: bool = False  # values are Estimates: CSV has the ends of their intervals too
    shown: bool = True  # to people; else in CSV and JSON only

    def of(self, row: Any) -> Value:
        """Return the value of a row in this column."""
        if self.value is None:
            value: Value = row.get(self.key)
        elif isinstance(self.value, str):
            value = attrgetter(self.value)(row)
        else:
            value = self.value(row)
        return value

    @property
    def keys(self) -> tuple[str, ...]:
        """The heads of the column in CSV and JSON."""
        return (self.key, f"{self.key}_low", f"{self.key}_high") if self.bounded else (self.key,)

    @property
    def is_text(self) -> bool:
        """Whether the column holds texts, which stand on the left."""
        return self.kind == TEXT


def metric_column(
    key: str,
    metric: str,
    value: Callable[[Any], Value] | str | None = None,
    *,
    heading: str = "",
    bounded: bool = False,
    things: str = "images",
) -> Column:
    """Return the column of a metric, with heading and decimals of the table of metrics.

    `things` are what the cells count (analysis.study.names.things_of).
    """
    entry = metrics.metric(metric).of(things)
    return Column(key, heading or entry.column or entry.title, value, of_metric(metric), bounded)


@dataclass(frozen=True)
class Table:
    """Rows of values. `Table.of` computes them from the columns."""

    name: str  # of its files
    caption: str  # a sentence
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    marked: frozenset[int] = field(
        default_factory=frozenset
    )  # rows whose numbers are suspect or invalid

    @staticmethod
    def of(
        name: str,
        caption: str,
        columns: Iterable[Column],
        rows: Iterable[Any],
        marked: Callable[[Any], object] = lambda row: False,
    ) -> "Table":
        """Return the table of `rows`, of any type that the columns read.

        `marked` tells which are doubtful.
        """
        columns, rows = tuple(columns), list(rows)
        values = tuple(tuple(column.of(row) for column in columns) for row in rows)
        doubtful = frozenset(number for number, row in enumerate(rows) if marked(row))
        return Table(name, caption, columns, values, doubtful)

    @cached_property
    def for_people(self) -> "Table":
        """The table without columns that are for programs, and without empty columns."""
        kept = []
        for number, column in enumerate(self.columns):
            is_empty = self.rows and all(row[number] in (None, "") for row in self.rows)
            if column.shown and not is_empty:
                kept.append(number)
        columns = tuple(self.columns[number] for number in kept)
        rows = tuple(tuple(row[number] for number in kept) for row in self.rows)
        return replace(self, columns=columns, rows=rows)

    def translated(self, translate: Callable[[str], str]) -> "Table":
        """Return the table with `translate` applied to its caption, headings and texts."""
        columns = tuple(
            replace(column, heading=translate(column.heading)) for column in self.columns
        )
        rows = []
        for row in self.rows:
            rows.append(
                tuple(translate(value) if isinstance(value, str) else value for value in row)
            )
        return replace(self, caption=translate(self.caption), columns=columns, rows=tuple(rows))

    def to_csv(self) -> str:
        """Return every row with numbers unrounded.

        Shares are parts of one, an interval is two more columns.
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([key for column in self.columns for key in column.keys])
        for row in self.rows:
            cells: list[object] = []
            for value, column in zip(row, self.columns, strict=True):
                cells += [_csv_cell(plain) for plain in _plain(value, column)]
            writer.writerow(cells)
        return out.getvalue()

    def to_json(self) -> list[dict[str, str | int | float | None]]:
        """Return a mapping for each row, with the values of the CSV; what is not known is None."""
        rows = []
        for row in self.rows:
            values: dict[str, str | int | float | None] = {}
            for value, column in zip(row, self.columns, strict=True):
                values |= dict(zip(column.keys, _plain(value, column), strict=True))
            rows.append(values)
        return rows

    def to_markdown(self, most: int) -> str:
        """Return the first rows as a pipe table."""
        table = self.for_people
        lines = [[markdown(column.heading) for column in table.columns]]
        lines.append(["---" if column.is_text else "---:" for column in table.columns])
        for row in table.rows[:most]:
            lines.append([markdown(_text(*cell)) for cell in zip(row, table.columns, strict=True)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_html(self, most: int) -> str:
        """Return the first rows as an element of a page."""
        table = self.for_people
        lines = ["<table>", "<thead><tr>"]
        for column in table.columns:
            lines.append(
                f'<th scope="col"{_html_class(column.is_text)}>{_html(column.heading)}</th>'
            )
        lines += ["</tr></thead>", "<tbody>"]
        for number, row in enumerate(table.rows[:most]):
            lines.append('<tr class="mark">' if number in table.marked else "<tr>")
            for value, column in zip(row, table.columns, strict=True):
                text, within = _parts(value, column)
                small = f" <small>{_html(within)}</small>" if within else ""
                is_text = column.is_text or isinstance(value, str)
                lines.append(f"<td{_html_class(is_text)}>{_html(text)}{small}</td>")
            lines.append("</tr>")
        return "\n".join([*lines, "</tbody>", "</table>"])

    def to_rich(self, most: int | None = None) -> "rich.table.Table":
        """Return the first rows for a terminal, with intervals below their numbers."""
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape as escape_markup
        from rich.table import Table as RichTable

        table = self.for_people
        title = escape_markup(self.caption) if self.caption else None
        made = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        texts = []
        for row in table.rows[:most]:
            cells = [
                _parts(value, column) for value, column in zip(row, table.columns, strict=True)
            ]
            texts.append(["\n".join(filter(None, cell)) for cell in cells])
        for number, column in enumerate(table.columns):
            justify: Any = "left" if column.is_text else "right"
            lines = [line for row_texts in texts for line in row_texts[number].split("\n")]
            width = (
                None if column.is_text else max(map(len, lines), default=None)
            )  # a number is not cut
            made.add_column(
                escape_markup(column.heading), justify=justify, overflow="fold", min_width=width
            )
        for row_texts in texts:
            made.add_row(*map(escape_markup, row_texts))
        return made

    def to_latex(self) -> str:
        r"""Return a float to be \input, with caption and label."""
        from analysis.report.latex import table_float

        table = self.for_people
        rows = [
            [_text(*cell) for cell in zip(row, table.columns, strict=True)] for row in table.rows
        ]
        formats = "".join("l" if column.is_text else "r" for column in table.columns)
        headings = [column.heading for column in table.columns]
        return table_float(self.name, self.caption, headings, formats, rows, self.marked)


def numbers_table(keys: Sequence[str], rows: Iterable[Sequence[Value]]) -> Table:
    """Return the numbers of a figure, for its CSV.

    Keys hold units, an estimate has the ends of its interval too.
    """
    every = tuple(tuple(row) for row in rows)
    columns = []
    for number, key in enumerate(keys):
        bounded = any(isinstance(row[number], Estimate) for row in every)
        columns.append(Column(key, key, None, "number", bounded))
    return Table("", "", tuple(columns), every)


def _plain(value: Value, column: Column) -> tuple[str | int | float | None, ...]:
    """Return the values of a cell under each of the column's keys."""
    if isinstance(value, Estimate):
        return (value.value, value.low, value.high) if column.bounded else (value.value,)
    return (value, None, None) if column.bounded else (value,)


def _csv_cell(value: str | int | float | None) -> object:
    """Return a value for CSV.

    A spreadsheet runs text that begins like a formula: an apostrophe keeps it text.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        return value
    text = single_line(value)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@", "|", "%")) else text


def _parts(value: Value, column: Column) -> tuple[str, str]:
    """Return a cell for people: its text or number, and the interval of that."""
    if column.is_text or isinstance(value, str):
        return single_line("" if value is None else value), ""
    return central(value, column.kind), interval(value, column.kind)


def _text(value: Value, column: Column) -> str:
    """Return a cell for people in one text."""
    if column.is_text or isinstance(value, str):
        return _parts(value, column)[0]
    return estimate(value, column.kind)


def _html(text: str) -> str:
    return escape(single_line(text, TEXT_LENGTH))


def _html_class(is_text: bool) -> str:
    return "" if is_text else ' class="n"'
