"""The grammar of NCCL's log lines, 2.4 to 2.30: one text becomes typed events, in the order of its lines.

Checked against the format strings of NCCL's release tags. A line counts only when it matches its whole grammar, so
that a cut, torn or NUL-filled line is lost and counted, never half read. Linear in the length of the text.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

NEWEST = (2, 30)  # the newest release whose format strings were read

# The last line of a torn pair arrives within a few lines; until then a line could be one rank's head, another's tail.
_TORN_WINDOW = 8
# NCCL formats a tree line into a buffer of 1,024 bytes: a line near that length may end inside a number.
_TREES_FULL = 1000


class LogProcess(NamedTuple):
    """Who wrote a line: the text's number and the prefix `host:pid:`; without prefix host is "" and pid -1."""

    text: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Connection:
    """`Channel 00/0 : 0[0] -> 1[3] via P2P/CUMEM`; ranks are the communicator's, brackets are kept as written."""

    process: LogProcess
    channel: int
    source: int
    target: int
    source_bracket: str | None
    target_bracket: str | None
    transport: str
    end: str | None  # "send" or "receive" for NET, which both ends announce
    known: bool  # the transport is one of the words of 2.4 to 2.30


@dataclass(frozen=True, slots=True)
class CollNet:
    """`CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA`."""

    process: LogProcess
    channel: int
    rank: int
    transport: str


@dataclass(frozen=True, slots=True)
class RingLine:
    """`Channel 00/04 : 0 1 2 3`; `count` is the number after the slash (collective channels), `cut` a line with …"""

    process: LogProcess
    channel: int
    count: int | None
    ranks: tuple[int, ...]
    cut: bool


@dataclass(frozen=True, slots=True)
class Trees:
    """`Trees [0] 1/-1/-1->0->-1 …`: the parent of this rank in each channel, -1 at the root."""

    process: LogProcess
    rank: int
    parents: dict[int, int]


@dataclass(frozen=True, slots=True)
class ChannelCounts:
    """`24 coll channels, …`: counts by the contract's names; what the line lacks is absent."""

    process: LogProcess
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Membership:
    """`… comm 0x… rank 0 nranks 2 … Init START|COMPLETE`; `identity` links ranks, the pointer is one process's."""

    process: LogProcess
    pointer: str
    rank: int
    nranks: int
    nvml: int | None
    bus_id: str | None
    comm_id: str | None
    split: tuple[str, str | None, str] | None  # parent pointer, split count, colour
    complete: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """`NCCL_X set by environment to Y`."""

    process: LogProcess
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Tuning:
    """`AllReduce: 644 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}`; a count where the text names channels."""

    process: LogProcess
    function: str | None
    size: int
    algorithm: str
    protocol: str
    channels: int | None
    predicted_us: float | None


@dataclass(frozen=True, slots=True)
class Statement:
    """A line of one value: kind is version, cuda, network, multicast, env, warning or error."""

    process: LogProcess
    kind: str
    value: str


Event = Connection | CollNet | RingLine | Trees | ChannelCounts | Membership | Setting | Tuning | Statement


@dataclass(slots=True)
class LogEvents:
    """What one text held."""

    events: list[Event] = field(default_factory=list)
    processes: set[LogProcess] = field(default_factory=set)  # those whose prefix is known
    nccl: int = 0  # lines by NCCL
    damaged: int = 0  # lines with NUL bytes
    torn: int = 0  # lines of two ranks mixed, and those that could not be told from such
    unparsed: list[str] = field(default_factory=list)  # lines of a known kind in an unknown form
    truncated: bool = False  # the text ends inside a line


_PREFIX = re.compile(r"(\S+?):(\d+):\d+ (?:\[-?\d+\] )?(?:\S+:\d+ (?:\(\w*\) )?)?$")
_VERSION_ROW = re.compile(r"(?:\[[^\]]*\] )?NCCL version (\d{1,4}(?:\.\d{1,4})+)\S*\+cuda(\d+\.\d+)\s*$")
_VERSION = re.compile(r"NCCL version (\d{1,4}(?:\.\d{1,4})+)[^+ ]*(?:\+cuda(\d+\.\d+))?")
_END = r"(\d+)(?:\[([0-9a-f]+)\])?"
_CONNECTION = re.compile(rf"(?:Channel|Ring) (\d+)(?:/\d+)? : {_END} -> {_END} (?:\[(send|receive)\] )?via (\S.*)")
_TRANSPORT = re.compile(
    r"P2P/(?:IPC|CUMEM|MNNVL|direct pointer|common device|indirect/\d+\[[0-9a-f]+\])(?:/read)?(?:/CE)?"
    r"|direct shared memory|SHM/(?:direct|CE)(?:/(?:direct|CE))?"
    r"|NET/[^/]+/\d+(?:\(\d+\))?(?:/GDRDMA(?:\(\w+\))?)?(?:/Shared)?"
)
_LIKE_TRANSPORT = re.compile(r"[A-Z0-9]{2,}/[\w()/-]+")  # a newer release's word
_COLLNET = re.compile(r"Coll(?:Net)? (\d+)(?:/\d+)? : (\d+) \[(?:send|receive)\] via (COLLNET/[^/]+/\d+\S*)")
_RING = re.compile(r"Channel (\d+)(?:/(\d+))? :((?: +\d+)+)(\.\.\.|\.\.|\.)? *")
_NEIGHBOURS = re.compile(r"(?:Ring|Tree) \d+ : -?\d+ -> -?\d+ -> -?\d+(?:/-?\d+/-?\d+)?")  # said by rings and trees
_TREE = re.compile(
    r" \[(\d+)\] (?:-?\d+/-?\d+/-?\d+->(-?\d+)->(-?\d+)(?:\|-?\d+->-?\d+->-?\d+/-?\d+/-?\d+)?"
    r"|(-?\d+)->(-?\d+)->-?\d+/-?\d+/-?\d+)"  # 2.4: parent, rank, children
)
_SUMMARY = re.compile(
    r"(\d+) coll channels,(?: (\d+) collnet channels,)?(?: (\d+) nvls channels,)?"
    r" (\d+) p2p channels, (\d+) p2p channels per peer"
)
_MEMBERSHIP = re.compile(
    r"(?:\[Rank \d+\] )?(?:\w+ )?comm (\S+) rank (\d+) nranks (\d+)(?: cudaDev \d+)?(?: nvmlDev (\d+))?"
    r"(?: busId ([0-9a-f]+))?(?: parent (\S+)(?: (?:split|child)Count (\d+))? color (-?\d+) key -?\d+)?"
    r"(?: commId (0x[0-9a-f]+))? ?- Init (START|COMPLETE)"
)
_SETTING = re.compile(
    r"(NCCL_[A-Z0-9_]+) set by environment to ([^\[\]]+)|(NCCL_(?:IB_HCA|SOCKET_IFNAME)) set to ([^\[\]]+)"
)
_TUNING = re.compile(
    r"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}| time (\d+\.\d+))"
)
_MULTICAST = re.compile(r"NVLS multicast support is (not )?available on dev \d+.*")
_ERROR = re.compile(r"\S+\.(?:cc|cu|h):\d+ (?:\(\w+\) )?-> \d+\b.*")
_SGR = re.compile(r"\x1b\[[0-9;]*m")


def transport_word(text: str) -> str:
    """One word per transport: `direct shared memory` (to 2.12) is `SHM/direct`, and the way of an indirect pair goes.

    `SHM/direct/direct` (2.13 to 2.29: send and receive side) stays as written: it names two sides, not one.
    """
    if text == "direct shared memory":
        return "SHM/direct"
    return re.sub(r"^P2P/indirect/\d+\[\w+\]", "P2P/indirect", text)


def read_events(text: str, number: int = 0) -> LogEvents:
    """Every event of one text; `number` tells texts apart in `Process`. Raises nothing."""
    lines = LogEvents()
    rows = text.split("\n")
    last = rows.pop()
    if "NCCL" in last:  # without its newline the last line may have lost its end, and a number its last digits
        lines.truncated = True
    waiting = 0  # heads of torn lines whose tail has not come
    left = 0
    for index, raw in enumerate(rows):
        if "\0" in raw:
            lines.damaged += raw.strip("\0\r ") != ""
            continue
        row = _SGR.sub("", raw) if "\x1b" in raw else raw
        row = row.rstrip("\r")
        marks = row.count("NCCL INFO ") + row.count("NCCL WARN ")
        if marks == 0:
            if row.strip():
                waiting = max(0, waiting - 1)
            found = _VERSION_ROW.match(row)
            if found:
                lines.nccl += 1
                nobody = LogProcess(number, "", -1)
                lines.events.append(Statement(nobody, "version", found[1]))
                lines.events.append(Statement(nobody, "cuda", found[2]))
            continue
        lines.nccl += 1
        if marks > 1:
            lines.torn += 1
            waiting = min(waiting + marks - 1, _TORN_WINDOW)
            left = _TORN_WINDOW
            continue
        if waiting:
            lines.torn += 1
            left -= 1
            waiting = waiting if left else 0
            continue
        warning = "NCCL WARN " in row
        head, _, body = row.partition("NCCL WARN " if warning else "NCCL INFO ")
        # the first line of a text may have lost the front of its prefix (tail -c): its writer is not known
        prefix = _PREFIX.search(head[-300:]) if index else None
        process = LogProcess(number, prefix[1], int(prefix[2])) if prefix else LogProcess(number, "", -1)
        if prefix:
            lines.processes.add(process)
        if warning:
            lines.events.append(Statement(process, "warning", body.strip()))
            continue
        try:
            _read(body, process, lines)
        except ValueError:  # thousands of digits, which Python refuses to read as a number
            lines.unparsed.append(body)
    return lines


def _read(body: str, process: LogProcess, lines: LogEvents) -> None:
    """One message of level INFO; a message of no interest is passed over."""
    add = lines.events.append
    if body.startswith(("Channel ", "Ring ", "Coll", "Tree")):
        event = _wire(body, process)
        if event is not None:
            add(event)
        elif not (_NEIGHBOURS.fullmatch(body) or body.startswith(("Trees disabled", "Collective"))):
            lines.unparsed.append(body)
    elif " set " in body and body.startswith("NCCL_"):
        found = _SETTING.fullmatch(body.rstrip())
        if found:
            name, value = (found[1], found[2]) if found[1] else (found[3], found[4])
            # integers are announced with a full stop, which is not theirs
            add(Setting(process, name, value[:-1] if re.fullmatch(r"-?\d+\.", value) else value))
        elif "set by environment" in body:
            lines.unparsed.append(body)
    elif " - Init " in body or "- Init START" in body:
        found = _MEMBERSHIP.fullmatch(body.rstrip())
        if found:
            split = (found[6], found[7], found[8]) if found[6] else None
            nvml = int(found[4]) if found[4] else None
            rank, nranks, done = int(found[2]), int(found[3]), found[10] == "COMPLETE"
            add(Membership(process, found[1], rank, nranks, nvml, found[5], found[9], split, done))
        else:
            lines.unparsed.append(body)
    elif " coll channels" in body:
        found = _SUMMARY.fullmatch(body.rstrip())
        if found:
            names = ("collective", "collnet", "nvls", "p2p", "p2p_per_peer")
            add(
                ChannelCounts(process, {n: int(v) for n, v in zip(names, found.groups(), strict=True) if v is not None})
            )
        else:
            lines.unparsed.append(body)
    elif " Bytes -> Algo " in body:
        found = _TUNING.fullmatch(body.rstrip())
        if found:
            channels = int(found[6]) - int(found[5]) + 1 if found[5] else None
            predicted = float(found[7]) if found[7] else None
            add(Tuning(process, found[1], int(found[2]), found[3], found[4], channels, predicted))
        else:
            lines.unparsed.append(body)
    elif body.startswith("NCCL version "):
        found = _VERSION.match(body)
        if found:
            add(Statement(process, "version", found[1]))
            if found[2]:
                add(Statement(process, "cuda", found[2]))
    elif body.startswith("Using network "):
        add(Statement(process, "network", body.removeprefix("Using network ").strip()))
    elif body.startswith("NVLS multicast support is "):
        found = _MULTICAST.fullmatch(body)
        if found:
            add(Statement(process, "multicast", "no" if found[1] else "yes"))
    elif body.startswith("Comm config "):
        add(Statement(process, "env", body.strip()))  # of the ENV subsystem: shows that it was logged
    elif "-> " in body and _ERROR.fullmatch(body):
        add(Statement(process, "error", body.strip()))


def _wire(body: str, process: LogProcess) -> Connection | CollNet | RingLine | Trees | None:
    """A line about connections, rings or trees; None when it matches no whole grammar."""
    body = body.rstrip()
    found = _CONNECTION.fullmatch(body)
    if found:
        known = _TRANSPORT.fullmatch(found[7]) is not None
        if not known and not _LIKE_TRANSPORT.fullmatch(found[7]):
            return None
        word = transport_word(found[7])
        channel, source, target = int(found[1]), int(found[2]), int(found[4])
        return Connection(process, channel, source, target, found[3], found[5], word, found[6], known)
    found = _RING.fullmatch(body)
    if found:
        ranks = tuple(int(rank) for rank in found[3].split())
        count = int(found[2]) if found[2] else None
        return RingLine(process, int(found[1]), count, ranks, bool(found[4]))
    if body.startswith("Trees"):
        rest = body.removeprefix("Trees")
        if len(body) >= _TREES_FULL:
            rest = rest[: rest.rindex(" [")] if " [" in rest else ""
        trees = list(_TREE.finditer(rest))
        ranks_named = {int(tree[2] or tree[5]) for tree in trees}
        if len(ranks_named) == 1 and sum(len(tree[0]) for tree in trees) == len(rest):
            return Trees(process, ranks_named.pop(), {int(tree[1]): int(tree[3] or tree[4]) for tree in trees})
        return None
    found = _COLLNET.fullmatch(body)
    return CollNet(process, int(found[1]), int(found[2]), found[3]) if found else None
