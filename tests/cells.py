"""Cells for tests: a tiny network on CPU workers, with the defaults of the YAML files where a test needs them."""

import dataclasses
from pathlib import Path

from omegaconf import OmegaConf

from conf.cell import Cell, Network
from conf.groups import RULES
from conf.schema import Optimizer

ROOT = Path(__file__).parent.parent
BENCHMARK = {
    "name": "throughput",
    "min_iterations": 4,
    "max_iterations": 6,
    "max_seconds": 0.2,
    "interval_target": 0.0025,
    "warmup_iterations": 2,
    "warmup_max_seconds": 0.1,
    "exchange_iterations": 4,
    "limit_iterations": 2,
    "exposed_rounds": 1,
}
DDP = {
    "name": "nccl_allreduce",
    "bucket_cap_mb": 25.0,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "broadcast_buffers": False,
    "comm_hook": "none",
    "powersgd_rank": 4,
}


def make_cell(gpus=(0, 1), strategy=None, batch_size=2, precision="fp32", **benchmark):
    """A tiny cell of the Fashion-MNIST network on CPU workers."""
    return Cell(
        model=Network("fmnist_cnn", "ringside", "fmnist_cnn", 1, 10, 28, 0.0, {}),
        strategy=strategy or DDP,
        benchmark=BENCHMARK | benchmark,
        nccl={},
        optimizer=Optimizer(),
        profiler="none",
        gpus=gpus,
        device="cpu",
        batch_size=batch_size,
        global_batch_size=None,
        precision=precision,
        optimize="eager",
        channels_last=False,
        seed=0,
    )


def strategy_of(asked):
    """A strategy with its YAML's defaults."""
    declared = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "strategy" / f"{asked['name']}.yaml"))
    return {name: value for name, value in declared.items() if name not in RULES} | asked


def exchange_cell(case):
    """The cell of a case of benchmark=exchange."""
    defaults = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "benchmark" / "exchange.yaml"))
    short = {"iterations": 3, "limit_iterations": 2}
    benchmark = {name: value for name, value in defaults.items() if name not in RULES} | short | case["exchange"]
    cell = make_cell(
        tuple(range(case["workers"])), strategy_of(case["strategy"]), precision=case.get("precision", "fp32")
    )
    return dataclasses.replace(cell, benchmark=benchmark)


def links_cell(workers, asked):
    """The cell of a benchmark that trains nothing, with its YAML's defaults."""
    declared = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "benchmark" / f"{asked['name']}.yaml"))
    options = {name: value for name, value in declared.items() if name not in RULES} | asked
    return dataclasses.replace(
        make_cell(tuple(range(workers))),
        model=Network("none", "ringside", "none", 0, 0, 0, 0.0, {}), strategy={"name": "none"}, benchmark=options,
    )  # fmt: skip
