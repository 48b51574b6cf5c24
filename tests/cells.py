"""Cells for tests: a tiny network on CPU workers, with the defaults of the YAML files where a test needs them."""

import dataclasses

from conf import groups
from conf.cell import Cell, Network, Optimizer

BENCHMARK = {
    "name": "throughput",
    "min_iterations": 4,
    "max_iterations": 6,
    "max_seconds": 0.2,
    "interval_target": 0.0025,
    "warmup_iterations": 2,
    "warmup_min_seconds": 0.0,
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
        declared=declared(strategy or DDP, BENCHMARK | benchmark),
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


def overhead_cell():
    """A tiny cell of benchmark=overhead."""
    options = {
        "name": "overhead",
        "rounds": 2,
        "window_seconds": 0.02,
        "warmup_iterations": 2,
        "warmup_min_seconds": 0.0,
        "warmup_max_seconds": 0.1,
    }
    return dataclasses.replace(make_cell(), benchmark=options, declared=declared(DDP, options))


def declared(strategy, benchmark):
    """What the YAML files of a strategy and a benchmark say beside their options."""
    return {
        "strategy": groups.choice("strategy", strategy["name"]).declared(),
        "benchmark": groups.choice("benchmark", benchmark["name"]).declared(),
    }


def target_of(group, name):
    """The dotted name of what a rank calls for a strategy or benchmark."""
    return groups.choice(group, name).rules["_target_"]


def options_of(group, asked, ranks=2):
    """The options of a strategy or benchmark on CPU workers, with its YAML's defaults."""
    return groups.resolved(group, groups.choice(group, asked["name"]).options | asked, "cpu", ranks)


def changed_cell(cell, **changes):
    """The cell with other fields; of its model those that are named."""
    model = cell.to_dict()["model"] | changes.pop("model", {})
    return Cell.from_dict(cell.to_dict() | changes | {"model": model})


def strategy_of(asked):
    """A strategy with its YAML's defaults."""
    return options_of("strategy", asked)


def exchange_cell(case):
    """The cell of a case of benchmark=exchange."""
    benchmark = options_of(
        "benchmark",
        {"name": "exchange", "iterations": 3, "limit_iterations": 2, **case["exchange"]},
    )
    cell = make_cell(
        tuple(range(case["workers"])),
        strategy_of(case["strategy"]),
        precision=case.get("precision", "fp32"),
    )
    return dataclasses.replace(
        cell, benchmark=benchmark, declared=declared(cell.strategy, benchmark)
    )


def links_cell(workers, asked):
    """The cell of a benchmark that trains nothing, with its YAML's defaults."""
    options = options_of("benchmark", asked, workers)
    return dataclasses.replace(
        make_cell(tuple(range(workers))),
        model=Network("none", "ringside", "none", 0, 0, 0, 0.0, {}), strategy={"name": "none"}, benchmark=options,
        declared=declared({"name": "none"}, options),
    )  # fmt: skip


def several_hosts_cells(hosts, gpus):
    """Cells of every benchmark that works over several hosts, by name."""
    staged, hierarchical = (
        {"strategy": strategy_of({"name": name})} for name in ("cpu_staged", "hierarchical")
    )
    cells = {
        "throughput": make_cell(**hierarchical),
        "overhead": overhead_cell(),
        "exchange": exchange_cell({"workers": gpus, "exchange": {}, **staged}),
        "collectives": links_cell(
            hosts * gpus,
            {
                "name": "collectives",
                "min_bytes": "1K",
                "max_bytes": "1KiB",
                "iterations": 2,
                "warmup": 1,
            },
        ),
    }
    placed = {
        "gpus": list(range(gpus)),
        "hosts": [chr(ord("a") + number) for number in range(hosts)],
    }
    return {name: changed_cell(cell, **placed) for name, cell in cells.items()}
