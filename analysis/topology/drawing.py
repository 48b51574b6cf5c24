"""Draw one machine: sockets, PCIe switches, GPUs, NICs, NVSwitches and the NVLinks between GPUs.

The width of an NVLink follows its count. Paths over PCIe have no lines, which would hide the NVLinks: devices on one
PCIe switch hang from it, devices of one NUMA node share a box. Equal topologies give equal bytes.
"""

import io
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.topology.layout import DrawingLayout, Point, extent, lay_out, link_words
from analysis.topology.link_classes import best_first, nvlink_count
from analysis.topology.model import Topology
from benchmarks.record.own_files import write_named
from benchmarks.record.visible import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BOX: Point = (0.96, 0.56)
_GREENS = ("#0b5d1e", "#4caf50", "#9ccc65", "#c5e1a5")  # most links first
_WIDEST, _NARROWEST = 6.5, 1.6  # points
_INCHES = 0.95  # of one unit of the layout
_STYLE: Any = {
    "svg.hashsalt": "ringside",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.family": "sans-serif",
}


def draw_topology(topology: Topology, path: Path) -> None:
    """Write the drawing; the suffix names the format. Raises OSError, and NotOurs where something else than a drawing is."""
    write_named(path, drawing(topology, path.suffix.removeprefix(".") or "svg"))


def drawing(topology: Topology, form: str) -> bytes:
    """Return the drawing in a format (svg, or any that matplotlib has)."""
    return saved(topology_figure(topology), form)


def topology_figure(topology: Topology) -> "Figure":
    """Return the drawing as a figure of matplotlib, which no backend of pyplot knows."""
    import matplotlib
    from matplotlib.figure import Figure

    layout = lay_out(topology)
    left, right, bottom, top = extent(layout)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_INCHES * (right - left), _INCHES * (top - bottom)))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(left, right), ylim=(bottom, top))
        axes.axis("off")
        _paint(axes, topology, layout)
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


def _title(topology: Topology) -> str:
    models = [
        visible(name, kept="")
        for name in best_first(gpu.name for gpu in topology.devices if gpu.name)
    ]
    parts = [
        f"{len(topology.gpus)} GPU{'s' * (len(topology.gpus) != 1)}{f' ({models[0]})' if models else ''}"
    ]
    if topology.nics:
        parts.append(f"{len(topology.nics)} NIC{'s' * (len(topology.nics) != 1)}")
    return ", ".join(parts)


def _styles(topology: Topology) -> dict[str, tuple[str, float]]:
    """Return colour and width (points) of each NVLink class of the machine."""
    words = [word for word in best_first(topology.links.values()) if nvlink_count(word)]
    most = max((nvlink_count(word) or 0 for word in words), default=1)
    return {
        word: (
            _GREENS[min(rank, len(_GREENS) - 1)],
            max(_NARROWEST, _WIDEST * (nvlink_count(word) or 0) / most),
        )
        for rank, word in enumerate(words)
    }


def _paint(axes: Any, topology: Topology, layout: DrawingLayout) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    for low, high, label, up in layout.boxes:
        _rectangle(axes, low, high, "#f4f5f7", "#9aa3ad", 0, rounding=0.18)
        outer = high[1] - 0.2 if up else low[1] + 0.2
        axes.text(low[0] + 0.15, outer, label, fontsize=8.5, color="#4a5460", va="center")
    for at, members, label in layout.switches:
        for device in members:
            x, y = layout.places[device]
            axes.plot([at[0], x], [at[1], y], color="#b0b7bf", linewidth=1.0, zorder=1)
        _named_box(axes, at, (1.45, 0.4), label, "#e3d7c1", "#8d7b58", 7.5)
    styles = _styles(topology)
    if layout.nvswitch is not None:
        left, right, y = layout.nvswitch
        for gpu in topology.gpus:
            # No style for a GPU that is alone, or cut off from the others by a partition of the switches.
            words = [word for word in best_first(link_words(topology, [gpu])) if word in styles]
            colour, width = styles[words[0]] if words else ("#9aa3ad", _NARROWEST)
            x, bottom = layout.places[gpu]
            axes.plot(
                [x, x], [bottom, y], color=colour, linewidth=width, zorder=2, solid_capstyle="butt"
            )
        _named_box(
            axes,
            ((left + right) / 2, y),
            (right - left, 0.5),
            "NVSwitch",
            "#0b3d1e",
            "#0b3d1e",
            10,
            "white",
        )
    else:
        for a, b in combinations(topology.gpus, 2):
            style = styles.get(topology.link_between(a, b))
            if style:
                (xa, ya), (xb, yb) = layout.places[a], layout.places[b]
                peak = 2 * layout.arcs.get(
                    frozenset((a, b)), 0.0
                )  # a parabola reaches half of its control point
                curve = Curve(
                    [(xa, ya), ((xa + xb) / 2, (ya + yb) / 2 + peak), (xb, yb)], [1, 3, 3]
                )
                axes.add_patch(
                    PathPatch(
                        curve,
                        fill=False,
                        edgecolor=style[0],
                        linewidth=style[1],
                        zorder=2,
                        capstyle="round",
                    )
                )
    for device, at in layout.places.items():
        if isinstance(device, int):
            _named_box(axes, at, _BOX, f"GPU{device}", "#76b900", "#3d6100", 10, "black")
        else:
            _named_box(axes, at, (1.0, 0.4), device, "#d3e3f5", "#5b7fa6", 7.5)
    pairs = Counter(topology.link_between(a, b) for a, b in combinations(topology.gpus, 2))
    handles = [
        Line2D([], [], color=colour, linewidth=width, label=f"{word} ({_pairs(pairs[word])})")
        for word, (colour, width) in styles.items()
        if pairs[word]
    ]
    handles += [
        Line2D([], [], linestyle="none", label=f"{word} ({_pairs(pairs[word])}, no line)")
        for word in best_first(pairs)
        if word not in styles
    ]
    if handles:
        axes.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            ncol=4,
            frameon=False,
            fontsize=9,
        )


def _pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count} pairs"


def _rectangle(
    axes: Any, low: Point, high: Point, fill: str, edge: str, order: int, rounding: float = 0.06
) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = f"round,pad=0,rounding_size={rounding}"
    axes.add_patch(
        FancyBboxPatch(
            low,
            high[0] - low[0],
            high[1] - low[1],
            boxstyle=style,
            facecolor=fill,
            edgecolor=edge,
            zorder=order,
        )
    )


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
    _rectangle(
        axes, (x - width / 2, y - height / 2), (x + width / 2, y + height / 2), fill, edge, 3
    )
    axes.text(x, y, label, ha="center", va="center", fontsize=font, color=ink, zorder=4)
