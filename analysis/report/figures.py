"""What figures of rows share: a row with its label above it, a dot with its interval, a note on the rows left out."""

from collections.abc import Sequence
from typing import Any

from analysis.report.style import COLOURS, INK, MUTED, RULE, figure_width, for_width, new_figure
from analysis.study.estimates import Estimate
from analysis.text import count, single_line

ROW = 0.4  # inches of a row with its label above
ROW_LENGTH = 66  # characters of that label in a figure of the page
ROWS = 20
REST = COLOURS["grey"][0]


def more_in(everything: Sequence[object], most: int, noun: str, file: str) -> str:
    """Return ` 3 more rows are in wires.csv.`; empty if all are drawn."""
    left = len(everything) - most
    return f" {count(left, noun)} {'is' if left == 1 else 'are'} in {file}." if left > 0 else ""


def text_right_of(axes: Any, x: float, y: float, text: str) -> None:
    """Write a text to the right of a point."""
    axes.annotate(
        text,
        (min(x, axes.get_xlim()[1]), y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        annotation_clip=False,
    )


def bare(axes: Any) -> None:
    """Remove what axes of rows do not need: lines between rows, ticks, the left spine."""
    axes.grid(axis="y", visible=False)
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.xaxis.label.set_color(INK)


def rows_figure(count: int) -> tuple[Any, Any]:
    """Return a figure whose rows have their labels above them, so that long labels take no width."""
    figure, axes = new_figure(figure_width(), 0.55 + ROW * count)
    axes.set_ylim(count - 0.3, -0.75)
    axes.set_yticks([])
    bare(axes)
    axes.grid(visible=False)
    axes.hlines(
        [y + 0.08 for y in range(count)],
        0,
        1,
        transform=axes.get_yaxis_transform(),
        color=RULE,
        lw=0.7,
        zorder=0,
    )
    return figure, axes


def row_label(axes: Any, y: float, text: str, right: str = "") -> None:
    """Write a row's name above it on the left and its number on the right; together they fit the figure's width."""
    at = axes.get_yaxis_transform()
    axes.text(
        0.0,
        y - 0.3,
        single_line(text, max(16, for_width(ROW_LENGTH) - len(right))),
        transform=at,
        va="center",
        fontsize=8,
    )
    axes.text(1.0, y - 0.3, right, transform=at, va="center", ha="right", fontsize=8, color=MUTED)


def dot(axes: Any, y: float, value: Estimate, colour: str, form: str) -> None:
    """Draw a value with its interval in a row."""
    if value.low is not None and value.high is not None:
        axes.plot([value.low, value.high], [y + 0.08] * 2, color=colour, lw=1.6, zorder=2)
    axes.plot(value.value, y + 0.08, form, color=colour, zorder=3)
