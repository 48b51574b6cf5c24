"""The forked process of a cell: its environment, its files, its end. The agent of a host holds one (benchmarks.rank.serve)."""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.host import processes
from benchmarks.host.environment import Variables, merged
from benchmarks.host.own_environ import show_in_environ
from benchmarks.host.sample import SamplingProcess
from benchmarks.host.scratch import Scratch
from benchmarks.rank import agent, lifetime, rendezvous
from benchmarks.rank.worker import write_to
from benchmarks.record import CellFolder, clock, read_lines
from conf.variables import STARTER, TOKEN

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
        meeting: rendezvous.MeetingPlace,
        listening: Any,
        give_sign: Callable[[], None],
    ) -> None:
        """Fork it. `of_agent` are the agent's descriptors; `give_sign` says now and then that the agent lives."""
        self.token = str(message["cell"])
        self._scratch = None if message["folder"] else Scratch.make(self.token, message["files"])
        self._folder = CellFolder(self._scratch.folder if self._scratch else Path(message["folder"]))
        self._numbers = list(message["numbers"])
        self._states: dict[str, str] = {}
        self._pids: dict[int, int] = {}
        self._status: int | None = None
        self._sampling: SamplingProcess | None = None
        if message.get("sampled") is not None:
            around = os.environ | {clock.VARIABLE: str(message["environment"]["set"][clock.VARIABLE])}
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
    meeting: rendezvous.MeetingPlace,
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
        clock.begin_again()
        lifetime.die_with_parent()
        if early:
            print(
                f"ranks start anew: {', '.join(early)} must be set before torch is imported",
                file=sys.stderr,
                flush=True,
            )
        start = "exec" if early else str(message["start"])
        meeting_place = rendezvous.of(str(message["cell"]), meeting, listening)
        status = agent.run(folder.path, message["numbers"], start, meeting_place)
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
    return sorted(name for name in now if before.get(name) != now[name] and not name.startswith(READ_LATE))
