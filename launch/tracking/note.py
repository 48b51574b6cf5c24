"""The note of a sweep's parent run in MLflow: a table in Markdown with a row for each record."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from analysis.report.cell_numbers import (
    COLUMNS,
    MARGIN,
    ONE_RUN,
    RESULT,
    TRANSPORT,
    about_margins,
    about_reference,
    cell_numbers,
    heading,
)
from analysis.report.numbers import ABSENT, THIN
from analysis.study.names import BETWEEN, unit_of_cells
from benchmarks.record import Record
from conf.cell import counted
from launch.tracking.projection import escaped, run_name

LINK_CLASS, VALIDITY = "link class", "validity"
WORDS = (RESULT, TRANSPORT, LINK_CLASS, VALIDITY)  # columns that are not numbers
CELL_LENGTH = 200  # characters of a table cell


def summary_markdown(
    records: Iterable[Record], values: Mapping[str, Mapping[str, float]] = MappingProxyType({})
) -> str:
    """Return one row for each record, in the order given; what a record does not have is '–', never 0.

    `values` are those that need several records, by record id, as the study is now; a record that has none there shows its own.
    MLflow gives the table little room: the part with which all names begin is printed once, above it. A column is
    there only if a row fills it.
    """
    records = list(records)
    names = [run_name(record).split(BETWEEN) for record in records]
    common = _common(names)
    columns = [RESULT, *(name for name in COLUMNS if name != RESULT), LINK_CLASS, VALIDITY]
    rows = [_row(record, columns, values.get(record.record_id, {})) for record in records]
    kept = [place for place in range(len(columns)) if any(row[place] != ABSENT for row in rows)]
    columns, rows = (
        [columns[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
    )
    things, unit = (
        counted(record.cell for record in records),
        unit_of_cells(record.cell for record in records),
    )
    lines = [["cell", *(heading(name, things, unit) for name in columns)]]
    lines += [["---", *("---" if name in WORDS else "---:" for name in columns)]]
    lines += [
        [_cell(BETWEEN.join(name[common:])), *row] for name, row in zip(names, rows, strict=True)
    ]
    above = f"Every cell: {_cell(BETWEEN.join(names[0][:common]))}\n\n" if common else ""
    below = [
        about_margins(values.get(record.record_id, {}) for record in records),
        about_reference(columns),
    ]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return above + table + "".join(f"\n{line}\n" for line in below if line)


def _common(names: Sequence[Sequence[str]]) -> int:
    """Return the number of parts with which all names of a table begin; the last part of each stays in its row."""
    most = min((len(name) for name in names), default=1) - 1 if len(names) > 1 else 0
    return next((place for place in range(most) if len({name[place] for name in names}) > 1), most)


def cut_to(markdown: str, length: int) -> str:
    """Return Markdown of at most `length` characters, cut at the end of a line that says so (MLflow's notes are bounded)."""
    if len(markdown) <= length:
        return markdown
    last = "\n… the rest is in the artifact summary.md\n"
    whole, _, _ = markdown[: max(0, length - len(last))].rpartition("\n")
    return whole + "\n" + last


def _row(record: Record, columns: Sequence[str], values: Mapping[str, float]) -> list[str]:
    """Return the texts of the columns after the cell's name."""
    finished = record.state == "finished"
    found = cell_numbers(record, values) if finished else {}
    if (margin := found.get(MARGIN, ONE_RUN)) != ONE_RUN:
        found[MARGIN] = f"±{THIN}{margin}"
    found |= {name: _cell(found[name]) for name in (RESULT, TRANSPORT) if name in found}
    found |= {
        LINK_CLASS: _cell(_words(record.effective.get("link_class"))),
        VALIDITY: _validity(record),
    }
    return [found.get(name, ABSENT) for name in columns]


def _words(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value or ABSENT)


def _cell(text: str) -> str:
    return escaped(text, CELL_LENGTH)


def _validity(record: Record) -> str:
    """Return the verdict with its codes; of a cell that did not finish, its state and the cause."""
    codes = _cell(", ".join(record.validity.codes))
    if record.state == "finished":
        return f"**{record.validity.said}**: {codes}" if codes else record.validity.said
    if record.failure is None:
        return f"**{record.state}**"
    where = f" of rank {record.failure.rank}" if record.failure.rank is not None else ""
    return (
        f"**{record.state}**: {_cell(record.failure.cause)}{where}, {_cell(record.failure.message)}"
    )
