"""`benchmark=throughput`: training steps on synthetic batches. METHOD.md defines every number that this produces."""

import itertools
from typing import Any

from benchmarks.rank.group import Ranks
from benchmarks.rank.reporter import Reporter
from benchmarks.rank.result import Block, Result
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.timing.clock import Clock
from benchmarks.training import as_asked, correctness, derive, exchange, stopping
from benchmarks.training.calibration.measure import Calibration
from conf.cell import Cell
from trainers import batches, models
from trainers.loaded_batches import LoadedBatches
from trainers.step import Training

# Windows into which the shortest warm-up is cut: its barriers and garbage collections then take little of it.
WARM_UP_WINDOWS = 4
# Iterations that hold the device to see how long it computes without launch gaps, and ms of the hold: twice what
# enqueuing a step takes, and some more.
HELD_ITERATIONS = 3
HOLD_LAUNCHES, HOLD_MORE_MS = 2, 5.0
DATA_ROUNDS = 3  # of A B B A, with and without a data loader
# One window of A B B A: ms, and iterations at least and at most.
EXPOSED_WINDOW_MS = 500.0
FEWEST_EXPOSED, MOST_EXPOSED = 3, 30


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective: every rank of the process group calls it with the same cell."""
    return TrainingBenchmark(cell, ranks, reporter).run()


class TrainingBenchmark:
    """One cell on this rank, phase by phase; another benchmark may use single phases."""

    def __init__(self, cell: Cell, ranks: Ranks, reporter: Reporter) -> None:
        self.ranks, self.reporter, self.clock = ranks, reporter, Clock(ranks)
        self.cell, self.options = cell, cell.benchmark
        reporter.phase("build")
        self.compilation = as_asked.Compilation(cell.optimize == "compile")
        self.training = Training(cell, ranks.device, ranks.rank)
        self.result = Result(model=models.sizes(self.training.parameters))
        self.on_device = self.training.batches  # those of a loader are drawn in the check
        self.step_ms = self.launch_ms = 0.0  # the medians that sizes of later windows follow

    def run(self) -> Result:
        """Run every phase, in an order in which none disturbs a later one. Return what only the ranks know."""
        self.warm_up()
        self.check()
        weights = as_asked.Weights(self.training)
        self.timed()
        self.reporter.phase("compare")
        self.result.checks |= weights.still(self.ranks)
        self.result.checks |= {f"timed_{name}": count for name, count in self.compilation.since().items()}
        if self.ranks.world_size > 1 and self.training.strategy.synchronous:
            self.result.checks["replicas_equal"] = correctness.replicas_equal(self.training, self.ranks)
        losses = self.ranks.gather([self.training.loss.item() if self.training.loss is not None else float("nan")])
        self.result.checks["losses"] = [loss for (loss,) in losses]
        self.result.metrics |= self.training.strategy.facts()
        self.result.checks |= exchange.words_used(self.training.strategy)
        if self.cell.data:
            self.data_cost()
        with self.training.with_batches(self.on_device):  # the rest is about compute and exchange, not about the loader
            self.without_data()
        self.training.strategy.close()
        return self.result

    def without_data(self) -> None:
        """Measure what a step and an exchange take where batches are at hand."""
        if self.ranks.device.type == "cuda":
            self.held()
        if self.ranks.world_size > 1:
            if self.exchange_alone():
                self.strategy_cost()  # last: replicas drift apart in it
        else:
            self.result.checks["own_work_alone"] = self.training.strategy.own_work_alone
            if self.training.strategy.own_work_alone:
                self.strategy_cost()  # what several GPUs pay beyond it is exposed communication
        Calibration(self.training, self.clock, self.ranks, self.reporter, self.step_ms, self.launch_ms).run()

    def block(self, purpose: str, iterations: int) -> tuple[Block, list[float]]:
        """Time a window of steps and write its samples at once. Return (this rank's, the slowest rank's ms)."""
        counted: list[tuple[int, int]] = []  # images and tokens so far, after each step

        def step() -> None:
            self.training.step()
            counted.append((self.training.images, self.training.tokens))

        block = self.clock.block(step, iterations, self.reporter.beat)
        images, tokens = (last - first for first, last in zip(counted[0], counted[-1], strict=True))
        facts: dict[str, Any] = {"tokens": tokens} if tokens else {}
        if isinstance(self.training.batches, LoadedBatches):
            facts["wait_ms"] = self.training.batches.waited_ms[-iterations:]  # every step draws one batch
        self.reporter.block(purpose, block, images, **facts)
        return block, self.ranks.slowest(block.ms)

    def warm_up(self) -> None:
        """Step until the step time is flat. The first step compiles, tunes and connects: it is timed and kept apart."""
        self.reporter.phase("first step")
        self.block("first", 1)
        self.reporter.phase("warm-up")
        fewest, seconds = max(2, int(self.options["warmup_iterations"]) // 2), 0.0
        window_ms = 1e3 * self.options["warmup_min_seconds"] / WARM_UP_WINDOWS
        slowest: list[float] = []
        while not derive.warmed_up(slowest, self.cell) and seconds < self.options["warmup_max_seconds"]:
            fitting = round(window_ms / statistics.median(slowest[-fewest:])) if slowest else fewest
            block, ms = self.block("warm-up", min(stopping.MOST_PER_WINDOW, max(fewest, fitting)))
            slowest += ms
            seconds += self.ranks.slowest([block.host_ms])[0] / 1e3
        self.step_ms = statistics.median(slowest[-max(2, len(slowest) // 4) :])

    def check(self) -> None:
        """Find out once, before the timed windows, whether what runs is what was asked."""
        self.reporter.phase("check")
        training, checks = self.training, self.result.checks
        checks |= self.compilation.since()
        drawn = [next(training.batches) for _ in range(batches.DISTINCT)]
        self.on_device = itertools.cycle(drawn)
        checks |= as_asked.batches(drawn, self.ranks)
        with as_asked.arithmetic(training) as arithmetic:
            if self.ranks.world_size > 1 and training.strategy.synchronous and training.strategy.exact:
                checks |= correctness.gradient(training, drawn[0], self.ranks)
            else:
                with training.strategy.without_exchange():
                    training.backward(drawn[0])
        checks["arithmetic"] = arithmetic
        checks["trained_bytes"] = as_asked.trained_bytes(training)
        self.compilation.since()  # steps without exchange may be graphs of their own

    def timed(self) -> None:
        """Time windows of steps until the interval of images/sec is narrow enough, or time or iterations run out."""
        self.reporter.phase("timed")
        options = self.options
        iterations = stopping.window_iterations(self.step_ms)
        by_window: list[list[float]] = []  # ms of each iteration on its slowest rank
        done = 0
        totals = [0.0] * self.ranks.world_size  # ms of each rank
        launch_ms: list[float] = []
        while True:
            iterations = min(iterations, int(options["max_iterations"]) - done)
            block, ms = self.block("timed", iterations)
            gathered = self.ranks.gather([sum(block.ms), block.launch_ms])
            by_window.append(ms)
            done += len(ms)
            totals = [total + values[0] for total, values in zip(totals, gathered, strict=True)]
            launch_ms.append(max(values[1] for values in gathered))
            if stopping.enough(by_window, max(totals), options):
                break
        self.step_ms = statistics.median([one for window in by_window for one in window])
        self.launch_ms = statistics.median(launch_ms)

    def held(self) -> None:
        """Time steps that are enqueued while the device is held: what it computes without launch gaps."""
        self.reporter.phase("held")
        hold_ms = HOLD_LAUNCHES * self.launch_ms + HOLD_MORE_MS
        held = [self.clock.held(self.training.step, hold_ms) for _ in range(HELD_ITERATIONS)]
        self.reporter.line(Kind.HELD, ms=held)

    def exchange_alone(self) -> bool:
        """Time one gradient synchronisation without compute, on gradients of the model's shapes, and its references.

        Return whether there was one to time.
        """
        strategy, iterations = self.training.strategy, int(self.options["exchange_iterations"])
        if not iterations:
            return False
        common = (self.clock, self.ranks, self.reporter)
        with strategy.gradients_only():
            alone = strategy.exchange_alone(self.training.parameters)
            if alone is None:
                return False
            used = [parameter.grad is not None for parameter in self.training.parameters]
            exchange.timed(strategy, alone, self.result.model["gradient_bytes"], iterations, *common)
            self.result.checks |= exchange.once_more(strategy, alone, self.training.parameters, used, self.ranks)
            exchange.in_a_stream(alone, iterations, self.clock, self.reporter)
            exchange.references(strategy, int(self.options["limit_iterations"]), *common)
        return True

    def _of_abba(self) -> int:
        """Return the steps of one window of A B B A."""
        return min(MOST_EXPOSED, max(FEWEST_EXPOSED, round(EXPOSED_WINDOW_MS / self.step_ms)))

    def data_cost(self) -> None:
        """Time steps with the loader and the same steps on batches that lie on the device, in the order A B B A."""
        loader, iterations = self.training.batches, self._of_abba()
        assert isinstance(loader, LoadedBatches)
        self.reporter.phase("data")
        for number in range(4 * DATA_ROUNDS):
            if number % 4 in (0, 3):
                # Meanwhile a loader gets ahead, as far as it keeps batches ready: use these up first.
                self.block("using up", max(iterations, 2 * loader.ready))
                self.block("with loader", iterations)
            else:
                with self.training.with_batches(self.on_device):
                    self.block("without loader", iterations)

    def strategy_cost(self) -> None:
        """Time steps with the strategy and steps without exchange, in the same processes, in the order A B B A."""
        rounds = int(self.options["exposed_rounds"])
        if not rounds:
            return
        self.reporter.phase("exposed")
        iterations = self._of_abba()
        for number in range(4 * rounds):
            if number % 4 in (0, 3):
                self.block("with exchange", iterations)
            else:
                with self.training.strategy.without_exchange():
                    self.block("without exchange", iterations)
