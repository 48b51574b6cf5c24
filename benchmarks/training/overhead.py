"""`benchmark=overhead`: what our own instruments cost a step. METHOD.md, "Overhead".

Windows of instrumented steps (an event after every iteration, signs of life) and bare ones (a plain loop) take turns in the
order A B A B; both are timed by the host clock around the window, which either has.
"""

import gc
import time

import torch

from benchmarks.rank.group import Ranks
from benchmarks.rank.reporter import Reporter
from benchmarks.rank.result import Result
from benchmarks.timing import statistics
from benchmarks.training.throughput import Measurement
from conf.cell import Cell


def _bare(measurement: Measurement, iterations: int, ranks: Ranks) -> float:
    """ms of a plain loop of steps between two synchronisations, without the garbage collector as in a window."""
    gc.collect()
    gc.disable()
    try:
        ranks.barrier()
        opened = time.perf_counter()
        for _ in range(iterations):
            measurement.training.step()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        return (time.perf_counter() - opened) * 1e3
    finally:
        gc.enable()


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure the overhead in one cell. Collective."""
    measurement = Measurement(cell, ranks, reporter)
    measurement.warm_up()
    reporter.phase("overhead")
    iterations = max(3, round(1e3 * cell.benchmark["window_seconds"] / measurement.step_ms))
    instrumented, bare = [], []
    for _ in range(cell.benchmark["rounds"]):
        block, _ = measurement.block("instrumented", iterations - 1)  # and its lead-in
        instrumented.append(block.host_ms / iterations)
        bare.append(_bare(measurement, iterations, ranks) / iterations)
        reporter.line("bare", ms=bare[-1])
    slow, fast = ranks.slowest(instrumented), ranks.slowest(bare)
    low, high = statistics.difference_interval(slow, fast)
    step_ms = statistics.median(fast)
    measurement.result.metrics |= {
        "overhead/share": (statistics.median(slow) - step_ms) / step_ms,
        "overhead/share_ci_low": low / step_ms,
        "overhead/share_ci_high": high / step_ms,
        "overhead/bare_step_ms": step_ms,
    }
    measurement.training.strategy.close()
    return measurement.result
