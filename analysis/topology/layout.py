"""Place the parts of a machine in its drawing: sockets, PCIe switches, GPUs, NICs and the NVSwitch.

Two sockets that NVLink joins stand one above the other, so that a hybrid cube mesh looks like a cube; all
other sockets stand in a row. Lengths are in units of about one GPU; x runs right and y up.
"""

from dataclasses import dataclass, field
from itertools import combinations, permutations
from math import cos, pi, sin

from analysis.topology.link_classes import is_known, nvlink_count, quality
from analysis.topology.model import Device, Pair, Topology

Point = tuple[float, float]
_FACES: dict[int, list[Point]] = {  # places of the GPUs of one socket, around its rim
    1: [(0, 0)],
    2: [(0, 0), (2.2, 0)],
    3: [(0, 0), (3.0, 0), (1.5, 1.3)],
    4: [(0, 0), (3.0, 0), (4.4, 1.3), (1.4, 1.3)],
}
_MOST_TRIED = 6  # GPUs of a socket whose every order is tried: 720
_LETTER = 0.078  # width of a letter of a socket's label, in units


@dataclass
class Socket:
    """GPUs that share a NUMA node or CPUs, and the NICs nearest to them."""

    label: str
    gpus: list[int]
    nics: list[str] = field(default_factory=list)


@dataclass
class DrawingLayout:
    """Centres of everything, in units of about one GPU."""

    places: dict[Device, Point] = field(default_factory=dict)
    switches: list[tuple[Point, tuple[Device, ...], str]] = field(default_factory=list)
    boxes: list[tuple[Point, Point, str, bool]] = field(
        default_factory=list
    )  # corners, label, label at the top
    nvswitch: tuple[float, float, float] | None = None  # left, right, y
    arcs: dict[Pair, float] = field(
        default_factory=dict
    )  # NVLinks that must bend over a GPU in their way: by how much


def _sockets(topology: Topology) -> list[Socket]:
    """Return sockets in the order of their first GPU. NICs that are near none get a box of their own, last."""
    known: dict[tuple[str | None, str | None], Socket] = {}
    for gpu in topology.devices:
        node, cpus = gpu.numa_affinity, gpu.cpu_affinity
        parts = ([f"NUMA node {node}"] if node else []) + ([f"CPUs {cpus}"] if cpus else [])
        known.setdefault((node, cpus), Socket(", ".join(parts), [])).gpus.append(gpu.index)
    sockets = list(known.values())
    elsewhere = Socket("other NICs", [])
    for nic in topology.nics:
        words = {gpu: topology.link_between(gpu, nic) for gpu in topology.gpus}
        nearest = max(topology.gpus, key=lambda gpu: (quality(words[gpu]), -gpu))
        far = len(sockets) > 1 and (words[nearest] == "SYS" or not is_known(words[nearest]))
        home = elsewhere if far else next(socket for socket in sockets if nearest in socket.gpus)
        home.nics.append(nic)
    return [*sockets, elsewhere] if elsewhere.nics else sockets


def _pcie_switches(topology: Topology, socket: Socket) -> list[tuple[tuple[Device, ...], str]]:
    """Group the devices of a socket that PIX or PXB joins: they hang from one PCIe switch, or from several in a row."""
    devices: list[Device] = [*socket.gpus, *socket.nics]
    groups: list[set[Device]] = [{device} for device in devices]
    for a, b in combinations(devices, 2):
        if topology.link_between(a, b) in ("PIX", "PXB"):
            one, two = (next(group for group in groups if device in group) for device in (a, b))
            if one is not two:
                one |= two
                groups.remove(two)
    found = []
    for group in groups:
        if len(group) > 1:
            words = {topology.link_between(a, b) for a, b in combinations(group, 2)}
            members = tuple(device for device in devices if device in group)
            found.append((members, "PCIe switches" if "PXB" in words else "PCIe switch"))
    return found


def lay_out(topology: Topology) -> DrawingLayout:
    """Place everything in one drawing."""
    layout = DrawingLayout()
    sockets = _sockets(topology)
    homes = [socket for socket in sockets if socket.gpus]
    faces = any(
        nvlink_count(topology.link_between(a, b))
        for a in homes[0].gpus
        for b in homes[-1].gpus
        if a != b
    )
    stacked = (
        len(homes) == 2
        and faces
        and not topology.nvswitch
        and all(len(socket.gpus) > 1 for socket in homes)
    )
    edge = 0.0
    for number, socket in enumerate(homes):
        _place_gpus(topology, layout, socket, -4.6 if stacked and number else 0.0)
        _place_rest(topology, layout, socket, up=stacked and number == 0)
        if not stacked:
            _shift(layout, socket, edge)
            edge = layout.boxes[-1][1][0] + 0.35
    if topology.nvswitch:
        xs = [layout.places[gpu][0] for gpu in topology.gpus]
        layout.nvswitch = (min(xs) - 0.7, max(xs) + 0.7, 1.6)
    else:
        layout.arcs = _arcs(topology, layout)
    left, _, bottom, _ = extent(layout)
    for socket in sockets[len(homes) :]:
        for number, nic in enumerate(socket.nics):
            layout.places[nic] = (left + 0.8 + 1.15 * number, bottom - 0.85)
        layout.boxes.append(_around(layout, list(socket.nics), socket.label, up=False))
    return layout


def _arcs(topology: Topology, layout: DrawingLayout) -> dict[Pair, float]:
    """Return the heights of NVLinks that would run behind another GPU of the same row."""
    heights: dict[Pair, float] = {}
    for a, b in combinations(topology.gpus, 2):
        (xa, ya), (xb, yb) = layout.places[a], layout.places[b]
        row = [layout.places[gpu][0] for gpu in topology.gpus if layout.places[gpu][1] == ya]
        if (
            ya == yb
            and nvlink_count(topology.link_between(a, b))
            and any(min(xa, xb) < x < max(xa, xb) for x in row)
        ):
            heights[frozenset((a, b))] = 0.3 + 0.14 * abs(xa - xb)
    return heights


def _shift(layout: DrawingLayout, socket: Socket, edge: float) -> None:
    """Move the socket placed last to the right, until its box begins at `edge`."""
    low, high, label, up = layout.boxes[-1]
    by = edge - low[0]
    layout.boxes[-1] = ((low[0] + by, low[1]), (high[0] + by, high[1]), label, up)
    mine: set[Device] = {*socket.gpus, *socket.nics}
    for device in mine:
        x, y = layout.places[device]
        layout.places[device] = (x + by, y)
    layout.switches = [
        ((at[0] + by, at[1]) if mine.issuperset(members) else at, members, name)
        for at, members, name in layout.switches
    ]


def _place_gpus(topology: Topology, layout: DrawingLayout, socket: Socket, y: float) -> None:
    """Put a socket's GPUs on a face, or in a row where no NVLinks need one."""
    count = len(socket.gpus)
    if topology.nvswitch or not any(
        nvlink_count(word) for word in link_words(topology, socket.gpus)
    ):
        face: list[Point] = [(1.25 * number, 0.0) for number in range(count)]
    else:
        face = _FACES.get(count) or _rim(count)
    places = [(dx, y + dy) for dx, dy in face]
    order = tuple(socket.gpus)
    if layout.places and 1 < count <= _MOST_TRIED and not topology.nvswitch:
        order = min(
            permutations(socket.gpus),
            key=lambda way: (_stretch(topology, layout, way, places), way),
        )
    layout.places.update(zip(order, places, strict=True))


def link_words(topology: Topology, gpus: list[int]) -> list[str]:
    """Return the link classes between these GPUs and all others of the machine."""
    return [topology.link_between(a, b) for a in gpus for b in topology.gpus if a != b]


def _rim(count: int) -> list[Point]:
    """Return places around an ellipse."""
    radius = 0.42 * count
    turns = [2 * pi * number / count for number in range(count)]
    return [(radius * (1 - cos(turn)), 0.8 * radius * sin(turn)) for turn in turns]


def _stretch(
    topology: Topology, layout: DrawingLayout, order: tuple[int, ...], places: list[Point]
) -> float:
    """Sum how far NVLinks to the sockets already placed would run sideways, weighted by their count."""
    return sum(
        (nvlink_count(topology.link_between(gpu, other)) or 0)
        * (at[0] - layout.places[other][0]) ** 2
        for gpu, at in zip(order, places, strict=True)
        for other in topology.gpus
        if other in layout.places
    )


def _place_rest(topology: Topology, layout: DrawingLayout, socket: Socket, up: bool) -> None:
    """Put PCIe switches and NICs outside the GPUs, and the socket's box around them."""
    side = 1 if up else -1
    ys = [layout.places[gpu][1] for gpu in socket.gpus]
    edge = max(ys) if up else min(ys)
    middle = sum(layout.places[gpu][0] for gpu in socket.gpus) / len(socket.gpus)
    groups = _pcie_switches(topology, socket)
    held = {device for members, _ in groups for device in members}
    loose: list[tuple[tuple[Device, ...], str]] = [
        ((nic,), "") for nic in socket.nics if nic not in held
    ]
    blocks = sorted(groups, key=lambda group: _middle(layout, group[0], middle)) + loose
    widths = [
        max(1.7 if label else 1.15, 1.15 * sum(isinstance(one, str) for one in members))
        for members, label in blocks
    ]
    x = middle - sum(widths) / 2
    for (members, label), width in zip(blocks, widths, strict=True):
        centre = x + width / 2
        nics = [device for device in members if isinstance(device, str)]
        row = edge + side * (2.0 if label else 1.1)
        for number, nic in enumerate(nics):
            layout.places[nic] = (centre + 1.15 * (number - (len(nics) - 1) / 2), row)
        if label:
            layout.switches.append(((centre, edge + side * 1.1), members, label))
        x += width
    switches = [
        at for at, members, _ in layout.switches if members[0] in (*socket.gpus, *socket.nics)
    ]
    layout.boxes.append(_around(layout, [*socket.gpus, *socket.nics], socket.label, up, switches))


def _middle(layout: DrawingLayout, members: tuple[Device, ...], default: float) -> float:
    xs = [layout.places[device][0] for device in members if device in layout.places]
    return sum(xs) / len(xs) if xs else default


def _around(
    layout: DrawingLayout,
    devices: list[Device],
    label: str,
    up: bool,
    switches: list[Point] | None = None,
) -> tuple[Point, Point, str, bool]:
    """Return a box with room for its label at the outer side, where no NVLink passes."""
    points = [layout.places[device] for device in devices] + (switches or [])
    xs, ys = [x for x, _ in points], [y for _, y in points]
    half = max(0.75 + (max(xs) - min(xs)) / 2, 0.15 + _LETTER * len(label) / 2)
    middle = (max(xs) + min(xs)) / 2
    above, below = (0.75, 0.45) if up else (0.45, 0.75)
    return (middle - half, min(ys) - below), (middle + half, max(ys) + above), label, up


def extent(layout: DrawingLayout) -> tuple[float, float, float, float]:
    """Return left, right, bottom and top of everything."""
    lows, highs = [box[0] for box in layout.boxes], [box[1] for box in layout.boxes]
    top = max(y for _, y in highs)
    for pair, height in layout.arcs.items():
        top = max(top, *(layout.places[device][1] + height + 0.15 for device in pair))
    if layout.nvswitch is not None:
        top = max(top, layout.nvswitch[2] + 0.3)
    return min(x for x, _ in lows), max(x for x, _ in highs), min(y for _, y in lows), top
