"""Read the log of NCCL 2.4 to 2.30 (`NCCL_DEBUG=INFO`), from one text or one text per rank.

What the text does not say is absent or None, never 0. Transports and channels are those of the largest communicator.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from analysis.errors import UnreadableInput
from analysis.nccl.communicators import Group, Sorted, bracket_kind, sort_by_communicator
from analysis.nccl.events import Connection, Event, LogProcess, Setting, Statement, Tuning
from analysis.nccl.facts import (
    channels_of,
    collnet_of,
    connections_of,
    devices_of,
    nics_of,
    nodes_of,
    rings_of,
    transports_of,
    trees_of,
)
from analysis.nccl.lines import LogEvents, read_events
from analysis.nccl.messages import NEWEST
from analysis.nccl.model import AlgorithmChoice, Communicator, NcclLog, version_numbers
from analysis.nccl.runs import of_one_run
from conf.nccl import ALGORITHMS, PROTOCOLS

# Announced with any NCCL_DEBUG_SUBSYS, so they do not prove that the ENV subsystem was logged.
_ALWAYS_LOGGED = {"NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_NET_GDR_LEVEL", "NCCL_COLLNET_ENABLE"}
_KEPT = 100  # distinct warnings and errors kept; a retry loop writes thousands
# Before 2.23 a ring line shows 20 ranks at most: a list of 20 or more does not show how many there are.
_RANKS_SHOWN = 20


def parse_nccl_log(*texts: str, hosts: Sequence[str] = ()) -> NcclLog:
    """Read one log of all ranks, or one log per rank. Raises UnreadableInput if no text has a line of NCCL.

    `hosts` are those of the texts, where they are known: machines in containers may all have one name and one process id.
    """
    read = [
        read_events(text, number, hosts[number] if hosts else "")
        for number, text in enumerate(texts)
    ]
    if not any(one.nccl for one in read):
        raise UnreadableInput(
            "no line from NCCL found; accepted are whole lines with 'NCCL INFO …', which a run with NCCL_DEBUG=INFO writes"
        )
    notes = _reading_notes(read)
    events = [event for one in read for event in one.events]
    events, of_other_runs = of_one_run(events, notes)
    version = _only(events, "version", notes, "NCCL versions")
    numbers = version_numbers(version)
    _note_newer_release(version, numbers, notes)
    events = _keep_known(events, numbers, notes)
    kind = bracket_kind(numbers, _brackets(events))
    found = sort_by_communicator(events, kind)
    largest = max(found.groups, key=_size)
    _grouping_notes(found, largest, notes)
    connections = connections_of(found, largest, notes)
    rings = rings_of(largest, notes)
    nranks = largest.nranks if largest.nranks is not None else _ranks_of(rings)
    channels, channels_from = channels_of(largest, notes)
    settings, conflicts, announced_by = _settings(events)
    multicast = _multicast(events, notes)
    others = sorted(
        (group for group in found.groups if group is not largest),
        key=lambda group: -(group.nranks or 0),
    )
    communicators = [Communicator(largest.name, nranks, devices_of(largest, kind, connections))]
    communicators += [Communicator(group.name, group.nranks, devices_of(group)) for group in others]
    return NcclLog(
        version=version,
        cuda=_only(events, "cuda", notes, "CUDA versions"),
        nranks=nranks,
        communicators=tuple(communicators),
        transports=transports_of(connections),
        collnet=collnet_of(largest),
        channels=channels,
        channels_from=channels_from,
        rings=rings,
        trees=trees_of(largest),
        settings=settings,
        conflicts=conflicts,
        announced_by=announced_by,
        processes=sum(len(one.processes - of_other_runs) for one in read),
        env_logged=_env_logged(events, numbers),
        algorithms=_choices(events),
        multicast=multicast,
        network=_only(events, "network", notes, "networks"),
        nics=nics_of(connections, events),
        nodes=nodes_of(largest, events),
        warnings=_distinct(events, "warning", notes),
        errors=_distinct(events, "error", notes),
        truncated=any(one.truncated for one in read),
        lost=sum(one.lost for one in read),
        notes=tuple(notes),
    )


def _note_newer_release(
    version: str | None, numbers: tuple[int, ...] | None, notes: list[str]
) -> None:
    if numbers is not None and numbers[:2] > NEWEST:
        known = ".".join(map(str, NEWEST))
        notes.append(
            f"NCCL {version} is newer than the newest release known here ({known}): its lines may differ"
        )


def _brackets(events: list[Event]) -> set[str]:
    """Return what stands in the brackets of `0[1a] -> 1[1b]`."""
    connections = [event for event in events if isinstance(event, Connection)]
    return {
        bracket
        for one in connections
        for bracket in (one.source_bracket, one.target_bracket)
        if bracket
    }


def _size(group: Group) -> tuple[int, int]:
    """Order communicators by ranks, then by connections."""
    return group.nranks or 0, sum(isinstance(event, Connection) for event in group.events)


def _ranks_of(rings: dict[int, tuple[int, ...]]) -> int | None:
    """Return the number of ranks that the rings show, where no line states it."""
    most = max(map(len, rings.values()), default=0)
    return most if 0 < most < _RANKS_SHOWN else None


def _multicast(events: list[Event], notes: list[str]) -> bool | None:
    values = {
        event.value
        for event in events
        if isinstance(event, Statement) and event.kind == "multicast"
    }
    if len(values) > 1:
        notes.append("ranks disagree on whether NVLS multicast is available")
    return values == {"yes"} if len(values) == 1 else None


def _reading_notes(read: list[LogEvents]) -> list[str]:
    """Note what was lost while reading."""
    notes = []
    empty = [str(number) for number, one in enumerate(read, 1) if not one.nccl]
    if empty:
        notes.append(f"text {', '.join(empty)} of {len(read)} has no line from NCCL")
    if any(one.truncated for one in read):
        notes.append("the text ends inside a line; that line is not used")
    unparsed = [line for one in read for line in one.unparsed]
    for count, what in (
        (sum(one.damaged for one in read), "with NUL bytes, not used"),
        (sum(one.torn for one in read), "torn between ranks, not used"),
        (
            len(unparsed),
            "of a known kind in an unknown form, not used; the first: "
            + "".join(unparsed[:1])[:120],
        ),
    ):
        if count:
            notes.append(f"{count} line(s) {what}")
    return notes


def _only(events: Iterable[Event], kind: str, notes: list[str], plural: str) -> str | None:
    """Return the value that all statements of a kind agree on, else None."""
    values = sorted(
        {event.value for event in events if isinstance(event, Statement) and event.kind == kind}
    )
    if len(values) > 1:
        notes.append(f"ranks report different {plural}: {', '.join(values)}")
    return values[0] if len(values) == 1 else None


def _keep_known(
    events: list[Event], version: tuple[int, ...] | None, notes: list[str]
) -> list[Event]:
    """Drop connections with transports that no known release has, unless the release is newer."""
    strange = sorted({e.transport for e in events if isinstance(e, Connection) and not e.known})
    if not strange:
        return events
    if version is not None and version[:2] > NEWEST:
        notes.append(f"unknown transports: {', '.join(strange)}")
        return events
    notes.append(f"connections with unknown transports, not used: {', '.join(strange)}")
    return [event for event in events if not (isinstance(event, Connection) and not event.known)]


def _grouping_notes(found: Sorted, largest: Group, notes: list[str]) -> None:
    if len(found.groups) > 1:
        sizes = Counter(g.nranks for g in found.groups if g is not largest)
        others = ", ".join(
            f"{count} of {size} ranks" for size, count in sorted(sizes.items(), key=str)
        )
        notes.append(
            f"{len(found.groups)} communicators; this is the largest, the others: {others}"
        )
    if found.confused:
        notes.append("communicators of equal size without a name: ranks and GPUs may be mixed up")
    if found.strange:
        notes.append(f"{found.strange} line(s) fit no communicator, not used")


def _settings(
    events: list[Event],
) -> tuple[dict[str, str], dict[str, tuple[str, ...]], dict[str, int]]:
    values: dict[str, set[str]] = defaultdict(set)
    writers: dict[str, set[LogProcess]] = defaultdict(set)
    for event in events:
        if isinstance(event, Setting):
            values[event.name].add(event.value)
            if event.process.host:
                writers[event.name].add(event.process)
    settings = {name: min(said) for name, said in sorted(values.items()) if len(said) == 1}
    conflicts = {
        name: tuple(sorted(said)) for name, said in sorted(values.items()) if len(said) > 1
    }
    return settings, conflicts, {name: len(who) for name, who in sorted(writers.items())}


def _env_logged(events: list[Event], version: tuple[int, ...] | None) -> bool:
    """Tell whether a line proves that the ENV subsystem was logged. To 2.15 integers were announced without it."""
    for event in events:
        if isinstance(event, Statement) and event.kind == "env":
            return True
        if isinstance(event, Setting) and event.name not in _ALWAYS_LOGGED:
            integer = re.fullmatch(r"-?\d+", event.value) is not None
            if not integer or (version is not None and version >= (2, 16)):
                return True
    return False


def _choices(events: list[Event]) -> tuple[AlgorithmChoice, ...]:
    """Count equal TUNING lines. Names are those of NCCL_ALGO and NCCL_PROTO, for numbers (2.20 to 2.23) too."""
    counted = Counter(
        (
            event.function,
            event.size,
            _name(event.algorithm, ALGORITHMS),
            _name(event.protocol, PROTOCOLS),
            event.channels,
        )
        for event in events
        if isinstance(event, Tuning)
    )
    ordered = sorted(
        counted.items(),
        key=lambda item: (item[0][0] or "", item[0][1], item[0][2:4], item[0][4] or 0),
    )
    return tuple(AlgorithmChoice(*key, calls=calls) for key, calls in ordered)


def _name(word: str, names: tuple[str, ...]) -> str:
    if word.isdecimal():
        return names[int(word)] if int(word) < len(names) else word
    return {name.lower(): name for name in names}.get(word.replace("_", "").lower(), word)


def _distinct(events: list[Event], kind: str, notes: list[str]) -> tuple[str, ...]:
    found = list(
        dict.fromkeys(e.value for e in events if isinstance(e, Statement) and e.kind == kind)
    )
    if len(found) > _KEPT:
        notes.append(f"{len(found)} distinct {kind}s, the first {_KEPT} kept")
    return tuple(found[:_KEPT])
