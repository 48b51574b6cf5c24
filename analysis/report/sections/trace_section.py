"""One step of a traced cell, as launch.profile.profiled_pass drew it.

Anybody may have edited the drawing. It is shown as an image: a browser runs nothing in an image and
loads nothing for it.
"""

import base64
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from analysis.findings.examine import Findings
from analysis.report.figure import Figure
from analysis.report.main_point import main_point
from analysis.report.section import Section
from analysis.study.names import run_name
from analysis.study.study import Study
from analysis.text import single_line
from benchmarks.record import CellFolder, RecordError, read, record_paths

MOST_BYTES = 4 * 2**20  # of a drawing on the page
SVG = "http://www.w3.org/2000/svg"
SIZE = re.compile(r"0 0 ([0-9.]+) ([0-9.]+)")


def traces(study: Study, findings: Findings) -> Section | None:
    """Return the timeline of the cell that the finding is about, else of the first traced cell."""
    if not study.trains or not study.folder:
        return None
    timelines: dict[str, Path] = {}
    for path in record_paths(study.folder):
        timeline = CellFolder(path.parent).profile.timeline
        try:
            if timeline.exists():
                timelines.setdefault(read(path).record_id, timeline)
        except RecordError:
            continue  # open_study lists it
    headline = main_point(study, findings)
    wanted = headline[1].record_ids if headline else ()
    for record in sorted(study.usable, key=lambda record: record.record_id not in wanted):
        drawing = ""
        if record.record_id in timelines:
            drawing = _as_image(timelines[record.record_id])
        if drawing:
            subject = f"One step of {single_line(run_name(record))}"
            caption = f"{subject}, recorded in a separate pass that gives no rate."
            figure = Figure("timeline-1", caption, drawing, b"", card=True, wide=True)
            return Section("traces", "One step, traced", figures=(figure,))
    return None


def _as_image(path: Path) -> str:
    """Return a drawing as an image inside an SVG of our own; empty where the file holds none."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return ""
        text = path.read_text(encoding="utf-8")
        if "<!" in text:  # entities may grow without bound
            return ""
        root = ET.fromstring(text)
    except (OSError, ValueError, ET.ParseError):
        return ""
    box = SIZE.fullmatch(root.get("viewBox", ""))
    if root.tag != f"{{{SVG}}}svg" or box is None:
        return ""
    data = base64.b64encode(text.encode()).decode()
    size = f'width="{box[1]}" height="{box[2]}"'
    return (
        f'<svg xmlns="{SVG}" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {box[1]} {box[2]}" {size}>'
        f'<image {size} xlink:href="data:image/svg+xml;base64,{data}"/></svg>\n'
    )
