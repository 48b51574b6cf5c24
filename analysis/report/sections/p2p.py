"""benchmark=p2p: copies between pairs, alone and at the same time: sentence and table."""

from collections.abc import Iterator, Sequence

from analysis.findings.runs import gpu_ids
from analysis.findings.study import Study, mapping
from analysis.report.measured_values import Group, mappings, median_and_range, records_of
from analysis.report.names import unit_of
from analysis.report.numbers import finite
from analysis.report.tables import Column, Table, plain

PATTERNS = {"matching": "pairs of a matching", "one_to_all": "one to all", "all_to_one": "all to one"}


def contention_table(study: Study) -> Table:
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


def p2p_sentences(groups: Sequence[Group], on: str) -> Iterator[str]:
    """benchmark=p2p: with peer access and without, then what copies at the same time take from each other."""
    group = groups[0]
    words = mapping(mapping(group[0].tables.get("p2p")).get("words"))
    parts = []
    for state in ("enabled", "disabled"):
        rates = {
            "one way": median_and_range(group, f"p2p/unidirectional_{state}_gb_per_s"),
            "both ways": median_and_range(group, f"p2p/bidirectional_{state}_gb_per_s"),
        }
        told = [f"{rate} GB/s {way}" for way, rate in rates.items() if rate]
        small = median_and_range(group, f"p2p/latency_gpu_{state}_us") or median_and_range(
            group, f"p2p/latency_cpu_{state}_us"
        )
        if told:
            told += [f"{small} µs for a small one"] if small else []
            parts.append(f"{plain(str(words.get(state, f'P2P {state}')), 80)} {', '.join(told)}")
    if parts:
        yield f"Copies between {on}, the median of pairs: {'; '.join(parts)}."
    kept = [
        f"{what} {total} GB/s in all, of which the worst-off keeps {share} of its rate alone"
        for pattern, what in PATTERNS.items()
        if (total := median_and_range(group, f"p2p/{pattern}_gb_per_s"))
        and (share := median_and_range(group, f"p2p/{pattern}_share", "share"))
    ]
    if kept:
        yield f"Copies at the same time: {'; '.join(kept)}."
