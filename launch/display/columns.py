"""The columns of the table of a sweep: what each cell asks for, what was measured, and which of them fit a terminal."""

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType

from rich.cells import cell_len

from analysis.report.cell_numbers import COLUMNS, MARGIN, PREDICTED, TRANSPORT
from analysis.report.numbers import ABSENT
from analysis.study.names import KIND, NCCL, differing
from benchmarks.record import Record
from conf.cell import Cell, compress_hosts
from launch.plan.order import PlannedCell

NODES, GPUS, SETTINGS, STATE, VALIDITY = "nodes", "GPUs", "NCCL", "state", "validity"
COST, EXPOSED, EFFICIENCY = "cost ms", "exposed ms", "efficiency"
# A narrow terminal leaves these columns out, in this order.
DISPENSABLE = (TRANSPORT, COST, PREDICTED, EXPOSED, "hidden", "of reference speed", "exchange ms", "per GPU",
               "exchange GB/s", MARGIN, EFFICIENCY)  # fmt: skip
REPEAT, RUN = (
    "repeat",
    "run",
)  # which of several measurements of a cell it is: asked repeats, or a second run
STATE_WIDTH = (
    12  # of "interrupted" and one more, where there is room: the columns behind it keep their place
)
LEAST_WIDTH = 5  # of a column of words that is cut, when nothing is left to leave out
MOST_SETTINGS = 3  # of NCCL's that have a column each
GAP = 2  # between columns


def _settings(cell: Cell, names: Container[str] = ()) -> str:
    """Return NCCL's settings of a cell but those with a column of their own."""
    listed = (
        f"{_short(name)}={value}" for name, value in sorted(cell.nccl.items()) if name not in names
    )
    return " ".join(listed) or ABSENT


def _short(name: str) -> str:
    return name.removeprefix("NCCL_")


# What a cell asks for. A column that is the same for all cells is printed once, above the table.
_ASKED: dict[str, Callable[[Cell], str]] = {
    "model": lambda cell: cell.model.name if cell.trains else ABSENT,
    "benchmark": lambda cell: str(cell.benchmark["name"]),
    "strategy": lambda cell: str(cell.strategy["name"]) if cell.trains else ABSENT,
    NODES: lambda cell: compress_hosts(cell.hosts) or ABSENT,
    GPUS: lambda cell: ",".join(map(str, cell.gpus)),
    SETTINGS: _settings,
    "batch": lambda cell: str(cell.batch_size) if cell.trains else ABSENT,
    "precision": lambda cell: cell.precision if cell.trains else ABSENT,
    "optimize": lambda cell: cell.optimize if cell.trains else ABSENT,
}
# Options that have a column above; so do NCCL's.
_HAVE_COLUMNS = (*KIND, "batch_size", "precision", "optimize")


def asked(cells: Sequence[PlannedCell]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return what is the same for all cells, by name, and the columns in which cells differ, with a text for each cell."""
    columns = {name: [text(planned.cell) for planned in cells] for name, text in _ASKED.items()}
    columns |= _of_settings([planned.cell for planned in cells])
    same = {
        name: texts[0] for name, texts in columns.items() if name != GPUS and len(set(texts)) == 1
    }
    columns |= _options([planned.cell for planned in cells])
    repeated = any(planned.cell.repeat > 0 for planned in cells)
    runs = [
        str(planned.cell.repeat)
        if repeated and not planned.drift
        else " ".join(planned.run_suffixes)
        for planned in cells
    ]
    columns[REPEAT if repeated else RUN] = runs
    return same, {
        name: texts for name, texts in columns.items() if name == GPUS or len(set(texts)) > 1
    }


def _of_settings(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return a column for each setting of NCCL in which cells differ, as long as these are few, and one for the others."""
    values = {
        name: [cell.nccl.get(name, ABSENT) for cell in cells]
        for cell in cells
        for name in sorted(cell.nccl)
    }
    apart = {_short(name): texts for name, texts in values.items() if len(set(texts)) > 1}
    if len(apart) > MOST_SETTINGS:  # a preset sets many at once
        return {}
    own = [name for name in values if _short(name) in apart]
    return {SETTINGS: [_settings(cell, own) for cell in cells], **apart}


def _options(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return a column for every other option in which cells of the same kind differ."""
    told = differing(cells)
    every = dict.fromkeys(name for options in told for name in options)
    names = [name for name in every if name not in _HAVE_COLUMNS and not name.startswith(NCCL)]
    return {
        name.rpartition(".")[2]: [options.get(name, ABSENT) for options in told] for name in names
    }


def measured(numbers: Sequence[Mapping[str, str]], rows: Sequence[int]) -> dict[str, list[str]]:
    """Return the columns of numbers that at least one cell of the sweep has, with a text for each row."""
    shown = [name for name in COLUMNS if any(name in of_cell for of_cell in numbers)]
    return {name: [numbers[row].get(name, "") for row in rows] for name in shown}


def verdict(record: Record | None, codes: str = "all") -> str:
    """Return a record's verdict with `all` its codes, the `first` of them, their `count` or none (`word`).

    Of a failed cell it is the cause.
    """
    if record is None:
        return ""
    if record.state != "finished":
        failure = record.failure
        if failure is None or failure.cause == record.state:
            return ""
        return failure.cause + (f", rank {failure.rank}" if failure.rank is not None else "")
    word, found = record.validity.verdict, list(record.validity.codes)
    if codes == "word":
        return word
    if not found:
        return record.validity.said
    if codes == "count":
        return f"{word}, {len(found)} {'code' if len(found) == 1 else 'codes'}"
    if codes == "all":
        return record.validity.said.replace(word, f"{word}: {', '.join(found)}", 1)
    more = f" +{len(found) - 1}" if len(found) > 1 else ""
    return f"{word}: {found[0] + more}"


def fit(
    columns: dict[str, list[str]],
    words: Sequence[str],
    records: Sequence[Record | None],
    width: int,
    headings: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, int]:
    """Make the columns fit a terminal of `width` characters: shorten the verdicts, leave columns out, cut `words`.

    No number is cut. Changes `columns`; `records` are those of the rows, `headings` those of columns with another than their
    name. Returns the width of each column that is left.
    """

    def widths() -> dict[str, int]:
        return {
            name: max(map(cell_len, [headings.get(name, name), *texts]))
            for name, texts in columns.items()
        }

    def excess(found: Mapping[str, int]) -> int:
        return sum(found.values()) + GAP * (len(found) - 1) - width

    def shorten(codes: str) -> None:
        columns[VALIDITY] = [verdict(record, codes) for record in records]

    def reserved() -> dict[str, int]:
        found = widths()
        return found | {STATE: max(STATE_WIDTH, found[STATE])}

    if excess(reserved()) > 0:
        shorten("first")
    for name in DISPENSABLE:
        if excess(reserved()) > 0:
            columns.pop(name, None)
    for codes in ("count", "word"):
        if excess(reserved()) > 0:
            shorten(codes)
    found = reserved() if excess(reserved()) <= 0 else widths()
    while (
        words
        and excess(found) > 0
        and found[longest := max(words, key=lambda name: found[name])] > LEAST_WIDTH
    ):
        found[longest] -= 1
    return found


def filled(parts: Sequence[str], width: int) -> list[str]:
    """Return lines of at most `width` characters, broken between parts only."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + GAP + cell_len(part) <= width:
            lines[-1] += " " * GAP + part
        else:
            lines.append(part)
    return lines
