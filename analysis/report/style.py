"""The look of a report's figures, and how a figure becomes files and a part of the page.

Text stays text: it can be searched and takes the page's font. On the page, colours are the page's variables, so that a
figure follows a dark scheme; its files keep the colours of paper. The same figure always gives the same bytes.
"""

import contextlib
import importlib
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from analysis.report.tables import Column, Table, Value
from analysis.study.estimates import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#1b1f24", "#5c6670", "#d5dae0", "#fffffe"
HATCH = "#ffffff"  # lines over a colour: on the page PAPER is transparent
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
# Lines are told apart in grey too: (points drawn, left out, …).
_LINES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.6)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (3, 1)),
    (0, (8, 2)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
TEXT_PT = 8
OF_LAYOUT = ("GSUB", "GPOS", "GDEF")  # tables of a font
_STYLE: Any = {
    "svg.hashsalt": "ringside", "svg.fonttype": "none", "pdf.fonttype": 42, "text.parse_math": False,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": TEXT_PT,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED,
    "axes.labelsize": TEXT_PT, "axes.grid": True, "axes.axisbelow": True, "grid.color": RULE, "grid.linewidth": 0.7,
    "xtick.color": MUTED, "ytick.color": MUTED, "text.color": INK, "figure.facecolor": PAPER, "axes.facecolor": "none",
    "savefig.facecolor": PAPER, "lines.linewidth": 1.8, "lines.markersize": 5, "axes.unicode_minus": True,
}  # fmt: skip


SCALE = 1.65  # pixels of a wide screen for a point of a drawing: as large as the text around it
ON_PAGE = "page"
# Of a figure: readable on a phone; a paper's one or two columns.
WIDTHS_IN = {ON_PAGE: 4.6, "single": 3.3, "double": 7.0}
LABEL_PT = 10.7  # from one label beside the axes to the next: one line of text
AROUND_IN = 0.5  # of a figure's height, above and below its axes
LABEL_PLACE, SAMPLE = (
    1.03,
    0.09,
)  # of these labels, and of the piece of line before them, as shares of the axes' width


@dataclass(frozen=True)
class Picture:
    """A figure of the report: the names of its files, what it shows, and the drawing."""

    name: str
    caption: str
    svg: str  # a file of its own
    pdf: bytes  # empty: there is no such file
    card: bool = False  # keeps the colours of paper on the page too
    wide: bool = False  # takes the whole width of the page
    figure: "Figure | None" = field(
        default=None, compare=False, repr=False
    )  # what it was saved from, for notebooks
    data: Table | None = field(
        default=None, compare=False, repr=False
    )  # the numbers that are drawn

    @property
    def inline(self) -> str:
        """Return the drawing as an element of the page: scaled to its place, with its own identifiers and the page's colours."""
        svg = self.svg[self.svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        width = float(re.findall(r'viewBox="0 0 ([0-9.]+)', svg)[0]) * SCALE
        svg = re.sub(
            r'(<svg[^>]*?) width="[^"]*"', rf'\1 style="max-width: {width:.0f}px"', svg, count=1
        )
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
        colour = next(
            (colour for family, colour in _FAMILIES if name in (family, f"{family}_device")), None
        )
        if colour is None:
            colour, others = _OTHERS[others % len(_OTHERS)], others + 1
        found[name] = COLOURS[colour][0]
    return found


def line_style(place: int) -> Any:
    """Return the dashes of a figure's first, second, … curve."""
    return _LINES[place % len(_LINES)]


def curve_label(axes: Any, text: str, y: float, place: int, look: dict[str, Any]) -> None:
    """Write a curve's name beside the axes, at a share of their height, after a piece of its line."""
    at = {"transform": axes.transAxes, "clip_on": False}
    length = SAMPLE * WIDTHS_IN[ON_PAGE] / figure_width()
    middle, end = LABEL_PLACE + length / 2, LABEL_PLACE + length
    axes.plot(
        [LABEL_PLACE, middle, end],
        [y] * 3,
        ls=line_style(place),
        lw=1.4,
        markevery=[1],
        **at,
        **look,
    )
    beside = (end + 0.02, y)
    axes.annotate(
        text,
        beside,
        xycoords="axes fraction",
        va="center",
        color=look["color"],
        annotation_clip=False,
    )


def marker(strategy: str) -> str:
    """Return the marker of a strategy: a family's form on GPUs, and the second of two with one colour, have their own."""
    if strategy.endswith("_device") and strategy != "kvstore_device":
        return "s"
    return "D" if strategy == "kvstore_local" else "o"


_width_in: ContextVar[float] = ContextVar("width_in", default=WIDTHS_IN[ON_PAGE])


@contextlib.contextmanager
def style(width: str = ON_PAGE) -> Iterator[None]:
    """Give figures that are made and rendered inside the look of the report, and a width of WIDTHS_IN."""
    import matplotlib

    before = _width_in.set(WIDTHS_IN[width])
    try:
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            yield
    finally:
        _width_in.reset(before)


def figure_width() -> float:
    """Return the width of the figures that are made now, in inches."""
    return _width_in.get()


def for_width(amount: float) -> int:
    """Return how many characters or ticks a figure has room for that has room for so many on the page."""
    return round(amount * figure_width() / WIDTHS_IN[ON_PAGE])


def curve_height(height: float) -> float:
    """Return the height of a figure of curves that has this height on the page, in inches."""
    return float(height * (figure_width() / WIDTHS_IN[ON_PAGE]) ** 0.6)


def label_step(axes: Any) -> float:
    """Return how far labels beside the axes must be apart, as a share of the axes' height."""
    return LABEL_PT / 72 / float(axes.figure.get_figheight() - AROUND_IN)


def drawn(keys: Sequence[str], rows: Iterable[Sequence[Value]]) -> Table:
    """Return the numbers that a figure shows, for its CSV; keys hold units, an estimate has the ends of its interval too."""
    every = tuple(map(tuple, rows))
    bounded = [any(isinstance(row[place], Estimate) for row in every) for place in range(len(keys))]
    columns = (Column(key, key, "number", one) for key, one in zip(keys, bounded, strict=True))
    return Table("", "", tuple(columns), every)


def new_figure(width: float, height: float) -> "tuple[Figure, Any]":
    """Return a figure of this size in inches and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def rendered(figure: "Figure", name: str, caption: str, data: Table) -> Picture:
    """Return a figure as SVG and PDF, without a date and without the name of the program that wrote them."""
    if engine := figure.get_layout_engine():
        engine.execute(
            figure
        )  # once for both files: each would lay out anew, and draw twice for it
        figure.set_layout_engine(None)
    files = {}
    with _fonts_without_layout():
        for form, metadata in (("svg", {"Date": None}), ("pdf", {"CreationDate": None})):
            out = io.BytesIO()
            figure.savefig(out, format=form, metadata=metadata)
            files[form] = out.getvalue()
    return Picture(name, caption, files["svg"].decode(), files["pdf"], figure=figure, data=data)


@contextlib.contextmanager
def _fonts_without_layout() -> Iterator[None]:
    """Have fonts cut for a PDF without the tables by which programs lay out text.

    The text of a PDF is laid out, and to cut those tables takes a third of the time of a PDF. matplotlib cuts fonts with
    fontTools, which it needs, and has no option for it.
    """
    options = importlib.import_module("fontTools.subset").Options
    kept = options._drop_tables_default
    options._drop_tables_default = [*kept, *OF_LAYOUT]
    try:
        yield
    finally:
        options._drop_tables_default = kept


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
    rising = isotonic_regression(
        [wanted[place] - step for place, step in zip(order, steps, strict=True)]
    ).x
    places = dict(
        zip(
            order, (float(one) + step for one, step in zip(rising, steps, strict=True)), strict=True
        )
    )
    return [places[place] for place in range(len(wanted))]
