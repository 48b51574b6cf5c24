"""`benchmark=throughput`: training steps on synthetic batches. METHOD.md defines every number that this produces."""

import itertools
import math
from typing import Any

from benchmarks.rank.ranks import Block, Ranks, Reporter, Result
from benchmarks.record import Kind
from benchmarks.timing import compilation, statistics
from benchmarks.timing.clock import Clock
from benchmarks.training import correctness, derive, exchange, request
from benchmarks.training import correctness as as_asked
from benchmarks.training import correctness as replays
from benchmarks.training import request as stopping
from benchmarks.training.calibration import Calibration
from benchmarks.training.correctness import Kept
from conf.cell import Cell
from trainers import batches, models
from trainers.batches import LoadedBatches
from trainers.step import Training
from trainers.strategy import Strategy

# The second window of a warm-up lasts as long as the shortest warm-up, and shows whether a step gets longer under load. Those
# that follow it, where the step time still falls, are as long as this share of it.
WARM_UP_WINDOWS = 4
MOST_WARMING = 2000  # iterations of one of them
# Iterations that hold the device to see how long it computes without launch gaps, and ms of the hold: twice what
# enqueuing a step takes, and some more.
HELD_ITERATIONS = 3
HOLD_LAUNCHES, HOLD_MORE_MS = 2, 5.0
DATA_ROUNDS = 3  # of A B B A, with and without a data loader


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective: every rank of the process group calls it with the same cell."""
    return TrainingBenchmark(cell, ranks, reporter).run()


class TrainingBenchmark:
    """One cell on this rank, phase by phase; another benchmark may use single phases."""

    def __init__(self, cell: Cell, ranks: Ranks, reporter: Reporter) -> None:
        self.ranks, self.reporter, self.clock = ranks, reporter, Clock(ranks)
        self.cell, self.options = cell, cell.benchmark
        reporter.phase("build")
        self.compilation = compilation.Compilation(cell.compiled)
        self.training = Training(cell, ranks.device, ranks.rank)
        self.result = Result(model=models.sizes(self.training.parameters))
        self.on_device = self.training.batches  # those of a loader are drawn in the check
        self.step_ms = self.launch_ms = 0.0  # the medians that sizes of later windows follow
        self.longest: list[float] = []  # ms of the steps of the longest window of the warm-up
        self.kept: Kept | None = (
            None  # steps without exchange stand between the timed windows, and leave no trace
        )

    def run(self) -> Result:
        """Run every phase, in an order in which none disturbs a later one. Return what only the ranks know."""
        self.warm_up()
        if self._may_interleave():
            self.kept = Kept.of(self.training, self.ranks)
        self.check()
        weights = as_asked.Weights(self.training)
        self.timed()
        self.reporter.phase("compare")
        self.result.checks |= weights.still(self.ranks)
        self.result.checks |= replays.counted(self.training, self.ranks)
        self.result.checks |= {
            f"timed_{name}": count for name, count in self.compilation.since().items()
        }
        if self.ranks.world_size > 1 and self.training.strategy.equal_every:
            self.result.checks["replicas_equal"] = self.replicas_equal()
        losses = self.ranks.gather(
            [self.training.loss.item() if self.training.loss is not None else float("nan")]
        )
        self.result.checks["losses"] = [loss for (loss,) in losses]
        self.result.metrics |= self.training.strategy.facts()
        self.result.checks |= exchange.words_used(self.training.strategy)
        if self.cell.data:
            self.data_cost()
        with self.training.with_batches(
            self.on_device
        ):  # the rest is about compute and exchange, not about the loader
            self.without_data()
        self.training.close()
        return self.result

    def replicas_equal(self) -> bool:
        """Return whether all replicas are equal after one of as many steps as the strategy needs."""
        for _ in range(self.training.strategy.equal_every - 1):
            if correctness.replicas_equal(self.training, self.ranks):
                return True
            self.training.step(next(self.training.batches))
        return correctness.replicas_equal(self.training, self.ranks)

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
        Calibration(
            self.training, self.clock, self.ranks, self.reporter, self.step_ms, self.launch_ms
        ).run()

    def block(self, purpose: str, iterations: int, **facts: Any) -> tuple[Block, list[float]]:
        """Time a window of steps and write its samples, and `facts`, at once. Return (this rank's, the slowest rank's ms)."""
        counted: list[tuple[int, int]] = []  # images and tokens so far, after each step

        def step() -> None:
            self.training.step()
            counted.append((self.training.images, self.training.tokens))

        block = self.clock.block(step, iterations, self.reporter.beat)
        images, tokens = (last - first for first, last in zip(counted[0], counted[-1], strict=True))
        facts |= {"tokens": tokens} if tokens else {}
        if isinstance(self.training.batches, LoadedBatches):
            facts["wait_ms"] = self.training.batches.waited_ms[
                -iterations:
            ]  # every step draws one batch
        self.reporter.block(purpose, block, images, **facts)
        return block, self.ranks.slowest(block.ms)

    def warm_up(self) -> None:
        """Step until the step time is flat. The first step compiles, tunes and connects: it is timed and kept apart."""
        self.reporter.phase("first step")
        self.block("first", 1)
        self.reporter.phase("warm-up")
        fewest, seconds = max(2, int(self.options["warmup_iterations"]) // 2), 0.0
        least_ms = 1e3 * self.options["warmup_min_seconds"]
        slowest: list[float] = []
        while (
            not derive.warmed_up(slowest, self.cell, least_ms)
            and seconds < self.options["warmup_max_seconds"]
        ):
            window_ms = max(least_ms - math.fsum(slowest), least_ms / WARM_UP_WINDOWS)
            # By the shortest step, so that the second window is not a step short of the least time.
            fitting = math.ceil(window_ms / min(slowest[-fewest:])) if slowest else fewest
            block, ms = self.block(
                "warm-up", min(MOST_WARMING, max(fewest, fitting)), least_ms=least_ms
            )
            slowest += ms
            seconds += self.ranks.slowest([block.host_ms])[0] / 1e3
            self.longest = max(self.longest, ms, key=len)
        self.step_ms = statistics.median(slowest[-max(2, len(slowest) // 4) :])

    def check(self) -> None:
        """Find out once, before the timed windows, whether what runs is what was asked."""
        self.reporter.phase("check")
        training, checks = self.training, self.result.checks
        checks |= self.compilation.found(self.ranks)
        if rows := self.compilation.seconds():
            self.result.tables["compiling"] = {"rows": rows}
        drawn = [next(training.batches) for _ in range(batches.DISTINCT)]
        self.on_device = itertools.cycle(drawn)
        checks |= as_asked.batches(drawn, self.ranks)
        checks |= replays.differences(training, drawn, self.ranks)
        with as_asked.arithmetic(training) as arithmetic:
            if (
                self.ranks.world_size > 1
                and training.strategy.returns_mean
                and training.strategy.exact
            ):
                checks |= correctness.gradient(training, drawn[0], self.ranks)
            else:
                with training.without_exchange():
                    training.backward(drawn[0])
        checks["arithmetic"] = arithmetic
        checks["trained_bytes"] = as_asked.trained_bytes(training)
        self.compilation.since()  # steps without exchange may be graphs of their own

    def _may_interleave(self) -> bool:
        """Return whether steps without exchange may stand between the timed windows (METHOD.md, "Exposed communication")."""
        strategy = self.training.strategy
        if not request.rounds_between(self.options) or not strategy.in_lockstep or self.cell.data:
            return False
        if self.ranks.world_size == 1:
            has_cost = strategy.own_work_alone
        else:
            has_cost = (
                self.options["exchange_iterations"]
                and type(strategy).exchange_alone != Strategy.exchange_alone
            )
        # All ranks see the same: steps get longer under load at a GPU's power cap.
        longer = self.ranks.device.type == "cuda" and stopping.gets_longer(self.longest)
        return bool(has_cost) and not longer

    def timed(self) -> None:
        """Time windows of steps until the interval of images/sec is narrow enough, or time or iterations run out."""
        self.reporter.phase("timed")
        options = self.options
        rounds = request.rounds_between(options) if self.kept else 0
        iterations = (
            stopping.timed_abba_iterations(self.step_ms, options, rounds)
            if rounds
            else stopping.window_iterations(self.step_ms)
        )
        by_window: list[list[float]] = []  # ms of each iteration on its slowest rank
        done = 0
        totals = [0.0] * self.ranks.world_size  # ms of each rank
        launch_ms: list[float] = []
        while True:
            if self.kept and len(by_window) % 2 and len(by_window) < request.WITH_IT * rounds:
                self.reporter.phase("exposed")
                with self.kept.unchanged():
                    self._without_exchange()
                    self._without_exchange()
                self.reporter.phase("timed")
            iterations = min(iterations, int(options["max_iterations"]) - done)
            block, ms = self.block("timed", iterations)
            gathered = self.ranks.gather([sum(block.ms), block.launch_ms])
            by_window.append(ms)
            done += len(ms)
            totals = [total + values[0] for total, values in zip(totals, gathered, strict=True)]
            launch_ms.append(max(values[1] for values in gathered))
            if stopping.enough(by_window, max(totals), options, rounds):
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
            exchange.timed(
                strategy, alone, self.result.model["gradient_bytes"], iterations, *common
            )
            self.result.checks |= exchange.once_more(
                strategy, alone, self.training.parameters, used, self.ranks
            )
            exchange.in_a_stream(alone, iterations, self.clock, self.reporter)
            exchange.references(strategy, int(self.options["limit_iterations"]), *common)
        return True

    def data_cost(self) -> None:
        """Time steps with the loader and the same steps on batches that lie on the device, in the order A B B A."""
        loader, iterations = self.training.batches, stopping.abba_iterations(self.step_ms)
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
        """Time steps with the strategy and steps without exchange, in the same processes, in the order A B B A.

        Where the timed windows were the steps with it, all are timed already.
        """
        rounds = int(self.options["exposed_rounds"])
        if self.kept or not rounds:
            return
        self.reporter.phase("exposed")
        for number in range(4 * rounds):
            if number % 4 in (0, 3):
                self.block("with exchange", stopping.abba_iterations(self.step_ms))
            else:
                self._without_exchange()

    def _without_exchange(self) -> None:
        """Time a window of steps without exchange."""
        with self.training.without_exchange():
            self.block("without exchange", stopping.abba_iterations(self.step_ms))
