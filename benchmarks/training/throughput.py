"""`benchmark=throughput`: training steps on synthetic batches. METHOD.md defines every number that this produces."""

from benchmarks.rank.group import Ranks
from benchmarks.rank.reporter import Reporter
from benchmarks.rank.result import Result
from benchmarks.timing import statistics
from benchmarks.timing.clock import Block, Clock
from benchmarks.training import correctness, exchange
from conf.cell import Cell
from trainers import models
from trainers.step import Training

# What `auto` means on (GPU, CPU worker).
AUTO = {
    "max_seconds": (20.0, 8.0),
    "warmup_iterations": (10, 2),
    "exchange_iterations": (50, 10),
    "limit_iterations": (10, 3),
    "exposed_rounds": (4, 2),
}
# Seconds of one window: long enough that its start does not count, short enough to stop early.
WINDOW_SECONDS = 2.0
MOST_PER_WINDOW = 200
# An interval is only believed once this many windows agree: within one, drift does not show.
FEWEST_WINDOWS = 3
# Iterations that hold the device to see how long it computes without launch gaps.
HELD_ITERATIONS = 3
MOST_BUSY = 1.1  # of a free step


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective: every rank of the process group calls it with the same cell."""
    return Measurement(cell, ranks, reporter).run()


class Measurement:
    """One cell on this rank, phase by phase; another benchmark may use single phases."""

    def __init__(self, cell: Cell, ranks: Ranks, reporter: Reporter) -> None:
        self.ranks, self.reporter, self.clock = ranks, reporter, Clock(ranks)
        self.options = cell.asked(AUTO)
        reporter.phase("build")
        self.training = Training(cell, ranks.device, ranks.rank)
        self.result = Result(model=models.sizes(self.training.parameters))

    def run(self) -> Result:
        """Every phase, in an order in which none disturbs a later one."""
        self.warm_up()
        self.reporter.phase("check")
        if self.ranks.world_size > 1 and self.training.strategy.synchronous and self.training.strategy.exact:
            error, spread = correctness.gradient_error(self.training, self.ranks)
            self.result.checks |= {
                "gradient_error": error,
                "gradient_spread": spread,
                "gradient_tolerance": max(
                    correctness.TOLERANCE[self.training.cell.precision], self.training.strategy.rounding
                ),
            }
        self.timed()
        self.reporter.phase("compare")
        if self.ranks.world_size > 1 and self.training.strategy.synchronous:
            self.result.checks["replicas_equal"] = correctness.replicas_equal(self.training, self.ranks)
        losses = self.ranks.gather([self.training.loss.item() if self.training.loss is not None else float("nan")])
        self.result.checks["losses"] = [loss for (loss,) in losses]
        self.result.metrics |= self.training.strategy.facts()
        if self.ranks.device.type == "cuda":
            self.held()
        if self.ranks.world_size > 1:
            self.exchange_alone()
            self.exposed()  # last: replicas drift apart in it
        self.training.strategy.close()
        return self.result

    def block(self, purpose: str, iterations: int) -> tuple[Block, list[float]]:
        """A window of steps; its samples are written down at once. Returns (this rank's, slowest rank's ms)."""
        before = self.training.images
        block = self.clock.block(self.training.step, iterations, self.reporter.beat)
        counted = self.training.images - before
        self.reporter.block(purpose, block, counted * iterations // (iterations + 1))
        return block, self.ranks.slowest(block.ms)

    def warm_up(self) -> None:
        """Step until the step time is flat. The first step compiles, tunes and connects: it is timed and kept apart."""
        self.reporter.phase("first step")
        first, _ = self.block("first", 1)
        self.reporter.phase("warm-up")
        least, seconds = int(self.options["warmup_iterations"]), 0.0
        slowest: list[float] = []
        while not statistics.flat(slowest, least) and seconds < self.options["warmup_max_seconds"]:
            block, ms = self.block("warm-up", max(2, least // 2))
            slowest += ms
            seconds += self.ranks.slowest([block.host_ms])[0] / 1e3
        (first_ms,) = self.ranks.slowest([first.lead_in_ms])
        self.result.metrics["step/first_ms"] = first_ms
        self.result.metrics["warmup/iterations"] = len(slowest)
        self.result.checks["warmup_flat"] = statistics.flat(slowest, least)
        self.step_ms = statistics.median(slowest[-max(2, len(slowest) // 4) :])

    def timed(self) -> None:
        """Windows of steps until the interval of images/sec is narrow enough, or time or iterations run out."""
        self.reporter.phase("timed")
        options = self.options
        iterations = min(MOST_PER_WINDOW, max(5, round(WINDOW_SECONDS * 1e3 / self.step_ms)))
        slowest: list[float] = []  # of each iteration, its slowest rank
        totals = [0.0] * self.ranks.world_size  # ms of each rank
        images, disagreement, launch_ms = 0, 0.0, []
        half_width = float("inf")
        while True:
            iterations = min(iterations, int(options["max_iterations"]) - len(slowest))
            before = self.training.images
            block, ms = self.block("timed", iterations)
            # The lead-in's images are as many as any other step's: every batch has the same size.
            mine = (self.training.images - before) * iterations // (iterations + 1)
            gathered = self.ranks.gather([sum(block.ms), block.disagreement, block.launch_ms, mine])
            slowest += ms
            totals = [total + values[0] for total, values in zip(totals, gathered, strict=True)]
            disagreement = max(disagreement, *(values[1] for values in gathered))
            launch_ms.append(max(values[2] for values in gathered))
            window_images = sum(int(values[3]) for values in gathered)
            images += window_images
            window_seconds = max(values[0] for values in gathered) / 1e3
            self._series("throughput/images_per_second", len(slowest), window_images / window_seconds)
            self._series("step/ms_median", len(slowest), statistics.median(ms))
            low_ms, high_ms = statistics.mean_interval(slowest)
            mean_ms = sum(slowest) / len(slowest)
            half_width = (high_ms - low_ms) / 2 / mean_ms
            enough = len(slowest) >= options["min_iterations"]
            narrow = half_width <= options["interval_target"] and len(launch_ms) >= FEWEST_WINDOWS
            spent = max(totals) >= options["max_seconds"] * 1e3 or len(slowest) >= options["max_iterations"]
            if (enough and narrow) or spent:
                break
        rate = images / (max(totals) / 1e3)
        median_low, median_high = statistics.median_interval(slowest)
        self.result.metrics |= {
            "throughput/images_per_second": rate,
            "throughput/images_per_second_per_gpu": rate / self.ranks.world_size,
            "throughput/ci_low": rate * mean_ms / high_ms,
            "throughput/ci_high": rate * mean_ms / low_ms,
            "throughput/images": images,
            "throughput/seconds": max(totals) / 1e3,
            "step/ms_median": statistics.median(slowest),
            "step/ms_median_ci_low": median_low,
            "step/ms_median_ci_high": median_high,
            "step/ms_p95": statistics.percentile_95(slowest),
            "step/launch_ms": statistics.median(launch_ms),
            "step/iterations": len(slowest),
            "ranks/spread": max(totals) / min(totals) - 1,
        }
        self.result.checks |= {"clock_disagreement": disagreement, "half_width": half_width, "iterations": len(slowest)}
        self.step_ms = statistics.median(slowest)

    def held(self) -> None:
        """GPU idle share: what the step loses because the CPU launches too slowly."""
        self.reporter.phase("held")
        launch_ms = self.result.metrics["step/launch_ms"]
        held = [self.clock.held(self.training.step, 2 * launch_ms + 5) for _ in range(HELD_ITERATIONS)]
        busy_ms = statistics.median(self.ranks.slowest(held))
        self.reporter.line("held", ms=held)
        self.result.metrics["gpu/busy_ms"] = busy_ms
        # A held step that takes longer than a free one overfilled the launch queue: it says nothing of launch gaps.
        if busy_ms <= MOST_BUSY * self.step_ms:
            self.result.metrics["gpu/idle_share"] = max(0.0, 1 - busy_ms / self.step_ms)

    def exchange_alone(self) -> None:
        """One gradient synchronisation without compute, on gradients of the model's shapes, and what limits it."""
        strategy, iterations = self.training.strategy, int(self.options["exchange_iterations"])
        if not iterations:
            return
        common = (self.clock, self.ranks, self.reporter)
        with strategy.gradients_only():
            alone = strategy.exchange_alone(self.training.parameters)
            if alone is None:
                return
            measured, _ = exchange.timed(strategy, alone, self.result.model["gradient_bytes"], iterations, *common)
            allowed, self.result.checks["limit"] = exchange.limits(
                strategy, measured, int(self.options["limit_iterations"]), *common
            )
        self.result.metrics |= measured | allowed

    def exposed(self) -> None:
        """Steps with the strategy against steps without exchange, in the same processes, in the order A B B A."""
        rounds, metrics = int(self.options["exposed_rounds"]), self.result.metrics
        if not rounds or "comm/exchange_ms" not in metrics:
            return
        self.reporter.phase("exposed")
        iterations = min(30, max(3, round(500 / self.step_ms)))
        with_exchange: list[float] = []
        without_exchange: list[float] = []
        for number in range(4 * rounds):
            if number % 4 in (0, 3):
                with_exchange += self.block("with exchange", iterations)[1]
            else:
                with self.training.strategy.without_exchange():
                    without_exchange += self.block("without exchange", iterations)[1]
        low, high = statistics.difference_interval(with_exchange, without_exchange)
        exposed_ms = statistics.median(with_exchange) - statistics.median(without_exchange)
        metrics |= {
            "comm/exposed_ms": exposed_ms,
            "comm/exposed_ms_ci_low": low,
            "comm/exposed_ms_ci_high": high,
            "comm/overlap_fraction": 1 - exposed_ms / metrics["comm/exchange_ms"],
        }

    def _series(self, name: str, step: int, value: float) -> None:
        self.result.series.setdefault(name, []).append([step, value])
