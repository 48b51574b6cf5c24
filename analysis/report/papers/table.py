"""A table as a float of LaTeX (booktabs) that fits a page of A4 with margins of 2 cm.

Of a table that is too wide, columns that say the same in every row go into the caption. What is then still too wide has its
longer texts on several lines. What is too wide with that too is set as several tables below each other, each with the
columns that name a row. What is too long for a page is a longtable.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from analysis.report.numbers import central, interval
from analysis.report.papers.latex import LONGEST_WORD, latex
from analysis.report.papers.widths import widest_word_em, width_em
from analysis.report.tables import Column, Table, Value
from analysis.study.names import NAMES_BETWEEN as BETWEEN
from analysis.study.names import short_names
from analysis.text import single_line

PAGE_EM = 17 / 2.54 * 72.27 / 8.5  # 17 cm of \footnotesize
COLUMN_EM = 3.3 * 72.27 / 8.5  # one of a paper's two columns
BETWEEN_EM = 0.75  # between two columns
SPARE = 1.02  # of a width, as a line must not be a hair too short
READABLE_EM = 9.0  # of a text on several lines
LINES = 45  # of a table on one page
NAMING = 3  # columns at most that are repeated because they name the row
DOUBTFUL = "†"
CAPTION = "%CAPTION%"  # its place in a longtable
NEEDS = r"% needs \usepackage{array,booktabs,longtable}"


@dataclass(frozen=True)
class _TexColumn:
    """One column: what its cells say, each as the lines that it would like to have."""

    heading: str
    cells: tuple[tuple[str, ...], ...]
    text: bool

    @cached_property
    def natural_em(self) -> float:
        """Return the width that needs one line for every cell and the heading."""
        return SPARE * max(width_em(" ".join(lines)) for lines in ((self.heading,), *self.cells))

    @cached_property
    def least_em(self) -> float:
        """Return the width without which a word would stick out, or a text be hard to read."""
        words = [
            widest_word_em(line) if self.text else width_em(line)
            for lines in self.cells
            for line in lines
        ]
        least = SPARE * max([max(map(width_em, self.heading.split(" "))), *words])
        return max(least, min(self.natural_em, READABLE_EM)) if self.text else least


def to_latex(table: Table) -> str:
    r"""Return a float to be \input, with caption and label; numbers are rounded as on the page."""
    table = table.for_people
    columns = [
        _column(column, [row[place] for row in table.rows])
        for place, column in enumerate(table.columns)
    ]
    caption = [table.caption]
    if _wide(columns):
        same = [column for column in columns[1:] if _says_the_same(column)]
        told = [f"{column.heading} {column.cells[0][0]}" for column in same if column.cells[0][0]]
        columns, shared = _without_shared([column for column in columns if column not in same])
        caption += [f"In every row: {'; '.join([*shared, *told])}."] if shared or told else []
    if table.marked and columns:
        caption.append(f"{DOUBTFUL} a check doubts these numbers.")
        columns[0] = _marked(columns[0], table.marked)
    parts = _parts(columns)
    widths = [_widths(part) for part in parts]
    long = sum(map(_height, parts, widths)) > LINES
    written = [_tabular(part, width, long) for part, width in zip(parts, widths, strict=True)]
    return _float(
        table.name,
        latex(single_line(" ".join(caption), 1500)),
        written,
        long,
        max(map(_total, widths)),
    )


def _column(column: Column, values: Sequence[Value]) -> _TexColumn:
    text = column.kind == "text"
    return _TexColumn(column.heading, tuple(_lines(value, column) for value in values), text)


def _lines(value: Value, column: Column) -> tuple[str, ...]:
    """Return a text, or a number and its interval, which may stand on a line of its own."""
    if column.kind == "text" or isinstance(value, str):
        return (single_line("" if value is None else value),)
    within = interval(value, column.kind)
    return (central(value, column.kind), *([f"({within})"] if within else []))


def _says_the_same(column: _TexColumn) -> bool:
    return len(column.cells) > 1 and len(set(column.cells)) == 1 and len(column.cells[0]) == 1


def _without_shared(columns: list[_TexColumn]) -> tuple[list[_TexColumn], list[str]]:
    """Return the columns whose first names rows without what all these names share, and that as `cell resnet50`."""
    names = [lines[0] for lines in columns[0].cells]
    short = short_names(names)
    if len({*names}) < 2 or len({*short.values()}) < len(short):
        return columns, []
    kept = set(short[names[0]].split(BETWEEN))
    shared = BETWEEN.join(part for part in names[0].split(BETWEEN) if part not in kept)
    first = replace(columns[0], cells=tuple((short[name],) for name in names))
    return [first, *columns[1:]], [f"{first.heading} {shared}"] if shared else []


def _marked(column: _TexColumn, rows: frozenset[int]) -> _TexColumn:
    cells = (
        (*lines[:-1], lines[-1] + DOUBTFUL * (row in rows))
        for row, lines in enumerate(column.cells)
    )
    return replace(column, cells=tuple(cells))


def _total(widths: Sequence[float]) -> float:
    return sum(widths) + BETWEEN_EM * max(0, len(widths) - 1)


def _wide(columns: Sequence[_TexColumn]) -> bool:
    return _total([column.natural_em for column in columns]) > PAGE_EM


def _parts(columns: list[_TexColumn]) -> list[list[_TexColumn]]:
    """Return the columns of each of the tables below each other; each begins with those that name a row."""
    if _total([column.least_em for column in columns]) <= PAGE_EM:
        return [columns]
    naming = 1
    while naming < min(NAMING, len(columns)) and len(
        set(zip(*(c.cells for c in columns[:naming]), strict=True))
    ) < len(columns[0].cells):
        naming += 1
    names, parts = columns[:naming], [columns[:naming]]
    for column in columns[naming:]:
        if (
            len(parts[-1]) > naming
            and _total([one.least_em for one in (*parts[-1], column)]) > PAGE_EM
        ):
            parts.append([*names])
        parts[-1].append(column)
    return parts


def _widths(columns: Sequence[_TexColumn]) -> list[float]:
    """Return the width of each column in em: as wide as it likes, else the least; the narrowest ask first for the rest."""
    if not _wide(columns):
        return [column.natural_em for column in columns]
    widths = [column.least_em for column in columns]
    left = max(0.0, PAGE_EM - _total(widths))
    # Numbers come first, as they are compared down the column; texts share the rest.
    order = sorted(
        range(len(columns)), key=lambda place: (columns[place].text, columns[place].natural_em)
    )
    for asked, place in enumerate(order):
        wanted = columns[place].natural_em - widths[place]
        if columns[place].text:
            wanted = min(wanted, left / (len(order) - asked))
        elif wanted > left:
            continue
        widths[place] += wanted
        left -= wanted
    return widths


def _height(columns: Sequence[_TexColumn], widths: Sequence[float]) -> int:
    """Return about how many lines a table takes."""
    rows = zip(*(column.cells for column in columns), strict=True)
    return 3 + sum(max(map(_lines_of, row, widths)) for row in rows)


def _lines_of(cell: tuple[str, ...], width: float) -> int:
    whole = SPARE * width_em(" ".join(cell))
    return 1 if whole <= width + 1e-6 else max(len(cell), math.ceil(1.2 * whole / width))


def _tabular(columns: Sequence[_TexColumn], widths: Sequence[float], long: bool) -> str:
    """Return the rows between booktabs' rules; columns as wide as they like are `l` and `r`, others paragraphs."""
    forms, bounded = [], []
    for column, width in zip(columns, widths, strict=True):
        narrow = width < column.natural_em - 1e-6
        side = r"\raggedright" if column.text else r"\raggedleft"
        forms.append(
            rf">{{{side}\arraybackslash}}p{{{width:.2f}em}}"
            if narrow
            else "l"
            if column.text
            else "r"
        )
        bounded.append(narrow)
    head = _row([(column.heading,) for column in columns], bounded)
    rows = [_row(row, bounded) for row in zip(*(column.cells for column in columns), strict=True)]
    form = f"@{{}}{''.join(forms)}@{{}}"
    name = "longtable" if long else "tabular"
    ruled = [r"\toprule", head, r"\midrule"]
    above = (
        [CAPTION, *ruled, r"\endfirsthead", *ruled, r"\endhead", r"\bottomrule", r"\endfoot"]
        if long
        else ruled
    )
    below = [] if long else [r"\bottomrule"]
    return "\n".join([rf"\begin{{{name}}}{{{form}}}", *above, *rows, *below, rf"\end{{{name}}}"])


def _row(cells: Sequence[tuple[str, ...]], bounded: Sequence[bool]) -> str:
    """Return a line of the table. In a bounded column an interval stays whole, and long names may end a line."""
    written = []
    for lines, narrow in zip(cells, bounded, strict=True):
        value, *within = lines
        whole = [one.replace(" ", "\N{NO-BREAK SPACE}") for one in within]
        if narrow and BETWEEN in value:  # a name ends its line between its short parts
            parts = (
                one.replace(" ", "\N{NO-BREAK SPACE}") if len(one) <= LONGEST_WORD else one
                for one in value.split(BETWEEN)
            )
            value = BETWEEN.join(parts)
        written.append(" ".join([latex(value, breakable=narrow), *map(latex, whole)]))
    return " & ".join(written) + r" \\"


def _float(name: str, caption: str, tabulars: Sequence[str], long: bool, width: float) -> str:
    """Return tables with one caption and one label."""
    told = rf"\caption{{{caption}}}\label{{tab:{name}}}"
    size = r"\footnotesize\setlength{\tabcolsep}{0.375em}\setlength{\belowcaptionskip}{4pt}\setlength{\LTcapwidth}{\textwidth}"
    if long:
        first, *others = tabulars
        body = [
            first.replace(CAPTION, rf"{told}\\"),
            *(one.replace(f"{CAPTION}\n", "") for one in others),
        ]
        return "\n".join([NEEDS, rf"{{{size}", *body, "}", ""])
    kind = "table" if width <= COLUMN_EM else "table*"
    body = ["\n\\par\\medskip\n".join(tabulars)]
    return "\n".join(
        [
            NEEDS,
            rf"\begin{{{kind}}}[htbp]",
            r"\centering",
            size,
            told,
            *body,
            rf"\end{{{kind}}}",
            "",
        ]
    )
