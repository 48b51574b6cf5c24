"""`benchmark=overhead`: how much longer a step takes because it is measured (METHOD.md).

Windows of instrumented steps (an event after every iteration, heartbeats) and bare ones (a plain
loop) take turns in the order A B A B. Both are timed by the host clock around the window.
"""

import gc
import time

import torch

from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.record import Kind
from benchmarks.training.throughput import TrainingBenchmark
from conf.cell import Cell

FEWEST_ITERATIONS = 3  # of a window


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure the overhead in one cell. Collective."""
    benchmark = TrainingBenchmark(cell, ranks, reporter)
    benchmark.warm_up()
    reporter.phase("overhead")
    fitting = round(1e3 * cell.benchmark["window_seconds"] / benchmark.step_ms)
    iterations = max(FEWEST_ITERATIONS, fitting)
    for _ in range(cell.benchmark["rounds"]):
        benchmark.block("instrumented", iterations - 1)  # and its lead-in
        window_ms = _bare_ms(benchmark, iterations, ranks)
        reporter.line(Kind.BARE, ms=window_ms / iterations, window_ms=window_ms, steps=iterations)
    benchmark.training.close()
    return benchmark.result


def _bare_ms(benchmark: TrainingBenchmark, iterations: int, ranks: Ranks) -> float:
    """Return the ms of a plain loop of steps between two synchronisations.

    Without the garbage collector, as in a window.
    """
    gc.collect()
    gc.disable()
    try:
        ranks.barrier()
        opened = time.perf_counter()
        for _ in range(iterations):
            benchmark.training.step()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        return (time.perf_counter() - opened) * 1e3
    finally:
        gc.enable()
