"""The machine: its hosts, a drawing of its links, heat maps of pairs, what a link is worth."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from analysis.findings.communication import COST, EXPOSED
from analysis.findings.examine import Findings
from analysis.findings.links import wires_of
from analysis.findings.wire_lines import WireLine, fit
from analysis.input_files import UnreadableInput
from analysis.report.charts import (
    Axis,
    ScatterPoint,
    heat_map_figure,
    scale_of,
    scatter_figure,
    truncation_note,
)
from analysis.report.figure import Figure, colours
from analysis.report.numbers import NumberFormat, estimate, number
from analysis.report.section import Section
from analysis.report.table import Column, Table, Value, columns_of, numbers_table
from analysis.study.intervals import Estimate
from analysis.study.names import gpu_ids, run_name, short_names, unit_of
from analysis.study.provenance import facts_of_hosts, gpu_names, gpus_of
from analysis.study.study import Study
from analysis.text import count, sentence, single_line
from analysis.topology.model import NET
from benchmarks.record import Record, finite
from conf.cell import Member

MOST_DRAWINGS, MOST_MAPS, LARGEST_MAP = 2, 8, 16
MATRICES = {
    "unidirectional": "Bandwidth one way",
    "bidirectional": "Bandwidth both ways",
    "latency_gpu": "Latency by the GPU's clock",
    "latency_cpu": "Latency by the host's clock",
}

HOSTS = (
    *columns_of(host="host", own_name="its own name", gpus="GPUs", cpu="CPU"),
    *columns_of("count", cores="cores"),
    *columns_of(driver="driver", interface="interface"),
    *columns_of("number", gbit_per_s="Gbit/s"),
)


def machine(study: Study, findings: Findings) -> Section:
    """Return the drawing of the machine, and the matrices between its GPUs."""
    lines: list[str] = []
    figures = list(_drawings(study, lines))
    matrices = _copies(study)[:MOST_MAPS]
    for panel, matrix in enumerate(matrices, 1):
        scale = scale_of(alike["entries"] for alike in matrices if alike["unit"] == matrix["unit"])
        figures.append(heat_map_figure(f"pairs-{panel}", scale=scale, **matrix))
    newest: dict[str, dict[str, Value]] = {}  # of each host; none where cells have no hosts
    for record in study.records:
        wires = wires_of(record)
        for host, facts in facts_of_hosts(record).items():
            if host:
                cpu, gpu = facts.get("cpu", {}), facts.get("gpu", {})
                newest[host] = {
                    "host": host,
                    "own_name": str(facts.get("host") or ""),
                    "gpus": gpu_names(facts),
                    "cpu": str(cpu.get("model") or ""),
                    "cores": cpu.get("cores"),
                    "driver": str(gpu.get("driver") or ""),
                    "interface": "+".join(wires[host].names),
                    "gbit_per_s": wires[host].gbit_per_s,
                }
    hosts = Table.of(
        "hosts",
        "The hosts, and the interface of each through which ranks exchange with other hosts. "
        "Gbit/s: by its driver.",
        HOSTS,
        [row for _, row in sorted(newest.items())],
    )
    tables = (hosts,) if hosts.rows else ()
    return Section("links", "The machine and its links", tuple(lines), tuple(figures), tables)


def _drawings(study: Study, lines: list[str]) -> Iterator[Figure]:
    texts: dict[str, tuple[Record, Mapping[str, Any]]] = {}
    for record in study.records:
        for facts in facts_of_hosts(record).values():
            text = facts.get("topology")
            if text and record.cell.device == "cuda":
                texts.setdefault(text, (record, facts))
    if not texts:
        return
    from analysis.topology.drawing import saved, topology_figure
    from analysis.topology.readers import parse_topology

    for panel, (text, (record, facts)) in enumerate(list(texts.items())[:MOST_DRAWINGS], 1):
        name = next((str(gpu["name"]) for gpu in gpus_of(facts) if "name" in gpu), None)
        run = single_line(run_name(record))
        try:
            topology = parse_topology(text, name)
        except UnreadableInput as error:
            lines.append(f"The topology of {run} cannot be drawn: {single_line(error)}.")
            continue
        figure = topology_figure(topology)
        what = "A host" if record.cell.hosts else "The machine"
        caption = f"{what}, from {single_line(topology.source)}"
        if len(texts) > 1:
            caption += f", in {run} ({len(texts)} descriptions differ)"
        links = []
        for a, b in combinations(topology.gpus, 2):
            links.append((a, b, topology.link_between(a, b)))
        files = saved(figure, "svg").decode(), saved(figure, "pdf")
        data = numbers_table(("gpu", "other_gpu", "link"), links)
        yield Figure(
            f"topology-{panel}", f"{caption}.", *files, card=True, figure=figure, data=data
        )


def _copies(study: Study) -> list[dict[str, Any]]:
    """Return the arguments of a heat map for the newest matrix of each kind: last those of the
    host's clock, copies by a kernel.
    """
    newest: dict[tuple[str, bool], dict[str, Any]] = {}
    for record in study.usable:
        p2p = record.tables.get("p2p", {})
        by_kernel = p2p.get("copy") == "sm"
        for name, rows in p2p.get("matrices", {}).items():
            if any(len(row) != len(rows) for row in rows):
                continue  # no square
            ids: Sequence[Member] = range(len(rows))
            if record.cell.world_size == len(rows):
                ids = record.cell.members
            ids = ids[:LARGEST_MAP]
            entries = {}
            for row, measured in zip(ids, rows, strict=False):
                for column, value in zip(ids, map(finite, measured), strict=False):
                    if value is not None:
                        entries[row, column] = value
            start, _, state = name.rpartition("_")
            unit = "µs" if "latency" in name else "GB/s"
            what = MATRICES.get(start, start.replace("_", " "))
            words = [what, p2p.get("words", {}).get(state, f"P2P {state}"), unit]
            if by_kernel:
                words.append("copied by a kernel")
            caption = f"{single_line(', '.join(words))}, from row to column; dark is better."
            matrix = {"caption": caption, "ids": ids, "entries": entries, "unit": unit}
            newest[name, by_kernel] = matrix
    order = sorted(newest, key=lambda key: ("latency_cpu" in key[0], key[1]))
    return [newest[key] for key in order]


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
        "Bus bandwidth of the gradient exchange, and the bandwidth of the slowest link on its data "
        "sheet"
    )
    if any(subset.p2p_gb_per_s is not None for subset in exchanging):
        caption += " and as measured by copies"
    caption += "."
    if any((subset.link_class or "").startswith(NET) for subset in findings.wires):
        alone = "links alone GB/s"
        caption += (
            " Links between hosts are taken from the measured reference net_link, and from the "
            "rate of the interface."
        )
    of_subsets = (
        Column("cell", "configuration", lambda subset: names[subset.label]),
        Column("exchange_gb_per_s", "exchange GB/s", "exchange_gb_per_s", "number"),
        Column("p2p_gb_per_s", alone, "p2p_gb_per_s", "number"),
        Column("nominal_gb_per_s", "nominal GB/s", "nominal_gb_per_s", "number"),
        Column("strategy", "strategy", "strategy", shown=False),
        Column("gpus", "GPUs", lambda subset: gpu_ids(subset.gpus)),
        Column("link_class", "link class", "link_class"),
        Column("transport", "transport", "transport"),
        Column("efficiency", "efficiency", "efficiency", "share", shown=False),
    )
    of_worth = (
        Column("cell", "configuration", "label"),
        Column("strategy", "strategy", "strategy"),
        Column("link_class", "link class", "link_class"),
        Column("lost", "lost images/s per GPU", "lost", "number", True),
        Column("gradient_bytes", "gradient bytes", "gradient_bytes", "count"),
        Column("batch_size", "batch", "batch_size", "count"),
    )
    about_worth = "Throughput lost per GPU on each kind of link, relative to the best."
    tables = (
        Table.of("wires", caption, of_subsets, exchanging),
        Table.of("worth", about_worth, of_worth, findings.worth),
    )
    return Section("wires", "Bandwidth and links", tables=tables)


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
                "Only two link speeds were measured, and a line fits any two points: no third "
                "one tests it."
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
