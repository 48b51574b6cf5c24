"""The grammar of NCCL's messages of level INFO, releases 2.4 to 2.30: typed events of a message.

Checked against the format strings of NCCL's release tags. A message counts only when it matches its
whole grammar, so a cut or torn one is never half read.
"""

import re
from typing import NamedTuple

# Kinds of channels, in the order shown.
CHANNELS = ("collective", "p2p", "nvls", "collnet", "p2p_per_peer")


class LogProcess(NamedTuple):
    """The process that wrote a line; a line without prefix has host "" and pid -1."""

    text: int  # number of the text
    host: str  # of the prefix `host:pid:`
    pid: int


class Connection(NamedTuple):
    """`Channel 00/0 : 0[0] -> 1[3] via P2P/CUMEM`: ranks of a communicator, brackets as written."""

    process: LogProcess
    source: int
    target: int
    brackets: tuple[str | None, str | None]
    transport: str
    end: str | None  # "send" or "receive" for NET, which both ends announce
    is_known: bool  # the transport is one of the words of 2.4 to 2.30

    @property
    def ends(self) -> list[tuple[int, str | None]]:
        """Return both ends of `0[1a] -> 1[1b]` as (rank, bracket)."""
        return [(self.source, self.brackets[0]), (self.target, self.brackets[1])]


class RingLine(NamedTuple):
    """`Channel 00/04 : 0 1 2 3`."""

    process: LogProcess
    channel: int
    channels: int | None  # the number after the slash: collective channels
    ranks: tuple[int, ...]
    cut: bool  # the line ends with dots, so ranks are missing


class ChannelCounts(NamedTuple):
    """`24 coll channels, …`: counts by the names of `CHANNELS`; what the line lacks is absent."""

    process: LogProcess
    counts: dict[str, int]


class Membership(NamedTuple):
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


class Setting(NamedTuple):
    """`NCCL_X set by environment to Y`."""

    process: LogProcess
    name: str
    value: str


class NetworkDevice(NamedTuple):
    """`NET/IB : Using [0]mlx5_0:1/IB …`, `NET/Socket : Using [0]eth0:…`: what `via NET/IB/0` means.

    A device made of several has their names joined by `+`.
    """

    process: LogProcess
    network: str  # IB, Socket
    device: int
    name: str


class Nodes(NamedTuple):
    """`comm 0x… rank 0 nRanks 8 nNodes 2 …`: on how many hosts NCCL sees a communicator's ranks."""

    process: LogProcess
    nranks: int
    nodes: int


class Tuning(NamedTuple):
    """`AllReduce: 644 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}`; `channels`: how many.

    From 2.27 on also `AllGather [Symmetric]: 16 Bytes -> Kernel AllGather_ST nchannels 8 …`, from
    2.29 on `[Copy Engine]` and `[Hierarchical CE]`: the word is the algorithm.
    """

    process: LogProcess
    function: str | None
    size: int
    algorithm: str
    protocol: str
    channels: int | None


class Statement(NamedTuple):
    """A line that states a value.

    Kinds: version, cuda, network, multicast, no_peer_access, path, warning, error.
    """

    process: LogProcess
    kind: str
    value: str


OwnedLine = Connection | RingLine | ChannelCounts  # of one communicator
Event = OwnedLine | Membership | Setting | NetworkDevice | Nodes | Tuning | Statement
Events = list[Event] | None  # None: a message of a known kind in an unknown form


NEWEST = (2, 30)  # the newest release whose format strings were read

_VERSION = re.compile(r"NCCL version (\d{1,4}(?:\.\d{1,4})+)[^+ ]*(?:\+cuda(\d+\.\d+))?")
_END = r"(\d+)(?:\[([0-9a-f]+)\])?"
_CONNECTION = re.compile(
    rf"(?:Channel|Ring) \d{{1,6}}(?:/\d+)? : {_END} -> {_END} (?:\[(send|receive)\] )?via (\S.*)"
)
_TRANSPORT = re.compile(
    r"P2P/(?:IPC|CUMEM|MNNVL|direct pointer|common device|indirect/\d+\[[0-9a-f]+\])"
    r"(?:/read)?(?:/CE)?"
    r"|direct shared memory|SHM/(?:direct|CE)(?:/(?:direct|CE))?"
    r"|NET/[^/]+/\d+(?:\(\d+\))?(?:/GDRDMA(?:\(\w+\))?)?(?:/Shared)?"
)
_LIKE_TRANSPORT = re.compile(r"[A-Z0-9]{2,}/[\w()/-]+")  # a newer release's word
_RING = re.compile(r"Channel (\d+)(?:/(\d+))? :((?: +\d+)+)(\.\.\.|\.\.|\.)? *")
_SUMMARY = re.compile(
    r"(?P<collective>\d+) coll channels,(?: (?P<collnet>\d+) collnet channels,)?"
    r"(?: (?P<nvls>\d+) nvls channels,)?"
    r" (?P<p2p>\d+) p2p channels, (?P<p2p_per_peer>\d+) p2p channels per peer"
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
    r"(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}| time \d+\.\d+)(?: cgaClusterSize \d+)?"
)
_OTHER_TUNING = re.compile(
    r"(\w+) \[(Symmetric|Copy Engine|Hierarchical CE)\]: (\d+) Bytes -> (?:Kernel )?"
    r"(\w+|RMA proxy \+ CE)(?: nchannels (\d+) nthreads \d+(?: nWorks \d+)?|; CE sync.* NVLS)?"
)
_PATH = re.compile(
    r"Connected all rings, use ring PXN \d GDR \d"
    r"|rank \d+ (?:Connected CollNet|(?:.* )?(?:register|reuse|registered) .*)"
    r"|(?P<asked>register comm|Skipping registration) .*"  # by torch; a transport does it later
)
_MULTICAST = re.compile(r"NVLS multicast support is (not )?available on dev \d+.*")
_NETWORK = re.compile(r"NET/(\w+) : Using((?: \[\d+\](?:=\{[^}]*\}|\S+))+).*")
_DEVICE = re.compile(r"\[(\d+)\](?:=\{([^}]*)\}|([^:\s]+):\S+)")
_JOINED = re.compile(r"NET/(\w+) : Made virtual device \[(\d+)\] name=(\S+) .*")
_NODES = re.compile(r"comm \S+ rank \d+ nRanks (\d+) nNodes (\d+) .*")
_NO_PEER_ACCESS = re.compile(
    r"P2P is disabled between|Could not enable P2P between|peer query failed between"
    r"|Legacy IPC not supported"
)
_ERROR = re.compile(r"\S+\.(?:cc|cu|h):\d+ (?:\(\w+\) )?-> \d+\b.*")


def read_message(body: str, process: LogProcess) -> Events:
    """Return the events of one message: none if it is of no interest, None if it is of a known kind
    in an unknown form. Raises ValueError: a number of thousands of digits.
    """
    body = body.rstrip()
    for is_kind, read in _KINDS:
        if is_kind.match(body):
            return read(body, process)
    return []


def _channel(body: str, process: LogProcess) -> Events:
    connection, ring = _CONNECTION.fullmatch(body), _RING.fullmatch(body)
    if connection:
        source, source_bracket, target, target_bracket, end, transport = connection.groups()
        is_known = _TRANSPORT.fullmatch(transport) is not None
        if not is_known and not _LIKE_TRANSPORT.fullmatch(transport):
            return None
        if transport == "direct shared memory":
            transport = "SHM/direct"  # the word of 2.13 and later
        # Without the number of its GPU.
        transport = re.sub(r"^P2P/indirect/\d+\[\w+\]", "P2P/indirect", transport)
        brackets = (source_bracket, target_bracket)
        return [Connection(process, int(source), int(target), brackets, transport, end, is_known)]
    if ring:
        count = int(ring[2]) if ring[2] else None
        ranks = tuple(map(int, ring[3].split()))
        return [RingLine(process, int(ring[1]), count, ranks, bool(ring[4]))]
    if re.fullmatch(r"Ring \d+ : -?\d+ -> -?\d+ -> -?\d+", body):  # said by the ring too
        return []
    return None


def _setting(body: str, process: LogProcess) -> Events:
    match = _SETTING.fullmatch(body)
    if match is None:
        return None if "set by environment" in body else []
    name, value = match[1] or match[3], match[2] or match[4]
    if re.fullmatch(r"-?\d+\.", value):  # NCCL ends an integer with a full stop
        value = value[:-1]
    return [Setting(process, name, value)]


def _membership(body: str, process: LogProcess) -> Events:
    match = _MEMBERSHIP.fullmatch(body)
    if match is None:
        return None
    pointer, rank, nranks, nvml, bus_id, parent, count, colour, comm_id, state = match.groups()
    split = index = None
    if parent:
        split = (parent, count, colour)
    if nvml:
        index = int(nvml)
    is_complete = state == "COMPLETE"
    return [
        Membership(
            process, pointer, int(rank), int(nranks), index, bus_id, comm_id, split, is_complete
        )
    ]


def _channel_counts(body: str, process: LogProcess) -> Events:
    match = _SUMMARY.fullmatch(body)
    if match is None:
        return None
    counts = {}
    for name, count in match.groupdict().items():
        if count is not None:
            counts[name] = int(count)
    return [ChannelCounts(process, counts)]


def _tuning(body: str, process: LogProcess) -> Events:
    match, other = _TUNING.fullmatch(body), _OTHER_TUNING.fullmatch(body)
    if other:
        function, word, size, way, channels = other.groups()
        count = int(channels) if channels else None
        return [Tuning(process, function, int(size), word, way, count)]
    if match is None:
        return None
    function, size, algorithm, protocol, low, high = match.groups()
    count = int(high) - int(low) + 1 if low else None
    return [Tuning(process, function, int(size), algorithm, protocol, count)]


def _network_devices(body: str, process: LogProcess) -> Events:
    joined, match = _JOINED.fullmatch(body), _NETWORK.fullmatch(body)
    if joined:
        return [NetworkDevice(process, joined[1], int(joined[2]), joined[3])]
    events: list[Event] = []
    if match:
        for index, several, name in _DEVICE.findall(match[2]):
            if not name:
                name = "+".join(re.findall(r"\] ?([^:\s]+):", several))
            events.append(NetworkDevice(process, match[1], int(index), name))
    return events


def _statement(body: str, process: LogProcess) -> Events:
    version, nodes = _VERSION.match(body), _NODES.fullmatch(body)
    multicast, path = _MULTICAST.fullmatch(body), _PATH.fullmatch(body)
    events: list[Event] = []
    if version:
        events.append(Statement(process, "version", version[1]))
        if version[2]:
            events.append(Statement(process, "cuda", version[2]))
    elif nodes:
        events.append(Nodes(process, int(nodes[1]), int(nodes[2])))
    elif multicast:
        events.append(Statement(process, "multicast", "no" if multicast[1] else "yes"))
    elif body.startswith("Using network "):
        events.append(Statement(process, "network", body.removeprefix("Using network ").strip()))
    elif _NO_PEER_ACCESS.match(body):
        events.append(Statement(process, "no_peer_access", body.partition(". ")[0].strip()))
    elif path:
        events.append(Statement(process, "path", path["asked"] or body))
    elif _ERROR.fullmatch(body):
        events.append(Statement(process, "error", body.strip()))
    return events


# What tells a kind of message, and its reader; the first kind that fits is taken.
_KINDS = (
    (re.compile("Channel |Ring "), _channel),
    (re.compile("NCCL_.* set "), _setting),
    (re.compile(".*- Init "), _membership),
    (re.compile(".* coll channels"), _channel_counts),
    (re.compile(r".* Bytes -> (?:Algo|Kernel|cudaMemcpy|RMA)"), _tuning),
    (re.compile("NET/"), _network_devices),
    (re.compile(""), _statement),
)
