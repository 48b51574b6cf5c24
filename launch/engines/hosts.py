"""The engine of several hosts: an agent on each. They write there; their files come here."""

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.agent.processes import CELL_FOLDER, Variables
from benchmarks.agent.protocol import Command, Event, RankEnd
from benchmarks.agent.scratch import HANDED_ON, MOST_FILES
from benchmarks.record import CellFolder, safe_files, write_json
from conf import schema
from conf.cell import Cell
from launch.engines.agent_channel import (
    AgentGone,
    CommandChannel,
    RemoteHost,
    SocketChannel,
    agent_command,
    first_lost,
    refusing_gone_agents,
)
from launch.engines.engine import CellEngine, CellPass, Job, Lost
from launch.engines.environment import LOOPBACK, HostEnvironment, cell_variables
from launch.engines.rendezvous import HostRendezvous, find_rendezvous
from launch.machine.fleet import Fleet

BEAT_S = 3.0  # between two signs of life of this launcher
FOLDER = CellFolder(Path(CELL_FOLDER))  # each agent puts its scratch folder there
OTHERS_S = 3.0  # for other hosts to end after the first that fails
LAST_S = 25.0  # beyond the grace, for agents to end what does not end by itself
# Files that every host has, and where those of the second host and the later ones go.
OF_EACH_HOST = {
    "logs/agent.log": "logs/agent-{}.log",
    "gpus.jsonl": "gpus-{}.jsonl",
    "cpu.jsonl": "cpu-{}.jsonl",
}


class HostsEngine(CellEngine):
    """Has ranks forked by agents on other hosts."""

    def __init__(
        self,
        limits: schema.Engine,
        surrounding: Mapping[str, str],
        joined: Mapping[str, socket.socket] | None = None,
    ) -> None:
        """`joined` are the connections of agents that came by themselves (engine=env)."""
        self._limits, self._surrounding = limits, surrounding
        self._joined = dict(joined or {})
        self._hosts: dict[str, RemoteHost] = {}
        self._fleet = Fleet(())
        self._rendezvous: dict[tuple[str, ...], HostRendezvous] = {}
        self._closed = threading.Event()

    def open_on(self, names: Sequence[str], device: str) -> Fleet:
        """Start an agent on each host at the same time, and return the described hosts.

        Raises Refused: a host cannot be reached, or cannot do what is asked; names it. All agents
        are ended then.
        """
        try:
            for name in names:
                with refusing_gone_agents(name):
                    self._hosts[name] = RemoteHost(name, self._channel(name))
            ready_s = self._limits.start_timeout_s
            with ThreadPoolExecutor(len(names)) as pool:
                jobs = {}
                for name in names:
                    jobs[name] = pool.submit(self._hosts[name].describe, device, ready_s)
            described = []
            for name, host in self._hosts.items():
                with refusing_gone_agents(name, host.channel.ended()):
                    described.append(jobs[name].result())
                    host.set_clock()  # one after the other
        except BaseException:
            self.close()
            raise
        self._fleet = Fleet(tuple(described))
        threading.Thread(target=self._beat, name="beats", daemon=True).start()
        return self._fleet

    def _channel(self, name: str) -> CommandChannel | SocketChannel:
        if name in self._joined:
            return SocketChannel(self._joined.pop(name))
        command = agent_command(self._limits, name, self._surrounding)
        return CommandChannel(command, self._surrounding)

    def meet(self, cells: Sequence[Cell]) -> None:
        """Find where the hosts of each cell meet, before the first cell. Raises Refused."""
        for cell in cells:
            names = cell.every_host
            if len(names) > 1 and names not in self._rendezvous:
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

    def start(self, cell_pass: CellPass) -> Job:
        """Start the processes of a cell on its hosts; they end with it."""
        cell, folder, token = cell_pass.cell, cell_pass.folder, cell_pass.token
        parts = []
        for index, name in enumerate(cell.every_host):
            numbers = [i for i, process in enumerate(cell.places) if process.host == name]
            parts.append(CellOnHost(self._hosts[name], index, token, folder, numbers))
        job = _HostsJob(cell, token, parts, self._limits.lost_after_s)
        for part in parts:  # before anything can be wrong: each says that it has stopped
            part.host.channel.listen(part.take)
        try:
            with contextlib.suppress(AgentGone):  # the job says which host is lost
                for part in parts:
                    part.host.set_clock(self._limits.lost_after_s)
                self._run(cell_pass, parts)
        except OSError:
            job.stop(0.0)
            raise
        return job

    def _run(self, cell_pass: CellPass, parts: Sequence["CellOnHost"]) -> None:
        """Have each agent start its processes. Raises AgentGone, OSError."""
        cell, token = cell_pass.cell, cell_pass.token
        meeting: dict[str, object] = {"hosts": len(parts)}
        rendezvous = self._rendezvous.get(cell.every_host)
        if rendezvous:
            meeting["address"] = rendezvous.address
        for part in parts:
            host = self._fleet[part.host.name]
            variables = self.variables(cell, host.name, token)
            uuids = None
            if cell_pass.sampled:
                uuids = host.machine.uuids(cell.gpus) if part.index < len(cell.hosts) else []
            part.host.channel.send(
                Command.RUN,
                cell=token,
                folder=None,
                files={"cell.json": cell_pass.folder.cell.read_text(encoding="utf-8")},
                asked=cell.to_dict(),
                environment=variables.with_set({**cell_pass.added, **part.host.clock}).to_dict(),
                start=self._limits.start,
                sampled=uuids,
                numbers=part.numbers,
                meeting=meeting | {"host": part.index},
            )
            if part.index == 0 and len(parts) > 1:
                deadline = time.monotonic() + self._limits.start_timeout_s
                while part.port is None:
                    time.sleep(0.01)
                    if part.why or time.monotonic() > deadline:
                        why = part.why or "it did not say at which port its ranks meet"
                        raise OSError(f"host {part.host.name}: {why}")
                    if not part.host.answers(self._limits.lost_after_s):
                        raise AgentGone(f"host {part.host.name} is lost")
                meeting["port"] = part.port

    def variables(self, cell: Cell, name: str, token: str) -> Variables:
        """Return what a cell asks for in the environment on one of its hosts, but its clock."""
        interface = LOOPBACK
        rendezvous = self._rendezvous.get(cell.every_host)
        if rendezvous:
            interface = rendezvous.interfaces[name]
        forbidden = self._fleet.forbidding_multicast(self._surrounding)
        where = HostEnvironment(name, interface, bool(self._limits.interface), forbidden)
        return cell_variables(cell, self._fleet[name].machine, FOLDER, token, where)

    def close(self) -> None:
        """End all agents, at the same time."""
        self._closed.set()
        threads = []
        for host in self._hosts.values():
            threads.append(threading.Thread(target=host.channel.close))
            threads[-1].start()
        for thread in threads:
            thread.join()
        for connection in self._joined.values():  # of nodes without a cell
            connection.close()
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
    index: int  # of the host in the cell
    token: str  # of the cell
    folder: CellFolder
    numbers: Sequence[int]  # of its processes there
    port: int | None = None  # of the first host, where the ranks of all hosts meet
    status: int | None = None
    survivors: list[int] | None = None  # once it was stopped
    states: dict[str, str] = field(default_factory=dict)
    why: str = ""  # why the ranks could not be started
    error: OSError | None = None  # of this machine: the disk is full
    names: set[str] = field(default_factory=set)  # of the files that came
    ranks: Mapping[int, RankEnd] = field(default_factory=dict)  # that ended and should not have

    def take(self, say: Event, message: Mapping[str, Any]) -> None:
        """Take what the agent says of this cell; messages of the one before are dropped.

        Raises ValueError: it is not the agent's to say.
        """
        if message["cell"] != self.token:
            return
        try:
            if say == Event.FILE:
                self._write(message["name"], message["at"], message["data"])
            elif say == Event.MEETING:
                self.port = message["port"]
            elif say == Event.STATES:
                self.states |= message["states"]
            elif say == Event.ENDED:
                if not message["ranks"].keys() <= set(self.numbers):
                    raise ValueError("it tells the end of a rank of another host")
                self.ranks, self.status = message["ranks"], message["status"]
            elif say == Event.STOPPED:
                self.survivors = message["survivors"]
            elif say == Event.FAILED:
                self.why = message["why"] or "it did not say why"
        except OSError as error:
            self.error = self.error or error

    def _write(self, name: str, at: int | None, data: bytes) -> None:
        """Write new bytes of a file. Raises ValueError: not allowed, or a gap before them."""
        match = HANDED_ON.fullmatch(name)
        writer = self.numbers[0]
        if match and (match[1] or name == self.folder.output.name):
            writer = int(match[1] or 0)
        if not match or writer not in self.numbers:
            raise ValueError(f"{name!r:.100} is not a file of this host's ranks")
        self.names.add(name)
        if len(self.names) > MOST_FILES:
            raise ValueError(f"more than {MOST_FILES} files")
        local_name = name
        if self.index and name.startswith("nccl/"):  # the names of two hosts may be equal
            local_name = f"nccl/{self.index}-{name.removeprefix('nccl/')}"
        elif self.index:
            local_name = OF_EACH_HOST.get(name, name).format(self.index)
        path = self.folder.path / local_name
        if at is None:
            safe_files.write_whole(path, data)
        else:
            with open(safe_files.open_own(path), "ab", buffering=0) as file:  # noqa: PTH123
                if file.seek(0, 2) != at:
                    raise ValueError(
                        f"file {name}: {file.tell()} bytes are here, the next are from {at}"
                    )
                while data:
                    data = data[file.write(data) :]


class _HostsJob(Job):
    """A job on several hosts, or on another one than this."""

    def __init__(
        self, cell: Cell, token: str, parts: Sequence[CellOnHost], lost_after_s: float
    ) -> None:
        self._cell, self._token, self._lost_after_s = cell, token, lost_after_s
        self._parts = parts  # in the order of the hosts
        self._until = 0.0  # how long the other hosts may take when one has failed; monotonic

    def poll(self) -> int | None:
        # Hosts have some time to tell how their ranks ended: one of them may be the first.
        statuses = []
        for part in self._parts:
            if part.error:
                raise part.error
            if part.why:
                raise OSError(f"host {part.host.name}: {part.why}")
            statuses.append(part.status)
        failed = [status for status in statuses if status]
        if failed and (None not in statuses or time.monotonic() > self._until):
            return failed[0]
        if not failed:
            self._until = time.monotonic() + OTHERS_S
        if None in statuses:
            return None
        return 0

    def wait(self, seconds: float) -> None:
        """Wait so long."""
        time.sleep(seconds)

    def lost(self) -> Lost | None:
        return first_lost((part.host for part in self._parts), self._lost_after_s)

    def process_state(self, number: int, pid: int) -> str:
        host = self._cell.every_host.index(self._cell.places[number].host)
        return self._parts[host].states.get(str(number), "running")

    def agent_state(self) -> str:
        for part in self._parts:
            state = part.states.get("agent", "running")
            if state not in ("running", "sleeping"):
                return state
        return "running"

    def ask_for_stacks(self, pids: Mapping[int, int]) -> None:
        self._send(Command.STACKS, numbers=list(pids))

    def stop(self, grace_s: float) -> list[int]:
        self._send(Command.STOP, grace_s=grace_s)
        deadline = time.monotonic() + grace_s + LAST_S
        while self._not_stopped() and time.monotonic() < deadline:
            time.sleep(0.01)
        for part in self._not_stopped():
            part.host.is_lost(f"its agent did not end its processes within {LAST_S:g} s", 0.0)
        survivors: list[int] = []
        ends = {}
        for part in self._parts:
            survivors += part.survivors or []
            for rank, end in part.ranks.items():
                ends[str(rank)] = vars(end)
        if ends:
            write_json(self._parts[0].folder.failures, ends)
        return survivors

    def _send(self, what: Command, **content: Any) -> None:
        for part in self._parts:
            with contextlib.suppress(AgentGone):
                part.host.channel.send(what, cell=self._token, **content)

    def _not_stopped(self) -> list[CellOnHost]:
        parts = []
        for part in self._parts:
            if part.survivors is None and part.host.answers(self._lost_after_s):
                parts.append(part)
        return parts
