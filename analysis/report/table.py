"""A table: columns that say what they show of a row; for terminals, pages, papers and programs.

Every text comes from records, so none is trusted: each form escapes what would mean something in
it.
"""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.report.numbers import NumberFormat, central, interval, of_metric
from analysis.study.estimates import Estimate
from analysis.text import markdown, single_line
from benchmarks.record import metrics

if TYPE_CHECKING:
    import rich.table

PlainValue = str | int | float | None
Value = PlainValue | Estimate
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


class TableCell(NamedTuple):
    """A value of a table, in its column."""

    value: Value
    column: Column

    @property
    def is_text(self) -> bool:
        """Whether it is printed as it is, and not as a number."""
        return self.column.is_text or isinstance(self.value, str)

    @property
    def central(self) -> str:
        """The text, or the number without its interval, for people."""
        if self.is_text:
            return single_line("" if self.value is None else self.value)
        return central(self.value, self.column.kind)  # type: ignore[arg-type]  # no text

    @property
    def interval(self) -> str:
        """The 95 % interval for people; empty without one."""
        return "" if self.is_text else interval(self.value, self.column.kind)  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        """The text, or the number with its interval, for people."""
        return f"{self.central} ({self.interval})" if self.interval else self.central

    @property
    def plain(self) -> list[PlainValue]:
        """The values under each of the column's keys, for programs."""
        value = self.value
        if isinstance(value, Estimate):
            values: list[PlainValue] = [value.value, value.low, value.high]
        else:
            values = [value, None, None]
        return values[: len(self.column.keys)]

    @property
    def html(self) -> str:
        """The cell as an element of a page."""
        within = f" <small>{_html(self.interval)}</small>" if self.interval else ""
        return f"<td{_html_class(self.is_text)}>{_html(self.central)}{within}</td>"


@dataclass(frozen=True)
class Table:
    """Rows of values. `Table.of` computes them from the columns."""

    name: str  # of its files
    caption: str  # a sentence
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    marked: frozenset[int] = frozenset()  # rows whose numbers are suspect or invalid

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
        columns = tuple(columns)
        values = []
        doubtful = []
        for index, row in enumerate(rows):
            values.append(tuple(column.of(row) for column in columns))
            if marked(row):
                doubtful.append(index)
        return Table(name, caption, columns, tuple(values), frozenset(doubtful))

    @property
    def cells(self) -> list[list[TableCell]]:
        """The cells of every row."""
        rows = []
        for row in self.rows:
            rows.append([TableCell(*pair) for pair in zip(row, self.columns, strict=True)])
        return rows

    @cached_property
    def for_people(self) -> "Table":
        """The table without columns that are for programs, and without empty columns."""
        shown = []
        for index, column in enumerate(self.columns):
            is_empty = self.rows and all(row[index] in (None, "") for row in self.rows)
            if column.shown and not is_empty:
                shown.append(index)
        columns = tuple(self.columns[index] for index in shown)
        rows = tuple(tuple(row[index] for index in shown) for row in self.rows)
        return replace(self, columns=columns, rows=rows)

    def translated(self, translate: Callable[[str], str]) -> "Table":
        """Return the table with `translate` applied to its caption, headings and texts."""
        columns = []
        for column in self.columns:
            columns.append(replace(column, heading=translate(column.heading)))
        rows = []
        for row in self.rows:
            values = list(row)
            for index, value in enumerate(row):
                if isinstance(value, str):
                    values[index] = translate(value)
            rows.append(tuple(values))
        caption = translate(self.caption)
        return replace(self, caption=caption, columns=tuple(columns), rows=tuple(rows))

    def to_csv(self) -> str:
        """Return every row with numbers unrounded.

        Shares are parts of one, an interval is two more columns.
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([key for column in self.columns for key in column.keys])
        for row in self.cells:
            writer.writerow([_csv_value(value) for cell in row for value in cell.plain])
        return out.getvalue()

    def to_json(self) -> list[dict[str, PlainValue]]:
        """Return a mapping for each row, with the values of the CSV; what is not known is None."""
        rows = []
        for row in self.cells:
            values: dict[str, PlainValue] = {}
            for cell in row:
                values |= dict(zip(cell.column.keys, cell.plain, strict=True))
            rows.append(values)
        return rows

    def to_markdown(self, most: int) -> str:
        """Return the first rows as a pipe table."""
        table = self.for_people
        lines = [[markdown(column.heading) for column in table.columns]]
        lines.append(["---" if column.is_text else "---:" for column in table.columns])
        for row in table.cells[:most]:
            lines.append([markdown(cell.text) for cell in row])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_html(self, most: int) -> str:
        """Return the first rows as an element of a page."""
        table = self.for_people
        lines = ["<table>", "<thead><tr>"]
        for column in table.columns:
            class_ = _html_class(column.is_text)
            lines.append(f'<th scope="col"{class_}>{_html(column.heading)}</th>')
        lines += ["</tr></thead>", "<tbody>"]
        for index, row in enumerate(table.cells[:most]):
            lines.append('<tr class="mark">' if index in table.marked else "<tr>")
            lines += [cell.html for cell in row]
            lines.append("</tr>")
        return "\n".join([*lines, "</tbody>", "</table>"])

    def to_rich(self, most: int | None = None) -> "rich.table.Table":
        """Return the first rows for a terminal, with intervals below their numbers."""
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape as escape_markup
        from rich.table import Table as RichTable

        table = self.for_people
        title = escape_markup(self.caption) or None
        result = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        rows = table.cells[:most]
        for index, column in enumerate(table.columns):
            look: dict[str, Any] = {"justify": "left"}
            if not column.is_text:
                lengths: list[int] = []
                for row in rows:
                    lengths += [len(row[index].central), len(row[index].interval)]
                look = {"justify": "right", "min_width": max(lengths, default=None)}  # not cut
            result.add_column(escape_markup(column.heading), overflow="fold", **look)
        for row in rows:
            texts = ["\n".join(filter(None, (cell.central, cell.interval))) for cell in row]
            result.add_row(*map(escape_markup, texts))
        return result

    def to_latex(self) -> str:
        r"""Return a float to be \input, with caption and label."""
        from analysis.report.latex import table_float

        table = self.for_people
        rows = [[cell.text for cell in row] for row in table.cells]
        formats = "".join("l" if column.is_text else "r" for column in table.columns)
        headings = [column.heading for column in table.columns]
        return table_float(self.name, self.caption, headings, formats, rows, self.marked)


def numbers_table(keys: Sequence[str], rows: Iterable[Sequence[Value]]) -> Table:
    """Return the numbers of a figure, for its CSV.

    Keys hold units, an estimate has the ends of its interval too.
    """
    every = tuple(tuple(row) for row in rows)
    columns = []
    for index, key in enumerate(keys):
        bounded = any(isinstance(row[index], Estimate) for row in every)
        columns.append(Column(key, key, None, "number", bounded))
    return Table("", "", tuple(columns), every)


def _csv_value(value: PlainValue) -> PlainValue:
    """Return a value for CSV.

    A spreadsheet runs text that begins like a formula: an apostrophe keeps it text.
    """
    if not isinstance(value, str):
        return value
    text = single_line(value)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@", "|", "%")) else text


def _html(text: str) -> str:
    return escape(single_line(text, TEXT_LENGTH))


def _html_class(is_text: bool) -> str:
    return "" if is_text else ' class="n"'
