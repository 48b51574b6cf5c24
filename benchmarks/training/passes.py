"""A few steps under a profiler, with a range around each step and its stages. Measures nothing: METHOD.md, "Traces".

Ranges: `step`, and in it `forward`, `backward`, `exchange`, `optimizer`: NVTX ranges for nsys, which stands around all
ranks and gets from here when to record; record_function's for torch.profiler, which writes a file for each rank. A strategy
that exchanges within backward has no range `exchange`.
"""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.profiler import ProfilerActivity, record_function

from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.record.folder import pack
from conf.cell import Cell
from trainers.step import Mark, Training, unmarked
from trainers.strategy import Strategy


def profiled(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Warm up, then step while the profiler records. Collective."""
    reporter.phase("profiled pass")
    training = Training(cell, ranks.device, ranks.rank)
    for _ in range(cell.profiler_options["warmup_steps"]):
        training.step()
        reporter.beat()
    recording, mark = _nsys(cell, ranks) if cell.profiler == "nsys" else _kineto(ranks, reporter)
    ranks.barrier()
    gc.collect()
    gc.disable()
    with recording:
        training.step()  # profilers allocate at the first events
        ranks.barrier()
        training.mark = (
            _overlapping(mark) if type(training.strategy).exchange is Strategy.exchange else mark
        )
        for _ in range(cell.profiler_options["steps"]):
            with mark("step"):
                training.step()
            reporter.beat()
        ranks.barrier()  # nobody stops recording while another still works
    gc.enable()
    training.close()
    return Result()


def _overlapping(mark: Mark) -> Mark:
    """Return marks without `exchange`, which is part of backward: an empty range would say that it takes no time."""
    return lambda stage: unmarked(stage) if stage == "exchange" else mark(stage)


def _nsys(cell: Cell, ranks: Ranks) -> tuple[AbstractContextManager[None], Mark]:
    """Return (recording, marks) of NVTX. Every rank opens the capture range, if there is one; the first to close it ends it."""

    @contextmanager
    def recording() -> Iterator[None]:
        if cell.benchmark["capture_range"]:
            torch.cuda.profiler.start()
        ranks.barrier()
        torch.cuda.nvtx.mark(f"rank {ranks.rank}")  # a report does not number its processes
        yield
        if cell.benchmark["capture_range"]:
            torch.cuda.profiler.stop()

    @contextmanager
    def mark(stage: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(stage)
        yield
        torch.cuda.nvtx.range_pop()

    return recording(), mark


def _kineto(ranks: Ranks, reporter: Reporter) -> tuple[AbstractContextManager[None], Mark]:
    """Return (recording, marks) of torch.profiler, on the GPU too where there is one; it writes `rank<N>.json.gz` at the end."""
    on_gpu = [ProfilerActivity.CUDA] if ranks.device.type == "cuda" else []

    @contextmanager
    def recording() -> Iterator[None]:
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, *on_gpu]) as profiler:
            yield
        trace = reporter.folder.path / f"rank{ranks.rank}.json"
        profiler.export_chrome_trace(str(trace))
        pack(
            trace
        )  # torch would pack it by way of TMPDIR, where a rank that is killed meanwhile leaves it

    return recording(), record_function


# A few untimed steps and exchanges while NCCL logs the algorithm and protocol of every collective. Measures nothing.


STEPS = 3


def tuning(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Step and exchange. Collective."""
    reporter.phase("tuning pass")
    training = Training(cell, ranks.device, ranks.rank)
    for _ in range(STEPS):
        training.step()
        reporter.beat()
    with training.strategy.gradients_only():
        exchange = training.strategy.exchange_alone(training.parameters)
        if exchange:
            exchange()
    ranks.barrier()
    training.close()
    return Result()
