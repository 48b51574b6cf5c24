"""The process of a cell on one host: it forks the ranks under torch's elastic agent.

The host agent forks this process; a profiler starts it as
`python -m benchmarks.rank.cell_process FOLDER RANKS START`.
"""

import contextlib
import datetime
import functools
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from benchmarks.agent.processes import Variables, merged, write_proc_environ
from benchmarks.rank import worker
from benchmarks.record import CellFolder, Kind, read_lines, write_json
from benchmarks.record.lines import begin_again, now
from conf.cell import Cell
from conf.host import LAUNCHER, STARTER, TOKEN, UMASK
from conf.targets import locate
from trainers.strategy import Hosts, load

MONITOR_SECONDS = 0.1  # between two looks of torch at its ranks
PAUSE_SECONDS = 0.001  # torch's own, before each look
LEAVING_SECONDS = 2.0  # for a process that already ends to free its memory, slow on a GPU
LEAVING_PAUSE_SECONDS = 0.002
PF_EXITING = 0x4  # linux/sched.h
LOOPBACK = "127.0.0.1"
STORE_TIMEOUT_SECONDS = 600  # of a rank that waits for another, while all import and connect
# What changes from cell to cell, and who reads it only after the fork: NCCL, gloo and CUDA when
# they are initialised, torch and Triton each time they compile, and we.
READ_LATE = (
    "NCCL_",
    "GLOO_",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "RINGSIDE_",
    "OMP_NUM_THREADS",
    "TORCH_GLOO_",
    "TORCH_SYMM_MEM_",
    "NVSHMEM_",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)
Keep = Callable[[Mapping[str, Any]], object]  # what is done with how ranks ended


@dataclass(frozen=True)
class RendezvousAddress:
    """Where the hosts of a cell meet, and which of them this one is."""

    address: str = LOOPBACK  # of the first host
    port: int = 0  # there; the first host itself binds a free one
    host: int = 0
    hosts: int = 1


class Rendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, at one address and on a socket that we bound."""

    def __init__(
        self, run_id: str, meeting: RendezvousAddress, listener: socket.socket | None = None
    ) -> None:
        """`listener` is the first host's socket; it is bound here where there is none yet.

        Raises OSError: it cannot be bound.
        """
        super().__init__(
            meeting.address,
            meeting.port,
            meeting.host,
            meeting.hosts,
            run_id,
            STORE_TIMEOUT_SECONDS,
        )
        if listener is None and meeting.host == 0:
            listener = listen(meeting.address)
        self._meeting, self._listener = meeting, listener

    def get_backend(self) -> str:
        """Return its name, as torch's log has it."""
        return "one address"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store of the ranks, which is made once."""
        if self._store is None:
            listening = None
            if self._listener:
                self.master_port = self._listener.getsockname()[1]
                listening = self._listener.detach()
            self._store = TCPStore(
                self._meeting.address,
                self.master_port,
                self._meeting.hosts,
                self._meeting.host == 0,
                datetime.timedelta(seconds=STORE_TIMEOUT_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listening,
            )
        store = PrefixStore(self.run_id, self._store)
        info = RendezvousStoreInfo(self._meeting.address, self.master_port)
        return RendezvousInfo(store, self._meeting.host, self._meeting.hosts, info)


def listen(address: str) -> socket.socket:
    """Return a socket that listens at a free port of one address of this host. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(socket.SOMAXCONN)
    return listener


def main(folder: Path, processes: int, start: str) -> int:
    """Run the processes of a cell that is on this machine alone. Returns the status of `run`."""
    worker.die_with_parent()
    if LAUNCHER in os.environ:  # a profiler started us: nsys clears the umask
        worker.die_with_launcher(int(os.environ[LAUNCHER]))
        os.umask(int(os.environ[UMASK], 8))
    keep = functools.partial(write_json, CellFolder(folder).failures)
    rendezvous = Rendezvous(folder.name, RendezvousAddress())
    return run(folder, range(processes), start, rendezvous, keep)


def run(
    folder: Path, numbers: Sequence[int], start: str, rendezvous: RendezvousHandler, keep: Keep
) -> int:
    """Run the processes of a cell that are on this host, by their numbers, to their end.

    Returns the exit status: 0, or 1 after `keep` was called with how ranks ended.
    """
    os.environ[STARTER] = str(os.getpid())  # the ranks inherit it
    entrypoint: Any = worker.main
    arguments: tuple[Any, ...] = (folder, numbers, "fork")
    if start == "exec" or not _import_for_ranks(folder):
        entrypoint = sys.executable
        listed = ",".join(map(str, numbers))
        arguments = ("-u", "-m", "benchmarks.rank.worker", str(folder), listed)
    spec = WorkerSpec(
        role="rank",
        local_world_size=len(numbers),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=PAUSE_SECONDS,
        entrypoint=entrypoint,
        args=arguments,
    )
    try:
        result = RankAgent(spec, CellFolder(folder), numbers).run()
    except RankEnded as ended:
        with contextlib.suppress(OSError):  # a full disk: the log may have it
            keep(ended.args[0])
        return 1
    except SignalException as error:
        signal.signal(error.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), error.sigval)
    return int(result.is_failed())


def _import_for_ranks(folder: Path) -> bool:
    """Import what the ranks will need. Returns whether they can be forked.

    An import that fails here fails in a rank too, and the rank reports it.
    """
    with contextlib.suppress(Exception):
        cell = Cell.from_dict(json.loads(CellFolder(folder).cell.read_bytes()))
        locate(cell.target("benchmark"))
        if cell.trains:
            load(cell.strategy, cell.target("strategy"), Hosts.of(cell))
            # The imports of the first optimizer take a second.
            torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page of what is imported
    if worker.cuda_initialised():
        print("ranks start anew: something here has initialised CUDA", file=sys.stderr, flush=True)
        return False
    return True


class RankEnded(Exception):
    """Ranks ended that should not have; holds {number: {"status", "time"}}."""


class NoLogFiles(DefaultLogsSpecs):
    """No folder of torch's in TMPDIR: ranks write their own logs."""

    def __init__(self) -> None:
        super().__init__(os.devnull)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return that nothing is redirected."""
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(nowhere, nowhere, {}, {}, nowhere)


class RankAgent(LocalElasticAgent):
    """torch's elastic agent, which first writes down the ranks that ended by themselves."""

    def __init__(self, spec: WorkerSpec, folder: CellFolder, numbers: Sequence[int]) -> None:
        super().__init__(spec, NoLogFiles(), "fork")  # a command is a new process anyway
        self._folder, self._numbers = folder, numbers
        self._watcher: ExitWatcher | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait for an end, then look at the ranks as torch does, which calls this repeatedly.

        Raises RankEnded: a rank ended with another status than 0, or before it was done.
        """
        if self._watcher is None:
            pids = {self._numbers[rank.local_rank]: rank.id for rank in worker_group.workers}
            self._watcher = ExitWatcher(pids)
        failed = self._failed(self._watcher, self._watcher.wait(MONITOR_SECONDS))
        if failed:
            seen = now()
            failed += self._failed(self._watcher, self._watcher.wait_for_leaving())
            self._end({rank: self._watcher.statuses[rank] for rank in failed}, seen)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            # A rank ended between the two looks, and torch has ended the others by SIGTERM.
            statuses: dict[int, int | None] = {}
            for rank in worker_group.workers:
                if rank.global_rank in result.failures:
                    failure = result.failures[rank.global_rank]
                    statuses[self._numbers[rank.local_rank]] = failure.exitcode
            first = {rank: code for rank, code in statuses.items() if code != -signal.SIGTERM}
            self._end(first or statuses, now())
        return result

    def _failed(self, watcher: "ExitWatcher", ended: Iterable[int]) -> list[int]:
        failed = []
        for rank in ended:
            lines = read_lines(self._folder.rank_lines(rank))
            done = any(line["kind"] == Kind.DONE for line in lines)
            if watcher.statuses[rank] != 0 or not done:
                failed.append(rank)
        return failed

    def _end(self, statuses: Mapping[int, int | None], seen: float) -> NoReturn:
        """Raise RankEnded, with how ranks ended and when that was seen."""
        print(f"ranks that ended: {statuses}", file=sys.stderr, flush=True)
        failures = {}
        for rank, status in statuses.items():
            failures[str(rank)] = {"status": status, "time": seen}
        raise RankEnded(failures)


class ExitWatcher:
    """Sees within a millisecond which ranks have ended, and how. torch reaps their processes."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """`pids` are by rank."""
        self.pids = pids
        self.statuses: dict[int, int | None] = {}  # by rank; a signal if negative; None: unknown
        self._selector = selectors.DefaultSelector()
        self._descriptors: dict[int, int] = {}
        for rank, pid in pids.items():
            with contextlib.suppress(OSError):  # a kernel or container without the call: `wait`
                self._descriptors[rank] = os.pidfd_open(pid)  # sleeps for its whole time
                self._selector.register(self._descriptors[rank], selectors.EVENT_READ)

    def wait(self, seconds: float) -> list[int]:
        """Return the ranks that ended since the last call; wait up to some seconds for one."""
        self._selector.select(seconds)
        return self._newly_ended()

    def wait_for_leaving(self) -> list[int]:
        """Return the ranks that had begun to end, once they have; None is the status of late ones.

        Asked when a rank has ended: a peer may have ended earlier, and its process be there still.
        """
        ended = self._newly_ended()
        deadline = time.monotonic() + LEAVING_SECONDS
        leaving = self._leaving()
        while leaving and time.monotonic() < deadline:
            time.sleep(LEAVING_PAUSE_SECONDS)
            ended += self._newly_ended()
            leaving = self._leaving()
        self.statuses |= dict.fromkeys(leaving)
        return ended + leaving

    def _newly_ended(self) -> list[int]:
        ended = []
        for rank, pid in self.pids.items():
            if rank in self.statuses:
                continue
            try:
                result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # torch was faster, and goes on only after a status of 0
                self.statuses[rank] = 0
            else:
                if result is None:
                    continue
                self.statuses[rank] = result.si_status
                if result.si_code != os.CLD_EXITED:
                    self.statuses[rank] = -result.si_status
            ended.append(rank)
            if rank in self._descriptors:
                self._selector.unregister(self._descriptors[rank])
                os.close(self._descriptors.pop(rank))
        return ended

    def _leaving(self) -> list[int]:
        return [r for r, pid in self.pids.items() if r not in self.statuses and _is_ending(pid)]


def _is_ending(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    fields = text.rpartition(")")[2].split()
    return fields[0] in "ZX" or bool(int(fields[6]) & PF_EXITING)


def be_cell_process(
    message: Mapping[str, Any],
    folder: CellFolder,
    of_agent: Iterable[int],
    meeting: RendezvousAddress,
    listener: socket.socket | None,
    keep: Keep,
) -> NoReturn:
    """Be the forked process of a cell, in its own session and environment. Never returns.

    `message` is the launcher's; `of_agent` are descriptors of the host agent; `keep` takes how
    ranks ended.
    """
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        for descriptor in of_agent:
            os.close(descriptor)
        worker.redirect_output(folder.agent_log)
        token, start = str(message["cell"]), str(message["start"])
        early = _set_environment(message["environment"], token, folder.path)
        begin_again()
        worker.die_with_parent()
        if early:
            start = "exec"
            reason = f"{', '.join(early)} must be set before torch is imported"
            print(f"ranks start anew: {reason}", file=sys.stderr, flush=True)
        rendezvous = Rendezvous(token, meeting, listener)
        status = run(folder.path, message["numbers"], start, rendezvous, keep)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _set_environment(asked: Mapping[str, Any], token: str, folder: Path) -> list[str]:
    """Set the environment of a cell. Returns the names that libraries read earlier, as another."""
    before = dict(os.environ)
    after = merged(Variables.from_dict(asked), os.environ, str(folder))
    after |= {TOKEN: token, STARTER: str(os.getppid())}
    for name in before.keys() - after.keys():
        del os.environ[name]
    os.environ.update(after)
    write_proc_environ(TOKEN, token)
    early = []
    for name in sorted(after):
        if before.get(name) != after[name] and not name.startswith(READ_LATE):
            early.append(name)
    return early


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
