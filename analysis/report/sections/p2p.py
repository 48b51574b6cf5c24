"""Copies between pairs of devices, alone and several at once (benchmark=p2p): sentences and table.

The matrices of pairs stand in the section on the machine.
"""

from collections.abc import Iterator

from analysis.findings.labels import gpu_ids
from analysis.findings.machines.hosts import mapping
from analysis.findings.model import Findings
from analysis.findings.study import Study
from analysis.report.measured_values import Group, mappings, median_and_interval, records_of
from analysis.report.microbenchmarks import largest_cells, links_alone
from analysis.report.names import unit_of
from analysis.report.section import Section
from analysis.report.tables import Column, Table
from analysis.report.text import single_line
from benchmarks.record import finite

PATTERNS = {"matching": "separate pairs", "one_to_all": "one to all", "all_to_one": "all to one"}


def section(study: Study, findings: Findings) -> Section:
    """Return what pairs reach, and what copies at the same time cost each other."""
    groups, devices = largest_cells(study, "p2p")
    sentences = [*_pairs(study, groups[0], devices), *_at_once(study, groups[0])] if groups else []
    return links_alone(52, sentences, [_table(study)])


def _pairs(study: Study, group: Group, devices: str) -> Iterator[str]:
    """Yield the rates with peer access and without."""
    words = mapping(mapping(group[0].tables.get("p2p")).get("words"))
    parts = []
    for state in ("enabled", "disabled"):
        directions = {"one way": "unidirectional", "both ways": "bidirectional"}
        rates = {
            way: median_and_interval(study, group, f"p2p/{name}_{state}_gb_per_s") for way, name in directions.items()
        }
        values = [f"{rate} GB/s {way}" for way, rate in rates.items() if rate]
        latencies = (median_and_interval(study, group, f"p2p/latency_{clock}_{state}_us") for clock in ("gpu", "cpu"))
        small = next(filter(None, latencies), "")
        if values:
            values += [f"{small} µs for a small copy"] if small else []
            parts.append(f"{single_line(str(words.get(state, f'P2P {state}')), 80)} {', '.join(values)}")
    if parts:
        yield f"Copies between {devices}, the median of pairs: {'; '.join(parts)}."


def _at_once(study: Study, group: Group) -> Iterator[str]:
    """Yield the sums of copies at the same time, and the smallest share that one keeps of its rate alone."""
    kept = [
        f"{what} {total} GB/s together, and each keeps at least {share} of its rate alone"
        for pattern, what in PATTERNS.items()
        if (total := median_and_interval(study, group, f"p2p/{pattern}_gb_per_s"))
        and (share := median_and_interval(study, group, f"p2p/{pattern}_share"))
    ]
    if kept:
        yield f"Copies at the same time: {'; '.join(kept)}."


def _table(study: Study) -> Table:
    """Return a row for each round of copies at the same time."""
    rows = []
    for record in records_of(study, "p2p"):
        for row in mappings(mapping(record.tables.get("p2p_concurrent")).get("rows")):
            copies = [
                (together, alone)
                for copy in mappings(row.get("copies"))
                if (together := finite(copy.get("gb_per_s"))) and (alone := finite(copy.get("alone_gb_per_s")))
            ]
            if copies:
                pattern = str(row.get("pattern"))
                rows.append((
                    gpu_ids(record.cell.members), single_line(PATTERNS.get(pattern, pattern)), finite(row.get("number")),
                    len(copies), finite(row.get("total_gb_per_s")), min(together / alone for together, alone in copies),
                ))  # fmt: skip
    return Table(
        "contention", "Copies at the same time: GB/s of all together, and the least share that a copy keeps of its rate alone.",
        (
            Column("gpus", unit_of(study)), Column("pattern", "pattern"),
            Column("number", f"round or {unit_of(study).removesuffix('s')}", "count"),
            Column("copies", "copies", "count"), Column("total_gb_per_s", "GB/s", "number"),
            Column("kept", "kept", "share"),
        ),
        tuple(rows),
    )  # fmt: skip
