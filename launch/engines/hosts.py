"""The engine of several hosts: an agent on each, for the whole sweep. Its processes write there; their files come here."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.host.environment import CELL_FOLDER, Variables
from benchmarks.host.messages import LONGEST_SILENCE_S, Do
from benchmarks.record import CellFolder, clock
from conf import schema
from conf.cell import Cell
from conf.options import Refused
from conf.variables import TOKEN
from launch.engines.channel import AgentGone, Channel
from launch.engines.cleaning import clean
from launch.engines.engine import Lost
from launch.engines.environment import LOOPBACK, OnHost, asked
from launch.engines.reaching import meeting, refused
from launch.engines.remote import CellOnHost, RemoteHost, end_agents, first_lost
from launch.engines.words import command
from launch.machine.fleet import Fleet, Host
from launch.machine.meeting import MeetingAddress

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
                    lambda host: _tried(host, device, self._limits.start_timeout_s), self._hosts.values()
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
        lost = first_lost((self._hosts[name] for name in cell.every_host), self._limits.lost_after_s)
        return lost.said if lost else None

    def start(
        self, cell: Cell, folder: CellFolder, environment: Mapping[str, str], profiler: Sequence[str] = (),
        sampled: bool = False,
    ) -> "HostsJob":  # fmt: skip
        """Start the processes of a cell on its hosts; they end with it.

        Of `environment` the token counts, and what NCCL logs: each host has an environment of its own.
        """
        token = environment[TOKEN]
        parts = [CellOnHost(self._hosts[name], number, token, folder) for number, name in enumerate(cell.every_host)]
        logged = {name: environment[name] for name in ("NCCL_DEBUG_SUBSYS",) if name in environment}
        place = self._meetings.get(cell.every_host)
        met: dict[str, object] = {"hosts": len(parts)} | ({"address": place.address} if place else {})
        watched, job = 0, HostsJob(cell, token, parts, self._limits.lost_after_s)
        for part in parts:  # before anything can be wrong: each says that it has stopped
            part.host.channel.listen(part.take)
        with _ended_on_error(job), contextlib.suppress(AgentGone):  # the job says which host is lost
            with self._asking_times:
                for part in parts:
                    part.host.set_clock(self._limits.lost_after_s)
            for part in parts:
                host = self._fleet[part.host.name]
                variables = self.variables(cell, host.name, token).to_dict()
                variables["set"] |= logged | part.host.clock
                gpus = host.machine.uuids(cell.gpus) if part.number < len(cell.hosts) else []
                part.host.channel.send(
                    Do.RUN, cell=token, folder=None, files={"cell.json": folder.cell.read_text(encoding="utf-8")},
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
        until = min(clock.now(), max(lost.values(), default=0.0)) + LONGEST_SILENCE_S
        while lost and not stopping() and clock.now() < until:
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
        return RemoteHost(name, Channel(command(self._limits, name, self._surrounding), self._surrounding))

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
                self._hosts[name].is_still_lost(f"it answers again, but is not what it was ({changed})")
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
                raise OSError(f"host {first.host.name}: {first.why or 'it did not say where its ranks meet'}")
            if not first.host.answers(self._limits.lost_after_s):
                raise AgentGone(f"host {first.host.name} is lost")
        return first.ports

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            for host in [one for one in list(self._hosts.values()) if not one.lost]:  # a full pipe would hold up all
                with contextlib.suppress(AgentGone):
                    host.channel.send(Do.BEAT)


class HostsJob:
    """A job on several hosts, or on another one than this."""

    def __init__(self, cell: Cell, token: str, parts: Sequence[CellOnHost], lost_after_s: float) -> None:
        self._cell, self._token, self._parts, self._lost_after_s = cell, token, list(parts), lost_after_s
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
        first, silent = self._parts[0], {n: s for part in self._parts for n, s in part.silent_s.items() if n}
        for number, seconds in silent.items():
            # If the first hears none of several others, its own wire is cut.
            part, ear = (first, "no other host hears it") if len(silent) == len(self._parts) - 1 > 1 else (
                self._parts[number], f"host {first.host.name} hears nothing from it")  # fmt: skip
            part.host.is_lost(
                f"{ear} for {seconds:.0f} s over the network of the ranks, which may be cut at either end", seconds
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
                part.host.channel.send(Do.STACKS, cell=self._token, numbers=list(pids))

    def stop(self, grace_s: float) -> list[int]:
        """End every process on every host that can be reached. Return the ids of those that survive SIGKILL."""
        for part in self._parts:
            with contextlib.suppress(AgentGone):
                part.host.channel.send(Do.STOP, cell=self._token, grace_s=grace_s)
        deadline = time.monotonic() + grace_s + LAST_S
        while (waiting := self._not_stopped()) and time.monotonic() < deadline:
            time.sleep(0.01)
        for part in waiting:
            part.host.is_lost(f"its agent did not end the processes of a cell in {LAST_S:g} s", 0.0)
        return [pid for part in self._parts for pid in part.survivors or ()]

    def _not_stopped(self) -> list[CellOnHost]:
        """Return where processes may still run, and an agent that answers."""
        return [part for part in self._parts if part.survivors is None and part.host.answers(self._lost_after_s)]


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
