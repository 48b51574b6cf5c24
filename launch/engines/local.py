"""The engine of this machine: one agent serves the sweep; a profiler starts its pass itself."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.agent import processes
from benchmarks.agent.processes import Variables, merged
from benchmarks.agent.protocol import Command, Event
from benchmarks.agent.sampler import Sampler
from benchmarks.record import CellFolder, safe_files
from conf.cell import Cell
from conf.host import NO_TOKEN, TOKEN
from launch.engines.agent_channel import AGENT, AgentGone, CommandChannel
from launch.engines.environment import (
    FOREIGN,
    ROOT,
    cell_process_command,
    cell_variables,
    common_variables,
    scrubbed,
)
from launch.machine.devices import Machine

LAST_WAIT_S = 5.0  # for what started the ranks, after every process of its cell was ended
STUCK = ("stopped", "tracing-stop", "disk-sleep")


class LocalEngine:
    """Has ranks forked by an agent on this machine."""

    def __init__(
        self,
        machine: Machine,
        surrounding: Mapping[str, str],
        start_method: str,
        profiler_grace_s: float,
    ) -> None:
        """`start_method` is `engine.start`; `profiler_grace_s` is for a report to be written."""
        self._machine, self._surrounding = machine, surrounding
        self._start_method = start_method
        self._profiler_grace_s = profiler_grace_s
        self._agent: CommandChannel | None = None

    def open(self, first: Cell) -> None:
        """Start the agent, which imports meanwhile what a cell needs."""
        with contextlib.suppress(OSError):
            self._begin(first)

    def _begin(self, first: Cell) -> CommandChannel:
        """Return the agent; start it where none lives. Raises OSError."""
        if self._agent is None or self._agent.ended() is not None:
            variables = common_variables(self._machine) | {TOKEN: NO_TOKEN}
            environment = merged(Variables(variables, {}, FOREIGN), self._surrounding)
            command = [sys.executable, *AGENT]
            self._agent = CommandChannel(command, processes.started_by_me(environment))
            with contextlib.suppress(AgentGone):  # it is told where a cell is started
                self._agent.send(Command.PREPARE, asked=first.to_dict())
        return self._agent

    def start(
        self,
        cell: Cell,
        folder: CellFolder,
        token: str,
        added: Mapping[str, str],
        profiler: Sequence[str] = (),
        sampled: bool = False,
    ) -> "ServedJob | ProfiledJob":
        """Start the processes of a cell. A profiler follows new programs, not forks."""
        variables = cell_variables(cell, self._machine, folder, token).with_set(added)
        if profiler:
            command = [*profiler, *cell_process_command(folder, cell, "exec")]
            # The report of nsys contains its environment.
            environment = scrubbed(merged(variables, self._surrounding), cell.runs_script)
            return ProfiledJob(command, folder, token, environment, self._profiler_grace_s)
        if self._agent and processes.state(self._agent.pid) == "stopped":
            self.close()
            raise AgentGone("the agent that starts ranks was stopped (SIGSTOP) between two runs")
        job = ServedJob(token)
        with contextlib.ExitStack() as sampling:
            if sampled:
                uuids = self._machine.uuids(cell.gpus)
                sampling.enter_context(Sampler(folder, uuids, token))
            job.agent = self._begin(cell)
            job.agent.listen(job.take)
            job.agent.send(
                Command.RUN,
                cell=token,
                folder=str(folder.path),
                asked=cell.to_dict(),
                environment=variables.to_dict(),
                numbers=list(range(len(cell.places))),
                start=self._start_method,
                meeting={},
            )
            job.at_end = sampling.pop_all()
        return job

    def lost(self, cell: Cell) -> None:
        """Return that no host is lost."""

    def close(self) -> None:
        """End the agent."""
        if self._agent:
            self._agent.close()
            self._agent = None


class _LocalJob:
    """Processes of this machine whose environment holds the token of a cell."""

    def __init__(self, token: str) -> None:
        self._token = token

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def lost(self) -> None:
        """Return that no host is lost: this machine is here."""

    def process_state(self, number: int, pid: int) -> str:
        return processes.state(pid)

    def ask_for_stacks(self, pids: Mapping[int, int]) -> None:
        """Have ranks write to their logs where each of their threads stands."""
        processes.ask_for_stacks(self._token, list(pids.values()))

    def stop(self, grace_s: float) -> list[int]:
        survivors = processes.end(self._token, grace_s)
        processes.remove_shared_memory(self._token)
        return survivors


class ServedJob(_LocalJob):
    """A job whose processes the agent of this machine has forked."""

    agent: CommandChannel  # set before it is asked to start them

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self.at_end = contextlib.ExitStack()  # the sampler's end
        self._pid: int | None = None  # of the process that started the ranks
        self._status: int | None = None
        self._why = ""
        self._settled = threading.Event()  # how it ended, or that it could not start

    def take(self, say: Event, message: Mapping[str, Any]) -> None:
        """Take what the agent says of this cell. Another thread calls it."""
        if message["cell"] != self._token:
            return
        if say == Event.STARTED:
            self._pid = message["pid"]
        elif say == Event.ENDED:
            self._status = message["status"]
            self._settled.set()
        elif say == Event.FAILED:
            self._why = message["why"]
            self._settled.set()

    def wait(self, seconds: float) -> None:
        """Wait so long, or until the agent tells how the processes ended."""
        self._settled.wait(seconds)

    def poll(self) -> int | None:
        """Return the exit status of what started the ranks, or of an agent that ended; else None.

        Raises OSError: the ranks could not be started.
        """
        if self._why:
            raise OSError(self._why)
        if self._status is None:
            return self.agent.ended()
        return self._status

    def agent_state(self) -> str:
        """Return what the process does that started the ranks, or an agent that is stuck."""
        state = processes.state(self.agent.pid)
        if state in STUCK or self._pid is None:
            return state
        return processes.state(self._pid)

    def stop(self, grace_s: float) -> list[int]:
        """End every process. Return the ids of those that survive SIGKILL."""
        survivors = super().stop(grace_s)
        deadline = time.monotonic() + LAST_WAIT_S
        while not self._settled.is_set() and self.agent.ended() is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        if self._status is None:  # the next cell gets another agent
            self.agent.close()
        self.at_end.close()
        return survivors


class ProfiledJob(_LocalJob):
    """A job that a profiler starts."""

    def __init__(
        self,
        command: Sequence[str],
        folder: CellFolder,
        token: str,
        environment: Mapping[str, str],
        profiler_grace_s: float,
    ) -> None:
        super().__init__(token)
        self._profiler_grace_s = profiler_grace_s
        with os.fdopen(safe_files.open_own(folder.agent_log), "ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=processes.started_by_me(environment, through_profiler=True),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Return the exit status of the profiler; None while it runs."""
        return self._process.poll()

    def agent_state(self) -> str:
        """Return what the kernel says that the profiler does."""
        return processes.state(self._process.pid)

    def stop(self, grace_s: float) -> list[int]:
        """End every process and remove shared memory. Return the ids of survivors.

        The profiler is asked first and alone: its report is lost if it is killed.
        """
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=self._profiler_grace_s)
        survivors = super().stop(grace_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=LAST_WAIT_S)
        return survivors
