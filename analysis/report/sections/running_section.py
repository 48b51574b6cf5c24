"""What the cells cost: how much of their time is measuring, and where the rest goes."""

import math
from collections.abc import Sequence

from analysis import cost as parts
from analysis.cost import CellCost, from_record
from analysis.findings.examine import Findings
from analysis.report.numbers import number
from analysis.report.section import Section
from analysis.report.table import Column, Table, Value, columns_of
from analysis.study.names import run_name
from analysis.study.study import Study
from analysis.text import count
from benchmarks.record import Record

# Parts that stand together. The last two are of older records.
TOGETHER = {
    parts.SETTLE: "start", parts.SPAWN: "start", parts.IMPORTS: "start", parts.CONTEXT: "start",
    parts.CONNECT: "start", "build": "start", "first step": "first_step", "warm-up": "warm_up",
    parts.EXIT: "end", "take over": "start", "give back": "end",
}  # fmt: skip
MEASURED, OTHER = "measured", "checks_and_gaps"


def costs(study: Study, findings: Findings) -> Section | None:
    """Return where the wall time of every cell went; None where no record tells."""
    records, totals, measuring = [], [], []
    for record in study.records:
        cost = from_record(record)
        if cost.parts:
            records.append(record)
            totals.append(cost.total)
            measuring.append(cost.measuring or 0.0)
    if not records:
        return None
    total = math.fsum(totals)
    share = number(math.fsum(measuring) / total, "share")
    line = f"{count(len(records), 'cell')} took {number(total)} s, {share} of it spent measuring."
    return Section("costs", "What the cells cost", (line,), (), (costs_table(records),))


def costs_table(records: Sequence[Record]) -> Table:
    """Return the seconds of each cell; parts that belong together stand as one."""
    rows = []
    for record in records:
        cost = from_record(record)
        row: dict[str, Value] = {"cell": run_name(record), "record_id": record.record_id}
        rows.append(row | together(cost) | {"seconds": cost.total, "overhead_ratio": cost.ratio})
    columns = [
        *columns_of(cell="cell"),
        *columns_of("ms", start="start", first_step="first step", warm_up="warm-up"),
        *columns_of("ms", measured="measured", checks_and_gaps="checks and gaps", end="end"),
        *columns_of("ms", seconds="total"),
        *columns_of("ratio", overhead_ratio="ratio"),
        Column("record_id", "record", shown=False),
    ]
    caption = (
        "Where the wall time of each cell went, in seconds. Ratio: wall time for each second of "
        "measuring."
    )
    return Table.of("costs", caption, columns, rows)


def together(cost: CellCost) -> dict[str, Value]:
    """Return the seconds of a cell by the columns of the table; without `measured` if not known."""
    seconds: dict[str, float] = {}
    for part, of_part in cost.parts.items():
        key = TOGETHER.get(part, OTHER)
        seconds[key] = seconds.get(key, 0.0) + of_part
    if cost.measuring is not None:
        seconds[MEASURED] = cost.measuring
        seconds[OTHER] = max(0.0, seconds.get(OTHER, 0.0) - cost.measuring)
    return dict(seconds)
