"""`benchmark=p2p`: bandwidth and latency between every two members of a subset. README.md.

The measurement is that of p2pBandwidthLatencyTest (CUDA samples): one way and both ways, with peer
access and without. Ringside adds subsets, repeats, a comparison of contents, records, copies of
many pairs at once, and CPU workers. Here `links` are `gpus.Gpus` or `cpu_workers.Workers`; between
CPU workers every call is collective.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.p2p.copies import Copy, CopyMethod, patterns
from benchmarks.p2p.derive import Matrix
from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.record import Kind
from conf.cell import Cell

BANDWIDTHS = ("unidirectional", "bidirectional")


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective; on GPUs rank 0 does all the work, its result is the cell's."""
    options = cell.benchmark
    result = Result()
    reporter.phase("build")
    size_bytes = max(int(options["bytes"]), int(options["latency_bytes"]))
    if ranks.device.type == "cuda":
        from benchmarks.p2p.gpus import Gpus

        def work() -> None:
            gpus = Gpus(cell.gpus, size_bytes, options["copy"])
            result.checks |= PairBenchmark(cell.gpus, gpus, options, reporter).measure()

        ranks.on_rank_zero(work, reporter.beat)
    else:
        from benchmarks.p2p.cpu_workers import Workers

        workers = Workers(ranks, size_bytes)
        result.checks |= PairBenchmark(cell.gpus, workers, options, reporter).measure()
    return result


class PairBenchmark:
    """One cell on this rank: the ids of its members, their links, and what is asked."""

    def __init__(
        self, ids: Sequence[int], links: Any, options: Mapping[str, Any], reporter: Reporter
    ) -> None:
        self._ids, self._links, self._options, self._reporter = ids, links, options, reporter

    def measure(self) -> dict[str, Any]:
        """Measure every matrix and write the samples; return checks: what is known of the copies.

        Raises ValueError: a pair has no peer access and `p2p=required`; names the pairs.
        """
        ids, links, options, reporter = self._ids, self._links, self._options, self._reporter
        access: dict[str, bool] = {}
        without = []
        for a, b in itertools.combinations(range(len(ids)), 2):
            pair = f"{min(ids[a], ids[b])}-{max(ids[a], ids[b])}"
            access[pair] = links.can_access(a, b) and links.can_access(b, a)
            if not access[pair]:
                without.append(pair)
        if without and options["p2p"] == "required":
            raise ValueError(
                f"benchmark.p2p=required: no peer access between GPUs {', '.join(without)}; "
                "possible there: both, enabled and disabled"
            )
        devices = []
        for gpu, device in zip(ids, links.devices, strict=True):
            devices.append({"id": gpu, "name": None, "bus_id": None} | device)
        sizes = {"bytes": int(options["bytes"]), "latency_bytes": options["latency_bytes"]}
        reporter.line(Kind.MEMBERS, devices=devices, access=access, words=links.words, **sizes)
        reporter.phase("verify")
        checks = self._verified()
        reporter.phase("timed")
        for repeat in range(int(options["repeats"])):
            for kind, how in self._passes():
                opened = time.perf_counter()
                matrices = self._matrices(kind, how)
                # Of the matrices together: latencies are two.
                window_ms = (time.perf_counter() - opened) * 1e3
                facts = {"repeat": repeat, "window_ms": window_ms}
                for name, fields in matrices.items():
                    reporter.line(Kind.P2P, matrix=name, **facts, **fields)
        checks["measured_late"] = links.late
        if links.enqueued_by:
            checks["enqueued_by"] = links.enqueued_by
        if options["concurrent"] and len(ids) > 1:
            reporter.phase("concurrent")
            self._measure_concurrent()
        links.close()
        return checks

    def _passes(self) -> list[tuple[str, CopyMethod]]:
        """Return (kind, how) of each pass over all ordered pairs, in the tool's order.

        Reads (`--p2p_read`) follow the writes with peer access, one way only.
        """
        options = self._options
        states = []  # whether peer access is enabled; `both` and `required` have both
        if options["p2p"] != "enabled":
            states.append(False)
        if options["p2p"] != "disabled":
            states.append(True)
        passes = []
        for kind in (*BANDWIDTHS, "latency"):
            size, iterations = int(options["bytes"]), int(options["iterations"])
            if kind == "latency":
                size, iterations = int(options["latency_bytes"]), int(options["latency_iterations"])
            for enabled in states:
                passes.append((kind, CopyMethod(enabled, size, iterations)))
                if enabled and options["direction"] == "read" and kind != "bidirectional":
                    passes.append((kind, CopyMethod(enabled, size, iterations, read=True)))
        return passes

    def _verified(self) -> dict[str, Any]:
        """Compare what arrives, once for every ordered pair and kind of copy, which warms up too.

        Returns how many copies were compared, and which had wrong elements.
        """
        ids = self._ids
        wrong, compared = {}, 0
        for kind, how in self._passes():
            if kind == "bidirectional":
                continue  # the same copies
            for a, b in itertools.product(range(len(ids)), repeat=2):
                elements = self._links.wrong_elements(Copy(a, b), how)
                compared += 1
                if elements:
                    copy = f"{ids[a]}->{ids[b]} {_access(how)}, {how.size_bytes} bytes"
                    wrong[copy] = elements
                self._reporter.beat()
        return {"copies_compared": compared, "copies_wrong": wrong}

    def _matrices(self, kind: str, how: CopyMethod) -> dict[str, dict[str, Any]]:
        """Measure every entry of one pass once. The row makes the copy.

        Returns {name of a matrix: fields of its line}: of latencies `values` in µs; of a bandwidth
        the `ms` of all iterations and the `counted_bytes`.
        """
        count = len(self._ids)
        matrices: dict[str, Matrix] = {}
        counted_bytes: Matrix = [[0] * count for _ in range(count)]
        for a, b in itertools.product(range(count), repeat=2):
            copy = Copy(b, a) if how.read else Copy(a, b)
            copies = [copy]
            if kind == "bidirectional":
                copies.append(Copy(b, a, backwards=a == b))
            counted_bytes[a][b] = len(copies) * how.size_bytes * how.iterations
            if a == b:  # within one member each byte is read and written
                counted_bytes[a][b] *= 2
            entries: dict[str, float | None] = {}
            if kind == "latency":
                entries["latency_gpu"], entries["latency_cpu"] = self._links.latency(copy, how)
            else:
                _, entries[kind] = self._links.time(copies, how)
            for name, value in entries.items():
                if value is not None:
                    empty = [[math.nan] * count for _ in range(count)]
                    matrices.setdefault(f"{name}_{_access(how)}", empty)[a][b] = value
            self._reporter.beat()
        if kind == "latency":
            return {name: {"values": us} for name, us in matrices.items()}
        return {name: {"ms": ms, "counted_bytes": counted_bytes} for name, ms in matrices.items()}

    def _measure_concurrent(self) -> None:
        """Alternate all copies of a pattern at once with each copy alone, and write every time.

        In a matching each pair, both ways, is alone.
        """
        ids, links, options, reporter = self._ids, self._links, self._options, self._reporter
        size_bytes, iterations = int(options["bytes"]), int(options["iterations"])
        enabled, read = options["p2p"] != "disabled", options["direction"] == "read"
        for pattern, position, copies, copy_bytes in patterns(len(ids), size_bytes):
            how = CopyMethod(enabled, copy_bytes, iterations, read)
            width, member = 1, ids[position]
            if pattern == "matching":
                width, member = 2, position
            facts: dict[str, Any] = {
                "pattern": pattern,
                "number": position,
                "of": member,
                "bytes": copy_bytes,
                "counted_bytes": copy_bytes * iterations,  # of one copy
                "copies": [[ids[copy.source], ids[copy.target]] for copy in copies],
            }
            for repeat in range(int(options["repeats"])):
                opened = time.perf_counter()
                together_ms, total_ms = links.time(copies, how)
                alone_ms: list[float] = []
                for start in range(0, len(copies), width):
                    alone_ms += links.time(copies[start : start + width], how)[0]
                window_ms = (time.perf_counter() - opened) * 1e3
                reporter.beat()
                reporter.line(
                    Kind.P2P,
                    repeat=repeat,
                    window_ms=window_ms,
                    **facts,
                    total_ms=total_ms,
                    together_ms=together_ms,
                    alone_ms=alone_ms,
                )


def _access(how: CopyMethod) -> str:
    if not how.enabled:
        return "disabled"
    if how.read:
        return "enabled_reads"
    return "enabled"
