"""What the cells cost: how much of their time is measuring, and where the rest goes."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.report.figures import ROWS, more_in, row_label, rows_figure
from analysis.report.numbers import NumberFormat, number
from analysis.report.section import Section
from analysis.report.style import COLOURS, PAPER, Picture, drawn, for_width, rendered
from analysis.report.tables import Column, Table
from analysis.seconds import parts
from analysis.seconds.cell import CellSeconds, from_record, named_in_order
from analysis.study.estimates import Findings
from analysis.study.names import run_name
from analysis.study.study import Study
from analysis.text import count, single_line
from benchmarks.record import Record

# Parts that stand together in the figure, and for people in the table: their name, and the colour of their bar.
STARTING = (
    parts.START, parts.SETTLE, parts.SPAWN, parts.IMPORTS, parts.CONTEXT, parts.CONNECT, "build",
)  # fmt: skip
FORMER = {"take over": "start", "give back": "end"}  # of older ranks, which measured several cells
TOGETHER = {
    **dict.fromkeys(STARTING, "start"),
    **{name: name for name in ("first step", "warm-up")},
    parts.EXIT: "end",
    **FORMER,
}
MEASURED, OTHER = "measured", "checks and gaps"
BARS = {
    "start": "grey",
    "first step": "orange",
    "warm-up": "green",
    MEASURED: "blue",
    OTHER: "brown",
    "end": "purple",
}
HUNDREDTHS = NumberFormat(decimals=2)  # of a second
HEIGHT = 0.3  # of a bar, where a row is 1
MOST_IN_LEGEND = 3  # names side by side on the page


def costs(study: Study, findings: Findings) -> Section | None:
    """Return where the wall time of every cell went; None where no record tells."""
    known = [
        (record, cost) for record in study.records if (cost := from_record(record)) and cost.parts
    ]
    if not known:
        return None
    names = named_in_order(cost.parts for _, cost in known)
    rows = tuple(
        (
            run_name(record), *(together(cost).get(name) for name in BARS), cost.total, cost.ratio,
            *(cost.parts.get(name) for name in names), cost.measuring, record.record_id,
        )
        for record, cost in known
    )  # fmt: skip
    table = Table(
        "costs", "Where the wall time of each cell went, in seconds. Ratio: wall time for each second of measuring. "
        "Every part is in costs.csv.",
        (
            Column("cell", "cell"), *(Column(f"{_key(name)}_together", name, HUNDREDTHS) for name in BARS),
            Column("seconds", "total", HUNDREDTHS), Column("overhead_ratio", "ratio", "ratio"),
            *(Column(_key(name), single_line(name), shown=False) for name in names),
            Column("measuring", "measuring", shown=False), Column("record_id", "record", shown=False),
        ),
        rows,
    )  # fmt: skip
    lines = (_sentence([cost for _, cost in known]),)
    return Section("costs", "What the cells cost", lines, (_figure(known),), (table,), place=105)


def together(cost: CellSeconds) -> dict[str, float]:
    """Return the seconds of a cell by the names of BARS, which add up to it; without `measured` where that is not known."""
    found: dict[str, float] = {}
    for part, seconds in cost.parts.items():
        name = TOGETHER.get(part, OTHER)
        found[name] = found.get(name, 0.0) + seconds
    if cost.measuring is not None:
        found |= {MEASURED: cost.measuring, OTHER: max(0.0, found.get(OTHER, 0.0) - cost.measuring)}
    return found


def _sentence(known: Sequence[CellSeconds]) -> str:
    """Return how much of the cells' time is measuring."""
    total = math.fsum(cost.total for cost in known)
    said = f"{count(len(known), 'cell')} took {number(total)} s"
    measuring = [cost.measuring for cost in known if cost.measuring is not None]
    if len(measuring) < len(known):
        return f"{said}."
    ratio = statistics.median(cost.ratio or math.nan for cost in known)
    of_cells = "" if len(known) == 1 else "; in the median cell "
    each = f"{number(ratio, 'ratio')} s for each second of measuring"
    share = number(math.fsum(measuring) / total, "share")
    return f"{said}, {share} of it spent measuring{of_cells or ': '}{each}."


def _figure(known: Sequence[tuple[Record, CellSeconds]]) -> Picture:
    """Return a bar of parts for each cell."""
    shown = known[:ROWS]
    figure, axes = rows_figure(len(shown))
    bars = [together(cost) for _, cost in shown]
    names = [name for name in BARS if any(name in bar for bar in bars)]
    for y, (record, cost) in enumerate(shown):
        _bar(axes, y, bars[y])
        row_label(axes, y, run_name(record), f"{number(cost.total)} s")
    handles = [axes.barh(0, 0, color=COLOURS[BARS[name]][0], label=name) for name in names]
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=max(2, for_width(MOST_IN_LEGEND)),
        frameon=False,
    )
    axes.set_xlim(0, max(cost.total for _, cost in shown))
    axes.set_xlabel("seconds")
    axes.locator_params(axis="x", nbins=6)
    caption = (
        f"Where the wall time of each cell went.{more_in(known, ROWS, 'more cell', 'costs.csv')}"
    )
    keys = ("cell", *(f"{_key(name)}_seconds" for name in names), "seconds")
    numbers: list[tuple[Any, ...]] = [
        (run_name(record), *(bar.get(name) for name in names), cost.total)
        for (record, cost), bar in zip(shown, bars, strict=True)
    ]
    return rendered(figure, "costs-1", caption, drawn(keys, numbers))


def _bar(axes: Any, y: int, seconds: Mapping[str, float]) -> None:
    """Draw the parts of a cell behind one another."""
    at = 0.0
    for name, colour in BARS.items():
        width = seconds.get(name, 0.0)
        axes.barh(
            y + 0.08,
            width,
            left=at,
            height=HEIGHT,
            color=COLOURS[colour][0],
            edgecolor=PAPER,
            lw=0.4,
            zorder=2,
        )
        at += width


def _key(name: str) -> str:
    """Return the name of a part as the head of a column of CSV."""
    return single_line(name).replace(" ", "_").replace("-", "_")


SECTIONS = (costs,)
