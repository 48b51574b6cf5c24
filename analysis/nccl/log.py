"""What NCCL says it did: the log of NCCL 2.4 to 2.30 (`NCCL_DEBUG=INFO`), of one text or one text per rank.

What the text does not say is absent or None, never 0. Transports and channels are those of the largest communicator.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from analysis.errors import UnreadableInput
from analysis.nccl.announcements import ALGORITHMS, PROTOCOLS
from analysis.nccl.communicators import (
    Group,
    RankGpu,
    Sorted,
    bracket_kind,
    channels_of,
    connections_of,
    devices_of,
    rings_of,
    sort_by_communicator,
)
from analysis.nccl.lines import (
    NEWEST,
    CollNet,
    Connection,
    Event,
    LogEvents,
    LogProcess,
    Setting,
    Statement,
    Trees,
    Tuning,
    read_events,
)

# Announced whatever NCCL_DEBUG_SUBSYS says, so that they do not show that the ENV subsystem was logged.
_ALWAYS_LOGGED = {"NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_NET_GDR_LEVEL", "NCCL_COLLNET_ENABLE"}
_KEPT = 100  # distinct warnings and errors kept; a retry loop writes thousands
# Before 2.23 a ring line shows 20 ranks at most: a list of 20 or more does not tell how many there are.
_RANKS_SHOWN = 20


@dataclass(frozen=True)
class Communicator:
    """One communicator: `name` is its commId where NCCL printed one, `devices` the GPU of each rank that is known."""

    name: str | None
    nranks: int | None
    devices: Mapping[int, RankGpu]


@dataclass(frozen=True)
class Choice:
    """What NCCL chose for a collective of a size, from its TUNING lines; `calls` counts equal lines.

    `size` in bytes; `channels` is None to 2.23, which print a predicted time instead; `function` is None to 2.22.
    """

    function: str | None
    size: int
    algorithm: str
    protocol: str
    channels: int | None
    calls: int


@dataclass(frozen=True)
class NcclLog:
    """One run's log. Ranks are those of the largest communicator; `a->b` joins two of them.

    `transports` has every transport of a connection, sorted (`direct shared memory` reads `SHM/direct`; NET has those
    of both ends). `channels` has a number or None per kind, from the summary line, or (`channels_from`) "rings": the
    collective count of `Channel 00/04`. `trees` is channel: {rank: parent, -1 at the root}. `settings` are the
    announced ones; where ranks differ they are in `conflicts` instead. `announced_by` counts processes per setting, of
    `processes` that wrote lines with a prefix. `env_logged`: a line shows that the ENV subsystem was logged. `lost`
    counts lines of NCCL that could not be used.
    """

    version: str | None
    cuda: str | None
    nranks: int | None
    communicators: tuple[Communicator, ...]
    transports: Mapping[str, tuple[str, ...]]
    collnet: Mapping[int, tuple[str, ...]]
    channels: Mapping[str, int | None]
    channels_from: str | None
    rings: Mapping[int, tuple[int, ...]]
    trees: Mapping[int, Mapping[int, int]]
    settings: Mapping[str, str]
    conflicts: Mapping[str, tuple[str, ...]]
    announced_by: Mapping[str, int]
    processes: int
    env_logged: bool
    algorithms: tuple[Choice, ...]
    multicast: bool | None
    network: str | None
    warnings: tuple[str, ...]
    errors: tuple[str, ...]
    truncated: bool
    lost: int
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The object of `python -m analysis nccl-log --json`, the contract's keys first; keys of maps are strings."""
        everything: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for choice in everything["algorithms"]:
            choice["bytes"] = choice.pop("size")
        first = ("version", "nranks", "transports", "channels", "settings", "warnings")
        return {key: everything[key] for key in (*first, *(key for key in everything if key not in first))}


def version_numbers(version: str | None) -> tuple[int, ...] | None:
    """`2.28.9` as (2, 28, 9)."""
    return tuple(int(part) for part in version.split(".")) if version else None


def parse_nccl_log(*texts: str) -> NcclLog:
    """Read one log of all ranks, or one log per rank. Raises UnreadableInput when no text has a line of NCCL."""
    read = [read_events(text, number) for number, text in enumerate(texts)]
    if not any(one.nccl for one in read):
        raise UnreadableInput(
            "no line of NCCL found: expected whole lines with 'NCCL INFO …', as a run with NCCL_DEBUG=INFO writes them"
        )
    notes = _reading_notes(read)
    events = [event for one in read for event in one.events]
    version = _only(events, "version", notes, "NCCL versions")
    numbers = version_numbers(version)
    if numbers is not None and numbers[:2] > NEWEST:
        known = ".".join(map(str, NEWEST))
        notes.append(f"NCCL {version} is newer than any whose lines are known ({known}): its lines may read otherwise")
    events = _keep_known(events, numbers, notes)
    brackets = {b for e in events if isinstance(e, Connection) for b in (e.source_bracket, e.target_bracket) if b}
    kind = bracket_kind(numbers, brackets)
    found = sort_by_communicator(events, kind)
    largest = max(found.groups, key=lambda g: (g.nranks or 0, sum(isinstance(e, Connection) for e in g.events)))
    _grouping_notes(found, largest, notes)
    connections = connections_of(found, largest, notes)
    rings = rings_of(largest, notes)
    nranks = largest.nranks
    if nranks is None and rings and max(map(len, rings.values())) < _RANKS_SHOWN:
        nranks = max(map(len, rings.values()))
    channels, channels_from = channels_of(largest, notes)
    trees: dict[int, dict[int, int]] = defaultdict(dict)
    collnet: dict[int, set[str]] = defaultdict(set)
    for event in largest.events:
        if isinstance(event, Trees):
            for channel, parent in event.parents.items():
                trees[channel][event.rank] = parent
        elif isinstance(event, CollNet):
            collnet[event.rank].add(event.transport)
    transports: dict[str, set[str]] = defaultdict(set)
    for one in sorted(connections, key=lambda one: (one.source, one.target)):
        transports[f"{one.source}->{one.target}"].add(one.transport)
    settings, conflicts, announced_by = _settings(events)
    multicast = {e.value for e in events if isinstance(e, Statement) and e.kind == "multicast"}
    if len(multicast) > 1:
        notes.append("ranks disagree on whether NVLS multicast is available")
    groups = sorted(found.groups, key=lambda g: (g is not largest, -(g.nranks or 0)))
    return NcclLog(
        version=version,
        cuda=_only(events, "cuda", notes, "CUDA versions"),
        nranks=nranks,
        communicators=tuple(
            Communicator(g.name, nranks if g is largest else g.nranks, devices_of(g, kind, connections, largest))
            for g in groups
        ),
        transports={pair: tuple(sorted(words)) for pair, words in transports.items()},
        collnet={rank: tuple(sorted(words)) for rank, words in sorted(collnet.items())},
        channels=channels,
        channels_from=channels_from,
        rings=rings,
        trees={channel: dict(sorted(trees[channel].items())) for channel in sorted(trees)},
        settings=settings,
        conflicts=conflicts,
        announced_by=announced_by,
        processes=sum(len(one.processes) for one in read),
        env_logged=_env_logged(events, numbers),
        algorithms=_choices(events),
        multicast=multicast == {"yes"} if len(multicast) == 1 else None,
        network=_only(events, "network", notes, "networks"),
        warnings=_distinct(events, "warning", notes),
        errors=_distinct(events, "error", notes),
        truncated=any(one.truncated for one in read),
        lost=sum(one.damaged + one.torn + len(one.unparsed) for one in read),
        notes=tuple(notes),
    )


def _reading_notes(read: list[LogEvents]) -> list[str]:
    """What was lost while reading."""
    notes = []
    empty = [str(number + 1) for number, one in enumerate(read) if not one.nccl]
    if empty:
        notes.append(f"text {', '.join(empty)} of {len(read)} has no line of NCCL")
    if any(one.truncated for one in read):
        notes.append("the text ends inside a line; that line is not used")
    for count, what in (
        (sum(one.damaged for one in read), "with NUL bytes"),
        (sum(one.torn for one in read), "torn between ranks"),
        (sum(len(one.unparsed) for one in read), "of a known kind in an unknown form"),
    ):
        if count:
            example = next((line for one in read for line in one.unparsed), "") if "unknown form" in what else ""
            notes.append(f"{count} line(s) {what} not used" + (f", the first: {example[:120]}" if example else ""))
    return notes


def _only(events: Iterable[Event], kind: str, notes: list[str], plural: str) -> str | None:
    """The one value that all statements of a kind agree on."""
    values = sorted({event.value for event in events if isinstance(event, Statement) and event.kind == kind})
    if len(values) > 1:
        notes.append(f"ranks report different {plural}: {', '.join(values)}")
    return values[0] if len(values) == 1 else None


def _keep_known(events: list[Event], version: tuple[int, ...] | None, notes: list[str]) -> list[Event]:
    """Transports in words that no known release has: kept from a newer release, else taken for damage."""
    strange = sorted({e.transport for e in events if isinstance(e, Connection) and not e.known})
    if not strange:
        return events
    if version is not None and version[:2] > NEWEST:
        notes.append(f"transports in words not known: {', '.join(strange)}")
        return events
    notes.append(f"connections with transports that NCCL {version or 'of any version'} does not have, not used")
    return [event for event in events if not (isinstance(event, Connection) and not event.known)]


def _grouping_notes(found: Sorted, largest: Group, notes: list[str]) -> None:
    if len(found.groups) > 1:
        sizes = Counter(g.nranks for g in found.groups if g is not largest)
        others = ", ".join(f"{count} of {size} ranks" for size, count in sorted(sizes.items(), key=str))
        notes.append(f"{len(found.groups)} communicators; this is the largest, besides {others}")
    if found.confused:
        notes.append("communicators of equal size without identity: which GPU has which rank may be mixed up")
    if found.strange:
        notes.append(f"{found.strange} line(s) fit no communicator and are not used")


def _settings(events: list[Event]) -> tuple[dict[str, str], dict[str, tuple[str, ...]], dict[str, int]]:
    values: dict[str, set[str]] = defaultdict(set)
    writers: dict[str, set[LogProcess]] = defaultdict(set)
    for event in events:
        if isinstance(event, Setting):
            values[event.name].add(event.value)
            if event.process.host:
                writers[event.name].add(event.process)
    settings = {name: min(said) for name, said in sorted(values.items()) if len(said) == 1}
    conflicts = {name: tuple(sorted(said)) for name, said in sorted(values.items()) if len(said) > 1}
    return settings, conflicts, {name: len(who) for name, who in sorted(writers.items())}


def _env_logged(events: list[Event], version: tuple[int, ...] | None) -> bool:
    """Whether a line proves that the ENV subsystem was logged. To 2.15 integers were announced without it."""
    for event in events:
        if isinstance(event, Statement) and event.kind == "env":
            return True
        if isinstance(event, Setting) and event.name not in _ALWAYS_LOGGED:
            integer = re.fullmatch(r"-?\d+", event.value) is not None
            if not integer or (version is not None and version >= (2, 16)):
                return True
    return False


def _choices(events: list[Event]) -> tuple[Choice, ...]:
    """Equal TUNING lines counted; names as NCCL_ALGO and NCCL_PROTO have them, for numbers (2.20 to 2.23) too."""
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
    ordered = sorted(counted.items(), key=lambda item: (item[0][0] or "", item[0][1], item[0][2:4], item[0][4] or 0))
    return tuple(Choice(*key, calls=calls) for key, calls in ordered)


def _name(word: str, names: tuple[str, ...]) -> str:
    if word.isdecimal():
        return names[int(word)] if int(word) < len(names) else word
    return {name.lower(): name for name in names}.get(word.replace("_", "").lower(), word)


def _distinct(events: list[Event], kind: str, notes: list[str]) -> tuple[str, ...]:
    found = list(dict.fromkeys(e.value for e in events if isinstance(e, Statement) and e.kind == kind))
    if len(found) > _KEPT:
        notes.append(f"{len(found)} distinct {kind}s, the first {_KEPT} kept")
    return tuple(found[:_KEPT])
