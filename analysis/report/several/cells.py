"""The same cells beside each other: a table with every number, bars of the rates, and the differences that runs show."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from analysis.findings.baselines import EFFICIENCY
from analysis.findings.between_studies import (
    FASTER,
    SLOWER,
    UNKNOWN,
    CellDifference,
    CellOnSide,
    SharedCell,
    Side,
)
from analysis.findings.communication import EXCHANGE, EXPOSED
from analysis.report.figures import REST, ROWS, bare, dot, more_in, row_label, rows_figure
from analysis.report.numbers import central, number, of_metric
from analysis.report.section import Section
from analysis.report.several.look import Look, looks
from analysis.report.style import (
    COLOURS,
    INK,
    MUTED,
    Picture,
    drawn,
    figure_width,
    for_width,
    new_figure,
    rendered,
    window,
)
from analysis.report.tables import Column, Table, Value, metric_column
from analysis.study.names import short_names, unit_of_cells
from analysis.study.rates import IMAGES_PER_SECOND
from analysis.text import count, first_lines, single_line
from benchmarks.record.metrics import metric as entry_of
from conf.cell import counted

BARS = 12  # cells of the figure of rates
BAR, TITLE = 0.17, 0.24  # inches of a bar, and of the name above the bars of a cell
NAME_LENGTH = 60  # characters


def cells(sides: Sequence[Side], shared: Sequence[SharedCell]) -> Section:
    """Return every cell that two sides have."""
    if not shared:
        line = "No cell was measured by two of them: nothing that was asked is equal on the same GPUs or CPU workers."
        return Section("cells", "The same cells beside each other", (line,))
    look = looks(sides)
    pictures = (*_bars(shared, look), *_differences(shared, look))
    return Section(
        "cells", "The same cells beside each other", _notes(shared), pictures, (_table(shared),)
    )


def _notes(shared: Sequence[SharedCell]) -> tuple[str, ...]:
    """Return why cells have no verdict, or what qualifies it, and what checks said of their runs."""
    against = [
        (cell, one.against) for cell in shared for one in cell.places if one.against is not None
    ]
    reasons = Counter(one.why for _, one in against if one.why)
    doubts = [f"{cell.name}: {one.doubts}." for cell, one in against if one.doubts]
    return tuple(
        first_lines(
            [
                *(f"{count(number, 'difference')}: {why}." for why, number in reasons.items()),
                *doubts,
            ]
        )
    )


def _table(shared: Sequence[SharedCell]) -> Table:
    names = short_names(cell.name for cell in shared)
    units = {unit_of(cell.metric, [cell]) for cell in shared if cell.metric}
    unit = next(iter(units)) if len(units) == 1 else ""
    rows: list[tuple[Value, ...]] = []
    for cell in shared:
        first = cell.places[0]
        for one in cell.places:
            rows.append((
                names[cell.name], one.side.name, len(one.runs.rated_records) or len(one.runs.records),
                one.runs.next_run(cell.metric) if cell.metric else None, unit_of(cell.metric, [cell]),
                *(_plain(one, name, cell.metric) for name in (EFFICIENCY, EXPOSED, EXCHANGE)),
                *_against(one.against), first.side.name if one.against else "", one.runs.cell.benchmark["name"],
            ))  # fmt: skip
    doubtful = frozenset(
        place
        for place, one in enumerate(one for cell in shared for one in cell.places)
        if one.runs.suspect
    )
    return Table(
        "cells",
        "Each cell on each machine, against the first of them that has it. The interval of a rate is that for the next run "
        "on its machine, the interval of a difference is 95 %. These runs can show differences from the smallest on.",
        (
            Column("cell", "cell"), Column("side", "machine or study"), Column("runs", "runs", "count"),
            Column("rate", unit or "rate", "rate", True), Column("unit", "unit", shown=not unit),
            metric_column("efficiency", EFFICIENCY), metric_column("exposed_ms", EXPOSED),
            metric_column("exchange_ms", EXCHANGE), Column("difference", "difference", "change", True),
            Column("smallest", "smallest", "share"), Column("verdict", "verdict"), Column("why", "note", shown=False),
            Column("against", "against", shown=False), Column("benchmark", "benchmark", shown=False),
        ),
        tuple(rows), doubtful,
    )  # fmt: skip


def _plain(one: CellOnSide, metric: str, main: str) -> Value:
    return one.numbers[metric].plain if metric in one.numbers and metric != main else None


def _against(one: CellDifference | None) -> tuple[Value, ...]:
    if one is None:
        return None, None, "", ""
    return (
        one.change,
        one.smallest,
        one.verdict,
        "; ".join(text for text in (one.why, one.doubts) if text),
    )


def unit_of(metric: str, cells: Iterable[SharedCell]) -> str:
    """Return the unit of a metric of some cells for people; empty without a metric."""
    return entry_of(metric).of(_things(cells)).unit if metric else ""


def _things(cells: Iterable[SharedCell]) -> str:
    return counted(one.runs.cell for cell in cells for one in cell.places)


def _bars(shared: Sequence[SharedCell], look: Mapping[str, Look]) -> Iterator[Picture]:
    """Yield images/s per GPU of each cell, a bar for each side."""
    timed = [cell for cell in shared if cell.metric == IMAGES_PER_SECOND]
    shown = timed[:BARS]
    if not shown:
        return
    names = short_names(cell.name for cell in shown)
    height = 0.5 + BAR * sum(len(cell.places) for cell in shown) + TITLE * len(shown)
    figure, axes = new_figure(figure_width(), height)
    y, most = 0.0, 0.0
    for cell in shown:
        y += TITLE
        name = single_line(names[cell.name], for_width(NAME_LENGTH))
        axes.text(0.0, y - BAR / 2 - 0.03, name, transform=axes.get_yaxis_transform(),
                  va="bottom", fontsize=8, color=INK)  # fmt: skip
        for one in cell.places:
            rate, style = one.runs.next_run(cell.metric), look[one.side.name]
            assert rate is not None
            value = rate.value / one.runs.world_size
            axes.barh(y, value, height=BAR * 0.82, color=style.colour, zorder=2)
            axes.annotate(
                f"{style.name}: {central(rate, 'rate')}", (value, y), xytext=(4, 0), textcoords="offset points",
                va="center", fontsize=8, color=style.colour, annotation_clip=False,
            )  # fmt: skip
            most = max(most, value)
            y += BAR
    axes.set_ylim(y, 0)
    axes.set_xlim(0, most * 1.02)
    axes.set_yticks([])
    bare(axes)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=5)
    things, unit = (
        _things(shown),
        unit_of_cells(one.runs.cell for cell in shown for one in cell.places),
    )
    axes.set_xlabel(f"{things}/s per {unit.removesuffix('s')}")
    yield rendered(
        figure, "cells",
        f"Length: {things} per second and {unit.removesuffix('s')}. Number: {things} per second of all {unit} of the cell."
        + more_in(timed, BARS, "more cell", "cells.csv"),
        drawn(
            ("cell", "side", "gpus", "images_per_second"),
            [(cell.name, one.side.name, one.runs.world_size, one.runs.next_run(cell.metric))
             for cell in shown for one in cell.places],
        ),
    )  # fmt: skip


def _differences(shared: Sequence[SharedCell], look: Mapping[str, Look]) -> Iterator[Picture]:
    """Yield the differences that have a verdict, with their intervals, the largest first."""
    judged = [
        (cell, one, one.against, one.against.change)
        for cell in shared for one in cell.places
        if one.against is not None and one.against.verdict != UNKNOWN and one.against.change is not None
    ]  # fmt: skip
    shown = sorted(judged, key=lambda each: -abs(each[3].value))[:ROWS]
    if not shown:
        return
    figure, axes = rows_figure(len(shown))
    names = short_names(dict.fromkeys(cell.name for cell, *_ in shown))
    firsts = {cell.places[0].side.name for cell, *_ in shown}
    for y, (cell, one, against, change) in enumerate(shown):
        axes.plot([0, 0], [y - 0.09, y + 0.25], color=MUTED, lw=0.9, zorder=1)
        colour = {FASTER: COLOURS["blue"][0], SLOWER: COLOURS["vermillion"][0]}.get(
            against.verdict, REST
        )
        dot(axes, y, change, colour, "o")
        told = (
            _pair(one.side.name, cell.places[0].side.name, look)
            if len(firsts) > 1
            else look[one.side.name].name
        )
        verdict = f", {against.verdict}" if against.verdict in (FASTER, SLOWER) else ""
        row_label(
            axes, y, f"{told}: {names[cell.name]}", f"{number(change.value, 'change')}{verdict}"
        )
    axes.set_xlim(*window([change for *_, change in shown], [0.0]))
    axes.set_xlabel("difference of the rate")
    against_what = f"to {firsts.pop()}" if len(firsts) == 1 else "to the first that has the cell"
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{100 * value:+.3g} %".replace("-", "−") if value else "0"
    )
    yield rendered(
        figure, "differences", f"Differences {against_what} with 95 % intervals, the largest first. Grey: no difference seen."
        + more_in(judged, ROWS, "more difference", "cells.csv"),
        drawn(
            ("cell", "side", "difference", "verdict"),
            [(cell.name, one.side.name, change, against.verdict) for cell, one, against, change in shown],
        ),
    )  # fmt: skip


def _pair(side: str, first: str, look: Mapping[str, Look]) -> str:
    """Return `eager_b against eager_a`: two sides by what tells these two apart, or by their names in the legend."""
    short = short_names((side, first))
    return min((f"{one} against {other}" for one, other in
                ((short[side], short[first]), (look[side].name, look[first].name))), key=len)  # fmt: skip


def with_unit(cell: SharedCell, value: float) -> str:
    """Return the main number of a cell with its unit: `9,337 images/s`."""
    unit = unit_of(cell.metric, [cell])
    return number(value, of_metric(cell.metric)) + (f" {unit}" if unit not in ("", "%") else "")
