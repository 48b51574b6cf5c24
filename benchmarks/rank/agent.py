"""The agent of one machine: starts the ranks of a cell under torch's elastic agent and reports which failed first.

    python -m benchmarks.rank.agent CELL_DIR RANKS auto|exec

`auto` forks the ranks. A forked rank has what the agent imported, above all torch, and begins in milliseconds instead of
seconds. Before the fork the agent uses no device and computes nothing. It has only two kinds of other threads: that of
torch's store, which no rank touches, and OpenBLAS's, which are made anew after a fork. CUDA does not survive a fork: if
anything has initialised it here, or if torch does not accept the placeholder that keeps it from doing so, the ranks are new
processes (exec), and the agent's log says why.
"""

import contextlib
import dataclasses
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks.rank import lifetime, rendezvous, worker
from benchmarks.record import CellFolder, write_json
from conf.cell import Cell
from conf.targets import locate
from conf.variables import LAUNCHER, STARTER, UMASK
from trainers.strategy import load

MONITOR_SECONDS = 0.1  # between two looks at the ranks: how late a failure is seen
LAUNCH_FIELDS = {field.name for field in dataclasses.fields(LaunchConfig)}
# Placeholder for `numa_options`: without any, torch from 2.9 on asks CUDA for the number of GPUs, to bind ranks to their NUMA
# nodes. Our ranks do that themselves (trainers.devices).
NOT_BOUND: Any = object()


def main(folder: Path, ranks: int, start: str) -> int:
    """Run the ranks to their end. Returns the exit status: 0, or 1 with `failures.json` ({rank: exit status}) in the folder."""
    lifetime.die_with_parent()
    if LAUNCHER in os.environ:  # a profiler started us: nsys clears the umask
        lifetime.die_with_launcher(int(os.environ[LAUNCHER]))
        os.umask(int(os.environ[UMASK], 8))
    os.environ[STARTER] = str(os.getpid())  # the ranks inherit it
    rendezvous.register()
    try:
        config = _preloaded(folder, ranks) if start == "auto" else None
        if config is not None:
            elastic_launch(config, worker.main)(folder, "fork")
        else:
            run.main([
                "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=0", f"--monitor-interval={MONITOR_SECONDS}",
                f"--rdzv-backend={rendezvous.BACKEND}", f"--rdzv-id={folder.name}",
                "--module", "benchmarks.rank.worker", str(folder),
            ])  # fmt: skip
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        write_json(CellFolder(folder).failures, failures)
        return 1
    return 0


def _preloaded(folder: Path, ranks: int) -> LaunchConfig | None:
    """Import what the ranks will need. Returns the configuration that forks them; None where they cannot be forked.

    An import that fails here fails in a rank too, and the rank reports it.
    """
    with contextlib.suppress(Exception):
        cell = Cell.from_dict(json.loads(CellFolder(folder).cell.read_text()))
        locate(cell.target("benchmark"))
        if cell.trains:
            load(cell.strategy, cell.target("strategy"))
            torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer's imports take a second
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page of what is imported
    bound: dict[str, Any] = {"numa_options": NOT_BOUND} if "numa_options" in LAUNCH_FIELDS else {}
    try:
        config = LaunchConfig(
            1, 1, ranks, run_id=folder.name, rdzv_backend=rendezvous.BACKEND, max_restarts=0, monitor_interval=MONITOR_SECONDS,
            start_method="fork", **bound,
        )  # fmt: skip
    except Exception as error:  # torch does not promise to leave the field alone
        print(f"ranks start anew: torch's launcher says {error!r}", file=sys.stderr, flush=True)
        return None
    if bound:
        config.numa_options = None
    if lifetime.cuda_initialised():
        print("ranks start anew: something here has initialised CUDA", file=sys.stderr, flush=True)
        return None
    return config


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
