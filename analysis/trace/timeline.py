"""Draw a timeline of a trace as SVG: a lane per rank and stream, and one of exposed communication.

Plain SVG on white works on a dark page and on paper. Hatches and shades separate the kinds without
colour. Thousands of kernels become some hundred boxes: boxes closer than a fraction of a pixel are
joined. Equal traces give equal bytes.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from html import escape

import numpy as np

from analysis.trace.intervals import NOTHING, Spans, intersect, total, union
from analysis.trace.matching import Meetings, match
from analysis.trace.model import RankTrace, Trace
from analysis.trace.steps import Window
from benchmarks.record.safe_text import visible

# Text of 11 px has 8 points where the drawing is as wide as a page of a paper, 7 in.
_LEFT, _PLOT, _RIGHT = 110, 560, 20  # px
_LANE, _GAP, _HEADER, _TOP, _BOTTOM = 17, 5, 30, 78, 64
_LETTER = 6.3  # px of a letter, about
_JOINED_PX = 0.2  # boxes closer than this become one
_MOST_LANES = 6  # per rank; the streams with least activity share the last
_MOST_RANKS = 16
_ON_HOST = ("forward", "backward", "exchange", "optimizer")  # ranges drawn above the streams
# kind: (fill, outline, words of the legend), drawn in this order
_KINDS = {
    "compute": ("#a9bdd6", "none", "compute"),
    "copy": ("url(#copy)", "none", "copy, memset"),
    "wait": ("url(#wait)", "#b4480c", "collective: waiting for the last rank"),
    "transfer": ("#e07b2e", "#b4480c", "collective: transfer"),
    "exposed": ("#4a0d14", "none", "exposed communication"),
}
_DEFINITIONS = (
    '<defs><pattern id="copy" width="3" height="3" patternUnits="userSpaceOnUse">'
    '<rect width="3" height="3" fill="#cfe8da"/>'
    '<path d="M0.75 0V3" stroke="#2e6b4a" stroke-width="1.2"/></pattern>'
    '<pattern id="wait" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="5" height="5" fill="#fdf0e4"/>'
    '<path d="M1 0V5" stroke="#d9641e" stroke-width="1.1"/></pattern></defs>'
)
_STYLE = (
    "<style>text{font-family:sans-serif;font-size:11px;fill:#20262d}"
    ".title{font-size:15px;font-weight:bold}.rank{font-size:12px;font-weight:bold}"
    ".soft{fill:#4a5460}.end{text-anchor:end}.mid{text-anchor:middle}</style>"
)


@dataclass(frozen=True)
class _Lane:
    """One line of the drawing: a label, and boxes by kind; `texts` are ranges with their names."""

    label: str
    boxes: dict[str, Spans]
    texts: tuple[tuple[int, int, str], ...] = ()


def draw_timeline(trace: Trace, window: Window) -> str:
    """Return the text of the SVG."""
    meetings = match(trace)
    drawn = trace.ranks[:_MOST_RANKS]
    parts: list[str] = []
    y = _TOP
    for rank in drawn:
        waits, transfers = _split(rank, meetings)
        parts.append(_rank_header(rank, waits, meetings, window, y))
        y += _HEADER
        for lane in _lanes(rank, trace, waits, transfers, window):
            parts.append(_draw_lane(lane, window, y))
            y += _LANE + _GAP
        y += _GAP
    axis = _axis(window, y)
    if len(drawn) < len(trace.ranks):
        line = f"{len(drawn)} of {len(trace.ranks)} ranks drawn"
        parts.append(_text(_LEFT, y + 12, line, "soft"))
        y += 18
    width, height = _LEFT + _PLOT + _RIGHT, y + _BOTTOM
    length_ms = (window.end - window.start) / 1e6
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<title>Timeline: {_escaped(window.title)}</title>",
        _STYLE,
        _DEFINITIONS,
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, 26, f"{window.title}, {length_ms:.3f} ms", "title"),
        _text(16, 44, trace.source, "soft"),
    )
    return "\n".join([*head, axis, *parts, _legend(y + 18), "</svg>", ""])


# --- lanes ----------------------------------------------------------------------------------------


def _split(rank: RankTrace, meetings: Meetings) -> tuple[Spans, Spans]:
    """Return the time of each collective until the last rank came, and the rest.

    Without a match no wait is known.
    """
    start, end = rank.collectives.start, rank.collectives.end
    waits = meetings.waits(rank)
    turn = start
    if waits is not None:
        turn = start + np.nan_to_num(waits).astype(np.int64)
    return np.column_stack((start, turn)), np.column_stack((turn, end))


def _span_of(window: Window) -> Spans:
    return np.array([[window.start, window.end]], dtype=np.int64)


def _lanes(
    rank: RankTrace, trace: Trace, waits: Spans, transfers: Spans, window: Window
) -> list[_Lane]:
    """Return the lanes of a rank: the host's ranges, the streams, exposed communication."""
    lanes = []
    texts = _host_texts(rank, trace, window)
    if texts:
        lanes.append(_Lane("host", {}, texts))
    here = _span_of(window)
    boxes: dict[int, dict[str, Spans]] = defaultdict(dict)
    for kind, lane, spans in (
        ("compute", rank.compute.lane, rank.compute.spans),
        ("copy", rank.copies.lane, rank.copies.spans),
        ("copy", rank.memsets.lane, rank.memsets.spans),
        ("wait", rank.collectives.lane, waits),
        ("transfer", rank.collectives.lane, transfers),
    ):
        inside = (spans[:, 1] > window.start) & (spans[:, 0] < window.end)
        for stream in np.unique(lane[inside]).tolist():
            visible_spans = intersect(union(spans[inside & (lane == stream)]), here)
            before = boxes[stream].get(kind, NOTHING)
            boxes[stream][kind] = union(before, visible_spans)
    activity = {stream: sum(map(total, kinds.values())) for stream, kinds in boxes.items()}
    busiest = sorted(boxes, key=lambda stream: (-activity[stream], stream))
    noun = "thread" if rank.on_host else "stream"
    shown = busiest if len(busiest) <= _MOST_LANES else busiest[: _MOST_LANES - 1]
    for stream in sorted(shown):
        lanes.append(_Lane(f"{noun} {stream}", boxes[stream]))
    rest = [boxes[stream] for stream in busiest[len(shown) :]]
    if rest:
        joined = {kind: union(*(kinds.get(kind, NOTHING) for kinds in rest)) for kind in _KINDS}
        lanes.append(_Lane(f"{len(rest)} other {noun}s", joined))
    lanes.append(_Lane("exposed", {"exposed": intersect(rank.exposed, here)}))
    return lanes


def _host_texts(rank: RankTrace, trace: Trace, window: Window) -> tuple[tuple[int, int, str], ...]:
    """Return (start, end, name) of the ranges of a step's parts inside the window."""
    ranges = rank.ranges
    numbers = np.unique(ranges.name).tolist()
    wanted = [number for number in numbers if trace.names[number].lower() in _ON_HOST]
    inside = (ranges.end > window.start) & (ranges.start < window.end)
    ranges = ranges.where(np.isin(ranges.name, wanted) & inside)
    texts = []
    for (start, end), name in zip(ranges.spans.tolist(), ranges.name.tolist(), strict=True):
        texts.append((max(start, window.start), min(end, window.end), trace.names[name]))
    return tuple(texts)


# --- drawing --------------------------------------------------------------------------------------


def _rank_header(rank: RankTrace, waits: Spans, meetings: Meetings, window: Window, y: int) -> str:
    here = _span_of(window)
    name = f"rank {rank.rank} · {'host' if rank.device is None else f'GPU {rank.device}'}"
    if rank.gpu:
        name += f" ({rank.gpu})"
    line = "no communication in the trace"
    if len(rank.communication):
        comm_ms = total(intersect(rank.communication, here)) / 1e6
        exposed_ms = total(intersect(rank.exposed, here)) / 1e6
        line = f"communication {comm_ms:.3f} ms, exposed {exposed_ms:.3f} ms"
        if meetings.waits(rank) is not None:
            line += f", waiting {total(intersect(union(waits), here)) / 1e6:.3f} ms"
    return _text(16, y + 20, name, "rank") + _text(_LEFT + _PLOT, y + 20, line, "soft end")


def _draw_lane(lane: _Lane, window: Window, y: int) -> str:
    px_per_ns = _PLOT / (window.end - window.start)
    parts = [
        _text(_LEFT - 8, y + 13, lane.label, "end"),
        f'<rect x="{_LEFT}" y="{y}" width="{_PLOT}" height="{_LANE}" fill="#f4f5f7"/>',
    ]
    for kind, (fill, outline, _) in _KINDS.items():
        spans = lane.boxes.get(kind, NOTHING)
        if not len(spans):
            continue
        joined = union(np.column_stack((spans[:, 0], spans[:, 1] + int(_JOINED_PX / px_per_ns))))
        left = _LEFT + (joined[:, 0] - window.start) * px_per_ns
        right = np.minimum(_LEFT + (joined[:, 1] - window.start) * px_per_ns, _LEFT + _PLOT)
        path = ""
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            path += f"M{a:.2f} {y}h{b - a:.2f}v{_LANE}h{a - b:.2f}z"
        parts.append(f'<path fill="{fill}" stroke="{outline}" stroke-width="0.5" d="{path}"/>')
    for start, end, name in lane.texts:
        x = _LEFT + (start - window.start) * px_per_ns
        width = max((end - start) * px_per_ns, 0.5)
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE}" fill="#ffffff" '
            'stroke="#4a5460" stroke-width="0.7"/>'
        )
        if width > 7 * len(name):
            parts.append(_text(x + width / 2, y + 12.5, name, "mid"))
    return "\n".join(parts)


def _axis(window: Window, bottom: int) -> str:
    """Draw milliseconds from the window's start, at 1, 2 or 5 times a power of ten."""
    length_ms = (window.end - window.start) / 1e6
    power = 10.0 ** math.floor(math.log10(length_ms / 12))
    step_ms = power * next(factor for factor in (1, 2, 5, 10) if power * factor >= length_ms / 12)
    digits = max(0, -math.floor(math.log10(step_ms)))
    parts = []
    for tick in range(int(length_ms / step_ms) + 1):
        x = _LEFT + tick * step_ms / length_ms * _PLOT
        unit = " ms" if tick == 0 else ""
        line = f"M{x:.2f} {_TOP - 4}V{bottom}"
        parts.append(f'<path d="{line}" stroke="#c9ced4" stroke-width="0.6"/>')
        parts.append(_text(x, _TOP - 9, f"{tick * step_ms:.{digits}f}{unit}", "mid soft"))
    return "\n".join(parts)


def _legend(y: int) -> str:
    parts, x = [], float(_LEFT)
    for fill, outline, words in _KINDS.values():
        width = 28 + _LETTER * len(words)
        if x + width > _LEFT + _PLOT:
            x, y = float(_LEFT), y + 18
        box = f'x="{x:.0f}" y="{y - 10}" width="22" height="12"'
        parts.append(f'<rect {box} fill="{fill}" stroke="{outline}"/>')
        parts.append(_text(x + 28, y, words))
        x += width + 16
    return "\n".join(parts)


def _text(x: float, y: float, words: str, style: str = "") -> str:
    css_class = f" class={style!r}" if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{css_class}>{_escaped(words)}</text>'


def _escaped(words: str) -> str:
    """Return a text that SVG shows as it is."""
    return escape(visible(words, kept=""))
