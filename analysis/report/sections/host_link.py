"""benchmark=host_link, copies between the host and the devices: sentence and table."""

from collections.abc import Iterator, Sequence

from analysis.findings.runs import gpu_ids
from analysis.findings.study import Study, mapping
from analysis.report.measured_values import Group, mappings, median_and_range, numbers, records_of
from analysis.report.names import unit_of
from analysis.report.numbers import finite
from analysis.report.tables import Column, Table, plain

HOST = {
    "to_device": "host to device",
    "to_host": "device to host",
    "both": "both at once, each way",
    "copy": "copy in the host's memory",
    "add": "sum in the host's memory",
}


def host_table(study: Study) -> Table:
    """Return a row for each operation and kind of memory."""
    rows = []
    for record in records_of(study, "host_link"):
        for row in mappings(mapping(record.tables.get("host_link")).get("rows")):
            rates = numbers(row.get("gb_per_s"))
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


def host_sentences(groups: Sequence[Group], on: str) -> Iterator[str]:
    """benchmark=host_link: one device at a time, then all at once."""
    parts = []
    for prefix, words in (("one", "one at a time"), ("all", "all at once")):
        told = [
            f"{rate} {what}"
            for name, what in (("to_device", "to it"), ("to_host", "from it"), ("both", "each way at once"))
            if (rate := median_and_range(groups[0], f"host_link/{prefix}_{name}_gb_per_s"))
        ]
        parts += [f"{words} {', '.join(told)}"] if told else []
    if parts:
        yield f"GB/s between the host and {on}: {'; '.join(parts)}."
