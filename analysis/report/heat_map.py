"""Heat maps of numbers between GPUs: a square for each ordered pair, with its value.

The colours are those of cividis: colour-blind people see them alike, and they keep their order in
grey. Dark is always the better end. The diagonal (copies within one GPU) stays grey.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.report.charts import new_axes
from analysis.report.figure import MUTED, Figure, as_figure, figure_width
from analysis.report.numbers import number
from analysis.report.table import numbers_table

PAPER, EMPTY = "#ffffff", "#eef0f2"
UNIT_KEYS = {"µs": "us", "GB/s": "gb_per_s"}
LEAST_CONTRAST = 1.5  # values within a few percent of each other look alike
BLACK_FROM = 0.46  # of cividis; on darker squares a white text has more contrast (WCAG 2)
Entries = Mapping[tuple[Any, Any], float]  # {(row, column): value}
Scale = tuple[float, float]  # the least and the greatest value between two GPUs


def heat_map_figure(
    name: str, caption: str, ids: Sequence[Any], entries: Entries, unit: str, scale: Scale
) -> Figure:
    """Return a matrix of numbers between devices, by a scale of colours that maps share."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    width, side = figure_width(), 0.5 * len(ids)
    figure, axes = new_axes(min(width, 1.2 + side), min(width, 1.0 + side))
    axes.set(xlim=(0, len(ids)), ylim=(len(ids), 0), aspect="equal")
    rows = []
    for (row, column), value in entries.items():
        rows.append((row, column, value))
        x, y = ids.index(column), ids.index(row)
        ink = "black"
        fill: Any = EMPTY
        if row != column:
            light = shade(value, scale, unit)
            fill = colormaps["cividis"](light)
            ink = "black" if light >= BLACK_FROM else "white"
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=fill, edgecolor=PAPER, linewidth=1.5))
        axes.text(x + 0.5, y + 0.5, number(value), ha="center", va="center", color=ink)
    middles = [position + 0.5 for position in range(len(ids))]
    axes.set_xticks(middles, list(map(str, ids)))
    axes.set_yticks(middles, list(map(str, ids)))
    axes.tick_params(length=0, labelcolor=MUTED, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    low, high = map(number, scale_of([entries]))
    axes.set_xlabel(f"{low} to {high} {unit}", color=MUTED)
    data = numbers_table(("from_gpu", "to_gpu", UNIT_KEYS[unit]), rows)
    return as_figure(figure, name, caption, data)


def scale_of(matrices: Iterable[Entries]) -> Scale:
    """Return the least and the greatest value between two GPUs of maps that share their colours."""
    values = []
    for entries in matrices:
        for (row, column), value in entries.items():
            if row != column and value > 0:
                values.append(value)
    if not values:
        return 1.0, 1.0
    return min(values), max(values)


def shade(value: float, scale: Scale, unit: str) -> float:
    """Return where a value is on the colour scale, by ratio: 0 is dark, the better end; 1 is light.

    Fewer µs and more GB/s are better.
    """
    low, high = scale
    if value <= 0 or high <= low:
        return 0.0
    ratio = high / value
    if unit == "µs":
        ratio = value / low
    return math.log(ratio) / math.log(max(high / low, LEAST_CONTRAST))
