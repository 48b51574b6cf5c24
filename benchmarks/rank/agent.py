"""The agent of one machine: starts the ranks of a cell under torch's elastic agent and reports which failed first.

    python -m benchmarks.rank.agent CELL_DIR RANKS auto|exec

Forked ranks have what the agent imported, torch above all, and begin in milliseconds instead of seconds. Before that the
agent uses no device and computes nothing; its only other threads are that of torch's store, which no rank touches, and
OpenBLAS's, which makes new ones after a fork. CUDA does not survive a fork: should anything have initialised it here, or
torch not take what keeps it from that, the ranks start anew (exec), and the agent's log says why.

torchrun's own rendezvous listens on every interface; this one binds a free port of the loopback interface itself and
hands the socket to torch's store, so that nothing outside reaches it and two cells never want the same port.
"""

import contextlib
import dataclasses
import datetime
import gc
import importlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks.rank import lifetime, worker
from conf.cell import Cell
from conf.variables import LAUNCHER, STARTER
from trainers.strategy import load

LOOPBACK = "127.0.0.1"
TIMEOUT_SECONDS = 600
BACKEND = "loopback"
NAMES = {field.name for field in dataclasses.fields(LaunchConfig)}
# Where nothing is given, torch from 2.9 on asks CUDA for the number of GPUs, to bind ranks to their NUMA nodes: a rank does
# that itself (trainers.devices).
NOT_BOUND: Any = object()


class LoopbackRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous of one node, on a socket that we bound."""

    def get_backend(self) -> str:
        """The name that torchrun is asked for."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """The store of the ranks, made once."""
        if self._store is None:
            listening = socket.socket()
            listening.bind((LOOPBACK, 0))
            listening.listen()
            self.master_port = listening.getsockname()[1]
            self._store = TCPStore(
                LOOPBACK,
                self.master_port,
                1,
                True,
                datetime.timedelta(seconds=TIMEOUT_SECONDS),
                multi_tenant=True,
                master_listen_fd=listening.detach(),
            )
        store = PrefixStore(self.run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.master_port))


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(LOOPBACK, 0, 0, 1, parameters.run_id, TIMEOUT_SECONDS)


def main(folder: Path, ranks: int, start: str) -> int:
    """Run the ranks to their end. Exit status 0, or 1 with `failures.json` in the folder: {rank: exit status}."""
    lifetime.die_with_parent()
    if LAUNCHER in os.environ:  # a profiler stands between: nsys clears the mask, and files would be anyone's
        lifetime.die_with_launcher(int(os.environ[LAUNCHER]))
        os.umask(0o022)
    os.environ[STARTER] = str(os.getpid())  # the ranks inherit it
    rendezvous_handler_registry.register(BACKEND, _handler)
    try:
        config = _preloaded(folder, ranks) if start == "auto" else None
        if config is not None:
            elastic_launch(config, worker.main)(folder, "fork")
        else:
            run.main([
                "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=0", "--monitor-interval=0.1",
                f"--rdzv-backend={BACKEND}", f"--rdzv-id={folder.name}", "--module", "benchmarks.rank.worker", str(folder),
            ])  # fmt: skip
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        (folder / "failures.json").write_text(json.dumps(failures))
        return 1
    return 0


def _preloaded(folder: Path, ranks: int) -> LaunchConfig | None:
    """Import what the ranks will need, so that they can be forked; None where they cannot.

    An import that fails here fails in a rank too, which says so.
    """
    with contextlib.suppress(Exception):
        cell = Cell.from_dict(json.loads((folder / "cell.json").read_text()))
        importlib.import_module(worker.MODULES[cell.benchmark["name"]])
        load(cell.strategy)
        if cell.trains:
            torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # torch's first optimizer imports a second's worth
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page of what is imported
    bound: dict[str, Any] = {"numa_options": NOT_BOUND} if "numa_options" in NAMES else {}
    try:
        config = LaunchConfig(
            1, 1, ranks, run_id=folder.name, rdzv_backend=BACKEND, max_restarts=0, monitor_interval=0.1,
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
