"""A study's report: read the records, compute what they show, write it as files.

    index.html     one page, whole in itself
    report.md      the same as Markdown
    methods.tex    the setup paragraph of a paper, which cites ringside.bib
    paper.tex      it, every figure and every table: latexmk -pdf paper.tex
    tables/        every table as CSV (all rows, numbers unrounded) and LaTeX (booktabs)
    figures/       every figure as SVG and PDF, its numbers as CSV, its caption as LaTeX

The same records give the same bytes. The report names what a study cannot answer.
"""

import contextlib
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from analysis.findings.between_studies import differences
from analysis.findings.examine import Findings, findings_of
from analysis.input_files import gc_paused
from analysis.report.figure import ON_PAGE, Figure, for_screen_and_phone, style
from analysis.report.main_point import answer_figure, main_point
from analysis.report.report_files import Report, methods
from analysis.report.section import Section, SectionFunction, next_command, words_of
from analysis.report.sections import (
    benchmarks_section,
    comparisons_section,
    conditions_section,
    link_map_section,
    losses_section,
    machine_section,
    noise_section,
    question_section,
    scaling_section,
    strategies_section,
    studies_section,
)
from analysis.report.summary import SENTENCES, sentences
from analysis.study.names import short_names
from analysis.study.noise_floor import of_other_studies
from analysis.study.provenance import hardware
from analysis.study.runs import named
from analysis.study.study import Study, open_study
from analysis.study.study_inputs import StudyPath, differing, open_inputs, studies_in
from analysis.text import count, join_words, sentence, single_line
from analysis.validity.checks import changed_limits, serious
from analysis.verification.verify_study import QuickCheck
from benchmarks.record import REHEARSAL, STATES
from conf import groups
from conf.options import Refused
from conf.targets import locate_without_torch

BENCHMARKS = None  # their sections, which their YAML names
# The page from top to bottom.
SECTIONS: tuple[SectionFunction | None, ...] = (
    conditions_section.rehearsal,
    question_section.question,
    link_map_section.where_each_wins,
    scaling_section.scaling,
    scaling_section.rates_by_option,
    scaling_section.resources,
    losses_section.waterfall,
    machine_section.links,
    machine_section.wire_lines,
    scaling_section.forecasts,
    machine_section.machine,
    BENCHMARKS,
    comparisons_section.settings,
    strategies_section.strategies,
    losses_section.traces,
    comparisons_section.comparisons,
    noise_section.noise,
    conditions_section.fast_paths,
    conditions_section.validity,
    conditions_section.environment,
    conditions_section.costs,
    conditions_section.commands,
    conditions_section.cells,
)
MOST_LIMITS = 11  # all that there are, where each has one value
# How sentences on the ranking begin: a question has an answer of its own.
RANKING = (
    "Fastest on ",
    "The fastest on ",
    "Highest rate on ",
    "Slower than ",
    "Too few repeats to ",
)
MOST_NAMES = 3  # of studies in a title and in the name of a folder


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
    return replace(study, compared=check.sentence())


def examine_several(asked: Sequence[StudyPath], width: str = ON_PAGE) -> tuple[Report, Findings]:
    """Return the report of several studies as one: each keeps its own baselines and repeats.

    Raises OSError, ValueError: a folder holds no study.
    """
    with gc_paused():
        check = QuickCheck()
        sides = [*itertools.chain(*open_inputs(asked, check.marked))]
        records = []
        for side in sides:
            for record in (*side.study.records, *side.study.replaced):
                records.append(replace(record, study=side.name))
        names = [side.name for side in sides]
        if len(names) > MOST_NAMES:
            names = [path.label or path.folder.resolve().name for path in asked]
        study = replace(
            Study.of(records, by_study=True),
            name=single_line(join_words([*short_names(names).values()]), 200),
            compared=check.sentence(),
        )
        compared = {side.name: differences(sides[:1], [side]) for side in sides[1:]}
        facts, _ = differing(sides)  # a value for each study
        for position, against_first in enumerate(compared.values(), 1):
            for name, (first_value, value) in against_first.facts.items():
                facts.setdefault(name, [first_value] * len(sides))[position] = value
        between = studies_section.studies(facts, sides, compared).in_words_of(study)
        findings = findings_of(study)
        content = report_of(study, findings, width)
        with style(width):
            answer = next(map(for_screen_and_phone, studies_section.changes(compared)), None)
    return _with_comparison(content, between, answer), findings


def _with_comparison(content: Report, between: Section, answer: Figure | None) -> Report:
    """Return a page that begins with maps and the comparison of studies, and answers with it."""
    maps = [each for each in content.sections if each.anchor == link_map_section.ANCHOR]
    rest = [section for section in content.sections if section not in maps]
    finding: list[str] = []
    for section in (*maps, between):
        finding += section.finding
    finding += content.finding
    if answer and not maps:  # a map is the answer itself
        if content.answer:
            on_page = (content.answer.svg, *content.answer.on_page[1:])
            usual_answer = replace(content.answer, on_page=on_page)
            rest.append(Section("scaling", "Configurations", figures=(usual_answer,)))
        content = replace(content, answer=answer)
    sections = tuple(joined_by_anchor([*maps, between, *rest]))
    return replace(content, finding=tuple(finding[:SENTENCES]), sections=sections)


def default_folder(asked: Sequence[StudyPath]) -> Path:
    """Return where the report of several studies is written: beside the first of them."""
    folders = []
    for path in asked:
        folders += [folder.resolve() for folder in studies_in(path.folder)]
    first = asked[0].folder.resolve()
    parent = first.parent if folders[0] == first else first
    digest = hashlib.sha256("\n".join(map(str, folders)).encode()).hexdigest()[:6]
    names = "-".join(path.folder.resolve().name for path in asked[:MOST_NAMES])
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
        main = main_point(study, findings)
        answer = answer_figure(study, findings, main, sections)
        name = answer.name if answer is not None else ""
        shown = [section.on_page(name, for_phones=width == ON_PAGE) for section in sections]
    finding = tuple(sentences(study, findings, of_benchmarks))
    first = sections[0] if sections else Section("", "")
    if first.anchor == "question":
        finding = tuple(line for line in finding if not line.startswith(RANKING))
        finding = (*first.lines[:2], *finding)
    elif first.anchor == "rehearsal":
        finding = first.finding
    if answer is not None:
        answer = replace(answer, caption=words_of(study)(answer.caption))
    verdicts = {record.validity.verdict for record in study.usable}
    return Report(
        single_line(study.name),
        setting(study),
        finding[:SENTENCES],
        not_measured(study, findings),
        tuple(joined_by_anchor(section.in_words_of(study) for section in shown)),
        limits_sentence(study),
        verdict_line(study),
        main.point.suspect if main is not None else verdicts == {"suspect"},
        answer,
        methods(study, findings),
    )


def finding_on(subjects: Collection[tuple[str, ...]], study: Study, whole: Report) -> Sequence[str]:
    """Return the sentences of a study's report on these subjects of its cells alone; none without
    a record of them."""
    records = []
    for record in (*study.records, *study.replaced):
        if record.cell.subject in subjects:
            records.append(record)
    if len(records) == len(study.records) + len(study.replaced):
        return whole.finding
    if not records:
        return ()
    scatters = of_other_studies(study.folder) if study.folder else None
    part = Study.of(records, folder=study.folder, scatters=scatters)
    return report_of(part, findings_of(part)).finding


def joined_by_anchor(sections: Iterable[Section]) -> list[Section]:
    """Return the sections that show something; those with one anchor as one, with all that they
    hold, under the title of the first.
    """
    by_anchor: dict[str, Section] = {}
    for section in sections:
        has_rows = any(table.rows for table in section.tables)
        if not (section.lines or section.figures or has_rows or section.commands):
            continue
        first = by_anchor.get(section.anchor)
        if first is not None:
            section = replace(
                first,
                lines=first.lines + section.lines,
                figures=first.figures + section.figures,
                tables=first.tables + section.tables,
                commands=first.commands + section.commands,
            )
        by_anchor[section.anchor] = section
    return list(by_anchor.values())


def not_measured(study: Study, findings: Findings) -> dict[str, str]:
    """Return {what the study cannot say, and why: the command that measures it, if there is one}.

    What one option measures is one entry.
    """
    by_option: dict[str, list[str]] = defaultdict(list)
    if study.trains and study.usable:
        for why, option in {**findings.scaling.refusals, **findings.unsaid}.items():
            by_option[option or why].append(sentence(single_line(words_of(study)(why), 600)))
    if study.unreadable:
        files = count(len(study.unreadable), "file")
        by_option["unreadable"] = [f"{files} could not be read: {study.unreadable[0]}."]
    entries = {}
    for option, lines in by_option.items():
        command = next_command(study, option) if "=" in option.partition(" ")[0] else ""
        entries[" ".join(lines)] = command
    return entries


def setting(study: Study) -> str:
    """Return `2 × NVIDIA H200 · 25 runs · 2026-11-21 (UTC)`: the machines, how many runs, when."""
    if not study.records:
        return "no record"
    days = []
    for at in (study.records[0].started_at, study.records[-1].ended_at):
        days.append(datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d"))
    machines = list(dict.fromkeys(map(hardware, study.records)))
    facts = (
        join_words(machines, 3),
        count(len(study.records), "run"),
        " to ".join(dict.fromkeys(days)),
    )
    return single_line(f"{' · '.join(filter(None, facts))} (UTC)", 600)


def verdict_line(study: Study) -> str:
    """Return `✓ 25 runs are valid`, or how many have which verdict and the codes, invalid first."""
    verdicts: Counter[str] = Counter()
    codes: dict[str, dict[str, None]] = {"invalid": {}, "suspect": {}}
    for record in study.records:
        verdict = record.validity.verdict if record.state == "finished" else record.state
        verdicts[verdict] += 1
        if verdict in codes:
            codes[verdict] |= dict.fromkeys(serious(record.validity))
    if not study.records:
        return ""
    runs = len(study.records)
    if REHEARSAL in verdicts:
        return "a rehearsal: no rate was measured"
    if verdicts.keys() == {"valid"}:
        return f"✓ {count(runs, 'run is', 'runs are')} valid"
    order = ["valid", "invalid", "suspect", *STATES]
    words = [f"{verdicts[verdict]:,} {verdict}" for verdict in sorted(verdicts, key=order.index)]
    line = f"✗ {', '.join(words)}"
    if len(words) == 1:
        line = f"✗ {count(runs, 'run')} {next(iter(verdicts))}"
    against = list(codes["invalid"] | codes["suspect"])
    if against:
        line += f": {join_words(against, MOST_NAMES)}"
    return single_line(line, 300)


def limits_sentence(study: Study) -> str:
    """Return which limits of checks were not the defaults, and in how many runs; else empty."""
    cells: Counter[str] = Counter()
    for record in study.records:
        cells.update(changed_limits(record))
    if not cells:
        return ""
    words = [f"{limit} in {count(number, 'run')}" for limit, number in cells.items()]
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
