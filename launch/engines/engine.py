"""The seam between supervision and the processes of a cell: an engine starts them, and what it returns is a running job.

Supervision (launch.supervision) keeps the deadlines and names the causes. It knows no process but through a Job.
"""

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.host import processes
from benchmarks.record import CellFolder, own_files
from conf.cell import Cell
from conf.variables import TOKEN
from launch.engines.environment import ROOT, arguments

LAST_WAIT_S = 5.0  # for the agent, after every process of its cell was ended


class Job(Protocol):
    """The running processes of one cell: the agent, the ranks and the servers that it started, and what these started."""

    def poll(self) -> int | None:
        """Return the exit status of the agent as subprocess has it; None while it runs."""

    def process_state(self, pid: int) -> str:
        """Return what a process does: 'running', 'stopped', 'zombie', …; 'gone' if there is none."""

    def agent_state(self) -> str:
        """Return what the agent does, in the same words."""

    def ask_for_stacks(self, pids: Sequence[int]) -> None:
        """Have ranks write to their logs where each of their threads stands."""

    def stop(self, grace_s: float) -> list[int]:
        """End every process within about `grace_s` seconds, by force after that. Return the ids of those that survive."""


class CellEngine(Protocol):
    """Starts the processes of cells."""

    def start(
        self, cell: Cell, folder: CellFolder, environment: Mapping[str, str], profiler: Sequence[str] = ()
    ) -> Job:
        """Start the processes of a cell in its prepared folder. `profiler` is the command of a profiler that starts the agent.

        Raises:
            OSError: they cannot be started.
        """


@dataclass(frozen=True)
class LocalEngine:
    """Starts agents on this machine, as processes of this one."""

    how: str = "auto"  # how ranks start: `engine.start`
    profiler_grace_s: float = 5.0  # for a profiler to write what it recorded

    def start(
        self, cell: Cell, folder: CellFolder, environment: Mapping[str, str], profiler: Sequence[str] = ()
    ) -> "LocalJob":
        """Start the agent of a cell. A profiler follows processes that start anew, not forks."""
        command = [*profiler, *arguments(folder, cell, "exec" if profiler else self.how)]
        with os.fdopen(own_files.open_own(folder.agent_log), "ab") as log:
            agent = subprocess.Popen(
                command, cwd=ROOT, env=processes.started_by_me(environment, bool(profiler)), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return LocalJob(agent, environment[TOKEN], self.profiler_grace_s if profiler else None)


class LocalJob:
    """A job on this machine. Its processes are those whose environment holds its token, however they were started."""

    def __init__(self, agent: "subprocess.Popen[bytes]", token: str, profiler_grace_s: float | None) -> None:
        """`profiler_grace_s` is None if no profiler started the agent."""
        self._agent, self._token, self._profiler_grace_s = agent, token, profiler_grace_s

    def poll(self) -> int | None:
        """Return the exit status of the agent, or of the profiler that started it; None while it runs."""
        return self._agent.poll()

    def process_state(self, pid: int) -> str:
        """Return what the kernel says that a process does; 'gone' if there is none."""
        return processes.state(pid)

    def agent_state(self) -> str:
        """Return what the kernel says that the agent does, or the profiler that started it."""
        return processes.state(self._agent.pid)

    def ask_for_stacks(self, pids: Sequence[int]) -> None:
        """Have ranks write to their logs where each of their threads stands."""
        processes.ask_for_stacks(self._token, list(pids))

    def stop(self, grace_s: float) -> list[int]:
        """End every process and remove their shared memory. Return the ids of those that survive SIGKILL.

        A profiler is asked first and alone: it ends what it started, and its report is lost if it is killed.
        """
        if self._profiler_grace_s is not None and self._agent.poll() is None:
            self._agent.terminate()
            self._wait(self._profiler_grace_s)
        survivors = processes.end(self._token, grace_s)
        processes.remove_shared_memory(self._token)
        self._wait(LAST_WAIT_S)
        return survivors

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(timeout=seconds)
