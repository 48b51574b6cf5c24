"""Which communicator a line of an NCCL log speaks of.

NCCL names the communicator only when it starts and completes one; connections, rings and channel counts carry ranks
alone, and since 2.22 connections come as late as the first collective. A line belongs to the communicator that its
process was starting, or else to the only one that its ranks, devices and process fit. What fits several stays open.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from analysis.nccl.lines import ChannelCounts, CollNet, Connection, Event, LogProcess, Membership, RingLine, Trees

CHANNELS = ("collective", "p2p", "nvls", "collnet", "p2p_per_peer")

Owned = Connection | CollNet | RingLine | Trees | ChannelCounts


@dataclass(frozen=True)
class RankGpu:
    """One rank's GPU: NVML index and hexadecimal bus id as the log writes them; None where it does not."""

    nvml: int | None
    bus_id: str | None
    host: str | None


@dataclass(eq=False)
class Group:
    """A communicator while its lines are collected; `nranks` is None where no line names the communicator."""

    name: str | None
    nranks: int | None
    devices: dict[int, RankGpu] = field(default_factory=dict)
    members: dict[LogProcess, set[int]] = field(default_factory=lambda: defaultdict(set))
    events: list[Owned] = field(default_factory=list)


@dataclass
class Sorted:
    """Every communicator with its lines; `shared` fits several (given with them), `strange` is a count that fits none.

    `confused` says that communicators without identity could not be told apart by anything but their ranks.
    """

    groups: list[Group]
    shared: list[tuple[Owned, list[Group]]]
    strange: int
    confused: bool


def bracket_kind(version: tuple[int, ...] | None, brackets: Iterable[str]) -> str | None:
    """What `rank[…]` holds: "nvml" (2.18.3 on), "bus" (2.5 to 2.18.1), None where neither is sure.

    2.4 wrote the CUDA or the NVML index, depending on the transport. Without a version only a hexadecimal digit, or a
    number that no GPU index reaches, tells.
    """
    if version is not None:
        return "nvml" if version >= (2, 18, 2) else "bus" if version >= (2, 5) else None
    return "bus" if any(not b.isdigit() or int(b) > 255 for b in brackets) else None


def sort_by_communicator(events: list[Event], kind: str | None) -> Sorted:
    """Group the events of all texts, in their order; `kind` is that of `bracket_kind`."""
    finder = _Finder()
    open_now: dict[LogProcess, list[Group]] = defaultdict(list)
    waiting: dict[LogProcess, list[Owned]] = defaultdict(list)
    loose: list[Owned] = []
    has_starts = any(isinstance(event, Membership) and not event.complete for event in events)
    completed: set[LogProcess] = set()
    for event in events:
        if isinstance(event, Membership):
            group = finder.find(event)
            process = event.process
            if not event.complete:
                open_now[process].append(group)
                loose += waiting.pop(process, [])
            elif group in open_now[process]:
                open_now[process].remove(group)
                completed.add(process)
            else:
                # before 2.18 only completion is announced, and connections come before it
                own = not has_starts or process not in completed
                for item in waiting.pop(process, []):
                    if own and _fits(group, item, kind, True):
                        group.events.append(item)
                    else:
                        loose.append(item)
                completed.add(process)
        elif isinstance(event, Owned):
            starting = set(open_now[event.process])
            if len(starting) == 1 and _fits(group := starting.pop(), event, kind, True):
                group.events.append(event)
            else:
                waiting[event.process].append(event)
    for items in waiting.values():
        loose += items
    if not finder.groups:
        return Sorted([Group(None, None, events=loose)], [], 0, False)
    known = {process for group in finder.groups for process in group.members}
    result = Sorted(finder.groups, [], 0, finder.confused)
    for item in loose:
        fitting = [g for g in finder.groups if _fits(g, item, kind, item.process in known)]
        if len(fitting) == 1:
            fitting[0].events.append(item)
        elif fitting:
            result.shared.append((item, fitting))
        else:
            result.strange += 1
    return result


class _Finder:
    """Communicators by identity: the commId (2.16 on), the split of a parent (2.23 on), or ranks not yet taken."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.confused = False
        self._by_identity: dict[object, Group] = {}
        self._by_pointer: dict[tuple[LogProcess, str], Group] = {}
        self._anonymous: list[Group] = []

    def find(self, event: Membership) -> Group:
        """The communicator of a membership line, with that member entered."""
        group = self._group(event)
        self._by_pointer[event.process, event.pointer] = group
        host = event.process.host or None
        group.members[event.process].add(event.rank)
        if event.nvml is not None or event.bus_id is not None:
            group.devices.setdefault(event.rank, RankGpu(event.nvml, event.bus_id, host))
        return group

    def _group(self, event: Membership) -> Group:
        identity: object = None
        if event.comm_id is not None:
            identity = (event.comm_id, event.nranks)
        elif event.split is not None:
            parent, count, colour = event.split
            of = self._by_pointer.get((event.process, parent))
            identity = (self.groups.index(of) if of else None, event.nranks, count, colour)
        if identity is not None:
            if identity not in self._by_identity:
                self._by_identity[identity] = self._new(event, event.comm_id)
            return self._by_identity[identity]
        for group in self._anonymous:
            if group.nranks == event.nranks:
                if all(event.rank not in ranks for ranks in group.members.values()):
                    return group
                self.confused = True
        group = self._new(event, None)
        self._anonymous.append(group)
        return group

    def _new(self, event: Membership, name: str | None) -> Group:
        group = Group(name, event.nranks)
        self.groups.append(group)
        return group


def _fits(group: Group, event: Owned, kind: str | None, process_known: bool) -> bool:
    """Whether the event can be of this communicator: ranks in range, written by a member about itself, same GPUs."""
    pairs: list[tuple[int, str | None]] = []
    own: int | None = None
    if isinstance(event, Connection):
        pairs = [(event.source, event.source_bracket), (event.target, event.target_bracket)]
        own = event.target if event.end == "receive" else event.source
    elif isinstance(event, RingLine):
        pairs = [(rank, None) for rank in event.ranks]
    elif isinstance(event, (Trees, CollNet)):
        pairs = [(event.rank, None)]
        own = event.rank
    if group.nranks is not None and any(rank >= group.nranks for rank, _ in pairs):
        return False
    if process_known and event.process.host:
        if event.process not in group.members:
            return False
        if own is not None and own not in group.members[event.process]:
            return False
    for rank, bracket in pairs:
        device = group.devices.get(rank)
        if bracket is None or device is None:
            continue
        if kind == "nvml" and device.nvml is not None and bracket != str(device.nvml):
            return False
        if kind == "bus" and device.bus_id is not None and bracket != device.bus_id:
            return False
    return True


def connections_of(found: Sorted, largest: Group, notes: list[str]) -> list[Connection]:
    """The connections that are surely the largest communicator's, and shared ones on which all lines agree."""
    mine = [event for event in largest.events if isinstance(event, Connection)]
    if largest.nranks is None:
        brackets: dict[int, set[str]] = defaultdict(set)
        for one in mine:
            for rank, bracket in ((one.source, one.source_bracket), (one.target, one.target_bracket)):
                if bracket is not None:
                    brackets[rank].add(bracket)
        if any(len(values) > 1 for values in brackets.values()):
            notes.append("connections of several communicators, and no line says which is whose: none is used")
            return []
        return mine
    shared: dict[tuple[int, int], list[Connection]] = defaultdict(list)
    for event, groups in found.shared:
        if isinstance(event, Connection) and largest in groups:
            shared[event.source, event.target].append(event)
    kept = dropped = 0
    for pair, events in shared.items():
        words = {event.transport for event in events}
        words |= {event.transport for event in mine if (event.source, event.target) == pair}
        if len(words) == 1:
            mine += events
            kept += len(events)
        else:
            dropped += len(events)
    if kept:
        notes.append(
            f"{kept} connection line(s) fit several communicators; taken for the largest, all of one transport"
        )
    if dropped:
        notes.append(f"{dropped} connection line(s) fit several communicators and differ in transport: not used")
    return mine


def rings_of(group: Group, notes: list[str]) -> dict[int, tuple[int, ...]]:
    """Whole rings by channel: every rank once. A ring that the line shows in part is left out."""
    rings: dict[int, tuple[int, ...]] = {}
    left_out = 0
    for event in group.events:
        if not isinstance(event, RingLine):
            continue
        size = group.nranks if group.nranks is not None else len(event.ranks)
        if (
            event.cut
            or sorted(event.ranks) != list(range(size))
            or rings.get(event.channel, event.ranks) != event.ranks
        ):
            left_out += 1
        else:
            rings[event.channel] = event.ranks
    if left_out:
        notes.append(f"{left_out} ring(s) shown in part or twice, left out")
    if group.nranks is None and len({len(ring) for ring in rings.values()}) > 1:
        return {}
    return dict(sorted(rings.items()))


def channels_of(group: Group, notes: list[str]) -> tuple[dict[str, int | None], str | None]:
    """Channel counts and the line they come from."""
    counts: dict[str, int | None] = dict.fromkeys(CHANNELS)
    said: dict[str, set[int]] = defaultdict(set)
    for event in group.events:
        if isinstance(event, ChannelCounts):
            for name, count in event.counts.items():
                said[name].add(count)
    source = "summary" if said else None
    if not said:
        said["collective"] = {e.count for e in group.events if isinstance(e, RingLine) and e.count is not None}
        source = "rings" if said["collective"] else None
    for name, values in said.items():
        if len(values) > 1:
            notes.append(f"ranks report different numbers of {name} channels: {', '.join(map(str, sorted(values)))}")
        elif values:
            counts[name] = next(iter(values))
    return counts, source


def devices_of(group: Group, kind: str | None, connections: list[Connection], largest: Group) -> dict[int, RankGpu]:
    """The GPU of each rank: from the communicator's own lines, else from the brackets of the connections."""
    devices = dict(group.devices)
    if group is largest and kind is not None:
        for one in connections:
            for rank, bracket in ((one.source, one.source_bracket), (one.target, one.target_bracket)):
                if bracket is not None and rank not in devices:
                    nvml = int(bracket) if kind == "nvml" and bracket.isdigit() else None
                    devices[rank] = RankGpu(nvml, bracket if kind == "bus" else None, None)
    return dict(sorted(devices.items()))
