"""Write a report as one HTML page and as Markdown, with templates (jinja2) around the sections.

The page is whole in itself: drawings inside, no script, nothing fetched. jinja2 escapes every text of a record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.report.section import Section
from analysis.report.style import COLOURS
from analysis.report.tables import Table, to_markdown
from analysis.text import count, markdown, single_line

# No script runs and nothing is fetched, whatever a record holds. Drawings have styles inside and may hold images.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
TEXT_LENGTH = 3000  # characters of any one text on the page
PAGE_ROWS = 60  # of a table on the page and in Markdown; the CSV has all


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    study: str
    setting: str  # what was measured, where and when, in a line
    finding: tuple[str, ...]  # at most five sentences
    unsaid: tuple[str, ...]  # what cannot be said, and why
    sections: tuple[Section, ...]

    @property
    def tables(self) -> list[Table]:
        """Return the tables of all sections."""
        return [table for section in self.sections for table in section.tables]


def page(report: Report, files: Sequence[str] = ()) -> str:
    """Return the HTML page; `files` are those that are written with it, which analysis.report.folder reads."""
    return _rendered(
        "report.html.j2", escape=True, report=report, colours=COLOURS, files=files, policy=POLICY
    )


def markdown_page(report: Report) -> str:
    """Return the report as Markdown; its figures are files of the folder `figures`."""
    return _rendered("report.md.j2", escape=False, report=report, table=to_markdown, text=_text)


def _left(table: Table) -> str:
    """Return `40 more rows in tables/cells.csv`; empty if all are shown."""
    more = len(table.rows) - PAGE_ROWS
    return f"{count(more, 'more row')} in tables/{table.name}.csv" if more > 0 else ""


def _text(text: str) -> str:
    return markdown(text, TEXT_LENGTH)


def _rendered(name: str, escape: bool, **values: Any) -> str:
    """Return a filled template; where it escapes, every text is first made a single line without control characters."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("analysis.report"),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=(lambda value: single_line(value, TEXT_LENGTH) if type(value) is str else value)
        if escape
        else None,
    )
    return environment.get_template(name).render(rows=PAGE_ROWS, left=_left, **values)
