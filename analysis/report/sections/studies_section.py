"""Several studies side by side: what differs between them, and how the same configurations do."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from analysis.findings.between_studies import CellDifference, Differences, why_apart
from analysis.report.charts import HOLLOW, MOST_ROWS, Axis, DotRow, rows_figure, truncation_note
from analysis.report.figure import COLOURS, GREY, HIGHLIGHT, Figure
from analysis.report.numbers import ABSENT, estimate, number, of_metric
from analysis.report.section import Section
from analysis.report.sections.comparisons_section import verdict_word
from analysis.report.table import Column, Table
from analysis.study.draws import scaled
from analysis.study.intervals import Estimate
from analysis.study.measured_numbers import FASTER, NO_DIFFERENCE, SLOWER, UNKNOWN, MeasuredNumber
from analysis.study.names import short_names, spoken
from analysis.study.study_inputs import StudyInput
from analysis.text import count, first_lines, single_line
from benchmarks.record.metrics import entry_of

HASH = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{56}\b")  # eight digits of it are shown
VERDICT_LOOKS = {FASTER: (COLOURS["blue"][0], ">"), SLOWER: (HIGHLIGHT, "<")}
NOT_IN_TURN = (
    "They were not measured in turn: a change of the machine between the studies would look the "
    "same."
)


def studies(
    differing: Mapping[str, Sequence[str]],
    sides: Sequence[StudyInput],
    compared: Mapping[str, Differences],
) -> Section:
    """Return what differs between studies, and their cells against those of the first, by name."""
    names = short_names(side.name for side in sides)
    tables = [facts_table(differing, [*names.values()])]
    lines, finding = [], []
    first = names[sides[0].name]
    for index, (label, differences) in enumerate(compared.items(), 1):
        name = names[label]
        caption = f"The same configurations, {name} against {first}"
        studies = (first, name)
        tables.append(differences_table(differences.cells, f"cells-{index}", caption, studies))
        if not differences.cells:
            (side,) = (side for side in sides if side.name == label)
            why = why_apart([sides[0]], [side])
            lines.append(f"{name} and {first} have no configuration in common: {why}.")
            finding.append(lines[-1])
            continue
        cells = count(len(differences.cells), "configuration")
        line = f"{name} against {first}, {cells}: {verdict_words(differences.cells)}."
        finding += list(filter(None, (_worst_change(differences, name, first), line)))
        doubt = "" if differences.in_turn else f" {NOT_IN_TURN}"
        lines.append(single_line(line + doubt, 700))
    for side in sides:
        if side.study.unreadable:
            files = count(len(side.study.unreadable), "file")
            lines.append(f"{side.name}: {files} could not be read: {side.study.unreadable[0]}.")
    title = "The studies side by side"
    lines, finding = first_lines(lines), [single_line(line, 400) for line in finding]
    return Section("studies", title, tuple(lines), (), tuple(tables), finding=tuple(finding[:2]))


def _worst_change(differences: Differences, name: str, first: str) -> str:
    names = short_names(cell.name for cell in differences.cells)
    for verdict in (SLOWER, FASTER):
        for cell, change in _changes(differences):
            if cell.verdict == verdict:
                size = estimate(scaled(change, math.copysign(1, change.value)), "share")
                line = f"{spoken(names[cell.name])} is {size} {verdict} in {name} than in {first}"
                doubts = cell.doubts((first, name))
                if cell.all_suspect:
                    doubts = f"not reliable: {doubts}"
                return f"{line} ({doubts})." if doubts else f"{line}."
    if all(cell.verdict == UNKNOWN or cell.all_suspect for cell in differences.cells):
        why = differences.cells[0].why or "every run is suspect"
        return f"Whether {name} differs from {first} cannot be told: {why}."
    return f"No significant difference between {name} and {first}."


def _changes(differences: Differences) -> list[tuple[CellDifference, Estimate]]:
    """Return the changes of the rates, the largest first, those without a verdict last."""
    cells = []
    for cell in differences.cells:
        if cell.change is not None:
            cells.append((cell, cell.change))
    return sorted(cells, key=lambda pair: (pair[0].verdict == UNKNOWN, -abs(pair[1].value)))


def changes(compared: Mapping[str, Differences]) -> Iterator[Figure]:
    """Yield the change of every configuration from the first of several studies."""
    for panel, (name, differences) in enumerate(compared.items(), 1):
        names = short_names(cell.name for cell in differences.cells)
        cells = _changes(differences)
        rows = []
        for cell, change in cells[:MOST_ROWS]:
            look = VERDICT_LOOKS.get(cell.verdict, (GREY, "o"))
            right = number(change.value, "change")
            if cell.verdict not in (SLOWER, FASTER):
                right += " (n. s.)" if cell.verdict == NO_DIFFERENCE else f", {cell.verdict}"
            rows.append(DotRow(names[cell.name], right, change, *look, bool(cell.against)))
        if rows:
            caption = f"Change on {name}."
            if any(change.low is not None for _, change in cells):
                caption = f"Change on {name} with 95 % intervals. n. s.: not significant."
            if any(row.is_doubtful for row in rows):
                caption += HOLLOW
            caption += truncation_note(cells, MOST_ROWS, "more configuration", f"cells-{panel}.csv")
            axis = Axis("change of the rate", "change", "change", shown=(0.0,))
            yield rows_figure(f"changes-{panel}", caption, rows, axis)


def facts_table(differing: Mapping[str, Sequence[str]], names: Sequence[str]) -> Table:
    """Return a row for each fact that differs, with its value in each study."""
    columns = [Column("fact", "")]
    for index, name in enumerate(names, 1):
        columns.append(Column(f"study_{index}", name))
    rows = []
    for fact, values in differing.items():
        rows.append((fact, *(HASH.sub(r"\1", each) for each in values)))
    return Table("differs", "What differs", tuple(columns), tuple(rows))


def differences_table(
    cells: Sequence[CellDifference], name: str, caption: str, studies: Sequence[str]
) -> Table:
    """Return both rates of every cell that two studies have, their difference and the verdict."""
    first, second = studies
    units = {unit_of(cell.metric) for cell in cells if cell.metric}
    unit = ""
    if len(units) == 1:
        unit = f" {units.pop()}"
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

    def detects(cell: CellDifference) -> float | None:
        # Of a difference that was seen nobody asks which others could have been.
        return None if cell.verdict in (SLOWER, FASTER) else cell.smallest

    if any(cell.change is not None and cell.change.low is not None for cell in cells):
        caption += ", with 95 % intervals"
    return Table.of(
        name,
        caption,
        (
            Column("cell", "configuration", lambda cell: names[cell.name]),
            Column("runs", "runs", runs, "count"),
            Column("a", f"{first}{unit}", lambda cell: value(cell, cell.first), "number"),
            Column("b", f"{second}{unit}", lambda cell: value(cell, cell.second), "number"),
            Column("difference", "difference", "change", "change", True),
            Column("smallest", "detects", detects, "share"),
            Column("verdict", f"verdict on {second}", lambda cell: verdict_word(cell.verdict)),
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
    """Return `slower in 4, not significant in 2`."""
    verdicts = Counter[str]()
    for cell in cells:  # suspect runs alone do not show that nothing differs
        is_open = cell.verdict == NO_DIFFERENCE and cell.all_suspect
        verdicts[UNKNOWN if is_open else cell.verdict] += 1
    words = []
    for verdict in (SLOWER, FASTER, NO_DIFFERENCE, UNKNOWN):
        if verdicts[verdict]:
            words.append(f"{verdict_word(verdict)} in {verdicts[verdict]:,}")
    return ", ".join(words)
