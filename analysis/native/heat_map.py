"""Heat maps of numbers between GPUs: a square for each ordered pair, with its value.

The colours are those of cividis: colour-blind people see them alike, and they keep their order in
grey. Dark is always the better end. The diagonal (copies within one GPU) stays grey.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from analysis.topology.model import Device

_INK, _SOFT, _PAPER, _EMPTY = "#20262d", "#4a5460", "#ffffff", "#eef0f2"
D = TypeVar("D", bound=Device)
Scale = tuple[float, float]  # the least and the greatest value between two GPUs


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
            axes.text(x + 0.5, y + 0.5, _number(value), fontsize=8, **text)
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
