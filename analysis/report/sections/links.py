"""Bandwidth of the exchange by link, what a link is worth, and lost time by link speed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from analysis.findings.baselines import EFFICIENCY
from analysis.findings.communication import EXPOSED
from analysis.findings.wire_lines import efficiency_of, fit
from analysis.report.charts import (
    MOST_ROWS,
    DotRow,
    ScatterPoint,
    rows_figure,
    scatter_figure,
    truncation_note,
)
from analysis.report.figure import Figure, colours, marker
from analysis.report.numbers import ABSENT, NumberFormat, estimate, number
from analysis.report.section import Section
from analysis.report.table import Column, Table, numbers_table
from analysis.study.draws import scaled
from analysis.study.estimates import Estimate, Findings, SubsetLinks, WireLine, WirePoint
from analysis.study.names import gpu_ids, ran_alone, short_names, things_of, unit_of
from analysis.study.study import Study
from analysis.text import count, sentence, single_line
from analysis.topology.model import NET, best_first

MS = NumberFormat(decimals=2)
SIGNED_MS = NumberFormat(decimals=2, sign=True)
MOST_LINES = 4  # figures
LINE_STEPS = 60  # of a drawn line
# GB/s that the upper axis may name.
SPEEDS = (1000, 700, 500, 300, 200, 150, 100, 70, 50, 30, 20, 15, 10, 7, 5, 3, 2, 1)


def links(study: Study, findings: Findings) -> Section | None:
    """Return the bandwidth of each subset's exchange with its links, and what a link is worth.

    One GPU alone has none.
    """
    if not study.trains or (study.records and ran_alone(study)):
        return None
    names = short_names(dict.fromkeys(subset.label for subset in findings.wires))
    of_hosts = any(is_between_hosts(subset) for subset in findings.wires)
    caption = (
        "The exchange of each subset (busbw), its slowest link, and what its links carry by "
        "measured copies and by data "
        "sheets."
    )
    if of_hosts:
        caption += " Between hosts: by the reference net_link, and by the rate of the interface."
    table = Table.of(
        "wires",
        caption,
        (
            Column("cell", "cell", lambda subset: names[subset.label]),
            Column("strategy", "strategy", "strategy", shown=False),
            Column("gpus", unit_of(study), lambda subset: gpu_ids(subset.gpus)),
            Column("link_class", "link class", "link_class"),
            Column("transport", "transport", "transport"),
            Column("exchange_gb_per_s", "exchange GB/s", "exchange_gb_per_s", "number"),
            Column(
                "p2p_gb_per_s", "links alone GB/s" if of_hosts else "peer copies GB/s",
                "p2p_gb_per_s", "number"),
            Column("nominal_gb_per_s", "nominal GB/s", "nominal_gb_per_s", "number"),
            Column("efficiency", "efficiency", "efficiency", "share"),
        ),
        findings.wires,
    )  # fmt: skip
    member, things = unit_of(study).removesuffix("s"), things_of(study)
    worth = Table.of(
        "worth",
        f"What a link is worth: {things} per second that each {member} loses with a link class, "
        "against the best class.",
        (
            Column("cell", "cell", "label"),
            Column("strategy", "strategy", "strategy"),
            Column("link_class", "link class", "link_class"),
            Column("lost", f"lost {things}/s per {member}", "lost", "number", True),
            Column("gradient_bytes", "gradient bytes", "gradient_bytes", "count"),
            Column("batch_size", "batch", "batch_size", "count"),
        ),
        findings.worth,
    )
    lines = []
    if not findings.wires:
        lines.append(f"No cell of several {unit_of(study)} with known links measured its exchange.")
    figures = tuple(_links_figure(findings.wires, names))
    return Section("wires", "Bandwidth and links", tuple(lines), figures, (table, worth))


def is_between_hosts(subset: SubsetLinks) -> bool:
    """Return whether a subset is on several hosts."""
    return (subset.link_class or "").startswith(NET)


def _links_figure(subsets: Sequence[SubsetLinks], names: Mapping[str, str]) -> Iterator[Figure]:
    """Yield bandwidth of the exchange by link class and strategy, with that of a peer copy."""
    timed = [subset for subset in subsets if subset.exchange_gb_per_s is not None]
    order = best_first(subset.link_class or ABSENT for subset in timed)
    groups: dict[tuple[int, str, str, str, tuple[tuple[str, str], ...]], list[SubsetLinks]] = {}
    for subset in timed:
        cell = tuple(sorted(subset.key.items()))
        class_order = order.index(subset.link_class or ABSENT)
        key = (class_order, subset.strategy, names[subset.label], subset.transport or "", cell)
        groups.setdefault(key, []).append(subset)
    if not groups:
        return
    palette = colours(subset.strategy for subset in subsets)
    transports = {transport for _, _, _, transport, _ in groups}
    rows, data = [], []
    for key in sorted(groups)[:MOST_ROWS]:
        class_order, strategy, name, transport, _ = key
        rates = [
            subset.exchange_gb_per_s
            for subset in groups[key]
            if subset.exchange_gb_per_s is not None
        ]
        limits = [subset.p2p_gb_per_s for subset in groups[key] if subset.p2p_gb_per_s is not None]
        words = [order[class_order], name, transport if len(transports) > 1 else ""]
        label = " · ".join(word for word in words if word and word != ABSENT)
        right = " to ".join(dict.fromkeys((number(min(rates)), number(max(rates)))))
        dots = [Estimate(rate) for rate in rates]
        rows.append(DotRow(label, right, dots, palette[strategy], marker(strategy), limits))
        for subset in groups[key]:
            wires = (subset.transport, subset.exchange_gb_per_s, subset.p2p_gb_per_s)
            data.append((order[class_order], name, gpu_ids(subset.gpus), *wires))
    caption = "Bandwidth of the exchange by link class, a dot for each subset"
    if len(transports) == 1 and any(transports):
        caption += f", all of them {single_line(next(iter(transports)))}"
    if any(subset.p2p_gb_per_s for subset in subsets):
        caption += "; vertical strokes: what all rings carry at the measured peer copies"
        if any(is_between_hosts(subset) for subset in subsets):
            caption += ", between hosts what the network carries"
    yield rows_figure(
        "wires",
        f"{caption}.{truncation_note(list(groups), MOST_ROWS, 'more row', 'wires.csv')}",
        rows,
        "exchange of all buckets, busbw GB/s",
        numbers_table(
            (
                "link_class",
                "cell",
                "gpus",
                "transport",
                "exchange_gb_per_s",
                "peer_copies_gb_per_s",
            ),
            data,
        ),
        format_tick=lambda value: f"{value:g}",
        from_zero=True,
    )


# ---- Lost time against the speed of the links ---------------------------------------------------


class LinePoint(NamedTuple):
    """A cell of a line."""

    line: WireLine
    point: WirePoint


def wire_lines(study: Study, findings: Findings) -> Section | None:
    """Return a line for each mechanism with its cells; without one, what is missing."""
    lines = findings.wire_lines
    if not lines and not findings.no_wire_line:
        return None
    names = short_names(dict.fromkeys(line.label for line in lines))
    texts = []
    for line in lines:
        texts += _line_sentences(line, names[line.label])
    if findings.no_wire_line:
        texts.append(sentence(findings.no_wire_line))
    table = Table.of(
        "wire_lines",
        "What a cell loses per step: a fixed time, and a share of the time that its exchange "
        "takes alone.",
        (
            Column("cells", "cells", lambda line: names[line.label]),
            Column("strategy", "strategy", "strategy", shown=False),
            Column("lost", "lost", _lost_words),
            Column("fixed_ms", "fixed ms", "fixed_ms", MS, True),
            Column("share", "share", "share", "share", True),
            Column("r_squared", "R²", "r_squared", "ratio"),
            Column("deviation_ms", "residuals ms", "deviation_ms", MS),
            Column("count", "cells used", lambda line: len(line.points), "count"),
            Column("speeds", "different times", "speeds", "count"),
        ),
        lines,
    )
    cells = Table.of(
        "wire_cells",
        "Every cell beside its line, with what the line through the others lets expect of it.",
        (
            Column("line", "line", lambda row: names[row.line.label], shown=len(names) > 1),
            Column("lost", "lost", lambda row: _lost_words(row.line), shown=len(lines) > 1),
            Column("cell", unit_of(study), "point.label"),
            Column("gb_per_s", "measured GB/s", "point.gb_per_s", "number"),
            Column("wire_ms", "exchange ms", "point.wire_ms", MS),
            Column("lost_ms", "lost ms", "point.lost_ms", MS),
            Column("expected_ms", "expected ms", "point.expected_ms", MS, True),
            Column("residual_ms", "difference ms", "point.residual_ms", SIGNED_MS),
            Column("efficiency", "efficiency", "point.efficiency", "share"),
            Column("expected_efficiency", "expected", "point.expected_efficiency", "share", True),
        ),
        [LinePoint(line, point) for line in lines for point in line.points],
    )
    figures = tuple(
        _line_figure(line, lines, names, panel) for panel, line in enumerate(lines[:MOST_LINES], 1)
    )
    tables = (table, cells) if lines else ()
    return Section(
        "wire-lines", "Lost time and the speed of the links", tuple(texts), figures, tables
    )


def _lost_words(line: WireLine) -> str:
    return {EFFICIENCY: "against one GPU", EXPOSED: "to communication"}.get(
        line.quantity, "to the strategy"
    )


def _line_sentences(line: WireLine, name: str) -> list[str]:
    share = estimate(line.share, "share")
    words = {
        EFFICIENCY: "a step takes longer than alone by",
        EXPOSED: "of communication a step does not hide",
    }
    begins = words.get(line.quantity, "the strategy costs a step")
    texts = [
        sentence(
            f"{name}: {begins} {estimate(line.fixed_ms, MS)} ms, and {share} of the time that the "
            f"exchange takes alone (R² {number(line.r_squared, 'ratio')}, {len(line.points)} cells)"
        )
    ]
    if line.speeds == 2:
        texts.append(
            "The links have only two speeds here, and a line goes through any two points: no cell "
            "between them tests it."
        )
    if line.bends:
        texts.append(
            "Its cells bend away from the line, so it says little of speeds between them: look at "
            "the figure."
        )
    return texts


def _line_figure(
    line: WireLine, lines: Sequence[WireLine], names: Mapping[str, str], panel: int
) -> Figure:
    """Return the cells of a line with the line and the band in which 95 % of further cells fall."""
    is_efficiency = line.quantity == EFFICIENCY
    what = {EFFICIENCY: "Efficiency", EXPOSED: "Exposed communication"}.get(
        line.quantity, "What the strategy costs a step"
    )
    cells = count(len(line.points), "cell")
    caption = (
        f"{what}, {single_line(names[line.label])}, against the time that the exchange takes "
        f"alone. Band: 95 % of further cells. Labels where they fit; {cells} in wire_cells.csv."
    )
    if panel == MOST_LINES:
        caption += truncation_note(lines, MOST_LINES, "more line", "wire_lines.csv")
    points, data = [], []
    for point in line.points:
        y = _y_value(line, point)
        points.append(ScatterPoint(point.wire_ms, y, point.label, weight=abs(point.residual_ms)))
        expected = point.expected_ms
        if is_efficiency and point.expected_efficiency:
            expected = scaled(point.expected_efficiency, 100.0)
        data.append((point.label, point.wire_ms, point.gb_per_s, y, expected))
    quantity = "efficiency_percent" if is_efficiency else "lost_ms"
    y_label = "efficiency, %" if is_efficiency else "lost ms per step"
    return scatter_figure(
        f"wire-line-{panel}",
        caption,
        points,
        _drawn_line(line),
        (colours(each.strategy for each in lines)[line.strategy], marker(line.strategy)),
        ("ms that the exchange takes alone", y_label),
        numbers_table(("cell", "wire_ms", "gb_per_s", quantity, f"expected_{quantity}"), data),
        ("measured GB/s", _speed_ticks(line)),
    )


def _y_value(line: WireLine, point: WirePoint) -> float:
    if line.quantity == EFFICIENCY and point.efficiency is not None:
        return 100 * point.efficiency
    return point.lost_ms


def _drawn_line(line: WireLine) -> list[tuple[float, Estimate]]:
    """Return (ms of the exchange, expected value with its band) along the line."""
    fitted = fit([(point.wire_ms, point.lost_ms) for point in line.points])
    if fitted is None:
        return []
    most = 1.06 * max(point.wire_ms for point in line.points)
    drawn = []
    for step in range(LINE_STEPS + 1):
        x = most * step / LINE_STEPS
        expected = fitted.expected(x)
        if line.quantity == EFFICIENCY and line.alone_ms is not None:
            expected = scaled(efficiency_of(line.alone_ms, expected), 100.0)
        drawn.append((x, expected))
    return drawn


def _speed_ticks(line: WireLine) -> dict[float, str]:
    """Return {ms of the exchange: GB/s}.

    Empty where subsets move other amounts, and one time stands for several GB/s.
    """
    megabytes = [point.wire_ms * point.gb_per_s for point in line.points]
    if max(megabytes) > 1.01 * min(megabytes):
        return {}
    most = 1.06 * max(point.wire_ms for point in line.points)
    ticks: dict[float, str] = {}
    last = -most
    for speed in SPEEDS:
        at = megabytes[0] / speed
        if 0.7 * line.points[0].wire_ms <= at <= most and at - last > 0.09 * most:
            ticks[at] = str(speed)
            last = at
    return ticks
