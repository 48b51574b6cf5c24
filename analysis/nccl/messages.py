"""The grammar of NCCL's messages of level INFO, releases 2.4 to 2.30: typed events of a message.

Checked against the format strings of NCCL's release tags. A message counts only when it matches its
whole grammar, so a cut or torn one is never half read.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

CHANNELS = (
    "collective",
    "p2p",
    "nvls",
    "collnet",
    "p2p_per_peer",
)  # kinds of channels, in the order shown


class LogProcess(NamedTuple):
    """The process that wrote a line: the number of the text and the prefix `host:pid:`.

    A line without prefix has host "" and pid -1.
    """

    text: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Connection:
    """`Channel 00/0 : 0[0] -> 1[3] via P2P/CUMEM`: ranks of a communicator, brackets as written."""

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
    """`Channel 00/04 : 0 1 2 3`: `count` is the number after the slash (collective channels).

    `cut`: the line ends with dots, so ranks are missing.
    """

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
    """`24 coll channels, …`: counts by the names of `CHANNELS`; what the line lacks is absent."""

    process: LogProcess
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Membership:
    """`… comm 0x… rank 0 nranks 2 … Init START|COMPLETE`.

    `pointer` names the communicator inside one process only. `comm_id` or `split` name it across
    processes.
    """

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
class NetworkDevice:
    """`NET/IB : Using [0]mlx5_0:1/IB …`, `NET/Socket : Using [0]eth0:…`: what `via NET/IB/0` means.

    A device made of several has their names joined by `+`.
    """

    process: LogProcess
    network: str  # IB, Socket
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Nodes:
    """`comm 0x… rank 0 nRanks 8 nNodes 2 …`: on how many hosts NCCL sees a communicator's ranks."""

    process: LogProcess
    nranks: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """`AllReduce: 644 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}`; `channels`: how many."""

    process: LogProcess
    function: str | None
    size: int
    algorithm: str
    protocol: str
    channels: int | None


@dataclass(frozen=True, slots=True)
class Statement:
    """A line that states a value; kinds: version, cuda, network, multicast, env, warning, error."""

    process: LogProcess
    kind: str
    value: str


Event = (
    Connection
    | CollNet
    | RingLine
    | Trees
    | ChannelCounts
    | Membership
    | Setting
    | NetworkDevice
    | Nodes
    | Tuning
    | Statement
)
Events = list[Event] | None  # None: a message of a known kind in an unknown form


# --- the grammar ----------------------------------------------------------------------------------

NEWEST = (2, 30)  # the newest release whose format strings were read

# NCCL formats a tree line into a buffer of 1,024 bytes: a line near that length may end inside a
# number.
_TREES_FULL = 1000

_VERSION = re.compile(r"NCCL version (\d{1,4}(?:\.\d{1,4})+)[^+ ]*(?:\+cuda(\d+\.\d+))?")
_END = r"(\d+)(?:\[([0-9a-f]+)\])?"
_CONNECTION = re.compile(
    rf"(?:Channel|Ring) (\d+)(?:/\d+)? : {_END} -> {_END} (?:\[(send|receive)\] )?via (\S.*)"
)
_TRANSPORT = re.compile(
    r"P2P/(?:IPC|CUMEM|MNNVL|direct pointer|common device|indirect/\d+\[[0-9a-f]+\])"
    r"(?:/read)?(?:/CE)?"
    r"|direct shared memory|SHM/(?:direct|CE)(?:/(?:direct|CE))?"
    r"|NET/[^/]+/\d+(?:\(\d+\))?(?:/GDRDMA(?:\(\w+\))?)?(?:/Shared)?"
)
_LIKE_TRANSPORT = re.compile(r"[A-Z0-9]{2,}/[\w()/-]+")  # a newer release's word
_COLLNET = re.compile(
    r"Coll(?:Net)? (\d+)(?:/\d+)? : (\d+) \[(?:send|receive)\] via (COLLNET/[^/]+/\d+\S*)"
)
_RING = re.compile(r"Channel (\d+)(?:/(\d+))? :((?: +\d+)+)(\.\.\.|\.\.|\.)? *")
_NEIGHBOURS = re.compile(
    r"(?:Ring|Tree) \d+ : -?\d+ -> -?\d+ -> -?\d+(?:/-?\d+/-?\d+)?"
)  # said by rings and trees
_TREE = re.compile(
    r" \[(\d+)\] (?:-?\d+/-?\d+/-?\d+->(-?\d+)->(-?\d+)(?:\|-?\d+->-?\d+->-?\d+/-?\d+/-?\d+)?"
    r"|(-?\d+)->(-?\d+)->-?\d+/-?\d+/-?\d+)"  # 2.4: parent, rank, children
)
_SUMMARY = re.compile(
    r"(\d+) coll channels,(?: (\d+) collnet channels,)?(?: (\d+) nvls channels,)?"
    r" (\d+) p2p channels, (\d+) p2p channels per peer"
)
_MEMBERSHIP = re.compile(
    r"(?:\[Rank \d+\] )?(?:\w+ )?comm (\S+) rank (\d+) nranks (\d+)(?: cudaDev \d+)?"
    r"(?: nvmlDev (\d+))?(?: busId ([0-9a-f]+))?"
    r"(?: parent (\S+)(?: (?:split|child)Count (\d+))? color (-?\d+) key -?\d+)?"
    r"(?: commId (0x[0-9a-f]+))? ?- Init (START|COMPLETE)"
)
_SETTING = re.compile(
    r"(NCCL_[A-Z0-9_]+) set by environment to ([^\[\]]+)|"
    r"(NCCL_(?:IB_HCA|SOCKET_IFNAME)) set to ([^\[\]]+)"
)
_TUNING = re.compile(
    r"(?:(\w+): )?(\d+) Bytes -> Algo (\w+) proto (\w+)"
    r"(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}| time \d+\.\d+)"
)
_MULTICAST = re.compile(r"NVLS multicast support is (not )?available on dev \d+.*")
_NETWORK = re.compile(r"NET/(\w+) : Using((?: \[\d+\](?:=\{[^}]*\}|\S+))+).*")
_DEVICE = re.compile(r"\[(\d+)\](?:=\{([^}]*)\}|([^:\s]+):\S+)")
_JOINED = re.compile(r"NET/(\w+) : Made virtual device \[(\d+)\] name=(\S+) .*")
_NODES = re.compile(r"comm \S+ rank \d+ nRanks (\d+) nNodes (\d+) .*")
_ERROR = re.compile(r"\S+\.(?:cc|cu|h):\d+ (?:\(\w+\) )?-> \d+\b.*")


def read_message(body: str, process: LogProcess) -> Events:
    """Return the events of one message: none if it is of no interest, None if it cannot be read.

    None stands for a known kind of message in an unknown form.

    Raises:
        ValueError: a number of thousands of digits, which Python refuses to read.
    """
    for is_kind, read in _KINDS:
        if is_kind(body):
            return read(body, process)
    return []


def _channel(body: str, process: LogProcess) -> Events:
    """Read a line about connections, rings or trees."""
    stripped = body.rstrip()
    for read in (_connection, _ring, _trees, _collnet):
        event = read(stripped, process)
        if event is not None:
            return [event]
    if _NEIGHBOURS.fullmatch(body) or body.startswith(("Trees disabled", "Collective")):
        return []
    return None


def _connection(body: str, process: LogProcess) -> Event | None:
    match = _CONNECTION.fullmatch(body)
    if match is None:
        return None
    channel, source, source_bracket, target, target_bracket, end, transport = match.groups()
    is_known = _TRANSPORT.fullmatch(transport) is not None
    if not is_known and not _LIKE_TRANSPORT.fullmatch(transport):
        return None
    if transport == "direct shared memory":
        transport = "SHM/direct"  # the word of 2.13 and later
    transport = re.sub(r"^P2P/indirect/\d+\[\w+\]", "P2P/indirect", transport)  # without its GPU
    return Connection(
        process,
        int(channel),
        int(source),
        int(target),
        source_bracket,
        target_bracket,
        transport,
        end,
        is_known,
    )


def _ring(body: str, process: LogProcess) -> Event | None:
    match = _RING.fullmatch(body)
    if match is None:
        return None
    ranks = tuple(int(rank) for rank in match[3].split())
    count = int(match[2]) if match[2] else None
    return RingLine(process, int(match[1]), count, ranks, bool(match[4]))


def _trees(body: str, process: LogProcess) -> Event | None:
    if not body.startswith("Trees"):
        return None
    text = body.removeprefix("Trees")
    if len(body) >= _TREES_FULL:  # the last tree may be cut
        text = text.rpartition(" [")[0]
    parents = {}
    ranks = set()
    matched = 0
    for tree in _TREE.finditer(text):
        ranks.add(int(tree[2] or tree[5]))
        parents[int(tree[1])] = int(tree[3] or tree[4])
        matched += len(tree[0])
    if len(ranks) != 1 or matched != len(text):
        return None
    return Trees(process, ranks.pop(), parents)


def _collnet(body: str, process: LogProcess) -> Event | None:
    match = _COLLNET.fullmatch(body)
    return CollNet(process, int(match[1]), int(match[2]), match[3]) if match else None


def _setting(body: str, process: LogProcess) -> Events:
    match = _SETTING.fullmatch(body.rstrip())
    if match is None:
        return None if "set by environment" in body else []
    name, value = match[1] or match[3], match[2] or match[4]
    if re.fullmatch(r"-?\d+\.", value):  # NCCL ends an integer with a full stop
        value = value[:-1]
    return [Setting(process, name, value)]


def _membership(body: str, process: LogProcess) -> Events:
    match = _MEMBERSHIP.fullmatch(body.rstrip())
    if match is None:
        return None
    pointer, rank, nranks, nvml, bus_id, parent, count, colour, comm_id, state = match.groups()
    return [
        Membership(
            process,
            pointer,
            int(rank),
            int(nranks),
            int(nvml) if nvml else None,
            bus_id,
            comm_id,
            (parent, count, colour) if parent else None,
            state == "COMPLETE",
        )
    ]


def _channel_counts(body: str, process: LogProcess) -> Events:
    match = _SUMMARY.fullmatch(body.rstrip())
    if match is None:
        return None
    names = ("collective", "collnet", "nvls", "p2p", "p2p_per_peer")
    counts = {}
    for name, count in zip(names, match.groups(), strict=True):
        if count is not None:
            counts[name] = int(count)
    return [ChannelCounts(process, counts)]


def _tuning(body: str, process: LogProcess) -> Events:
    match = _TUNING.fullmatch(body.rstrip())
    if match is None:
        return None
    function, size, algorithm, protocol, low, high = match.groups()
    channels = int(high) - int(low) + 1 if low else None
    return [Tuning(process, function, int(size), algorithm, protocol, channels)]


def _version(body: str, process: LogProcess) -> Events:
    match = _VERSION.match(body)
    if match is None:
        return []
    events: list[Event] = [Statement(process, "version", match[1])]
    if match[2]:
        events.append(Statement(process, "cuda", match[2]))
    return events


def _network(body: str, process: LogProcess) -> Events:
    return [Statement(process, "network", body.removeprefix("Using network ").strip())]


def _network_devices(body: str, process: LogProcess) -> Events:
    joined = _JOINED.fullmatch(body)
    if joined:
        return [NetworkDevice(process, joined[1], int(joined[2]), joined[3])]
    match = _NETWORK.fullmatch(body)
    if match is None:
        return []
    events: list[Event] = []
    for index, several, name in _DEVICE.findall(match[2]):
        if not name:
            name = "+".join(re.findall(r"\] ?([^:\s]+):", several))
        events.append(NetworkDevice(process, match[1], int(index), name))
    return events


def _nodes(body: str, process: LogProcess) -> Events:
    match = _NODES.fullmatch(body)
    return [Nodes(process, int(match[1]), int(match[2]))] if match else []


def _multicast(body: str, process: LogProcess) -> Events:
    match = _MULTICAST.fullmatch(body)
    return [Statement(process, "multicast", "no" if match[1] else "yes")] if match else []


def _env(body: str, process: LogProcess) -> Events:
    return [Statement(process, "env", body.strip())]  # a line of the ENV subsystem: it was logged


def _error(body: str, process: LogProcess) -> Events:
    return [Statement(process, "error", body.strip())] if _ERROR.fullmatch(body) else []


def _starts(*words: str) -> Callable[[str], bool]:
    return lambda body: body.startswith(words)


def _holds(word: str) -> Callable[[str], bool]:
    return lambda body: word in body


# What tells a kind of message, and its reader; the first kind that fits is taken.
_KINDS: tuple[tuple[Callable[[str], bool], Callable[[str, LogProcess], Events]], ...] = (
    (_starts("Channel ", "Ring ", "Coll", "Tree"), _channel),
    (lambda body: body.startswith("NCCL_") and " set " in body, _setting),
    (lambda body: " - Init " in body or "- Init START" in body, _membership),
    (_holds(" coll channels"), _channel_counts),
    (_holds(" Bytes -> Algo "), _tuning),
    (_starts("NCCL version "), _version),
    (_starts("Using network "), _network),
    (_starts("NET/"), _network_devices),
    (_holds(" nNodes "), _nodes),
    (_starts("NVLS multicast support is "), _multicast),
    (_starts("Comm config "), _env),
    (_holds("-> "), _error),
)
