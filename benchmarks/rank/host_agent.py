"""The agent of a host at work: serves a whole sweep, cell after cell.

It imports torch once. For each cell it forks a process that runs torch's elastic agent, which forks the ranks
(benchmarks.rank.cell_process). What the launcher and the agent say to each other is in benchmarks.agent.protocol.
"""

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.agent import network as signs_of_life
from benchmarks.agent import processes
from benchmarks.agent.network import Listening, WireWatch, reach
from benchmarks.agent.processes import with_absolute_path
from benchmarks.agent.protocol import (
    LONGEST_SILENCE_S,
    MOST_WAITING_BYTES,
    Do,
    Inbox,
    Outbox,
    Say,
    ready,
)
from benchmarks.rank import cell_process as rendezvous
from benchmarks.rank import worker as lifetime
from benchmarks.rank.cell_process import RunningCell
from benchmarks.record.safe_files import because
from conf.cell import Cell
from conf.process_env import NO_TOKEN, STARTER, TOKEN
from conf.targets import locate

PAUSE_SECONDS = 0.1  # between two looks at the files and the ends of processes, while a cell runs
BEAT_SECONDS = 1.0  # between two signs of life
DESCRIBE_SECONDS = 120.0  # for the host to be described
IMPORT_SECONDS = 120.0  # for what a cell needs to be imported, perhaps over a network
END_SECONDS = 15.0  # beyond its grace, for a cell to be ended
OURS = ("benchmarks.", "trainers.")
LIBRARIES = ("torchvision", "timm")
COMPILER = (
    "torch._dynamo.backends.inductor",
    "torch._dynamo.backends.distributed",
    "torch._inductor.compile_fx",
    "torch._inductor.async_compile",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.runtime.triton_compat",
    "torch.utils.cpp_extension",
)
ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class Agent:
    """Serves one launcher. It has one thread, or what it forks could not be trusted."""

    def __init__(self, inbox: Inbox, outbox: Outbox) -> None:
        """Read what is asked from `inbox` and write answers to `outbox`."""
        self._inbox, self._outbox = inbox, outbox
        self._cell: RunningCell | None = None
        self._modules = 0
        self._next_beat = 0.0
        self._heard, self._launcher_beats = time.monotonic(), False
        self._listening: Listening | None = None
        self._watch: WireWatch | None = None

    def serve(self) -> int:
        """Serve until the input ends or the launcher is silent. Returns the exit status."""
        self._say(Say.READY, pid=os.getpid(), torch=torch.__version__)
        do = {
            Do.TIME: self._time,
            Do.BEAT: self._beat,
            Do.LOOK: self._describe,
            Do.LISTEN: self._listen,
            Do.REACH: self._reach,
            Do.PREPARE: self._prepare,
            Do.RUN: self._run,
            Do.STACKS: self._stacks,
            Do.STOP: self._stop,
        }
        try:
            while True:
                readable = self._wait()
                if self._inbox.descriptor in readable:
                    messages = self._inbox.receive()
                    if messages is None:
                        return 0
                    for message in messages:
                        do[Do(message["do"])](message)
                        self._heard = (
                            time.monotonic()
                        )  # beats wait unread while something takes long
                if self._launcher_beats and time.monotonic() - self._heard > LONGEST_SILENCE_S:
                    return 1
                self._look()
        finally:
            if self._cell:
                self._cell.end(0.0)
            self._forget()

    def _wait(self) -> list[Any]:
        """Wait until there is something to do. Returns the descriptors that can be read."""
        ends = [self._cell.descriptor] if self._cell and self._cell.descriptor is not None else []
        looks = self._cell is not None and (self._cell.hands_on or not ends)
        timeout_s = PAUSE_SECONDS if looks else BEAT_SECONDS if self._launcher_beats else None
        writing = [self._outbox.descriptor] if self._outbox.waiting_bytes else []
        listeners = (
            self._listening.sockets
            if self._listening
            else self._watch.sockets
            if self._watch
            else []
        )
        reading: list[Any] = [self._inbox.descriptor, *ends, *listeners]
        readable = ready(reading, timeout_s, writing)
        if self._listening:
            self._listening.answer()
        return readable

    def _say(self, what: Say, **content: Any) -> None:
        self._outbox.send({"say": what.value, **content})

    def _look(self) -> None:
        """Say what is new of the cell, and give a sign of life."""
        cell = self._cell
        if cell:
            # Before the files are read: what has ended has written all.
            status, states = cell.status(), cell.changed_states()
            if self._outbox.waiting_bytes < MOST_WAITING_BYTES or status is not None:
                for chunk in cell.news():
                    self._say(Say.FILE, cell=cell.token, **chunk)
            if self._watch and (silent := self._watch.look()):
                self._say(
                    Say.SILENT,
                    cell=cell.token,
                    hosts={str(number): seconds for number, seconds in silent.items()},
                )
            if states:
                self._say(Say.STATES, cell=cell.token, states=states)
            if status is not None:
                self._say(Say.ENDED, cell=cell.token, status=status)
                self._forget()
        self._give_sign()

    def _give_sign(self) -> None:
        """Give a sign of life, if it is time for one and the launcher gives some."""
        if self._launcher_beats and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self._say(Say.BEAT)
        self._outbox.flush()

    def _forget(self) -> None:
        if self._cell:
            self._cell.remove()
            self._cell = None
        if self._watch:
            self._watch.close()
            self._watch = None

    def _run(self, message: Mapping[str, Any]) -> None:
        """Fork the process of a cell, or say why that cannot be done."""
        try:
            self._say(Say.BUSY, for_s=IMPORT_SECONDS)
            with (
                signs_of_life.given(self._outbox)
                if self._launcher_beats
                else contextlib.nullcontext()
            ):
                self._preload(Cell.from_dict(message["asked"]))
            self._fork(message)
        except OSError as error:
            if self._cell:
                self._cell.end(0.0)
            self._forget()
            self._say(Say.FAILED, cell=message["cell"], why=because(error))

    def _fork(self, message: Mapping[str, Any]) -> None:
        """Fork the process of a cell. The first of several hosts then says where they meet, before the others are asked."""
        meeting = rendezvous.MeetingPlace(**message["meeting"])
        listening = rendezvous.listen(meeting.address) if meeting.is_first else None
        mine = self._inbox.descriptor, self._outbox.descriptor
        self._cell = RunningCell(message, mine, meeting, listening, self._give_sign)
        self._say(Say.STARTED, cell=self._cell.token, pid=self._cell.pid)
        if meeting.hosts > 1:
            self._watch = WireWatch(self._cell.token, meeting.host, float(message["lost_after_s"]))
            if listening:
                ports = {
                    "port": listening.getsockname()[1],
                    "watched": self._watch.listen(meeting.address),
                }
                self._say(Say.MEETING, cell=self._cell.token, **ports)
            else:
                within_s = (
                    float(message["lost_after_s"]) / 2
                )  # meanwhile this agent gives no sign of life
                try:
                    self._watch.connect(meeting.address, int(message["watched"]), within_s)
                except OSError:
                    self._say(
                        Say.SILENT, cell=self._cell.token, hosts={str(meeting.host): within_s}
                    )
        if listening:
            listening.close()

    def _stacks(self, message: Mapping[str, Any]) -> None:
        if self._cell and self._cell.token == message["cell"]:
            processes.ask_for_stacks(self._cell.token, self._cell.pids(message["numbers"]))

    def _stop(self, message: Mapping[str, Any]) -> None:
        survivors = []
        if self._cell and self._cell.token == message["cell"]:
            self._say(Say.BUSY, for_s=float(message["grace_s"]) + END_SECONDS)
            survivors = self._cell.end(float(message["grace_s"]))
            self._look()
        self._say(Say.STOPPED, cell=message["cell"], survivors=survivors)

    def _beat(self, message: Mapping[str, Any]) -> None:
        """Take a sign of life of the launcher."""

    def _describe(self, message: Mapping[str, Any]) -> None:
        """Say what this host is, as a program of its own finds it: it imports what no rank may have."""
        command = [sys.executable, "-m", "launch.machine.facts", str(message["device"])]
        try:
            done = subprocess.run(command, capture_output=True, timeout=DESCRIBE_SECONDS)
            said = done.stdout if done.returncode == 0 else done.stderr
        except (OSError, subprocess.SubprocessError) as error:
            said = str(error).encode()
        self._say(Say.LOOKED, said=said.decode(errors="replace"))

    def _listen(self, message: Mapping[str, Any]) -> None:
        """Listen at addresses of this host, for others to try whether they reach it; without any, no longer."""
        if self._listening:
            self._listening.close()
        listening = Listening(message["addresses"], str(message["word"]))
        self._listening = listening if message["addresses"] else None
        self._say(Say.LISTENING, ports=listening.ports, refused=listening.refused)

    def _reach(self, message: Mapping[str, Any]) -> None:
        self._say(Say.REACHED, found=reach(message["ports"], str(message["word"])))

    def _time(self, message: Mapping[str, Any]) -> None:
        """Answer with this host's clock at once: the launcher sets the clock of the ranks by it (NTP, RFC 5905)."""
        self._launcher_beats = True
        self._say(Say.TIME, sent=message["sent"], monotonic=time.monotonic())

    def _prepare(self, message: Mapping[str, Any]) -> None:
        """Import what the first cell will need."""
        self._preload(Cell.from_dict(message["asked"]))

    def _preload(self, cell: Cell) -> None:
        """Import what a cell needs of ours and of known libraries: the next cell finds it. A user's own code is left out.

        An import that fails here fails in a rank too, and the rank reports it.
        """
        targets = [
            cell.target(group) for group in ("benchmark", "strategy") if group in cell.declared
        ]
        gc.disable()  # as in benchmarks.rank.host_agent
        with contextlib.suppress(Exception):
            for target in targets:
                if target.startswith(OURS):
                    locate(target)
            if cell.trains:
                torch.optim.SGD(
                    [torch.zeros(1, requires_grad=True)]
                )  # the first optimizer's imports take a second
            if cell.model.library in LIBRARIES:
                __import__(cell.model.library)
            if cell.compiled:
                _load_compiler()
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            gc.freeze()  # a collection in a rank would copy every page of what is imported
        gc.enable()


def _load_compiler() -> None:
    """Import what torch.compile imports when it is first used, and hash the files of torch and Triton, which its caches want.

    Each rank would need seconds for it. Some versions of torch ask here whether there is a GPU: they are told to ask NVML,
    for CUDA does not survive a fork (torch.cuda.is_available).
    """
    before = os.environ.get(ASK_NVML)
    os.environ[ASK_NVML] = "1"
    try:
        for name in COMPILER:
            importlib.import_module(name)
        sys.modules["torch._inductor.codecache"].torch_key()
        triton = sys.modules["torch._inductor.runtime.triton_compat"]
        if triton.HAS_TRITON:
            triton.triton_key()
    finally:
        if before is None:
            del os.environ[ASK_NVML]
        else:
            os.environ[ASK_NVML] = before


# The agent of a host: serves the launcher that holds its standard input and output.


# What an agent's environment needs from its beginning: the text that a token takes the place of, and what Python reads.
FROM_THE_BEGINNING = {TOKEN: NO_TOKEN, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def main() -> int:
    """Serve until the input ends. Returns the exit status."""
    environment = with_absolute_path(os.environ) | FROM_THE_BEGINNING
    if environment != dict(os.environ):  # started by ssh, srun or another command
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.rank.host_agent"], environment)
    if STARTER in os.environ:
        lifetime.die_with_parent()
    answers = os.dup(1)
    inbox = Inbox(os.dup(0))
    os.dup2(2, 1)  # what a library prints is no message
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that the cell is ended
    gc.disable()  # until all is imported (Agent): it would walk through it again and again, a quarter of these seconds
    pass  # with torch

    with contextlib.suppress(BrokenPipeError):  # the launcher is gone
        return Agent(inbox, Outbox(answers)).serve()
    return 1


if __name__ == "__main__":
    os._exit(main())  # Python's own end takes torch apart, for which the launcher would wait
