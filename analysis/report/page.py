"""Write a report as one HTML page, as Markdown and as a LaTeX document, by jinja2.

The page is whole in itself: drawings inside, no script, nothing fetched. jinja2 escapes every text
of a record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.report.figure import COLOURS
from analysis.report.latex import latex
from analysis.report.section import Section
from analysis.report.table import TEXT_LENGTH, Table
from analysis.text import markdown, single_line

# No script runs and nothing is fetched, whatever a record holds. Drawings have styles inside and
# may hold images.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
PAPER = r"""% Every figure and table of this report, each a file to \input: latexmk -pdf paper.tex
\documentclass[10pt]{article}
\usepackage[a4paper,margin=2cm]{geometry}
\usepackage{booktabs,graphicx,longtable}
\graphicspath{{figures/}}
\begin{document}"""
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
        """The tables of all sections."""
        tables: list[Table] = []
        for section in self.sections:
            tables += section.tables
        return tables


def page(report: Report, files: Sequence[str] = ()) -> str:
    """Return the HTML page; `files`, written with it, are for analysis.report.report_folder."""
    shown = {"colours": COLOURS, "files": files, "policy": POLICY}
    return _filled("report.html.j2", report, True, **shown)


def markdown_page(report: Report) -> str:
    """Return the report as Markdown; its figures are files of the folder `figures`."""
    return _filled("report.md.j2", report, False, text=lambda text: markdown(text, TEXT_LENGTH))


def paper(report: Report) -> str:
    """Return the LaTeX document that shows every figure and every table with rows."""
    lines = [PAPER, rf"\begin{{center}}\Large {latex(report.study)}\end{{center}}"]
    for section in report.sections:
        inputs = []
        for figure in section.figures:
            if figure.pdf:
                inputs.append(rf"\input{{figures/{figure.name}.tex}}")
        for table in section.tables:
            if table.rows:
                inputs.append(rf"\input{{tables/{table.name}.tex}}")
        if inputs:
            lines += [rf"\section*{{{latex(section.title)}}}", *inputs, r"\clearpage"]
    return "\n".join([*lines, r"\end{document}", ""])


def _filled(name: str, report: Report, is_html: bool, **values: Any) -> str:
    """Return a filled template; in HTML every text is escaped and made a single line."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    def finalize(value: Any) -> Any:
        if is_html and type(value) is str:
            return single_line(value, TEXT_LENGTH)
        return value

    environment = Environment(
        loader=PackageLoader("analysis.report"),
        autoescape=is_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalize,
    )
    template = environment.get_template(name)
    return template.render(report=report, rows=PAGE_ROWS, **values)
