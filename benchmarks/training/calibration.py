"""What a forecast needs: moments of a few steps, and one bucket's collective by itself.

These are the last phases of a training cell, because replicas drift apart in them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from benchmarks.rank.ranks import Ranks, Reporter
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.timing.clock import CYCLES_PER_MS, Clock
from benchmarks.timing.compilation import Compilation
from trainers.step import Training
from trainers.strategy import SentBucket

NONE, TIMELINE, ALL = "none", "timeline", "all"
# What `timeline` may take, on CPU workers as a share of benchmark.max_seconds: a cell with longer
# steps has none.
USUAL_GPU_MS, USUAL_CPU_SHARE = 500.0, 0.025
TIMELINE_MS, EXCHANGES_MS = 600.0, 200.0
# What `all` may take, as calculated from the steps: what does not fit is left out.
ALL_MS = 1400.0
FEWEST_STEPS, MOST_STEPS = 2, 10  # of a window
FEWEST_CALLS, MOST_CALLS = 3, 50  # of a collective of one size
# Of these: the first connects, the second says how many fit, the third is a lead-in.
CALLS_BEFORE = 3
SMALLEST_BYTES = (64 << 10, 1 << 20)
TIMES_THE_LARGEST = 4  # the last size, by bytes of the largest bucket
HOLD_MS, HOLD_MS_PER_CALL = 1.0, 0.2  # a GPU is held while the host enqueues the calls of one size
NO_BUCKETS = "the strategy sends no buckets"
NO_GRADIENT = "a parameter of a bucket has no gradient"
RECOMPILED = "torch.compile made another graph because of a hook"
REPLAYED = "a step is the replay of a CUDA graph, in which no moment is seen"
NO_COLLECTIVE = "a bucket of the strategy is not exchanged by collectives alone"
# What the end of a stage of a step (trainers.step) is called in a timeline.
MOMENTS = {
    "forward": "forward",
    "backward": "backward",
    "exchange": "exchange",
    "optimizer": "update",
}
START = "start"


class Calibration:
    """The calibration of one cell. All methods are collective."""

    def __init__(
        self, training: Training, clock: Clock, ranks: Ranks, reporter: Reporter, step_ms: float
    ) -> None:
        """`step_ms` is equal on every rank."""
        self.training, self.clock, self.ranks = training, clock, ranks
        self.reporter, self.step_ms = reporter, step_ms

    def run(self) -> None:
        """Measure what `benchmark.calibrate` asks for."""
        cell = self.training.cell
        level = cell.benchmark.get("calibrate", TIMELINE)
        if level == NONE:
            return
        self.reporter.phase("timeline")
        began = time.perf_counter()
        buckets = self.training.strategy.buckets() or ()
        rows = []
        for bucket in buckets:
            row = {
                "bytes": bucket.sent_bytes,
                "dtype": bucket.dtype,
                "gradient_bytes": bucket.gradient_bytes,
                "arrays": len({id(parameter) for parameter in bucket.parameters}),
            }
            rows.append(row)
        unknown = {}
        if not buckets:
            unknown = {"unknown": NO_BUCKETS}
        self.reporter.line(Kind.BUCKETS, rows=rows, **unknown)
        self._timeline(buckets, level)
        if level == ALL and self.ranks.world_size > 1:
            self._bucket_exchange(buckets, began)

    def _timeline(self, buckets: Sequence[SentBucket], level: str) -> None:
        cell = self.training.cell
        budget_ms = USUAL_GPU_MS
        if level == ALL:
            most_ms = ALL_MS - EXCHANGES_MS * (self.ranks.world_size > 1)
            budget_ms = min(TIMELINE_MS, most_ms)
        elif cell.device == "cpu":
            budget_ms = 1e3 * USUAL_CPU_SHARE * float(cell.benchmark["max_seconds"])
        windows = 1 if cell.strategy["name"] == "none" else 2
        names = [f"{moment}_ms" for moment in MOMENTS.values()] + ["ready_ms"]
        if self.training.graphs:
            for window in range(windows):
                self._write_timeline(window == 1, 0, dict.fromkeys(names, REPLAYED), {})
            return
        fewest_ms = windows * (1 + FEWEST_STEPS) * self.step_ms
        if level == ALL and fewest_ms <= most_ms:
            budget_ms = max(budget_ms, fewest_ms)
        if fewest_ms > budget_ms:
            return
        began = time.perf_counter()
        observer = StepObserver(self.training, buckets)
        compilation = Compilation(cell.compiled)
        for window in range(windows):
            exchange = window == 1
            left_ms = budget_ms - self._elapsed_ms(began)
            fitting = int(left_ms / (windows - window) / self.step_ms) - 1
            steps = min(MOST_STEPS, max(FEWEST_STEPS, fitting))
            with nullcontext() if exchange else self.training.without_exchange():
                moments = observer.observe(self.clock, steps, self.reporter.beat)
            unknown = {}
            if any(compilation.since().values()):
                unknown, moments = dict.fromkeys(names, RECOMPILED), {}
            elif not buckets:
                unknown = {"ready_ms": NO_BUCKETS}
            elif not all(moments["ready_ms"]):
                unknown = {"ready_ms": NO_GRADIENT}
            self._write_timeline(exchange, steps, unknown, moments)

    def _write_timeline(
        self, exchange: bool, steps: int, unknown: dict[str, str], moments: dict[str, Any]
    ) -> None:
        rest: dict[str, list[float]] = {name: [] for name in unknown if name not in moments}
        self.reporter.line(
            Kind.TIMELINE, exchange=exchange, steps=steps, unknown=unknown, **moments, **rest
        )

    def _bucket_exchange(self, buckets: Sequence[SentBucket], began: float) -> None:
        """Time collectives as they exchange one bucket.

        The last size, above all buckets, is left out where time is up: `began` is when the
        calibration did, by this rank's clock.
        """
        self.reporter.phase("bucket exchange")
        sizes = set()
        for bucket in buckets:
            if bucket.sent_bytes:
                sizes.add((bucket.sent_bytes, bucket.dtype))
        exchange = None
        if sizes:
            largest_bytes, dtype = max(sizes)
            exchange = self.training.strategy.bucket_exchange(largest_bytes, dtype)
        if exchange is None:
            self.reporter.line(Kind.BUCKET_EXCHANGE, rows=[], unknown=NO_COLLECTIVE)
            return
        for size_bytes in SMALLEST_BYTES:
            sizes.add((size_bytes, dtype))
        budget_ms = EXCHANGES_MS / (len(sizes) + 1)
        rows = [self._time_collective(*size, budget_ms) for size in sorted(sizes)]
        median_ms = statistics.median(self.ranks.slowest(rows[-1]["ms"]))
        expected_ms = TIMES_THE_LARGEST * (CALLS_BEFORE + FEWEST_CALLS) * median_ms
        if expected_ms <= ALL_MS - self._elapsed_ms(began):
            rows.append(self._time_collective(TIMES_THE_LARGEST * largest_bytes, dtype, budget_ms))
        self.reporter.line(Kind.BUCKET_EXCHANGE, operation=exchange.operation, rows=rows)

    def _time_collective(self, size_bytes: int, dtype: str, budget_ms: float) -> dict[str, Any]:
        """Return a row with the ms of calls that were enqueued while the device was held."""
        exchange = self.training.strategy.bucket_exchange(size_bytes, dtype)
        assert exchange is not None
        (once_ms,) = self.ranks.slowest(self.clock.block(exchange.run, 1, self.reporter.beat).ms)
        calls = min(MOST_CALLS, max(FEWEST_CALLS, int(budget_ms / once_ms)))
        hold = self.ranks.device.type == "cuda"

        def run() -> None:
            nonlocal hold
            if hold:  # by the lead-in
                torch.cuda._sleep(int((HOLD_MS + calls * HOLD_MS_PER_CALL) * CYCLES_PER_MS))
                hold = False
            exchange.run()

        ms = self.clock.block(run, calls, self.reporter.beat).ms
        return {"bytes": size_bytes, "dtype": dtype, "ms": ms}

    def _elapsed_ms(self, began: float) -> float:
        """Return the time since each rank's `began`, equal on all. Collective."""
        (elapsed,) = self.ranks.slowest([time.perf_counter() - began])
        return 1e3 * elapsed


class StepObserver:
    """Observes when moments inside the steps of a training come.

    They are the loss, the last gradient of each bucket, and the end of backward, exchange and
    update.
    """

    def __init__(self, training: Training, buckets: Sequence[SentBucket]) -> None:
        """`buckets` are those whose gradients are awaited."""
        self._training, self._on_gpu = training, training.device.type == "cuda"
        self._parameters = training.parameters
        indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._members: list[set[int]] = []  # parameters of each bucket, by index
        for bucket in buckets:
            self._members.append({indices[id(parameter)] for parameter in bucket.parameters})
        self._steps: list[dict[str | int, Any]] = []  # moments, by name or number of a bucket
        self._hooks: list[RemovableHandle] = []

    def observe(self, clock: Clock, steps: int, beat: Callable[[], None]) -> dict[str, Any]:
        """Step; return ms after each step's start: {forward_ms, backward_ms, exchange_ms, …}.

        They are lists by step; `ready_ms` is [bucket][step]. The lead-in shows which gradient of a
        bucket comes last; a bucket that lacks one has no times. Collective.
        """
        arrived: list[int] = []
        self._steps = []
        if self._members:
            for index in range(len(self._parameters)):
                self._hook(index, arrived.append, index)

        def step() -> None:
            if len(self._steps) == 1:
                self._hook_last_gradients(arrived)
            self._steps.append({})
            self._note(START)
            self._training.step()

        usual, self._training.mark = self._training.mark, self._noted
        try:
            clock.block(step, steps, beat)
        finally:
            self._training.mark = usual
            self._remove_hooks()
        moments: dict[str, Any] = {}
        for moment in MOMENTS.values():
            moments[f"{moment}_ms"] = self._ms(moment)
        moments["ready_ms"] = [self._ms(bucket) for bucket in range(len(self._members))]
        return moments

    def _hook_last_gradients(self, arrived: Sequence[int]) -> None:
        """Note a bucket when the gradient comes that was its last in the lead-in."""
        self._remove_hooks()
        order = {index: position for position, index in enumerate(arrived)}
        for bucket, members in enumerate(self._members):
            if members and members <= order.keys():
                self._hook(max(members, key=order.__getitem__), self._note, bucket)

    def _hook(self, index: int, call: Callable[[int], None], argument: int) -> None:

        def hook(_: Tensor) -> None:
            call(argument)

        parameter = self._parameters[index]
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextmanager
    def _noted(self, stage: str) -> Iterator[None]:
        yield
        self._note(MOMENTS[stage])

    def _note(self, moment: str | int) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._steps[-1][moment] = event
        else:
            self._steps[-1][moment] = time.perf_counter()

    def _ms(self, moment: str | int) -> list[float]:
        """Return a moment of each step in ms, without the lead-in; the device has finished."""
        steps = self._steps[1:]
        if not all(moment in step for step in steps):
            return []
        if self._on_gpu:
            return [step[START].elapsed_time(step[moment]) for step in steps]
        return [(step[moment] - step[START]) * 1e3 for step in steps]
