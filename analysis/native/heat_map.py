"""Heat maps of p2p matrices: a square for each ordered pair, with its value and link class.

The colours are those of cividis: colour-blind people see them alike, and they keep their order in
grey. Dark is always the better end. The diagonal (copies within one GPU) has its own scale and
stays grey. Equal input gives equal bytes.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from analysis.native.p2p import Matrices
from analysis.text import count
from analysis.topology.model import Device, Topology
from benchmarks.record.safe_files import write_named
from benchmarks.record.safe_text import visible

_SQUARE = 0.62  # inches
_LEFT, _RIGHT, _BELOW, _ABOVE = 0.55, 0.15, 0.5, 0.62  # inches around one matrix
_HEAD = 1.2  # inches of the lines of text above all
_LEAST_SIDE = 2.6  # inches: a small matrix still has room for its title
_INK, _SOFT, _PAPER, _EMPTY = "#20262d", "#4a5460", "#ffffff", "#eef0f2"
_STYLE: Any = {
    "svg.hashsalt": "ringside",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.family": "sans-serif",
}
# A row for each kind of matrix: without and with peer access side by side.
_KINDS = ("uni", "bi", "latency_gpu", "latency_cpu")
D = TypeVar("D", bound=Device)
Scale = tuple[float, float]  # the least and the greatest value between two GPUs


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
    from matplotlib.figure import Figure

    rows = []
    for kind in _KINDS:
        row = [name for name in names if name.startswith(kind)]
        if row:
            rows.append(row)
    scales = {}
    for unit in ("GB/s", "µs"):
        scales[unit] = scale_of(matrices.entries[name] for name in names if unit_of(name) == unit)
    lines = [title or _title_of_gpus(matrices), "row: who copies; dark: better; grey: within one"]
    if len(names) > 1:
        lines.append("all maps in GB/s have one scale of colours, all in µs another")
    if words:
        lines.append(f"P2P on: {words['enabled']}; off: {words['disabled']}")
    side = max(_SQUARE * max(len(matrices.ids[name]) for name in names), _LEAST_SIDE)
    width, height = _LEFT + side + _RIGHT, _ABOVE + side + _BELOW
    full_width, full_height = width * max(map(len, rows)), len(rows) * height + _HEAD
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(full_width, full_height), facecolor=_PAPER)
        for row_number, row in enumerate(rows):
            bottom = full_height - _HEAD - (row_number + 1) * height + _BELOW
            for column, name in enumerate(row):
                left = column * width + _LEFT
                box = (left / full_width, bottom / full_height)
                axes = figure.add_axes((*box, side / full_width, side / full_height))
                ids, entries, unit = matrices.ids[name], matrices.entries[name], unit_of(name)
                squares(axes, ids, entries, unit, topology, scales[unit])
                axes.set_title(_title_of(name), fontsize=10, color=_INK, loc="left", pad=18)
        for number, line in enumerate(lines):
            style: dict[str, Any] = {"fontsize": 8, "color": _SOFT}
            if number == 0:
                style = {"fontsize": 12, "color": _INK, "weight": "bold"}
            y = 1 - (0.3 + 0.22 * number) / full_height
            text = visible(line, kept="")
            figure.text(_LEFT / full_width, y, text, va="center", parse_math=False, **style)
        form = path.suffix.removeprefix(".") or "svg"
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
        content = io.BytesIO()
        figure.savefig(content, format=form, metadata=metadata, facecolor=_PAPER)
    write_named(path, content.getvalue())


def _title_of_gpus(matrices: Matrices) -> str:
    """Return a title for the GPUs: `4 GPUs (NVIDIA A100)`."""
    gpus = {gpu for ids in matrices.ids.values() for gpu in ids}
    models = sorted({device["name"] for device in matrices.devices.values()})
    title = count(len(gpus), "GPU")
    return f"{title} ({', '.join(models)})" if models else title


def _title_of(name: str) -> str:
    """Return a matrix's title: `GPU latency, µs, P2P on, reads` for `latency_gpu_enabled_reads`."""
    words = name.split("_")
    title = f"{words[0].capitalize()}, GB/s"
    if words[0] == "latency":
        title = f"{words[1].upper()} latency, µs"
    title += ", P2P on" if "enabled" in words else ", P2P off"
    return f"{title}, reads" if words[-1] == "reads" else title


def unit_of(name: str) -> str:
    """Return the unit of a matrix."""
    return "µs" if name.startswith("latency") else "GB/s"


def scale_of(matrices: Iterable[Mapping[tuple[D, D], float]]) -> Scale:
    """Return the least and the greatest value between two GPUs.

    Maps of one unit that stand side by side share their colours.
    """
    values = []
    for entries in matrices:
        values += [value for (a, b), value in entries.items() if a != b and value > 0]
    return (min(values), max(values)) if values else (1.0, 1.0)


def squares(
    axes: Any,
    ids: Sequence[D],
    entries: Mapping[tuple[D, D], float],
    unit: str,
    topology: Topology | None = None,
    scale: Scale | None = None,
) -> None:
    """Draw a square for every ordered pair, row to column.

    Dark is better: fewer µs, more GB/s, by ratio; without `scale` the matrix has its own. Squares
    of a GPU with itself are grey.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    low, high = scale_of([entries])
    axes.set(xlim=(0, len(ids)), ylim=(len(ids), 0), aspect="equal")
    for y, a in enumerate(ids):
        for x, b in enumerate(ids):
            value = entries.get((a, b))
            fill = _EMPTY
            if value is not None and a != b:
                fill = to_hex(colormaps["cividis"](_shade(value, *(scale or (low, high)), unit)))
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=fill, edgecolor=_PAPER, linewidth=1.5))
            if value is None:
                continue
            text: dict[str, Any] = {"ha": "center", "va": "center", "color": _readable(fill)}
            word = ""
            if topology is not None and a != b and {a, b} <= set(topology.gpus):
                word = topology.link_between(a, b)
            axes.text(x + 0.5, y + (0.4 if word else 0.5), _number(value), fontsize=8, **text)
            if word:
                axes.text(x + 0.5, y + 0.74, word, fontsize=6, **text)
    middles = [position + 0.5 for position in range(len(ids))]
    axes.set_xticks(middles, list(map(str, ids)))
    axes.set_yticks(middles, list(map(str, ids)))
    axes.tick_params(length=0, labelsize=8, labelcolor=_INK, labeltop=True, labelbottom=False)
    for edge in axes.spines.values():
        edge.set_visible(False)
    if any(a != b and value > 0 for (a, b), value in entries.items()):
        axes.set_xlabel(f"{_number(low)} to {_number(high)} {unit}", fontsize=8, color=_SOFT)


def _shade(value: float, low: float, high: float, unit: str) -> float:
    """Return where a value is on the colour scale, by ratio: 0 is dark, the better end; 1 is light.

    Values within a few percent of each other look alike.
    """
    if value <= 0 or high <= low:
        return 0.0
    ratio = value / low if unit == "µs" else high / value
    return math.log(ratio) / max(math.log(high / low), math.log(1.5))


def _readable(fill: str) -> str:
    """Return black or white, whichever has the higher contrast by relative luminance (WCAG 2)."""
    from matplotlib.colors import to_rgb

    linear = []
    for part in to_rgb(fill):
        linear.append(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def _number(value: float) -> str:
    """Write a number with at least three significant digits: 392, 38.6, 2.31."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
