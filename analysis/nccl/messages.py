"""The grammar of NCCL's messages of level INFO, releases 2.4 to 2.30: one message becomes typed events.

Checked against the format strings of NCCL's release tags. A message counts only when it matches its whole grammar, so
a cut or torn one is never half read.
"""

import re
from collections.abc import Callable

from analysis.nccl.events import (
    ChannelCounts,
    CollNet,
    Connection,
    Event,
    LogProcess,
    Membership,
    NetworkDevice,
    Nodes,
    RingLine,
    Setting,
    Statement,
    Trees,
    Tuning,
)

NEWEST = (2, 30)  # the newest release whose format strings were read

# NCCL formats a tree line into a buffer of 1,024 bytes: a line near that length may end inside a number.
_TREES_FULL = 1000

_VERSION = re.compile(r"NCCL version (\d{1,4}(?:\.\d{1,4})+)[^+ ]*(?:\+cuda(\d+\.\d+))?")
_END = r"(\d+)(?:\[([0-9a-f]+)\])?"
_CONNECTION = re.compile(
    rf"(?:Channel|Ring) (\d+)(?:/\d+)? : {_END} -> {_END} (?:\[(send|receive)\] )?via (\S.*)"
)
_TRANSPORT = re.compile(
    r"P2P/(?:IPC|CUMEM|MNNVL|direct pointer|common device|indirect/\d+\[[0-9a-f]+\])(?:/read)?(?:/CE)?"
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
_NETWORK = re.compile(r"NET/(\w+) : Using((?: \[\d+\](?:=\{[^}]*\}|\S+))+).*")
_DEVICE = re.compile(r"\[(\d+)\](?:=\{([^}]*)\}|([^:\s]+):\S+)")
_JOINED = re.compile(r"NET/(\w+) : Made virtual device \[(\d+)\] name=(\S+) .*")
_NODES = re.compile(r"comm \S+ rank \d+ nRanks (\d+) nNodes (\d+) .*")
_ERROR = re.compile(r"\S+\.(?:cc|cu|h):\d+ (?:\(\w+\) )?-> \d+\b.*")


Events = list[Event] | None  # None: a message of a known kind in an unknown form


def read_message(body: str, process: LogProcess) -> Events:
    """Read one message: its events, none for a message of no interest, None for a known kind in an unknown form.

    Raises ValueError for a number of thousands of digits, which Python refuses to read.
    """
    for is_kind, read in _KINDS:
        if is_kind(body):
            return read(body, process)
    return []


def transport_word(text: str) -> str:
    """Return one word per transport: `SHM/direct` for `direct shared memory` (to 2.12), `P2P/indirect` without its GPU.

    `SHM/direct/direct` (2.13 to 2.29: send and receive side) stays as written: it names two sides.
    """
    if text == "direct shared memory":
        return "SHM/direct"
    return re.sub(r"^P2P/indirect/\d+\[\w+\]", "P2P/indirect", text)


def _channel(body: str, process: LogProcess) -> Events:
    """Read a line about connections, rings or trees."""
    stripped = body.rstrip()
    readers: tuple[Callable[[str, LogProcess], Event | None], ...] = (
        _connection,
        _ring,
        _trees,
        _collnet,
    )
    for read in readers:
        event = read(stripped, process)
        if event is not None:
            return [event]
    repeated = _NEIGHBOURS.fullmatch(body) or body.startswith(("Trees disabled", "Collective"))
    return [] if repeated else None


def _connection(body: str, process: LogProcess) -> Connection | None:
    found = _CONNECTION.fullmatch(body)
    if found is None:
        return None
    known = _TRANSPORT.fullmatch(found[7]) is not None
    if not known and not _LIKE_TRANSPORT.fullmatch(found[7]):
        return None
    channel, source, target = int(found[1]), int(found[2]), int(found[4])
    word = transport_word(found[7])
    return Connection(process, channel, source, target, found[3], found[5], word, found[6], known)


def _ring(body: str, process: LogProcess) -> RingLine | None:
    found = _RING.fullmatch(body)
    if found is None:
        return None
    ranks = tuple(int(rank) for rank in found[3].split())
    count = int(found[2]) if found[2] else None
    return RingLine(process, int(found[1]), count, ranks, bool(found[4]))


def _trees(body: str, process: LogProcess) -> Trees | None:
    if not body.startswith("Trees"):
        return None
    rest = body.removeprefix("Trees")
    if len(body) >= _TREES_FULL:
        rest = rest[: rest.rindex(" [")] if " [" in rest else ""
    trees = list(_TREE.finditer(rest))
    ranks = {int(tree[2] or tree[5]) for tree in trees}
    if len(ranks) != 1 or sum(len(tree[0]) for tree in trees) != len(rest):
        return None
    return Trees(process, ranks.pop(), {int(tree[1]): int(tree[3] or tree[4]) for tree in trees})


def _collnet(body: str, process: LogProcess) -> CollNet | None:
    found = _COLLNET.fullmatch(body)
    return CollNet(process, int(found[1]), int(found[2]), found[3]) if found else None


def _setting(body: str, process: LogProcess) -> Events:
    found = _SETTING.fullmatch(body.rstrip())
    if found is None:
        return None if "set by environment" in body else []
    name, value = (found[1], found[2]) if found[1] else (found[3], found[4])
    # NCCL ends an integer with a full stop, which is not part of the value
    return [Setting(process, name, value[:-1] if re.fullmatch(r"-?\d+\.", value) else value)]


def _membership(body: str, process: LogProcess) -> Events:
    found = _MEMBERSHIP.fullmatch(body.rstrip())
    if found is None:
        return None
    split = (found[6], found[7], found[8]) if found[6] else None
    nvml = int(found[4]) if found[4] else None
    rank, nranks, complete = int(found[2]), int(found[3]), found[10] == "COMPLETE"
    return [Membership(process, found[1], rank, nranks, nvml, found[5], found[9], split, complete)]


def _channel_counts(body: str, process: LogProcess) -> Events:
    found = _SUMMARY.fullmatch(body.rstrip())
    if found is None:
        return None
    names = ("collective", "collnet", "nvls", "p2p", "p2p_per_peer")
    counts = zip(names, found.groups(), strict=True)
    return [
        ChannelCounts(process, {name: int(count) for name, count in counts if count is not None})
    ]


def _tuning(body: str, process: LogProcess) -> Events:
    found = _TUNING.fullmatch(body.rstrip())
    if found is None:
        return None
    channels = int(found[6]) - int(found[5]) + 1 if found[5] else None
    predicted = float(found[7]) if found[7] else None
    return [Tuning(process, found[1], int(found[2]), found[3], found[4], channels, predicted)]


def _version(body: str, process: LogProcess) -> Events:
    found = _VERSION.match(body)
    if found is None:
        return []
    cuda: list[Event] = [Statement(process, "cuda", found[2])] if found[2] else []
    return [Statement(process, "version", found[1]), *cuda]


def _network(body: str, process: LogProcess) -> Events:
    return [Statement(process, "network", body.removeprefix("Using network ").strip())]


def _network_devices(body: str, process: LogProcess) -> Events:
    if made := _JOINED.fullmatch(body):
        return [NetworkDevice(process, made[1], int(made[2]), made[3])]
    found = _NETWORK.fullmatch(body)
    if found is None:
        return []
    return [
        NetworkDevice(
            process, found[1], int(index), one or "+".join(re.findall(r"\] ?([^:\s]+):", joined))
        )
        for index, joined, one in _DEVICE.findall(found[2])
    ]


def _nodes(body: str, process: LogProcess) -> Events:
    found = _NODES.fullmatch(body)
    return [Nodes(process, int(found[1]), int(found[2]))] if found else []


def _multicast(body: str, process: LogProcess) -> Events:
    found = _MULTICAST.fullmatch(body)
    return [Statement(process, "multicast", "no" if found[1] else "yes")] if found else []


def _env(body: str, process: LogProcess) -> Events:
    return [Statement(process, "env", body.strip())]  # a line of the ENV subsystem: it was logged


def _error(body: str, process: LogProcess) -> Events:
    return [Statement(process, "error", body.strip())] if _ERROR.fullmatch(body) else []


def _starts(*words: str) -> Callable[[str], bool]:
    return lambda body: body.startswith(words)


def _holds(*words: str) -> Callable[[str], bool]:
    return lambda body: any(word in body for word in words)


# What tells a kind of message, and its reader; the first kind that fits is taken.
_KINDS: tuple[tuple[Callable[[str], bool], Callable[[str, LogProcess], Events]], ...] = (
    (_starts("Channel ", "Ring ", "Coll", "Tree"), _channel),
    (lambda body: body.startswith("NCCL_") and " set " in body, _setting),
    (_holds(" - Init ", "- Init START"), _membership),
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
