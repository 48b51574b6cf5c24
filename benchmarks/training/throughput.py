"""`benchmark=throughput`: training steps on synthetic batches. METHOD.md defines its numbers."""

import itertools
import math
from typing import Any

import psutil
import torch

from benchmarks.path_facts import WatchedUpdate
from benchmarks.rank.ranks import Block, Ranks, Reporter, Result
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.timing.clock import Clock
from benchmarks.timing.compilation import Compilation
from benchmarks.training import correctness, derive, exchange, request, step_facts
from benchmarks.training.calibration import Calibration
from benchmarks.training.correctness import Snapshot
from conf.cell import Cell
from trainers import models
from trainers.batches import DISTINCT, Batch, LoadedBatches
from trainers.step import Training
from trainers.strategy import Strategy

# The second window of a warm-up lasts as long as the shortest warm-up, and shows whether a step
# gets longer under load. Those that follow it, where the step time still falls, are as long as this
# share of it.
WARM_UP_WINDOWS = 4
MOST_WARMING = 2000  # iterations of one of them
# Iterations that are launched ahead to see how long the device computes without launch gaps, and ms
# of the delay: twice what enqueuing a step takes, and some more.
HELD_ITERATIONS = 3
DELAY_LAUNCHES, DELAY_MORE_MS = 2, 5.0
GIB = 2**30
DATA_ROUNDS = 3  # of A B B A, with and without a data loader


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective: every rank of the process group calls it with the same cell."""
    return TrainingBenchmark(cell, ranks, reporter).run()


class TrainingBenchmark:
    """One cell on this rank, phase by phase."""

    def __init__(self, cell: Cell, ranks: Ranks, reporter: Reporter) -> None:
        self.ranks, self.reporter, self.clock = ranks, reporter, Clock(ranks)
        self.cell, self.options = cell, cell.benchmark
        reporter.phase("build")
        self.compilation = Compilation(cell.compiled)
        self.training = Training(cell, ranks.device, ranks.rank)
        self.result = Result(model=models.sizes(self.training.parameters))
        self.on_device = self.training.batches  # those of a loader are drawn in the check
        self.drawn: list[Batch] = []  # in the first check
        self.step_ms = self.launch_ms = 0.0  # the medians that sizes of later windows follow
        self.counts = step_facts.WindowCounts(self.training, ranks)
        self.longest_ms: list[float] = []  # of the steps of the longest window of the warm-up
        # With it, steps without exchange stand between the timed windows and leave no trace.
        self.snapshot: Snapshot | None = None

    def run(self) -> Result:
        """Run every phase, in an order in which none disturbs a later one.

        Returns what only the ranks know.
        """
        self.reporter.phase("first step")
        self.block("first", 1)  # it compiles, tunes and connects: timed and kept apart
        synchronous = self.cell.strategy.get("warmup_steps", 0)
        if synchronous:
            self.block("synchronous", synchronous)
        if self.ranks.device.type == "cuda" and not self.training.graphs:
            torch.cuda.reset_peak_memory_stats()  # the first step tried kernels
        self.warm_up()
        self.result.metrics |= self.memory()
        if self._may_interleave():
            self.snapshot = Snapshot.take(self.training, self.ranks)
        self.check()
        weights = step_facts.Weights(self.training)
        with self.counts.timed_passes():
            self.timed()
        self.compare(weights)
        self.watch_paths()
        if self.cell.data:
            self.data_cost()
        # The rest is about compute and exchange, not about the loader.
        with self.training.with_batches(self.on_device):
            self.without_data()
        self.training.close()
        return self.result

    def compare(self, weights: step_facts.Weights) -> None:
        """Find out whether the timed steps did what they should. `weights` are those before.

        What the check before them found is then found again, on the same objects.
        """
        self.reporter.phase("compare")
        training, checks = self.training, self.result.checks
        checks |= weights.unchanged(self.ranks)
        after = self._gradients_left()
        checks |= self.counts.facts()
        checks |= correctness.replay_counts(training, self.ranks)
        for name, count in self.compilation.since().items():
            checks[f"timed_{name}"] = count
        if self.ranks.world_size > 1 and training.strategy.equal_every:
            checks["replicas_equal"] = self.replicas_equal()
            if training.strategy.averages_weights:
                checks |= correctness.average(training, self.ranks)
        loss = float("nan")
        if training.loss is not None:
            loss = training.loss.item()
        checks["losses"] = [loss for (loss,) in self.ranks.gather([loss])]
        self.result.metrics |= training.strategy.facts()
        checks |= exchange.resolved_options(training.strategy)
        checks["after"] = after | self.check_again()

    def watch_paths(self) -> None:
        """Watch what one step does of the fast paths that were asked for."""
        model = self.training.model
        if not isinstance(model, torch.nn.Module):
            model = self.training.network
        watched = WatchedUpdate(model, self.training.optimizer)
        self.training.step()
        self.reporter.line(Kind.PATHS, **watched.end())

    def check_again(self) -> dict[str, Any]:
        """Return what the check before the timed windows found, as it is now.

        On the same batches. Where the gradient that a step updates by can be compared with the
        mean, it is, and the weights move in that step.
        """
        training, checks = self.training, self.result.checks
        strategy, timed = training.strategy, checks["counted"]["timed"]
        runs_alone = correctness.RUNS_AFTER if checks.get("gradient_repeat") else 1
        facts: dict[str, Any] = {}

        def check_in_step() -> None:
            facts.update(self._steps_as_asked(runs_alone, in_step=True))

        def steps_of_an_update() -> None:
            for _ in range(max(1, strategy.equal_every)):
                training.step(next(training.batches))

        leaves_mean = checks.get("gradients_equal") and strategy.exact and strategy.returns_mean
        if leaves_mean and not training.graphs:
            steps = [check_in_step]
        else:
            facts |= self._steps_as_asked(runs_alone)
            steps = [steps_of_an_update]
            if not timed["updates"] and not timed["collectives"]:  # else the windows show it
                steps *= DISTINCT
        drawn = [next(training.batches) for _ in range(DISTINCT)]
        facts |= step_facts.batches(drawn, self.ranks)
        return facts | step_facts.updates(training, steps)

    def replicas_equal(self) -> bool:
        """Return whether each weight is equal after one of as many steps as the strategy needs."""
        training = self.training
        equal = correctness.equal_arrays(training, self.ranks)
        for _ in range(training.strategy.equal_every - 1):
            if len(equal) == len(training.parameters):
                break
            training.step(next(training.batches))
            equal |= correctness.equal_arrays(training, self.ranks)
        return len(equal) == len(training.parameters)

    def without_data(self) -> None:
        """Measure what a step and an exchange take where batches are at hand."""
        if self.ranks.device.type == "cuda" and self.cell.period == 1:  # else steps differ
            self.held()
        if self.ranks.world_size > 1:
            if self.exchange_alone():
                self.strategy_cost()  # last: replicas drift apart in it
        else:
            has_local_cost = self.training.strategy.own_work_alone
            self.result.checks["own_work_alone"] = has_local_cost
            if has_local_cost:
                self.strategy_cost()  # what several GPUs pay beyond it is exposed communication
        Calibration(self.training, self.clock, self.ranks, self.reporter, self.step_ms).run()

    def block(self, purpose: str, iterations: int, **facts: Any) -> tuple[Block, list[float]]:
        """Time a window of steps and write its samples, and `facts`, at once.

        Returns (this rank's, the slowest rank's ms).
        """
        counts: list[tuple[int, int]] = []  # images and tokens so far, after each step

        def step() -> None:
            self.training.step()
            counts.append((self.training.images, self.training.tokens))

        with self.counts.window(purpose, iterations + 1):
            block = self.clock.block(step, iterations, self.reporter.beat)
        images, tokens = counts[-1][0] - counts[0][0], counts[-1][1] - counts[0][1]
        if tokens:
            facts["tokens"] = tokens
        if isinstance(self.training.batches, LoadedBatches):
            # Every step draws one batch.
            facts["wait_ms"] = self.training.batches.waited_ms[-iterations:]
        self.reporter.block(purpose, block, images, **facts)
        return block, statistics.levelled(self.ranks.slowest(block.ms), self.cell.period)

    def warm_up(self) -> None:
        """Step until the step time is flat."""
        self.reporter.phase("warm-up")
        fewest, seconds = max(2, int(self.options["warmup_iterations"]) // 2), 0.0
        least_ms = 1e3 * self.options["warmup_min_seconds"]
        most_seconds = self.options["warmup_max_seconds"]
        slowest_ms: list[float] = []
        while seconds < most_seconds and not derive.warmed_up(slowest_ms, self.cell, least_ms):
            window_ms = max(least_ms - math.fsum(slowest_ms), least_ms / WARM_UP_WINDOWS)
            iterations = fewest
            if slowest_ms:
                # By the shortest step, so that the second window is not a step short of the least
                # time.
                shortest_ms = min(slowest_ms[-fewest:])
                iterations = max(fewest, math.ceil(window_ms / shortest_ms))
            iterations = min(MOST_WARMING, iterations)
            iterations = request.whole_periods(iterations, self.cell.period)
            block, ms = self.block("warm-up", iterations, least_ms=least_ms)
            slowest_ms += ms
            seconds += self.ranks.slowest([block.host_ms])[0] / 1e3
            if len(ms) > len(self.longest_ms):
                self.longest_ms = ms
        last_quarter = max(2, len(slowest_ms) // 4)
        self.step_ms = statistics.median(slowest_ms[-last_quarter:])

    def memory(self) -> dict[str, float]:
        """Return the most memory that a rank's steps took: on a CPU worker, what it has now."""
        own = [psutil.Process().memory_info().rss]
        if self.ranks.device.type == "cuda":
            own = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        names = ("memory/peak_gib", "memory/reserved_gib")
        largest = self.ranks.slowest(own)
        return {name: most / GIB for name, most in zip(names, largest, strict=False)}

    def check(self) -> None:
        """Find out once, before the timed windows, whether what runs is what was asked."""
        self.reporter.phase("check")
        training, checks = self.training, self.result.checks
        checks |= self._gradients_left()
        checks |= self.compilation.facts(self.ranks)
        rows = self.compilation.seconds()
        if rows:
            self.result.tables["compiling"] = {"rows": rows}
        self.drawn = [next(training.batches) for _ in range(DISTINCT)]
        self.on_device = itertools.cycle(self.drawn)
        checks |= step_facts.batches(self.drawn, self.ranks)
        checks |= correctness.replay_differences(training, self.drawn, self.ranks)
        checks |= self._steps_as_asked(correctness.RUNS)
        checks["trained_bytes"] = 0
        for weight in training.network.parameters():
            if weight.requires_grad:
                checks["trained_bytes"] += weight.nbytes
        self.compilation.since()  # steps without exchange may be graphs of their own

    def _steps_as_asked(self, runs_alone: int, in_step: bool = False) -> dict[str, Any]:
        """Return facts of arithmetic and exchange on a batch that the first check drew."""
        training, strategy = self.training, self.training.strategy
        batch = self.drawn[0]
        facts: dict[str, Any] = {}
        with step_facts.arithmetic(training) as arithmetic, step_facts.sent(training) as sent:
            if self.ranks.world_size > 1 and strategy.returns_mean and strategy.exact:
                facts |= correctness.gradient(training, batch, self.ranks, runs_alone, in_step)
            else:
                torch.manual_seed(self.cell.seed)  # layers may be left out at random
                with training.without_exchange():
                    training.backward(batch)
        return facts | {"arithmetic": arithmetic, "sent": sent}

    def _gradients_left(self) -> dict[str, Any]:
        if self.ranks.world_size == 1 or self.training.strategy.equal_every != 1:
            return {}
        return {"gradients_equal": correctness.gradients_equal(self.training, self.ranks)}

    def _may_interleave(self) -> bool:
        """Return whether steps without exchange may stand between the timed windows.

        METHOD.md, "Exposed communication".
        """
        strategy = self.training.strategy
        rounds = request.rounds_between(self.options, self.cell.period)
        if not rounds or not strategy.in_lockstep or self.cell.data:
            return False
        if self.ranks.world_size == 1:
            has_cost = strategy.own_work_alone
        else:
            exchanges = type(strategy).exchange_alone != Strategy.exchange_alone
            has_cost = bool(self.options["exchange_iterations"]) and exchanges
        # All ranks see the same: steps get longer under load at a GPU's power cap.
        longer = self.ranks.device.type == "cuda" and request.gets_longer(self.longest_ms)
        return has_cost and not longer

    def timed(self) -> None:
        """Time windows of steps until the interval of images/sec is narrow enough.

        Or until time or iterations run out.
        """
        self.reporter.phase("timed")
        options, period = self.options, self.cell.period
        rounds = 0
        iterations = request.window_iterations(self.step_ms, period)
        if self.snapshot:
            rounds = request.rounds_between(options, period)
            if rounds:
                iterations = request.timed_abba_iterations(self.step_ms, options, rounds, period)
        by_window: list[list[float]] = []  # ms of each iteration on its slowest rank
        done = 0
        totals_ms = [0.0] * self.ranks.world_size
        launch_ms: list[float] = []
        while True:
            between = len(by_window) % 2 and len(by_window) < request.WITH_IT * rounds
            if self.snapshot and between:
                self.reporter.phase("exposed")
                with self.snapshot.restored():
                    self._without_exchange()
                    self._without_exchange()
                self.reporter.phase("timed")
            left = int(options["max_iterations"]) - done
            iterations = min(iterations, left // period * period)
            block, ms = self.block("timed", iterations)
            gathered = self.ranks.gather([sum(block.ms), block.launch_ms])
            by_window.append(ms)
            done += len(ms)
            for rank, (window_ms, _) in enumerate(gathered):
                totals_ms[rank] += window_ms
            launch_ms.append(max(own_launch_ms for _, own_launch_ms in gathered))
            if request.should_stop(by_window, max(totals_ms), options, rounds, period):
                break
        self.step_ms = statistics.median(statistics.joined(by_window))
        self.launch_ms = statistics.median(launch_ms)

    def held(self) -> None:
        """Time steps that are launched ahead: what the device computes without launch gaps."""
        self.reporter.phase("held")
        delay_ms = DELAY_LAUNCHES * self.launch_ms + DELAY_MORE_MS
        step = self.training.step
        ms = [self.clock.launch_ahead(step, delay_ms) for _ in range(HELD_ITERATIONS)]
        self.reporter.line(Kind.HELD, ms=ms)

    def exchange_alone(self) -> bool:
        """Time one gradient synchronisation without compute, and its references.

        It is on gradients of the model's shapes. Returns whether there was one to time.
        """
        training, iterations = self.training, int(self.options["exchange_iterations"])
        strategy = training.strategy
        if not iterations:
            return False
        used = [parameter.grad is not None for parameter in training.parameters]
        parameters = training.whole_parameters()
        with strategy.gradients_only():
            alone = strategy.exchange_alone(parameters)
            if alone is None:
                return False
            self.result.checks |= exchange.measure(
                strategy,
                alone,
                parameters,
                used,
                iterations,
                int(self.options["limit_iterations"]),
                self.clock,
                self.ranks,
                self.reporter,
            )
        return True

    def data_cost(self) -> None:
        """Time steps with the loader and steps on batches on the device, in the order A B B A."""
        loader = self.training.batches
        iterations = request.abba_iterations(self.step_ms, self.cell.period)
        assert isinstance(loader, LoadedBatches)
        self.reporter.phase("data")
        for window in range(4 * DATA_ROUNDS):
            if window % 4 in (0, 3):
                # Meanwhile a loader gets ahead, as far as it keeps batches ready: use these first.
                self.block("using up", max(iterations, 2 * loader.ready))
                self.block("with loader", iterations)
            else:
                with self.training.with_batches(self.on_device):
                    self.block("without loader", iterations)

    def strategy_cost(self) -> None:
        """Time steps with the strategy and steps without exchange, in the order A B B A.

        In the same processes. Where the timed windows were the steps with it, all are timed.
        """
        rounds = int(self.options["exposed_rounds"])
        if self.snapshot or not rounds:
            return
        self.reporter.phase("exposed")
        for window in range(4 * rounds):
            if window % 4 in (0, 3):
                iterations = request.abba_iterations(self.step_ms, self.cell.period)
                self.block("with exchange", iterations)
            else:
                self._without_exchange()

    def _without_exchange(self) -> None:
        with self.training.without_exchange():
            self.block("without exchange", request.abba_iterations(self.step_ms))
