"""The finding of a study in at most five sentences: what was measured, the answer, how sure it is, why, and what to do next."""

from collections.abc import Iterator, Mapping

from analysis.report.cell_numbers import first_metric
from analysis.report.finding.answer import answer, highest, of_other_models, others
from analysis.report.finding.certainty import certainty, doubt
from analysis.report.finding.loss import loss
from analysis.report.finding.main_point import MainPoint, main_point
from analysis.report.finding.measured import measured
from analysis.report.finding.next_step import COMPARE, next_step
from analysis.report.finding.settings import told_settings
from analysis.report.finding.wire import wire
from analysis.report.measured_values import first_records, median_and_interval
from analysis.report.section import Section
from analysis.report.sections.benchmarks import largest_cells
from analysis.report.sections.comparisons import differences
from analysis.study.estimates import Findings
from analysis.study.names import run_name
from analysis.study.study import Study
from analysis.text import single_line
from benchmarks.record import metrics

SENTENCES = 5


def sentences(study: Study, findings: Findings, of_benchmarks: Mapping[str, Section]) -> list[str]:
    """Return at most five sentences, whatever the study holds.

    `of_benchmarks` are the sections of the study's benchmarks by the name of the benchmark.
    """
    if not study.records:
        return ["This folder holds no record that can be read."]
    main = main_point(study, findings)
    if main is not None:
        return _of_training(study, findings, main)
    said = _of_benchmarks(study, of_benchmarks)
    following = next_step(study, findings, None) if study.usable else ""
    room = SENTENCES - 1 - (following not in ("", COMPARE))
    if any(one.verdict for one in findings.comparisons):
        said = [*said[: room - 1], differences(findings)]
    return [text for text in (measured(study), *said[:room], following) if text][:SENTENCES]


def _of_training(study: Study, findings: Findings, main: MainPoint) -> list[str]:
    """Return the sentences that say most, in the order of the questions that they answer."""
    point = main[1]
    settings = told_settings(findings, main)
    following = next_step(study, findings, main)
    answers = [
        answer(study, main),
        wire(study, point),
        *settings,
        others(findings, main),
        of_other_models(study, findings, main),
        highest(study, findings, main),
    ]
    # The last ones are left out where there are more than a screen has room for.
    by_weight = [measured(study), *answers[:2], doubt(study, point), *settings[:1]]
    by_weight += [following] if following != COMPARE else []
    by_weight += [
        *answers[2:],
        certainty(study, findings, point),
        loss(study, findings, main),
        following,
    ]
    kept = [text for text in dict.fromkeys(by_weight) if text][:SENTENCES]
    order = [measured(study), *answers, certainty(study, findings, point), doubt(study, point)]
    order += [loss(study, findings, main), following]
    return [text for text in dict.fromkeys(order) if text in kept]


def _of_benchmarks(study: Study, sections: Mapping[str, Section]) -> list[str]:
    """Return what the benchmarks found, for a study in which no usable cell counts images.

    Benchmarks with a model come first, then the others in the order in which they ran.
    """
    lines: list[str] = []
    first = first_records(study.usable)
    for benchmark in sorted(first, key=lambda name: not first[name].cell.trains):
        section = sections.get(benchmark)
        lines += section.finding if section and section.finding else _first_number(study, benchmark)
    return lines or [_nothing(study)]


def _first_number(study: Study, benchmark: str) -> Iterator[str]:
    """Yield the first number of a benchmark that brings no sentence of its own."""
    groups, _ = largest_cells(study, benchmark)
    record = groups[0][0]
    name = first_metric(record)
    if name is not None:
        entry = metrics.metric(name)
        unit = f" {entry.unit}" if entry.unit not in ("", "%") else ""
        value = median_and_interval(study, groups[0], name)
        yield f"{single_line(run_name(record))}: {single_line(entry.title, 80)} {value}{unit}."


def _nothing(study: Study) -> str:
    """Return that no cell gave a number for the first screen."""
    if study.usable:
        return "No cell measured images per second or a link."
    none = (
        "Its one cell gave no number"
        if len(study.records) == 1
        else f"None of its {len(study.records):,} cells gave a number"
    )
    return f"{none} that can be used; the reasons are under “Validity, and what was left out”."
