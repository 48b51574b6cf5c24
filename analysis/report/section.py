"""What a section of a report is: sentences, figures and tables on one question."""

from collections.abc import Iterable
from dataclasses import dataclass

from analysis.report.style import Picture
from analysis.report.tables import Table


@dataclass(frozen=True)
class Section:
    """One question. `anchor` is its place on the page."""

    anchor: str
    title: str
    lines: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    commands: tuple[str, ...] = ()


def sentence(text: str) -> str:
    """Beginning with a capital and ending in a full stop; a name at the beginning stays as it is."""
    first = text.split(" ", 1)[0]
    text = text[:1].upper() + text[1:] if first.isalpha() else text
    return text if text.endswith((".", "!", "?")) else f"{text}."


def few(lines: Iterable[str], most: int = 8) -> list[str]:
    """The first lines, each once, and how many more there are."""
    each = list(dict.fromkeys(lines))
    return each[:most] + ([f"… and {len(each) - most:,} more of this kind."] if len(each) > most else [])
