"""Draw one machine: sockets, PCIe switches, GPUs, NICs, NVSwitches and the NVLinks between GPUs.

The width of an NVLink follows its count. Paths over PCIe have no lines, which would hide the
NVLinks: devices on one PCIe switch hang from it, devices of one NUMA node share a box. Two sockets
that NVLink joins stand one above the other, so that a hybrid cube mesh looks like a cube; all other
sockets stand in a row. Lengths are in units of about one GPU; x runs right and y up. Equal
topologies give equal bytes.
"""

import io
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations, permutations
from math import cos, pi, sin
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.topology.model import (
    Device,
    Pair,
    Topology,
    best_first,
    is_known,
    nvlink_count,
    quality,
)
from benchmarks.record.safe_files import write_named
from benchmarks.record.safe_text import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float]

_FACES: dict[int, list[Point]] = {  # places of the GPUs of one socket, around its rim
    1: [(0, 0)],
    2: [(0, 0), (2.2, 0)],
    3: [(0, 0), (3.0, 0), (1.5, 1.3)],
    4: [(0, 0), (3.0, 0), (4.4, 1.3), (1.4, 1.3)],
}
_MOST_PERMUTED = 6  # GPUs of a socket whose every order is tried: 720
_LETTER = 0.078  # width of a letter of a socket's label, in units
_GPU_BOX: Point = (0.96, 0.56)
_NIC_BOX: Point = (1.0, 0.4)
_NIC_STEP = 1.15
_GREENS = ("#0b5d1e", "#4caf50", "#9ccc65", "#c5e1a5")  # most links first
_GREY = "#9aa3ad"
_WIDEST, _NARROWEST = 6.5, 1.6  # points
_INCHES = 0.95  # of one unit of the layout
_STYLE: Any = {
    "svg.hashsalt": "ringside",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.family": "sans-serif",
}


def draw_topology(topology: Topology, path: Path) -> None:
    """Write the drawing; the suffix names the format.

    Raises:
        OSError: the file cannot be written; NotOurs where something else than a drawing is.
    """
    form = path.suffix.removeprefix(".") or "svg"
    write_named(path, saved(topology_figure(topology), form))


def topology_figure(topology: Topology) -> "Figure":
    """Return the drawing as a figure of matplotlib, which no backend of pyplot knows."""
    import matplotlib
    from matplotlib.figure import Figure

    layout = lay_out(topology)
    left, right, bottom, top = _extent(layout)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_INCHES * (right - left), _INCHES * (top - bottom)))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(left, right), ylim=(bottom, top))
        axes.axis("off")
        _draw_boxes_and_switches(axes, layout)
        styles = _nvlink_styles(topology)
        if layout.nvswitch is None:
            _draw_direct_nvlinks(axes, topology, layout, styles)
        else:
            _draw_nvswitch(axes, topology, layout, styles)
        for device, at in layout.places.items():
            if isinstance(device, int):
                _named_box(axes, at, _GPU_BOX, f"GPU{device}", "#76b900", "#3d6100", 10, "black")
            else:
                _named_box(axes, at, _NIC_BOX, device, "#d3e3f5", "#5b7fa6", 7.5)
        _draw_legend(axes, topology, styles)
        axes.set_title(_title(topology), fontsize=12)
    return figure


def saved(figure: "Figure", form: str) -> bytes:
    """Return the figure of a machine as a file. Equal figures give equal bytes."""
    import matplotlib

    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(out, format=form, bbox_inches="tight", metadata=metadata)
    return out.getvalue()


# --- layout ---------------------------------------------------------------------------------------


@dataclass
class _Socket:
    """GPUs that share a NUMA node or CPUs, and the NICs nearest to them."""

    label: str
    gpus: list[int] = field(default_factory=list)
    nics: list[str] = field(default_factory=list)


class _PcieSwitch(NamedTuple):
    at: Point
    members: tuple[Device, ...]
    label: str


class _Box(NamedTuple):
    low: Point
    high: Point
    label: str
    label_on_top: bool


@dataclass
class DrawingLayout:
    """Centres of everything, in units of about one GPU."""

    places: dict[Device, Point] = field(default_factory=dict)
    switches: list[_PcieSwitch] = field(default_factory=list)
    boxes: list[_Box] = field(default_factory=list)
    nvswitch: tuple[float, float, float] | None = None  # left, right, y
    arcs: dict[Pair, float] = field(default_factory=dict)  # how far NVLinks bend over a GPU


def lay_out(topology: Topology) -> DrawingLayout:
    """Return the places of everything in one drawing."""
    layout = DrawingLayout()
    sockets, distant_nics = _sockets(topology)
    stacked = _can_be_stacked(topology, sockets)
    edge = 0.0
    for number, socket in enumerate(sockets):
        on_top = stacked and number == 0
        _place_gpus(topology, layout, socket, -4.6 if stacked and number else 0.0)
        _place_switches_and_nics(topology, layout, socket, on_top)
        if not stacked:
            _shift_last(layout, socket, edge)
            edge = layout.boxes[-1].high[0] + 0.35
    if topology.nvswitch:
        xs = [layout.places[gpu][0] for gpu in topology.gpus]
        layout.nvswitch = (min(xs) - 0.7, max(xs) + 0.7, 1.6)
    else:
        layout.arcs = _arcs(topology, layout)
    if distant_nics:
        left, _, bottom, _ = _extent(layout)
        for number, nic in enumerate(distant_nics):
            layout.places[nic] = (left + 0.8 + _NIC_STEP * number, bottom - 0.85)
        points = [layout.places[nic] for nic in distant_nics]
        layout.boxes.append(_box_around(points, "other NICs", label_on_top=False))
    return layout


def _sockets(topology: Topology) -> tuple[list[_Socket], list[str]]:
    """Return sockets in the order of their first GPU, and the NICs that are near none."""
    sockets: dict[tuple[str | None, str | None], _Socket] = {}
    for gpu in topology.devices:
        node, cpus = gpu.numa_affinity, gpu.cpu_affinity
        if (node, cpus) not in sockets:
            parts = []
            if node:
                parts.append(f"NUMA node {node}")
            if cpus:
                parts.append(f"CPUs {cpus}")
            sockets[node, cpus] = _Socket(", ".join(parts))
        sockets[node, cpus].gpus.append(gpu.index)
    distant_nics = []
    for nic in topology.nics:
        words = {gpu: topology.link_between(gpu, nic) for gpu in topology.gpus}
        nearest = max(topology.gpus, key=lambda gpu: (quality(words[gpu]), -gpu))
        if len(sockets) > 1 and (words[nearest] == "SYS" or not is_known(words[nearest])):
            distant_nics.append(nic)
            continue
        for socket in sockets.values():
            if nearest in socket.gpus:
                socket.nics.append(nic)
    return list(sockets.values()), distant_nics


def _can_be_stacked(topology: Topology, sockets: list[_Socket]) -> bool:
    if len(sockets) != 2 or topology.nvswitch or min(len(socket.gpus) for socket in sockets) < 2:
        return False
    first, second = sockets
    return any(nvlink_count(topology.link_between(a, b)) for a in first.gpus for b in second.gpus)


def _place_gpus(topology: Topology, layout: DrawingLayout, socket: _Socket, y: float) -> None:
    """Put a socket's GPUs on a face, or in a row where no NVLinks need one."""
    count = len(socket.gpus)
    words = _words_to_all(topology, socket.gpus)
    if topology.nvswitch or not any(nvlink_count(word) for word in words):
        face: list[Point] = [(1.25 * number, 0.0) for number in range(count)]
    else:
        face = _FACES.get(count) or _rim(count)
    points = [(dx, y + dy) for dx, dy in face]
    order = tuple(socket.gpus)
    if layout.places and 1 < count <= _MOST_PERMUTED and not topology.nvswitch:
        order = min(
            permutations(socket.gpus),
            key=lambda way: (_sideways(topology, layout, way, points), way),
        )
    layout.places.update(zip(order, points, strict=True))


def _words_to_all(topology: Topology, gpus: list[int]) -> list[str]:
    """Return the link classes between these GPUs and all others of the machine."""
    return [topology.link_between(a, b) for a in gpus for b in topology.gpus if a != b]


def _rim(count: int) -> list[Point]:
    """Return points around an ellipse."""
    radius = 0.42 * count
    points = []
    for number in range(count):
        turn = 2 * pi * number / count
        points.append((radius * (1 - cos(turn)), 0.8 * radius * sin(turn)))
    return points


def _sideways(
    topology: Topology, layout: DrawingLayout, order: tuple[int, ...], points: list[Point]
) -> float:
    """Sum how far NVLinks to the sockets already placed would run sideways, by their count."""
    total = 0.0
    for gpu, (x, _) in zip(order, points, strict=True):
        for peer in topology.gpus:
            if peer in layout.places:
                links = nvlink_count(topology.link_between(gpu, peer)) or 0
                total += links * (x - layout.places[peer][0]) ** 2
    return total


def _place_switches_and_nics(
    topology: Topology, layout: DrawingLayout, socket: _Socket, on_top: bool
) -> None:
    """Put PCIe switches and NICs outside the GPUs, and the socket's box around them."""
    side = 1 if on_top else -1
    gpu_points = [layout.places[gpu] for gpu in socket.gpus]
    ys = [y for _, y in gpu_points]
    edge = max(ys) if on_top else min(ys)
    middle = sum(x for x, _ in gpu_points) / len(gpu_points)

    def centre_of_gpus(members: tuple[Device, ...]) -> float:
        xs = [layout.places[device][0] for device in members if device in layout.places]
        return sum(xs) / len(xs) if xs else middle

    groups = _behind_pcie_switches(topology, socket)
    groups.sort(key=lambda group: centre_of_gpus(group[0]))
    attached = {device for members, _ in groups for device in members}
    blocks = groups + [((nic,), "") for nic in socket.nics if nic not in attached]
    widths = []
    for members, label in blocks:
        nics = sum(isinstance(device, str) for device in members)
        widths.append(max(1.7 if label else _NIC_STEP, _NIC_STEP * nics))
    x = middle - sum(widths) / 2
    switch_points = []
    for (members, label), width in zip(blocks, widths, strict=True):
        centre = x + width / 2
        block_nics = [device for device in members if isinstance(device, str)]
        row = edge + side * (2.0 if label else 1.1)
        for number, nic in enumerate(block_nics):
            layout.places[nic] = (centre + _NIC_STEP * (number - (len(block_nics) - 1) / 2), row)
        if label:
            switch_points.append((centre, edge + side * 1.1))
            layout.switches.append(_PcieSwitch(switch_points[-1], members, label))
        x += width
    devices: list[Device] = [*socket.gpus, *socket.nics]
    points = [layout.places[device] for device in devices] + switch_points
    layout.boxes.append(_box_around(points, socket.label, on_top))


def _behind_pcie_switches(
    topology: Topology, socket: _Socket
) -> list[tuple[tuple[Device, ...], str]]:
    """Return groups of devices that PIX or PXB joins, with the label of their switches."""
    devices: list[Device] = [*socket.gpus, *socket.nics]
    group_of = {device: {device} for device in devices}
    for a, b in combinations(devices, 2):
        if topology.link_between(a, b) in ("PIX", "PXB") and group_of[a] is not group_of[b]:
            group_of[a] |= group_of[b]
            for device in group_of[b]:
                group_of[device] = group_of[a]
    groups = []
    for device in devices:
        group = group_of[device]
        members = tuple(member for member in devices if member in group)
        if len(group) > 1 and device == members[0]:
            words = {topology.link_between(a, b) for a, b in combinations(group, 2)}
            groups.append((members, "PCIe switches" if "PXB" in words else "PCIe switch"))
    return groups


def _box_around(points: list[Point], label: str, label_on_top: bool) -> _Box:
    """Return a box with room for its label at the outer side, where no NVLink passes."""
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    half = max(0.75 + (max(xs) - min(xs)) / 2, 0.15 + _LETTER * len(label) / 2)
    middle = (max(xs) + min(xs)) / 2
    above, below = (0.75, 0.45) if label_on_top else (0.45, 0.75)
    low = (middle - half, min(ys) - below)
    return _Box(low, (middle + half, max(ys) + above), label, label_on_top)


def _shift_last(layout: DrawingLayout, socket: _Socket, edge: float) -> None:
    """Move the socket placed last to the right, until its box begins at `edge`."""
    box = layout.boxes[-1]
    shift = edge - box.low[0]
    low = (box.low[0] + shift, box.low[1])
    high = (box.high[0] + shift, box.high[1])
    layout.boxes[-1] = box._replace(low=low, high=high)
    devices: set[Device] = {*socket.gpus, *socket.nics}
    for device in devices:
        x, y = layout.places[device]
        layout.places[device] = (x + shift, y)
    for number, switch in enumerate(layout.switches):
        if devices.issuperset(switch.members):
            x, y = switch.at
            layout.switches[number] = switch._replace(at=(x + shift, y))


def _arcs(topology: Topology, layout: DrawingLayout) -> dict[Pair, float]:
    """Return the heights of NVLinks that would run behind another GPU of the same row."""
    heights: dict[Pair, float] = {}
    for a, b in combinations(topology.gpus, 2):
        (xa, ya), (xb, yb) = layout.places[a], layout.places[b]
        if ya != yb or not nvlink_count(topology.link_between(a, b)):
            continue
        row = [x for x, y in (layout.places[gpu] for gpu in topology.gpus) if y == ya]
        if any(min(xa, xb) < x < max(xa, xb) for x in row):
            heights[frozenset((a, b))] = 0.3 + 0.14 * abs(xa - xb)
    return heights


def _extent(layout: DrawingLayout) -> tuple[float, float, float, float]:
    """Return left, right, bottom and top of everything."""
    left = min(box.low[0] for box in layout.boxes)
    right = max(box.high[0] for box in layout.boxes)
    bottom = min(box.low[1] for box in layout.boxes)
    top = max(box.high[1] for box in layout.boxes)
    for pair, height in layout.arcs.items():
        top = max(top, *(layout.places[device][1] + height + 0.15 for device in pair))
    if layout.nvswitch is not None:
        top = max(top, layout.nvswitch[2] + 0.3)
    return left, right, bottom, top


# --- drawing --------------------------------------------------------------------------------------

LineStyles = dict[str, tuple[str, float]]  # colour and width in points by NVLink class


def _nvlink_styles(topology: Topology) -> LineStyles:
    words = [word for word in best_first(topology.links.values()) if nvlink_count(word)]
    most = max((nvlink_count(word) or 0 for word in words), default=1)
    styles = {}
    for rank, word in enumerate(words):
        width = max(_NARROWEST, _WIDEST * (nvlink_count(word) or 0) / most)
        styles[word] = (_GREENS[min(rank, len(_GREENS) - 1)], width)
    return styles


def _draw_boxes_and_switches(axes: Any, layout: DrawingLayout) -> None:
    for box in layout.boxes:
        _rectangle(axes, box.low, box.high, "#f4f5f7", _GREY, 0, rounding=0.18)
        y = box.high[1] - 0.2 if box.label_on_top else box.low[1] + 0.2
        axes.text(box.low[0] + 0.15, y, box.label, fontsize=8.5, color="#4a5460", va="center")
    for switch in layout.switches:
        for device in switch.members:
            x, y = layout.places[device]
            axes.plot(
                [switch.at[0], x], [switch.at[1], y], color="#b0b7bf", linewidth=1.0, zorder=1
            )
        _named_box(axes, switch.at, (1.45, 0.4), switch.label, "#e3d7c1", "#8d7b58", 7.5)


def _draw_nvswitch(
    axes: Any, topology: Topology, layout: DrawingLayout, styles: LineStyles
) -> None:
    assert layout.nvswitch is not None
    left, right, y = layout.nvswitch
    for gpu in topology.gpus:
        # A GPU that is alone, or cut off by a partition of the switches, has no NVLink class.
        words = [word for word in best_first(_words_to_all(topology, [gpu])) if word in styles]
        colour, width = styles[words[0]] if words else (_GREY, _NARROWEST)
        x, bottom = layout.places[gpu]
        line = {"color": colour, "linewidth": width, "zorder": 2, "solid_capstyle": "butt"}
        axes.plot([x, x], [bottom, y], **line)
    centre = ((left + right) / 2, y)
    size = (right - left, 0.5)
    _named_box(axes, centre, size, "NVSwitch", "#0b3d1e", "#0b3d1e", 10, "white")


def _draw_direct_nvlinks(
    axes: Any, topology: Topology, layout: DrawingLayout, styles: LineStyles
) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    for a, b in combinations(topology.gpus, 2):
        style = styles.get(topology.link_between(a, b))
        if style is None:
            continue
        (xa, ya), (xb, yb) = layout.places[a], layout.places[b]
        # A parabola reaches half of its control point.
        peak = 2 * layout.arcs.get(frozenset((a, b)), 0.0)
        control = ((xa + xb) / 2, (ya + yb) / 2 + peak)
        curve = Curve([(xa, ya), control, (xb, yb)], [1, 3, 3])
        line = {"edgecolor": style[0], "linewidth": style[1], "zorder": 2, "capstyle": "round"}
        axes.add_patch(PathPatch(curve, fill=False, **line))


def _draw_legend(axes: Any, topology: Topology, styles: LineStyles) -> None:
    from matplotlib.lines import Line2D

    pairs = Counter(topology.link_between(a, b) for a, b in combinations(topology.gpus, 2))
    counts = {word: f"{n} pair{'' if n == 1 else 's'}" for word, n in pairs.items()}
    handles = []
    for word, (colour, width) in styles.items():
        if word in counts:
            label = f"{word} ({counts[word]})"
            handles.append(Line2D([], [], color=colour, linewidth=width, label=label))
    for word in best_first(counts):
        if word not in styles:
            handles.append(
                Line2D([], [], linestyle="none", label=f"{word} ({counts[word]}, no line)")
            )
    if handles:
        position = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "ncol": 4}
        axes.legend(handles=handles, frameon=False, fontsize=9, **position)


def _title(topology: Topology) -> str:
    models = best_first(gpu.name for gpu in topology.devices if gpu.name)
    gpus, nics = len(topology.gpus), len(topology.nics)
    title = f"{gpus} GPU{'' if gpus == 1 else 's'}"
    if models:
        title += f" ({visible(models[0], kept='')})"
    if nics:
        title += f", {nics} NIC{'' if nics == 1 else 's'}"
    return title


def _rectangle(
    axes: Any, low: Point, high: Point, fill: str, edge: str, order: int, rounding: float = 0.06
) -> None:
    from matplotlib.patches import FancyBboxPatch

    box = FancyBboxPatch(
        low,
        high[0] - low[0],
        high[1] - low[1],
        boxstyle=f"round,pad=0,rounding_size={rounding}",
        facecolor=fill,
        edgecolor=edge,
        zorder=order,
    )
    axes.add_patch(box)


def _named_box(
    axes: Any,
    at: Point,
    size: Point,
    label: str,
    fill: str,
    edge: str,
    font: float,
    ink: str = "#20262d",
) -> None:
    (x, y), (width, height) = at, size
    low = (x - width / 2, y - height / 2)
    _rectangle(axes, low, (x + width / 2, y + height / 2), fill, edge, 3)
    axes.text(x, y, label, ha="center", va="center", fontsize=font, color=ink, zorder=4)
