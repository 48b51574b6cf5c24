"""The phases of a calibration: the last of a training cell, because replicas drift apart in them."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.rank.group import Ranks
from benchmarks.rank.reporter import Reporter
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.timing.clock import CYCLES_PER_MS, Clock
from benchmarks.timing.compilation import Compilation
from benchmarks.training.calibration.beside import Beside
from benchmarks.training.calibration.timeline import LEFT_BY, Timeline
from trainers.step import Training
from trainers.strategy import SentBucket

NONE, TIMELINE, ALL = "none", "timeline", "all"
USUAL = TIMELINE  # what a cell has that does not say
# What `timeline` may take, on CPU workers as a share of benchmark.max_seconds: a cell with longer steps has none.
USUAL_GPU_MS, USUAL_CPU_SHARE = 500.0, 0.025
TIMELINE_MS, EXCHANGES_MS, INTERFERENCE_MS = 600.0, 200.0, 600.0
FEWEST_STEPS, MOST_STEPS = 3, 10  # of a window
FEWEST_BESIDE = 2  # of each of the four windows of A B B A
FEWEST_CALLS, MOST_CALLS = 3, 50  # of a collective of one size
SMALLEST_BYTES = (64 << 10, 1 << 20)
TIMES_THE_LARGEST = 4  # the last size, by bytes of the largest bucket
# Collectives beside a step take at most this share of it alone, and are at most so many: each costs the host a launch.
SHARE_BESIDE, MOST_BESIDE = 0.4, 16
HOLD_MS, HOLD_MS_PER_CALL = 1.0, 0.2  # a GPU is held while the host enqueues the calls of one size
LAUNCH_BOUND = 0.9  # launches take this share of a step: what is enqueued beside it delays it
NO_BUCKETS = "the strategy sends no buckets"
NO_GRADIENT = "a parameter of a bucket has no gradient"
RECOMPILED = "torch.compile made another graph because of a hook"
REPLAYED = "a step is the replay of a CUDA graph, in which no moment is seen"
NO_COLLECTIVE = "a bucket of the strategy is not exchanged by collectives alone"
LAUNCHES = "launches take as long as the step: those of the collectives would delay it"


@dataclass(frozen=True)
class Calibration:
    """What every phase of one cell's calibration works with. All methods are collective."""

    training: Training
    clock: Clock
    ranks: Ranks
    reporter: Reporter
    step_ms: float  # equal on every rank, like launch_ms
    launch_ms: float

    def run(self) -> None:
        """Measure what `benchmark.calibrate` asks for."""
        cell = self.training.cell
        level = cell.benchmark.get("calibrate", USUAL)
        if level == NONE:
            return
        self.reporter.phase("timeline")
        buckets = self.training.strategy.buckets()
        self.plan(buckets)
        windows = 1 if cell.strategy["name"] == "none" else 2
        usual_ms = (
            USUAL_GPU_MS if cell.device == "cuda" else 1e3 * USUAL_CPU_SHARE * float(cell.benchmark["max_seconds"])
        )
        budget_ms = TIMELINE_MS if level == ALL else usual_ms
        if self.training.graphs:
            self.unseen(windows)
        elif level == ALL or windows * (1 + FEWEST_STEPS) * self.step_ms <= budget_ms:
            self.timeline(buckets, windows, budget_ms)
        if level == ALL and self.ranks.world_size > 1:
            self.interference(self.bucket_exchange(buckets))

    def plan(self, buckets: Sequence[SentBucket] | None) -> None:
        """Write what the exchange sends together."""
        rows = [
            {
                "bytes": bucket.sent_bytes,
                "dtype": bucket.dtype,
                "gradient_bytes": bucket.gradient_bytes,
                "arrays": len({id(parameter) for parameter in bucket.parameters}),
            }
            for bucket in buckets or ()
        ]
        self.reporter.line(Kind.BUCKETS, rows=rows, **({} if buckets else {"unknown": NO_BUCKETS}))

    def timeline(self, buckets: Sequence[SentBucket] | None, windows: int, budget_ms: float) -> None:
        """Observe steps without exchange, and with it."""
        steps = self._fitting(budget_ms, windows, FEWEST_STEPS)
        observed = Timeline(self.training, buckets)
        compilation = Compilation(self.training.cell.compiled)
        for exchange in (False, True)[:windows]:
            with nullcontext() if exchange else self.training.without_exchange():
                seen = observed.observe(self.clock, steps, self.reporter.beat)
            unknown = {}
            if any(compilation.since().values()):
                unknown = dict.fromkeys(seen, RECOMPILED)
                seen = {name: [] for name in seen}
            elif not buckets:
                unknown = {"ready_ms": NO_BUCKETS}
            elif not all(seen["ready_ms"]):
                unknown = {"ready_ms": NO_GRADIENT}
            self.reporter.line(Kind.TIMELINE, exchange=exchange, steps=steps, unknown=unknown, **seen)

    def unseen(self, windows: int) -> None:
        """Write that no moment of a step is known."""
        names = [*(f"{moment}_ms" for moment in LEFT_BY.values()), "ready_ms"]
        unknown = dict.fromkeys(names, REPLAYED)
        seen: dict[str, list[float]] = {name: [] for name in names}
        for exchange in (False, True)[:windows]:
            self.reporter.line(Kind.TIMELINE, exchange=exchange, steps=0, unknown=unknown, **seen)

    def bucket_exchange(self, buckets: Sequence[SentBucket] | None) -> list[dict[str, Any]]:
        """Time collectives as they exchange one bucket. Return a row for each size, with its median in ms."""
        self.reporter.phase("bucket exchange")
        sent = [(one.sent_bytes, one.dtype) for one in buckets or () if one.sent_bytes]
        largest = max(sent, default=None)
        exchange = largest and self.training.strategy.bucket_exchange(*largest)
        if not largest or not exchange:
            self.reporter.line(Kind.BUCKET_EXCHANGE, operation=None, rows=[], unknown=NO_COLLECTIVE)
            return []
        sizes = {(size, largest[1]) for size in (*SMALLEST_BYTES, TIMES_THE_LARGEST * largest[0])} | set(sent)
        rows = [self._collective(*size, EXCHANGES_MS / len(sizes)) for size in sorted(sizes)]
        self.reporter.line(Kind.BUCKET_EXCHANGE, operation=exchange.operation, rows=rows)
        return [row | {"median_ms": statistics.median(self.ranks.slowest(row["ms"]))} for row in rows]

    def _collective(self, size_bytes: int, dtype: str, budget_ms: float) -> dict[str, Any]:
        """Return a row with the ms of calls that were enqueued while the device was held."""
        exchange = self.training.strategy.bucket_exchange(size_bytes, dtype)
        assert exchange is not None
        exchange.run()  # connects
        (once_ms,) = self.ranks.slowest(self.clock.block(exchange.run, 1, self.reporter.beat).ms)
        calls = min(MOST_CALLS, max(FEWEST_CALLS, int(budget_ms / once_ms)))
        held = self.ranks.device.type == "cuda"

        def run() -> None:
            nonlocal held
            if held:  # by the lead-in
                torch.cuda._sleep(int((HOLD_MS + calls * HOLD_MS_PER_CALL) * CYCLES_PER_MS))
                held = False
            exchange.run()

        return {"bytes": size_bytes, "dtype": dtype, "ms": self.clock.block(run, calls, self.reporter.beat).ms}

    def interference(self, exchanges: Sequence[dict[str, Any]]) -> None:
        """Step without exchange, alone and beside collectives, in the order A B B A."""
        self.reporter.phase("interference")
        is_bound = self.ranks.device.type == "cuda" and self.launch_ms > LAUNCH_BOUND * self.step_ms
        if not exchanges or is_bound or self.training.graphs:
            why = REPLAYED if self.training.graphs else LAUNCHES if is_bound else NO_COLLECTIVE
            self.reporter.line(Kind.INTERFERENCE, operation=None, rows=[], unknown=why)
            return
        most_ms = SHARE_BESIDE * self.step_ms
        chosen = max(
            [one for one in exchanges if one["median_ms"] <= most_ms] or exchanges[:1], key=lambda one: one["bytes"]
        )
        calls = min(MOST_BESIDE, max(1, int(most_ms / chosen["median_ms"])))
        exchange = self.training.strategy.bucket_exchange(chosen["bytes"], chosen["dtype"])
        assert exchange is not None
        steps = self._fitting(INTERFERENCE_MS, 4, FEWEST_BESIDE)
        observed, alone_ms, beside_ms, comm_ms = Timeline(self.training, None), [], [], []
        with self.training.without_exchange():
            for with_calls in (False, True, True, False):
                beside = Beside(exchange.run, calls, self.ranks.device) if with_calls else None
                ms = observed.observe(self.clock, steps, self.reporter.beat, beside)["update_ms"]
                if beside is None:
                    alone_ms += ms
                else:
                    beside_ms += ms
                    comm_ms += [min(pair) for pair in zip(beside.ms()[1:], ms, strict=True)]
                    beside.close()
        row = {"bytes": chosen["bytes"], "calls": calls, "comm_alone_ms": calls * chosen["median_ms"]}
        row |= {"alone_ms": alone_ms, "beside_ms": beside_ms, "comm_ms": comm_ms}
        self.reporter.line(Kind.INTERFERENCE, operation=exchange.operation, rows=[row])

    def _fitting(self, budget_ms: float, windows: int, fewest: int) -> int:
        """Return the steps of each window, beside its lead-in."""
        return min(MOST_STEPS, max(fewest, int(budget_ms / windows / self.step_ms) - 1))
