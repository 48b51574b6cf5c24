"""What the lines of one communicator say together: connections, rings, trees, channel counts, GPUs.

Each function adds to `notes` what it could not use.
"""

import re
from collections import defaultdict
from collections.abc import Iterable

from analysis.nccl.communicators import Group, RankGpu, Sorted
from analysis.nccl.events import (
    CHANNELS,
    ChannelCounts,
    CollNet,
    Connection,
    Event,
    NetworkDevice,
    Nodes,
    RingLine,
    Trees,
)


def connections_of(found: Sorted, largest: Group, notes: list[str]) -> list[Connection]:
    """Return the connections that are surely the largest communicator's, and shared ones on which all lines agree."""
    own = [event for event in largest.events if isinstance(event, Connection)]
    if largest.nranks is None:
        if _of_several_communicators(own):
            notes.append(
                "connections of several communicators, and no line says which belong together: none is used"
            )
            return []
        return own
    shared: dict[tuple[int, int], list[Connection]] = defaultdict(list)
    for event, groups in found.shared:
        if isinstance(event, Connection) and largest in groups:
            shared[event.source, event.target].append(event)
    own_words: dict[tuple[int, int], set[str]] = defaultdict(set)
    for event in own:
        own_words[event.source, event.target].add(event.transport)
    kept: list[Connection] = []
    dropped = 0
    for pair, events in shared.items():
        if len(own_words[pair] | {event.transport for event in events}) == 1:
            kept += events
        else:
            dropped += len(events)
    if kept:
        notes.append(
            f"{len(kept)} connection line(s) fit several communicators and agree on the transport: counted for the largest"
        )
    if dropped:
        notes.append(
            f"{dropped} connection line(s) fit several communicators and differ in the transport: not used"
        )
    return own + kept


def _of_several_communicators(connections: list[Connection]) -> bool:
    """Whether one rank has several GPUs, where no line names a communicator."""
    brackets: dict[int, set[str]] = defaultdict(set)
    for one in connections:
        for rank, bracket in ((one.source, one.source_bracket), (one.target, one.target_bracket)):
            if bracket is not None:
                brackets[rank].add(bracket)
    return any(len(values) > 1 for values in brackets.values())


def transports_of(connections: list[Connection]) -> dict[str, tuple[str, ...]]:
    """Return the sorted transports of each pair of ranks, `{"0->1": ("P2P/CUMEM",)}`, in the order of the pairs."""
    transports: dict[str, set[str]] = defaultdict(set)
    for one in sorted(connections, key=lambda one: (one.source, one.target)):
        transports[f"{one.source}->{one.target}"].add(one.transport)
    return {pair: tuple(sorted(words)) for pair, words in transports.items()}


def nics_of(
    connections: Iterable[Connection], events: Iterable[Event]
) -> dict[int, tuple[str, ...]]:
    """Return {rank: the network devices that its connections use}, sorted; `NET/IB/0` for one that no line names.

    Both ends of a connection announce it, each with a device of its own host.
    """
    # What is made of several devices is announced after these, and has the index that connections name.
    named = {
        (one.process, one.network, one.index): one.name
        for one in events
        if isinstance(one, NetworkDevice)
    }
    found: dict[int, set[str]] = defaultdict(set)
    for one in connections:
        if (words := re.match(r"NET/([^/]+)/(\d+)", one.transport)) and one.end is not None:
            rank = one.source if one.end == "send" else one.target
            found[rank].add(named.get((one.process, words[1], int(words[2])), words[0]))
    return {rank: tuple(sorted(names)) for rank, names in sorted(found.items())}


def nodes_of(group: Group, events: Iterable[Event]) -> int | None:
    """Return on how many hosts NCCL sees the ranks of a communicator; None where no line or several say it."""
    told = {one.nodes for one in events if isinstance(one, Nodes) and one.nranks == group.nranks}
    return told.pop() if len(told) == 1 else None


def rings_of(group: Group, notes: list[str]) -> dict[int, tuple[int, ...]]:
    """Return whole rings by channel: every rank once. A ring that the line shows in part is left out."""
    rings: dict[int, tuple[int, ...]] = {}
    left_out = 0
    for event in group.events:
        if not isinstance(event, RingLine):
            continue
        size = group.nranks if group.nranks is not None else len(event.ranks)
        whole = (
            not event.cut and len(event.ranks) == size and sorted(event.ranks) == list(range(size))
        )
        if whole and rings.setdefault(event.channel, event.ranks) == event.ranks:
            continue
        left_out += 1
    if left_out:
        notes.append(f"{left_out} ring(s) shown in part or differently: left out")
    if group.nranks is None and len({len(ring) for ring in rings.values()}) > 1:
        return {}
    return dict(sorted(rings.items()))


def trees_of(group: Group) -> dict[int, dict[int, int]]:
    """Return `{channel: {rank: parent, -1 at the root}}`, sorted."""
    trees: dict[int, dict[int, int]] = defaultdict(dict)
    for event in group.events:
        if isinstance(event, Trees):
            for channel, parent in event.parents.items():
                trees[channel][event.rank] = parent
    return {channel: dict(sorted(parents.items())) for channel, parents in sorted(trees.items())}


def collnet_of(group: Group) -> dict[int, tuple[str, ...]]:
    """Return the CollNet transports of each rank, sorted."""
    collnet: dict[int, set[str]] = defaultdict(set)
    for event in group.events:
        if isinstance(event, CollNet):
            collnet[event.rank].add(event.transport)
    return {rank: tuple(sorted(words)) for rank, words in sorted(collnet.items())}


def channels_of(group: Group, notes: list[str]) -> tuple[dict[str, int | None], str | None]:
    """Return channel counts by kind, and the lines they come from: "summary", "rings" or None."""
    counts: dict[str, int | None] = dict.fromkeys(CHANNELS)
    stated: dict[str, set[int]] = defaultdict(set)
    for event in group.events:
        if isinstance(event, ChannelCounts):
            for name, count in event.counts.items():
                stated[name].add(count)
    source = "summary" if stated else None
    if not stated:
        stated["collective"] = {
            e.count for e in group.events if isinstance(e, RingLine) and e.count is not None
        }
        source = "rings" if stated["collective"] else None
    for name, values in stated.items():
        if len(values) > 1:
            notes.append(
                f"ranks report different numbers of {name} channels: {', '.join(map(str, sorted(values)))}"
            )
        elif values:
            counts[name] = next(iter(values))
    return counts, source


def devices_of(
    group: Group, kind: str | None = None, connections: Iterable[Connection] = ()
) -> dict[int, RankGpu]:
    """Return the GPU of each rank: from the communicator's own lines, else from the brackets of its `connections`.

    `kind` is that of `bracket_kind`; None: the brackets say nothing.
    """
    devices = dict(group.devices)
    for one in connections if kind is not None else ():
        for rank, bracket in ((one.source, one.source_bracket), (one.target, one.target_bracket)):
            if bracket is not None and rank not in devices:
                nvml = int(bracket) if kind == "nvml" and bracket.isdigit() else None
                devices[rank] = RankGpu(nvml, bracket if kind == "bus" else None, None)
    return dict(sorted(devices.items()))
