"""Heat maps of p2p matrices: a square for each ordered pair, with its value and the link class between the two GPUs.

The colours are those of cividis: colour-blind people see them alike, and they keep their order in grey. Dark is always
the better end. The diagonal (copies within one GPU) has its own scale and stays grey. Equal input gives equal bytes.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from analysis.native.p2p import Matrices
from analysis.topology.model import Device, Topology
from benchmarks.record.safe_files import write_named
from benchmarks.record.safe_text import visible

_SQUARE = 0.62  # inches
_MARGINS = (0.55, 0.15, 0.5, 0.62)  # inches left, right, below, above one matrix
_INK, _SOFT, _PAPER, _EMPTY = "#20262d", "#4a5460", "#ffffff", "#eef0f2"
D = TypeVar("D", bound=Device)
_NAMES = {"gpu": "GPU", "cpu": "CPU"}


def draw_heat_maps(
    matrices: Matrices,
    topology: Topology | None,
    path: Path,
    title: str | None = None,
    words: Mapping[str, str] | None = None,
) -> None:
    """Write the drawing; the suffix names the format (.svg, or any that matplotlib has).

    `words` say what P2P on and off mean.

    Raises:
        ValueError: there is no matrix, or the format is not known.
        OSError, NotOurs: it cannot be written, or something else than a drawing is there.
    """
    names = [name for name in matrices.ids if matrices.entries[name]]
    if not names:
        raise ValueError("no matrix to draw")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    count = max(len(matrices.ids[name]) for name in names)
    # A row for each kind of matrix: without and with peer access side by side.
    scales = {
        unit: scale_of(matrices.entries[name] for name in names if unit_of(name) == unit)
        for unit in ("GB/s", "µs")
    }
    rows = [
        row for kind in ("uni", "bi", "latency_gpu", "latency_cpu") if (row := _of(names, kind))
    ]
    columns = max(map(len, rows))
    left, right, below, above = _MARGINS
    side = max(_SQUARE * count, 2.6)  # a small matrix still has room for its title
    width, height = left + side + right, above + side + below
    with matplotlib.rc_context(
        {
            "svg.hashsalt": "ringside",
            "svg.fonttype": "none",
            "pdf.fonttype": 42,
            "font.family": "sans-serif",
        }
    ):
        head = 1.2
        size = (columns * width, len(rows) * height + head)
        figure = pyplot.figure(figsize=size, facecolor=_PAPER)
        try:
            for number, row in enumerate(rows):
                for place, name in enumerate(row):
                    low = size[1] - head - (number + 1) * height + below
                    box = (
                        (place * width + left) / size[0],
                        low / size[1],
                        side / size[0],
                        side / size[1],
                    )
                    _paint(figure.add_axes(box), matrices, name, topology, scales[unit_of(name)])
            lines = [title or _devices(matrices), "row: who copies; dark: better; grey: within one"]
            lines += (
                ["all maps in GB/s have one scale of colours, all in µs another"]
                if len(names) > 1
                else []
            )
            lines += [f"P2P on: {words['enabled']}; off: {words['disabled']}"] if words else []
            for number, line in enumerate(lines):
                style: dict[str, Any] = {"fontsize": 8, "color": _SOFT}
                style = style if number else {"fontsize": 12, "color": _INK, "weight": "bold"}
                y = 1 - (0.3 + 0.22 * number) / size[1]
                figure.text(
                    left / size[0],
                    y,
                    visible(line, kept=""),
                    va="center",
                    parse_math=False,
                    **style,
                )
            metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(
                path.suffix.removeprefix(".") or "svg"
            )
            form, out = path.suffix.removeprefix(".") or "svg", io.BytesIO()
            figure.savefig(out, format=form, metadata=metadata, facecolor=_PAPER)
            write_named(path, out.getvalue())
        finally:
            pyplot.close(figure)


def _devices(matrices: Matrices) -> str:
    """Return a title for the GPUs: `4 GPUs (NVIDIA A100)`."""
    models = sorted({device["name"] for device in matrices.devices.values()})
    count = len({one for ids in matrices.ids.values() for one in ids})
    return f"{count} GPU{'s' * (count != 1)}" + (f" ({', '.join(models)})" if models else "")


def _of(names: list[str], kind: str) -> list[str]:
    return [name for name in names if name.startswith(kind)]


def unit_of(name: str) -> str:
    """Return the unit of a matrix."""
    return "µs" if name.startswith("latency") else "GB/s"


def scale_of(matrices: Iterable[Mapping[tuple[D, D], float]]) -> tuple[float, float]:
    """Return the least and the greatest value between two GPUs: maps of one unit that stand side by side share their colours."""
    between = [
        value for entries in matrices for (a, b), value in entries.items() if a != b and value > 0
    ]
    return (min(between), max(between)) if between else (1.0, 1.0)


def _paint(
    axes: Any, matrices: Matrices, name: str, topology: Topology | None, scale: tuple[float, float]
) -> None:
    squares(axes, matrices.ids[name], matrices.entries[name], unit_of(name), topology, scale)
    axes.set_title(title_of(name), fontsize=10, color=_INK, loc="left", pad=18)


def squares(
    axes: Any,
    ids: Sequence[D],
    entries: Mapping[tuple[D, D], float],
    unit: str,
    topology: Topology | None = None,
    scale: tuple[float, float] | None = None,
) -> None:
    """Draw a square for every ordered pair, row to column.

    Dark is better: fewer µs, more GB/s, by ratio; `scale` has the values of both ends, those of the matrix if it is None.
    Squares of a GPU with itself are grey.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    latency = unit == "µs"
    between = [value for (a, b), value in entries.items() if a != b and value > 0]
    low, high = scale_of([entries])
    ends = scale or (low, high)
    axes.set(xlim=(0, len(ids)), ylim=(len(ids), 0), aspect="equal")
    for y, a in enumerate(ids):
        for x, b in enumerate(ids):
            value = entries.get((a, b))
            fill = _EMPTY
            if value is not None and a != b:
                fill = to_hex(colormaps["cividis"](_shade(value, *ends, latency)))
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=fill, edgecolor=_PAPER, linewidth=1.5))
            if value is None:
                continue
            ink = _readable(fill)
            word = _link(topology, a, b)
            axes.text(
                x + 0.5,
                y + (0.4 if word else 0.5),
                _number(value),
                ha="center",
                va="center",
                fontsize=8,
                color=ink,
            )
            if word:
                axes.text(x + 0.5, y + 0.74, word, ha="center", va="center", fontsize=6, color=ink)
    middles = [number + 0.5 for number in range(len(ids))]
    axes.set_xticks(middles, list(map(str, ids)))
    axes.set_yticks(middles, list(map(str, ids)))
    axes.tick_params(length=0, labelsize=8, labelcolor=_INK, labeltop=True, labelbottom=False)
    for edge in axes.spines.values():
        edge.set_visible(False)
    if between:
        axes.set_xlabel(f"{_number(low)} to {_number(high)} {unit}", fontsize=8, color=_SOFT)


def title_of(name: str) -> str:
    """Return a matrix's title: `GPU latency, µs, P2P on, reads` for `latency_gpu_enabled_reads`."""
    words = name.split("_")
    state = "P2P on" if "enabled" in words else "P2P off"
    what = (
        f"{_NAMES[words[1]]} latency, µs"
        if words[0] == "latency"
        else f"{words[0].capitalize()}, GB/s"
    )
    return f"{what}, {state}" + (", reads" if words[-1] == "reads" else "")


def _shade(value: float, low: float, high: float, latency: bool) -> float:
    """Return the place of a value on the colour scale, by ratio: 0 is dark, the better end; 1 is light.

    Values within a few percent of each other look alike.
    """
    if value <= 0 or high <= low:
        return 0.0
    span = max(math.log(high / low), math.log(1.5))
    return math.log(value / low if latency else high / value) / span


def _readable(fill: str) -> str:
    """Return black or white, whichever has the higher contrast by relative luminance (WCAG 2)."""
    from matplotlib.colors import to_rgb

    linear = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in to_rgb(fill)
    )
    red, green, blue = linear
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def _number(value: float) -> str:
    """Write a number with at least three significant digits: 392, 38.6, 2.31."""
    return (
        f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def _link(topology: Topology | None, a: Device, b: Device) -> str:
    """Return the link class; empty for a GPU with itself and for a GPU that the topology lacks."""
    if topology is None or a == b or not {a, b} <= set(topology.gpus):
        return ""
    return topology.link_between(a, b)
