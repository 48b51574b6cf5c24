"""Links measured alone: host_link, collectives, p2p, jacobi, exchange.

A benchmark's YAML names its function here.
Each fills a part of one section, and gives the sentences for the first screen of a study that
trains nothing.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from analysis.report.curves import MARKERS, Axis, DrawnCurve, curves_figure
from analysis.report.figure import COLOURS, Figure, for_width
from analysis.report.numbers import number
from analysis.report.section import (
    Group,
    Section,
    bounded,
    finite_numbers,
    mappings,
    median_and_interval,
    records_of,
)
from analysis.report.table import Column, Table, Value, metric_column, numbers_table
from analysis.study.estimates import Estimate, Findings
from analysis.study.names import BETWEEN, gpu_ids, run_name, short_names, spoken, unit_of
from analysis.study.provenance import mapping
from analysis.study.runs import median_of, named
from analysis.study.study import Study
from analysis.text import count, join_words, single_line
from benchmarks.record import Record, finite

ORDER = ("host_link", "collectives", "p2p", "jacobi", "exchange")  # of the parts on the page
MOST_NAMED = 4  # cells of one sentence
DEFAULTS = "the default"  # name of a cell in which no setting differs from the defaults
OPERATIONS = {
    "to_device": "host to device",
    "to_host": "device to host",
    "both": "both at once, each way",
    "copy": "copy in the host's memory",
    "add": "sum in the host's memory",
}
MOST_CURVES, SIZE_TICKS = 6, 4  # of the figure of collectives
PATTERNS = {"matching": "separate pairs", "one_to_all": "one to all", "all_to_one": "all to one"}


def _section(
    sentences: Iterable[str], tables: Sequence[Table] = (), figures: Iterable[Figure] = ()
) -> Section:
    """Return the part of the section on links that one benchmark fills."""
    filled = tuple(table for table in tables if table.rows)
    return Section(
        "measured", "Links measured alone", (), tuple(figures), filled, finding=tuple(sentences)
    )


def largest_cells(study: Study, benchmark: str) -> tuple[list[Group], str]:
    """Return the runs of a benchmark's cells on most devices, and these devices: `4 GPUs`."""
    ids = {record.record_id for record in records_of(study, benchmark)}
    groups = [runs.records for runs in study.runs if runs.records[0].record_id in ids]
    most = max((group[0].cell.world_size for group in groups), default=0)
    devices = f"{most} {unit_of(study)}" if most > 1 else f"one {unit_of(study).removesuffix('s')}"
    return [group for group in groups if group[0].cell.world_size == most], devices


def _ranking(
    what: str,
    rows: Sequence[tuple[float, Group, str]],
    defaults: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield `what: A; then B and C` of rows (sort key, runs of a cell, text).

    Each has the parts of its name that only this cell has.
    `defaults` are the names of cells in which no setting differs, by the id() of their first
    record.
    """
    if not rows:
        return
    names = short_names(dict.fromkeys(group[0].name for _, group, _ in rows))
    texts = []
    for _, group, text in sorted(rows, key=lambda row: row[0]):
        record = group[0]
        if len(rows) == 1:
            texts.append(text)
        elif names[record.name] == record.name:
            texts.append(f"{single_line(defaults.get(id(record), DEFAULTS), 80)} {text}")
        else:
            texts.append(f"{single_line(spoken(names[record.name]), 80)} {text}")
    rest = f"; then {join_words(texts[1:], MOST_NAMED)}" if len(texts) > 1 else ""
    yield f"{what}: {texts[0]}{rest}."


# ---- Copies between the host and the devices ----------------------------------------------------


def host_link(study: Study, findings: Findings) -> Section:
    """Return what copies to and from the host reach."""
    rows: list[dict[str, Value]] = []
    for record in records_of(study, "host_link"):
        for copies in mappings(mapping(record.tables.get("host_link")).get("rows")):
            rates = finite_numbers(copies.get("gb_per_s"))
            if rates:
                row: dict[str, Value] = {
                    "gpus": gpu_ids(record.cell.members),
                    "operation": _word(OPERATIONS, copies.get("operation")),
                    "memory": single_line(str(copies.get("memory"))),
                    "at_once": finite(copies.get("at_once")),
                    "slowest_gb_per_s": min(rates),
                    "fastest_gb_per_s": max(rates),
                    "sum_gb_per_s": finite(copies.get("sum_gb_per_s")),
                }
                rows.append(row)
    table = Table.of(
        "host_links",
        "Copies between the host and the devices, and in the host's memory, GB/s.",
        (
            Column("gpus", unit_of(study)),
            Column("operation", "operation"),
            Column("memory", "memory"),
            Column("at_once", "at once", kind="count"),
            Column("slowest_gb_per_s", "slowest", kind="number"),
            Column("fastest_gb_per_s", "fastest", kind="number"),
            Column("sum_gb_per_s", "sum", kind="number"),
        ),
        rows,
    )
    return _section(_host_link_sentences(study), [table])


def _word(words: Mapping[str, str], name: object) -> str:
    return single_line(words.get(str(name), str(name)))


def _host_link_sentences(study: Study) -> Iterator[str]:
    """Yield the rates of one device at a time, then of all at once."""
    groups, devices = largest_cells(study, "host_link")
    unit = unit_of(study).removesuffix("s")
    directions = {
        "to_device": f"to the {unit}",
        "to_host": f"from the {unit}",
        "both": "each way at once",
    }
    parts = []
    for group in groups[:1]:
        for prefix, words in (("one", "one copy at a time"), ("all", "all at once")):
            rates = []
            for name, direction in directions.items():
                rate = median_and_interval(study, group, f"host_link/{prefix}_{name}_gb_per_s")
                if rate:
                    rates.append(f"{rate} {direction}")
            if rates:
                parts.append(f"{words} {', '.join(rates)}")
    if parts:
        yield f"GB/s between the host and {devices}: {'; '.join(parts)}."


# ---- Collectives by message size ----------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveRun:
    """One run of nccl-tests' tables in a record."""

    record: Record
    run: Mapping[str, Any]

    @property
    def collective(self) -> str:
        """The name of the collective."""
        return str(self.run.get("collective"))

    @property
    def rows(self) -> list[tuple[float | None, float | None, float | None]]:
        """(bytes, µs, busbw) of each message: out of place if that was measured, else in place."""
        rows = []
        for row in mappings(self.run.get("rows")):
            measured = mapping(row.get("out_of_place")) or mapping(row.get("in_place"))
            rows.append(
                (
                    finite(row.get("bytes")),
                    finite(measured.get("time_us")),
                    finite(measured.get("busbw")),
                )
            )
        return rows

    @property
    def name(self) -> str:
        """The run's name with its collective first, the default one too."""
        _, *parts = run_name(self.record).split(BETWEEN)
        parts = [part for part in parts if not part.startswith("collective=")]
        return single_line(BETWEEN.join([self.collective, *parts]))


def collectives(study: Study, findings: Findings) -> Section:
    """Return bandwidth and latency of each collective."""
    runs = []
    for record in records_of(study, "collectives"):
        for run in mappings(mapping(record.tables.get("nccl-tests")).get("runs")):
            runs.append(CollectiveRun(record, run))

    def metric(name: str, heading: str) -> Column:
        full = f"collectives/{name}"
        return metric_column(
            "fit_error" if name == "fit_rms_error" else name,
            full,
            lambda run: run.record.metrics.get(full),
            heading=heading,
        )

    table = Table.of(
        "collectives",
        "Collectives: the smallest and the largest message, and the fitted line time = α + bytes "
        "÷ β.",
        (
            Column("cell", "cell", lambda run: single_line(run_name(run.record))),
            Column("collective", "collective", lambda run: single_line(run.collective)),
            Column("gpus", "GPUs", lambda run: gpu_ids(run.record.cell.members), shown=False),
            Column("smallest_bytes", "smallest, bytes", lambda run: run.rows[0][0], "count"),
            Column("smallest_us", "µs", lambda run: run.rows[0][1], "number"),
            Column("largest_bytes", "largest, bytes", lambda run: run.rows[-1][0], "count"),
            Column("largest_busbw", "busbw GB/s", lambda run: run.rows[-1][2], "number"),
            Column(
                "avg_busbw", "average busbw", lambda run: finite(run.run.get("avg_busbw")), "number"
            ),
            metric("alpha_us", "α µs"),
            metric("beta_gb_per_s", "β GB/s"),
            metric("fit_rms_error", "error"),
        ),
        [run for run in runs if run.rows],
    )
    return _section(_collectives_sentences(study), [table], _collectives_figure(runs))


def _collectives_sentences(study: Study) -> Iterator[str]:
    """Yield the bandwidth of the largest message and the time of the smallest."""
    groups, devices = largest_cells(study, "collectives")
    names = {}
    for group in groups:
        names[id(group[0])] = single_line(group[0].cell.benchmark.get("collective", ""), 80)
    kinds = set(names.values())
    rows = []
    for group in groups:
        busbw = median_and_interval(study, group, "collectives/busbw_gb_per_s")
        small = median_and_interval(study, group, "collectives/latency_us")
        if busbw:
            text = f"{busbw} GB/s"
            if small and len(groups) == 1:
                text += f", and {small} µs for the smallest message"
            highest_first = -(median_of(group, "collectives/busbw_gb_per_s") or 0.0)
            rows.append((highest_first, group, text))
    kind = f"{kinds.pop()} " if len(kinds) == 1 and any(kinds) else ""
    defaults = names if len(kinds) > 1 else {}
    yield from _ranking(f"Busbw of the largest {kind}message on {devices}", rows, defaults)


def _collectives_figure(runs: Sequence[CollectiveRun]) -> Iterator[Figure]:
    """Yield busbw against the size of the message, a curve for each cell."""
    curves = []
    for run in runs:
        points = [
            (size, rate) for size, _, rate in run.rows if size and rate and size > 0 and rate > 0
        ]
        if len(points) > 1:
            curves.append((run.name, points))
    if not curves:
        return
    shown = curves[:MOST_CURVES]
    short = short_names(name for name, _ in shown)
    palette = [light for light, _ in COLOURS.values()]
    drawn, data = [], []
    for index, (name, points) in enumerate(shown):
        label = short[name] if short[name] != name else DEFAULTS
        values = [(size, Estimate(rate), False) for size, rate in points]
        drawn.append(DrawnCurve(label, values, palette[index], MARKERS[index], end=" "))
        data += [(name, size, rate) for size, rate in points]
    sizes = [size for _, points in shown for size, _ in points]
    low, high = math.log2(min(sizes)), math.log2(max(sizes))
    apart = max(1, math.ceil((high - low) / for_width(SIZE_TICKS)))
    ticks = {
        2.0**power: _bytes(2.0**power)
        for power in range(math.ceil(low), math.floor(high) + 1, apart)
    }
    more = ""
    if len(curves) > MOST_CURVES:
        more = f" {count(len(curves) - MOST_CURVES, 'more cell')} in collectives.csv."
    yield curves_figure(
        "collectives",
        f"Bus bandwidth by message size, as nccl-tests defines it.{more}",
        drawn,
        Axis("bytes", ticks=ticks, base=2),
        Axis("busbw, GB/s", base=10),
        numbers_table(("cell", "bytes", "busbw_gb_per_s"), data),
    )


def _bytes(value: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g} B"


# ---- Copies between pairs of devices ------------------------------------------------------------


def p2p(study: Study, findings: Findings) -> Section:
    """Return what pairs reach, and what copies at the same time cost each other.

    The matrices of pairs stand in the section on the machine.
    """
    groups, devices = largest_cells(study, "p2p")
    sentences: list[str] = []
    if groups:
        sentences += _pair_sentences(study, groups[0], devices)
        sentences += _at_once_sentences(study, groups[0])
    rounds: list[dict[str, Value]] = []
    for record in records_of(study, "p2p"):
        for concurrent in mappings(mapping(record.tables.get("p2p_concurrent")).get("rows")):
            shares = []
            for copy in mappings(concurrent.get("copies")):
                together, alone = finite(copy.get("gb_per_s")), finite(copy.get("alone_gb_per_s"))
                if together and alone:
                    shares.append(together / alone)
            if shares:
                row: dict[str, Value] = {
                    "gpus": gpu_ids(record.cell.members),
                    "pattern": _word(PATTERNS, concurrent.get("pattern")),
                    "number": finite(concurrent.get("number")),
                    "copies": len(shares),
                    "total_gb_per_s": finite(concurrent.get("total_gb_per_s")),
                    "kept": min(shares),
                }
                rounds.append(row)
    unit = unit_of(study)
    table = Table.of(
        "contention",
        "Copies at the same time: GB/s of all together, and the least share that a copy keeps of "
        "its rate alone.",
        (
            Column("gpus", unit),
            Column("pattern", "pattern"),
            Column("number", f"round or {unit.removesuffix('s')}", kind="count"),
            Column("copies", "copies", kind="count"),
            Column("total_gb_per_s", "GB/s", kind="number"),
            Column("kept", "kept", kind="share"),
        ),
        rounds,
    )
    return _section(sentences, [table])


def _pair_sentences(study: Study, group: Group, devices: str) -> Iterator[str]:
    """Yield the rates with peer access and without."""
    words = mapping(mapping(group[0].tables.get("p2p")).get("words"))
    parts = []
    for state in ("enabled", "disabled"):
        values = []
        for way, name in (("one way", "unidirectional"), ("both ways", "bidirectional")):
            rate = median_and_interval(study, group, f"p2p/{name}_{state}_gb_per_s")
            if rate:
                values.append(f"{rate} GB/s {way}")
        latencies = (
            median_and_interval(study, group, f"p2p/latency_{clock}_{state}_us")
            for clock in ("gpu", "cpu")
        )
        small = next(filter(None, latencies), "")
        if values and small:
            values.append(f"{small} µs for a small copy")
        if values:
            parts.append(
                f"{single_line(str(words.get(state, f'P2P {state}')), 80)} {', '.join(values)}"
            )
    if parts:
        yield f"Copies between {devices}, the median of pairs: {'; '.join(parts)}."


def _at_once_sentences(study: Study, group: Group) -> Iterator[str]:
    """Yield the sums of copies at the same time, and the least share that a copy keeps."""
    parts = []
    for pattern, what in PATTERNS.items():
        total = median_and_interval(study, group, f"p2p/{pattern}_gb_per_s")
        share = median_and_interval(study, group, f"p2p/{pattern}_share")
        if total and share:
            parts.append(
                f"{what} {total} GB/s together, and each keeps at least {share} of its rate alone"
            )
    if parts:
        yield f"Copies at the same time: {'; '.join(parts)}."


# ---- Halo exchange ------------------------------------------------------------------------------


def jacobi(study: Study, findings: Findings) -> Section:
    """Return the times of the solver, and its speed-up over one device."""

    def metric(name: str, heading: str = "") -> Column:
        return metric_column(
            name,
            f"jacobi/{name}",
            lambda record: record.metrics.get(f"jacobi/{name}"),
            heading=heading,
        )

    table = Table.of(
        "jacobi",
        "Halo exchange, strong scaling; the stencil's bytes on one device as a rate, and as a "
        "share of a copy's.",
        (
            Column("cell", "cell", lambda record: single_line(run_name(record))),
            Column("gpus", "GPUs", lambda record: gpu_ids(record.cell.members), shown=False),
            metric("one_gpu_seconds", "one, s"),
            metric("seconds", "all, s"),
            metric("speedup"),
            metric_column(
                "efficiency",
                "jacobi/efficiency",
                lambda record: bounded(study, [record], "jacobi/efficiency"),
            ),
            metric("stencil_gb_per_s", "stencil GB/s"),
            metric("copy_share", "of a copy"),
        ),
        records_of(study, "jacobi"),
    )
    return _section(_jacobi_sentences(study), [table])


def _jacobi_sentences(study: Study) -> Iterator[str]:
    """Yield the fastest exchange first.

    On one device how near the stencil comes to a copy's rate.
    """
    groups, devices = largest_cells(study, "jacobi")
    rows = []
    for group in groups:
        names = ("seconds", "speedup", "efficiency", "copy_share")
        seconds, speedup, efficiency, copy = (
            median_and_interval(study, group, f"jacobi/{name}") for name in names
        )
        also = ""
        if speedup and efficiency:
            also = f", {speedup} times as fast as one, efficiency {efficiency}"
        elif copy:
            also = f", the stencil at {copy} of a copy's rate"
        if seconds:
            rows.append((median_of(group, "jacobi/seconds") or 0.0, group, f"{seconds} s{also}"))
    yield from _ranking(f"Jacobi on {devices}", rows)


# ---- The exchange of gradients without training -------------------------------------------------


def exchange(study: Study, findings: Findings) -> Section:
    """Return the time of each strategy's exchange; its table is that of the strategies."""
    return _section(_exchange_sentences(*largest_cells(study, "exchange")))


def _exchange_sentences(groups: Sequence[Group], devices: str) -> Iterator[str]:
    """Yield a sentence for each model: its strategies, the fastest first."""
    by_model: dict[str, list[tuple[float, Group]]] = defaultdict(list)
    for group in groups:
        ms = median_of(group, "comm/exchange_ms")
        if ms is not None:
            by_model[named(group[0], "model")].append((ms, group))
    for model, cells in sorted(by_model.items()):
        cells.sort(key=lambda pair: pair[0])
        names = short_names(group[0].name for _, group in cells)
        parts = []
        for ms, group in cells:
            name = names[group[0].name] if len(cells) > 1 else named(group[0], "strategy")
            parts.append((single_line(spoken(name), 80), f"{number(ms)} ms"))
        (first, took), *rest = parts
        text = f"{first} {took}"
        if rest:
            slower = [f"{name} {ms}" for name, ms in rest]
            text = f"{first} took {took}; {join_words(slower, MOST_NAMED)}"
        yield f"The exchange of {single_line(model, 80)} on {devices}: {text}."
