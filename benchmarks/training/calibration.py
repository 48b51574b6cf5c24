"""The phases of a calibration: the last of a training cell, because replicas drift apart in them.

It observes when the moments of a step come, and how long one bucket's collective takes by itself.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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
USUAL = TIMELINE  # what a cell has that does not say
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


@dataclass(frozen=True)
class Calibration:
    """What every phase of one cell's calibration works with. All methods are collective."""

    training: Training
    clock: Clock
    ranks: Ranks
    reporter: Reporter
    step_ms: float  # equal on every rank

    def run(self) -> None:
        """Measure what `benchmark.calibrate` asks for."""
        cell = self.training.cell
        level = cell.benchmark.get("calibrate", USUAL)
        if level == NONE:
            return
        self.reporter.phase("timeline")
        began = time.perf_counter()
        buckets = self.training.strategy.buckets()
        self.plan(buckets)
        windows = 1 if cell.strategy["name"] == "none" else 2
        budget_ms = self._timeline_budget_ms(level, windows)
        if self.training.graphs:
            self.unseen(windows)
        elif windows * (1 + FEWEST_STEPS) * self.step_ms <= budget_ms:
            self.timeline(buckets, windows, budget_ms)
        if level == ALL and self.ranks.world_size > 1:
            self.bucket_exchange(buckets, began)

    def _timeline_budget_ms(self, level: str, windows: int) -> float:
        """Return what a timeline may take."""
        cell = self.training.cell
        if level != ALL:
            if cell.device == "cuda":
                return USUAL_GPU_MS
            return 1e3 * USUAL_CPU_SHARE * float(cell.benchmark["max_seconds"])
        fewest_ms = windows * (1 + FEWEST_STEPS) * self.step_ms
        most_ms = ALL_MS
        if self.ranks.world_size > 1:
            most_ms -= EXCHANGES_MS
        if fewest_ms > most_ms:
            return 0.0
        return max(min(TIMELINE_MS, most_ms), fewest_ms)

    def plan(self, buckets: Sequence[SentBucket] | None) -> None:
        """Write what the exchange sends together."""
        rows = []
        for bucket in buckets or ():
            row = {
                "bytes": bucket.sent_bytes,
                "dtype": bucket.dtype,
                "gradient_bytes": bucket.gradient_bytes,
                "arrays": len({id(parameter) for parameter in bucket.parameters}),
            }
            rows.append(row)
        unknown = {} if buckets else {"unknown": NO_BUCKETS}
        self.reporter.line(Kind.BUCKETS, rows=rows, **unknown)

    def timeline(
        self, buckets: Sequence[SentBucket] | None, windows: int, budget_ms: float
    ) -> None:
        """Observe steps without exchange, and with it."""
        began = time.perf_counter()
        observer = StepObserver(self.training, buckets)
        compilation = Compilation(self.training.cell.compiled)
        for number in range(windows):
            exchange = number == 1
            left_ms = budget_ms - self._elapsed_ms(began)
            fitting = int(left_ms / (windows - number) / self.step_ms) - 1
            steps = min(MOST_STEPS, max(FEWEST_STEPS, fitting))
            with nullcontext() if exchange else self.training.without_exchange():
                moments = observer.observe(self.clock, steps, self.reporter.beat)
            unknown = {}
            if any(compilation.since().values()):
                unknown = dict.fromkeys(moments, RECOMPILED)
                moments = {name: [] for name in moments}
            elif not buckets:
                unknown = {"ready_ms": NO_BUCKETS}
            elif not all(moments["ready_ms"]):
                unknown = {"ready_ms": NO_GRADIENT}
            self.reporter.line(
                Kind.TIMELINE, exchange=exchange, steps=steps, unknown=unknown, **moments
            )

    def unseen(self, windows: int) -> None:
        """Write that no moment of a step is known."""
        names = [f"{moment}_ms" for moment in MOMENTS.values()]
        names.append("ready_ms")
        unknown = dict.fromkeys(names, REPLAYED)
        moments: dict[str, list[float]] = {name: [] for name in names}
        for number in range(windows):
            self.reporter.line(
                Kind.TIMELINE, exchange=number == 1, steps=0, unknown=unknown, **moments
            )

    def bucket_exchange(self, buckets: Sequence[SentBucket] | None, began: float) -> None:
        """Time collectives as they exchange one bucket.

        The last size, above all buckets, is left out where time is up: `began` is when the
        calibration did, by this rank's clock.
        """
        self.reporter.phase("bucket exchange")
        strategy = self.training.strategy
        sent = [(bucket.sent_bytes, bucket.dtype) for bucket in buckets or () if bucket.sent_bytes]
        exchange = strategy.bucket_exchange(*max(sent)) if sent else None
        if exchange is None:
            self.reporter.line(Kind.BUCKET_EXCHANGE, operation=None, rows=[], unknown=NO_COLLECTIVE)
            return
        largest_bytes, dtype = max(sent)
        sizes = sorted({(size, dtype) for size in SMALLEST_BYTES} | set(sent))
        budget_ms = EXCHANGES_MS / (len(sizes) + 1)
        rows = []
        for size_bytes, size_dtype in sizes:
            rows.append(self._time_collective(size_bytes, size_dtype, budget_ms))
        calls = CALLS_BEFORE + FEWEST_CALLS
        expected_ms = TIMES_THE_LARGEST * calls * self._median_ms(rows[-1])
        if expected_ms <= ALL_MS - self._elapsed_ms(began):
            rows.append(self._time_collective(TIMES_THE_LARGEST * largest_bytes, dtype, budget_ms))
        self.reporter.line(Kind.BUCKET_EXCHANGE, operation=exchange.operation, rows=rows)

    def _median_ms(self, row: dict[str, Any]) -> float:
        return statistics.median(self.ranks.slowest(row["ms"]))

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

    def __init__(self, training: Training, buckets: Sequence[SentBucket] | None) -> None:
        """`buckets` are those whose gradients are awaited; None: there are none."""
        self._training, self._on_gpu = training, training.device.type == "cuda"
        numbers = {id(parameter): number for number, parameter in enumerate(training.parameters)}
        self._members: list[set[int]] = []  # parameters of each bucket, by number
        for bucket in buckets or ():
            self._members.append({numbers[id(parameter)] for parameter in bucket.parameters})
        self._steps: list[dict[str | int, Any]] = []  # moments, by name or number of a bucket
        self._hooks: list[RemovableHandle] = []

    def observe(
        self,
        clock: Clock,
        steps: int,
        beat: Callable[[], None],
    ) -> dict[str, Any]:
        """Step; return ms after each step's start: {forward_ms, backward_ms, exchange_ms, …}.

        They are lists by step; `ready_ms` is [bucket][step]. The lead-in shows which gradient of a
        bucket comes last; a bucket that lacks one has no times. Collective.
        """
        arrived: list[int] = []
        self._steps = []
        if self._members:
            for number in range(len(self._training.parameters)):
                self._hook(number, arrived.append, number)

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
        return self._read(self._steps[1:])

    def _hook_last_gradients(self, arrived: Sequence[int]) -> None:
        """Note a bucket when the gradient comes that was its last in the lead-in."""
        self._remove_hooks()
        order = {number: position for position, number in enumerate(arrived)}
        for bucket, members in enumerate(self._members):
            if members and members <= order.keys():
                self._hook(max(members, key=order.__getitem__), self._note, bucket)

    def _hook(self, number: int, call: Callable[[int], None], argument: int) -> None:

        def hook(_: Tensor) -> None:
            call(argument)

        parameter = self._training.parameters[number]
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

    def _read(self, steps: Sequence[dict[str | int, Any]]) -> dict[str, Any]:
        """Return the moments of some steps in ms; the device has finished."""

        def ms(moment: str | int) -> list[float]:
            if not all(moment in step for step in steps):
                return []
            if self._on_gpu:
                return [step[START].elapsed_time(step[moment]) for step in steps]
            return [(step[moment] - step[START]) * 1e3 for step in steps]

        moments: dict[str, Any] = {f"{moment}_ms": ms(moment) for moment in MOMENTS.values()}
        moments["ready_ms"] = [ms(bucket) for bucket in range(len(self._members))]
        return moments
