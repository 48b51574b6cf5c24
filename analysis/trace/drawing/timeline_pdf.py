"""A timeline's SVG as PDF, for papers: the few elements that analysis.trace.drawing.timeline draws, drawn again by matplotlib.

The drawing of a record may be edited by anybody: it is read as numbers, colours and text, and nothing in it is followed.
"""

import io
import re
import warnings
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

from benchmarks.record.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN = 7.0
_ELEMENTS = 20_000  # more than 16 ranks have
_SVG = "{http://www.w3.org/2000/svg}"
_FONT_PX = {"title": (15, "bold"), "rank": (12, "bold"), "": (11, "normal")}
_PATTERNS = {
    "url(#copy)": ("#cfe8da", "||||||", "#2e6b4a"),
    "url(#wait)": ("#fdf0e4", "//////", "#d9641e"),
}
_COLOUR = re.compile(r"#[0-9a-f]{6}")
_STEP = re.compile(r"([MVhvz])([-0-9. ]*)")
_STYLE: Any = {
    "pdf.fonttype": 42, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "text.parse_math": False,
    "hatch.linewidth": 0.4,
}  # fmt: skip


def timeline_pdf(svg: str) -> bytes:
    """Return the PDF of a timeline's SVG. Equal drawings give equal bytes.

    Raises:
        ValueError: it is no drawing of a timeline (xml.etree.ElementTree.ParseError: no XML).
    """
    import matplotlib
    from matplotlib.figure import Figure

    if "<!" in svg:  # entities may grow without bound
        raise ValueError("a timeline has no declarations")
    root = ET.fromstring(svg)
    width, height = (_numbers(root.get("viewBox", "")) or [0.0] * 4)[2:]
    if not (0 < width < 1e5 and 0 < height < 1e5):
        raise ValueError(f"a timeline of {width} × {height} px")
    if len(root) > _ELEMENTS:
        raise ValueError(f"a timeline of {len(root):,} elements")
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(WIDTH_IN, WIDTH_IN * height / width))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        point = 72 * WIDTH_IN / width  # of a pixel
        for order, element in enumerate(root):
            _draw(axes, element, point, order)
        out = io.BytesIO()
        figure.savefig(out, format="pdf", metadata={"CreationDate": None})
    return out.getvalue()


def _draw(axes: "Axes", element: ET.Element, point: float, order: int) -> None:
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path

    kind, get = element.tag.removeprefix(_SVG), element.get
    if kind == "text":
        classes = get("class", "").split()
        size, weight = next((_FONT_PX[one] for one in classes if one in _FONT_PX), _FONT_PX[""])
        side = "right" if "end" in classes else "center" if "mid" in classes else "left"
        axes.text(
            float(get("x", "")), float(get("y", "")), visible(element.text or "", kept=""), fontsize=size * point,
            weight=weight, ha=side, va="baseline", color="#4a5460" if "soft" in classes else "#20262d", zorder=order,
        )  # fmt: skip
        return
    look = _look(element, point) | {"zorder": order}
    if kind == "rect":
        x, y = float(get("x", "0")), float(get("y", "0"))
        axes.add_patch(Rectangle((x, y), float(get("width", "")), float(get("height", "")), **look))
    elif kind == "path":
        corners, codes = _path(get("d", ""))
        axes.add_patch(PathPatch(Path(corners, codes), **look))


def _look(element: ET.Element, point: float) -> dict[str, Any]:
    """Return how a shape is filled and outlined; a pattern is a hatch."""
    fill, stroke = element.get("fill", "none"), element.get("stroke", "none")
    ground, hatch, ink = _PATTERNS.get(fill, (fill, None, stroke))
    width = float(element.get("stroke-width", "1")) * point
    return {
        "facecolor": ground if _COLOUR.fullmatch(ground) else "none",
        "edgecolor": ink if _COLOUR.fullmatch(ink) else "none",
        "linewidth": width if _COLOUR.fullmatch(stroke) else 0.0,
        "hatch": hatch,
    }


def _path(text: str) -> tuple[list[tuple[float, float]], list[int]]:
    """Return the corners of a path of M, V, h, v and z, and matplotlib's codes: 1 begins, 2 goes on, 79 closes."""
    corners: list[tuple[float, float]] = []
    codes: list[int] = []
    x = y = 0.0
    for step, words in _STEP.findall(text):
        numbers = _numbers(words)
        if step == "M":
            x, y = numbers
        elif step == "V":
            (y,) = numbers
        elif step in "hv":
            x, y = (x + numbers[0], y) if step == "h" else (x, y + numbers[0])
        corners.append((x, y))
        codes.append({"M": 1, "z": 79}.get(step, 2))
    return corners, codes


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]
