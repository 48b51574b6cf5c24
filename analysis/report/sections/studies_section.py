"""Several studies: what differs between their machines, and how the same cells differ."""

from collections import Counter
from collections.abc import Mapping, Sequence

from analysis.findings.between_studies import (
    EQUAL,
    FASTER,
    SLOWER,
    UNKNOWN,
    CellDifference,
    Differences,
    MeasuredNumber,
)
from analysis.findings.study_inputs import StudyInput
from analysis.report.numbers import ABSENT, number, of_metric
from analysis.report.section import Section
from analysis.report.table import Column, Table
from analysis.study.names import short_names
from analysis.text import count, first_lines, single_line
from benchmarks.record.metrics import metric as entry_of

INSIDE = "the intervals hold what differs between runs inside each study"
NOT_IN_TURN = (
    "They were not measured in turn, so what changes on a machine between sweeps would look the "
    f"same; {INSIDE}."
)


def studies(
    differing: Mapping[str, Sequence[str]],
    sides: Sequence[StudyInput],
    compared: Mapping[str, Differences],
) -> Section:
    """Return what differs between studies, and their cells against those of the first, by name."""
    tables = [facts_table(differing, [side.name for side in sides])]
    lines = []
    first = sides[0].name
    for index, (name, differences) in enumerate(compared.items(), 1):
        caption = f"The same cells, {name} against {first}"
        tables.append(differences_table(differences, f"cells-{index}", caption))
        if not differences.cells:
            lines.append(f"{name} and {first} have no cell in common.")
            continue
        cells, words = count(len(differences.cells), "cell"), verdict_words(differences.cells)
        lines.append(single_line(f"{name} against {first}, {cells}: {words}. {NOT_IN_TURN}", 700))
    for side in sides:
        if side.study.unreadable:
            files = count(len(side.study.unreadable), "file")
            lines.append(f"{side.name}: {files} could not be read: {side.study.unreadable[0]}.")
    title = "The studies beside each other"
    return Section("studies", title, tuple(first_lines(lines)), tables=tuple(tables))


def facts_table(differing: Mapping[str, Sequence[str]], names: Sequence[str]) -> Table:
    """Return a row for each fact that differs, with its value in each study."""
    columns = [Column("fact", "")]
    for index, name in enumerate(names, 1):
        columns.append(Column(f"study_{index}", name))
    rows = tuple((fact, *values) for fact, values in differing.items())
    return Table("differs", "What differs", tuple(columns), rows)


def differences_table(differences: Differences, name: str, caption: str) -> Table:
    """Return both rates of every cell that two studies have, their difference and the verdict."""
    cells, unit = differences.cells, ""
    units = {unit_of(cell.metric) for cell in cells if cell.metric}
    if len(units) == 1:
        unit = units.pop()
    names = short_names(cell.name for cell in cells)

    def value(cell: CellDifference, numbers: Mapping[str, MeasuredNumber]) -> str:
        own_unit = "" if unit else unit_of(cell.metric)
        return f"{plain_number(cell.metric, numbers.get(cell.metric))} {own_unit}".strip()

    def runs(cell: CellDifference) -> str:
        numbers_of_runs = []
        for side in (cell.first, cell.second):
            if cell.metric in side:
                numbers_of_runs.append(str(side[cell.metric].runs))
        return ", ".join(numbers_of_runs)

    return Table.of(
        name,
        f"{caption}, with 95 % intervals",
        (
            Column("cell", "cell", lambda cell: names[cell.name]),
            Column("runs", "runs", runs, "count"),
            Column("a", f"A {unit}".strip(), lambda cell: value(cell, cell.first), "number"),
            Column("b", f"B {unit}".strip(), lambda cell: value(cell, cell.second), "number"),
            Column("difference", "difference", "change", "change", True),
            Column("smallest", "visible from", "smallest", "share"),
            Column("verdict", "verdict on B", "verdict"),
        ),
        cells,
    )


def plain_number(metric: str, measured: MeasuredNumber | None) -> str:
    """Return a number as its metric is written."""
    if measured is None:
        return ABSENT
    return number(measured.plain, of_metric(metric))


def unit_of(metric: str) -> str:
    """Return the unit of a metric for people."""
    unit = entry_of(metric).unit
    return "share" if unit == "%" else unit


def verdict_words(cells: Sequence[CellDifference]) -> str:
    """Return `slower in 4, no difference seen in 2`."""
    verdicts = Counter(cell.verdict for cell in cells)
    words = []
    for verdict in (SLOWER, FASTER, EQUAL, UNKNOWN):
        if verdicts[verdict]:
            words.append(f"{verdict} in {verdicts[verdict]:,}")
    return ", ".join(words)
