"""Draw one machine: sockets, PCIe switches, GPUs, NICs, NVSwitches and the NVLinks between GPUs.

All GPUs stand in one row, those of a socket in one box, with their PCIe switches and NICs below.
NVLinks are arcs above the row, or lines to the NVSwitch; their width follows their count. Lengths
are in units of about one GPU; x runs right and y up. Equal topologies give equal bytes.
"""

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.text import count, single_line
from analysis.topology.model import (
    Device,
    Topology,
    best_first,
    count_classes,
    is_known,
    nvlink_count,
    quality,
)
from benchmarks.record.safe_files import NotOurs, open_to_read, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float]
LineStyles = dict[str, tuple[str, float]]  # colour and width in points by NVLink class

SWITCH_Y, NIC_Y = -1.1, -2.0  # GPUs stand at 0
NVSWITCH_Y = 1.5
GPU_STEP, NIC_STEP = 1.25, 1.15
LABEL_WIDTH = 1.6  # of a PCIe switch
LETTER = 0.085  # width of a letter of a socket's label
LONGEST_LABEL = 120  # letters: matplotlib takes seconds for some ten thousand
GREENS = ("#0b5d1e", "#4caf50", "#9ccc65", "#c5e1a5")  # most links first
GREY = "#9aa3ad"
WIDEST, NARROWEST = 6.5, 1.6  # points
INCHES = 0.95  # of one unit of the layout
HEAD_BYTES = 1024  # of a drawing, which tell that it is one
STYLE: Any = {
    "svg.hashsalt": "ringside",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.family": "sans-serif",
}


def draw_topology(topology: Topology, path: Path) -> None:
    """Write the drawing; the suffix names the format. Raises OSError where it cannot be written."""
    form = path.suffix.removeprefix(".") or "svg"
    write_drawing(path, saved(topology_figure(topology), form))


def write_drawing(path: Path, drawing: bytes) -> None:
    """Write a drawing where a user said. A link is followed, as the user named it.

    Raises:
        NotOurs: something else than such a drawing is there already.
        OSError: it cannot be written.
    """
    target = Path(os.path.realpath(path))
    mark = drawing[:4]
    if b"<svg" in drawing[:HEAD_BYTES]:
        mark = b"<svg"
    with contextlib.suppress(FileNotFoundError), open_to_read(target) as file:
        head = file.read(HEAD_BYTES)
        if head and mark not in head:
            raise NotOurs(path, "holds something else than a drawing")
    write_whole(target, drawing)


def saved(figure: "Figure", form: str) -> bytes:
    """Return the figure of a machine as a file. Equal figures give equal bytes."""
    import matplotlib

    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    out = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format=form, bbox_inches="tight", metadata=metadata)
    return out.getvalue()


def sockets_of(topology: Topology) -> list[tuple[str, list[Device]]]:
    """Return (label, devices) of each NUMA node in the order of GPUs, then distant NICs."""
    sockets: dict[str, list[Device]] = {}
    home: dict[Device, str] = {}
    for gpu in topology.devices:
        label = []
        if gpu.numa_affinity:
            label.append(f"NUMA node {gpu.numa_affinity}")
        if gpu.cpu_affinity:
            label.append(f"CPUs {gpu.cpu_affinity}")
        home[gpu.index] = single_line(", ".join(label), LONGEST_LABEL)
        sockets.setdefault(home[gpu.index], []).append(gpu.index)
    distant: list[Device] = []
    for nic in topology.nics:
        words = {gpu: topology.link_between(gpu, nic) for gpu in topology.gpus}
        nearest = max(topology.gpus, key=lambda gpu: (quality(words[gpu]), -gpu))
        if len(sockets) > 1 and (words[nearest] == "SYS" or not is_known(words[nearest])):
            distant.append(nic)
        else:
            sockets[home[nearest]].append(nic)
    labelled = list(sockets.items())
    if distant:
        labelled.append(("other NICs", distant))
    return labelled


def pcie_groups(topology: Topology, devices: Sequence[Device]) -> list[tuple[list[Device], str]]:
    """Return the devices of a socket, those that PIX or PXB joins together, with their switch."""
    groups: list[list[Device]] = []
    for device in devices:
        joined: list[Device] = []
        apart = []
        for group in groups:
            words = {topology.link_between(device, peer) for peer in group}
            if words & {"PIX", "PXB"}:
                joined += group
            else:
                apart.append(group)
        groups = [*apart, [*joined, device]]
    groups.sort(key=lambda group: min(map(devices.index, group)))
    labelled = []
    for group in groups:
        words = {topology.link_between(a, b) for a, b in combinations(group, 2)}
        label = "PCIe switches" if "PXB" in words else "PCIe switch"
        labelled.append((group, label if words else ""))
    return labelled


class SwitchBox(NamedTuple):
    """PCIe switches above the NICs, with the devices that they join."""

    centre: Point
    devices: list[Device]
    label: str


class SocketBox(NamedTuple):
    """What lies behind the devices of one socket."""

    left: float
    right: float
    label: str


@dataclass
class Layout:
    """Where everything stands."""

    places: dict[Device, Point] = field(default_factory=dict)
    switches: list[SwitchBox] = field(default_factory=list)
    sockets: list[SocketBox] = field(default_factory=list)
    styles: LineStyles = field(default_factory=dict)
    bottom: float = -0.75


def lay_out(topology: Topology) -> Layout:
    """Return the places of everything in one drawing, from left to right, and the NVLinks' look."""
    layout, x = Layout(), 0.0
    if topology.nics:
        layout.bottom = NIC_Y - 0.75
    for socket, devices in sockets_of(topology):
        left = x
        for group, label in pcie_groups(topology, devices):
            gpus: list[Device] = []
            nics: list[Device] = []
            for device in group:
                if isinstance(device, int):
                    gpus.append(device)
                else:
                    nics.append(device)
            width = max(GPU_STEP * len(gpus), NIC_STEP * len(nics), LABEL_WIDTH if label else 0.0)
            for members, step, y in ((gpus, GPU_STEP, 0.0), (nics, NIC_STEP, NIC_Y)):
                at = x + width / 2 - step * (len(members) - 1) / 2
                for index, device in enumerate(members):
                    layout.places[device] = (at + step * index, y)
            if label:
                layout.switches.append(SwitchBox((x + width / 2, SWITCH_Y), group, label))
                layout.bottom = min(layout.bottom, SWITCH_Y - 0.75)
            x += width
        x = max(x, left + 0.3 + LETTER * len(socket))
        layout.sockets.append(SocketBox(left, x, socket))
        x += 0.3
    most = 0
    for word in best_first(topology.links.values()):
        links = nvlink_count(word) or 0
        most = max(most, links)
        if links:
            colour = GREENS[min(len(layout.styles), len(GREENS) - 1)]
            layout.styles[word] = (colour, max(NARROWEST, WIDEST * links / most))
    return layout


def topology_figure(topology: Topology) -> "Figure":
    """Return the drawing as a figure of matplotlib, which no backend of pyplot knows."""
    import matplotlib
    from matplotlib.figure import Figure

    layout = lay_out(topology)
    left, right = layout.sockets[0].left - 0.1, layout.sockets[-1].right + 0.1
    top = 0.6
    if topology.nvswitch:
        top = NVSWITCH_Y + 0.4
    for a, b in combinations(topology.gpus, 2):
        if not topology.nvswitch and topology.link_between(a, b) in layout.styles:
            top = max(top, 0.2 + _arc_height(layout.places[a][0] - layout.places[b][0]))
    title = count(len(topology.gpus), "GPU")
    models = best_first(gpu.name for gpu in topology.devices if gpu.name)
    if models:
        title += f" ({single_line(models[0], LONGEST_LABEL)})"
    if topology.nics:
        title += f", {count(len(topology.nics), 'NIC')}"
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(INCHES * (right - left), INCHES * (top - layout.bottom)))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(left, right), ylim=(layout.bottom, top))
        axes.axis("off")
        for socket in layout.sockets:
            middle = ((socket.left + socket.right) / 2, (layout.bottom + 0.45) / 2)
            size = (socket.right - socket.left, 0.45 - layout.bottom)
            _draw_box(axes, middle, size, "", "#f4f5f7", GREY, 0, 0)
            corner = (socket.left + 0.15, layout.bottom + 0.15)
            axes.text(*corner, socket.label, fontsize=8.5, color="#4a5460")
        for switch in layout.switches:
            x, y = switch.centre
            for device in switch.devices:
                at = layout.places[device]
                axes.plot([x, at[0]], [y, at[1]], color="#b0b7bf", linewidth=1.0, zorder=1)
            _draw_box(axes, switch.centre, (1.45, 0.4), switch.label, "#e3d7c1", "#8d7b58", 7.5)
        _draw_nvlinks(axes, topology, layout)
        for device, at in layout.places.items():
            if isinstance(device, int):
                _draw_box(axes, at, (0.96, 0.56), f"GPU{device}", "#76b900", "#3d6100", 10)
            else:
                label = single_line(device, LONGEST_LABEL)
                _draw_box(axes, at, (1.0, 0.4), label, "#d3e3f5", "#5b7fa6", 7.5)
        _draw_legend(axes, topology, layout.styles)
        axes.set_title(title, fontsize=12)
    return figure


def _arc_height(distance: float) -> float:
    return 0.45 + 0.25 * abs(distance)


def _draw_nvlinks(axes: Any, topology: Topology, layout: Layout) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    xs = {gpu: layout.places[gpu][0] for gpu in topology.gpus}
    if topology.nvswitch:
        for gpu, x in xs.items():
            # A GPU that is alone, or cut off by a partition of the switches, has no NVLink class.
            words = [topology.link_between(gpu, peer) for peer in xs if peer != gpu]
            colour, width = GREY, NARROWEST
            for word in reversed(best_first(words)):
                colour, width = layout.styles.get(word, (colour, width))
            axes.plot([x, x], [0.0, NVSWITCH_Y], color=colour, linewidth=width, zorder=2)
        low, high = min(xs.values()), max(xs.values())
        centre, size = ((low + high) / 2, NVSWITCH_Y), (high - low + 1.4, 0.5)
        _draw_box(axes, centre, size, "NVSwitch", "#bfe3c6", "#0b3d1e", 10)
        return
    for a, b in combinations(topology.gpus, 2):
        word = topology.link_between(a, b)
        if word in layout.styles:
            colour, width = layout.styles[word]
            # A parabola reaches half of its control point.
            control = ((xs[a] + xs[b]) / 2, 2 * _arc_height(xs[a] - xs[b]))
            curve = Curve([(xs[a], 0.0), control, (xs[b], 0.0)], [1, 3, 3])
            line: Any = {"edgecolor": colour, "linewidth": width, "zorder": 2}
            axes.add_patch(PathPatch(curve, fill=False, **line))


def _draw_legend(axes: Any, topology: Topology, styles: LineStyles) -> None:
    from matplotlib.lines import Line2D

    counts = count_classes(topology.link_between(a, b) for a, b in combinations(topology.gpus, 2))
    handles = []
    for word in sorted(counts, key=lambda word: word not in styles):
        pairs = count(counts[word], "pair")
        label = single_line(word, LONGEST_LABEL)
        look: Any = {"linestyle": "none", "label": f"{label} ({pairs}, no line)"}
        if word in styles:
            look = {"color": styles[word][0], "linewidth": styles[word][1]}
            look["label"] = f"{label} ({pairs})"
        handles.append(Line2D([], [], **look))
    if handles:
        position = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "ncol": 4}
        axes.legend(handles=handles, frameon=False, fontsize=9, **position)


def _draw_box(
    axes: Any, at: Point, size: Point, label: str, fill: str, edge: str, font: float, order: int = 3
) -> None:
    from matplotlib.patches import FancyBboxPatch

    low = (at[0] - size[0] / 2, at[1] - size[1] / 2)
    look: Any = {"facecolor": fill, "edgecolor": edge, "zorder": order}
    look["boxstyle"] = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch(low, *size, **look))
    if label:
        style = {"ha": "center", "va": "center", "color": "#20262d", "fontsize": font, "zorder": 4}
        axes.text(*at, label, **style)
