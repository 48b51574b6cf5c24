"""Draw one step of a trace as SVG: a lane per rank and stream, and one of exposed communication.

Plain SVG on white works on a dark page and on paper. Hatches and shades separate the kinds without
colour. Thousands of kernels become some hundred boxes: boxes closer than a fraction of a pixel are
joined. Equal traces give equal bytes.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape

import numpy as np

from analysis.trace.events import NOTHING, RankTrace, Spans, Trace, intersect, spans, total, union
from analysis.trace.steps import choose_window, match, waits_of
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

    Raises ValueError: the trace has no step, or not this one.
    """
    start, end, title = choose_window(trace, step)
    drawing = _Drawing(start, end)
    meetings, _ = match(trace)
    for rank in trace.ranks:
        wait_ns = waits_of(rank, meetings)
        turn, waits = rank.collectives["start"], NOTHING
        if wait_ns is not None:
            turn = turn + np.nan_to_num(wait_ns).astype(np.int64)
            waits = np.column_stack((rank.collectives["start"], turn))
        transfers = np.column_stack((turn, rank.collectives["end"]))
        drawing.draw_header(rank, waits)
        drawing.draw_host(rank, trace)
        drawing.draw_streams(rank, waits, transfers)
        drawing.y += _GAP
    axis = drawing.axis()
    drawing.draw_legend()
    width, height = _LEFT + _PLOT + _RIGHT, drawing.y + _BOTTOM
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
    return "\n".join([*head, axis, *drawing.parts, "</svg>", ""])


class _Drawing:
    def __init__(self, start_ns: int, end_ns: int) -> None:
        self.start_ns, self.end_ns = start_ns, end_ns
        self.window = np.array([[start_ns, end_ns]], dtype=np.int64)
        self.px_per_ns = _PLOT / (end_ns - start_ns)
        self.parts: list[str] = []
        self.y = _TOP  # where the next element begins

    def x_of(self, moment_ns: int) -> float:
        return _LEFT + (moment_ns - self.start_ns) * self.px_per_ns

    def draw_header(self, rank: RankTrace, waits: Spans) -> None:
        name = f"rank {rank.rank} · {'host' if rank.device is None else f'GPU {rank.device}'}"
        if rank.gpu:
            name += f" ({rank.gpu})"
        line = "no communication in the trace"
        if len(rank.communication):
            comm_ms = total(intersect(rank.communication, self.window)) / 1e6
            exposed_ms = total(intersect(rank.exposed, self.window)) / 1e6
            line = f"communication {comm_ms:.3f} ms, exposed {exposed_ms:.3f} ms"
            if len(waits):
                wait_ms = total(intersect(union(waits), self.window)) / 1e6
                line += f", waiting {wait_ms:.3f} ms"
        texts = _text(16, self.y + 20, name, "rank")
        self.parts.append(texts + _text(_LEFT + _PLOT, self.y + 20, line, "soft end"))
        self.y += _HEADER

    def draw_host(self, rank: RankTrace, trace: Trace) -> None:
        boxes = []
        is_inside = (rank.ranges["end"] > self.start_ns) & (rank.ranges["start"] < self.end_ns)
        for row in rank.ranges[is_inside]:
            name = trace.names[row["name"]]
            if name.lower() not in _ON_HOST:
                continue
            x = self.x_of(max(int(row["start"]), self.start_ns))
            width = max(self.x_of(min(int(row["end"]), self.end_ns)) - x, 0.5)
            boxes.append(
                f'<rect x="{x:.2f}" y="{self.y}" width="{width:.2f}" height="{_LANE}" '
                'fill="#ffffff" stroke="#4a5460" stroke-width="0.7"/>'
            )
            if width > 7 * len(name):
                boxes.append(_text(x + width / 2, self.y + 12.5, name, "mid"))
        if boxes:
            self.draw_lane("host", {}, boxes)

    def draw_streams(self, rank: RankTrace, waits: Spans, transfers: Spans) -> None:
        boxes: dict[int, Boxes] = defaultdict(dict)
        for kind, events, times in (
            ("compute", rank.compute, spans(rank.compute)),
            ("copy", rank.copies, spans(rank.copies)),
            ("copy", rank.memsets, spans(rank.memsets)),
            ("wait", rank.collectives[: len(waits)], waits),
            ("transfer", rank.collectives, transfers),
        ):
            for stream in np.unique(events["lane"]).tolist():
                inside = intersect(union(times[events["lane"] == stream]), self.window)
                if len(inside):
                    boxes[stream][kind] = union(boxes[stream].get(kind, NOTHING), inside)
        noun = "thread" if rank.on_host else "stream"
        for stream in sorted(boxes):
            self.draw_lane(f"{noun} {stream}", boxes[stream])
        self.draw_lane("exposed", {"exposed": intersect(rank.exposed, self.window)})

    def draw_lane(self, label: str, boxes: Boxes, above: Sequence[str] = ()) -> None:
        y = self.y
        self.parts += [
            _text(_LEFT - 8, y + 13, label, "end"),
            f'<rect x="{_LEFT}" y="{y}" width="{_PLOT}" height="{_LANE}" fill="#f4f5f7"/>',
        ]
        joined_ns = int(_JOINED_PX / self.px_per_ns)
        for kind, (fill, outline, _) in _KINDS.items():
            times = boxes.get(kind, NOTHING)
            if not len(times):
                continue
            path = ""
            for start, end in union(np.column_stack((times[:, 0], times[:, 1] + joined_ns))):
                a, b = self.x_of(start), min(self.x_of(end), _LEFT + _PLOT)
                path += f"M{a:.2f} {y}h{b - a:.2f}v{_LANE}h{a - b:.2f}z"
            self.parts.append(
                f'<path fill="{fill}" stroke="{outline}" stroke-width="0.5" d="{path}"/>'
            )
        self.parts += above
        self.y += _LANE + _GAP

    def axis(self) -> str:
        """Return milliseconds from the window's start, at 1, 2 or 5 times a power of ten."""
        length_ms = (self.end_ns - self.start_ns) / 1e6
        least_ms = length_ms / 12
        power = 10.0 ** math.floor(math.log10(least_ms))
        step_ms = power * next(factor for factor in (1, 2, 5, 10) if power * factor >= least_ms)
        digits = max(0, -math.floor(math.log10(step_ms)))
        parts = []
        for tick in range(int(length_ms / step_ms) + 1):
            x = _LEFT + tick * step_ms / length_ms * _PLOT
            unit = " ms" if tick == 0 else ""
            line = f"M{x:.2f} {_TOP - 4}V{self.y}"
            parts.append(f'<path d="{line}" stroke="#c9ced4" stroke-width="0.6"/>')
            parts.append(_text(x, _TOP - 9, f"{tick * step_ms:.{digits}f}{unit}", "mid soft"))
        return "\n".join(parts)

    def draw_legend(self) -> None:
        x, y = float(_LEFT), self.y + 18
        for fill, outline, words in _KINDS.values():
            width = 28 + _LETTER * len(words)
            if x + width > _LEFT + _PLOT:
                x, y = float(_LEFT), y + 18
            box = f'x="{x:.0f}" y="{y - 10}" width="22" height="12"'
            self.parts.append(f'<rect {box} fill="{fill}" stroke="{outline}"/>')
            self.parts.append(_text(x + 28, y, words))
            x += width + 16


def _text(x: float, y: float, words: str, style: str = "") -> str:
    css_class = f" class={style!r}" if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{css_class}>{escape(visible(words, kept=""))}</text>'
