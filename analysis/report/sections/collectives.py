"""Collectives by message size (benchmark=collectives): sentence, table and figure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.report.measured_values import Group, mappings, median_and_interval, records_of
from analysis.report.microbenchmarks import DEFAULTS, largest_cells, links_alone, ranking
from analysis.report.section import Section
from analysis.report.style import (
    COLOURS,
    INK,
    MARKERS,
    Picture,
    curve_height,
    curve_label,
    drawn,
    figure_width,
    for_width,
    label_step,
    line_style,
    new_figure,
    rendered,
    spread,
)
from analysis.report.tables import Column, Table, metric_column
from analysis.study.estimates import Findings
from analysis.study.names import NAMES_BETWEEN as BETWEEN
from analysis.study.names import gpu_ids, run_name, short_names
from analysis.study.provenance import mapping
from analysis.study.study import Study, middle
from analysis.text import count, single_line
from benchmarks.record import Record, finite

CURVES = 6  # of the figure of collectives
SIZES = 4  # steps of the axis of messages


def section(study: Study, findings: Findings) -> Section:
    """Return bandwidth and latency of each collective."""
    sentences = _sentences(study, *largest_cells(study, "collectives"))
    return links_alone(51, sentences, [_table(study)], _figure(study))


def _sentences(study: Study, groups: Sequence[Group], devices: str) -> Iterator[str]:
    """Yield the bandwidth of the largest message, the highest first, and the time of the smallest message."""
    rows = []
    for group in groups:
        busbw, small = (
            median_and_interval(study, group, f"collectives/{name}")
            for name in ("busbw_gb_per_s", "latency_us")
        )
        if busbw:
            also = (
                f", and {small} µs for the smallest message" if small and len(groups) == 1 else ""
            )
            rows.append(
                (
                    -(middle(group, "collectives/busbw_gb_per_s") or 0.0),
                    group,
                    f"{busbw} GB/s{also}",
                )
            )
    kinds = {_collective(group[0]) for group in groups}
    (kind,) = kinds if len(kinds) == 1 else ("",)
    what = f"{kind} " if kind else ""
    defaults = {id(group[0]): _collective(group[0]) for group in groups} if len(kinds) > 1 else {}
    yield from ranking(f"Busbw of the largest {what}message on {devices}", rows, defaults)


def _collective(record: Record) -> str:
    return single_line(record.cell.benchmark.get("collective", ""), 80)


def _runs(study: Study) -> Iterator[tuple[Record, Mapping[str, Any]]]:
    for record in records_of(study, "collectives"):
        for run in mappings(mapping(record.tables.get("nccl-tests")).get("runs")):
            yield record, run


def _placed(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns of a row: out of place if it was measured, else in place."""
    return mapping(row.get("out_of_place")) or mapping(row.get("in_place"))


def _table(study: Study) -> Table:
    """Return a row for each run: its smallest and largest message, and the fit."""
    rows = []
    for record, run in _runs(study):
        sizes = [(finite(row.get("bytes")), _placed(row)) for row in mappings(run.get("rows"))]
        times = [finite(placed.get("time_us")) for _, placed in sizes]
        if not sizes:
            continue
        rows.append((
            single_line(run_name(record)), single_line(str(run.get("collective"))), gpu_ids(record.cell.members),
            sizes[0][0], times[0], sizes[-1][0], finite(sizes[-1][1].get("busbw")), finite(run.get("avg_busbw")),
            record.metrics.get("collectives/alpha_us"), record.metrics.get("collectives/beta_gb_per_s"),
            record.metrics.get("collectives/fit_rms_error"),
        ))  # fmt: skip
    return Table(
        "collectives", "Collectives: the smallest and the largest message, and the fitted line time = α + bytes ÷ β.",
        (
            Column("cell", "cell"), Column("collective", "collective"), Column("gpus", "GPUs", shown=False),
            Column("smallest_bytes", "smallest, bytes", "count"), Column("smallest_us", "µs", "number"),
            Column("largest_bytes", "largest, bytes", "count"), Column("largest_busbw", "busbw GB/s", "number"),
            Column("avg_busbw", "average busbw", "number"), metric_column("alpha_us", "collectives/alpha_us", heading="α µs"),
            metric_column("beta_gb_per_s", "collectives/beta_gb_per_s", heading="β GB/s"),
            metric_column("fit_error", "collectives/fit_rms_error", heading="error"),
        ),
        tuple(rows),
    )  # fmt: skip


def _figure(study: Study) -> Iterator[Picture]:
    """Yield busbw against the size of the message, a curve for each cell."""
    curves: list[tuple[str, list[tuple[float, float]]]] = []
    for record, run in _runs(study):
        found = [
            (finite(row.get("bytes")), finite(_placed(row).get("busbw")))
            for row in mappings(run.get("rows"))
        ]
        known = [(size, rate) for size, rate in found if size and rate and size > 0 and rate > 0]
        if len(known) > 1:
            curves.append((_curve(record, str(run.get("collective"))), known))
    if not curves:
        return
    figure, axes = new_figure(figure_width(), curve_height(2.9))
    palette = [light for light, _ in COLOURS.values()]
    shown, ends = curves[:CURVES], []
    for place, (_, points) in enumerate(shown):
        sizes, rates = zip(*points, strict=True)
        look = {
            "color": palette[place],
            "marker": MARKERS[place],
            "markersize": 3,
            "ls": line_style(place),
        }
        axes.plot(sizes, rates, **look)
        ends.append((math.log10(rates[-1]), palette[place]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = (
        math.log2(end(size for _, points in shown for size, _ in points)) for end in (min, max)
    )
    apart = max(1, math.ceil((high - low) / for_width(SIZES)))
    axes.set_xticks([2.0**power for power in range(math.ceil(low), math.floor(high) + 1, apart)])
    axes.xaxis.set_major_formatter(lambda value, _: _size(value))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.9f}".rstrip("0").rstrip("."))
    axes.minorticks_off()
    axes.set_xlabel("bytes", color=INK)
    axes.set_ylabel("busbw, GB/s", color=INK)
    axes.tick_params(length=0)
    words = short_names(name for name, _ in shown)
    low, high = (math.log10(end) for end in axes.get_ylim())
    places = spread([y for y, _ in ends], label_step(axes) * (high - low))
    for place, ((name, _), (_, colour), y) in enumerate(zip(shown, ends, places, strict=True)):
        own = words[name] if words[name] != name else DEFAULTS
        if len(shown) > 1:
            look = {"color": colour, "marker": MARKERS[place], "markersize": 3}
            curve_label(axes, own[-24:], (y - low) / (high - low), place, look)
    more = (
        f" {count(len(curves) - CURVES, 'more cell')} in collectives.csv."
        if len(curves) > CURVES
        else ""
    )
    data = drawn(
        ("cell", "bytes", "busbw_gb_per_s"),
        [(name, *point) for name, points in shown for point in points],
    )
    yield rendered(
        figure,
        "collectives",
        f"Bus bandwidth by message size, as nccl-tests defines it.{more}",
        data,
    )


def _curve(record: Record, collective: str) -> str:
    """Return a run's name with its collective first, the default one too."""
    _, *others = run_name(record).split(BETWEEN)
    return single_line(
        BETWEEN.join([collective, *(part for part in others if not part.startswith("collective="))])
    )


def _size(value: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g} B"
