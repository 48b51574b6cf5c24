"""The columns of a sweep's tables: what each cell asks for, its verdict, and what fits a width."""

from collections.abc import Collection, Mapping, Sequence

from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from analysis.report.cell_numbers import COLUMNS, MARGIN, PREDICTED, TRANSPORT
from analysis.report.numbers import ABSENT
from analysis.study.names import KIND, NCCL, varying
from analysis.validity.checks import verdict_words
from benchmarks.record import REHEARSAL, Record
from conf.cell import Cell, compress_hosts
from launch.plan.order import PlannedCell

GPUS, SETTINGS = "GPUs", "NCCL"
MOST_SETTINGS = 3  # of NCCL's that have a column each; a preset sets many at once
# Options that have a column of another name.
RENAMED = (*KIND, "batch_size", "precision", "optimize", "benchmark.sha256")
OF_TRAINING = ("model", "strategy", "batch", "precision", "optimize")
STATE, VALIDITY, COST, BAR = "state", "validity", "cost ms", "bar"
STYLES = {"invalid": "red", "suspect": "yellow", REHEARSAL: "cyan", "valid": "green"}  # worst first
# A narrow terminal leaves these columns out, in this order.
DISPENSABLE = (
    *(TRANSPORT, PREDICTED, "exposed ms", "hidden", "of reference speed", "exchange ms"),
    *("per GPU", "exchange GB/s", BAR, MARGIN, "efficiency"),
)
STATE_WIDTH = 12  # of "interrupted" and one more: the columns behind it keep their place
LEAST_VERDICT = 24  # of a verdict with its first code, before other columns are left out
LEAST_WIDTH = 5  # of columns of words, which are cut
GAP = 2  # between columns
ABOUT_DRIFT = "drift: the first run once more at the end, to show what changed"


def request_columns(cells: Sequence[PlannedCell]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return what all cells have in common, by name, and {column: texts} of what tells them apart.

    The GPUs always have a column.
    """
    names: dict[str, None] = {}
    for planned in cells:
        names |= dict.fromkeys(sorted(planned.cell.nccl))
    differing = []  # settings of NCCL's
    for name in names:
        values = {planned.cell.nccl.get(name) for planned in cells}
        if len(values) > 1:
            differing.append(name)
    if len(differing) > MOST_SETTINGS:
        differing = []
    columns: dict[str, list[str]] = {}
    for planned in cells:
        for column, text in _request(planned.cell, differing).items():
            columns.setdefault(column, []).append(text)
    differences = varying([planned.cell for planned in cells])
    varied: dict[str, str] = {}
    for options in differences:
        varied |= options
    for name in varied:
        if name not in RENAMED and not name.startswith(NCCL):
            column = name.rpartition(".")[2]
            if column == "run":
                column = "script"
            columns[column] = [options.get(name, ABSENT) for options in differences]
    if any(planned.cell.repeat > 0 for planned in cells):
        columns["repeat"] = [
            "drift" if planned.drift else str(planned.cell.repeat) for planned in cells
        ]
    else:
        columns["run"] = [" ".join(planned.run_suffixes) for planned in cells]
    common = {}
    different = {}
    for column, texts in columns.items():
        if column == GPUS or len(set(texts)) > 1:
            different[column] = texts
        elif texts[0] not in ("", ABSENT):
            common[column] = texts[0]
    return common, different


def _request(cell: Cell, differing: Sequence[str]) -> dict[str, str]:
    settings = []
    for name, value in sorted(cell.nccl.items()):
        if name not in differing:
            settings.append(f"{name.removeprefix('NCCL_')}={value}")
    request = {
        "model": cell.model.name,
        "benchmark": str(cell.benchmark["name"]),
        "strategy": str(cell.strategy["name"]),
        "nodes": compress_hosts(cell.hosts) or ABSENT,
        GPUS: ",".join(map(str, cell.gpus)),
        SETTINGS: " ".join(settings) or ABSENT,
        "batch": str(cell.batch_size),
        "precision": cell.precision,
        "optimize": cell.optimize,
    }
    if not cell.trains:
        request |= dict.fromkeys(OF_TRAINING, ABSENT)
    for name in differing:
        request[name.removeprefix("NCCL_")] = cell.nccl.get(name, ABSENT)
    return request


def verdict(record: Record | None) -> str:
    """Return a record's verdict with its codes; of a failed cell the cause."""
    if record is None:
        return ""
    failure, validity = record.failure, record.validity
    if record.state == "finished":
        if not validity.codes:
            return verdict_words(record)
        codes = f"{validity.verdict}: {', '.join(validity.codes)}"
        return verdict_words(record).replace(validity.verdict, codes, 1)
    if failure is None or failure.cause == record.state:
        return ""
    if failure.rank is None:
        return failure.cause
    return f"{failure.cause}, rank {failure.rank}"


def fitted_table(
    columns: dict[str, list[Text]], titles: Mapping[str, str], width: int, cut: Collection[str]
) -> Table:
    """Return columns as a table for a width, and remove what has no room from `columns`.

    What is too wide then is cut in the columns of `cut`.
    """
    widths = {}
    for name, texts in columns.items():
        widths[name] = cell_len(titles[name])
        for text in texts:
            text.no_wrap, text.overflow = True, "ellipsis"
            widths[name] = max(widths[name], text.cell_len)
    if STATE in widths:
        widths[STATE] = max(STATE_WIDTH, widths[STATE])
    least = widths | {VALIDITY: min(LEAST_VERDICT, widths[VALIDITY])}
    for name in DISPENSABLE:
        if sum(least[column] + GAP for column in columns) > width + GAP:
            columns.pop(name, None)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        if name in cut:
            widths[name] = min(LEAST_WIDTH, widths[name])
        justify: JustifyMethod = "left"
        if name in COLUMNS and name != TRANSPORT:
            justify = "right"
        table.add_column(
            Text(titles[name], no_wrap=True, overflow="ellipsis"),
            justify=justify,
            no_wrap=name not in cut,
            overflow="ellipsis",
            min_width=widths[name],
        )
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table
