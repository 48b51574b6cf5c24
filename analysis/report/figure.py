"""A figure of a report: its look, its files, and its form on the page.

Text stays text: it can be searched and takes the page's font. On the page, colours are the page's
variables, so that a figure follows a dark scheme; its files keep the colours of paper. The same
figure always gives the same bytes.
"""

import contextlib
import importlib
import io
import itertools
import re
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from analysis.report.latex import latex
from analysis.report.table import Table

INK, MUTED, RULE, PAPER = "#1b1f24", "#5c6670", "#d5dae0", "#fffffe"
HATCH = "#ffffff"  # lines over a colour: on the page PAPER is transparent
# Okabe and Ito's colours without black and yellow, for paper and for dark pages: told apart with
# any colour vision.
COLOURS = {
    "blue": ("#0072b2", "#56a8e0"), "orange": ("#b86e00", "#e69f00"),
    "green": ("#008060", "#2cc295"), "vermillion": ("#c9530a", "#ff8a4c"),
    "purple": ("#a8527f", "#d98bb5"), "sky": ("#2c86b8", "#7cc4ee"), "grey": ("#6b7480", "#a3acb6"),
    "brown": ("#7d5a3c", "#c29b78"), "navy": ("#1d1d7a", "#8f8fff"),
    "maroon": ("#701212", "#ff5f5f"), "violet": ("#6a2fd0", "#ac59ff"),
    "sand": ("#9a8f4e", "#f0e442"), "plum": ("#4a2845", "#fbe0ff"),
}  # fmt: skip
GREY, HIGHLIGHT = COLOURS["grey"][0], COLOURS["vermillion"][0]
# The colour of a strategy in every figure of every report; `NAME_device` has that of NAME.
STRATEGIES = {
    "nccl_allreduce": "blue", "none": "grey", "kvstore_device": "green",
    "kvstore_dist_sync": "purple", "kvstore_dist_async": "vermillion", "cpu_staged": "orange",
    "kvstore_local": "orange", "fsdp": "navy", "hsdp": "maroon", "zero1": "violet",
    "zero2": "sand", "local_sgd": "plum",
}  # fmt: skip
OTHER_STRATEGIES = ("sky", "brown", "green", "purple")
ON_PAGE = "page"
# Readable on a phone; a paper's one or two columns.
WIDTHS_IN = {ON_PAGE: 4.6, "single": 3.3, "double": 7.0}
SCREEN_IN = 8.2  # of the figure beside the answer: as wide as the page
PIXELS_PER_PT = 1.65  # of a wide screen: text is as large as that of the page
TEXT_PT = 8
FILES: Any = {"svg.hashsalt": "ringside", "svg.fonttype": "none", "pdf.fonttype": 42}
_STYLE: Any = FILES | {
    "text.parse_math": False, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
    "font.size": TEXT_PT, "text.color": INK, "figure.facecolor": PAPER, "savefig.facecolor": PAPER,
    "axes.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "axes.labelsize": TEXT_PT,
    "axes.axisbelow": True, "axes.unicode_minus": True, "axes.grid": True, "grid.color": RULE,
    "grid.linewidth": 0.7, "xtick.color": MUTED, "ytick.color": MUTED,
    "lines.linewidth": 1.8, "lines.markersize": 5,
}  # fmt: skip
_PAGE_COLOURS = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "none"}
_PAGE_COLOURS |= {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
_width_in: ContextVar[float] = ContextVar("width_in", default=WIDTHS_IN[ON_PAGE])


@dataclass(frozen=True)
class Figure:
    """A figure of the report: the names of its files, what it shows, and the drawing."""

    name: str
    caption: str
    svg: str  # a file of its own
    pdf: bytes  # empty: there is no such file
    card: bool = False  # keeps the colours of paper on the page too
    wide: bool = False  # takes the whole width of the page
    figure: Any = field(default=None, compare=False, repr=False)  # of matplotlib, for notebooks
    data: Table | None = field(default=None, compare=False, repr=False)  # what is drawn, as numbers
    on_page: tuple[str, ...] = ()  # drawings for a screen and for a phone; empty: that of the file

    def to_latex(self) -> str:
        r"""Return a float to be \input: over two columns where it is wider than one."""
        environment, size = "figure*", ""
        if self.card:
            size = r"[width=\linewidth,height=0.55\textheight,keepaspectratio]"
        elif self.figure is not None and self.figure.get_figwidth() <= WIDTHS_IN["single"]:
            environment = "figure"
        lines = [
            r"% needs \usepackage{graphicx} and \graphicspath, which names the folder of the PDF",
            rf"\begin{{{environment}}}[htbp]",
            r"\centering",
            rf"\includegraphics{size}{{{self.name}.pdf}}",
            rf"\caption{{{latex(self.caption)}}}\label{{fig:{self.name}}}",
            rf"\end{{{environment}}}",
        ]
        return "\n".join([*lines, ""])

    @property
    def drawings(self) -> list[str]:
        """The drawing as an element of the page, or one for a screen and one for a phone."""
        drawings = []
        for index, svg in enumerate(self.on_page or (self.svg,)):
            drawings.append(self._inline(svg, f"{self.name}{'-phone' * index}"))
        return drawings

    def _inline(self, svg: str, name: str) -> str:
        def page_style(match: re.Match[str]) -> str:
            style = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font), sans-serif", match[0])
            if not self.card:
                for colour, variable in _PAGE_COLOURS.items():
                    style = style.replace(colour, variable)
            return style

        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        width = float(re.findall(r'viewBox="0 0 ([0-9.]+)', svg)[0]) * PIXELS_PER_PT
        size = rf'\1 style="max-width: {width:.0f}px"'
        svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', size, svg, count=1)
        svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
        svg = re.sub(r'\bid="', f'id="{name}-', svg)
        svg = re.sub(r'(url\(|xlink:href=")#', rf"\1#{name}-", svg)
        # Colours are replaced in styles only, which matplotlib makes: a text may hold anything.
        svg = re.sub(r'style="[^"]*"', page_style, svg)
        return svg.replace("<svg ", '<svg role="img" aria-hidden="true" ', 1).strip()


def colours(strategies: Iterable[str]) -> dict[str, str]:
    """Return {strategy: colour}; strategies of others take the colours that are left, by name."""
    others = itertools.cycle(OTHER_STRATEGIES)
    chosen: dict[str, str] = {}
    for name in sorted(set(strategies)):
        colour = STRATEGIES.get(name) or STRATEGIES.get(name.removesuffix("_device"))
        chosen[name] = COLOURS[colour or next(others)][0]
    return chosen


@contextlib.contextmanager
def style(width: str = ON_PAGE) -> Iterator[None]:
    """Give figures that are made inside the look of the report, and a width of WIDTHS_IN."""
    import matplotlib

    before = _width_in.set(WIDTHS_IN[width])
    try:
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            yield
    finally:
        _width_in.reset(before)


def figure_width() -> float:
    """Return the width of the current figures, in inches."""
    return _width_in.get()


def for_width(amount: float) -> int:
    """Scale a count of characters or ticks from the page to the width of the figures."""
    return round(amount * _width_in.get() / WIDTHS_IN[ON_PAGE])


def as_figure(figure: Any, name: str, caption: str, data: Table) -> Figure:
    """Return a figure as SVG and PDF, without the date and the name of the writing program."""
    engine = figure.get_layout_engine()
    if engine:
        # Once for both files: each would lay out anew, and draw twice for it.
        engine.execute(figure)
        figure.set_layout_engine(None)
    svg = saved(figure, "svg").decode()
    return Figure(name, caption, svg, saved(figure, "pdf"), figure=figure, data=data)


def for_screen_and_phone(drawn: Figure, screen_in: float = SCREEN_IN) -> Figure:
    """Return a figure with drawings for the page: for a screen, and as wide as a phone."""
    canvas, svgs = drawn.figure, list[str]()
    before, height = canvas.get_size_inches()
    legend = canvas.axes[0].get_legend()
    for width in (screen_in, WIDTHS_IN["single"], before):
        if width == before and not svgs:
            svgs.append(drawn.svg)
            continue
        canvas.set_size_inches(width, height)
        if legend:  # on a phone below: beside it little would be left
            below = width == WIDTHS_IN["single"]
            legend.set_loc("upper left" if below else "center left")
            legend.set_bbox_to_anchor((0.0, -0.25) if below else (1.0, 0.5))
            lines = below * (1 + len(legend.get_texts()))
            canvas.set_size_inches(width, height + 0.17 * lines)
        canvas.set_layout_engine("constrained")
        canvas.get_layout_engine().execute(canvas)
        canvas.set_layout_engine(None)
        if len(svgs) < 2:
            svgs.append(saved(canvas, "svg").decode())
    return replace(drawn, on_page=tuple(svgs), wide=screen_in == SCREEN_IN)


def for_phone(drawn: Figure) -> Figure:
    """Return a figure with a drawing for phones too, if it needs one."""
    canvas = drawn.figure
    if drawn.card or drawn.on_page or canvas is None:
        return drawn
    if canvas.get_figwidth() <= WIDTHS_IN["single"]:
        return drawn
    return for_screen_and_phone(drawn, canvas.get_figwidth())


def saved(figure: Any, form: str) -> bytes:
    """Return a figure of matplotlib as a file; equal figures give equal bytes.

    Fonts are cut for a PDF without the tables by which programs lay out text: cutting those takes
    a third of its time, and matplotlib has no option for it.
    """
    options = importlib.import_module("fontTools.subset").Options
    before = options._drop_tables_default
    options._drop_tables_default = [*before, "GSUB", "GPOS", "GDEF"]
    out = io.BytesIO()
    try:
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
        figure.savefig(out, format=form, metadata=metadata)
    finally:
        options._drop_tables_default = before
    return out.getvalue()
