"""The numbers of `benchmark=p2p` from rank 0's raw lines. README.md."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.derived import Derived, IncompleteLines, Line, RankLines, of_kind
from benchmarks.record import Kind
from benchmarks.timing import statistics
from conf.cell import Cell

Matrix = list[list[float]]  # [source][target]
# Patterns of copies at once: how a row begins, and the title.
PATTERNS = {
    "matching": ("round", "disjoint pairs at once, both ways"),
    "one_to_all": ("from", "one to all others at once"),
    "all_to_one": ("to", "all others to one at once"),
}


def derive(lines: RankLines, cell: Cell) -> Derived:
    """Return the matrices with their medians, the rows of copies at once, and what is printed.

    Raises IncompleteLines: a repeat of a matrix is missing: the rest have another median.
    """
    options = cell.benchmark
    members = of_kind(lines[0], Kind.MEMBERS)[0]
    samples: dict[str, list[Matrix]] = {}  # of every repeat
    for line in of_kind(lines[0], Kind.P2P, has="matrix"):
        if "ms" in line:
            matrix = _rates(line["counted_bytes"], line["ms"])
        else:  # of latencies, in µs
            matrix = line["values"]
        samples.setdefault(line["matrix"], []).append(matrix)
    medians: dict[str, Matrix] = {}
    spreads: dict[str, float] = {}
    for name, repeats in samples.items():
        if len(repeats) != options["repeats"]:
            raise IncompleteLines(
                f"matrix {name} has {len(repeats)} of {options['repeats']} repeats"
            )
        values = np.asarray(repeats)
        medians[name] = np.median(values, axis=0).tolist()
        if len(repeats) > 1:  # the largest (largest − smallest) ÷ median of an entry
            spreads[name] = float((np.ptp(values, axis=0) / medians[name]).max())
    table = {
        "devices": members["devices"],
        "access": members["access"],
        "matrices": medians,
        "samples": samples,
        "bytes": members["bytes"],
        "latency_bytes": members["latency_bytes"],
        "copy": options["copy"],
        "words": members["words"],
        "notes": [],
    }
    metrics = _metrics(medians, spreads)
    tables: dict[str, Any] = {"p2p": table}
    output = _matrix_lines(table, spreads)
    late = of_kind(lines[0], Kind.RESULT)[0]["checks"]["measured_late"]
    if late:
        output.append(f"{late} measurements began before their last copy was enqueued.")
    if options["concurrent"] and len(members["devices"]) > 1:
        rows = _concurrent_rows(of_kind(lines[0], Kind.P2P, has="pattern"))
        access = "disabled" if options["p2p"] == "disabled" else "enabled"
        tables["p2p_concurrent"] = {"p2p": access, "rows": rows}
        metrics |= _contention(rows)
        output += _concurrent_lines(rows, access)
    return Derived(metrics, tables=tables, output="\n".join(output))


def _rates(counted_bytes: Sequence[Sequence[float]], ms: Sequence[Sequence[float]]) -> Matrix:
    """Return the GB/s of every entry."""
    matrix = []
    for counted_row, ms_row in zip(counted_bytes, ms, strict=True):
        matrix.append([_gb_per_s(*entry) for entry in zip(counted_row, ms_row, strict=True)])
    return matrix


def _gb_per_s(counted_bytes: float, ms: float) -> float:
    """Return a rate; a time of 0 gives NaN, which validity reports."""
    if ms <= 0:
        return math.nan
    return counted_bytes / ms / 1e6


def _metrics(medians: Mapping[str, Matrix], spreads: Mapping[str, float]) -> dict[str, float]:
    """Return the median and the worst entry of every matrix off its diagonal, peer access first.

    Of one member alone its own entry.
    """
    metrics: dict[str, float] = {}
    for name in sorted(medians, key=lambda name: "disabled" in name):  # stable
        is_latency = name.startswith("latency")
        unit = "us" if is_latency else "gb_per_s"
        matrix = np.asarray(medians[name])
        between = matrix[~np.eye(len(matrix), dtype=bool)]
        if not len(between):
            metrics[f"p2p/local_{name}_{unit}"] = medians[name][0][0]
            continue
        metrics[f"p2p/{name}_{unit}"] = float(np.median(between))
        if is_latency:
            metrics[f"p2p/{name}_most_{unit}"] = float(between.max())
        else:
            metrics[f"p2p/{name}_least_{unit}"] = float(between.min())
    for name, share in spreads.items():
        kind = "bandwidth"
        if name.startswith("latency"):
            kind = "_".join(name.split("_")[:2])  # latency_gpu, latency_cpu
        metric = f"p2p/{kind}_spread_share"
        metrics[metric] = max(metrics.get(metric, share), share)
    return metrics


def _concurrent_rows(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return a row for each pattern: medians over the repeats of every copy at once and alone.

    A copy's rate is that of its own events; the total is all bytes ÷ the time until all are done.
    """
    by_pattern: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        by_pattern.setdefault((line["pattern"], line["number"]), []).append(line)
    rows = []
    for repeats in by_pattern.values():
        first = repeats[0]
        counted, pairs = first["counted_bytes"], first["copies"]
        copies = []
        for index, (source, target) in enumerate(pairs):
            together_rates, alone_rates = [], []
            for line in repeats:
                together_rates.append(_gb_per_s(counted, line["together_ms"][index]))
                alone_rates.append(_gb_per_s(counted, line["alone_ms"][index]))
            copy = {"from": source, "to": target, "gb_per_s": statistics.median(together_rates)}
            copies.append(copy | {"alone_gb_per_s": statistics.median(alone_rates)})
        totals = [_gb_per_s(counted * len(pairs), line["total_ms"]) for line in repeats]
        row = {"pattern": first["pattern"], "number": first["of"], "bytes": first["bytes"]}
        rows.append(row | {"total_gb_per_s": statistics.median(totals), "copies": copies})
    return rows


def _contention(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the lowest total of each pattern, and the least share that a copy keeps."""
    totals: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    for row in rows:
        totals.setdefault(row["pattern"], []).append(row["total_gb_per_s"])
        for copy in row["copies"]:
            share = copy["gb_per_s"] / copy["alone_gb_per_s"]
            shares.setdefault(row["pattern"], []).append(share)
    metrics = {}
    for name in totals:
        metrics[f"p2p/{name}_gb_per_s"] = min(totals[name])
        metrics[f"p2p/{name}_share"] = min(shares[name])
    return metrics


def _matrix_lines(table: Mapping[str, Any], spreads: Mapping[str, float]) -> list[str]:
    words = table["words"]
    lines = [
        f"{table['bytes']} bytes a copy, {table['latency_bytes']} for latency, "
        f"copy={table['copy']}",
        f"P2P enabled: {words['enabled']}",
        f"P2P disabled: {words['disabled']}",
    ]
    ids = [device["id"] for device in table["devices"]]
    for name, matrix in table["matrices"].items():
        unit = "µs" if name.startswith("latency") else "GB/s"
        title = f"{name.replace('_', ' ')}, {unit}"
        if name in spreads:
            repeats = len(table["samples"][name])
            title += f" (median of {repeats}, entries vary by up to {100 * spreads[name]:.1f} %)"
        lines += ["", title, " " * 6 + "".join(f"{target:>9d}" for target in ids)]
        for source, row in zip(ids, matrix, strict=True):
            lines.append(f"{source:>6d}" + "".join(f"{value:>9.2f}" for value in row))
    if len(ids) == 1:
        lines.append("One member alone: only the diagonal, copies within it.")
    return lines


def _concurrent_lines(rows: Sequence[Mapping[str, Any]], access: str) -> list[str]:
    """Return a line for each pattern: the total, and each copy's rate at once and alone."""
    lines = []
    for pattern, (beginning, title) in PATTERNS.items():
        of_pattern = [row for row in rows if row["pattern"] == pattern]
        if of_pattern:
            size = f"{of_pattern[0]['bytes']} bytes"
            lines += ["", f"{title}, {size}, P2P {access}: GB/s at once (alone)"]
        for row in of_pattern:
            text = f"  {beginning} {row['number']}: total {row['total_gb_per_s']:.1f}"
            for copy in row["copies"]:
                rate = f"{copy['gb_per_s']:.1f} ({copy['alone_gb_per_s']:.1f})"
                text += f"  {copy['from']}->{copy['to']} {rate}"
            lines.append(text)
    return lines
