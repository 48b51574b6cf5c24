"""Name what sticks out of tables of nccl-tests: tables with one title and other numbers, and rows far below their neighbours.

The rule. Messages of more than SMALL bytes count: below, launch times decide, which are bimodal.
- Tables have one title if collective, ranks, GPUs, NCCL's settings and version, and CHANGING are equal. One sticks out if the
  median ratio of busbw to the first of them, over the rows that both have, is more than APART.
- A row sticks out if its busbw is less than DIP of both the row before and the row after it.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from analysis.nccl_tests.run import Run

SMALL = 1 << 16
APART = 1.25
DIP = 0.6
CHANGING = ("agg iters", "graph", "unalign")  # options that change how long a message takes
Rates = dict[tuple[Any, ...], float]  # (placement, type, operation, root, bytes): busbw in GB/s


def between_tables(runs: Sequence[tuple[str, Run]]) -> list[str]:
    """Return a sentence for each table whose numbers differ from the first with its title; a run comes with its file's name."""
    said = []
    firsts: dict[tuple[Any, ...], tuple[str, Run, Rates]] = {}
    for file_b, b in runs:
        second = _rates(b)
        file_a, a, first = firsts.setdefault(_title(b), (file_b, b, second))
        if a is b:
            continue
        ratios = [first[key] / second[key] for key in first.keys() & second.keys() if second[key]]
        ratio = median(ratios) if ratios else 1.0
        if max(ratio, 1 / ratio if ratio else float("inf")) > APART:
            much = f"{max(ratio, 1 / ratio):.2g}" if ratio else "any"
            which = "second" if ratio > 1 else "first"
            said.append(
                f"{file_a}:{a.line} and {file_b}:{b.line} have the same title, and busbw of the {which} is {much} times lower "
                "(the median above 64 KiB): the text does not say what was different"
            )
    return said


def in_table(run: Run) -> list[str]:
    """Return a sentence for each row of a table that falls far below the rows before and after it."""
    return [
        f"{placement.replace('_', ' ')}, {size} B: busbw {rate:g} GB/s, between {before:g} and {after:g} GB/s of its neighbours"
        for placement, before, size, rate, after in _triples(run)
        if rate < DIP * min(before, after)
    ]


def _triples(run: Run) -> Iterator[tuple[str, float, int, float, float]]:
    """Yield (placement, busbw before, bytes, busbw, busbw after) for rows in their order."""
    series: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for (*kind, size), rate in _rates(run).items():
        series.setdefault(tuple(kind), []).append((size, rate))
    for (placement, *_), points in series.items():
        ordered = sorted(points)
        for (_, before), (size, rate), (_, after) in zip(
            ordered, ordered[1:], ordered[2:], strict=False
        ):
            yield placement, before, size, rate, after


def _rates(run: Run) -> Rates:
    return {
        (placement, row.dtype, row.redop, row.root, row.bytes): one.busbw
        for row in run.rows
        for placement, one in row.placements()
        if one.busbw is not None and row.bytes > SMALL
    }


def _title(run: Run) -> tuple[Any, ...]:
    """Return what a table says of its request and its GPUs: equal for tables that nobody can tell apart."""
    devices = tuple(
        str([device.get(what) for what in ("name", "host", "device", "bus_id")])
        for device in run.devices
    )
    options = tuple(run.settings.get(name) for name in CHANGING)
    return (
        run.collective,
        run.ranks,
        run.nccl_version,
        devices,
        tuple(sorted(run.environment.items())),
        options,
    )
