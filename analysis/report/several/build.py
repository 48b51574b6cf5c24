"""A report of several studies: read them, set them beside each other, and give the content of a page."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from analysis.findings.between_studies import Asked, Side, open_sides, side_by_side, studies_in
from analysis.findings.examine import findings_of
from analysis.gc_pause import gc_paused
from analysis.report.contents import benchmark_sections
from analysis.report.finding.sentences import sentences as of_one_study
from analysis.report.page import Report
from analysis.report.section import Section
from analysis.report.several.cells import cells
from analysis.report.several.machines import machines, studies
from analysis.report.several.scaling import scaling, shared_curves
from analysis.report.several.sentences import sentences
from analysis.report.style import ON_PAGE, style
from analysis.study.estimates import Findings
from analysis.text import count, join_words, sentence, single_line
from analysis.verification.quick import QuickCheck

NAMES = 3  # of studies in the title and in the name of the folder
OWN = 2  # sentences of each study's own report: what was measured, and the answer


def examine_several(asked: Sequence[Asked], width: str = ON_PAGE) -> tuple[Report, list[Side]]:
    """Read several studies and return their report and its sides. Raises OSError, ValueError: a folder holds no study."""
    with gc_paused():
        sides = [side for of_one in open_sides(asked, QuickCheck().marked) for side in of_one]
        findings = {side.name: findings_of(side.study) for side in sides}
        shared = side_by_side(sides)
        curves = shared_curves(sides, {name: one.scaling for name, one in findings.items()})
        with style(width):
            sections = (
                machines(sides),
                scaling(sides, curves),
                cells(sides, shared),
                _each(sides, findings),
                studies(sides),
            )
    few = len(sides) <= NAMES
    names = join_words(
        [side.name for side in sides]
        if few
        else [one.label or one.folder.resolve().name for one in asked]
    )
    records = sum(len(side.study.records) for side in sides)
    kept = "each with its own baselines, repeats and noise floor"
    setting = f"{count(len({side.folder for side in sides}), 'study', 'studies')} · {count(records, 'run')} · {kept}"
    return Report(
        single_line(names, 200), setting, tuple(sentences(sides, shared, curves)), (), sections
    ), sides


def _each(sides: Sequence[Side], findings: dict[str, Findings]) -> Section:
    """Return what each study says by itself: the first sentences of its own report."""
    lines = []
    for side in sides:
        with style():
            said = of_one_study(
                side.study, findings[side.name], benchmark_sections(side.study, findings[side.name])
            )
        lines.append(sentence(f"{side.name}: {' '.join(said[:OWN])}"))
    return Section("each", "Each by itself", tuple(lines))


def default_folder(asked: Sequence[Asked]) -> Path:
    """Return where the report of several studies is written: beside the first, under a name that no other studies have."""
    folders = [folder for one in asked for folder in studies_in(one.folder)]
    first = asked[0].folder.resolve()
    parent = first.parent if folders[0].resolve() == first else first
    digest = hashlib.sha256(
        "\n".join(str(folder.resolve()) for folder in folders).encode()
    ).hexdigest()[:6]
    names = "-".join(one.folder.resolve().name for one in asked[:NAMES])
    return parent / f"report-{names}-{digest}"


def as_labelled(report: Report, label: str) -> Report:
    """Return a report under the user's name of the study."""
    return dataclasses.replace(report, study=single_line(label)) if label else report
