"""The section on what was measured of the links themselves: host links, collectives, contention, halo exchange.

Tables come from records, which anybody may have edited: what is not as a benchmark writes it is left out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.findings.model import Findings
from analysis.findings.runs import gpu_ids
from analysis.findings.study import BETWEEN, Study, mapping, named, run_name, short_names
from analysis.report.numbers import count, finite
from analysis.report.section import Section, bounded
from analysis.report.sections.scaling import unit_of
from analysis.report.style import COLOURS, INK, MARKERS, Picture, new_figure, rendered, spread
from analysis.report.tables import Column, Table, plain
from benchmarks.record import Record

CURVES = 6  # of the figure of collectives
SIZES = 4  # steps of the axis of messages
HOST = {
    "to_device": "host to device",
    "to_host": "device to host",
    "both": "both at once, each way",
    "copy": "copy in the host's memory",
    "add": "sum in the host's memory",
}
PATTERNS = {"matching": "pairs of a matching", "one_to_all": "one to all", "all_to_one": "all to one"}


def measured(study: Study, found: Findings) -> Section:
    """Nothing where a study trains only."""
    tables = tuple(table for table in (_host(study), _collectives(study), _together(study), _halo(study)) if table.rows)
    return Section("measured", "Links measured alone", (), tuple(_busbw(study)), tables)


def _of(study: Study, benchmark: str) -> list[Record]:
    return [record for record in study.usable if named(record, "benchmark") == benchmark]


def _rows(table: object) -> Iterator[Mapping[str, Any]]:
    for row in table if isinstance(table, list) else ():
        if isinstance(row, Mapping):
            yield row


def _numbers(values: object) -> list[float]:
    return [one for value in values if (one := finite(value)) is not None] if isinstance(values, list) else []


def _host(study: Study) -> Table:
    rows = []
    for record in _of(study, "host_link"):
        for row in _rows(mapping(record.tables.get("host_link")).get("rows")):
            rates = _numbers(row.get("gb_per_s"))
            if rates:
                what = str(row.get("operation"))
                rows.append((
                    gpu_ids(record.cell.gpus), plain(HOST.get(what, what)), plain(str(row.get("memory"))),
                    finite(row.get("at_once")), min(rates), max(rates), finite(row.get("sum_gb_per_s")),
                ))  # fmt: skip
    return Table(
        "host_links", "Copies between the host and the devices, and in the host's memory, GB/s.",
        (
            Column("gpus", unit_of(study)), Column("operation", "operation"), Column("memory", "memory"),
            Column("at_once", "at once", "count"), Column("slowest_gb_per_s", "slowest", "number"),
            Column("fastest_gb_per_s", "fastest", "number"), Column("sum_gb_per_s", "sum", "number"),
        ),
        tuple(rows),
    )  # fmt: skip


def _runs(study: Study) -> Iterator[tuple[Record, Mapping[str, Any]]]:
    for record in _of(study, "collectives"):
        for run in _rows(mapping(record.tables.get("nccl-tests")).get("runs")):
            yield record, run


def _placed(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Out of place where that was measured."""
    return mapping(row.get("out_of_place")) or mapping(row.get("in_place"))


def _collectives(study: Study) -> Table:
    rows = []
    for record, run in _runs(study):
        sizes = [(finite(row.get("bytes")), _placed(row)) for row in _rows(run.get("rows"))]
        times = [finite(placed.get("time_us")) for _, placed in sizes]
        if not sizes:
            continue
        rows.append((
            plain(run_name(record)), plain(str(run.get("collective"))), gpu_ids(record.cell.gpus),
            sizes[0][0], times[0], sizes[-1][0], finite(sizes[-1][1].get("busbw")), finite(run.get("avg_busbw")),
            record.metrics.get("collectives/alpha_us"), record.metrics.get("collectives/beta_gb_per_s"),
            record.metrics.get("collectives/fit_rms_error"),
        ))  # fmt: skip
    return Table(
        "collectives", "Collectives: the smallest and the largest message, and the line time = α + bytes ÷ β through them.",
        (
            Column("cell", "cell"), Column("collective", "collective"), Column("gpus", "GPUs", shown=False),
            Column("smallest_bytes", "smallest, bytes", "count"), Column("smallest_us", "µs", "number"),
            Column("largest_bytes", "largest, bytes", "count"), Column("largest_busbw", "busbw GB/s", "number"),
            Column("avg_busbw", "average busbw", "number"), Column("alpha_us", "α µs", "number"),
            Column("beta_gb_per_s", "β GB/s", "number"), Column("fit_error", "error", "share"),
        ),
        tuple(rows),
    )  # fmt: skip


def _busbw(study: Study) -> Iterator[Picture]:
    """busbw against the size of the message, a curve for each cell."""
    curves: list[tuple[str, list[tuple[float, float]]]] = []
    for record, run in _runs(study):
        found = [(finite(row.get("bytes")), finite(_placed(row).get("busbw"))) for row in _rows(run.get("rows"))]
        known = [(size, rate) for size, rate in found if size and rate and size > 0 and rate > 0]
        if len(known) > 1:
            curves.append((_curve(record, str(run.get("collective"))), known))
    if not curves:
        return
    figure, axes = new_figure(4.6, 2.9)
    palette = [light for light, _ in COLOURS.values()]
    shown, ends = curves[:CURVES], []
    for place, (_, points) in enumerate(shown):
        sizes, rates = zip(*points, strict=True)
        look = {"color": palette[place], "marker": MARKERS[place], "markersize": 3}
        axes.plot(sizes, rates, **look)
        ends.append((math.log10(rates[-1]), palette[place]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = (math.log2(end(size for _, points in shown for size, _ in points)) for end in (min, max))
    apart = max(1, math.ceil((high - low) / SIZES))
    axes.set_xticks([2.0**power for power in range(math.ceil(low), math.floor(high) + 1, apart)])
    axes.xaxis.set_major_formatter(lambda value, _: _size(value))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel("bytes", color=INK)
    axes.set_ylabel("busbw, GB/s", color=INK)
    axes.tick_params(length=0)
    words = short_names(name for name, _ in shown)
    low, high = (math.log10(end) for end in axes.get_ylim())
    places = spread([y for y, _ in ends], 0.062 * (high - low))
    for (name, _), (_, colour), y in zip(shown, ends, places, strict=True):
        own = words[name] if words[name] != name else "as it is"  # nothing tells it from the others
        label = own[-24:] if len(shown) > 1 else ""
        at = (1.03, (y - low) / (high - low))
        axes.annotate(label, at, xycoords="axes fraction", va="center", fontsize=8, color=colour)
    more = f" {count(len(curves) - CURVES, 'more cell')} in collectives.csv." if len(curves) > CURVES else ""
    yield rendered(figure, "collectives", f"Bus bandwidth by message size, as nccl-tests defines it.{more}")


def _curve(record: Record, collective: str) -> str:
    """The run's name with its collective first, also where that is the usual one."""
    _, *others = run_name(record).split(BETWEEN)
    return plain(BETWEEN.join([collective, *(part for part in others if not part.startswith("collective="))]))


def _size(value: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g} B"


def _together(study: Study) -> Table:
    rows = []
    for record in _of(study, "p2p"):
        for row in _rows(mapping(record.tables.get("p2p_concurrent")).get("rows")):
            copies = [
                (together, alone)
                for copy in _rows(row.get("copies"))
                if (together := finite(copy.get("gb_per_s"))) and (alone := finite(copy.get("alone_gb_per_s")))
            ]
            if copies:
                pattern = str(row.get("pattern"))
                rows.append((
                    gpu_ids(record.cell.gpus), plain(PATTERNS.get(pattern, pattern)), finite(row.get("number")),
                    len(copies), finite(row.get("total_gb_per_s")), min(together / alone for together, alone in copies),
                ))  # fmt: skip
    return Table(
        "contention", "Copies at the same time: GB/s of all, and what the worst-off copy keeps of its rate alone.",
        (
            Column("gpus", unit_of(study)), Column("pattern", "pattern"),
            Column("number", f"round or {unit_of(study).removesuffix('s')}", "count"),
            Column("copies", "copies", "count"), Column("total_gb_per_s", "GB/s", "number"),
            Column("kept", "kept", "share"),
        ),
        tuple(rows),
    )  # fmt: skip


def _halo(study: Study) -> Table:
    def row(record: Record) -> tuple[Any, ...]:
        told = record.metrics.get
        return (
            plain(run_name(record)), gpu_ids(record.cell.gpus), told("jacobi/one_gpu_seconds"),
            told("jacobi/seconds"), told("jacobi/speedup"), bounded([record], "jacobi/efficiency"),
            told("jacobi/stencil_gb_per_s"), told("jacobi/copy_share"),
        )  # fmt: skip

    found: Sequence[Record] = _of(study, "jacobi")
    return Table(
        "jacobi", "Halo exchange, strong scaling; the stencil's bytes on one device as a rate, and as a share of a copy's.",
        (
            Column("cell", "cell"), Column("gpus", "GPUs", shown=False), Column("one_gpu_seconds", "one, s", "number"),
            Column("seconds", "all, s", "number"), Column("speedup", "speed-up", "ratio"),
            Column("efficiency", "efficiency", "share"), Column("stencil_gb_per_s", "stencil GB/s", "number"),
            Column("copy_share", "of a copy", "share"),
        ),
        tuple(row(record) for record in found),
    )  # fmt: skip
