"""A study's report: read the records, compute what they show, write it as files.

    index.html     one page, whole in itself
    report.md      the same as Markdown
    paper.tex      every figure and table for papers: latexmk -pdf paper.tex
    tables/        every table as CSV (all rows, numbers unrounded) and LaTeX (booktabs)
    figures/       every figure as SVG and PDF, the numbers that it shows as CSV, and its caption as LaTeX

The same records give the same bytes. The report names what a study cannot answer.
"""

import dataclasses
from datetime import datetime, timezone
from pathlib import Path

from analysis.findings.examine import findings_of
from analysis.gc_pause import gc_paused
from analysis.report.contents import benchmark_sections, contents
from analysis.report.finding.sentences import sentences
from analysis.report.folder import PAGE, write_folder
from analysis.report.page import Report, markdown_page, page
from analysis.report.papers.document import document
from analysis.report.papers.figure import to_figure
from analysis.report.papers.table import to_latex
from analysis.report.style import ON_PAGE, style
from analysis.report.tables import to_csv
from analysis.study.estimates import Findings
from analysis.study.names import names_of_unit as of_unit
from analysis.study.names import unit_of
from analysis.study.study import Study, open_study
from analysis.text import count, first_lines, sentence, single_line
from analysis.verification.quick import QuickCheck


def report(study_folder: Path, out_folder: Path) -> Path:
    """Write the report of a study and return its page. Raises OSError: a folder cannot be read or written."""
    content, _ = examine(study_folder)
    return write(content, out_folder)


def examine(study_folder: Path, width: str = ON_PAGE) -> tuple[Report, Findings]:
    """Read a study and return its report and findings; `width` is that of its figures (style.WIDTHS_IN).

    Raises:
        OSError: the folder cannot be read.
    """
    with gc_paused():  # thousands of records
        study = checked_study(study_folder)
        findings = findings_of(study)
        return report_of(study, findings, width), findings


def checked_study(study_folder: Path) -> Study:
    """Read a study; records that do not agree with their raw samples are invalid. Raises OSError: the folder cannot be read."""
    check = QuickCheck()
    study = open_study(study_folder, check.marked)
    return dataclasses.replace(study, compared=check.sentence())


def report_of(study: Study, findings: Findings, width: str = ON_PAGE) -> Report:
    """Return the report of a study and of its findings."""
    unsaid = [of_unit(line, unit_of(study)) for line in findings.unsaid] if study.trains else []
    if study.unreadable:
        unsaid.append(
            f"{count(len(study.unreadable), 'file')} could not be read: {study.unreadable[0]}"
        )
    with style(width):
        of_benchmarks = benchmark_sections(study, findings)
        sections = contents(study, findings, of_benchmarks.values())
    return Report(
        single_line(study.name), _setting(study), tuple(sentences(study, findings, of_benchmarks)),
        tuple(first_lines(sentence(single_line(line, 1000)) for line in unsaid)), sections,
    )  # fmt: skip


def _setting(study: Study) -> str:
    """Return how many runs the study has, and when they were measured."""
    if not study.records:
        return "no record"
    days = [
        datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d")
        for at in (study.records[0].started_at, study.records[-1].ended_at)
    ]
    when = " to ".join(dict.fromkeys(days))
    runs, usable = len(study.records), len(study.usable)
    used = (
        count(runs, "run") if usable == runs else f"{count(runs, 'run')}, {usable:,} of them usable"
    )
    return single_line(f"{used} · {when} (UTC)", 600)


def write(content: Report, folder: Path) -> Path:
    """Write every file of a report in place of an earlier report's, and return its page.

    Raises:
        OSError: the folder cannot be written, or holds something else than a report.
    """
    files = _files(content)
    write_folder(folder, files | {PAGE: page(content, sorted(files)).encode()})
    return folder / PAGE


def _files(content: Report) -> dict[str, bytes]:
    """Return the content of every file but the page."""
    files = {"report.md": markdown_page(content).encode(), "paper.tex": document(content).encode()}
    for section in content.sections:
        for table in section.tables:
            files[f"tables/{table.name}.csv"] = to_csv(table).encode()
            files[f"tables/{table.name}.tex"] = to_latex(table).encode()
        for picture in section.pictures:
            files[f"figures/{picture.name}.svg"] = picture.svg.encode()
            if picture.pdf:
                files[f"figures/{picture.name}.pdf"] = picture.pdf
                files[f"figures/{picture.name}.tex"] = to_figure(picture).encode()
            if picture.data:
                files[f"figures/{picture.name}.csv"] = to_csv(picture.data).encode()
    return files
