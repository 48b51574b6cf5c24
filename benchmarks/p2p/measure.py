"""`benchmark=p2p`: bandwidth and latency between every two members of a subset. README.md.

The measurement is that of p2pBandwidthLatencyTest (CUDA samples): one way and both ways, with peer access and without.
Ringside adds subsets, repeats, a comparison of contents, records, copies of many pairs at once, and CPU workers.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.p2p import copies as concurrent
from benchmarks.p2p.copies import Copy, CopyMethod, Links
from benchmarks.p2p.derive import Matrix, rates
from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.record import Kind
from conf.cell import Cell


@dataclass(frozen=True)
class MatrixKind:
    """What one pass over all ordered pairs, the diagonal too, measures; latencies give one matrix for GPU and one for CPU."""

    kind: str  # unidirectional, bidirectional, latency
    how: CopyMethod

    @property
    def access(self) -> str:
        """Return the end of the matrix's name."""
        return ("enabled" if self.how.enabled else "disabled") + ("_reads" if self.how.read else "")


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective; on GPUs rank 0 does all the work, and its result is the cell's."""
    asked = cell.benchmark
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
    return result


def measure(
    ids: Sequence[int], links: Links, asked: dict[str, Any], result: Result, reporter: Reporter
) -> None:
    """Measure every matrix: samples become lines, and what is known of the copies becomes checks of the result.

    Raises:
        ValueError: a pair has no peer access and `p2p=required`; names the pairs.
    """
    everyone = range(len(ids))
    pairs = [(a, b) for a in everyone for b in everyone if a < b]
    access = {
        f"{min(ids[a], ids[b])}-{max(ids[a], ids[b])}": _both_ways(links, a, b) for a, b in pairs
    }
    if asked["p2p"] == "required" and (
        without := [pair for pair, can in access.items() if not can]
    ):
        raise ValueError(
            f"benchmark.p2p=required: no peer access between GPUs {', '.join(without)}; "
            "accepted there are both, enabled and disabled"
        )
    devices = [
        {"id": one, "name": None, "bus_id": None} | found
        for one, found in zip(ids, links.devices, strict=True)
    ]
    sizes = {"bytes": int(asked["bytes"]), "latency_bytes": asked["latency_bytes"]}
    reporter.line(Kind.MEMBERS, devices=devices, access=access, words=links.words, **sizes)
    matrices = list(_matrices(asked))
    reporter.phase("verify")
    result.checks |= _verified(ids, links, matrices, reporter)
    reporter.phase("timed")
    for repeat in range(int(asked["repeats"])):
        for matrix in matrices:
            opened = time.perf_counter()
            found = _measured(matrix, len(ids), links, reporter)
            window_ms = (
                time.perf_counter() - opened
            ) * 1e3  # of the matrices together: latencies are two
            for name, values in found.items():
                reporter.line(Kind.P2P, matrix=name, repeat=repeat, window_ms=window_ms, **values)
    result.checks |= {"measured_late": links.late}
    if links.enqueued_by:
        result.checks["enqueued_by"] = links.enqueued_by
    if asked["concurrent"] and len(ids) > 1:
        reporter.phase("concurrent")
        concurrent.measure(ids, links, asked, reporter)
    links.close()


def _both_ways(links: Links, a: int, b: int) -> bool:
    return links.can_access(a, b) and links.can_access(b, a)


def _matrices(asked: dict[str, Any]) -> Iterator[MatrixKind]:
    """Yield what to measure, in the tool's order. Reads (`--p2p_read`) follow the writes with peer access, one way only."""
    states = {"enabled": (True,), "disabled": (False,)}.get(asked["p2p"], (False, True))
    for kind in ("unidirectional", "bidirectional", "latency"):
        small = kind == "latency"
        size = int(asked["latency_bytes" if small else "bytes"])
        iterations = int(asked["latency_iterations" if small else "iterations"])
        for enabled in states:
            yield MatrixKind(kind, CopyMethod(enabled, size, iterations))
            if enabled and asked["direction"] == "read" and kind != "bidirectional":
                yield MatrixKind(kind, CopyMethod(enabled, size, iterations, read=True))


def _verified(
    ids: Sequence[int], links: Links, matrices: Sequence[MatrixKind], reporter: Reporter
) -> dict[str, Any]:
    """Compare what arrives, once for every ordered pair and kind of copy. This also warms them up."""
    wrong, count = {}, 0
    for matrix in matrices:
        if matrix.kind == "bidirectional":
            continue  # the same copies
        for a, source in enumerate(ids):
            for b, target in enumerate(ids):
                elements = links.wrong_elements(Copy(a, b), matrix.how)
                count += 1
                if elements:
                    wrong[f"{source}->{target} {matrix.access}, {matrix.how.size_bytes} bytes"] = (
                        elements
                    )
                reporter.beat()
    return {"copies_compared": count, "copies_wrong": wrong}


def _measured(
    matrix: MatrixKind, count: int, links: Links, reporter: Reporter
) -> dict[str, dict[str, Matrix]]:
    """Measure every entry once. The row makes the copy.

    Returns {name of a matrix: fields of its line}: `values` in GB/s, or µs where latency_…; of a bandwidth also the `ms` of all
    iterations and the `counted_bytes`.
    """
    times: dict[str, Matrix] = {}
    counted = [[_counted_bytes(matrix, a, b) for b in range(count)] for a in range(count)]
    for a in range(count):
        for b in range(count):
            for name, value in _entry(matrix, a, b, links):
                square = times.setdefault(
                    f"{name}_{matrix.access}", [[math.nan] * count for _ in range(count)]
                )
                square[a][b] = value
            reporter.beat()
    if matrix.kind == "latency":
        return {name: {"values": us} for name, us in times.items()}
    return {
        name: {"values": rates(counted, ms), "ms": ms, "counted_bytes": counted}
        for name, ms in times.items()
    }


def _entry(matrix: MatrixKind, a: int, b: int, links: Links) -> Iterator[tuple[str, float]]:
    """Measure one entry: (name, µs of one copy) of a latency, (name, ms of all iterations) of a bandwidth."""
    how = matrix.how
    if matrix.kind == "latency":
        latency = links.latency(_copies(matrix, a, b)[0], how)
        if latency.gpu_us is not None:
            yield "latency_gpu", latency.gpu_us
        yield "latency_cpu", latency.cpu_us
        return
    yield matrix.kind, links.time(_copies(matrix, a, b), how).all_ms


def _copies(matrix: MatrixKind, a: int, b: int) -> list[Copy]:
    """Return the copies that one entry times together."""
    one = Copy(b, a) if matrix.how.read else Copy(a, b)
    return [one, Copy(b, a, backwards=a == b)] if matrix.kind == "bidirectional" else [one]


def _counted_bytes(matrix: MatrixKind, a: int, b: int) -> float:
    """Return the bytes that an entry counts; within one member each is read and written."""
    counted = len(_copies(matrix, a, b)) * matrix.how.size_bytes * matrix.how.iterations
    return counted * 2 if a == b else counted
