"""Halo exchange (benchmark=jacobi): sentence and table."""

from collections.abc import Iterator, Sequence
from typing import Any

from analysis.report.measured_values import Group, bounded, median_and_interval, records_of
from analysis.report.microbenchmarks import largest_cells, links_alone, ranking
from analysis.report.section import Section
from analysis.report.tables import Column, Table, metric_column
from analysis.study.estimates import Findings
from analysis.study.names import gpu_ids, run_name
from analysis.study.study import Study, middle
from analysis.text import single_line
from benchmarks.record import Record


def section(study: Study, findings: Findings) -> Section:
    """Return the times of the solver, and its speed-up over one device."""
    return links_alone(53, _sentences(study, *largest_cells(study, "jacobi")), [_table(study)])


def _sentences(study: Study, groups: Sequence[Group], devices: str) -> Iterator[str]:
    """Yield the fastest exchange first; on one device how near the stencil comes to a copy's rate."""
    rows = []
    for group in groups:
        names = ("seconds", "speedup", "efficiency", "copy_share")
        seconds, speedup, efficiency, copy = (
            median_and_interval(study, group, f"jacobi/{name}") for name in names
        )
        also = (
            f", {speedup} times as fast as one, efficiency {efficiency}"
            if speedup and efficiency
            else ""
        )
        also = also or (f", the stencil at {copy} of a copy's rate" if copy else "")
        if seconds:
            rows.append((middle(group, "jacobi/seconds") or 0.0, group, f"{seconds} s{also}"))
    yield from ranking(f"Jacobi on {devices}", rows)


def _table(study: Study) -> Table:
    """Return a row for each record."""
    return Table(
        "jacobi", "Halo exchange, strong scaling; the stencil's bytes on one device as a rate, and as a share of a copy's.",
        (
            Column("cell", "cell"), Column("gpus", "GPUs", shown=False),
            metric_column("one_gpu_seconds", "jacobi/one_gpu_seconds", heading="one, s"),
            metric_column("seconds", "jacobi/seconds", heading="all, s"), metric_column("speedup", "jacobi/speedup"),
            metric_column("efficiency", "jacobi/efficiency"),
            metric_column("stencil_gb_per_s", "jacobi/stencil_gb_per_s", heading="stencil GB/s"),
            metric_column("copy_share", "jacobi/copy_share", heading="of a copy"),
        ),
        tuple(_row(study, record) for record in records_of(study, "jacobi")),
    )  # fmt: skip


def _row(study: Study, record: Record) -> tuple[Any, ...]:
    metric = record.metrics.get
    return (
        single_line(run_name(record)), gpu_ids(record.cell.members), metric("jacobi/one_gpu_seconds"), metric("jacobi/seconds"),
        metric("jacobi/speedup"), bounded(study, [record], "jacobi/efficiency"), metric("jacobi/stencil_gb_per_s"),
        metric("jacobi/copy_share"),
    )  # fmt: skip
