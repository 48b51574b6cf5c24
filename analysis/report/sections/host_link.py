"""Copies between the host and the devices (benchmark=host_link): sentence and table."""

from collections.abc import Iterator, Sequence

from analysis.report.measured_values import (
    Group,
    mappings,
    median_and_interval,
    numbers,
    records_of,
)
from analysis.report.microbenchmarks import largest_cells, links_alone
from analysis.report.section import Section
from analysis.report.tables import Column, Table
from analysis.study.estimates import Findings
from analysis.study.names import gpu_ids, unit_of
from analysis.study.provenance import mapping
from analysis.study.study import Study
from analysis.text import single_line
from benchmarks.record import finite

OPERATIONS = {
    "to_device": "host to device",
    "to_host": "device to host",
    "both": "both at once, each way",
    "copy": "copy in the host's memory",
    "add": "sum in the host's memory",
}


def section(study: Study, findings: Findings) -> Section:
    """Return what copies to and from the host reach."""
    return links_alone(50, _sentences(study, *largest_cells(study, "host_link")), [_table(study)])


def _sentences(study: Study, groups: Sequence[Group], devices: str) -> Iterator[str]:
    """Yield the rates of one device at a time, then of all at once."""
    parts, unit = [], unit_of(study).removesuffix("s")
    for group in groups[:1]:
        for prefix, words in (("one", "one copy at a time"), ("all", "all at once")):
            rates = [
                f"{rate} {direction}"
                for name, direction in (
                    ("to_device", f"to the {unit}"),
                    ("to_host", f"from the {unit}"),
                    ("both", "each way at once"),
                )
                if (
                    rate := median_and_interval(study, group, f"host_link/{prefix}_{name}_gb_per_s")
                )
            ]
            parts += [f"{words} {', '.join(rates)}"] if rates else []
    if parts:
        yield f"GB/s between the host and {devices}: {'; '.join(parts)}."


def _table(study: Study) -> Table:
    """Return a row for each operation and kind of memory of each record."""
    rows = []
    for record in records_of(study, "host_link"):
        for row in mappings(mapping(record.tables.get("host_link")).get("rows")):
            rates = numbers(row.get("gb_per_s"))
            if rates:
                operation, memory = (str(row.get(name)) for name in ("operation", "memory"))
                rows.append((
                    gpu_ids(record.cell.members), single_line(OPERATIONS.get(operation, operation)), single_line(memory),
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
