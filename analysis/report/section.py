"""What a section of a report is: sentences, figures and tables that answer one question.

The functions below read what several sections say of records. Sections speak of GPUs and images;
`words_of` puts a report into the words of a study of CPU workers, or of samples.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from analysis.findings.communication import COST
from analysis.findings.examine import Findings
from analysis.report.figure import Figure, for_phone
from analysis.report.numbers import THIN, estimate, of_metric
from analysis.report.table import Table
from analysis.study import intervals
from analysis.study.intervals import Estimate
from analysis.study.names import of_unit, unit_of
from analysis.study.noise_floor import FloorGroup
from analysis.study.runs import Runs, median_of, named
from analysis.study.study import Study
from analysis.text import single_line
from analysis.validity.checks import limit_marks
from benchmarks.record import VERDICTS, Record
from conf.cell import counted

RATE = "throughput/images_per_second"
BEFORE_PERCENT = re.compile(r"(?<=\d) (?=%)")  # in sentences of records


@dataclass(frozen=True)
class Section:
    """One question and its answer; those with one anchor stand together, under the first title."""

    anchor: str  # names it in links to the page
    title: str
    lines: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    commands: tuple[str, ...] = ()
    finding: tuple[str, ...] = ()  # for the first screen of a study that counts no images

    def on_page(self, answer: str, for_phones: bool) -> "Section":
        """Return the section without the figure that answers, drawn for phones too."""
        figures = [figure for figure in self.figures if figure.name != answer]
        if for_phones:
            figures = list(map(for_phone, figures))
        return replace(self, figures=tuple(figures))

    def in_words_of(self, study: Study) -> "Section":
        """Return the section in the words of what a study counts."""
        words, unit = words_of(study), unit_of(study)
        figures, tables = [], []
        for figure in self.figures:
            figures.append(replace(figure, caption=words(figure.caption)))
        for table in self.tables:
            tables.append(table.translated(words, lambda text: of_unit(text, unit)))
        lines = tuple(map(words, self.lines))
        return replace(self, lines=lines, figures=tuple(figures), tables=tuple(tables))


# A question that this study does not ask has no section.
SectionFunction = Callable[[Study, Findings], Section | None]


def words_of(study: Study) -> Callable[[str], str]:
    """Return what puts words about GPUs and images into those of a study."""
    unit, things = unit_of(study), counted(record.cell for record in study.records)

    def words(text: str) -> str:
        text = BEFORE_PERCENT.sub(THIN, of_unit(text, unit))
        if things != "images":
            text = text.replace("images", things).replace("Images", things.capitalize())
        return text

    return words


def bounded(study: Study, record: Record, metric: str) -> Estimate | None:
    """Return a metric of a record, of a usable one with the interval of the next run if known."""
    runs = study.single(record)
    if record.usable:
        return runs.next_run(metric)
    value = runs.median(metric)
    return None if value is None else Estimate(value)


def verdict_of(runs: Iterable[Record]) -> str:
    """Return the worst verdict of runs, with limits that were not the defaults; else empty."""
    limits: dict[str, None] = {}
    verdict = "valid"
    for record in runs:
        verdict = max(verdict, record.validity.verdict, key=VERDICTS.index)
        limits |= dict.fromkeys(limit_marks(record))
    if verdict == "valid" and not limits:
        return ""
    return ", ".join([verdict, *limits])


def median_and_interval(runs: Runs, metric: str) -> str:
    """Return `377 (375 to 378)`, the median over runs; empty where no run has the metric."""
    value = runs.next_run(metric)
    if value is None:
        return ""
    return estimate(value, of_metric(metric))


def about_intervals(study: Study, subject: str = "Ranges are") -> str:
    """Return ` Ranges are 95 % intervals for the next run, …`, to end a caption; empty without."""
    runs, lent_by, borrows = [], "", False
    measured: Counter[FloorGroup] = Counter(same.group for _, same in study.drift)
    for same in study.runs:
        measured[same.group] += len(same.values(RATE))
    for same in study.runs:
        floor = same.floor(RATE)
        if floor is None or not same.values(RATE):
            continue
        if not floor.lenders:
            runs.append(floor.runs)
            borrows = borrows or floor.runs > measured[same.group]
        elif lent_by in ("", floor.lent_by):
            lent_by = floor.lent_by
        else:
            lent_by = "those that section “Run-to-run variation” names"
    basis = intervals.rests_on(runs, lent_by)
    if not basis:
        return ""
    if borrows:
        basis += " (some are of other studies)"
    return f" {subject} 95 % intervals {intervals.WORDS}, {basis}."


def about_costs(study: Study) -> str:
    """Return what the interval of a cost is, to follow `about_intervals`; empty without costs."""
    if median_of(study.records, COST) is None:
        return ""
    return (
        " An overhead from one run has the interval of that run's own steps; “–”: it is suspect, "
        "and may be zero."
    )


def invalid_records(study: Study) -> list[Record]:
    """Return the runs that finished and are invalid."""
    finished = [record for record in study.records if record.state == "finished"]
    return [record for record in finished if record.validity.verdict == "invalid"]


def next_command(study: Study, option: str) -> str:
    """Return the command that measured most of a study, with one option more or another value.

    Of several strategies, one with invalid runs alone is left out.
    """
    commands = Counter(tuple(record.overrides) for record in study.records)
    (overrides, _), *_ = commands.most_common(1)
    usable = {named(record, "strategy") for record in study.usable}
    refused = {named(record, "strategy") for record in invalid_records(study)} - usable
    name, kept = option.partition("=")[0], []
    for override in overrides:
        asked, _, values = override.partition("=")
        if asked == "strategy" and "," in values:
            strategies = [value for value in values.split(",") if value not in refused]
            override = f"strategy={','.join(strategies) or values}"
        if override not in ("-m", "--multirun") and asked != name:
            kept.append(override)
    return single_line(shlex.join(["python", "launch.py", "-m", *kept, option]), 2000)
