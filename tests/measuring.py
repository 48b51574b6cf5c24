"""What each of two ranks measures for test_measuring: tiny cells, and a slow rank."""

import time

import torch
from build import DDP, make_cell
from derived_results import run_whole

from benchmarks.rank.ranks import Ranks, Reporter
from benchmarks.record import CellFolder, read_lines
from benchmarks.training import derive, throughput

CASES = {
    "ddp": make_cell(),
    "none": make_cell(strategy={"name": "none"}),
    "fp16": make_cell(strategy=DDP | {"comm_hook": "fp16"}, exposed_rounds=0),
    "bf16": make_cell(strategy=DDP | {"comm_hook": "bf16"}, exposed_rounds=0),
    "fp8": make_cell(strategy=DDP | {"comm_hook": "fp8"}, exposed_rounds=0),
    "bf16_weights": make_cell(precision="bf16_weights", exposed_rounds=0),
    "small buckets": make_cell(
        strategy=DDP | {"bucket_cap_mb": 0.5, "static_graph": False}, exposed_rounds=0
    ),
}


def measure(rank, folder):
    ranks = Ranks(rank, 2, torch.device("cpu"))
    found = {}
    for name, cell in CASES.items():
        found[name] = run_whole(throughput.run, cell, ranks, case_folder(folder, name))
    found["slow rank"] = slow_rank(ranks, folder)
    return found


def case_folder(folder, name):
    made = CellFolder(folder / name)
    made.rank_lines(0).parent.mkdir(parents=True, exist_ok=True)
    return made


def slow_rank(ranks, folder):
    """Independent ranks of which the second sleeps longer in every step."""
    cell = make_cell(strategy={"name": "none"}, batch_size=8, min_iterations=10, max_iterations=10)
    lines_folder = case_folder(folder, "slow")
    benchmark = throughput.TrainingBenchmark(cell, ranks, Reporter(lines_folder, ranks.rank))

    def step():
        time.sleep(0.03 if ranks.rank else 0.01)
        benchmark.training.images += 8

    benchmark.training.step = step
    benchmark.step_ms = 200.0
    benchmark.timed()
    ranks.barrier()
    return derive.timed(
        {rank: list(read_lines(lines_folder.rank_lines(rank))) for rank in range(2)}
    ).metrics
