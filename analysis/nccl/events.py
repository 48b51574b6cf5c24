"""The typed events that the lines of an NCCL log become."""

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
    """`Channel 00/0 : 0[0] -> 1[3] via P2P/CUMEM`: ranks of the communicator, brackets as written."""

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
    """`24 coll channels, …`: counts by the names of `CHANNELS`; a count that the line lacks is absent."""

    process: LogProcess
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Membership:
    """`… comm 0x… rank 0 nranks 2 … Init START|COMPLETE`.

    `pointer` names the communicator inside one process only. `comm_id` or `split` name it across processes.
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
    """`NET/IB : Using [0]mlx5_0:1/IB …`, `NET/Socket : Using [0]eth0:10.0.0.1<0>`: the device behind `via NET/IB/0`.

    A device made of several has their names joined by `+`.
    """

    process: LogProcess
    network: str  # IB, Socket
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Nodes:
    """`comm 0x… rank 0 nRanks 8 nNodes 2 …`: on how many hosts NCCL sees the ranks of a communicator."""

    process: LogProcess
    nranks: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """`AllReduce: 644 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}`; `channels` is their number."""

    process: LogProcess
    function: str | None
    size: int
    algorithm: str
    protocol: str
    channels: int | None
    predicted_us: float | None


@dataclass(frozen=True, slots=True)
class Statement:
    """A line that states one value: `kind` is version, cuda, network, multicast, env, warning or error."""

    process: LogProcess
    kind: str
    value: str


Described = Setting | NetworkDevice | Nodes | Tuning | Statement
Event = Connection | CollNet | RingLine | Trees | ChannelCounts | Membership | Described
