"""The section on traces: one step of a traced cell, as launch.profile.profiled_pass drew it beside the cell's record.

The drawing is a file that anybody may have edited: only shapes, texts and plain styles of it reach the page.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from analysis.findings.model import Findings
from analysis.findings.study import Study
from analysis.report.main_point import main_point
from analysis.report.names import run_name
from analysis.report.section import Section
from analysis.report.style import Picture
from analysis.report.tables import plain
from benchmarks.record import CellFolder, Record, RecordError, read, record_paths

NAME = "timeline-1"
FILE = "profile/timeline.svg"  # in the folder of a cell
LARGEST = 4 * 2**20  # bytes of a drawing on the page
SVG = "http://www.w3.org/2000/svg"
_SHAPES = frozenset({"svg", "title", "style", "defs", "pattern", "g", "rect", "path", "line", "text", "tspan"})
_ATTRIBUTES = frozenset({
    "id", "class", "x", "y", "x1", "x2", "y1", "y2", "dx", "dy", "d", "width", "height", "viewBox", "fill", "stroke",
    "stroke-width", "opacity", "transform", "patternUnits", "patternTransform", "text-anchor", "font-size", "font-weight",
})  # fmt: skip
_VALUE = re.compile(r"[^<>&\"'\\]*")
_RULE = re.compile(r"(\.?[a-z]+)\{([a-z0-9#:;. -]*)\}")


def traces(study: Study, found: Findings) -> Section | None:
    """The timeline of the cell that the finding is about, else of the first traced one; nothing without a trace."""
    if not study.trains:
        return None
    headline = main_point(study, found)
    wanted = headline[1].record_ids if headline else ()
    traced = sorted(_timelines(study), key=lambda pair: pair[0].record_id not in wanted)
    for record, path in traced:
        svg = _drawing(path)
        if svg is not None:
            caption = f"One step of {plain(run_name(record))}, recorded in a pass of its own, which supplied no rate."
            picture = Picture(NAME, caption, svg, b"", card=True, wide=True)
            return Section("traces", "One step, traced", pictures=(picture,), place=70)
    return None


def _timelines(study: Study) -> Iterator[tuple[Record, Path]]:
    """Usable records with a timeline beside them, in order of their start."""
    beside: dict[str, Path] = {}
    for path in record_paths(study.folder) if study.folder else ():
        timeline = CellFolder(path.parent).profile.timeline
        try:
            if timeline.exists():
                beside.setdefault(read(path).record_id, timeline)
        except RecordError:
            continue  # open_study has told of it
    for record in study.usable:
        if record.record_id in beside:
            yield record, beside[record.record_id]


def _drawing(path: Path) -> str | None:
    """The drawing without anything that could act or reach beyond it; None where it is no drawing."""
    try:
        if path.stat().st_size > LARGEST:
            return None
        text = path.read_text(encoding="utf-8")
        if "<!" in text:  # entities may grow without bound
            return None
        root = ET.fromstring(text)
    except (OSError, ValueError, ET.ParseError):
        return None
    if root.tag != f"{{{SVG}}}svg" or not re.fullmatch(r"0 0 [0-9.]+ [0-9.]+", root.get("viewBox", "")):
        return None
    _clean(root)
    root.set("id", "drawing")
    return '<svg xmlns="http://www.w3.org/2000/svg"' + ET.tostring(root, encoding="unicode").removeprefix("<svg") + "\n"


def _clean(element: ET.Element) -> None:
    """In place, and names lose their namespace."""
    element.tag = element.tag.removeprefix(f"{{{SVG}}}")
    for name, value in list(element.attrib.items()):
        outside = "url(" in value.replace("url(#", "")
        if name not in _ATTRIBUTES or outside or not _VALUE.fullmatch(value):
            del element.attrib[name]
    if element.tag == "style":  # a page has one set of rules: those of a drawing are for the drawing
        rules = _RULE.findall(element.text or "")
        element.text = "".join(f"#{NAME}-drawing {of},#drawing {of}{{{how}}}" for of, how in rules)
    for child in list(element):
        if isinstance(child.tag, str) and child.tag.removeprefix(f"{{{SVG}}}") in _SHAPES and element.tag != "style":
            _clean(child)
        else:
            element.remove(child)


SECTIONS = (traces,)
