"""Draw one step of a trace as SVG: a lane per rank and stream, and one of exposed communication.

Plain SVG on white works on a dark page and on paper. Hatches and shades separate the kinds without
colour. Thousands of kernels become some hundred boxes: boxes closer than a fraction of a pixel are
joined. Equal traces give equal bytes.
"""

import math
from collections import defaultdict
from html import escape

import numpy as np

from analysis.trace.events import (
    NOTHING,
    RankTrace,
    Spans,
    Trace,
    intersect,
    spans,
    total,
    union,
)
from analysis.trace.matching import match, waits_of
from analysis.trace.steps import choose_window
from benchmarks.record.safe_text import visible

# Text of 11 px has 8 points where the drawing is as wide as a page of a paper, 7 in.
_LEFT, _PLOT, _RIGHT = 110, 560, 20  # px
_LANE, _GAP, _HEADER, _TOP, _BOTTOM = 17, 5, 30, 78, 64
_LETTER = 6.3  # px of a letter, about
_JOINED_PX = 0.2  # boxes closer than this become one
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

Boxes = dict[str, Spans]  # by kind


def draw_timeline(trace: Trace, step: int | None = None) -> str:
    """Return the text of the SVG of one step, by default that of median time.

    Raises:
        ValueError: the trace has no step, or not this one.
    """
    start, end, title = choose_window(trace, step)
    window = np.array([[start, end]], dtype=np.int64)
    parts: list[str] = []
    y = _TOP
    meetings, _ = match(trace)
    for rank in trace.ranks:
        wait_ns = waits_of(rank, meetings)
        turn, waits = rank.collectives["start"], NOTHING
        if wait_ns is not None:
            turn = turn + np.nan_to_num(wait_ns).astype(np.int64)
            waits = np.column_stack((rank.collectives["start"], turn))
        parts.append(_rank_header(rank, waits, window, y))
        y += _HEADER
        host = _draw_host(rank, trace, start, end, y)
        if host:
            parts.append(host)
            y += _LANE + _GAP
        transfers = np.column_stack((turn, rank.collectives["end"]))
        for label, boxes in _lanes(rank, waits, transfers, window):
            parts.append(_draw_lane(label, boxes, start, end, y))
            y += _LANE + _GAP
        y += _GAP
    axis = _axis((end - start) / 1e6, y)
    width, height = _LEFT + _PLOT + _RIGHT, y + _BOTTOM
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<title>Timeline: {title}</title>",
        _STYLE,
        _DEFINITIONS,
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, 26, f"{title}, {(end - start) / 1e6:.3f} ms", "title"),
        _text(16, 44, trace.source, "soft"),
    )
    return "\n".join([*head, axis, *parts, _legend(y + 18), "</svg>", ""])


def _rank_header(rank: RankTrace, waits: Spans, window: Spans, y: int) -> str:
    name = f"rank {rank.rank} · {'host' if rank.device is None else f'GPU {rank.device}'}"
    if rank.gpu:
        name += f" ({rank.gpu})"
    line = "no communication in the trace"
    if len(rank.communication):
        comm_ms = total(intersect(rank.communication, window)) / 1e6
        exposed_ms = total(intersect(rank.exposed, window)) / 1e6
        line = f"communication {comm_ms:.3f} ms, exposed {exposed_ms:.3f} ms"
        if len(waits):
            line += f", waiting {total(intersect(union(waits), window)) / 1e6:.3f} ms"
    return _text(16, y + 20, name, "rank") + _text(_LEFT + _PLOT, y + 20, line, "soft end")


def _lanes(
    rank: RankTrace, waits: Spans, transfers: Spans, window: Spans
) -> list[tuple[str, Boxes]]:
    """Return the lanes of a rank: its streams, and exposed communication."""
    boxes: dict[int, Boxes] = defaultdict(dict)
    for kind, events, times in (
        ("compute", rank.compute, spans(rank.compute)),
        ("copy", rank.copies, spans(rank.copies)),
        ("copy", rank.memsets, spans(rank.memsets)),
        ("wait", rank.collectives[: len(waits)], waits),
        ("transfer", rank.collectives, transfers),
    ):
        for stream in np.unique(events["lane"]).tolist():
            inside = intersect(union(times[events["lane"] == stream]), window)
            if len(inside):
                boxes[stream][kind] = union(boxes[stream].get(kind, NOTHING), inside)
    noun = "thread" if rank.on_host else "stream"
    lanes = [(f"{noun} {stream}", boxes[stream]) for stream in sorted(boxes)]
    return [*lanes, ("exposed", {"exposed": intersect(rank.exposed, window)})]


def _draw_lane(label: str, boxes: Boxes, start: int, end: int, y: int) -> str:
    px_per_ns = _PLOT / (end - start)
    parts = [
        _text(_LEFT - 8, y + 13, label, "end"),
        f'<rect x="{_LEFT}" y="{y}" width="{_PLOT}" height="{_LANE}" fill="#f4f5f7"/>',
    ]
    for kind, (fill, outline, _) in _KINDS.items():
        times = boxes.get(kind, NOTHING)
        if not len(times):
            continue
        joined = union(np.column_stack((times[:, 0], times[:, 1] + int(_JOINED_PX / px_per_ns))))
        left = _LEFT + (joined[:, 0] - start) * px_per_ns
        right = np.minimum(_LEFT + (joined[:, 1] - start) * px_per_ns, _LEFT + _PLOT)
        path = ""
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            path += f"M{a:.2f} {y}h{b - a:.2f}v{_LANE}h{a - b:.2f}z"
        parts.append(f'<path fill="{fill}" stroke="{outline}" stroke-width="0.5" d="{path}"/>')
    return "\n".join(parts)


def _draw_host(rank: RankTrace, trace: Trace, start: int, end: int, y: int) -> str:
    """Draw the lane of the ranges of a step's parts; empty without any inside the window."""
    px_per_ns = _PLOT / (end - start)
    parts = []
    for row in rank.ranges[(rank.ranges["end"] > start) & (rank.ranges["start"] < end)]:
        name = trace.names[row["name"]]
        if name.lower() not in _ON_HOST:
            continue
        x = _LEFT + (max(int(row["start"]), start) - start) * px_per_ns
        right = _LEFT + (min(int(row["end"]), end) - start) * px_per_ns
        width = max(right - x, 0.5)
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE}" fill="#ffffff" '
            'stroke="#4a5460" stroke-width="0.7"/>'
        )
        if width > 7 * len(name):
            parts.append(_text(x + width / 2, y + 12.5, name, "mid"))
    if not parts:
        return ""
    return "\n".join([_draw_lane("host", {}, start, end, y), *parts])


def _axis(length_ms: float, bottom: int) -> str:
    """Draw milliseconds from the window's start, at 1, 2 or 5 times a power of ten."""
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
    """Return a text that SVG shows as it is."""
    css_class = f" class={style!r}" if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{css_class}>{escape(visible(words, kept=""))}</text>'
