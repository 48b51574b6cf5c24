"""What a sweep was asked (ask=), its answer, and how the intervals shrank until it was there."""

from collections.abc import Collection
from dataclasses import replace

from analysis.findings.examine import Findings
from analysis.report.charts import MARKERS, Axis, DrawnCurve, DrawnPoint, curves_figure
from analysis.report.figure import Figure, colours
from analysis.report.section import Section
from analysis.report.sections.standings import sizes_table, standings_table
from analysis.study.asked import Asked, RaceState, answer, questions_of, replay
from analysis.study.intervals import Estimate
from analysis.study.race import FAILED
from analysis.study.study import Study
from conf.question import SCALES

WIDEST = 0.5  # share: a wider interval is not drawn, or the others would be points
MOST_DRAWN = len(MARKERS)


def question(study: Study, findings: Findings) -> Section | None:
    """Return the section of the last question of a study; None: nothing was asked, or other sweeps
    measured its candidates more often, and their comparison is the better answer."""
    questions = questions_of(study.folder) if study.folder else {}
    if not questions:
        return None
    asked = list(questions.values())[-1]
    race = replay(asked, study.records)
    if _measured_elsewhere(asked, race, study, questions):
        return None
    figure = _shrinking(asked, race) if race.last else None
    tables = [standings_table(asked, race), sizes_table(asked, race)]
    return Section(
        "question",
        f"Question: ask={asked.question.kind}",
        tuple(answer(asked, race)),
        (figure,) if figure else (),
        tuple(filter(None, tables)),
    )


def _measured_elsewhere(
    asked: Asked, race: RaceState, study: Study, sweeps: Collection[str]
) -> bool:
    used = {record.record_id for record in race.runs}
    for record in study.usable:
        if record.record_id in used or record.sweep_id in sweeps or record.drift:
            continue
        if replace(record.cell, repeat=0).key in asked.keys:
            return True
    return False


def _shrinking(asked: Asked, race: RaceState) -> Figure | None:
    reference = race.race.looks[-1].reference
    palette = list(colours(asked.names).values())
    curves: list[DrawnCurve] = []
    for index, name in enumerate(asked.names):
        points = []
        for look in race.race.looks:
            standing = look.standings[index]
            same = look.reference == reference and standing.state != FAILED
            if same and standing.high - standing.low <= WIDEST:
                interval = Estimate(standing.difference, standing.low, standing.high)
                points.append(DrawnPoint(look.runs, interval))
        if points and index != reference and len(curves) < MOST_DRAWN:
            curves.append(DrawnCurve(name, points, palette[index], MARKERS[len(curves)]))
    if not any(len(curve.points) > 1 for curve in curves):
        return None
    first = asked.names[reference]
    caption = f"Rates compared with that of {first}, after each round of runs, with intervals."
    lines: tuple[float, ...] = (0.0, asked.question.margin)
    if asked.question.kind == SCALES:
        lines = (asked.question.efficiency - 1,)
    axis = Axis("difference", "difference", "change", shown=lines)
    return curves_figure("question", caption, curves, Axis("runs so far", "runs"), axis)
