"""The figure beside a report's answer, by what the study varied.

An efficiency for several numbers of GPUs, a line for an option that is a number, otherwise a row
for each configuration.
"""

from collections.abc import Collection, Sequence

from analysis.findings.baselines import WITHOUT
from analysis.findings.examine import Findings
from analysis.report.charts import (
    MOST_ROWS,
    Axis,
    DotRow,
    rows_figure,
    truncation_note,
)
from analysis.report.figure import Figure, colours, for_screen_and_phone
from analysis.report.main_point import CurvePoint, names_of, points_of, ranking_of
from analysis.report.numbers import central, number, of_metric
from analysis.report.section import Section, about_intervals, words_of
from analysis.study.intervals import Estimate
from analysis.study.measured_numbers import SLOWER, UNKNOWN
from analysis.study.runs import Runs
from analysis.study.study import Study
from benchmarks.record.metrics import metric as entry_of

# Names of figures that answer, best first; a study has the first that its sections drew.
ANSWERS = ("question", "efficiency-1", "by-option-1", "collectives")
OTHERWISE = ("scaling-1", "pairs-1", "waterfall-1")


def answer_figure(
    study: Study, findings: Findings, main: CurvePoint | None, sections: Sequence[Section]
) -> Figure | None:
    """Return the figure that answers what the study asked; None where it has nothing to draw."""
    drawn = {}
    for section in sections:
        for figure in section.figures:
            drawn[figure.name] = figure
    sizes = {
        point.world_size for _, point in points_of(findings.scaling.curves) if point.efficiency
    }
    if len(sizes) < 2:  # no curve
        drawn.pop("efficiency-1", None)
    for names in (ANSWERS, OTHERWISE):
        for name in names:
            if name in drawn:
                return for_screen_and_phone(drawn[name])
        if names == ANSWERS:
            ranking = ranking_figure(study, findings, main)
            if ranking is not None:
                return for_screen_and_phone(ranking)
    return None


def ranking_figure(study: Study, findings: Findings, main: CurvePoint | None) -> Figure | None:
    """Return the rates of the configurations of a ranking, best first; without one, of all."""
    ranking = ranking_of(study, findings, main.point if main else None)
    rights: dict[Runs, str] = {}
    if ranking is not None:
        for each in ranking.configurations:
            rights[each.runs] = each.standing
            if each.standing == SLOWER:
                rights[each.runs] = number(each.behind.value, "change")
        shown = [*_without_exchange(study, rights), *rights]
    else:
        shown = [runs for runs in study.rated if runs.rate == study.rated[0].rate]
    if len(shown) < 2:
        return None
    rate = shown[0].rate
    values = {runs: runs.next_run(rate.metric) or Estimate(0.0) for runs in shown}
    shown.sort(key=lambda runs: values[runs].value, reverse=not rate.is_time)
    names, palette = names_of(study, shown), colours(runs.strategy for runs in shown)
    rows, shares = [], {}
    for _, point in points_of(findings.scaling.curves):
        if point.efficiency is not None:
            shares[point.record_ids] = point.efficiency.value
    for runs in shown[:MOST_ROWS]:
        words = [central(values[runs], of_metric(rate.metric))]
        if runs.record_ids in shares:
            words.append(f"efficiency {number(shares[runs.record_ids], 'share')}")
        if rights.get(runs, UNKNOWN) != UNKNOWN:
            words.append(rights[runs])
        name, look = names[runs], palette[runs.strategy]
        rows.append(DotRow(name, ", ".join(words), values[runs], look, is_doubtful=runs.suspect))
    entry = entry_of(rate.metric)
    title = entry.title[:1].upper() + entry.title[1:]
    notes = about_intervals(study, "Lines:")
    if any(row.is_doubtful for row in rows):
        notes += " Hollow: suspect."
    notes += truncation_note(shown, MOST_ROWS, "more configuration", "points.csv")
    axis = Axis(words_of(study)(entry.unit or title), "value", of_metric(rate.metric))
    return rows_figure("rates", f"{title}.{notes}", rows, axis)


def _without_exchange(study: Study, ranked: Collection[Runs]) -> list[Runs]:
    """Return the runs of strategy none on the GPUs that all ranked configurations share."""
    gpus = {runs.gpus for runs in ranked}
    without = []
    for runs in study.timed:
        if {runs.gpus} == gpus and runs.strategy == WITHOUT and runs not in ranked:
            without.append(runs)
    return without
