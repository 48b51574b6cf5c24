"""Read the log of NCCL 2.4 to 2.30 (`NCCL_DEBUG=INFO`), from one text or one text per rank.

What the text does not say is absent or None, never 0. Transports and channels are those of the
largest communicator. A cut, torn or NUL-filled line is lost and counted, never half read. The time
is linear in the length of the text.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from analysis.input_files import UnreadableInput, read_text
from analysis.nccl.communicators import (
    CommunicatorIndex,
    Group,
    RankGpu,
    bracket_kind,
    channels_of,
    connections_of,
    devices_of,
    nics_of,
    nodes_of,
    rings_of,
    transports_of,
)
from analysis.nccl.messages import (
    NEWEST,
    Connection,
    Event,
    LogProcess,
    Setting,
    Statement,
    Tuning,
    read_message,
)
from conf.nccl import ALGORITHMS, PROTOCOLS

_MOST_TEXTS = 100  # distinct warnings and errors; a retry loop writes thousands
# Before 2.23 a ring line shows 20 ranks at most: such a list does not show how many there are.
_RANKS_SHOWN = 20
# The last line of a torn pair arrives within a few lines; until then a line could be one rank's
# head and another's tail.
_TORN_WINDOW = 8
_LONG_NUMBER = re.compile(r"(?<!\w)\d{21}")  # beyond the 64 bits that NCCL prints
_PREFIX = re.compile(r"(\S+?):(\d+):\d+ (?:\[-?\d+\] )?(?:\S+:\d+ (?:\(\w*\) )?)?$")
_VERSION_ROW = re.compile(
    r"(?:\[[^\]]*\] )?NCCL version (\d{1,4}(?:\.\d{1,4})+)\S*\+cuda(\d+\.\d+)\s*$"
)
_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Communicator:
    """One communicator: `name` is its commId if NCCL printed one, `devices` the GPUs by rank."""

    name: str | None
    nranks: int | None
    devices: Mapping[int, RankGpu]


@dataclass(frozen=True)
class AlgorithmChoice:
    """NCCL's choice for a collective of one size; `calls` counts equal TUNING lines.

    `size` is in bytes. `channels` is None to 2.23, which print a predicted time instead; `function`
    is None to 2.22.
    """

    function: str | None
    size: int
    algorithm: str
    protocol: str
    channels: int | None
    calls: int


@dataclass(frozen=True)
class NcclLog:
    """The facts of one run's log. Ranks are those of the largest communicator; `a->b` joins two.

    - `transports`: every transport of a connection, sorted; `direct shared memory` reads
      `SHM/direct`, NET has those of both ends.
    - `channels`: a number or None per kind, from the summary line, or, if `channels_from` is
      "rings", the collective count of `Channel 00/04`.
    - `nics`: the network devices that each rank's connections use.
    - `nodes`: the hosts that NCCL sees.
    - `paths`: distinct lines on rings, CollNet and registered buffers.
    - `no_peer_access`: distinct lines that say why GPUs cannot use P2P.
    - `settings`: announced values; a setting on which ranks differ is in `conflicts` instead.
    - `announced_by`: processes that announced each setting, of `processes` that wrote lines with a
      prefix.
    - `lost`: how many lines of NCCL could not be used.
    """

    version: str | None
    cuda: str | None
    nranks: int | None
    communicators: tuple[Communicator, ...]
    transports: Mapping[str, tuple[str, ...]]
    channels: Mapping[str, int | None]
    channels_from: str | None
    rings: Mapping[int, tuple[int, ...]]
    settings: Mapping[str, str]
    conflicts: Mapping[str, tuple[str, ...]]
    announced_by: Mapping[str, int]
    processes: int
    algorithms: tuple[AlgorithmChoice, ...]
    multicast: bool | None
    network: str | None
    nics: Mapping[int, tuple[str, ...]]
    nodes: int | None
    paths: tuple[str, ...]
    no_peer_access: tuple[str, ...]
    warnings: tuple[str, ...]
    errors: tuple[str, ...]
    truncated: bool
    lost: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object of `nccl-log --json`; keys of maps are strings."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for choice in content["algorithms"]:
            choice["bytes"] = choice.pop("size")
        ordered = {}
        for key in ("version", "nranks", "transports", "channels", "settings", "warnings"):
            ordered[key] = content.pop(key)
        return ordered | content


def version_numbers(version: str | None) -> tuple[int, ...] | None:
    """Split a version into numbers: `2.28.9` is (2, 28, 9); None stays None."""
    return tuple(int(part) for part in version.split(".")) if version else None


def read_nccl_log(files: Sequence[str | Path]) -> NcclLog:
    """Return what the files of one run say: one log of all ranks, or one per rank.
    Raises OSError, and UnreadableInput: no file has a line of NCCL.
    """
    texts = [read_text(file) for file in files]
    try:
        return parse_nccl_log(*texts)
    except UnreadableInput as error:
        raise UnreadableInput(f"{', '.join(map(str, files))}: {error}") from None


def parse_nccl_log(*texts: str, hosts: Sequence[str] = ()) -> NcclLog:
    """Return what one log of all ranks says, or one log per rank. `hosts` are those of the texts,
    where they are known: machines in containers may all have one name and one process id.

    Raises UnreadableInput: no text has a line of NCCL.
    """
    lines = _LogLines()
    for text_number, text in enumerate(texts):
        lines.read(text, text_number, hosts[text_number] if hosts else "")
    if not lines.nccl:
        raise UnreadableInput(
            "no line from NCCL found; expected whole lines with 'NCCL INFO …', which a run "
            "with NCCL_DEBUG=INFO writes"
        )
    notes = lines.loss_notes()
    events = lines.events
    version = _agreed_value(events, "version", notes, "NCCL versions")
    numbers = version_numbers(version)
    events = _without_unknown_transports(events, version, notes)
    kind = bracket_kind(numbers, [event for event in events if isinstance(event, Connection)])
    index = CommunicatorIndex(events, kind)
    largest = max(index.groups, key=lambda group: (group.nranks or 0, group.connection_count))
    _note_groups(index, largest, notes)
    connections = connections_of(index, largest, notes)
    rings = rings_of(largest, notes)
    nranks = largest.nranks
    if nranks is None:
        most = max(map(len, rings.values()), default=0)
        if 0 < most < _RANKS_SHOWN:
            nranks = most
    channels, channels_from = channels_of(largest, notes)
    settings, conflicts, announced_by = _settings(events)
    communicators = [Communicator(largest.name, nranks, devices_of(largest, kind, connections))]
    for group in sorted(index.groups, key=lambda group: -(group.nranks or 0)):
        if group is not largest:
            communicators.append(Communicator(group.name, group.nranks, devices_of(group)))
    multicast = None
    words = _values(events, "multicast")
    if len(words) > 1:
        notes.append("ranks disagree on whether NVLS multicast is available")
    elif words:
        multicast = words == ["yes"]
    return NcclLog(
        version=version,
        cuda=_agreed_value(events, "cuda", notes, "CUDA versions"),
        nranks=nranks,
        communicators=tuple(communicators),
        transports=transports_of(connections),
        channels=channels,
        channels_from=channels_from,
        rings=rings,
        settings=settings,
        conflicts=conflicts,
        announced_by=announced_by,
        processes=len(lines.processes),
        algorithms=_choices(events),
        multicast=multicast,
        network=_agreed_value(events, "network", notes, "networks"),
        nics=nics_of(connections, events),
        nodes=nodes_of(largest, events),
        paths=_first_values(events, "path", notes),
        no_peer_access=_first_values(events, "no_peer_access", notes),
        warnings=_first_values(events, "warning", notes),
        errors=_first_values(events, "error", notes),
        truncated=lines.truncated,
        lost=lines.damaged + lines.torn + len(lines.unparsed),
        notes=tuple(notes),
    )


@dataclass(slots=True)
class _LogLines:
    events: list[Event] = field(default_factory=list)
    processes: set[LogProcess] = field(default_factory=set)  # those whose prefix is known
    texts: int = 0
    silent_texts: list[str] = field(default_factory=list)  # numbers of those without NCCL, from 1
    nccl: int = 0  # lines by NCCL
    damaged: int = 0  # lines with NUL bytes
    torn: int = 0  # lines of two ranks mixed, and lines that may be such
    unparsed: list[str] = field(default_factory=list)  # of a known kind in an unknown form
    truncated: bool = False  # a text ends inside a line

    def read(self, text: str, text_number: int, host: str) -> None:
        rows = text.split("\n")
        # Without its newline the last line may have lost its end, a number its last digits, and
        # NCCL's mark may be still to come.
        self.truncated |= rows.pop().strip() != ""
        nccl_before = self.nccl
        heads = 0  # of torn lines whose tail has not come
        wait = 0  # lines until a tail is no longer awaited
        for index, row in enumerate(rows):
            if "\0" in row:
                self.damaged += row.strip("\0\r ") != ""
                continue
            row = _ANSI_COLOUR.sub("", row).rstrip("\r")
            marks = row.count("NCCL INFO ") + row.count("NCCL WARN ")
            if marks == 0:  # the tail of a torn line, or what NCCL_DEBUG=VERSION prints
                if row.strip():
                    heads = max(0, heads - 1)
                version = _VERSION_ROW.match(row)
                if version:
                    self.nccl += 1
                    nobody = LogProcess(text_number, "", -1)
                    self.events.append(Statement(nobody, "version", version[1]))
                    self.events.append(Statement(nobody, "cuda", version[2]))
                continue
            self.nccl += 1
            if marks > 1:
                self.torn += 1
                heads = min(heads + marks - 1, _TORN_WINDOW)
                wait = _TORN_WINDOW
            elif heads:
                self.torn += 1
                wait -= 1
                if not wait:
                    heads = 0
            else:
                self.read_whole_row(row, text_number, host, is_first=index == 0)
        self.texts = text_number + 1
        if self.nccl == nccl_before:
            self.silent_texts.append(str(self.texts))

    def read_whole_row(self, row: str, text_number: int, host: str, is_first: bool) -> None:
        """Add a line that is whole; the first of a text may have lost the front of its prefix."""
        head, is_warning, body = row.partition("NCCL WARN ")
        if not is_warning:
            head, _, body = row.partition("NCCL INFO ")
        process = LogProcess(text_number, "", -1)
        prefix = _PREFIX.search(head[-300:])
        if prefix and not is_first:
            process = LogProcess(text_number, host or prefix[1], int(prefix[2]))
            self.processes.add(process)
        if is_warning:
            self.events.append(Statement(process, "warning", body.strip()))
            return
        try:
            events = read_message(body, process)
        except ValueError:  # a number of thousands of digits
            events = None
        if events is None or (events and _LONG_NUMBER.search(body)):
            self.unparsed.append(body)
        else:
            self.events += events

    def loss_notes(self) -> list[str]:
        notes = []
        if self.silent_texts:
            numbers = ", ".join(self.silent_texts)
            notes.append(f"text {numbers} of {self.texts} has no line from NCCL")
        if self.truncated:
            notes.append("the text ends inside a line; that line is not used")
        if self.damaged:
            notes.append(f"{self.damaged} line(s) with NUL bytes, not used")
        if self.torn:
            notes.append(f"{self.torn} line(s) torn between ranks, not used")
        if self.unparsed:
            notes.append(
                f"{len(self.unparsed)} line(s) of a known kind in an unknown form, not used; the "
                f"first: {self.unparsed[0][:120]}"
            )
        return notes


def _values(events: Iterable[Event], kind: str) -> list[str]:
    values: dict[str, None] = {}
    for event in events:
        if isinstance(event, Statement) and event.kind == kind:
            values[event.value] = None
    return list(values)


def _agreed_value(events: list[Event], kind: str, notes: list[str], plural: str) -> str | None:
    values = _values(events, kind)
    if len(values) > 1:
        notes.append(f"ranks report different {plural}: {', '.join(sorted(values))}")
    if len(values) != 1:
        return None
    return values[0]


def _first_values(events: list[Event], kind: str, notes: list[str]) -> tuple[str, ...]:
    values = _values(events, kind)
    if len(values) > _MOST_TEXTS:
        notes.append(f"{len(values)} distinct {kind}s, the first {_MOST_TEXTS} kept")
    return tuple(values[:_MOST_TEXTS])


def _without_unknown_transports(
    events: list[Event], version: str | None, notes: list[str]
) -> list[Event]:
    """Drop connections with transports that no known release has, unless the release is newer."""
    words = set()
    with_known = []
    for event in events:
        if isinstance(event, Connection) and not event.is_known:
            words.add(event.transport)
        else:
            with_known.append(event)
    unknown = ", ".join(sorted(words))
    numbers = version_numbers(version)
    if numbers is not None and numbers[:2] > NEWEST:
        newest = ".".join(map(str, NEWEST))
        notes.append(
            f"NCCL {version} is newer than the newest release known here ({newest}): its lines may "
            "differ"
        )
        if unknown:
            notes.append(f"unknown transports: {unknown}")
        return events
    if unknown:
        notes.append(f"connections with unknown transports, not used: {unknown}")
    return with_known


def _note_groups(index: CommunicatorIndex, largest: Group, notes: list[str]) -> None:
    if len(index.groups) > 1:
        sizes = Counter(group.nranks for group in index.groups)
        sizes[largest.nranks] -= 1
        counts = []
        for size, count in sorted(sizes.items(), key=str):
            if count:
                counts.append(f"{count} of {size} ranks")
        notes.append(
            f"{len(index.groups)} communicators; shown is the largest; others: {', '.join(counts)}"
        )
    if index.ambiguous:
        notes.append("communicators of equal size without a name: ranks and GPUs may be mixed up")
    if index.strange:
        notes.append(f"{index.strange} line(s) fit no communicator, not used")


def _settings(
    events: Iterable[Event],
) -> tuple[dict[str, str], dict[str, tuple[str, ...]], dict[str, int]]:
    """Return agreed values, values that differ, and how many processes announced each setting."""
    values: dict[str, set[str]] = defaultdict(set)
    writers: dict[str, set[LogProcess]] = defaultdict(set)
    for event in events:
        if isinstance(event, Setting):
            values[event.name].add(event.value)
            if event.process.host:
                writers[event.name].add(event.process)
    settings, conflicts, announced_by = {}, {}, {}
    for name in sorted(values):
        announced = tuple(sorted(values[name]))
        if len(announced) == 1:
            settings[name] = announced[0]
        else:
            conflicts[name] = announced
        if name in writers:
            announced_by[name] = len(writers[name])
    return settings, conflicts, announced_by


def _choices(events: Iterable[Event]) -> tuple[AlgorithmChoice, ...]:
    """Count equal TUNING lines. Names are those of NCCL_ALGO and NCCL_PROTO, for numbers too."""
    calls: Counter[tuple[str | None, int, str, str, int | None]] = Counter()
    for event in events:
        if isinstance(event, Tuning):
            algorithm = _canonical_name(event.algorithm, ALGORITHMS)
            protocol = _canonical_name(event.protocol, PROTOCOLS)
            calls[event.function, event.size, algorithm, protocol, event.channels] += 1
    choices = []
    for key, count in calls.items():
        choices.append(AlgorithmChoice(*key, calls=count))
    choices.sort(key=lambda c: (c.function or "", c.size, c.algorithm, c.protocol, c.channels or 0))
    return tuple(choices)


def _canonical_name(word: str, names: tuple[str, ...]) -> str:
    """Return the name of a word in any case, or of a number (2.20 to 2.23)."""
    if word.isdecimal() and int(word) < len(names):
        return names[int(word)]
    plain = word.replace("_", "").lower()
    for name in names:
        if name.lower() == plain:
            return name
    return word


NET = "NET"  # the class of a link between hosts


def pair_class(
    pair: str,
    log: NcclLog,
    link_classes: Mapping[str, str] | None,
    gpus: Sequence[int | str] | None = None,
) -> str | None:
    """Return the link class of the connection `a->b`; None if GPUs, host or class are not known.

    GPU ids are the log's NVML indices, else those of `gpus`, the subset in rank order. Where that
    names hosts (`a:0`), so do the link classes (`a:0-1`), and ranks of two hosts have the class
    NET.
    """
    ids: list[int] = []
    member_hosts: list[str] = []  # that `gpus` names
    hosts = set()  # that the log names
    for rank in map(int, pair.split("->")):
        device = log.communicators[0].devices.get(rank, RankGpu(None, None, None))
        if device.host is not None:
            hosts.add(device.host)
        gpu = device.nvml
        if gpus is not None and rank < len(gpus):
            host, _, member = str(gpus[rank]).rpartition(":")
            member_hosts.append(host)
            if gpu is None:
                gpu = int(member)
        if gpu is not None:
            ids.append(gpu)
    prefix = ""
    if len(member_hosts) == 2 and member_hosts[0]:
        if member_hosts[0] != member_hosts[1]:
            return NET
        prefix = f"{member_hosts[0]}:"
    elif len(hosts) > 1:
        return None  # link classes are those of one machine
    if len(ids) < 2 or not link_classes:
        return None
    return link_classes.get(f"{prefix}{min(ids)}-{max(ids)}")


def describe_transport(
    log: NcclLog, link_classes: Mapping[str, str] | None, gpus: Sequence[int | str] | None = None
) -> str:
    """Describe all transports: `P2P/CUMEM over NV18`, `SHM/direct/direct, NV18 unused`.

    Several are joined by ` + `; without connections the answer is `unknown`. The numbers of network
    devices are left out (`NET/IB/GDRDMA`).
    """
    links_of: dict[str, set[str]] = defaultdict(set)
    for pair, words in log.transports.items():
        link = pair_class(pair, log, link_classes, gpus)
        for word in words:
            links = links_of[re.sub(r"^(NET/[^/]+)/\d+(\(\d+\))?", r"\1", word)]
            if link:
                links.add(link)
    parts = []
    for word, links in sorted(links_of.items()):
        classes = "+".join(sorted(links))
        if not classes or word.startswith("NET/"):
            parts.append(word)
        elif word.startswith("P2P/") or not all(link.startswith("NV") for link in links):
            parts.append(f"{word} over {classes}")
        else:
            parts.append(f"{word}, {classes} unused")
    return " + ".join(parts) or "unknown"
