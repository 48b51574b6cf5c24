"""The numbers of `benchmark=p2p` from the raw lines of rank 0, which knows every copy. README.md."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.derived import Derived, IncompleteLines, Line, RankLines, of_kind
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.timing.statistics import spread
from conf.cell import Cell

Matrix = list[list[float]]  # [source][target]


def derive(lines: RankLines, cell: Cell) -> Derived:
    """Return every derived value: the matrices with their medians, the rows of copies at once, and what the tool prints.

    Raises:
        IncompleteLines: a repeat of a matrix is missing; the median of the others is another number.
    """
    asked = cell.benchmark
    (members,) = of_kind(lines[0], Kind.MEMBERS)
    samples: dict[str, list[Matrix]] = {}
    for line in of_kind(lines[0], Kind.P2P, has="matrix"):
        samples.setdefault(line["matrix"], []).append(matrix(line))
    for name, repeats in samples.items():
        if len(repeats) != asked["repeats"]:
            raise IncompleteLines(f"matrix {name} has {len(repeats)} of {asked['repeats']} repeats")
    medians = {name: _each(statistics.median, repeats) for name, repeats in samples.items()}
    table = {
        "devices": members["devices"],
        "access": members["access"],
        "matrices": medians,
        "samples": samples,  # of every repeat; `matrices` are their medians
        "bytes": members["bytes"],
        "latency_bytes": members["latency_bytes"],
        "copy": asked["copy"],
        "words": members["words"],
        "notes": [],
    }
    found, tables = metrics(medians, samples), {"p2p": table}
    if asked["concurrent"] and len(members["devices"]) > 1:
        rows = concurrent_rows(of_kind(lines[0], Kind.P2P, has="pattern"))
        state = "disabled" if asked["p2p"] == "disabled" else "enabled"
        tables["p2p_concurrent"] = {"p2p": state, "rows": rows}
        found |= contention(rows)
    late = of_kind(lines[0], Kind.RESULT)[0]["checks"]["measured_late"]
    return Derived(found, tables=tables, output="\n".join(output_lines(tables, late)))


def matrix(line: Line) -> Matrix:
    """Return the matrix of a line: GB/s where it has times of copies, else its latencies in µs."""
    if "ms" not in line:
        values: Matrix = line["values"]
        return values
    return rates(line["counted_bytes"], line["ms"])


def rates(counted_bytes: Sequence[Sequence[float]], ms: Sequence[Sequence[float]]) -> Matrix:
    """Return the GB/s of every entry."""
    rows = zip(counted_bytes, ms, strict=True)
    return [[gb_per_s(counted, one) for counted, one in zip(*row, strict=True)] for row in rows]


def gb_per_s(counted_bytes: float, ms: float) -> float:
    """Return a rate; a time of 0 gives NaN, which validity reports."""
    return counted_bytes / ms / 1e6 if ms > 0 else math.nan


def _each(function: Callable[[list[float]], float], repeats: Sequence[Matrix]) -> Matrix:
    """Return a function of the values of every repeat, entry by entry."""
    count = len(repeats[0])
    return [
        [float(function([one[a][b] for one in repeats])) for b in range(count)]
        for a in range(count)
    ]


def metrics(medians: Mapping[str, Matrix], samples: Mapping[str, list[Matrix]]) -> dict[str, float]:
    """Return the median and the worst entry of every matrix off its diagonal, peer access first; of one member its own entry."""
    found: dict[str, float] = {}
    for name in sorted(medians, key=lambda name: "disabled" in name):  # stable
        unit, worst, word = (
            ("us", max, "most") if name.startswith("latency") else ("gb_per_s", min, "least")
        )
        between = [
            value for a, row in enumerate(medians[name]) for b, value in enumerate(row) if a != b
        ]
        if between:
            found[f"p2p/{name}_{unit}"] = statistics.median(between)
            found[f"p2p/{name}_{word}_{unit}"] = worst(between)
        else:
            found[f"p2p/local_{name}_{unit}"] = medians[name][0][0]
    for kind in ("bandwidth", "latency_gpu", "latency_cpu"):
        spreads = [
            share
            for name, repeats in samples.items()
            if len(repeats) > 1 and name.startswith(("uni", "bi") if kind == "bandwidth" else kind)
            for row in _each(statistics.spread, repeats)
            for share in row
        ]
        if spreads:
            found[f"p2p/{kind}_spread_share"] = max(spreads)
    return found


def concurrent_rows(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return a row for each pattern of copies: medians over the repeats of every copy at once and alone.

    A copy's rate is that of its own events; the total is all bytes ÷ the time until the last is done.
    """
    repeats: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        repeats.setdefault((line["pattern"], line["number"]), []).append(line)
    return [_concurrent_row(of_pattern) for of_pattern in repeats.values()]


def _concurrent_row(repeats: Sequence[Line]) -> dict[str, Any]:
    """Return the row of one pattern."""
    first = repeats[0]
    counted, pairs = first["counted_bytes"], first["copies"]

    def median_rate(field: str, place: int) -> float:
        return statistics.median([gb_per_s(counted, line[field][place]) for line in repeats])

    return {
        "pattern": first["pattern"],
        "number": first["of"],
        "bytes": first["bytes"],
        "total_gb_per_s": statistics.median(
            [gb_per_s(counted * len(pairs), line["total_ms"]) for line in repeats]
        ),
        "copies": [
            {
                "from": source,
                "to": target,
                "gb_per_s": median_rate("together_ms", place),
                "alone_gb_per_s": median_rate("alone_ms", place),
            }
            for place, (source, target) in enumerate(pairs)
        ],
    }


def contention(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the lowest total of each pattern, and the smallest share of its rate alone that a copy keeps."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(row["pattern"] for row in rows):
        ours = [row for row in rows if row["pattern"] == name]
        found[f"p2p/{name}_gb_per_s"] = min(row["total_gb_per_s"] for row in ours)
        kept = [copy["gb_per_s"] / copy["alone_gb_per_s"] for row in ours for copy in row["copies"]]
        found[f"p2p/{name}_share"] = min(kept)
    return found


PATTERNS = {
    "matching": ("round", "disjoint pairs at once, both ways"),
    "one_to_all": ("from", "one to all others at once"),
    "all_to_one": ("to", "all others to one at once"),
}


def output_lines(tables: Mapping[str, Any], late: int) -> list[str]:
    """Return what a cell prints; `late` counts measurements that began too early."""
    table = tables["p2p"]
    found = _plain(table)
    if len(table["devices"]) == 1:
        found.append("One member alone: only the diagonal, copies within it.")
    if late:
        found.append(f"{late} measurements began before their last copy was enqueued.")
    if concurrent := tables.get("p2p_concurrent"):
        found += _concurrent(concurrent)
    return found


def _plain(table: Mapping[str, Any]) -> list[str]:
    words = table["words"]
    found = [
        f"{table['bytes']} bytes a copy, {table['latency_bytes']} for latency, copy={table['copy']}"
    ]
    found += [f"P2P {state}: {words[state]}" for state in ("enabled", "disabled")]
    ids = [device["id"] for device in table["devices"]]
    for name, matrix in table["matrices"].items():
        squares = table["samples"][name]
        what = f"{name.replace('_', ' ')}, {'µs' if name.startswith('latency') else 'GB/s'}"
        if len(squares) > 1:
            what += f" (median of {len(squares)}, entries vary by up to {100 * _variation(squares):.1f} %)"
        found += ["", what, *_rows("", ids, matrix, 9)]
    return found


def _variation(squares: Sequence[Sequence[Sequence[float]]]) -> float:
    places = range(len(squares[0]))
    return max(spread([square[a][b] for square in squares]) for a in places for b in places)


def _rows(
    head: str, ids: Sequence[int], matrix: Sequence[Sequence[float]], width: int
) -> list[str]:
    found = [f"{head:>6s}" + "".join(f"{one:>{width}d}" for one in ids)]
    for one, row in zip(ids, matrix, strict=True):
        found.append(f"{one:>6d}" + "".join(f"{value:>{width}.2f}" for value in row))
    return found


def _concurrent(table: Mapping[str, Any]) -> list[str]:
    """Return a line for each pattern: the total, and each copy's rate at once and alone."""
    found = []
    for name, (what, title) in PATTERNS.items():
        rows = [row for row in table["rows"] if row["pattern"] == name]
        if rows:
            found += [
                "",
                f"{title}, {rows[0]['bytes']} bytes, P2P {table['p2p']}: GB/s at once (alone)",
            ]
        for row in rows:
            copies = "  ".join(
                f"{copy['from']}->{copy['to']} {copy['gb_per_s']:.1f} ({copy['alone_gb_per_s']:.1f})"
                for copy in row["copies"]
            )
            found.append(f"  {what} {row['number']}: total {row['total_gb_per_s']:.1f}  {copies}")
    return found
