"""What each of two ranks calibrates for test_calibration: every strategy's buckets and collectives, and planted times."""

import contextlib
import time
from unittest import mock

from build import changed_cell, make_cell, strategy_of
from derived_results import run_whole
from measuring import case_folder
from torch import device

from benchmarks.rank.ranks import Ranks, Reporter
from benchmarks.record import read_lines
from benchmarks.timing.clock import Clock
from benchmarks.timing.compilation import Compilation
from benchmarks.training import calibration as measure
from benchmarks.training import derive as derive
from benchmarks.training import throughput
from trainers.step import Training
from trainers.strategies.ddp import NcclAllreduce
from trainers.strategy import BucketExchange

BUCKETS = {"bucket_cap_mb": 0.5}  # MiB: several buckets of the network of 4.8 MB
STRATEGIES = {
    "ddp": {"name": "nccl_allreduce"},
    "ddp_fp16": {"name": "nccl_allreduce", "comm_hook": "fp16"},
    "device": {"name": "kvstore_device"},
    "device_owner": {"name": "kvstore_device", "reduce": "owner", "comm_hook": "bf16"},
    "two_hosts": {"name": "hierarchical"},
    "staged": {"name": "cpu_staged"},
}
QUICK = {"MOST_STEPS": 3, "EXCHANGES_MS": 5.0, "ALL_MS": 1e6}
SHORT_OF_TIME = {
    "a timeline": 300.0,
    "no timeline": 100.0,
}  # ms: six and twenty steps of STEP_MS take 120 and 400
SLEPT_MS, SLOW_MS = 60.0, 15.0  # a layer's backward, a collective
STEP_MS = 20.0  # that a calibration is told that a step takes


def calibrate(rank, folder):
    """Return what a rank finds: tables by case."""
    ranks = Ranks(rank, 2, device("cpu"))
    cell = make_cell(strategy=strategy_of(STRATEGIES["ddp"] | BUCKETS), calibrate="all")
    found = {"whole": run_whole(throughput.run, cell, ranks, case_folder(folder, "whole"))}
    with contextlib.ExitStack() as stack:
        for name, value in QUICK.items():
            stack.enter_context(mock.patch.object(measure, name, value))
        for name, strategy in {**STRATEGIES, "none": {"name": "none"}}.items():
            options = {} if name == "none" else BUCKETS
            of = make_cell(strategy=strategy_of(strategy | options), calibrate="all")
            if name == "two_hosts":
                of = changed_cell(of, gpus=[0], hosts=["a", "b"])
            found[name] = tables(of, ranks, folder, name)
        for name, budget_ms in SHORT_OF_TIME.items():
            with mock.patch.object(measure, "ALL_MS", budget_ms):
                found[name] = tables(cell, ranks, folder, name)
        with mock.patch.object(Compilation, "since", return_value={"graphs": 1}):
            found["recompiled"] = tables(cell, ranks, folder, "recompiled")
        found["slept"] = tables(cell, ranks, folder, "slept", a_layer_sleeps)
        found["slow"] = tables(cell, ranks, folder, "slow", a_collective_is_slow)
    return found


def alone(folder):
    ranks = Ranks(0, 1, device("cpu"))
    cell = make_cell((0,), strategy_of(STRATEGIES["ddp"] | BUCKETS), calibrate="all")
    with mock.patch.object(measure, "MOST_STEPS", QUICK["MOST_STEPS"]):
        return tables(cell, ranks, folder, "alone")


def tables(cell, ranks, folder, name, plant=lambda training: None):
    """Calibrate a training after three steps; return the tables, and what is left of hooks and marks."""
    lines = case_folder(folder, name)
    training = Training(cell, ranks.device, ranks.rank)
    for _ in range(3):  # DDP rebuilds its buckets at the beginning of the third
        training.step()
    hooks = hooks_of(training)
    plant(training)
    measure.Calibration(training, Clock(ranks), ranks, Reporter(lines, ranks.rank), STEP_MS).run()
    left = hooks_of(training) != hooks
    ranks.barrier()
    training.close()
    said = {rank: [*read_lines(lines.rank_lines(rank))] for rank in range(ranks.world_size)}
    made = {
        "buckets": derive.table_of(said, "buckets"),
        "timeline": derive.timeline(said),
        "bucket_exchange": derive.bucket_exchange(said),
    }
    gradient_bytes = sum(parameter.nbytes for parameter in training.parameters)
    found = made | {"left": left, "gradient_bytes": gradient_bytes}
    if isinstance(training.strategy, NcclAllreduce):  # what DDP itself says of its buckets
        found["logged"] = training.strategy._ddp._get_ddp_logging_data().get("rebuilt_bucket_sizes")
    return found


def hooks_of(training):
    """How many hooks each parameter has, and what marks the stages of a step."""
    return [
        len(one._post_accumulate_grad_hooks or ()) for one in training.parameters
    ], training.mark


def a_layer_sleeps(training):
    """Let the gradient of the first layer come late: it is in the last bucket."""

    def sleep(gradient):
        time.sleep(SLEPT_MS / 1e3)

    training.parameters[0].register_hook(sleep)


def a_collective_is_slow(training):
    usual = training.strategy.bucket_exchange
    largest = measure.TIMES_THE_LARGEST * max(
        bucket.sent_bytes for bucket in training.strategy.buckets()
    )

    def slow(size_bytes, dtype):
        made = usual(size_bytes, dtype)
        if size_bytes < largest:
            return made

        def run():
            made.run()
            time.sleep(SLOW_MS / 1e3)

        return BucketExchange(made.operation, run)

    training.strategy.bucket_exchange = slow
