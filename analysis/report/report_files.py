"""The files of a report: one HTML page, Markdown and a LaTeX document, by jinja2, and its folder.

The page is whole in itself: drawings inside, no script, nothing fetched. jinja2 escapes every text
of a record. The page lists the files that were written with it (`<meta name="ringside-files" …>`).
A folder with such a page is replaced as a whole: the new files are written into a folder beside it,
files that the page does not list are the user's and are taken along, and then the two folders are
swapped. Whatever ends the writing leaves the earlier report as it was.
"""

import html
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.report.figure import COLOURS, Figure
from analysis.report.latex import latex
from analysis.report.methods import BIBTEX
from analysis.report.section import Section
from analysis.report.table import TEXT_LENGTH, Table
from analysis.text import markdown, single_line
from benchmarks.record.safe_files import make_folder, refuse_other

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
PAGE = "index.html"
_LISTED = re.compile(r'<meta name="ringside-files" content="([^"]*)">')
PAGE_ROWS = 60  # of a table on the page and in Markdown; the CSV has all


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    study: str
    setting: str  # the machine, how many runs, and when, in a line
    finding: tuple[str, ...]  # at most five sentences: two answer, the others explain
    unsaid: Mapping[str, str]  # {what was not measured, and why: the command that measures it}
    sections: tuple[Section, ...]
    limits: str = ""  # a sentence on limits of checks that were not the defaults
    verdict: str = ""  # of all runs together
    is_doubtful: bool = False  # the numbers of the answer are
    answer: Figure | None = None  # the figure beside it
    methods: str = ""  # the setup paragraph of a paper, as LaTeX

    @property
    def figures(self) -> list[Figure]:
        """The figure beside the answer, then those of all sections."""
        figures = [self.answer] if self.answer else []
        for section in self.sections:
            figures += section.figures
        return figures

    @property
    def tables(self) -> list[Table]:
        """The tables of all sections."""
        tables: list[Table] = []
        for section in self.sections:
            tables += section.tables
        return tables


def page(report: Report, files: Sequence[str] = ()) -> str:
    """Return the HTML page; `files` are those written with it."""
    shown = {"colours": COLOURS, "files": files, "policy": POLICY}
    return _filled("report.html.j2", report, True, **shown)


def markdown_page(report: Report) -> str:
    """Return the report as Markdown; its figures are files of the folder `figures`."""
    return _filled("report.md.j2", report, False, text=lambda text: markdown(text, TEXT_LENGTH))


def paper(report: Report) -> str:
    """Return the LaTeX document that shows every figure and every table with rows."""
    lines = [PAPER, rf"\begin{{center}}\Large {latex(report.study)}\end{{center}}"]
    if report.methods:
        lines += [r"\section*{Experimental setup}", r"\input{methods.tex}"]
    first = Section("answer", "Answer", figures=(report.answer,) if report.answer else ())
    for section in (first, *report.sections):
        inputs = []
        for figure in section.figures:
            if figure.pdf:
                inputs.append(rf"\input{{figures/{figure.name}.tex}}")
        for table in section.tables:
            if table.for_people.rows:
                inputs.append(rf"\input{{tables/{table.name}.tex}}")
        if inputs:
            lines += [rf"\section*{{{latex(section.title)}}}", *inputs, r"\clearpage"]
    return "\n".join(
        [*lines, r"\bibliographystyle{plain}\bibliography{ringside}\end{document}", ""]
    )


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


# ---- The folder ----------------------------------------------------------------------------------


def write(content: Report, folder: Path) -> Path:
    """Write every file of a report in place of an earlier report's, and return its page.

    Raises OSError: the folder cannot be written, or holds something else than a report.
    """
    files = {"report.md": markdown_page(content).encode(), "paper.tex": paper(content).encode()}
    files |= {"methods.tex": content.methods.encode(), "ringside.bib": BIBTEX.encode()}
    for table in content.tables:
        files[f"tables/{table.name}.csv"] = table.to_csv().encode()
        if table.for_people.rows:
            files[f"tables/{table.name}.tex"] = table.to_latex().encode()
    for figure in content.figures:
        files[f"figures/{figure.name}.svg"] = figure.svg.encode()
        if figure.pdf:
            files[f"figures/{figure.name}.pdf"] = figure.pdf
            files[f"figures/{figure.name}.tex"] = figure.to_latex().encode()
        if figure.data:
            files[f"figures/{figure.name}.csv"] = figure.data.to_csv().encode()
    write_folder(folder, files | {PAGE: page(content, sorted(files)).encode()})
    return folder / PAGE


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, by their paths from the folder, and remove those of an earlier report.

    Raises OSError: the folder holds something else than a report (FileExistsError), is a link or no
    folder (NotOurs), or cannot be written.
    """
    refuse_other(folder, stat.S_IFDIR)
    target = folder.resolve()
    users_own = _users_files(folder, target, files)
    make_folder(target.parent)
    name = uuid.uuid4().hex
    new = target.with_name(f".{target.name}.{name}.new")
    old = target.with_name(f".{target.name}.{name}.old")
    try:
        for path, content in files.items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_bytes(content)
        for path in users_own:
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(target / path, new / path, follow_symlinks=False)
            except OSError:
                shutil.copy2(target / path, new / path, follow_symlinks=False)
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _users_files(folder: Path, target: Path, files: Mapping[str, bytes]) -> list[str]:
    """Return the files in a report's folder that no report wrote. Raises as `write_folder`."""
    present = []
    for where, folders, names in os.walk(target):
        for name in sorted([*names, *folders]):
            path = Path(where) / name
            if name in names or path.is_symlink():
                present.append(str(path.relative_to(target)))
    earlier = None
    try:
        refuse_other(target / PAGE)  # to wait for a pipe would be for ever
        listed = _LISTED.search((target / PAGE).read_text(encoding="utf-8", errors="replace"))
        if listed is not None:
            earlier = {PAGE, *map(str, json.loads(html.unescape(listed[1])))}
    except (OSError, ValueError, TypeError):
        pass  # an unreadable page, or a list that is none, is no page of Ringside's
    if present and earlier is None:
        raise FileExistsError(
            f"{folder}: holds files, and no report of Ringside; nothing was written (-o names "
            "another folder)"
        )
    # A report has no links and no pipes: one with the name of its file is the user's.
    users_own = []
    for file in present:
        is_file = stat.S_ISREG((target / file).lstat().st_mode)
        if earlier is None or file not in earlier or not is_file:
            users_own.append(file)
            if file in files:
                raise FileExistsError(
                    f"{folder / file}: is not of the earlier report and would be overwritten; "
                    "nothing was written (move it away)"
                )
    return users_own
