"""The process of a cell on one host: starts its ranks under torch's elastic agent and reports which ended first.

The agent of the host forks it (benchmarks.rank.serve). A profiler starts it as a program:

    python -m benchmarks.rank.agent CELL_DIR RANKS auto|exec

`auto` forks the ranks. A forked rank has what the agent imported, above all torch, and begins in milliseconds instead of
seconds. Before the fork the agent uses no device and computes nothing. It has only two kinds of other threads: that of
torch's store, which no rank touches, and OpenBLAS's, which are made anew after a fork. CUDA does not survive a fork: if
anything has initialised it here, the ranks are new processes (exec), and the agent's log says why.
"""

import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler

from benchmarks.rank import lifetime, rendezvous, worker
from benchmarks.rank.ends import Ends
from benchmarks.record import CellFolder, Kind, read_lines, write_json
from benchmarks.record.clock import now
from conf.cell import Cell
from conf.targets import locate
from conf.variables import LAUNCHER, STARTER, UMASK
from trainers.hosts import Hosts
from trainers.strategy import load

MONITOR_SECONDS = 0.1  # between two looks of torch at its ranks
PAUSE_SECONDS = 0.001  # torch's own, before each look


def main(folder: Path, ranks: int, start: str) -> int:
    """Run the ranks of a cell that is on this machine alone. Returns the exit status, as `run` does."""
    lifetime.die_with_parent()
    if LAUNCHER in os.environ:  # a profiler started us: nsys clears the umask
        lifetime.die_with_launcher(int(os.environ[LAUNCHER]))
        os.umask(int(os.environ[UMASK], 8))
    return run(folder, range(ranks), start, rendezvous.of(folder.name, rendezvous.MeetingPlace()))


def run(folder: Path, numbers: Sequence[int], start: str, meeting: RendezvousHandler) -> int:
    """Run the processes of a cell that are on this host, by their numbers, to their end.

    Returns the exit status: 0, or 1 with `failures.json` in the folder.
    """
    os.environ[STARTER] = str(os.getpid())  # the ranks inherit it
    forked = start != "exec" and _preloaded(folder)
    ran: dict[str, Any] = {"entrypoint": worker.main, "args": (folder, numbers, "fork")}
    if not forked:
        words = ("-u", "-m", "benchmarks.rank.worker", str(folder), ",".join(map(str, numbers)))
        ran = {"entrypoint": sys.executable, "args": words}
    spec = WorkerSpec(
        role="rank", local_world_size=len(numbers), rdzv_handler=meeting, max_restarts=0, monitor_interval=PAUSE_SECONDS,
        **ran,
    )  # fmt: skip
    try:
        result = WatchfulAgent(spec, CellFolder(folder), numbers).run()
    except RankEnded:
        return 1
    except SignalException as error:  # end as anybody does who is asked to
        signal.signal(error.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), error.sigval)
    return int(result.is_failed())


class RankEnded(Exception):
    """A rank ended that should not have."""


class NoFiles(DefaultLogsSpecs):
    """No folder of torch's in TMPDIR: ranks write their own logs."""

    def __init__(self) -> None:
        super().__init__(os.devnull)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return that nothing is redirected."""
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(nowhere, nowhere, {}, {}, nowhere)


class WatchfulAgent(LocalElasticAgent):
    """torch's elastic agent, which also writes down the first ranks that ended by themselves before it ends the others."""

    def __init__(self, spec: WorkerSpec, folder: CellFolder, numbers: Sequence[int]) -> None:
        super().__init__(spec, NoFiles(), "fork")  # of functions; a command is a new process anyway
        self._folder, self._numbers, self._ends = folder, numbers, Ends({})

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait for an end, then look at the ranks as torch does. torch calls it again and again.

        Raises:
            RankEnded: a rank ended with another status than 0, or before it was done.
        """
        if not self._ends.pids:
            self._ends = Ends({self._numbers[worker.local_rank]: worker.id for worker in worker_group.workers})
        if failed := self._failed(self._ends.wait(MONITOR_SECONDS)):
            seen, failed = now(), failed + self._failed(self._ends.rest())
            self._end({rank: self._ends.statuses[rank] for rank in failed}, seen)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():  # a rank ended between the two looks, and torch has ended the others by SIGTERM
            numbers = {worker.global_rank: self._numbers[worker.local_rank] for worker in worker_group.workers}
            statuses = {numbers[rank]: failure.exitcode for rank, failure in result.failures.items()}
            first = {rank: status for rank, status in statuses.items() if status != -signal.SIGTERM}
            self._end(first or statuses, now())
        return result

    def _end(self, statuses: Mapping[int, int | None], seen: float) -> NoReturn:
        """Write down how ranks ended, and when that was seen, in seconds since 1970. Raises RankEnded."""
        print(f"ranks that ended: {statuses}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # a full disk: the log may have it
            failures = {str(rank): {"status": status, "time": seen} for rank, status in statuses.items()}
            write_json(self._folder.failures, failures)
        raise RankEnded

    def _failed(self, ended: Sequence[int]) -> list[int]:
        """Return the ranks of these that should not have ended."""
        failed = []
        for rank in ended:
            lines = read_lines(self._folder.rank_lines(rank))
            done = any(line["kind"] == Kind.DONE for line in lines)
            if self._ends.statuses[rank] != 0 or not done:
                failed.append(rank)
        return failed


def _preloaded(folder: Path) -> bool:
    """Import what the ranks will need. Returns whether they can be forked.

    An import that fails here fails in a rank too, and the rank reports it.
    """
    with contextlib.suppress(Exception):
        cell = Cell.from_dict(json.loads(CellFolder(folder).cell.read_bytes()))
        locate(cell.target("benchmark"))
        if cell.trains:
            load(cell.strategy, cell.target("strategy"), Hosts.of(cell))
            torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer's imports take a second
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page of what is imported
    if lifetime.cuda_initialised():
        print("ranks start anew: something here has initialised CUDA", file=sys.stderr, flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
