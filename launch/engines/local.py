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
from conf import schema
from conf.cell import Cell
from conf.host import NO_TOKEN, TOKEN
from launch.engines.agent_channel import AGENT, AgentGone, CommandChannel
from launch.engines.engine import CellEngine, CellPass, Job
from launch.engines.environment import (
    FOREIGN,
    cell_process_command,
    cell_variables,
    common_variables,
    scrubbed,
)
from launch.machine.devices import Machine
from launch.machine.facts import ROOT

LAST_WAIT_S = 5.0  # for what started the ranks, after every process of its cell was ended
STUCK = ("stopped", "tracing-stop", "disk-sleep")


class LocalEngine(CellEngine):
    """Has ranks forked by an agent on this machine."""

    def __init__(
        self, machine: Machine, surrounding: Mapping[str, str], limits: schema.Engine
    ) -> None:
        self._machine, self._surrounding, self._limits = machine, surrounding, limits
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

    def start(self, cell_pass: CellPass) -> Job:
        """Start the processes of a cell. A profiler follows new programs, not forks."""
        cell, folder, token = cell_pass.cell, cell_pass.folder, cell_pass.token
        variables = cell_variables(cell, self._machine, folder, token).with_set(cell_pass.added)
        if cell_pass.profiler:
            command = [*cell_pass.profiler, *cell_process_command(folder, cell, "exec")]
            # The report of nsys contains its environment.
            environment = scrubbed(merged(variables, self._surrounding), cell.runs_script)
            return _ProfiledJob(command, folder, token, environment, self._limits.stop_grace_s)
        if self._agent and processes.state(self._agent.pid) == "stopped":
            self.close()
            raise AgentGone("the agent that starts ranks was stopped (SIGSTOP) between two runs")
        job = _ServedJob(token)
        with contextlib.ExitStack() as sampling:
            if cell_pass.sampled:
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
                start=self._limits.start,
                meeting={},
            )
            job.at_end = sampling.pop_all()
        return job

    def close(self) -> None:
        """End the agent."""
        if self._agent:
            self._agent.close()
            self._agent = None


class _LocalJob(Job):
    """Processes of this machine whose environment holds the token of a cell."""

    def __init__(self, token: str) -> None:
        self._token = token

    def process_state(self, number: int, pid: int) -> str:
        return processes.state(pid)

    def ask_for_stacks(self, pids: Mapping[int, int]) -> None:
        processes.ask_for_stacks(self._token, list(pids.values()))

    def stop(self, grace_s: float) -> list[int]:
        survivors = processes.end(self._token, grace_s)
        processes.remove_shared_memory(self._token)
        return survivors


class _ServedJob(_LocalJob):
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
        self._settled.wait(seconds)

    def poll(self) -> int | None:
        if self._why:
            raise OSError(self._why)
        if self._status is None:
            return self.agent.ended()
        return self._status

    def agent_state(self) -> str:
        state = processes.state(self.agent.pid)
        if state in STUCK or self._pid is None:
            return state
        return processes.state(self._pid)

    def stop(self, grace_s: float) -> list[int]:
        survivors = super().stop(grace_s)
        deadline = time.monotonic() + LAST_WAIT_S
        while not self._settled.wait(0.005) and self.agent.ended() is None:
            if time.monotonic() > deadline:
                break
        if self._status is None:  # the next cell gets another agent
            self.agent.close()
        self.at_end.close()
        return survivors


class _ProfiledJob(_LocalJob):
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
        return self._process.poll()

    def agent_state(self) -> str:
        return processes.state(self._process.pid)

    def stop(self, grace_s: float) -> list[int]:
        # The profiler is asked first and alone: its report is lost if it is killed.
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=self._profiler_grace_s)
        survivors = super().stop(grace_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=LAST_WAIT_S)
        return survivors
