"""What a section of a report is: sentences, figures and tables that answer one question."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from analysis.findings.model import Findings
from analysis.findings.study import Study
from analysis.report.style import Picture
from analysis.report.tables import Table

OF_BENCHMARKS = 59  # place of a benchmark's section: after the machine, before strategies


@dataclass(frozen=True)
class Section:
    """One question and its answer. Sections with the same anchor stand together, under the title of the first."""

    anchor: str  # names it in links to the page
    title: str
    lines: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    commands: tuple[str, ...] = ()
    finding: tuple[str, ...] = ()  # sentences for the first screen of a study in which no cell counts images
    place: int = OF_BENCHMARKS  # sections stand in this order


# A question that this study does not ask has no section.
SectionFunction = Callable[[Study, Findings], Section | None]


def sentence(text: str) -> str:
    """Return text that begins with a capital and ends in a full stop; a name at the beginning stays as it is."""
    first = text.split(" ", 1)[0]
    text = text[:1].upper() + text[1:] if first.isalpha() else text
    return text if text.endswith((".", "!", "?")) else f"{text}."


def first_lines(lines: Iterable[str], most: int = 8) -> list[str]:
    """Return the first lines, each once, and a line that counts the others."""
    each = list(dict.fromkeys(lines))
    return each[:most] + ([f"… and {len(each) - most:,} more of this kind."] if len(each) > most else [])
