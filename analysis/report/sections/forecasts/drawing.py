"""What the figures of forecasts take from the charts, until they are charts themselves."""

from typing import Any

from analysis.report.charts import LABEL_PT, LABEL_X, MARGINS_IN, _new, curve_height, spread
from analysis.report.figure import INK, MUTED, PAPER, RULE, colours, figure_width, marker
from analysis.report.figure import Figure as Picture
from analysis.report.figure import as_figure as rendered
from analysis.report.table import numbers_table as drawn

LABEL_PLACE = LABEL_X
__all__ = ["INK", "LABEL_PLACE", "MUTED", "PAPER", "RULE", "Picture", "colours", "curve_height", "drawn", "figure_width",
           "marker", "rendered", "spread"]  # fmt: skip


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure of this size in inches and its axes."""
    return _new(height, width)


def label_step(axes: Any) -> float:
    """Return how far labels beside the axes must be apart, as a share of the axes' height."""
    return LABEL_PT / 72 / float(axes.figure.get_figheight() - MARGINS_IN)


def within(values: list[float], ends: list[float]) -> tuple[float, float]:
    """Return the limits of an axis that shows values and the ends of intervals."""
    least, most = min(values), max(values)
    room = 1.5 * max(most - least, 0.05 * max(abs(least), abs(most)))
    low, high = max(min([least, *ends]), least - room), min(max([most, *ends]), most + room)
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin
