"""The agent of a host as the launcher has it: a command whose stdin and stdout it holds."""

import contextlib
import os
import queue
import shlex
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import RawIOBase
from typing import Any, cast

from analysis.text import redact
from benchmarks.agent import processes
from benchmarks.agent.protocol import MOST_BYTES, Command, Event, Reader, read_event
from benchmarks.record.encoding import encoded
from benchmarks.record.lines import CLOCK_VARIABLE, beginning, now
from benchmarks.record.safe_files import because
from benchmarks.record.safe_text import one_line
from conf.host import CLOCK_BOUND
from conf.options import Refused, expand_path
from conf.schema import Engine
from launch.engines import slurm
from launch.engines.engine import Lost
from launch.machine.facts import ROOT
from launch.machine.fleet import Host

LONGEST_BUSY_S = 300.0
LEAVE_S = 5.0  # for an agent to leave after the end of its input
STDERR_BYTES = 4096  # of the end of what the command printed
MOST_QUOTED = 100  # characters of a line that is not a message
MOST_ANSWERS = 64  # that nobody took
LONGEST_BEFORE_READY = 1 << 20  # bytes of a line
CLOCK_QUESTIONS = 8  # the answer that came fastest tells the time
POLL_S = 0.01  # between two looks whether a connection is closed
ANSWER_S = 60.0  # for an answer that takes no work
DESCRIBED_S = 180.0
# Statuses of a shell or a Python that cannot run the agent. That of ssh, if it does not come that
# far, is 255.
NOT_RUN = (1, 2, 126, 127)
NEEDS = (
    ". What to do: name the folder of Ringside on that host (engine.folder=) and a Python with "
    "torch and all that Ringside needs (engine.python=)"
)
AGENT = ("-m", "benchmarks.rank.host_agent")
HOST = "{host}"  # in engine.prefix
# No question is ever asked; a host whose key is not known is refused; a dead connection ends after
# 15 s. An existing shared connection (ControlMaster) is used, but none of ours outlives its host's
# agent, and no port of the user's is forwarded.
SSH = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes",
       "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no",
       "-o", "ClearAllForwardings=yes")  # fmt: skip
# Beside other steps of the job. Its pipe is not --unbuffered, which would make it a terminal that
# breaks long lines.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--kill-on-bad-exit=1", "--export=ALL",
        "--mpi=none")  # fmt: skip
Message = dict[str, Any]


class AgentGone(OSError):
    """The agent of a host, or its command, is gone or says nothing that it should say."""


class Channel:
    """Speaks to the agent of a host. A thread takes what it says.

    A cell's message goes to the function that `listen` named; others wait for `answer`.
    """

    def __init__(self, output: RawIOBase, source: int) -> None:
        """Write to `output`, and read from the descriptor `source`."""
        self._output, self._source = output, source
        # When it last said something, or until when it said that it is busy.
        self.heard = time.monotonic()
        self._take: Callable[[Event, Message], None] = lambda say, message: None
        self._answers: queue.Queue[Message | None] = queue.Queue()
        self.wrong = ""  # why what it said is not a message of an agent
        self._sending = threading.Lock()
        threading.Thread(target=self._read, name="agent", daemon=True).start()

    def listen(self, take: Callable[[Event, Message], None]) -> None:
        """Have `take` called for each message that belongs to a cell, on the thread that reads."""
        self._take = take

    def ended(self) -> int | None:
        """Return the exit status of the agent, 0 where it is not known; None while it runs."""
        raise NotImplementedError

    def send(self, what: Command, **content: Any) -> None:
        """Ask the agent something. Raises AgentGone."""
        try:
            data = memoryview(encoded({"do": what.value, **content}))
            with self._sending:
                while data:
                    data = data[self._output.write(data) or 0 :]
        except (OSError, ValueError) as error:
            raise AgentGone(self.why_gone()) from error

    def answer(self, expected: Event, seconds: float) -> Message:
        """Return the next answer of a kind that belongs to no cell. Raises AgentGone."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                message = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AgentGone(f"it gave no answer for {seconds:g} s") from None
            if message is None:
                self._answers.put(None)
                raise AgentGone(self.why_gone())
            if message["say"] == expected:
                return message

    def close(self) -> None:
        """End the agent: it ends every process of its own. By force after LEAVE_S."""
        raise NotImplementedError

    def why_gone(self) -> str:
        """Return why nothing comes any more, as 'it ended with status 255: …'."""
        return self.wrong or "it closed its output"

    def _read(self) -> None:
        reader = Reader(self._source, LONGEST_BEFORE_READY)
        line = b""
        try:
            while True:
                lines = reader.receive()
                if lines is None:
                    break
                self.heard = time.monotonic()
                for line in lines:
                    message = read_event(line)
                    say = message["say"]
                    if "cell" in message:
                        self._take(say, message)
                    elif say == Event.BUSY:
                        self.heard += min(message["for_s"], LONGEST_BUSY_S)
                    elif say != Event.BEAT:
                        reader.longest = MOST_BYTES
                        self._answers.put(message)
                        if self._answers.qsize() > MOST_ANSWERS:
                            raise ValueError("nobody asked for so many answers")
        except OSError as error:
            self.wrong = f"the connection to it broke: {because(error)}"
        except ValueError as error:
            printed = redact(line[:STDERR_BYTES].decode(errors="replace"))
            quoted = f"'{one_line(printed, MOST_QUOTED)}'"
            self.wrong = (
                f"it sent {quoted}, which is not a message of an agent ({redact(str(error))})"
            )
            if reader.longest == LONGEST_BEFORE_READY:
                self.wrong = (
                    f"its login printed {quoted} and must print nothing. What to do: move what "
                    "prints it out of the shell's start files (~/.bashrc, ~/.profile, /etc/motd)"
                )
        self._answers.put(None)


class CommandChannel(Channel):
    """Starts the agent of a host by a command, and holds its input and output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command. Raises OSError."""
        self._stderr = os.memfd_create("ringside-agent")  # no file that anybody has to remove
        # Why the agent is gone may be asked for after `close`.
        weakref.finalize(self, os.close, self._stderr)
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        super().__init__(cast(RawIOBase, self._process.stdin), self._process.stdout.fileno())

    @property
    def pid(self) -> int:
        """Return the id of the command's process."""
        return self._process.pid

    def ended(self) -> int | None:
        """Return the exit status of the command; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """End the agent: it ends every process of its own. By force after LEAVE_S."""
        with self._sending:
            self._output.close()
        try:
            self._process.wait(timeout=LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def why_gone(self) -> str:
        """Return why nothing comes any more, as 'it ended with status 255: …'."""
        if self.wrong:
            return self.wrong
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return super().why_gone()
        sentence = f"it ended with status {status}"
        if status < 0:
            sentence = f"it was ended by {processes.signal_name(status)}"
        size = os.fstat(self._stderr).st_size
        printed = os.pread(self._stderr, STDERR_BYTES, max(0, size - STDERR_BYTES))
        lines = printed.decode(errors="replace").strip().splitlines()
        # srun says what it does about an error after it.
        errors = [line for line in lines if "error: " in line] or lines[-1:]
        if errors:
            sentence += f": {redact(errors[0])}"
        return sentence


class SocketChannel(Channel):
    """Speaks to an agent that came by a connection, which ends with it (engine=env)."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        super().__init__(connection.makefile("wb", buffering=0), connection.fileno())

    def ended(self) -> int | None:
        """Return 0 once the agent has closed the connection; None before."""
        try:
            return None if self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) else 0
        except BlockingIOError:
            return None
        except OSError:
            return 0

    def close(self) -> None:
        """End the agent, which ends every process of its own. Without it after LEAVE_S."""
        deadline = time.monotonic() + LEAVE_S
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        while self.ended() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._connection.close()


class RemoteHost:
    """State of a remote agent: its channel, its clock, and whether the host is lost."""

    def __init__(self, name: str, channel: Channel) -> None:
        self.name, self.channel = name, channel
        self.lost: Lost | None = None
        self.clock: dict[str, str] = {}  # variables by which its ranks have the launcher's clock

    def describe(self, device: str, ready_s: float) -> Host:
        """Return what the host says of itself once its agent is ready. `device` is the sweep's.

        Raises:
            AgentGone: it does not answer.
            Refused: it cannot do what is asked.
        """
        self.channel.answer(Event.READY, ready_s)
        self.channel.send(Command.LOOK, device=device)
        return Host.described(self.name, self.channel.answer(Event.LOOKED, DESCRIBED_S)["said"])

    def answers(self, lost_after_s: float) -> bool:
        """Return whether the agent spoke within so many seconds. Else the host is lost."""
        silent_s = time.monotonic() - self.channel.heard
        if self.channel.wrong:
            self.is_lost(self.channel.wrong, silent_s)
        elif self.channel.ended() is not None:
            self.is_lost(f"its agent is gone, {self.channel.why_gone()}", silent_s)
        elif silent_s > lost_after_s:
            self.is_lost(f"its agent gave no sign of life for {silent_s:.0f} s", silent_s)
        else:
            return True
        return False

    def is_lost(self, why: str, silent_s: float) -> None:
        """Take the host as lost, unheard for so many seconds. The first reason stays."""
        self.lost = self.lost or Lost(f"host {self.name} is lost: {why}", now() - silent_s)

    def set_clock(self, answer_s: float = ANSWER_S) -> None:
        """Find the host's clock by four time stamps (NTP, RFC 5905, 8). Raises AgentGone."""
        answers = []
        for _ in range(CLOCK_QUESTIONS):
            sent = time.monotonic()
            self.channel.send(Command.TIME, sent=sent)
            answer = self.channel.answer(Event.TIME, answer_s)
            answers.append((time.monotonic() - sent, sent, answer["monotonic"]))
        took_s, sent, there = min(answers)
        host_beginning = beginning() + sent + took_s / 2 - there  # when its monotonic clock was 0
        self.clock = {CLOCK_VARIABLE: repr(host_beginning), CLOCK_BOUND: repr(took_s / 2)}


def first_lost(hosts: Iterable[RemoteHost], lost_after_s: float) -> Lost | None:
    """Return the first host that is lost; None if none is."""
    for host in hosts:
        host.answers(lost_after_s)
        if host.lost:
            return host.lost
    return None


@contextlib.contextmanager
def refusing_gone_agents(name: str, status: int | None = None) -> Iterator[None]:
    """Convert AgentGone to Refused. `status` is that of the command that started the agent."""
    try:
        yield
    except AgentGone as error:
        needs = ""
        if status in NOT_RUN:
            needs = NEEDS
        raise Refused(f"nodes={name}: no agent runs there: {error}{needs}") from None
    except OSError as error:
        raise Refused(f"nodes={name}: its agent could not be started: {error}") from None


def agent_command(engine: Engine, host: str, surrounding: Mapping[str, str]) -> list[str]:
    """Return the command that starts the agent of a host.

    Raises Refused: engine=slurm outside an allocation.
    """
    python = engine.python or sys.executable
    folder = engine.folder or str(ROOT)
    if engine.name == "ssh":
        command = [*SSH]
        if engine.ssh_config:
            command += ["-F", str(expand_path("engine.ssh_config", engine.ssh_config))]
        # A shell of that host reads the last word.
        there = f"cd {shlex.quote(folder)} && exec {shlex.join([python, *AGENT])}"
        return [*command, "--", host, there]
    if engine.name == "slurm":
        command = [*SRUN]
        cores = slurm.cores(host, surrounding)
        if cores:
            # Without it a step may have one core (Slurm 22.05), or as many as one task (24.11).
            command.append(f"--cpus-per-task={cores}")
        command.append(f"--nodelist={host}")
        if engine.container is None:
            return [*command, f"--chdir={folder}", python, *AGENT]
        # pyxis (NVIDIA/pyxis, README): an image of enroot, and what of the host is in it.
        command += [f"--container-image={engine.container}", f"--container-workdir={folder}"]
        mounts = ",".join([f"{folder}:{folder}", *engine.container_mounts])
        return [*command, f"--container-mounts={mounts}", python, *AGENT]
    if engine.name == "env":  # the agent of this node; the others come by themselves
        return [python, *AGENT]
    prefix = [word.replace(HOST, host) for word in engine.prefix]
    # Not every such program keeps the working folder.
    return [*prefix, "env", f"--chdir={folder}", python, *AGENT]
