"""The phases of a calibration: the last of a training cell, because replicas drift apart in them."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
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
# What `timeline` may take, on CPU workers as a share of benchmark.max_seconds: a cell with longer steps has none.
USUAL_GPU_MS, USUAL_CPU_SHARE = 500.0, 0.025
TIMELINE_MS, EXCHANGES_MS, INTERFERENCE_MS = 600.0, 200.0, 750.0
ALL_MS = 1400.0  # what `all` may take, as calculated from the steps: what does not fit is left out
FEWEST_STEPS, MOST_STEPS = 2, 10  # of a window
# Steps of each window of A B B A. Those of GPUs scatter so little that, where two take too long, one is enough.
USUAL_BESIDE, FEWEST_BESIDE = 2, {"cuda": 1, "cpu": 2}
LEAD_INS_OF_ABBA = 3  # its two B are one window
FEWEST_CALLS, MOST_CALLS = 3, 50  # of a collective of one size
CALLS_BEFORE = (
    3  # of these: the first connects, the second says how many fit, the third is a lead-in
)
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
TOO_LONG = "steps take so long that there is no time for enough of them"


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
        began = time.perf_counter()
        buckets = self.training.strategy.buckets()
        self.plan(buckets)
        windows = 1 if cell.strategy["name"] == "none" else 2
        budget_ms = self._timeline_ms(level, windows)
        if self.training.graphs:
            self.unseen(windows)
        elif windows * (1 + FEWEST_STEPS) * self.step_ms <= budget_ms:
            self.timeline(buckets, windows, budget_ms)
        if level == ALL and self.ranks.world_size > 1:
            exchanges = self.bucket_exchange(buckets, began)
            self.interference(exchanges, ALL_MS - self._elapsed_ms(began))

    def _timeline_ms(self, level: str, windows: int) -> float:
        """Return what a timeline may take: of `all`, so that what follows has the time that it needs at least, if it can."""
        cell = self.training.cell
        if level != ALL:
            share_ms = 1e3 * USUAL_CPU_SHARE * float(cell.benchmark["max_seconds"])
            return USUAL_GPU_MS if cell.device == "cuda" else share_ms
        alone = self.ranks.world_size == 1
        most_ms = ALL_MS if alone else ALL_MS - EXCHANGES_MS
        fewest_ms = windows * (1 + FEWEST_STEPS) * self.step_ms
        after_ms = (
            [] if alone else [self._abba_ms(count) for count in (USUAL_BESIDE, self._fewest_beside)]
        )
        budget_ms = next((most_ms - ms for ms in after_ms if most_ms - ms >= fewest_ms), most_ms)
        return max(min(TIMELINE_MS, budget_ms), fewest_ms) if fewest_ms <= most_ms else 0.0

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

    def timeline(
        self, buckets: Sequence[SentBucket] | None, windows: int, budget_ms: float
    ) -> None:
        """Observe steps without exchange, and with it."""
        began = time.perf_counter()
        observed = Timeline(self.training, buckets)
        compilation = Compilation(self.training.cell.compiled)
        for exchange in (False, True)[:windows]:
            left_ms = budget_ms - self._elapsed_ms(began)
            fitting = int(left_ms / (windows - exchange) / self.step_ms) - 1
            steps = min(MOST_STEPS, max(FEWEST_STEPS, fitting))
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
            self.reporter.line(
                Kind.TIMELINE, exchange=exchange, steps=steps, unknown=unknown, **seen
            )

    def unseen(self, windows: int) -> None:
        """Write that no moment of a step is known."""
        names = [*(f"{moment}_ms" for moment in LEFT_BY.values()), "ready_ms"]
        unknown = dict.fromkeys(names, REPLAYED)
        seen: dict[str, list[float]] = {name: [] for name in names}
        for exchange in (False, True)[:windows]:
            self.reporter.line(Kind.TIMELINE, exchange=exchange, steps=0, unknown=unknown, **seen)

    def bucket_exchange(
        self, buckets: Sequence[SentBucket] | None, began: float
    ) -> list[dict[str, Any]]:
        """Time collectives as they exchange one bucket. Return a row for each size, with its median in ms.

        The last size, above all buckets, is left out where time is up: `began` is when the calibration did, by this rank's clock.
        """
        self.reporter.phase("bucket exchange")
        sent = [(one.sent_bytes, one.dtype) for one in buckets or () if one.sent_bytes]
        largest = max(sent, default=None)
        exchange = largest and self.training.strategy.bucket_exchange(*largest)
        if not largest or not exchange:
            self.reporter.line(Kind.BUCKET_EXCHANGE, operation=None, rows=[], unknown=NO_COLLECTIVE)
            return []
        sizes = sorted({(size, largest[1]) for size in SMALLEST_BYTES} | set(sent))
        budget_ms = EXCHANGES_MS / (len(sizes) + 1)
        rows = [self._collective(*size, budget_ms) for size in sizes]
        expected_ms = TIMES_THE_LARGEST * (CALLS_BEFORE + FEWEST_CALLS) * self._median_ms(rows[-1])
        if expected_ms <= ALL_MS - self._elapsed_ms(began):
            rows.append(self._collective(TIMES_THE_LARGEST * largest[0], largest[1], budget_ms))
        self.reporter.line(Kind.BUCKET_EXCHANGE, operation=exchange.operation, rows=rows)
        return [row | {"median_ms": self._median_ms(row)} for row in rows]

    def _median_ms(self, row: dict[str, Any]) -> float:
        return statistics.median(self.ranks.slowest(row["ms"]))

    def _collective(self, size_bytes: int, dtype: str, budget_ms: float) -> dict[str, Any]:
        """Return a row with the ms of calls that were enqueued while the device was held."""
        exchange = self.training.strategy.bucket_exchange(size_bytes, dtype)
        assert exchange is not None
        (once_ms,) = self.ranks.slowest(self.clock.block(exchange.run, 1, self.reporter.beat).ms)
        calls = min(MOST_CALLS, max(FEWEST_CALLS, int(budget_ms / once_ms)))
        held = self.ranks.device.type == "cuda"

        def run() -> None:
            nonlocal held
            if held:  # by the lead-in
                torch.cuda._sleep(int((HOLD_MS + calls * HOLD_MS_PER_CALL) * CYCLES_PER_MS))
                held = False
            exchange.run()

        return {
            "bytes": size_bytes,
            "dtype": dtype,
            "ms": self.clock.block(run, calls, self.reporter.beat).ms,
        }

    def interference(self, exchanges: Sequence[dict[str, Any]], left_ms: float) -> None:
        """Step without exchange, alone and beside collectives, in the order A B B A."""
        self.reporter.phase("interference")
        is_bound = self.ranks.device.type == "cuda" and self.launch_ms > LAUNCH_BOUND * self.step_ms
        reasons = {
            REPLAYED: bool(self.training.graphs),
            LAUNCHES: is_bound,
            NO_COLLECTIVE: not exchanges,
            TOO_LONG: self._abba_ms(self._fewest_beside) > left_ms,
        }
        if why := next((said for said, holds in reasons.items() if holds), ""):
            self.reporter.line(Kind.INTERFERENCE, operation=None, rows=[], unknown=why)
            return
        most_ms = SHARE_BESIDE * self.step_ms
        chosen = max(
            [one for one in exchanges if one["median_ms"] <= most_ms] or exchanges[:1],
            key=lambda one: one["bytes"],
        )
        calls = min(MOST_BESIDE, max(1, int(most_ms / chosen["median_ms"])))
        exchange = self.training.strategy.bucket_exchange(chosen["bytes"], chosen["dtype"])
        assert exchange is not None
        budget_ms = min(INTERFERENCE_MS, left_ms)
        fitting = [
            count
            for count in range(self._fewest_beside, MOST_STEPS + 1)
            if self._abba_ms(count) <= budget_ms
        ]
        steps = max(fitting, default=self._fewest_beside)
        observed, alone_ms, beside_ms, comm_ms = Timeline(self.training, None), [], [], []
        with self.training.without_exchange():
            for with_calls, count in ((False, steps), (True, 2 * steps), (False, steps)):
                beside = Beside(exchange.run, calls, self.ranks.device) if with_calls else None
                ms = observed.observe(self.clock, count, self.reporter.beat, beside)["update_ms"]
                if beside is None:
                    alone_ms += ms
                else:
                    beside_ms += ms
                    comm_ms += [min(pair) for pair in zip(beside.ms()[1:], ms, strict=True)]
                    beside.close()
        row = {
            "bytes": chosen["bytes"],
            "calls": calls,
            "comm_alone_ms": calls * chosen["median_ms"],
        }
        row |= {"alone_ms": alone_ms, "beside_ms": beside_ms, "comm_ms": comm_ms}
        self.reporter.line(Kind.INTERFERENCE, operation=exchange.operation, rows=[row])

    @property
    def _fewest_beside(self) -> int:
        return FEWEST_BESIDE[self.ranks.device.type]

    def _abba_ms(self, steps: int) -> float:
        """Return what A B B A takes with so many steps of each window, at most: collectives may hold up the steps beside them."""
        return self.step_ms * (LEAD_INS_OF_ABBA + 4 * steps + SHARE_BESIDE * (1 + 2 * steps))

    def _elapsed_ms(self, began: float) -> float:
        """Return the time since each rank's `began`, equal on all. Collective."""
        (elapsed,) = self.ranks.slowest([time.perf_counter() - began])
        return 1e3 * elapsed


# Collectives that run beside steps, and that nothing in a step waits for.


class Beside:
    """A number of calls beside each step: on a stream of their own on a GPU, in a thread on a CPU worker."""

    def __init__(self, run: Callable[[], None], calls: int, device: torch.device) -> None:
        self._run, self._calls = run, calls
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1) if self._stream is None else None
        self._begun: Future[float] | None = None
        self._events: list[tuple[Any, Any]] = []
        self._ms: list[float] = []

    def start(self) -> None:
        """Begin the calls, not before the device has come to this place."""
        if self._stream is None:
            assert self._thread is not None
            self._begun = self._thread.submit(self._timed)
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            first.record()
            for _ in range(self._calls):
                self._run()
            last.record()
        self._events.append((first, last))

    def end(self) -> None:
        """Let what comes next wait for the calls."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        elif self._begun is not None:
            self._ms.append(self._begun.result())

    def ms(self) -> list[float]:
        """Return how long the calls beside each step took, also those of lead-ins; the device has finished."""
        return (
            self._ms
            if self._stream is None
            else [first.elapsed_time(last) for first, last in self._events]
        )

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _timed(self) -> float:
        begun = time.perf_counter()
        for _ in range(self._calls):
            self._run()
        return (time.perf_counter() - begun) * 1e3


# When the moments inside a step come: the loss, the last gradient of each bucket, the end of backward, exchange and update.


# What a stage of a step leaves when it ends (trainers.step marks the stages).
LEFT_BY = {
    "forward": "forward",
    "backward": "backward",
    "exchange": "exchange",
    "optimizer": "update",
}
START = "start"
Moments = dict[str | int, Any]  # of one step: by name, or by number of a bucket


class Timeline:
    """Observes steps of one training."""

    def __init__(self, training: Training, buckets: Sequence[SentBucket] | None) -> None:
        """`buckets` are those whose gradients are awaited; None: there are none."""
        self._training, self._on_gpu = training, training.device.type == "cuda"
        numbers = {id(parameter): number for number, parameter in enumerate(training.parameters)}
        self._members = [
            {numbers[id(one)] for one in bucket.parameters} for bucket in buckets or ()
        ]
        self._steps: list[Moments] = []
        self._hooks: list[RemovableHandle] = []

    def observe(
        self, clock: Clock, steps: int, beat: Callable[[], None], beside: Beside | None = None
    ) -> dict[str, Any]:
        """Step; return ms after each step's start, as lists [step]: {forward_ms, backward_ms, exchange_ms, update_ms, ready_ms}.

        `ready_ms` is [bucket][step]. `beside` works meanwhile, and the next step waits for it. The lead-in shows which gradient
        of a bucket comes last; a bucket that lacks one has no times. Collective.
        """
        arrived: list[int] = []
        self._steps = []
        everyone = range(len(self._training.parameters)) if self._members else ()
        self._hook_on({number: [arrived.append] for number in everyone})

        def step() -> None:
            if len(self._steps) == 1:
                self._hook_on(self._last_gradients(arrived))
            self._steps.append({})
            self._pass(START)
            if beside:
                beside.start()
            self._training.step()
            if beside:
                beside.end()

        usual, self._training.mark = self._training.mark, self._passed
        try:
            clock.block(step, steps, beat)
        finally:
            self._training.mark = usual
            self._hook_on({})
        return self._read(self._steps[1:])

    def _last_gradients(self, arrived: Sequence[int]) -> dict[int, list[Callable[[int], None]]]:
        """Return what to do when a parameter's gradient comes: pass the buckets of which it is the last."""
        place = {number: place for place, number in enumerate(arrived)}
        last: dict[int, list[Callable[[int], None]]] = {}
        for bucket, members in enumerate(self._members):
            if members and members <= place.keys():
                found = max(members, key=lambda number: place[number])
                last.setdefault(found, []).append(functools.partial(self._pass_bucket, bucket))
        return last

    def _hook_on(self, wanted: dict[int, list[Callable[[int], None]]]) -> None:
        """Replace every hook: call functions with the number of the parameter when its gradient has been added up."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            self._training.parameters[number].register_post_accumulate_grad_hook(
                lambda _, call=call, number=number: call(number)
            )
            for number, calls in wanted.items()
            for call in calls
        ]

    @contextmanager
    def _passed(self, stage: str) -> Iterator[None]:
        yield
        self._pass(LEFT_BY[stage])

    def _pass_bucket(self, bucket: int, _: int) -> None:
        self._pass(bucket)

    def _pass(self, moment: str | int) -> None:
        """Note a moment of the step that runs."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._steps[-1][moment] = event
        else:
            self._steps[-1][moment] = time.perf_counter()

    def _read(self, steps: Sequence[Moments]) -> dict[str, Any]:
        """Return the moments of some steps in ms; the device has finished."""

        def ms(moment: str | int) -> list[float]:
            if not all(moment in step for step in steps):
                return []
            if self._on_gpu:
                return [step[START].elapsed_time(step[moment]) for step in steps]
            return [(step[moment] - step[START]) * 1e3 for step in steps]

        found: dict[str, Any] = {f"{moment}_ms": ms(moment) for moment in LEFT_BY.values()}
        return found | {"ready_ms": [ms(bucket) for bucket in range(len(self._members))]}
