"""Untimed passes over a cell: a few steps under a profiler, and a few while NCCL logs its choices.

The profiled one has a range around each step and, in `step`, around its stages: `forward`,
`backward`, `exchange`, `optimizer`. They are NVTX ranges for nsys, which stands around all ranks
and gets from here when to record, and record_function's for torch.profiler, which writes a file for
each rank. A strategy that exchanges within backward has no range `exchange`. METHOD.md, "Traces".
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, record_function

from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.record.folder import pack
from conf.cell import Cell
from trainers.step import Mark, Training, unmarked
from trainers.strategy import Strategy

TUNING_STEPS = 3


def profiled(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Warm up, then step while the profiler records. Collective."""
    reporter.phase("profiled pass")
    training = Training(cell, ranks.device, ranks.rank)
    for _ in range(cell.profiler_options["warmup_steps"]):
        training.step()
        reporter.beat()
    mark: Mark = record_function
    recording = _kineto(ranks, reporter)
    if cell.profiler == "nsys":
        mark = _nvtx_range
        recording = _nsys(cell, ranks)
    ranks.barrier()
    gc.collect()
    gc.disable()
    with recording:
        training.step()  # profilers allocate at the first events
        ranks.barrier()
        training.mark = mark
        if type(training.strategy).exchange is Strategy.exchange:
            # It is part of backward: an empty range would say that it takes no time.
            training.mark = lambda stage: unmarked(stage) if stage == "exchange" else mark(stage)
        for _ in range(cell.profiler_options["steps"]):
            with mark("step"):
                training.step()
            reporter.beat()
        ranks.barrier()  # nobody stops recording while another still works
    gc.enable()
    training.close()
    return Result()


@contextmanager
def _nsys(cell: Cell, ranks: Ranks) -> Iterator[None]:
    """Open the capture range, if there is one; the first rank to close it ends it."""
    if cell.benchmark["capture_range"]:
        torch.cuda.profiler.start()
    ranks.barrier()
    torch.cuda.nvtx.mark(f"rank {ranks.rank}")  # a report does not number its processes
    yield
    if cell.benchmark["capture_range"]:
        torch.cuda.profiler.stop()


@contextmanager
def _nvtx_range(stage: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(stage)
    yield
    torch.cuda.nvtx.range_pop()


@contextmanager
def _kineto(ranks: Ranks, reporter: Reporter) -> Iterator[None]:
    """Record with torch.profiler, which writes `rank<N>.json.gz` at the end."""
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    trace = reporter.folder.path / f"rank{ranks.rank}.json"
    profiler.export_chrome_trace(str(trace))
    # torch would pack it by way of TMPDIR, where a rank that is killed meanwhile leaves it.
    pack(trace)


def tuning(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Step and exchange while NCCL logs algorithm and protocol of every collective. Collective."""
    reporter.phase("tuning pass")
    training = Training(cell, ranks.device, ranks.rank)
    for _ in range(TUNING_STEPS):
        training.step()
        reporter.beat()
    parameters = training.whole_parameters()
    with training.strategy.gradients_only():
        exchange = training.strategy.exchange_alone(parameters)
        if exchange:
            exchange()
    ranks.barrier()
    training.close()
    return Result()
