"""benchmark=jacobi, halo exchange: sentence and table."""

from collections.abc import Iterator, Sequence
from typing import Any

from analysis.findings.runs import gpu_ids
from analysis.findings.study import Study, middle
from analysis.report.measured_values import Group, bounded, median_and_range, ranking, records_of
from analysis.report.names import run_name
from analysis.report.tables import Column, Table, plain
from benchmarks.record import Record


def jacobi_table(study: Study) -> Table:
    """Return a row for each cell."""

    def row(record: Record) -> tuple[Any, ...]:
        told = record.metrics.get
        return (
            plain(run_name(record)), gpu_ids(record.cell.gpus), told("jacobi/one_gpu_seconds"),
            told("jacobi/seconds"), told("jacobi/speedup"), bounded([record], "jacobi/efficiency"),
            told("jacobi/stencil_gb_per_s"), told("jacobi/copy_share"),
        )  # fmt: skip

    found: Sequence[Record] = records_of(study, "jacobi")
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


def jacobi_sentences(groups: Sequence[Group], on: str) -> Iterator[str]:
    """benchmark=jacobi: the fastest exchange first; on one device how near the stencil is to a copy."""
    metric, rows = "jacobi/seconds", []
    for group in groups:
        speedup, efficiency = (
            median_and_range(group, "jacobi/speedup"),
            median_and_range(group, "jacobi/efficiency", "share"),
        )
        copy = median_and_range(group, "jacobi/copy_share", "share")
        also = f", {speedup} times as fast as one, efficiency {efficiency}" if speedup and efficiency else ""
        also = also or (f", the stencil at {copy} of a copy's rate" if copy else "")
        if seconds := median_and_range(group, metric):
            rows.append((middle(group, metric) or 0.0, group, f"{seconds} s{also}"))
    yield from ranking(f"Jacobi on {on}", rows)
