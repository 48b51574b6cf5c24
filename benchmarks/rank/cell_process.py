"""The forked process of a cell: its environment, files and end; the host agent holds one."""

import contextlib
import datetime
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

from benchmarks.agent import processes
from benchmarks.agent.processes import Variables, merged, show_in_environ
from benchmarks.agent.sampler import SamplingProcess
from benchmarks.agent.scratch import Scratch
from benchmarks.rank import worker
from benchmarks.rank import worker as lifetime
from benchmarks.rank.worker import write_to
from benchmarks.record import CellFolder, Kind, read_lines, write_json
from benchmarks.record.lines import CLOCK_VARIABLE, begin_again, now
from conf.cell import Cell
from conf.process_env import LAUNCHER, STARTER, TOKEN, UMASK
from conf.targets import locate
from trainers.hosts import Hosts
from trainers.strategy import load

# The process of a cell on one host: starts its ranks under torch's elastic agent and reports which ended first.


MONITOR_SECONDS = 0.1  # between two looks of torch at its ranks
PAUSE_SECONDS = 0.001  # torch's own, before each look


def main(folder: Path, ranks: int, start: str) -> int:
    """Run the ranks of a cell that is on this machine alone. Returns the exit status, as `run` does."""
    lifetime.die_with_parent()
    if LAUNCHER in os.environ:  # a profiler started us: nsys clears the umask
        lifetime.die_with_launcher(int(os.environ[LAUNCHER]))
        os.umask(int(os.environ[UMASK], 8))
    return run(folder, range(ranks), start, of(folder.name, MeetingPlace()))


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
            self._ends = Ends(
                {self._numbers[worker.local_rank]: worker.id for worker in worker_group.workers}
            )
        if failed := self._failed(self._ends.wait(MONITOR_SECONDS)):
            seen, failed = now(), failed + self._failed(self._ends.rest())
            self._end({rank: self._ends.statuses[rank] for rank in failed}, seen)
        result: RunResult = super()._monitor_workers(worker_group)
        if (
            result.is_failed()
        ):  # a rank ended between the two looks, and torch has ended the others by SIGTERM
            numbers = {
                worker.global_rank: self._numbers[worker.local_rank]
                for worker in worker_group.workers
            }
            statuses = {
                numbers[rank]: failure.exitcode for rank, failure in result.failures.items()
            }
            first = {rank: status for rank, status in statuses.items() if status != -signal.SIGTERM}
            self._end(first or statuses, now())
        return result

    def _end(self, statuses: Mapping[int, int | None], seen: float) -> NoReturn:
        """Write down how ranks ended, and when that was seen, in seconds since 1970. Raises RankEnded."""
        print(f"ranks that ended: {statuses}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # a full disk: the log may have it
            failures = {
                str(rank): {"status": status, "time": seen} for rank, status in statuses.items()
            }
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
            torch.optim.SGD(
                [torch.zeros(1, requires_grad=True)]
            )  # the first optimizer's imports take a second
    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page of what is imported
    if lifetime.cuda_initialised():
        print("ranks start anew: something here has initialised CUDA", file=sys.stderr, flush=True)
        return False
    return True


# How and when the ranks of an agent ended: seen within a millisecond, and before the agent ends the others.


LEAVING_SECONDS = (
    2.0  # for a process that already ends to let go of its memory, which takes a while on a GPU
)
ENDS_PAUSE_SECONDS = 0.002
PF_EXITING = 0x4  # linux/sched.h


@dataclass
class Ends:
    """The processes of the ranks, and those that have ended so far."""

    pids: Mapping[int, int]  # by rank
    statuses: dict[int, int | None] = field(
        default_factory=dict
    )  # by rank; a signal if negative; None: unknown

    def __post_init__(self) -> None:
        """Open a descriptor for every process: it becomes readable when the process ends."""
        self._poll, self._running = select.poll(), {}
        for rank, pid in self.pids.items():
            try:
                self._running[rank] = os.pidfd_open(pid)
            except OSError:  # the kernel or a container has no such call
                continue
            self._poll.register(self._running[rank], select.POLLIN)

    def wait(self, seconds: float) -> list[int]:
        """Return the ranks that ended since the last call; wait up to some seconds for one."""
        if self._running:
            self._poll.poll(1000 * seconds)
        else:
            time.sleep(seconds)
        return self._look()

    def rest(self) -> list[int]:
        """Return the ranks that had begun to end by themselves, now that they have; after LEAVING_SECONDS with status None.

        To be asked when a rank has ended: a peer may have ended earlier, and its process not be gone yet.
        """
        found = self._look()
        deadline = time.monotonic() + LEAVING_SECONDS
        while (leaving := self._leaving()) and time.monotonic() < deadline:
            time.sleep(ENDS_PAUSE_SECONDS)
            found += self._look()
        self.statuses |= dict.fromkeys(leaving)
        return found + leaving

    def _look(self) -> list[int]:
        """Return the ranks that have ended since the last look. Their processes stay for torch to be reaped."""
        found = []
        for rank, pid in self.pids.items():
            if rank in self.statuses:
                continue
            try:
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # torch was faster, and goes on only after a status of 0
                self.statuses[rank] = 0
            else:
                if end is None:
                    continue
                self.statuses[rank] = (
                    end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                )
            found.append(rank)
            if rank in self._running:
                self._poll.unregister(self._running[rank])
                os.close(self._running.pop(rank))
        return found

    def _leaving(self) -> list[int]:
        """Return the ranks whose processes have begun to end."""
        return [
            rank for rank, pid in self.pids.items() if rank not in self.statuses and _is_ending(pid)
        ]


def _is_ending(pid: int) -> bool:
    try:
        words = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return True
    return words[0] in "ZX" or bool(int(words[6]) & PF_EXITING)


# Where the processes of a cell meet: torch's static rendezvous, at one address of the first host.


LOOPBACK = "127.0.0.1"
TIMEOUT_SECONDS = 600  # of a rank that waits in the store for another, while all import and connect


@dataclass(frozen=True)
class MeetingPlace:
    """Where the hosts of a cell meet, and which of them this one is."""

    address: str = LOOPBACK  # of the first host
    port: int = 0  # there; the first host itself binds a free one
    host: int = 0
    hosts: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this host is where they meet."""
        return self.host == 0


def listen(address: str) -> socket.socket:
    """Return a socket that listens at a free port of one address of this host. Raises OSError."""
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listening.bind((address, 0))
    listening.listen(socket.SOMAXCONN)
    return listening


class OneAddress(StaticTCPRendezvous):
    """torch's static rendezvous, on a socket that we bound."""

    def __init__(self, run_id: str, meeting: MeetingPlace, listening: socket.socket | None) -> None:
        """`listening` is the socket of the first host."""
        super().__init__(
            meeting.address, meeting.port, meeting.host, meeting.hosts, run_id, TIMEOUT_SECONDS
        )
        self._meeting, self._listening = meeting, listening

    def get_backend(self) -> str:
        """Return its name, as torch's log has it."""
        return "one address"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store of the ranks, which is made once."""
        if self._store is None:
            if self._listening:
                self.master_port = self._listening.getsockname()[1]
            self._store = TCPStore(
                self._meeting.address,
                self.master_port,
                self._meeting.hosts,
                self._meeting.is_first,
                datetime.timedelta(seconds=TIMEOUT_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=self._listening.detach() if self._listening else None,
            )
        store = PrefixStore(self.run_id, self._store)
        info = RendezvousStoreInfo(self._meeting.address, self.master_port)
        return RendezvousInfo(store, self._meeting.host, self._meeting.hosts, info)


def of(run_id: str, meeting: MeetingPlace, listening: socket.socket | None = None) -> OneAddress:
    """Return the rendezvous of one agent's ranks; the first host binds its socket here if it has none yet. Raises OSError."""
    return OneAddress(
        run_id, meeting, listening or (listen(meeting.address) if meeting.is_first else None)
    )


LAST_SECONDS = 5.0  # for the process of a cell, after every process of it was ended
# What changes from cell to cell, and who reads it only after the fork: NCCL, gloo and CUDA when they are initialised, torch and
# Triton each time they compile, and we.
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


class RunningCell:
    """The forked process of a cell, and on another host than the launcher's the files that it hands on."""

    def __init__(
        self,
        message: Mapping[str, Any],
        of_agent: tuple[int, int],
        meeting: MeetingPlace,
        listening: Any,
        give_sign: Callable[[], None],
    ) -> None:
        """Fork it. `of_agent` are the agent's descriptors; `give_sign` says now and then that the agent lives."""
        self.token = str(message["cell"])
        self._scratch = None if message["folder"] else Scratch.make(self.token, message["files"])
        self._folder = CellFolder(
            self._scratch.folder if self._scratch else Path(message["folder"])
        )
        self._numbers = list(message["numbers"])
        self._states: dict[str, str] = {}
        self._pids: dict[int, int] = {}
        self._status: int | None = None
        self._sampling: SamplingProcess | None = None
        if message.get("sampled") is not None:
            around = os.environ | {
                CLOCK_VARIABLE: str(message["environment"]["set"][CLOCK_VARIABLE])
            }
            self._sampling = SamplingProcess(self._folder, self.token, message["sampled"], around)
            self._sampling.start(give_sign)
        try:
            self.pid = os.fork()
        except OSError:
            self._end_sampling()
            self.remove()
            raise
        if self.pid == 0:
            if self._sampling:
                self._sampling.let_go()
            _be_the_cell(message, self._folder, of_agent, meeting, listening)
        try:
            self.descriptor: int | None = os.pidfd_open(self.pid)  # readable when the process ends
        except OSError:  # the kernel or a container has no such call
            self.descriptor = None

    @property
    def hands_on(self) -> bool:
        """Whether the launcher is sent the files of this cell."""
        return self._scratch is not None

    def status(self) -> int | None:
        """Return the exit status as subprocess has it; None while the process runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
                if self.descriptor is not None:
                    os.close(self.descriptor)
                    self.descriptor = None
                self._end_sampling()  # before the last files are read
        return self._status

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield what is new in the files since the last call; nothing where the launcher reads them itself."""
        if self._scratch:
            yield from self._scratch.news()

    def pids(self, numbers: list[int]) -> list[int]:
        """Return the ids of processes of the cell, as far as they have reported."""
        return [pid for number, pid in self._reported().items() if number in numbers]

    def changed_states(self) -> dict[str, str]:
        """Return what each process does that now does something else; nothing where the launcher looks itself."""
        if not self._scratch:
            return {}
        now = {str(number): processes.state(pid) for number, pid in self._reported().items()}
        now["agent"] = processes.state(self.pid)
        changed = {name: state for name, state in now.items() if self._states.get(name) != state}
        self._states |= changed
        return changed

    def end(self, grace_s: float) -> list[int]:
        """End every process of the cell. Return the ids of those that survive SIGKILL."""
        survivors = processes.end(self.token, grace_s)
        processes.remove_shared_memory(self.token)
        deadline = time.monotonic() + LAST_SECONDS
        while self.status() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return survivors

    def remove(self) -> None:
        """Remove the scratch folder."""
        if self._scratch:
            self._scratch.remove()

    def _end_sampling(self) -> None:
        if self._sampling:
            self._sampling.end()

    def _reported(self) -> dict[int, int]:
        """Return the ids of the processes by number, from the first line that each wrote."""
        for number in self._numbers:
            if number not in self._pids:
                first = next(iter(read_lines(self._folder.rank_lines(number))), {})
                if isinstance(first.get("pid"), int):
                    self._pids[number] = first["pid"]
        return self._pids


def _be_the_cell(
    message: Mapping[str, Any],
    folder: CellFolder,
    of_agent: tuple[int, int],
    meeting: MeetingPlace,
    listening: Any,
) -> NoReturn:
    """Be the process of a cell, in its own session and environment. Never returns."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        for descriptor in of_agent:
            os.close(descriptor)
        write_to(folder.agent_log)
        early = _set_environment(message["environment"], str(message["cell"]), folder.path)
        begin_again()
        lifetime.die_with_parent()
        if early:
            print(
                f"ranks start anew: {', '.join(early)} must be set before torch is imported",
                file=sys.stderr,
                flush=True,
            )
        start = "exec" if early else str(message["start"])
        meeting_place = of(str(message["cell"]), meeting, listening)
        status = run(folder.path, message["numbers"], start, meeting_place)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _set_environment(asked: Mapping[str, Any], token: str, folder: Path) -> list[str]:
    """Set the environment of a cell. Return the names of variables that libraries have read already, with another value."""
    before = dict(os.environ)
    variables = merged(Variables.from_dict(asked), os.environ, str(folder))
    now = variables | {TOKEN: token, STARTER: str(os.getppid())}
    for name in before.keys() - now.keys():
        del os.environ[name]
    os.environ.update(now)
    show_in_environ(TOKEN, token)
    return sorted(
        name for name in now if before.get(name) != now[name] and not name.startswith(READ_LATE)
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
