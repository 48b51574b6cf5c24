"""The engine of several hosts: an agent on each. They write there; their files come here."""

import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.agent.processes import CELL_FOLDER, Variables
from benchmarks.agent.protocol import LONGEST_SILENCE_S, Command, Event
from benchmarks.agent.scratch import HANDED_ON
from benchmarks.record import CellFolder, safe_files, write_json
from benchmarks.record.encoding import decoded
from benchmarks.record.lines import now
from conf import schema
from conf.cell import Cell
from conf.options import Refused
from conf.process_env import TOKEN
from launch.engines.agent_channel import (
    AgentGone,
    Channel,
    RemoteHost,
    end_agents,
    first_lost,
    refusing_gone_agents,
)
from launch.engines.agent_command import agent_command, remote_cleanup
from launch.engines.engine import Lost
from launch.engines.environment import LOOPBACK, HostEnvironment, cell_variables
from launch.engines.rendezvous import HostRendezvous, find_rendezvous
from launch.machine.fleet import Fleet, Host

BEAT_S = 3.0  # between two signs of life of this launcher
FOLDER = CellFolder(Path(CELL_FOLDER))  # each agent puts its scratch folder there
AGAIN_S = 60.0  # for the new agent of a host that was lost to be ready
LAST_S = 25.0  # beyond the grace, for agents to end what does not end by itself
FAILURES_LOCK = threading.Lock()  # of the file that has how ranks of several hosts ended
# Files that every host has, and where those of the second host and the later ones go.
OF_EACH_HOST = {
    "logs/agent.log": "logs/agent-{}.log",
    "gpus.jsonl": "gpus-{}.jsonl",
    "cpu.jsonl": "cpu-{}.jsonl",
}


class HostsEngine:
    """Has ranks forked by agents on other hosts."""

    def __init__(self, limits: schema.Engine, surrounding: Mapping[str, str]) -> None:
        self._limits, self._surrounding = limits, surrounding
        self._hosts: dict[str, RemoteHost] = {}
        self._fleet = Fleet(())
        self._rendezvous: dict[tuple[str, ...], HostRendezvous] = {}
        self._device = ""  # that of the sweep
        self._clock_lock = threading.Lock()  # an answer that waits for another thread tells less
        self._closed = threading.Event()

    def open_on(self, names: Sequence[str], device: str) -> Fleet:
        """Start an agent on each host at the same time, and return the described hosts.

        Raises:
            Refused: a host cannot be reached, or cannot do what is asked; names it. All agents are
                ended then.
        """
        self._device = device
        try:
            for name in names:
                with refusing_gone_agents(name):
                    self._hosts[name] = self._start_agent(name)
            with ThreadPoolExecutor(len(names)) as pool:
                descriptions = {name: pool.submit(self._describe, name) for name in names}
            described = []
            for name, host in self._hosts.items():
                with refusing_gone_agents(name, host.channel.ended()):
                    described.append(descriptions[name].result())
                    host.set_clock()  # one after the other
        except BaseException:
            self.close()
            raise
        self._fleet = Fleet(tuple(described))
        threading.Thread(target=self._beat, name="beats", daemon=True).start()
        return self._fleet

    def _start_agent(self, name: str) -> RemoteHost:
        """Return a host whose agent was started. Raises OSError and Refused."""
        command = agent_command(self._limits, name, self._surrounding)
        return RemoteHost(name, Channel(command, self._surrounding))

    def _describe(self, name: str) -> Host:
        return self._hosts[name].describe(self._device, self._limits.start_timeout_s)

    def open(self, first: Cell) -> None:
        """Do nothing: the agents run since the plan was made."""

    def meet(self, cells: Sequence[Cell]) -> None:
        """Find where the hosts of each cell meet, before the first cell. Raises Refused."""
        for names in dict.fromkeys(cell.every_host for cell in cells):
            if len(names) > 1:
                channels = {name: self._hosts[name].channel for name in names}
                address = find_rendezvous(self._fleet.some(names), channels, self._limits)
                self._rendezvous[names] = address

    def lost(self, cell: Cell) -> str | None:
        """Return which host of a cell is lost, as a sentence; None if none is."""
        hosts = [self._hosts[name] for name in cell.every_host]
        lost = first_lost(hosts, self._limits.lost_after_s)
        if lost is None:
            return None
        return lost.sentence

    def start(
        self,
        cell: Cell,
        folder: CellFolder,
        environment: Mapping[str, str],
        profiler: Sequence[str] = (),
        sampled: bool = False,
    ) -> "HostsJob":
        """Start the processes of a cell on its hosts; they end with it.

        Of `environment` the token counts, and what NCCL logs: each host has its own.
        """
        parts = []
        for number, name in enumerate(cell.every_host):
            parts.append(CellOnHost(self._hosts[name], number, environment[TOKEN], folder))
        job = HostsJob(cell, environment[TOKEN], parts, self._limits.lost_after_s)
        for part in parts:  # before anything can be wrong: each says that it has stopped
            part.host.channel.listen(part.take)
        try:
            with contextlib.suppress(AgentGone):  # the job says which host is lost
                with self._clock_lock:
                    for part in parts:
                        part.host.set_clock(self._limits.lost_after_s)
                self._run(cell, folder, environment, sampled, parts)
        except OSError:
            job.stop(0.0)
            raise
        return job

    def _run(
        self,
        cell: Cell,
        folder: CellFolder,
        environment: Mapping[str, str],
        sampled: bool,
        parts: Sequence["CellOnHost"],
    ) -> None:
        """Have each agent start its processes. Raises AgentGone, OSError."""
        token = environment[TOKEN]
        logged = {name: environment[name] for name in ("NCCL_DEBUG_SUBSYS",) if name in environment}
        meeting: dict[str, object] = {"hosts": len(parts)}
        rendezvous = self._rendezvous.get(cell.every_host)
        if rendezvous:
            meeting["address"] = rendezvous.address
        watched = 0
        for part in parts:
            host = self._fleet[part.host.name]
            variables = self.variables(cell, host.name, token).to_dict()
            variables["set"] |= logged | part.host.clock
            gpus = None
            if sampled:
                gpus = host.machine.uuids(cell.gpus) if part.number < len(cell.hosts) else []
            numbers = []
            for number, rank_place in enumerate(cell.places):
                if rank_place.host == host.name:
                    numbers.append(number)
            part.host.channel.send(
                Command.RUN,
                cell=token,
                folder=None,
                files={"cell.json": folder.cell.read_text(encoding="utf-8")},
                asked=cell.to_dict(),
                environment=variables,
                start=self._limits.start,
                sampled=gpus,
                numbers=numbers,
                meeting=meeting | {"host": part.number},
                lost_after_s=self._limits.lost_after_s,
                watched=watched,
            )
            if part.number == 0 and len(parts) > 1:
                meeting["port"], watched = self._ports(part)

    def _ports(self, first: "CellOnHost") -> tuple[int, int]:
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
                why = first.why or "it did not say where its ranks meet"
                raise OSError(f"host {first.host.name}: {why}")
            if not first.host.answers(self._limits.lost_after_s):
                raise AgentGone(f"host {first.host.name} is lost")
        return first.ports

    def variables(self, cell: Cell, name: str, token: str) -> Variables:
        """Return what a cell asks for in the environment on one of its hosts, but its clock."""
        interface = LOOPBACK
        rendezvous = self._rendezvous.get(cell.every_host)
        if rendezvous:
            interface = rendezvous.interfaces[name]
        forbidden = self._fleet.forbidding_multicast(self._surrounding)
        where = HostEnvironment(name, interface, bool(self._limits.interface), forbidden)
        return cell_variables(cell, self._fleet[name].machine, FOLDER, token, where)

    def seek(self, cells: Sequence[Cell], stopping: Callable[[], bool]) -> None:
        """Start a new agent on each lost host; one that answers as before is lost no more.

        The old agent has left by then, with its ranks: it hears nothing of this launcher.
        """
        lost = {}
        for cell in cells:
            for name in cell.every_host:
                host_lost = self._hosts[name].lost
                if host_lost:
                    lost[name] = host_lost.heard
        end_agents([self._hosts[name] for name in lost])
        # One that was busy was heard until when it would be again.
        until = min(now(), max(lost.values(), default=0.0)) + LONGEST_SILENCE_S
        while lost and not stopping() and now() < until:
            time.sleep(0.1)
        if stopping() or not lost:
            return
        with ThreadPoolExecutor(len(lost)) as pool:
            list(pool.map(self._try_again, lost))
        for names in dict.fromkeys(cell.every_host for cell in cells):
            back = [name for name in names if name in lost and not self._hosts[name].lost]
            if not back or any(self._hosts[name].lost for name in names):
                continue
            try:
                self.meet([cell for cell in cells if cell.every_host == names])
            except Refused as error:
                for name in back:
                    self._hosts[name].is_lost(f"its agent answers again, but {error}", 0.0)

    def _try_again(self, name: str) -> None:
        """Start a new agent on a lost host; take the host as found if it answers as before."""
        with contextlib.ExitStack() as undo:
            try:
                host = self._start_agent(name)
                undo.callback(host.channel.close)
                description = host.describe(self._device, AGAIN_S)
                host.set_clock()
            except (OSError, Refused) as error:
                self._hosts[name].is_still_lost(f"tried again: {error}")
                return
            changed = description.changed(self._fleet[name])
            if changed:
                why = f"it answers again, but is not what it was ({changed})"
                self._hosts[name].is_still_lost(why)
                return
            undo.pop_all()
            self._hosts[name] = host

    def close(self) -> None:
        """End all agents, and remove what those left that were killed."""
        self._closed.set()
        statuses = {name: host.channel.ended() for name, host in self._hosts.items()}
        end_agents(self._hosts.values())
        remote_cleanup(statuses, self._limits, self._surrounding)
        self._hosts = {}

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            for host in list(self._hosts.values()):
                if host.lost:  # its full pipe would hold up all
                    continue
                with contextlib.suppress(AgentGone):
                    host.channel.send(Command.BEAT)


@dataclass
class CellOnHost:
    """What the agent of one host has said of a running cell; a thread of its own takes it."""

    host: RemoteHost
    number: int  # of the host in the cell
    token: str  # of the cell
    folder: CellFolder
    # Of the first host: where the ranks of all hosts meet, and their agents.
    ports: tuple[int, int] | None = None
    silent_s: dict[int, float] = field(
        default_factory=dict
    )  # hosts that the first one hears no more
    status: int | None = None
    survivors: list[int] | None = None  # once it was stopped
    states: dict[str, str] = field(default_factory=dict)
    why: str = ""  # why the ranks could not be started
    error: OSError | None = None  # of this machine: the disk is full
    news: threading.Event = field(default_factory=threading.Event)

    def take(self, say: Event, message: Mapping[str, Any]) -> None:
        """Take what the agent says of this cell; messages of the one before are dropped."""
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
            hosts = message["hosts"].items()
            self.silent_s = {int(number): float(seconds) for number, seconds in hosts}
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
        """Write new bytes of a file. Raises ValueError: not allowed, or a gap before them."""
        if not HANDED_ON.fullmatch(name):
            raise ValueError(f"file {name!r:.100}")
        path = self.folder.path / self._local_name(name)
        if path == self.folder.failures:
            with FAILURES_LOCK:  # two hosts often fail together
                failures = {}
                if path.exists():
                    failures = decoded(path.read_bytes())
                write_json(path, {**failures, **json.loads(data)})
        elif at is None:
            safe_files.write_whole(path, data)
        else:
            with open(safe_files.open_own(path), "ab", buffering=0) as file:  # noqa: PTH123
                if file.seek(0, 2) != at:
                    raise ValueError(
                        f"file {name}: {file.tell()} bytes are here, the next are from {at}"
                    )
                while data:
                    data = data[file.write(data) :]

    def _local_name(self, name: str) -> str:
        if self.number == 0:
            return name
        if name.startswith("nccl/"):  # the names of two hosts may be equal
            return f"nccl/{self.number}-{name.removeprefix('nccl/')}"
        return OF_EACH_HOST.get(name, name).format(self.number)


class HostsJob:
    """A job on several hosts, or on another one than this."""

    def __init__(
        self, cell: Cell, token: str, parts: Sequence[CellOnHost], lost_after_s: float
    ) -> None:
        self._cell, self._token, self._lost_after_s = cell, token, lost_after_s
        self._parts = {part.host.name: part for part in parts}

    def __iter__(self) -> Iterator[CellOnHost]:
        """Iterate over the parts, in the order of the hosts."""
        return iter(self._parts.values())

    def poll(self) -> int | None:
        """Return 0 when all hosts have ended well, another status at the first failure; else None.

        Raises:
            OSError: they could not be started on a host, or what came from there could not be
                written here.
        """
        for part in self:
            if part.error:
                raise part.error
            if part.why:
                raise OSError(f"host {part.host.name}: {part.why}")
        statuses = [part.status for part in self]
        for status in statuses:
            if status:
                return status
        if None in statuses:
            return None
        return 0

    def wait(self, seconds: float) -> None:
        """Wait so long."""
        time.sleep(seconds)

    def lost(self) -> Lost | None:
        """Return the first host that is lost; None if none is."""
        parts = list(self)
        first = parts[0]
        silent_s: dict[int, float] = {}
        for part in parts:
            silent_s |= part.silent_s
        silent_s.pop(0, None)
        # If the first hears none of several others, its own wire is cut.
        first_is_cut = len(silent_s) == len(parts) - 1 > 1
        for number, seconds in silent_s.items():
            part = parts[number]
            ear = f"host {first.host.name} hears nothing from it"
            if first_is_cut:
                part = first
                ear = "no other host hears it"
            part.host.is_lost(
                f"{ear} for {seconds:.0f} s over the network of the ranks, which may be cut at "
                "either end",
                seconds,
            )
        return first_lost((part.host for part in parts), self._lost_after_s)

    def process_state(self, number: int, pid: int) -> str:
        """Return what the agent of its host last said that a process does."""
        part = self._parts[self._cell.places[number].host]
        return part.states.get(str(number), "running")

    def agent_state(self) -> str:
        """Return the state of what started the ranks of a host, of a stuck one first."""
        states = [part.states.get("agent", "running") for part in self]
        for state in states:
            if state not in ("running", "sleeping"):
                return state
        return states[0]

    def ask_for_stacks(self, pids: Mapping[int, int]) -> None:
        """Have processes, by number, write to their logs where each of their threads stands."""
        self._send(Command.STACKS, numbers=list(pids))

    def stop(self, grace_s: float) -> list[int]:
        """End every process on every host in reach. Return the ids of survivors."""
        self._send(Command.STOP, grace_s=grace_s)
        deadline = time.monotonic() + grace_s + LAST_S
        waiting = self._not_stopped()
        while waiting and time.monotonic() < deadline:
            time.sleep(0.01)
            waiting = self._not_stopped()
        for part in waiting:
            part.host.is_lost(f"its agent did not end the processes of a cell in {LAST_S:g} s", 0.0)
        survivors: list[int] = []
        for part in self:
            survivors += part.survivors or []
        return survivors

    def _send(self, what: Command, **content: Any) -> None:
        for part in self:
            with contextlib.suppress(AgentGone):
                part.host.channel.send(what, cell=self._token, **content)

    def _not_stopped(self) -> list[CellOnHost]:
        """Return where processes may still run, and an agent that answers."""
        parts = [part for part in self if part.survivors is None]
        return [part for part in parts if part.host.answers(self._lost_after_s)]
