"""What the cells cost: how much of their time is measuring, and where the rest goes."""

import math
import statistics
from collections.abc import Sequence

from analysis import cost as parts
from analysis.cost import CellCost, from_record, merge_key_order
from analysis.report.charts import MOST_ROWS, Bar, BarGroup, bars_figure, truncation_note
from analysis.report.figure import COLOURS, Figure
from analysis.report.numbers import NumberFormat, number
from analysis.report.section import Section
from analysis.report.table import Column, Table, Value, numbers_table
from analysis.study.estimates import Findings
from analysis.study.names import run_name
from analysis.study.study import Study
from analysis.text import count, single_line
from benchmarks.record import Record

# Parts that stand together in the figure, and for people in the table. The last two are of older
# records.
TOGETHER = {
    parts.START: "start", parts.SETTLE: "start", parts.SPAWN: "start", parts.IMPORTS: "start",
    parts.CONTEXT: "start", parts.CONNECT: "start", "build": "start", "first step": "first step",
    "warm-up": "warm-up", parts.EXIT: "end", "take over": "start", "give back": "end",
}  # fmt: skip
MEASURED, OTHER = "measured", "checks and gaps"
BARS = {
    "start": "grey",
    "first step": "orange",
    "warm-up": "green",
    MEASURED: "blue",
    OTHER: "brown",
    "end": "purple",
}
SECONDS = NumberFormat(decimals=2)
Costs = Sequence[tuple[Record, CellCost]]


def costs(study: Study, findings: Findings) -> Section | None:
    """Return where the wall time of every cell went; None where no record tells."""
    cells = []
    for record in study.records:
        cost = from_record(record)
        if cost and cost.parts:
            cells.append((record, cost))
    if not cells:
        return None
    lines = (_sentence([cost for _, cost in cells]),)
    return Section("costs", "What the cells cost", lines, (_figure(cells),), (costs_table(cells),))


def costs_table(cells: Costs, whole: str = "costs.csv has") -> Table:
    """Return the seconds of each cell.

    People see parts that belong together as one, and `whole` says what has all.
    """
    names = merge_key_order(cost.parts for _, cost in cells)
    columns = [Column("cell", "cell")]
    columns += [Column(f"{_key(name)}_together", name, kind=SECONDS) for name in BARS]
    columns += [
        Column("seconds", "total", kind=SECONDS),
        Column("overhead_ratio", "ratio", kind="ratio"),
    ]
    columns += [Column(_key(name), single_line(name), shown=False) for name in names]
    columns += [
        Column("measuring", "measuring", shown=False),
        Column("record_id", "record", shown=False),
    ]
    rows = []
    for record, cost in cells:
        row: dict[str, Value] = {"cell": run_name(record), "record_id": record.record_id}
        for name, seconds in cost.parts.items():
            row[_key(name)] = seconds
        for name, seconds in together(cost).items():
            row[f"{_key(name)}_together"] = seconds
        row |= {"seconds": cost.total, "overhead_ratio": cost.ratio, "measuring": cost.measuring}
        rows.append(row)
    caption = (
        "Where the wall time of each cell went, in seconds. Ratio: wall time for each second of "
        "measuring. "
        f"{whole} every part."
    )
    return Table.of("costs", caption, columns, rows)


def together(cost: CellCost) -> dict[str, float]:
    """Return the seconds of a cell by the names of BARS, which add up to it.

    Without `measured` where that is not known.
    """
    seconds: dict[str, float] = {}
    for part, of_part in cost.parts.items():
        name = TOGETHER.get(part, OTHER)
        seconds[name] = seconds.get(name, 0.0) + of_part
    if cost.measuring is not None:
        seconds[MEASURED] = cost.measuring
        seconds[OTHER] = max(0.0, seconds.get(OTHER, 0.0) - cost.measuring)
    return seconds


def _sentence(cells: Sequence[CellCost]) -> str:
    """Return how much of the cells' time is measuring."""
    total = math.fsum(cost.total for cost in cells)
    text = f"{count(len(cells), 'cell')} took {number(total)} s"
    measuring = [cost.measuring for cost in cells if cost.measuring is not None]
    if len(measuring) < len(cells):
        return f"{text}."
    ratio = statistics.median(cost.ratio or math.nan for cost in cells)
    of_cells = ": " if len(cells) == 1 else "; in the median cell "
    share = number(math.fsum(measuring) / total, "share")
    seconds = f"{number(ratio, 'ratio')} s for each second of measuring"
    return f"{text}, {share} of it spent measuring{of_cells}{seconds}."


def _figure(cells: Costs) -> Figure:
    """Return a bar of parts for each cell."""
    shown = cells[:MOST_ROWS]
    bars = [together(cost) for _, cost in shown]
    names = [name for name in BARS if any(name in bar for bar in bars)]
    groups, rows = [], []
    for (record, cost), bar in zip(shown, bars, strict=True):
        groups.append(BarGroup(run_name(record), f"{number(cost.total)} s", [Bar(bar)]))
        rows.append((run_name(record), *(bar.get(name) for name in names), cost.total))
    return bars_figure(
        "costs-1",
        "Where the wall time of each cell "
        f"went.{truncation_note(cells, MOST_ROWS, 'more cell', 'costs.csv')}",
        groups,
        {name: (COLOURS[colour][0], "") for name, colour in BARS.items()},
        "seconds",
        numbers_table(("cell", *(f"{_key(name)}_seconds" for name in names), "seconds"), rows),
    )


def _key(name: str) -> str:
    """Return the name of a part as the head of a column of CSV."""
    return single_line(name).replace(" ", "_").replace("-", "_")
