"""Bandwidth of the exchange by link, what a link is worth, and lost time by link speed."""

from collections.abc import Mapping, Sequence

from analysis.findings.communication import COST, EXPOSED
from analysis.findings.examine import Findings
from analysis.findings.wire_lines import WireLine, fit
from analysis.report.charts import Axis, ScatterPoint, scatter_figure, truncation_note
from analysis.report.figure import colours
from analysis.report.numbers import NumberFormat, estimate, number
from analysis.report.section import Section
from analysis.report.table import Column, Table
from analysis.study.intervals import Estimate
from analysis.study.names import gpu_ids, short_names, unit_of
from analysis.study.study import Study
from analysis.text import count, sentence, single_line
from analysis.topology.model import NET

SIGNED_MS = NumberFormat(decimals=2, sign=True)
MOST_LINES = 4  # figures
LINE_STEPS = 60  # of a drawn line
WIRE_MS = Axis("ms that the exchange takes alone", "wire_ms")
LOST_MS = Axis("lost ms per step", "lost_ms")


# What the cells of a line lose, by its metric.
LOST_WORDS = {
    COST: {
        "column": "to the strategy",
        "figure": "Strategy overhead per step",
        "sentence": "the strategy overhead per step is",
    },
    EXPOSED: {
        "column": "to communication",
        "figure": "Exposed communication",
        "sentence": "exposed communication per step is",
    },
}


def links(study: Study, findings: Findings) -> Section | None:
    """Return the bandwidth of each subset's exchange with its links, and what a link is worth."""
    if not findings.wires or not study.trains or unit_of(study) != "GPUs":
        return None
    exchanging = [subset for subset in findings.wires if subset.exchange_gb_per_s is not None]
    names = short_names(subset.label for subset in exchanging)
    alone = "peer copies GB/s"
    caption = (
        "Bus bandwidth of the gradient exchange, beside what the slowest link carries by measured "
        "copies and by its data sheet."
    )
    if any((subset.link_class or "").startswith(NET) for subset in findings.wires):
        alone = "links alone GB/s"
        caption += (
            " Links between hosts are taken from the measured reference net_link, and from the "
            "rate of the interface."
        )
    table = Table.of(
        "wires",
        caption,
        (
            Column("cell", "configuration", lambda subset: names[subset.label]),
            Column("exchange_gb_per_s", "exchange GB/s", "exchange_gb_per_s", "number"),
            Column("p2p_gb_per_s", alone, "p2p_gb_per_s", "number"),
            Column("nominal_gb_per_s", "nominal GB/s", "nominal_gb_per_s", "number"),
            Column("strategy", "strategy", "strategy", shown=False),
            Column("gpus", "GPUs", lambda subset: gpu_ids(subset.gpus)),
            Column("link_class", "link class", "link_class"),
            Column("transport", "transport", "transport"),
            Column("efficiency", "efficiency", "efficiency", "share", shown=False),
        ),
        exchanging,
    )
    worth = Table.of(
        "worth",
        "Throughput lost per GPU on each kind of link, relative to the best.",
        (
            Column("cell", "configuration", "label"),
            Column("strategy", "strategy", "strategy"),
            Column("link_class", "link class", "link_class"),
            Column("lost", "lost images/s per GPU", "lost", "number", True),
            Column("gradient_bytes", "gradient bytes", "gradient_bytes", "count"),
            Column("batch_size", "batch", "batch_size", "count"),
        ),
        findings.worth,
    )
    return Section("wires", "Bandwidth and links", tables=(table, worth))


# ---- Lost time against the speed of the links ---------------------------------------------------


def wire_lines(study: Study, findings: Findings) -> Section | None:
    """Return a line for each mechanism with its cells; None without one."""
    lines = findings.wire_lines
    if not lines or unit_of(study) != "GPUs":
        return None
    names = short_names(line.label for line in lines)
    texts, figures = [], []
    palette = colours(line.strategy for line in lines)
    for panel, line in enumerate(lines, 1):
        fixed, share = estimate(line.fixed_ms, "ms"), estimate(line.share, "share")
        start = f"{names[line.label]}: {LOST_WORDS[line.quantity]['sentence']}"
        text = (
            f"{start} {fixed} ms, and {share} of the time that the exchange takes alone "
            f"(R² {number(line.r_squared, 'ratio')}, {len(line.points)} configurations)"
        )
        texts.append(sentence(text))
        if line.speeds == 2:
            texts.append(
                "The links have only two speeds here, and a line goes through any two points: "
                "nothing between them tests it."
            )
        if panel > MOST_LINES:
            continue
        # The cells, the line, and the band in which 95 % of further cells fall.
        subject = f"{LOST_WORDS[line.quantity]['figure']}, {single_line(names[line.label])}"
        caption = (
            f"{subject}, against the time that the exchange takes alone. Band: 95 % prediction "
            f"interval. {count(len(line.points), 'configuration')} in wire_cells.csv."
        )
        points, pairs = [], []
        for point in line.points:
            pairs.append((point.wire_ms, point.lost_ms))
            points.append(ScatterPoint(*pairs[-1], point.label, abs(point.residual_ms)))
        fitted = fit(pairs)
        assert fitted is not None  # the line was fitted to these points
        drawn = []
        for step in range(LINE_STEPS + 1):
            x = 1.06 * max(pairs)[0] * step / LINE_STEPS
            drawn.append((x, fitted.expected(x)))
        colour, name = palette[line.strategy], f"wire-line-{panel}"
        figures.append(scatter_figure(name, caption, points, drawn, colour, WIRE_MS, LOST_MS))
    texts += filter(None, [truncation_note(lines, MOST_LINES, "more line", "wire_lines.csv")])
    title, tables = "Does link speed explain the loss?", _line_tables(study, lines, names)
    return Section("wire-lines", title, tuple(texts), tuple(figures), tables)


def _line_tables(
    study: Study, lines: Sequence[WireLine], names: Mapping[str, str]
) -> tuple[Table, Table]:
    by_cell = {(runs.gpus, frozenset(runs.key.items())): runs for runs in study.timed}
    cells = []
    for line in lines:
        words = {"line": names[line.label], "lost": LOST_WORDS[line.quantity]["column"]}
        for point in line.points:
            lost: Estimate | None = Estimate(point.lost_ms)
            if line.quantity != EXPOSED:
                lost = by_cell[point.gpus, frozenset(point.key.items())].next_run(COST)
            cells.append({**vars(point), **words, "cell": point.label, "lost_ms": lost})
    return Table.of(
        "wire_lines",
        "Loss per step: a fixed time, and a share of the time that the exchange takes alone.",
        (
            Column("cells", "configurations", lambda line: names[line.label]),
            Column("strategy", "strategy", "strategy", shown=False),
            Column("lost", "lost", lambda line: LOST_WORDS[line.quantity]["column"]),
            Column("fixed_ms", "fixed ms", "fixed_ms", "ms", True),
            Column("share", "share", "share", "share", True),
            Column("r_squared", "R²", "r_squared", "ratio"),
            Column("deviation_ms", "residuals ms", "deviation_ms", "ms"),
            Column("count", "points", lambda line: len(line.points), "count"),
            Column("speeds", "different times", "speeds", "count"),
        ),
        lines,
    ), Table.of(
        "wire_cells",
        "Measured loss of each configuration, and the value predicted from all others.",
        (
            Column("line", "line", shown=len(names) > 1),
            Column("lost", "lost", shown=len(lines) > 1),
            Column("cell", "GPUs"),
            Column("gb_per_s", "measured GB/s", kind="number"),
            Column("wire_ms", "exchange ms", kind="ms"),
            Column("lost_ms", "lost ms", kind="ms", bounded=True),
            Column("expected_ms", "expected ms", kind="ms", bounded=True),
            Column("residual_ms", "difference ms", kind=SIGNED_MS),
        ),
        cells,
    )
