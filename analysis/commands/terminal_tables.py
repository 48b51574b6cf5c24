"""Tables that fit the terminal, and notes below them."""

from collections.abc import Iterable
from dataclasses import replace

from rich.markup import escape

from analysis.console import console, print_text
from analysis.report.table import Table
from analysis.text import count, sentence


def print_table(table: Table) -> None:
    """Print a table; what does not fit the terminal follows in further ones, whose rows are the
    same. Numbers and headings are never cut.
    """
    people = table.for_people
    out = console()
    if people.caption:
        out.print(f"[italic]{escape(people.caption)}[/italic]")
    widths = []
    for index, column in enumerate(people.columns):
        heading = max(map(len, column.heading.split("\n")))
        lengths = [heading]
        for row in people.rows:
            lengths += map(len, column.texts(row[index]))
        width = max(lengths)
        if column.is_text:
            width = max(heading, min(width, out.width // 3))  # its texts can be folded
        widths.append(width + 2)
    parts: list[list[int]] = [[0]]
    for index in range(1, len(widths)):
        if sum(widths[at] for at in parts[-1]) + widths[index] > out.width - 1:
            parts.append([0])
        parts[-1].append(index)
    for part in parts:
        columns = tuple(people.columns[index] for index in part)
        rows = []
        for row in people.rows:
            rows.append(tuple(row[index] for index in part))
        shown_part = replace(people, caption="", columns=columns, rows=tuple(rows))
        printed = shown_part.to_rich()
        for rich_column in printed.columns:
            rich_column.no_wrap = rich_column.justify == "right"
        out.print(printed)


def print_notes(notes: Iterable[str], most: int) -> None:
    """Print the first notes, each once."""
    several = list(dict.fromkeys(filter(None, notes)))
    for note in several[:most]:
        print_text(f"[bold]·[/bold] {escape(sentence(note))}")
    if len(several) > most:
        print_text(f"… {count(len(several) - most, 'more note')} (--details, --json)")
