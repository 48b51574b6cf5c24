"""Which communicator each line of an NCCL log belongs to.

NCCL names the communicator only when it starts and completes one. Connections, rings and channel counts carry ranks
alone, and since 2.22 connections come as late as the first collective. A line belongs to the communicator that its
process was starting, or else to the only one that its ranks, devices and process fit. A line that fits several is
kept as shared.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from analysis.nccl.events import (
    ChannelCounts,
    CollNet,
    Connection,
    Event,
    LogProcess,
    Membership,
    RingLine,
    Trees,
)

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
    """Every communicator with its lines.

    `shared` are lines that fit several communicators, with these; `strange` counts lines that fit none. `confused`:
    some communicators without identity could be told apart only by their ranks.
    """

    groups: list[Group]
    shared: list[tuple[Owned, list[Group]]]
    strange: int
    confused: bool


def bracket_kind(version: tuple[int, ...] | None, brackets: Iterable[str]) -> str | None:
    """Return what `rank[…]` holds: "nvml" (2.18.3 on), "bus" (2.5 to 2.18.1), None where neither is sure.

    2.4 wrote the CUDA or the NVML index, depending on the transport. Without a version, brackets are bus ids for sure
    only if one has a hexadecimal digit, or a number that no GPU index reaches.
    """
    if version is not None:
        return "nvml" if version >= (2, 18, 2) else "bus" if version >= (2, 5) else None
    return "bus" if any(not b.isdigit() or len(b) > 9 or int(b) > 255 for b in brackets) else None


def sort_by_communicator(events: list[Event], kind: str | None) -> Sorted:
    """Group the events of all texts, in their order; `kind` is that of `bracket_kind`."""
    has_starts = any(isinstance(event, Membership) and not event.complete for event in events)
    sorter = _Sorter(kind, has_starts)
    for event in events:
        if isinstance(event, Membership):
            sorter.read_membership(event)
        elif isinstance(event, Owned):
            sorter.read_owned(event)
    return sorter.result()


class _Sorter:
    """Gives each line to the communicator that its process is starting; keeps the other lines for the end."""

    def __init__(self, kind: str | None, has_starts: bool) -> None:
        self._kind = kind
        self._has_starts = has_starts  # before 2.18 NCCL announces completion only
        self._finder = _Finder()
        self._open: dict[LogProcess, list[Group]] = defaultdict(list)  # started and not complete
        self._completed: set[LogProcess] = set()  # processes that completed a communicator
        self._waiting: dict[LogProcess, list[Owned]] = defaultdict(
            list
        )  # lines since the last membership line
        self._loose: list[Owned] = []

    def read_membership(self, event: Membership) -> None:
        group, process = self._finder.find(event), event.process
        if not event.complete:
            self._open[process].append(group)
            self._loose += self._waiting.pop(process, [])
            return
        if group in self._open[process]:
            self._open[process].remove(group)
        else:
            self._take_waiting(group, process)
        self._completed.add(process)

    def _take_waiting(self, group: Group, process: LogProcess) -> None:
        """Give a communicator without a start line the lines before its completion."""
        own = not self._has_starts or process not in self._completed
        for item in self._waiting.pop(process, []):
            if own and _fits(group, item, self._kind, True):
                group.events.append(item)
            else:
                self._loose.append(item)

    def read_owned(self, event: Owned) -> None:
        starting = set(self._open[event.process])
        if len(starting) == 1 and _fits(group := starting.pop(), event, self._kind, True):
            group.events.append(event)
        else:
            self._waiting[event.process].append(event)

    def result(self) -> Sorted:
        """Give the lines that are left to the only communicator that they fit."""
        loose = self._loose + [item for items in self._waiting.values() for item in items]
        groups = self._finder.groups
        if not groups:
            return Sorted([Group(None, None, events=loose)], [], 0, False)
        known = {process for group in groups for process in group.members}
        result = Sorted(groups, [], 0, self._finder.confused)
        for item in loose:
            fitting = [
                group for group in groups if _fits(group, item, self._kind, item.process in known)
            ]
            if len(fitting) == 1:
                fitting[0].events.append(item)
            elif fitting:
                result.shared.append((item, fitting))
            else:
                result.strange += 1
        return result


class _Finder:
    """Finds communicators by identity: the commId (2.16 on), the split of a parent (2.23 on), or ranks not yet taken."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.confused = False
        self._by_identity: dict[object, Group] = {}
        self._by_pointer: dict[tuple[LogProcess, str], Group] = {}
        self._anonymous: list[Group] = []

    def find(self, event: Membership) -> Group:
        """Return the communicator of a membership line, with that member entered."""
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
    pairs, own = _ranks_named(event)
    if group.nranks is not None and any(rank >= group.nranks for rank, _ in pairs):
        return False
    if process_known and event.process.host and not _written_by_member(group, event.process, own):
        return False
    return all(_same_gpu(group.devices.get(rank), bracket, kind) for rank, bracket in pairs)


def _ranks_named(event: Owned) -> tuple[list[tuple[int, str | None]], int | None]:
    """Return the ranks in a line, with their brackets, and the rank that wrote it."""
    if isinstance(event, Connection):
        pairs = [(event.source, event.source_bracket), (event.target, event.target_bracket)]
        return pairs, event.target if event.end == "receive" else event.source
    if isinstance(event, RingLine):
        return [(rank, None) for rank in event.ranks], None
    if isinstance(event, Trees | CollNet):
        return [(event.rank, None)], event.rank
    return [], None


def _written_by_member(group: Group, process: LogProcess, own: int | None) -> bool:
    return process in group.members and (own is None or own in group.members[process])


def _same_gpu(device: RankGpu | None, bracket: str | None, kind: str | None) -> bool:
    """Whether a bracket can name this GPU; True where one of them is not known."""
    if bracket is None or device is None:
        return True
    if kind == "nvml" and device.nvml is not None:
        return bracket == str(device.nvml)
    if kind == "bus" and device.bus_id is not None:
        return bracket == device.bus_id
    return True
