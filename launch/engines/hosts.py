"""The engine of several hosts: an agent on each, for the whole sweep. Its processes write there; their files come here."""

import base64
import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.agent import processes
from benchmarks.agent.processes import CELL_FOLDER, Variables
from benchmarks.agent.protocol import LONGEST_SILENCE_S, Command, Event, Reader
from benchmarks.agent.scratch import HANDED_ON
from benchmarks.record import CellFolder, safe_files, write_json
from benchmarks.record.encoding import decoded, encoded
from benchmarks.record.lines import CLOCK_VARIABLE, beginning, now
from conf import schema
from conf.cell import Cell
from conf.options import Refused, expand_path
from conf.process_env import CLOCK_BOUND, TOKEN
from conf.schema import Engine
from launch.engines import slurm
from launch.engines.engine import Lost
from launch.engines.environment import LOOPBACK, ROOT, OnHost, asked
from launch.machine.fleet import Fleet, Host, MeetingAddress, candidates, chosen

# The agent of a host as the launching process has it: a command whose standard input and output this process holds.


LONGEST_BUSY_S = 300.0
LEAVE_SECONDS = 5.0  # for an agent to leave after the end of its input
SAID_BYTES = 4096  # of the end of what the command printed


class AgentGone(OSError):
    """The agent of a host, or the command that started it, is gone or says nothing that it should say."""


class Channel:
    """Starts the agent of a host and speaks to it. A thread takes what it says.

    A message that belongs to a cell goes to the function that `listen` named; others wait for `answer`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command. Raises OSError."""
        self._printed = os.memfd_create(
            "ringside-agent"
        )  # no file that anybody would have to remove
        weakref.finalize(
            self, os.close, self._printed
        )  # why the agent is gone may be asked for after `close`
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed,
            bufsize=0, start_new_session=True,
        )  # fmt: skip
        self.heard = (
            time.monotonic()
        )  # when it last said something, or until when it said that it is busy
        self._take: Callable[[Event, dict[str, Any]], None] = lambda say, message: None
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.wrong = ""  # why what it said is no message of an agent
        self._sending = threading.Lock()
        threading.Thread(target=self._read, name="agent", daemon=True).start()

    @property
    def pid(self) -> int:
        """Return the id of the command's process."""
        return self._process.pid

    def listen(self, take: Callable[[Event, dict[str, Any]], None]) -> None:
        """Have `take` called for each message that belongs to a cell, on the thread that reads."""
        self._take = take

    def ended(self) -> int | None:
        """Return the exit status of the command; None while it runs."""
        return self._process.poll()

    def send(self, what: Command, **content: Any) -> None:
        """Ask the agent something. Raises AgentGone."""
        try:
            data = memoryview(encoded({"do": what.value, **content}))
            with self._sending:
                assert self._process.stdin is not None
                while data:
                    data = data[self._process.stdin.write(data) or 0 :]
        except (OSError, ValueError) as error:
            raise AgentGone(self.why_gone()) from error

    def answer(self, expected: Event, seconds: float) -> dict[str, Any]:
        """Return the next answer of a kind that belongs to no cell. Raises AgentGone: it does not come in so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                message = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AgentGone(f"it gave no answer for {seconds:g} s") from None
            if message is None:
                self._answers.put(None)
                raise AgentGone(self.why_gone())
            if message["say"] == expected.value:
                return message

    def close(self) -> None:
        """End the agent: it ends every process of its own. By force after LEAVE_SECONDS."""
        if self._process.stdin:
            with self._sending:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def why_gone(self) -> str:
        """Return why nothing comes any more, as a sentence without its subject: 'it ended with status 255: …'."""
        if self.wrong:
            return self.wrong
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        size = os.fstat(self._printed).st_size
        said = (
            os.pread(self._printed, SAID_BYTES, max(0, size - SAID_BYTES))
            .decode(errors="replace")
            .strip()
        )
        how = (
            f"it was ended by {processes.signal_name(status)}"
            if status < 0
            else f"it ended with status {status}"
        )
        lines = said.splitlines()
        why = [line for line in lines if "error: " in line] or lines[
            -1:
        ]  # srun says what it does about it after that
        return f"{how}: {why[0]}" if why else how

    def _read(self) -> None:
        assert self._process.stdout is not None
        reader = Reader(self._process.stdout.fileno())
        try:
            while (messages := reader.receive()) is not None:
                self.heard = time.monotonic()
                for message in messages:
                    say = Event(message["say"])
                    if "cell" in message:
                        self._take(say, message)
                    elif say == Event.BUSY:
                        self.heard += min(float(message["for_s"]), LONGEST_BUSY_S)
                    elif say != Event.BEAT:
                        self._answers.put(message)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.wrong = f"what it said is no message of an agent ({str(error)[:100]})"
        self._answers.put(None)


# Remove from hosts what agents left there that were killed.


LONGEST_S = 10.0  # on a host that may be gone altogether
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # by itself, and as shells and srun have it


def clean(
    statuses: Mapping[str, int | None], limits: schema.Engine, surrounding: Mapping[str, str]
) -> None:
    """Remove what is left on hosts, at the same time; `statuses` has for each how its agent's command had ended.

    Nothing is done where it was not killed. What cannot be reached keeps it: the next agent there removes it.
    """

    def on(name: str) -> None:
        with contextlib.suppress(OSError, Refused, subprocess.TimeoutExpired):
            words = command(limits, name, surrounding, CLEANER)
            subprocess.run(
                words,
                env=surrounding,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=LONGEST_S,
                check=False,
            )

    if names := [name for name, status in statuses.items() if status in KILLED]:
        with ThreadPoolExecutor(len(names)) as cleaning:
            list(cleaning.map(on, names))


# The agent of another host: what it is, what time it is there, and what it says of a running cell.


CLOCK_QUESTIONS = 8  # the answer that came fastest tells the time
ANSWER_S = 60.0  # for an answer that takes no work
DESCRIBED_S = 180.0
ADDING = threading.Lock()  # how ranks of several hosts ended
# Files that every host has, and where those of the second host and the later ones go.
OF_EACH_HOST = {
    "logs/agent.log": "logs/agent-{}.log",
    "gpus.jsonl": "gpus-{}.jsonl",
    "cpu.jsonl": "cpu-{}.jsonl",
}


class RemoteHost:
    """A host that an agent serves."""

    def __init__(self, name: str, channel: Channel) -> None:
        self.name, self.channel = name, channel
        self.lost: Lost | None = None
        self.clock: dict[str, str] = {}  # variables by which its ranks have the launcher's clock

    def describe(self, device: str, ready_s: float) -> Host:
        """Wait until the agent is ready, and return what the host says of itself. `device` is that of the sweep.

        Raises:
            AgentGone: it does not answer.
            Refused: it cannot do what is asked.
        """
        self.channel.answer(Event.READY, ready_s)
        self.channel.send(Command.LOOK, device=device)
        return Host.described(self.name, self.channel.answer(Event.LOOKED, DESCRIBED_S)["said"])

    def answers(self, lost_after_s: float) -> bool:
        """Return whether the agent lives, and spoke within so many seconds. The host is lost otherwise."""
        silent_s = time.monotonic() - self.channel.heard
        why = ""
        if self.channel.wrong:
            why = self.channel.wrong
        elif self.channel.ended() is not None:
            why = f"its agent is gone, {self.channel.why_gone()}"
        elif silent_s > lost_after_s:
            why = f"its agent gave no sign of life for {silent_s:.0f} s"
        if why:
            self.is_lost(why, silent_s)
        return not why

    def is_lost(self, why: str, silent_s: float) -> None:
        """Take the host as lost, unheard for so many seconds. The first reason stays."""
        self.lost = self.lost or Lost(f"host {self.name} is lost: {why}", now() - silent_s)

    def is_still_lost(self, why: str) -> None:
        """Add to why the host is lost, which it is."""
        if self.lost:
            self.lost = Lost(f"{self.lost.said}; {why}", self.lost.heard)

    def set_clock(self, answer_s: float = ANSWER_S) -> None:
        """Find the host's clock by four time stamps, of which the agent's two are one (NTP, RFC 5905, section 8).

        Raises:
            AgentGone: it does not answer.
        """
        answers = []
        for _ in range(CLOCK_QUESTIONS):
            sent = time.monotonic()
            self.channel.send(Command.TIME, sent=sent)
            answer = self.channel.answer(Event.TIME, answer_s)
            answers.append((time.monotonic() - sent, sent, float(answer["monotonic"])))
        took_s, sent, there = min(answers)
        host_beginning = beginning() + sent + took_s / 2 - there  # when its monotonic clock was 0
        self.clock = {CLOCK_VARIABLE: repr(host_beginning), CLOCK_BOUND: repr(took_s / 2)}


def first_lost(hosts: Iterable[RemoteHost], lost_after_s: float) -> Lost | None:
    """Return the first host that is lost; None if none is."""
    return next((host.lost for host in hosts if not host.answers(lost_after_s) or host.lost), None)


def end_agents(hosts: Iterable[RemoteHost]) -> None:
    """End the agents of some hosts, at the same time."""
    ending = [threading.Thread(target=host.channel.close) for host in hosts]
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join()


@dataclass
class CellOnHost:
    """What the agent of one host has said of a running cell. The thread that reads takes it; the others look."""

    host: RemoteHost
    number: int  # of the host in the cell
    token: str  # of the cell
    folder: CellFolder
    ports: tuple[int, int] | None = (
        None  # where the ranks of all hosts meet, and their agents; the first host
    )
    silent_s: dict[int, float] = field(
        default_factory=dict
    )  # hosts that the first one does not hear any more
    status: int | None = None
    survivors: list[int] | None = None  # once it was stopped
    states: dict[str, str] = field(default_factory=dict)
    why: str = ""  # why the ranks could not be started
    error: OSError | None = None  # of this machine: the disk is full
    news: threading.Event = field(default_factory=threading.Event)

    def take(self, say: Event, message: Mapping[str, Any]) -> None:
        """Take what the agent says of this cell; what it still said of the one before is dropped."""
        if message["cell"] != self.token:
            return
        if say == Event.FILE:
            try:
                self._write(str(message["name"]), message["at"], base64.b64decode(message["data"]))
            except OSError as error:
                self.error = self.error or error
        elif say == Event.MEETING:
            self.ports = int(message["port"]), int(message["watched"])
        elif say == Event.SILENT:
            self.silent_s = {
                int(number): float(seconds) for number, seconds in message["hosts"].items()
            }
        elif say == Event.STATES:
            self.states |= message["states"]
        elif say == Event.ENDED:
            self.status = int(message["status"])
        elif say == Event.STOPPED:
            self.survivors = [int(pid) for pid in message["survivors"]]
        elif say == Event.FAILED:
            self.why = str(message["why"])
        self.news.set()

    def _write(self, name: str, at: int | None, data: bytes) -> None:
        """Write new bytes of a file. Raises ValueError: the agent may not write that, or something is missing before it."""
        if not HANDED_ON.fullmatch(name):
            raise ValueError(f"file {name!r:.100}")
        path = self.folder.path / self._place(name)
        if path == self.folder.failures:
            self._add_failures(data)
        elif at is None:
            safe_files.write_whole(path, data)
        else:
            descriptor = safe_files.open_own(path)
            with open(descriptor, "ab", buffering=0) as file:  # noqa: PTH123
                if file.seek(0, 2) != at:
                    raise ValueError(
                        f"file {name}: {file.tell()} bytes are here, the next are from {at}"
                    )
                while data:
                    data = data[file.write(data) :]

    def _place(self, name: str) -> str:
        if self.number == 0:
            return name
        if name.startswith("nccl/"):  # the names of two hosts may be equal
            return f"nccl/{self.number}-{name.removeprefix('nccl/')}"
        return OF_EACH_HOST.get(name, name).format(self.number)

    def _add_failures(self, data: bytes) -> None:
        """Add the ranks of this host that ended to those of the others."""
        with ADDING:  # two hosts often fail together
            before = (
                decoded(self.folder.failures.read_bytes()) if self.folder.failures.exists() else {}
            )
            write_json(self.folder.failures, {**before, **json.loads(data)})


BEAT_S = 3.0  # between two signs of life of this launcher
FOLDER = CellFolder(Path(CELL_FOLDER))  # each agent puts its scratch folder there
AGAIN_S = 60.0  # for the new agent of a host that was lost to be ready
LAST_S = 25.0  # beyond the grace, for agents to end what does not end by itself


class HostsEngine:
    """Has ranks forked by agents on other hosts."""

    def __init__(self, limits: schema.Engine, surrounding: Mapping[str, str]) -> None:
        self._limits, self._surrounding = limits, surrounding
        self._hosts: dict[str, RemoteHost] = {}
        self._fleet = Fleet(())
        self._meetings: dict[tuple[str, ...], MeetingAddress] = {}
        self._device = ""  # that of the sweep
        self._asking_times = threading.Lock()  # an answer that waits for another thread tells less
        self._closed = threading.Event()

    def open_on(self, names: Sequence[str], device: str) -> Fleet:
        """Start an agent on each host, all at the same time, and return the hosts as they describe themselves.

        Raises:
            Refused: a host cannot be reached, or cannot do what is asked; names it. All agents are ended then.
        """
        self._device = device
        try:
            for name in names:
                with refused(name):
                    self._hosts[name] = self._started(name)
            found = []
            with ThreadPoolExecutor(len(names)) as asking:
                described = asking.map(
                    lambda host: _tried(host, device, self._limits.start_timeout_s),
                    self._hosts.values(),
                )
            for (name, host), one in zip(self._hosts.items(), described, strict=True):
                with refused(name, host.channel.ended()):
                    if isinstance(one, Exception):
                        raise one
                    found.append(one)
                    host.set_clock()  # one after the other
        except BaseException:
            self.close()
            raise
        self._fleet = Fleet(tuple(found))
        threading.Thread(target=self._beat, name="beats", daemon=True).start()
        return self._fleet

    def open(self, first: Cell) -> None:
        """Do nothing: the agents run since the plan was made."""

    def meet(self, cells: Sequence[Cell]) -> None:
        """Find where the hosts of each cell meet, before the first cell. Raises Refused."""
        for names in dict.fromkeys(cell.every_host for cell in cells):
            if len(names) > 1:
                self._meetings[names] = meeting(self._fleet.some(names), self._hosts, self._limits)

    def lost(self, cell: Cell) -> str | None:
        """Return which host of a cell is lost, as a sentence; None if none is."""
        lost = first_lost(
            (self._hosts[name] for name in cell.every_host), self._limits.lost_after_s
        )
        return lost.said if lost else None

    def start(
        self, cell: Cell, folder: CellFolder, environment: Mapping[str, str], profiler: Sequence[str] = (),
        sampled: bool = False,
    ) -> "HostsJob":  # fmt: skip
        """Start the processes of a cell on its hosts; they end with it.

        Of `environment` the token counts, and what NCCL logs: each host has an environment of its own.
        """
        token = environment[TOKEN]
        parts = [
            CellOnHost(self._hosts[name], number, token, folder)
            for number, name in enumerate(cell.every_host)
        ]
        logged = {name: environment[name] for name in ("NCCL_DEBUG_SUBSYS",) if name in environment}
        place = self._meetings.get(cell.every_host)
        met: dict[str, object] = {"hosts": len(parts)} | (
            {"address": place.address} if place else {}
        )
        watched, job = 0, HostsJob(cell, token, parts, self._limits.lost_after_s)
        for part in parts:  # before anything can be wrong: each says that it has stopped
            part.host.channel.listen(part.take)
        with (
            _ended_on_error(job),
            contextlib.suppress(AgentGone),
        ):  # the job says which host is lost
            with self._asking_times:
                for part in parts:
                    part.host.set_clock(self._limits.lost_after_s)
            for part in parts:
                host = self._fleet[part.host.name]
                variables = self.variables(cell, host.name, token).to_dict()
                variables["set"] |= logged | part.host.clock
                gpus = host.machine.uuids(cell.gpus) if part.number < len(cell.hosts) else []
                part.host.channel.send(
                    Command.RUN, cell=token, folder=None, files={"cell.json": folder.cell.read_text(encoding="utf-8")},
                    asked=cell.to_dict(), environment=variables, start=self._limits.start, sampled=gpus if sampled else None,
                    numbers=[number for number, place in enumerate(cell.places) if place.host == host.name],
                    meeting=met | {"host": part.number}, lost_after_s=self._limits.lost_after_s, watched=watched,
                )  # fmt: skip
                if part.number == 0 and len(parts) > 1:
                    met["port"], watched = self._ports(part)
        return job

    def variables(self, cell: Cell, name: str, token: str) -> Variables:
        """Return what a cell asks for in the environment of its processes on one of its hosts, without the host's clock."""
        place, host = self._meetings.get(cell.every_host), self._fleet[name]
        interface = place.interfaces[name] if place else LOOPBACK
        forbidden = self._fleet.forbidding_multicast(self._surrounding)
        where = OnHost(name, interface, bool(self._limits.interface), forbidden)
        return asked(cell, host.machine, FOLDER, token, where)

    def seek(self, cells: Sequence[Cell], stopping: Callable[[], bool]) -> None:
        """Start a new agent on each lost host of some cells. A host that answers as it did before is lost no more.

        The old agent has left by then, with its ranks: it hears nothing of this launcher.
        """
        names = dict.fromkeys(name for cell in cells for name in cell.every_host)
        lost = {name: one.heard for name in names if (one := self._hosts[name].lost)}
        end_agents([self._hosts[name] for name in lost])
        # One that was busy was heard until when it would be again.
        until = min(now(), max(lost.values(), default=0.0)) + LONGEST_SILENCE_S
        while lost and not stopping() and now() < until:
            time.sleep(0.1)
        if stopping() or not lost:
            return
        with ThreadPoolExecutor(len(lost)) as trying:
            list(trying.map(self._try_again, lost))
        for together in dict.fromkeys(cell.every_host for cell in cells):
            back = [name for name in together if name in lost and not self._hosts[name].lost]
            try:
                if back and not any(self._hosts[name].lost for name in together):
                    self.meet([cell for cell in cells if cell.every_host == together])
            except Refused as error:
                for name in back:
                    self._hosts[name].is_lost(f"its agent answers again, but {error}", 0.0)

    def _started(self, name: str) -> RemoteHost:
        """Return a host whose agent was started. Raises OSError and Refused."""
        return RemoteHost(
            name, Channel(command(self._limits, name, self._surrounding), self._surrounding)
        )

    def _try_again(self, name: str) -> None:
        """Start a new agent on a lost host; take the host as found if it answers as before."""
        with contextlib.ExitStack() as undo:
            try:
                new = self._started(name)
                undo.callback(new.channel.close)
                said = new.describe(self._device, AGAIN_S)
                new.set_clock()
            except (OSError, Refused) as error:
                self._hosts[name].is_still_lost(f"tried again: {error}")
                return
            if changed := said.changed(self._fleet[name]):
                self._hosts[name].is_still_lost(
                    f"it answers again, but is not what it was ({changed})"
                )
                return
            undo.pop_all()
            self._hosts[name] = new

    def close(self) -> None:
        """End all agents, and remove what those left that were killed."""
        self._closed.set()
        statuses = {name: host.channel.ended() for name, host in self._hosts.items()}
        end_agents(self._hosts.values())
        clean(statuses, self._limits, self._surrounding)
        self._hosts = {}

    def _ports(self, first: CellOnHost) -> tuple[int, int]:
        """Return where the first host listens for the ranks and for the agents of the others.

        Raises:
            AgentGone: its agent is gone.
            OSError: it cannot.
        """
        deadline = time.monotonic() + self._limits.start_timeout_s
        while first.ports is None:
            first.news.wait(0.1)
            first.news.clear()
            if first.why or time.monotonic() > deadline:
                raise OSError(
                    f"host {first.host.name}: {first.why or 'it did not say where its ranks meet'}"
                )
            if not first.host.answers(self._limits.lost_after_s):
                raise AgentGone(f"host {first.host.name} is lost")
        return first.ports

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            for host in [
                one for one in list(self._hosts.values()) if not one.lost
            ]:  # a full pipe would hold up all
                with contextlib.suppress(AgentGone):
                    host.channel.send(Command.BEAT)


class HostsJob:
    """A job on several hosts, or on another one than this."""

    def __init__(
        self, cell: Cell, token: str, parts: Sequence[CellOnHost], lost_after_s: float
    ) -> None:
        self._cell, self._token, self._parts, self._lost_after_s = (
            cell,
            token,
            list(parts),
            lost_after_s,
        )
        self._of = {part.host.name: part for part in parts}

    def poll(self) -> int | None:
        """Return 0 when the processes on every host have ended well, another status as soon as one did not; else None.

        Raises:
            OSError: they could not be started on a host, or what came from there could not be written here.
        """
        for part in self._parts:
            if part.error:
                raise part.error
            if part.why:
                raise OSError(f"host {part.host.name}: {part.why}")
        statuses = [part.status for part in self._parts]
        failed = [status for status in statuses if status]
        return failed[0] if failed else None if None in statuses else 0

    def wait(self, seconds: float) -> None:
        """Wait so long."""
        time.sleep(seconds)

    def lost(self) -> Lost | None:
        """Return the first host that is lost; None if none is."""
        first, silent = (
            self._parts[0],
            {n: s for part in self._parts for n, s in part.silent_s.items() if n},
        )
        for number, seconds in silent.items():
            # If the first hears none of several others, its own wire is cut.
            part, ear = (first, "no other host hears it") if len(silent) == len(self._parts) - 1 > 1 else (
                self._parts[number], f"host {first.host.name} hears nothing from it")  # fmt: skip
            part.host.is_lost(
                f"{ear} for {seconds:.0f} s over the network of the ranks, which may be cut at either end",
                seconds,
            )
        return first_lost((part.host for part in self._parts), self._lost_after_s)

    def process_state(self, number: int, pid: int) -> str:
        """Return what the agent of its host last said that a process does."""
        return self._of[self._cell.places[number].host].states.get(str(number), "running")

    def agent_state(self) -> str:
        """Return what the process does that started the ranks of a host: of one that cannot go on, if there is one."""
        states = [part.states.get("agent", "running") for part in self._parts]
        return next((state for state in states if state not in ("running", "sleeping")), states[0])

    def ask_for_stacks(self, pids: Mapping[int, int]) -> None:
        """Have processes, by number, write to their logs where each of their threads stands."""
        for part in self._parts:
            with contextlib.suppress(AgentGone):
                part.host.channel.send(Command.STACKS, cell=self._token, numbers=list(pids))

    def stop(self, grace_s: float) -> list[int]:
        """End every process on every host that can be reached. Return the ids of those that survive SIGKILL."""
        for part in self._parts:
            with contextlib.suppress(AgentGone):
                part.host.channel.send(Command.STOP, cell=self._token, grace_s=grace_s)
        deadline = time.monotonic() + grace_s + LAST_S
        while (waiting := self._not_stopped()) and time.monotonic() < deadline:
            time.sleep(0.01)
        for part in waiting:
            part.host.is_lost(f"its agent did not end the processes of a cell in {LAST_S:g} s", 0.0)
        return [pid for part in self._parts for pid in part.survivors or ()]

    def _not_stopped(self) -> list[CellOnHost]:
        """Return where processes may still run, and an agent that answers."""
        return [
            part
            for part in self._parts
            if part.survivors is None and part.host.answers(self._lost_after_s)
        ]


@contextlib.contextmanager
def _ended_on_error(job: "HostsJob") -> Iterator[None]:
    """End what runs of a job that could not be started on every host."""
    try:
        yield
    except OSError:
        job.stop(0.0)
        raise


def _tried(host: RemoteHost, device: str, ready_s: float) -> Host | Exception:
    """Return what a host says of itself, or why it does not."""
    try:
        return host.describe(device, ready_s)
    except (AgentGone, Refused) as error:
        return error


# Ask the agents of a cell's hosts where its processes meet: at an address of the first host that all others reach.


# Statuses of a shell or a Python that cannot run the agent. That of ssh, if it does not come that far, is 255.
NOT_RUN = (1, 2, 126, 127)
NEEDS = "; accepted are hosts with Ringside (engine.folder=) and a Python that has what it needs, torch too (engine.python=)"


def meeting(fleet: Fleet, hosts: Mapping[str, RemoteHost], limits: schema.Engine) -> MeetingAddress:
    """Return where the hosts of `fleet` meet. `hosts` has their agents.

    Raises:
        Refused: an agent is gone, or no address of the first is reached by all others.
    """
    word = uuid.uuid4().hex
    first, *others = fleet.hosts
    wanted = candidates(first, others, limits.interface, limits.trusted_network)
    with refused(first.name):
        channel = hosts[first.name].channel
        channel.send(Command.LISTEN, addresses=wanted, word=word)
        listening = channel.answer(Event.LISTENING, ANSWER_S)
    answers = {}
    for other in others:
        with refused(other.name):
            hosts[other.name].channel.send(Command.REACH, ports=listening["ports"], word=word)
    for other in others:
        with refused(other.name):
            answers[other.name] = hosts[other.name].channel.answer(Event.REACHED, ANSWER_S)["found"]
    with refused(first.name):
        channel.send(Command.LISTEN, addresses=[], word=word)
        channel.answer(Event.LISTENING, ANSWER_S)
    return chosen(first, wanted, listening["refused"], answers)


@contextlib.contextmanager
def refused(name: str, status: int | None = None) -> Iterator[None]:
    """Have an agent that is gone be a sentence that names its host. `status` is that of the command that started it."""
    try:
        yield
    except AgentGone as error:
        needs = NEEDS if status in NOT_RUN else ""
        raise Refused(f"nodes={name}: no agent serves there: {error}{needs}") from None
    except OSError as error:
        raise Refused(f"nodes={name}: its agent could not be started: {error}") from None


# Make the command that starts the agent of a host: what the engine puts before it, and the agent's own words.


AGENT = ("-m", "benchmarks.rank.host_agent")
CLEANER = ("-m", "benchmarks.agent.scratch")  # removes what a killed agent left
HOST = "{host}"  # in engine.prefix
# No question is ever asked; a host whose key is not known is refused; a dead connection ends after 15 s. An existing shared
# connection (ControlMaster) is used, but none of ours outlives its host's agent, and no port of the user's is forwarded.
SSH = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ServerAliveInterval=5",
       "-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes")  # fmt: skip
# Beside other steps of the job. Its pipe is not --unbuffered, which would make it a terminal that breaks long lines.
SRUN = (
    "srun",
    "--overlap",
    "--nodes=1",
    "--ntasks=1",
    "--kill-on-bad-exit=1",
    "--export=ALL",
    "--mpi=none",
)


def command(
    engine: Engine, host: str, surrounding: Mapping[str, str], program: Sequence[str] = AGENT
) -> list[str]:
    """Return the command that starts the agent of a host, or another program there, with its stdin and stdout.

    Raises:
        Refused: engine=slurm outside an allocation.
    """
    python, folder = engine.python or sys.executable, engine.folder or str(ROOT)
    if engine.name == "ssh":
        configured = (
            ["-F", str(expand_path("engine.ssh_config", engine.ssh_config))]
            if engine.ssh_config
            else []
        )
        there = f"cd {shlex.quote(folder)} && exec {shlex.join([python, *program])}"  # a shell of that host reads it
        return [*SSH, *configured, "--", host, there]
    if engine.name == "slurm":
        # Without it a step may have one core (Slurm 22.05), or as many as one task of the job (24.11).
        cores = (
            [f"--cpus-per-task={of_host}"] if (of_host := slurm.cores(host, surrounding)) else []
        )
        return [*SRUN, *cores, f"--nodelist={host}", f"--chdir={folder}", python, *program]
    # Not every such program keeps the working folder.
    return [
        *(word.replace(HOST, host) for word in engine.prefix),
        "env",
        f"--chdir={folder}",
        python,
        *program,
    ]
