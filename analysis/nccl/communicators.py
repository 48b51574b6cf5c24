"""Which communicator each line of an NCCL log belongs to, and what the lines of one say together.

NCCL names the communicator only when it starts and completes one. Connections, rings and channel
counts carry ranks alone, and since 2.22 connections come as late as the first collective. A line
belongs to the communicator that its process was starting, or else to the only one that its ranks,
devices and process fit. A line that fits several is kept as shared.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from analysis.nccl.messages import (
    CHANNELS,
    ChannelCounts,
    Connection,
    Event,
    LogProcess,
    Membership,
    NetworkDevice,
    Nodes,
    OwnedLine,
    RingLine,
)


@dataclass(frozen=True)
class RankGpu:
    """One rank's GPU: NVML index and hexadecimal bus id as the log writes them, else None."""

    nvml: int | None
    bus_id: str | None
    host: str | None


@dataclass(eq=False)
class Group:
    """A communicator and its lines; `nranks` is None where no line names the communicator."""

    name: str | None
    nranks: int | None
    devices: dict[int, RankGpu] = field(default_factory=dict)
    members: dict[LogProcess, set[int]] = field(default_factory=lambda: defaultdict(set))
    events: list[OwnedLine] = field(default_factory=list)

    @property
    def connection_count(self) -> int:
        """Count the lines of connections."""
        return sum(isinstance(event, Connection) for event in self.events)


def bracket_kind(version: tuple[int, ...] | None, connections: Iterable[Connection]) -> str | None:
    """Return what `rank[…]` holds: "nvml" (2.18.3 on), "bus" (2.5 to 2.18.1), None if not sure.

    2.4 wrote the CUDA or the NVML index, depending on the transport. Without a version, brackets
    are bus ids for sure only if one has a hexadecimal digit, or a number that no GPU index reaches.
    """
    if version is not None:
        if version >= (2, 18, 2):
            return "nvml"
        return "bus" if version >= (2, 5) else None
    for connection in connections:
        for bracket in filter(None, connection.brackets):
            if not bracket.isdigit() or len(bracket) > 9 or int(bracket) > 255:
                return "bus"
    return None


class CommunicatorIndex:
    """Every communicator of all texts with its lines: each goes to the communicator that its
    process starts, the rest at the end to the only one that it fits.
    """

    def __init__(self, events: list[Event], kind: str | None) -> None:
        self.groups: list[Group] = []
        self.shared: list[tuple[OwnedLine, list[Group]]] = []  # lines that fit several groups
        self.strange = 0  # lines that fit none
        self.ambiguous = False  # some groups without identity are told apart by their ranks only
        self._kind = kind  # of brackets
        # Before 2.18 NCCL announces completion only.
        self._has_starts = any(isinstance(e, Membership) and not e.complete for e in events)
        self._by_identity: dict[object, Group] = {}
        self._by_pointer: dict[tuple[LogProcess, str], Group] = {}
        self._anonymous: list[Group] = []
        self._open: dict[LogProcess, list[Group]] = defaultdict(list)  # started, not complete
        self._completed: set[LogProcess] = set()  # processes that completed a communicator
        self._waiting: dict[LogProcess, list[OwnedLine]] = defaultdict(list)  # since a membership
        self._loose: list[OwnedLine] = []
        for event in events:
            if isinstance(event, Membership):
                self._add_membership(event)
            elif isinstance(event, OwnedLine):
                starting = self._open[event.process]
                if len(set(starting)) == 1 and _fits(starting[0], event, kind, True):
                    starting[0].events.append(event)
                else:
                    self._waiting[event.process].append(event)
        for lines in self._waiting.values():
            self._loose += lines
        if not self.groups:
            self.groups.append(Group(None, None, events=self._loose))
            return
        members: set[LogProcess] = set()
        for group in self.groups:
            members.update(group.members)
        for line in self._loose:
            fitting = []
            for group in self.groups:
                if _fits(group, line, kind, line.process in members):
                    fitting.append(group)
            if len(fitting) == 1:
                fitting[0].events.append(line)
            elif fitting:
                self.shared.append((line, fitting))
            else:
                self.strange += 1

    def _add_membership(self, event: Membership) -> None:
        process = event.process
        group = self._group_of(event)
        self._by_pointer[process, event.pointer] = group
        group.members[process].add(event.rank)
        if event.nvml is not None or event.bus_id is not None:
            gpu = RankGpu(event.nvml, event.bus_id, process.host or None)
            group.devices.setdefault(event.rank, gpu)
        if not event.complete:
            self._open[process].append(group)
            self._loose += self._waiting.pop(process, [])
            return
        if group in self._open[process]:
            self._open[process].remove(group)
        else:  # a communicator without a start line takes the lines before its completion
            is_own = not self._has_starts or process not in self._completed
            for line in self._waiting.pop(process, []):
                if is_own and _fits(group, line, self._kind, True):
                    group.events.append(line)
                else:
                    self._loose.append(line)
        self._completed.add(process)

    def _group_of(self, event: Membership) -> Group:
        """Return the communicator of a membership line, known by the commId (from 2.16), the split
        of a parent (from 2.23), or ranks not yet taken.
        """
        identity: object = None
        if event.comm_id is not None:
            identity = (event.comm_id, event.nranks)
        elif event.split is not None:
            pointer, count, colour = event.split
            parent = self._by_pointer.get((event.process, pointer))
            identity = (id(parent), event.nranks, count, colour)
        if identity is not None and identity in self._by_identity:
            return self._by_identity[identity]
        if identity is None:
            for group in self._anonymous:
                if group.nranks == event.nranks:
                    if all(event.rank not in ranks for ranks in group.members.values()):
                        return group
                    self.ambiguous = True
        group = Group(event.comm_id, event.nranks)
        self.groups.append(group)
        if identity is None:
            self._anonymous.append(group)
        else:
            self._by_identity[identity] = group
        return group


def _fits(group: Group, event: OwnedLine, kind: str | None, is_member: bool) -> bool:
    """Tell whether the line can be of this communicator: its ranks must be in range, its writer a
    member that writes about itself, its GPUs the same.
    """
    writer: int | None = None
    ranks: list[tuple[int, str | None]] = []  # with brackets
    if isinstance(event, Connection):
        writer = event.target if event.end == "receive" else event.source
        ranks = event.ends
    elif isinstance(event, RingLine):
        ranks = [(rank, None) for rank in event.ranks]
    for rank, bracket in ranks:
        if group.nranks is not None and rank >= group.nranks:
            return False
        device = group.devices.get(rank)
        if bracket is None or device is None:
            continue
        if kind == "nvml" and device.nvml is not None and bracket != str(device.nvml):
            return False
        if kind == "bus" and device.bus_id is not None and bracket != device.bus_id:
            return False
    if not is_member or not event.process.host:
        return True
    own_ranks = group.members.get(event.process)
    return own_ranks is not None and (writer is None or writer in own_ranks)


# What the lines of one communicator say together: each function notes what it could not use.
def connections_of(index: CommunicatorIndex, largest: Group, notes: list[str]) -> list[Connection]:
    """Return the connections that are surely of the largest communicator, and shared ones on which
    all lines agree.
    """
    own = [event for event in largest.events if isinstance(event, Connection)]
    if largest.nranks is None:
        bracket_of: dict[int, str] = {}
        for connection in own:
            for rank, bracket in connection.ends:
                if bracket is not None and bracket_of.setdefault(rank, bracket) != bracket:
                    notes.append(
                        "connections of several communicators, and no line says which belong "
                        "together: none is used"
                    )
                    return []
        return own
    shared: dict[tuple[int, int], list[Connection]] = defaultdict(list)
    for line, groups in index.shared:
        if isinstance(line, Connection) and largest in groups:
            shared[line.source, line.target].append(line)
    transports: dict[tuple[int, int], set[str]] = defaultdict(set)
    for event in own:
        transports[event.source, event.target].add(event.transport)
    agreeing: list[Connection] = []
    dropped = 0
    for pair, events in shared.items():
        for event in events:
            transports[pair].add(event.transport)
        if len(transports[pair]) == 1:
            agreeing += events
        else:
            dropped += len(events)
    if agreeing:
        notes.append(
            f"{len(agreeing)} connection line(s) fit several communicators and agree on the "
            "transport: counted for the largest"
        )
    if dropped:
        notes.append(
            f"{dropped} connection line(s) fit several communicators and differ in the transport: "
            "not used"
        )
    return own + agreeing


def transports_of(connections: Iterable[Connection]) -> dict[str, tuple[str, ...]]:
    """Return `{"0->1": ("P2P/CUMEM",)}`: the sorted transports of each pair, in order of pairs."""
    transports: dict[tuple[int, int], set[str]] = defaultdict(set)
    for connection in connections:
        transports[connection.source, connection.target].add(connection.transport)
    return {f"{a}->{b}": tuple(sorted(words)) for (a, b), words in sorted(transports.items())}


def nics_of(
    connections: Iterable[Connection], events: Iterable[Event]
) -> dict[int, tuple[str, ...]]:
    """Return {rank: the network devices that its connections use}, sorted; `NET/IB/0` for one that
    no line names. Both ends of a connection announce it, each with a device of its own host.
    """
    # A device made of several is announced after these, with the index that connections name.
    names: dict[tuple[LogProcess, str, int], str] = {}
    for event in events:
        if isinstance(event, NetworkDevice):
            names[event.process, event.network, event.device] = event.name
    nics: dict[int, set[str]] = defaultdict(set)
    for connection in connections:
        match = re.match(r"NET/([^/]+)/(\d+)", connection.transport)
        if match is None or connection.end is None:
            continue
        rank = connection.source if connection.end == "send" else connection.target
        device = (connection.process, match[1], int(match[2]))
        nics[rank].add(names.get(device, match[0]))
    return {rank: tuple(sorted(nics[rank])) for rank in sorted(nics)}


def nodes_of(group: Group, events: Iterable[Event]) -> int | None:
    """Return on how many hosts NCCL sees the ranks; None where no line or several say it."""
    counts = set()
    for event in events:
        if isinstance(event, Nodes) and event.nranks == group.nranks:
            counts.add(event.nodes)
    if len(counts) != 1:
        return None
    return counts.pop()


def rings_of(group: Group, notes: list[str]) -> dict[int, tuple[int, ...]]:
    """Return whole rings by channel, every rank once. A ring shown in part is left out."""
    rings: dict[int, tuple[int, ...]] = {}
    left_out = 0
    for event in group.events:
        if not isinstance(event, RingLine):
            continue
        size = group.nranks if group.nranks is not None else len(event.ranks)
        is_whole = (
            not event.cut and len(event.ranks) == size and sorted(event.ranks) == list(range(size))
        )
        if not is_whole or rings.setdefault(event.channel, event.ranks) != event.ranks:
            left_out += 1
    if left_out:
        notes.append(f"{left_out} ring(s) shown in part or differently: left out")
    if group.nranks is None and len(set(map(len, rings.values()))) > 1:
        return {}
    return dict(sorted(rings.items()))


def channels_of(group: Group, notes: list[str]) -> tuple[dict[str, int | None], str | None]:
    """Return channel counts by kind, and where they are from: "summary", "rings" or None."""
    stated: dict[str, set[int]] = defaultdict(set)
    ring_counts = set()
    for event in group.events:
        if isinstance(event, ChannelCounts):
            for name, count in event.counts.items():
                stated[name].add(count)
        elif isinstance(event, RingLine) and event.channels is not None:
            ring_counts.add(event.channels)
    source = None
    if stated:
        source = "summary"
    elif ring_counts:
        stated["collective"] = ring_counts
        source = "rings"
    counts: dict[str, int | None] = dict.fromkeys(CHANNELS)
    for name, values in stated.items():
        if len(values) > 1:
            numbers = ", ".join(map(str, sorted(values)))
            notes.append(f"ranks report different numbers of {name} channels: {numbers}")
        else:
            counts[name] = next(iter(values))
    return counts, source


def devices_of(
    group: Group, kind: str | None = None, connections: Iterable[Connection] = ()
) -> dict[int, RankGpu]:
    """Return the GPU of each rank: from its own lines, else from the brackets of `connections`,
    which say nothing where their `kind` is None.
    """
    devices = dict(group.devices)
    for connection in connections:
        for rank, bracket in connection.ends:
            if kind is None or bracket is None:
                continue
            gpu = RankGpu(None, None, None)
            if kind == "bus":
                gpu = RankGpu(None, bracket, None)
            elif bracket.isdigit():
                gpu = RankGpu(int(bracket), None, None)
            devices.setdefault(rank, gpu)
    return dict(sorted(devices.items()))
