"""What differs between the machines, software and dates of several studies, and what was read."""

from collections.abc import Sequence
from datetime import datetime, timezone

from analysis.findings.between_studies import Side, differing
from analysis.report.section import Section
from analysis.report.tables import Column, Table, Value
from analysis.text import count, first_lines, single_line


def machines(sides: Sequence[Side]) -> Section:
    """Return what differs, a row for each side, and what they share in a sentence."""
    apart, shared = differing(sides)
    lines = (
        []
        if apart
        else ["The records tell of no difference between the machines, the software and the code."]
    )
    if shared:
        lines.append(
            f"The same in all: {'; '.join(f'{name} {value}' for name, value in shared.items())}."
        )
    table = Table(
        "differs",
        "What differs.",
        (
            Column("side", "machine or study"),
            *(Column(name.replace(" ", "_"), name) for name in apart),
        ),
        tuple(
            (side.name, *(apart[name][place] for name in apart)) for place, side in enumerate(sides)
        )
        if apart
        else (),
    )
    return Section(
        "machines",
        "What differs between them",
        tuple(single_line(line, 1500) for line in lines),
        tables=(table,),
    )


def studies(sides: Sequence[Side]) -> Section:
    """Return which records were read from where, and what of them was left out."""
    rows: list[tuple[Value, ...]] = []
    lines: list[str] = []
    for side in sides:
        study = side.study
        times = [record.started_at for record in study.records]
        days = dict.fromkeys(
            datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d")
            for at in (min(times), max(times))
            if times
        )
        suspect = sum(record.validity.verdict == "suspect" for record in study.usable)
        rows.append((
            side.name, study.name, str(side.folder), " to ".join(days), len(study.records), len(study.usable), suspect,
            len(study.excluded), len({record.sweep_id for record in study.records}),
        ))  # fmt: skip
        if study.unreadable:
            lines.append(
                f"{side.name}: {count(len(study.unreadable), 'file')} could not be read: {study.unreadable[0]}."
            )
    table = Table(
        "studies",
        "Every study keeps its own baselines, repeats and noise floor. Its own report has the rest: "
        "python -m analysis report STUDY.",
        (
            Column("side", "machine or study"), Column("study", "study"), Column("folder", "folder"), Column("date", "date"),
            Column("cells", "cells", "count"), Column("usable", "usable", "count"), Column("suspect", "suspect", "count"),
            Column("left_out", "left out", "count"), Column("sweeps", "sweeps", "count"),
        ),
        tuple(rows),
    )  # fmt: skip
    return Section("studies", "What was read", tuple(first_lines(lines)), tables=(table,))
