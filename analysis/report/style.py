"""The look of a report's figures, and how a figure becomes files and a part of the page.

Text stays text: it can be searched and takes the page's font. On the page, colours are the page's variables, so that a
figure follows a dark scheme; its files keep the colours of paper. The same figure always gives the same bytes.
"""

import contextlib
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from analysis.findings.model import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#1b1f24", "#5c6670", "#d5dae0", "#fffffe"
# Okabe and Ito's colours, told apart with any colour vision, without black and yellow (unreadable on paper, or lines of
# text); the second ones are lighter forms for dark pages.
COLOURS = {
    "blue": ("#0072b2", "#56a8e0"), "orange": ("#b86e00", "#e69f00"), "green": ("#008060", "#2cc295"),
    "vermillion": ("#c9530a", "#ff8a4c"), "purple": ("#a8527f", "#d98bb5"), "sky": ("#2c86b8", "#7cc4ee"),
    "grey": ("#6b7480", "#a3acb6"), "brown": ("#7d5a3c", "#c29b78"),
}  # fmt: skip
# A strategy keeps its colour in every figure of every report; the forms of one family share it and differ in the marker.
_FAMILIES = (
    ("nccl_allreduce", "blue"), ("none", "grey"), ("kvstore_device", "green"), ("kvstore_dist_sync", "purple"),
    ("kvstore_dist_async", "vermillion"), ("cpu_staged", "orange"), ("kvstore_local", "orange"),
)  # fmt: skip
_OTHERS = ("sky", "brown", "green", "purple")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
_STYLE: Any = {
    "svg.hashsalt": "ringside", "svg.fonttype": "none", "pdf.fonttype": 42, "text.parse_math": False,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 8.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5, "axes.grid": True, "axes.axisbelow": True, "grid.color": RULE, "grid.linewidth": 0.7,
    "xtick.color": MUTED, "ytick.color": MUTED, "text.color": INK, "figure.facecolor": PAPER, "axes.facecolor": "none",
    "savefig.facecolor": PAPER, "lines.linewidth": 1.8, "lines.markersize": 5, "axes.unicode_minus": True,
}  # fmt: skip


SCALE = 1.65  # pixels of a wide screen for a point of a drawing: as large as the text around it
LABEL_STEP = 0.062  # from one label beside the axes to the next, as a share of the axes' height: one line of text
LABEL_PLACE = 1.03  # of these labels, as a share of the axes' width


@dataclass(frozen=True)
class Picture:
    """A figure of the report: the names of its files, what it shows, and the drawing."""

    name: str
    caption: str
    svg: str  # a file of its own
    pdf: bytes  # empty: there is no such file
    card: bool = False  # keeps the colours of paper on the page too
    wide: bool = False  # takes the whole width of the page
    figure: "Figure | None" = field(default=None, compare=False, repr=False)  # what it was saved from, for notebooks

    @property
    def inline(self) -> str:
        """Return the drawing as an element of the page: scaled to its place, with its own identifiers and the page's colours."""
        svg = self.svg[self.svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        width = float(re.findall(r'viewBox="0 0 ([0-9.]+)', svg)[0]) * SCALE
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', rf'\1 style="max-width: {width:.0f}px"', svg, count=1)
        svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
        svg = re.sub(r'\bid="', f'id="{self.name}-', svg)
        svg = re.sub(r'(url\(|xlink:href=")#', rf"\1#{self.name}-", svg)
        # Only in styles, which matplotlib makes: a text may hold anything.
        svg = re.sub(r'style="[^"]*"', lambda style: self._style(style[0]), svg)
        return svg.replace("<svg ", '<svg role="img" aria-hidden="true" ', 1).strip()

    def _style(self, style: str) -> str:
        style = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font), sans-serif", style)
        if self.card:
            return style
        for colour, variable in _VARIABLES.items():
            style = style.replace(colour, variable)
        return style


_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    PAPER: "none",
    **{light: f"var(--{name})" for name, (light, _) in COLOURS.items()},
}


def colours(strategies: Iterable[str]) -> dict[str, str]:
    """Return {strategy: colour}; strategies that are not Ringside's take the colours that are left, by name."""
    found, others = {}, 0
    for name in sorted(set(strategies)):
        colour = next((colour for family, colour in _FAMILIES if name in (family, f"{family}_device")), None)
        if colour is None:
            colour, others = _OTHERS[others % len(_OTHERS)], others + 1
        found[name] = COLOURS[colour][0]
    return found


def marker(strategy: str) -> str:
    """Return the marker of a strategy: a family's form on GPUs, and the second of two with one colour, have their own."""
    if strategy.endswith("_device") and strategy != "kvstore_device":
        return "s"
    return "D" if strategy == "kvstore_local" else "o"


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Give figures that are made and rendered inside the look of the report."""
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(width: float, height: float) -> "tuple[Figure, Any]":
    """Return a figure of this size in inches and its axes. A width of 4.6 is readable on a phone and on paper."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def rendered(figure: "Figure", name: str, caption: str) -> Picture:
    """Return a figure as SVG and PDF, without a date and without the name of the program that wrote them."""
    figure.draw_without_rendering()  # lays out once for both files, which takes as long as drawing
    figure.set_layout_engine("none")
    files = {}
    for form, metadata in (("svg", {"Date": None}), ("pdf", {"CreationDate": None})):
        out = io.BytesIO()
        figure.savefig(out, format=form, metadata=metadata)
        files[form] = out.getvalue()
    return Picture(name, caption, files["svg"].decode(), files["pdf"], figure=figure)


def window(estimates: Sequence[Estimate], others: Sequence[float] = ()) -> tuple[float, float]:
    """Return the limits of an axis that shows estimates and other values; see `within`."""
    ends = [end for one in estimates for end in (one.low, one.high) if end is not None]
    return within([*(one.value for one in estimates), *others], ends)


def within(values: Sequence[float], ends: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis: they show every value, and clip intervals at 1.5 × the range of the values.

    Intervals from two runs are often much wider; the table has them whole.
    """
    least, most = min(values), max(values)
    room = 1.5 * max(most - least, 0.05 * max(abs(least), abs(most)))
    low, high = max(min([least, *ends]), least - room), min(max([most, *ends]), most + room)
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def spread(wanted: Sequence[float], least: float) -> list[float]:
    """Return places at least `least` apart for labels that want to be elsewhere, in the same order.

    They are as near to the wanted places as possible, by least squares (scipy: isotonic regression).
    """
    from scipy.optimize import isotonic_regression

    order = sorted(range(len(wanted)), key=lambda place: (wanted[place], place))
    steps = [number * least for number in range(len(order))]
    rising = isotonic_regression([wanted[place] - step for place, step in zip(order, steps, strict=True)]).x
    places = dict(zip(order, (float(one) + step for one, step in zip(rising, steps, strict=True)), strict=True))
    return [places[place] for place in range(len(wanted))]
