"""What a section of a report is: sentences, figures and tables that answer one question."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from analysis.report.figure import Figure
from analysis.report.table import Table
from analysis.study.estimates import Findings
from analysis.study.study import Study


@dataclass(frozen=True)
class Section:
    """One question and its answer. Sections with the same anchor stand together, under the title of the first."""

    anchor: str  # names it in links to the page
    title: str
    lines: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    commands: tuple[str, ...] = ()
    finding: tuple[
        str, ...
    ] = ()  # sentences for the first screen of a study in which no cell counts images

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
        return replace(
            self,
            lines=tuple(translate(line) for line in self.lines),
            figures=tuple(
                replace(figure, caption=translate(figure.caption)) for figure in self.figures
            ),
            tables=tuple(table.translated(translate) for table in self.tables),
        )


# A question that this study does not ask has no section.
SectionFunction = Callable[[Study, Findings], Section | None]
