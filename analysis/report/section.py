"""What a section of a report is: sentences, figures and tables that answer one question."""

from collections.abc import Callable
from dataclasses import dataclass

from analysis.report.style import Picture
from analysis.report.tables import Table
from analysis.study.estimates import Findings
from analysis.study.study import Study

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
    finding: tuple[
        str, ...
    ] = ()  # sentences for the first screen of a study in which no cell counts images
    place: int = OF_BENCHMARKS  # sections stand in this order


# A question that this study does not ask has no section.
SectionFunction = Callable[[Study, Findings], Section | None]
