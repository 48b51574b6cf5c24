"""A study's report: read the records, compute what they show, write it as files.

    index.html     one page, whole in itself
    report.md      the same as Markdown
    paper.tex      every figure and table for papers: latexmk -pdf paper.tex
    tables/        every table as CSV (all rows, numbers unrounded) and LaTeX (booktabs)
    figures/       every figure as SVG and PDF, its numbers as CSV, its caption as LaTeX

The same records give the same bytes. The report names what a study cannot answer.
"""

import contextlib
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from analysis.findings.between_studies import differences
from analysis.findings.examine import Findings, findings_of
from analysis.findings.study_inputs import StudyPath, differing, open_inputs, studies_in
from analysis.input_files import gc_paused
from analysis.report.figure import ON_PAGE, style
from analysis.report.report_files import Report, write
from analysis.report.section import Section, SectionFunction, words_of
from analysis.report.sections import benchmarks_section
from analysis.report.sections.comparisons_section import (
    comparisons,
    noise,
    settings,
    strategies,
    studies,
)
from analysis.report.sections.conditions_section import (
    cells,
    commands,
    costs,
    environment,
    validity,
)
from analysis.report.sections.links_section import links, wire_lines
from analysis.report.sections.losses_section import traces, waterfall
from analysis.report.sections.machine_section import machine
from analysis.report.sections.scaling_section import forecasts, rates_by_option, scaling
from analysis.report.summary import SENTENCES, sentences
from analysis.study.runs import named
from analysis.study.study import Study, open_study
from analysis.text import count, first_lines, join_words, sentence, single_line
from analysis.validity.checks import changed_limits
from analysis.verification.quick import QuickCheck
from conf import groups
from conf.options import Refused
from conf.targets import locate_without_torch

BENCHMARKS = None  # their sections, which their YAML names
# The page from top to bottom.
SECTIONS: tuple[SectionFunction | None, ...] = (
    scaling,
    rates_by_option,
    waterfall,
    links,
    wire_lines,
    forecasts,
    machine,
    BENCHMARKS,
    settings,
    strategies,
    traces,
    comparisons,
    noise,
    validity,
    environment,
    costs,
    commands,
    cells,
)
MOST_LIMITS = 11  # all that there are, where each has one value
MOST_NAMES = 3  # of studies in a title and in the name of a folder


def report(study_folder: Path, out_folder: Path) -> Path:
    """Write the report of a study and return its page. Raises OSError."""
    content, _ = examine(study_folder)
    return write(content, out_folder)


def examine(study_folder: Path, width: str = ON_PAGE) -> tuple[Report, Findings]:
    """Return the report of a study, its figures of a width, and its findings. Raises OSError."""
    with gc_paused():  # thousands of records
        study = checked_study(study_folder)
        findings = findings_of(study)
        return report_of(study, findings, width), findings


def checked_study(study_folder: Path) -> Study:
    """Read a study; records that do not agree with their raw samples are invalid."""
    check = QuickCheck()
    study = open_study(study_folder, check.marked)
    return dataclasses.replace(study, compared=check.sentence())


def examine_several(asked: Sequence[StudyPath], width: str = ON_PAGE) -> tuple[Report, Findings]:
    """Return the report of several studies as one: each keeps its own baselines and repeats.

    Raises OSError, ValueError: a folder holds no study.
    """
    with gc_paused():
        check = QuickCheck()
        sides = []
        for of_folder in open_inputs(asked, check.marked):
            sides += of_folder
        names, records = [], []
        for side in sides:
            names.append(side.name)
            for record in (*side.study.records, *side.study.replaced):
                records.append(dataclasses.replace(record, study=side.name))
        if len(names) > MOST_NAMES:
            names = [each.label or each.folder.resolve().name for each in asked]
        study = dataclasses.replace(
            Study.of(records, by_study=True),
            name=single_line(join_words(names), 200),
            compared=check.sentence(),
        )
        compared = {side.name: differences(sides[:1], [side]) for side in sides[1:]}
        facts, _ = differing(sides)
        for position, of_cells in enumerate(compared.values(), 1):
            for name, (of_first, of_side) in of_cells.facts.items():
                facts.setdefault(name, [of_first] * len(sides))[position] = of_side
        between = studies(facts, sides, compared)
        findings = findings_of(study)
        content = report_of(study, findings, width)
    first, *rest = content.finding
    finding = (first, *between.lines[: len(compared)][:2], *rest)[:SENTENCES]
    sections = (between, *content.sections)
    return dataclasses.replace(content, finding=finding, sections=sections), findings


def default_folder(asked: Sequence[StudyPath]) -> Path:
    """Return where the report of several studies is written: beside the first of them."""
    folders = []
    for each in asked:
        folders += [folder.resolve() for folder in studies_in(each.folder)]
    first = asked[0].folder.resolve()
    parent = first.parent if folders[0] == first else first
    digest = hashlib.sha256("\n".join(map(str, folders)).encode()).hexdigest()[:6]
    names = "-".join(each.folder.resolve().name for each in asked[:MOST_NAMES])
    return parent / f"report-{names}-{digest}"


def report_of(study: Study, findings: Findings, width: str = ON_PAGE) -> Report:
    """Return the report of a study and of its findings."""
    with style(width):
        of_benchmarks = benchmark_sections(study, findings)
        sections: list[Section] = []
        for function in SECTIONS:
            if function is None:
                sections += of_benchmarks.values()
                continue
            section = function(study, findings)
            if section is not None:
                sections.append(section)
    by_anchor: dict[str, Section] = {}
    for section in sections:
        section = section.in_words_of(study)
        if not section.is_empty:
            before = by_anchor.get(section.anchor)
            by_anchor[section.anchor] = before.joined(section) if before else section
    unsaid = list(map(words_of(study), findings.unsaid)) if study.trains else []
    if study.unreadable:
        files = count(len(study.unreadable), "file")
        unsaid.append(f"{files} could not be read: {study.unreadable[0]}")
    setting = "no record"  # how many runs, and when they were measured
    if study.records:
        days = []
        for at in (study.records[0].started_at, study.records[-1].ended_at):
            days.append(datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d"))
        used = count(len(study.records), "run")
        if len(study.usable) < len(study.records):
            used += f", {len(study.usable):,} of them usable"
        setting = single_line(f"{used} · {' to '.join(dict.fromkeys(days))} (UTC)", 600)
    return Report(
        single_line(study.name),
        setting,
        tuple(sentences(study, findings, of_benchmarks)),
        tuple(first_lines(sentence(single_line(line, 1000)) for line in unsaid)),
        tuple(by_anchor.values()),
        limits_sentence(study),
    )


def limits_sentence(study: Study) -> str:
    """Return which limits of checks were not the defaults, and in how many cells; else empty."""
    cells: Counter[str] = Counter()
    for record in study.records:
        cells.update(changed_limits(record))
    if not cells:
        return ""
    words = [f"{limit} in {count(number, 'cell')}" for limit, number in cells.items()]
    return single_line(
        "Verdicts of this study were made under limits that are not the defaults: "
        f"{join_words(words, MOST_LIMITS)}; each has them beside it.",
        900,
    )


def benchmark_sections(study: Study, findings: Findings) -> dict[str, Section]:
    """Return {benchmark: its section}: Ringside's, then others in the order of their runs.

    A YAML of this installation names the function that makes it; a name that only a record has is
    not imported.
    """
    dotted_names: dict[str, str] = dict.fromkeys(benchmarks_section.ORDER, "")
    for record in study.records:
        benchmark = named(record, "benchmark")
        if not dotted_names.get(benchmark):
            dotted = record.cell.declared.get("benchmark", {}).get("section")
            with contextlib.suppress(Refused):  # a benchmark that is not in this installation
                dotted = groups.choice("benchmark", benchmark).code.get("section") or dotted
            dotted_names[benchmark] = str(dotted or "")
    sections = {}
    for benchmark, dotted in dotted_names.items():
        if not dotted:
            continue
        try:
            if not groups.declares("section", dotted):
                raise Refused(f"{dotted} is not run ({groups.NOT_DECLARED})")
            section = locate_without_torch(dotted)(study, findings)
            if not isinstance(section, Section):
                raise TypeError(f"it returned {type(section).__name__}, expected a Section")
            sections[benchmark] = section
            continue
        except Refused as error:
            why = str(error)
        except Exception as error:  # code of a user may raise anything, and ends only its section
            why = f"{dotted} failed ({type(error).__name__}: {error})"
        line = single_line(f"This section was not made: {why}.", 600)
        title = f"Benchmark {single_line(benchmark, 80)}"
        sections[benchmark] = Section(benchmark, title, (line,))
    return sections
