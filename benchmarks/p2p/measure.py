"""`benchmark=p2p`: what lies between every two members of a subset, as p2pBandwidthLatencyTest of the CUDA samples measures
it: bandwidth one way and both ways, latency, with peer access and without. METHOD.md, "Links between GPUs".

Beyond the tool: any subset, repeats, contents that are compared, records, copies of many pairs at once, CPU workers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.p2p import tool_output
from benchmarks.p2p.concurrent import at_once, contention
from benchmarks.p2p.copies import Copy, How, Wires, gb_per_s, spread
from benchmarks.rank.group import Ranks
from benchmarks.rank.reporter import Reporter
from benchmarks.rank.result import Result
from benchmarks.timing import statistics
from conf.cell import Cell

# What `auto` means on (GPU, CPU worker).
AUTO = {"bytes": (160_000_000, 4_000_000), "repeats": (5, 3)}
Square = list[list[float]]


@dataclass(frozen=True)
class Matrix:
    """What is measured of every ordered pair, the diagonal too; a matrix of latencies may give one for GPU and one for CPU."""

    kind: str  # unidirectional, bidirectional, latency
    how: How

    @property
    def access(self) -> str:
        """The end of its name."""
        return ("enabled" if self.how.enabled else "disabled") + ("_reads" if self.how.read else "")


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective; on GPUs rank 0 works and its result is the cell's."""
    asked = cell.asked(AUTO)
    result = Result()
    reporter.phase("build")
    size_bytes = max(int(asked["bytes"]), int(asked["latency_bytes"]))
    if ranks.device.type == "cuda":
        from benchmarks.p2p.gpus import Gpus

        def work() -> None:
            measure(cell.gpus, Gpus(cell.gpus, size_bytes, asked["copy"]), asked, result, reporter)

        ranks.on_rank_zero(work, reporter.beat)
    else:
        from benchmarks.p2p.cpu_workers import Workers

        measure(cell.gpus, Workers(ranks, size_bytes), asked, result, reporter)
    if ranks.rank == 0:
        reporter.output("\n".join(tool_output.lines(result.tables, result.checks, str(asked["format"]))))
    return result


def measure(ids: Sequence[int], wires: Wires, asked: dict[str, Any], result: Result, reporter: Reporter) -> None:
    """Fill a result with every matrix.

    Raises:
        ValueError: a pair has no peer access and `p2p=required`; names the pairs.
    """
    everyone = range(len(ids))
    pairs = [(a, b) for a in everyone for b in everyone if a < b]
    access = {f"{min(ids[a], ids[b])}-{max(ids[a], ids[b])}": _both_ways(wires, a, b) for a, b in pairs}
    if asked["p2p"] == "required" and (without := [pair for pair, can in access.items() if not can]):
        raise ValueError(
            f"benchmark.p2p=required: no peer access between GPUs {', '.join(without)}; "
            "accepted there are both, enabled and disabled"
        )
    matrices = list(_matrices(asked))
    reporter.phase("verify")
    result.checks |= _verified(ids, wires, matrices, reporter)
    reporter.phase("timed")
    samples: dict[str, list[Square]] = {}
    for repeat in range(int(asked["repeats"])):
        for matrix in matrices:
            for name, square in _measured(matrix, len(ids), wires, reporter).items():
                samples.setdefault(name, []).append(square)
                reporter.line("p2p", matrix=name, repeat=repeat, values=square)  # nothing measured is lost
    medians = {name: _each(statistics.median, squares) for name, squares in samples.items()}
    result.tables["p2p"] = {
        "devices": [
            {"id": one, "name": None, "bus_id": None} | found for one, found in zip(ids, wires.devices, strict=True)
        ],
        "access": access,
        "matrices": medians,
        "samples": samples,  # of every repeat; `matrices` are their medians
        "bytes": int(asked["bytes"]),
        "latency_bytes": asked["latency_bytes"],
        "copy": asked["copy"],
        "words": wires.words,
        "notes": [],
    }
    result.metrics |= metrics(medians, samples)
    result.checks |= {"measured_late": wires.late}
    if wires.enqueued_by:
        result.checks["enqueued_by"] = wires.enqueued_by
    if asked["concurrent"] and len(ids) > 1:
        reporter.phase("concurrent")
        rows = at_once(ids, wires, asked, reporter)
        result.tables["p2p_concurrent"] = {"p2p": matrices[-1].access.removesuffix("_reads"), "rows": rows}
        result.metrics |= contention(rows)
    wires.close()


def _both_ways(wires: Wires, a: int, b: int) -> bool:
    return wires.can_access(a, b) and wires.can_access(b, a)


def _matrices(asked: dict[str, Any]) -> Iterator[Matrix]:
    """In the tool's order; `--p2p_read` adds reads to what writes with peer access measured, but not both ways."""
    states = {"enabled": (True,), "disabled": (False,)}.get(asked["p2p"], (False, True))
    for kind in ("unidirectional", "bidirectional", "latency"):
        small = kind == "latency"
        size = int(asked["latency_bytes" if small else "bytes"])
        iterations = int(asked["latency_iterations" if small else "iterations"])
        for enabled in states:
            yield Matrix(kind, How(enabled, size, iterations))
            if enabled and asked["direction"] == "read" and kind != "bidirectional":
                yield Matrix(kind, How(enabled, size, iterations, read=True))


def _verified(ids: Sequence[int], wires: Wires, matrices: Sequence[Matrix], reporter: Reporter) -> dict[str, Any]:
    """Whether data arrives, once for every ordered pair and kind of copy: also their warm-up."""
    wrong, count = {}, 0
    for matrix in matrices:
        if matrix.kind == "bidirectional":
            continue  # the same copies
        for a, source in enumerate(ids):
            for b, target in enumerate(ids):
                elements = wires.wrong_elements(Copy(a, b), matrix.how)
                count += 1
                if elements:
                    wrong[f"{source}->{target} {matrix.access}, {matrix.how.size_bytes} bytes"] = elements
                reporter.beat()
    return {"copies_compared": count, "copies_wrong": wrong}


def _measured(matrix: Matrix, count: int, wires: Wires, reporter: Reporter) -> dict[str, Square]:
    """Every entry once, by the contract's names: GB/s, or µs where latency_…. The row makes the copy."""
    found: dict[str, Square] = {}
    for a in range(count):
        for b in range(count):
            for name, value in _entry(matrix, a, b, wires):
                square = found.setdefault(f"{name}_{matrix.access}", [[math.nan] * count for _ in range(count)])
                square[a][b] = value
            reporter.beat()
    return found


def _entry(matrix: Matrix, a: int, b: int, wires: Wires) -> Iterator[tuple[str, float]]:
    how = matrix.how
    one = Copy(b, a) if how.read else Copy(a, b)
    if matrix.kind == "latency":
        latency = wires.latency(one, how)
        if latency.gpu_us is not None:
            yield "latency_gpu", latency.gpu_us
        yield "latency_cpu", latency.cpu_us
        return
    copies = [one]
    if matrix.kind == "bidirectional":
        copies.append(Copy(b, a, backwards=a == b))
    counted = len(copies) * how.size_bytes * how.iterations * (2 if a == b else 1)  # within one: read and written
    yield matrix.kind, gb_per_s(counted, wires.time(copies, how).all_ms)


def _each(function: Any, squares: Sequence[Square]) -> Square:
    """A function of the values of every repeat, entry by entry."""
    count = len(squares[0])
    return [[float(function([square[a][b] for square in squares])) for b in range(count)] for a in range(count)]


def metrics(medians: dict[str, Square], samples: dict[str, list[Square]]) -> dict[str, float]:
    """The median and the worst entry of every matrix off its diagonal, peer access first; of one member alone its own entry."""
    found: dict[str, float] = {}
    for name in sorted(medians, key=lambda name: "disabled" in name):  # stable
        unit, worst, word = ("us", max, "most") if name.startswith("latency") else ("gb_per_s", min, "least")
        between = [value for a, row in enumerate(medians[name]) for b, value in enumerate(row) if a != b]
        if between:
            found[f"p2p/{name}_{unit}"] = statistics.median(between)
            found[f"p2p/{name}_{word}_{unit}"] = worst(between)
        else:
            found[f"p2p/local_{name}_{unit}"] = medians[name][0][0]
    for kind in ("bandwidth", "latency_gpu", "latency_cpu"):
        spreads = [
            share
            for name, squares in samples.items()
            if len(squares) > 1 and name.startswith(("uni", "bi") if kind == "bandwidth" else kind)
            for row in _each(spread, squares)
            for share in row
        ]
        if spreads:
            found[f"p2p/{kind}_spread_share"] = max(spreads)
    return found
