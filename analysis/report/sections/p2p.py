"""Copies between pairs of devices, alone and several at once (benchmark=p2p): sentences and table.

The matrices of pairs stand in the section on the machine.
"""

import dataclasses
import re
from collections.abc import Iterator

from analysis.p2p.heat_map import title_of
from analysis.p2p.outliers import outliers
from analysis.p2p.source import medians_of
from analysis.report.measured_values import Group, mappings, median_and_interval, records_of
from analysis.report.microbenchmarks import largest_cells, links_alone
from analysis.report.section import Section
from analysis.report.tables import Column, Table
from analysis.study.estimates import Findings
from analysis.study.names import gpu_ids, unit_of
from analysis.study.provenance import mapping
from analysis.study.study import Study
from analysis.text import single_line
from benchmarks.record import finite

KNOWN = re.compile(
    r"(?:unidirectional|bidirectional|latency_[cg]pu)_(?:en|dis)abled(?:_reads)?(?=[,:])"
)  # names of matrices
SHOWN = 3  # sentences on what sticks out
PATTERNS = {"matching": "separate pairs", "one_to_all": "one to all", "all_to_one": "all to one"}


def section(study: Study, findings: Findings) -> Section:
    """Return what pairs reach, and what copies at the same time cost each other."""
    groups, devices = largest_cells(study, "p2p")
    sentences = [*_pairs(study, groups[0], devices), *_at_once(study, groups[0])] if groups else []
    found = links_alone(52, sentences, [_table(study)])
    return dataclasses.replace(found, lines=tuple(_stick_out(groups[0]))) if groups else found


def _pairs(study: Study, group: Group, devices: str) -> Iterator[str]:
    """Yield the rates with peer access and without."""
    words = mapping(mapping(group[0].tables.get("p2p")).get("words"))
    parts = []
    for state in ("enabled", "disabled"):
        directions = {"one way": "unidirectional", "both ways": "bidirectional"}
        rates = {
            way: median_and_interval(study, group, f"p2p/{name}_{state}_gb_per_s")
            for way, name in directions.items()
        }
        values = [f"{rate} GB/s {way}" for way, rate in rates.items() if rate]
        latencies = (
            median_and_interval(study, group, f"p2p/latency_{clock}_{state}_us")
            for clock in ("gpu", "cpu")
        )
        small = next(filter(None, latencies), "")
        if values:
            values += [f"{small} µs for a small copy"] if small else []
            parts.append(
                f"{single_line(str(words.get(state, f'P2P {state}')), 80)} {', '.join(values)}"
            )
    if parts:
        yield f"Copies between {devices}, the median of pairs: {'; '.join(parts)}."


def _stick_out(group: Group) -> Iterator[str]:
    """Yield what sticks out of the newest matrices."""
    matrices = medians_of(mapping(group[-1].tables))
    found = [_titled(one) for one in outliers(matrices)] if matrices else []
    if found:
        more = (
            f" ({len(found) - SHOWN} more: python -m analysis p2p record.json)"
            if len(found) > SHOWN
            else ""
        )
        yield f"What sticks out: {single_line('; '.join(found[:SHOWN]), 600)}{more}."


def _titled(sentence: str) -> str:
    """Return a sentence on a matrix with its title instead of its name."""
    name = KNOWN.match(sentence)
    return f"{title_of(name[0])}{sentence[name.end() :]}" if name else sentence


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
                if (together := finite(copy.get("gb_per_s")))
                and (alone := finite(copy.get("alone_gb_per_s")))
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
