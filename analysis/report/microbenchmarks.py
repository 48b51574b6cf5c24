"""What the sections of benchmarks that measure links have in common: one heading, and sentences that rank cells."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from analysis.report.measured_values import Group, records_of
from analysis.report.section import Section
from analysis.report.style import Picture
from analysis.report.tables import Table
from analysis.study.names import short_names, spoken, unit_of
from analysis.study.study import Study
from analysis.text import join_words, single_line
from benchmarks.record import Record

NAMED = 4  # cells of one sentence
DEFAULTS = "the default"  # name of a cell in which no setting differs from the defaults


def links_alone(
    place: int,
    sentences: Iterable[str],
    tables: Sequence[Table] = (),
    pictures: Iterable[Picture] = (),
) -> Section:
    """Return the part of the section on links that one benchmark fills."""
    filled = tuple(table for table in tables if table.rows)
    return Section(
        "measured",
        "Links measured alone",
        (),
        tuple(pictures),
        filled,
        finding=tuple(sentences),
        place=place,
    )


def largest_cells(study: Study, benchmark: str) -> tuple[list[Group], str]:
    """Return the runs of a benchmark's cells on most devices, and these devices in words: `4 GPUs`, `one GPU`."""
    records = {record.record_id for record in records_of(study, benchmark)}
    groups = [runs.records for runs in study.runs if runs.records[0].record_id in records]
    most = max((group[0].cell.world_size for group in groups), default=0)
    devices = f"{most} {unit_of(study)}" if most > 1 else f"one {unit_of(study).removesuffix('s')}"
    return [group for group in groups if group[0].cell.world_size == most], devices


def ranking(
    what: str,
    rows: Sequence[tuple[float, Group, str]],
    defaults: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield `what: A; then B and C` of rows (sort key, runs of a cell, text), each with what only this cell has.

    `defaults` are the names of cells in which no setting differs, by the id() of their first record.
    """
    if not rows:
        return
    names = short_names(dict.fromkeys(group[0].name for _, group, _ in rows))
    first, *others = (
        text if len(rows) == 1 else f"{own_name(names[group[0].name], group[0], defaults.get(id(group[0]), DEFAULTS))} {text}"
        for _, group, text in sorted(rows, key=lambda row: row[0])
    )  # fmt: skip
    yield f"{what}: {first}" + (f"; then {join_words(others, NAMED)}." if others else ".")


def own_name(short: str, record: Record, default: str = DEFAULTS) -> str:
    """Return the short name of a cell, or words for a cell in which nothing differs from the defaults."""
    return single_line(default if short == record.name else spoken(short), 80)
