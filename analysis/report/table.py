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
from typing import TYPE_CHECKING, Any

from analysis.report.latex import DOUBTFUL, latex, table_float
from analysis.report.numbers import NumberFormat, of_metric, texts
from analysis.study.intervals import Estimate
from analysis.text import markdown, single_line
from benchmarks.record import metrics

if TYPE_CHECKING:
    import rich.table

PlainValue = str | int | float | None
Value = PlainValue | Estimate
Reader = Callable[[Any], Value] | str | None  # of a row: a function, an attribute's path, or .get
TEXT = "text"
LENGTH_ON_PAGE = 3000  # characters of a text on the page


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    key: str  # heads the column in CSV and JSON
    heading: str  # … and for people
    value: Reader = None  # None: row.get(key)
    kind: str | NumberFormat = TEXT  # TEXT, a key of numbers.KINDS, or a format of its own
    bounded: bool = False  # values are Estimates: CSV has the ends of their intervals too
    shown: bool = True  # to people; else in CSV and JSON only

    def of(self, row: Any) -> Value:
        """Return the value of a row in this column."""
        value: Value
        if self.value is None:
            value = row.get(self.key)
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

    def texts(self, value: Value) -> tuple[str, str]:
        """Return a value for people, and its 95 % interval, empty without one."""
        if self.is_text or isinstance(value, str):
            return single_line("" if value is None else value), ""
        return texts(value, self.kind)

    def text(self, value: Value) -> str:
        """Return a value for people on one line: `98.1 % (98.0 to 98.3)`."""
        central, interval = self.texts(value)
        return f"{central} ({interval})" if interval else central

    def plain(self, value: Value) -> tuple[PlainValue, ...]:
        """Return the values under each of the keys, for programs."""
        if isinstance(value, Estimate):
            return (value.value, value.low, value.high)[: len(self.keys)]
        return (value, None, None)[: len(self.keys)]


def columns_of(kind: str = TEXT, **headings: str) -> list[Column]:
    """Return columns of one kind for rows that are mappings: {key: heading}."""
    columns = []
    for key, heading in headings.items():
        columns.append(Column(key, heading, None, kind))
    return columns


def metric_column(
    key: str, metric: str, value: Reader = None, *, heading: str = "", bounded: bool = False
) -> Column:
    """Return the column of a metric, with heading and decimals of the table of metrics."""
    entry = metrics.entry_of(metric)
    return Column(key, heading or entry.column or entry.title, value, of_metric(metric), bounded)


@dataclass(frozen=True)
class Table:
    """Rows of values. `Table.of` computes them from the columns."""

    name: str  # of its files
    caption: str  # a sentence
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    marked: frozenset[int] = frozenset()  # rows whose numbers are suspect or invalid
    unshown: frozenset[int] = frozenset()  # rows that are in CSV and JSON only

    @staticmethod
    def of(
        name: str,
        caption: str,
        columns: Iterable[Column],
        rows: Iterable[Any],
        marked: Callable[[Any], object] = lambda row: False,
        shown: Callable[[Any], object] = lambda row: True,
    ) -> "Table":
        """Return the table of `rows`, of any type; those that are `marked` are doubtful."""
        columns = tuple(columns)
        values, doubtful, unshown = [], [], []
        for index, row in enumerate(rows):
            values.append(tuple(column.of(row) for column in columns))
            if marked(row):
                doubtful.append(index)
            if not shown(row):
                unshown.append(index)
        marks = frozenset(doubtful), frozenset(unshown)
        return Table(name, caption, columns, tuple(values), *marks)

    @cached_property
    def for_people(self) -> "Table":
        """The table without columns and rows that are for programs, and without empty columns."""
        shown = [index for index in range(len(self.rows)) if index not in self.unshown]
        marked = frozenset(at for at, index in enumerate(shown) if index in self.marked)
        columns, values_of = [], []
        for position, column in enumerate(self.columns):
            values = [self.rows[index][position] for index in shown]
            if column.shown and (not values or any(value not in (None, "") for value in values)):
                columns.append(column)
                values_of.append(values)
        rows = tuple(zip(*values_of, strict=True))
        return Table(self.name, self.caption, tuple(columns), rows, marked)

    def texts(self, most: int | None = None) -> list[list[str]]:
        """Return the first rows as texts, for the columns of `for_people`."""
        table = self.for_people
        lines = []
        for row in table.rows[:most]:
            lines.append(list(map(Column.text, table.columns, row)))
        return lines

    def translated(
        self, words: Callable[[str], str], cells: Callable[[str], str] | None = None
    ) -> "Table":
        """Return the table with `words` applied to caption and headings, `cells` to its texts."""
        columns = []
        for column in self.columns:
            columns.append(replace(column, heading=words(column.heading)))
        rows = []
        for row in self.rows:
            values = list(row)
            for index, value in enumerate(row):
                if cells is not None and isinstance(value, str):
                    values[index] = cells(value)
            rows.append(tuple(values))
        return replace(self, caption=words(self.caption), columns=tuple(columns), rows=tuple(rows))

    def to_csv(self) -> str:
        """Return every row, unrounded: shares are parts of one, intervals two columns."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        keys: list[str] = []
        for column in self.columns:
            keys += column.keys
        writer.writerow(keys)
        for row in self.to_json():
            values = list(row.values())
            for index, value in enumerate(values):
                if isinstance(value, str):
                    text = single_line(value)
                    # A spreadsheet runs text that begins like a formula: an apostrophe keeps it.
                    if text.lstrip().startswith(("=", "+", "-", "@", "|", "%")):
                        text = f"'{text}"
                    values[index] = text
            writer.writerow(values)
        return out.getvalue()

    def to_json(self) -> list[dict[str, PlainValue]]:
        """Return a mapping for each row, with the values of the CSV; what is not known is None."""
        rows = []
        for row in self.rows:
            values: dict[str, PlainValue] = {}
            for column, value in zip(self.columns, row, strict=True):
                values |= zip(column.keys, column.plain(value), strict=True)
            rows.append(values)
        return rows

    def to_markdown(self, most: int) -> str:
        """Return the first rows as a pipe table."""
        headings, rule = [], []
        for column in self.for_people.columns:
            headings.append(markdown(column.heading))
            rule.append("---" if column.is_text else "---:")
        lines = [headings, rule]
        for row in self.texts(most):
            lines.append(list(map(markdown, row)))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_html(self, most: int) -> str:
        """Return the first rows as an element of a page."""
        table = self.for_people
        lines = ["<table>", "<thead><tr>"]
        for column in table.columns:
            lines.append(f'<th scope="col"{_aligned(column.is_text)}>{_html(column.heading)}</th>')
        lines += ["</tr></thead>", "<tbody>"]
        for index, row in enumerate(table.rows[:most]):
            lines.append('<tr class="mark">' if index in table.marked else "<tr>")
            for column, value in zip(table.columns, row, strict=True):
                text, interval = map(_html, column.texts(value))
                if interval:
                    text += f" <small>{interval}</small>"
                aligned = _aligned(column.is_text or isinstance(value, str))
                lines.append(f"<td{aligned}>{text}</td>")
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
        rows = []
        for row in table.rows[:most]:
            rows.append(list(map(Column.texts, table.columns, row)))
        for index, column in enumerate(table.columns):
            look: dict[str, Any] = {"justify": "left"}
            if not column.is_text:
                lengths = [max(map(len, cells[index])) for cells in rows]
                look = {"justify": "right", "min_width": max(lengths, default=None)}  # not cut
            result.add_column(escape_markup(column.heading), overflow="fold", **look)
        for cells in rows:
            lines = ["\n".join(filter(None, pair)) for pair in cells]
            result.add_row(*map(escape_markup, lines))
        return result

    def to_latex(self) -> str:
        r"""Return a float to be \input, with caption and label."""
        headings, formats, body = [], "", []
        for column in self.for_people.columns:
            headings.append(latex(column.heading))
            formats += "l" if column.is_text else "r"
        for index, row in enumerate(self.texts()):
            cells = list(map(latex, row))
            if index in self.for_people.marked:
                cells[0] += DOUBTFUL
            body.append(" & ".join(cells) + r" \\")
        caption = latex(self.caption)
        if self.for_people.marked:
            caption += f" {DOUBTFUL} a check doubts these numbers."
        return table_float(self.name, caption, formats, headings, body)


def numbers_table(keys: Sequence[str], rows: Iterable[Sequence[Value]]) -> Table:
    """Return the numbers of a figure for its CSV; keys hold units, estimates their intervals."""
    every = tuple(map(tuple, rows))
    columns = []
    for index, key in enumerate(keys):
        bounded = any(isinstance(row[index], Estimate) for row in every)
        columns.append(Column(key, key, None, "number", bounded))
    return Table("", "", tuple(columns), every)


def _html(text: str) -> str:
    # A long name may break after its underscores.
    return escape(single_line(text, LENGTH_ON_PAGE)).replace("_", "_<wbr>")


def _aligned(is_text: bool) -> str:
    return "" if is_text else ' class="n"'
