"""Draw a timeline of a trace as SVG: a lane per rank and stream, and per rank a lane of exposed communication.

Plain SVG on white works on a dark page and on paper. Hatches and shades separate the kinds without colour. Thousands
of kernels become some hundred boxes: boxes closer than a fraction of a pixel are joined. Equal traces give equal bytes.
"""

import math
from dataclasses import dataclass
from html import escape

import numpy as np

from analysis.trace.intervals import NOTHING, Spans, intersect, subtract, total, union
from analysis.trace.matching import Meetings, match
from analysis.trace.model import RankTrace, Trace
from analysis.trace.steps import Window
from benchmarks.record.safe_text import visible

# Text of 11 px has 8 points where the drawing is as wide as a page of a paper, 7 in.
_LEFT, _PLOT, _RIGHT = 110, 560, 20  # px
_LANE, _GAP, _HEADER, _TOP, _BOTTOM = 17, 5, 30, 78, 64
_LETTER = 6.3  # px of a letter, about
_JOINED_PX = 0.2  # boxes closer than this become one
_LANES = 6  # per rank; the streams with least activity share the last
_RANKS = 16
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
    '<defs><pattern id="copy" width="3" height="3" patternUnits="userSpaceOnUse"><rect width="3" height="3" '
    'fill="#cfe8da"/><path d="M0.75 0V3" stroke="#2e6b4a" stroke-width="1.2"/></pattern><pattern id="wait" width="5" '
    'height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="5" height="5" fill="#fdf0e4"/>'
    '<path d="M1 0V5" stroke="#d9641e" stroke-width="1.1"/></pattern></defs>'
)
_STYLE = (
    "<style>text{font-family:sans-serif;font-size:11px;fill:#20262d}.title{font-size:15px;font-weight:bold}"
    ".rank{font-size:12px;font-weight:bold}.soft{fill:#4a5460}.end{text-anchor:end}.mid{text-anchor:middle}</style>"
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
    drawn = trace.ranks[:_RANKS]
    parts: list[str] = []
    y = _TOP
    for rank in drawn:
        lanes = _lanes(rank, trace, meetings, window)
        parts.append(_rank_header(rank, meetings, window, y))
        y += _HEADER
        for lane in lanes:
            parts.append(_draw_lane(lane, window, y))
            y += _LANE + _GAP
        y += _GAP
    axis = _axis(window, y)
    if len(drawn) < len(trace.ranks):
        parts.append(
            _text(_LEFT, y + 12, f"{len(drawn)} of {len(trace.ranks)} ranks drawn", "soft")
        )
        y += 18
    width, height = _LEFT + _PLOT + _RIGHT, y + _BOTTOM
    length = (window.end - window.start) / 1e6
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>Timeline: {_safe(window.title)}</title>",
        _STYLE,
        _DEFINITIONS,
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, 26, f"{window.title}, {length:.3f} ms", "title"),
        _text(16, 44, trace.source, "soft"),
    )
    return "\n".join([*head, axis, *parts, _legend(y + 18), "</svg>", ""])


def _lanes(rank: RankTrace, trace: Trace, meetings: Meetings, window: Window) -> list[_Lane]:
    """Return the lanes of a rank: the host's ranges, the streams, exposed communication."""
    here: Spans = np.array([[window.start, window.end]], dtype=np.int64)
    waits, transfers = _split(rank, meetings)
    boxes: dict[int, dict[str, Spans]] = {}
    for kind, lane, spans in (
        ("compute", rank.compute.lane, rank.compute.spans),
        ("copy", rank.copies.lane, rank.copies.spans),
        ("copy", rank.memsets.lane, rank.memsets.spans),
        ("wait", rank.collectives.lane, waits),
        ("transfer", rank.collectives.lane, transfers),
    ):
        inside = (spans[:, 1] > window.start) & (spans[:, 0] < window.end)
        for stream in np.unique(lane[inside]).tolist():
            found = intersect(union(spans[inside & (lane == stream)]), here)
            of_stream = boxes.setdefault(stream, {})
            of_stream[kind] = union(of_stream.get(kind, NOTHING), found)
    busy = sorted(
        boxes, key=lambda stream: (-sum(total(spans) for spans in boxes[stream].values()), stream)
    )
    what = "thread" if rank.on_host else "stream"
    apart = busy if len(busy) <= _LANES else busy[: _LANES - 1]
    lanes = [_Lane(f"{what} {stream}", boxes[stream]) for stream in sorted(apart)]
    if len(apart) < len(busy):
        rest = busy[len(apart) :]
        kinds = {kind: union(*(boxes[one].get(kind, NOTHING) for one in rest)) for kind in _KINDS}
        lanes.append(_Lane(f"{len(rest)} other {what}s", kinds))
    exposed = intersect(subtract(rank.communication, rank.work), here)
    lanes.append(_Lane("exposed", {"exposed": exposed}))
    named = [
        number
        for number in np.unique(rank.ranges.name).tolist()
        if trace.names[number].lower() in _ON_HOST
    ]
    ranges = rank.ranges.where(np.isin(rank.ranges.name, named) & (rank.ranges.end > window.start))
    ranges = ranges.where(ranges.start < window.end)
    if len(ranges):
        rows = zip(ranges.start.tolist(), ranges.end.tolist(), ranges.name.tolist(), strict=True)
        texts = tuple(
            (max(a, window.start), min(b, window.end), trace.names[name]) for a, b, name in rows
        )
        lanes.insert(0, _Lane("host", {}, texts))
    return lanes


def _split(rank: RankTrace, meetings: Meetings) -> tuple[Spans, Spans]:
    """Split each collective into the time until the last rank came, and the rest; without a match no wait is known."""
    waited = meetings.waits(rank)
    start, end = rank.collectives.start, rank.collectives.end
    if waited is None:
        return np.column_stack((start, start)), rank.collectives.spans
    turn = start + np.nan_to_num(waited).astype(np.int64)
    return np.column_stack((start, turn)), np.column_stack((turn, end))


def _rank_header(rank: RankTrace, meetings: Meetings, window: Window, y: int) -> str:
    here: Spans = np.array([[window.start, window.end]], dtype=np.int64)
    where = "host" if rank.device is None else f"GPU {rank.device}"
    name = f"rank {rank.rank} · {where}" + (f" ({rank.gpu})" if rank.gpu else "")
    said = "no communication in the trace"
    if len(rank.communication):
        spent = total(intersect(rank.communication, here)) / 1e6
        bare = total(intersect(subtract(rank.communication, rank.work), here)) / 1e6
        said = f"communication {spent:.3f} ms, exposed {bare:.3f} ms"
        if meetings.waits(rank) is not None:
            said += (
                f", waiting {total(intersect(union(_split(rank, meetings)[0]), here)) / 1e6:.3f} ms"
            )
    return _text(16, y + 20, name, "rank") + _text(_LEFT + _PLOT, y + 20, said, "soft end")


def _draw_lane(lane: _Lane, window: Window, y: int) -> str:
    scale = _PLOT / (window.end - window.start)
    parts = [
        _text(_LEFT - 8, y + 13, lane.label, "end"),
        f'<rect x="{_LEFT}" y="{y}" width="{_PLOT}" height="{_LANE}" fill="#f4f5f7"/>',
    ]
    for kind, (fill, outline, _) in _KINDS.items():
        spans = lane.boxes.get(kind, NOTHING)
        if len(spans):
            joined = union(np.column_stack((spans[:, 0], spans[:, 1] + int(_JOINED_PX / scale))))
            left = _LEFT + (joined[:, 0] - window.start) * scale
            right = np.minimum(_LEFT + (joined[:, 1] - window.start) * scale, _LEFT + _PLOT)
            path = "".join(
                f"M{a:.2f} {y}h{b - a:.2f}v{_LANE}h{a - b:.2f}z"
                for a, b in zip(left.tolist(), right.tolist(), strict=True)
            )
            parts.append(f'<path fill="{fill}" stroke="{outline}" stroke-width="0.5" d="{path}"/>')
    for start, end, name in lane.texts:
        x, wide = _LEFT + (start - window.start) * scale, max((end - start) * scale, 0.5)
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_LANE}" fill="#ffffff" stroke="#4a5460" '
            'stroke-width="0.7"/>'
        )
        if wide > 7 * len(name):
            parts.append(_text(x + wide / 2, y + 12.5, name, "mid"))
    return "\n".join(parts)


def _axis(window: Window, bottom: int) -> str:
    """Draw the axis: milliseconds from the window's start, at one, two or five times a power of ten."""
    length = (window.end - window.start) / 1e6
    power = 10.0 ** math.floor(math.log10(length / 12))
    step = power * next(one for one in (1, 2, 5, 10) if power * one >= length / 12)
    digits = max(0, -math.floor(math.log10(step)))
    parts = []
    for number in range(int(length / step) + 1):
        x = _LEFT + number * step / length * _PLOT
        unit = " ms" if number == 0 else ""
        parts.append(
            f'<path d="M{x:.2f} {_TOP - 4}V{bottom}" stroke="#c9ced4" stroke-width="0.6"/>'
        )
        parts.append(_text(x, _TOP - 9, f"{number * step:.{digits}f}{unit}", "mid soft"))
    return "\n".join(parts)


def _legend(y: int) -> str:
    parts, x = [], float(_LEFT)
    for fill, outline, words in _KINDS.values():
        needed = 28 + _LETTER * len(words)
        if x + needed > _LEFT + _PLOT:
            x, y = float(_LEFT), y + 18
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 10}" width="22" height="12" fill="{fill}" stroke="{outline}"/>'
        )
        parts.append(_text(x + 28, y, words))
        x += needed + 16
    return "\n".join(parts)


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}"{f" class={style!r}" if style else ""}>{_safe(words)}</text>'
    )


def _safe(words: str) -> str:
    """Return a text that SVG shows as it is."""
    return escape(visible(words, kept=""))
