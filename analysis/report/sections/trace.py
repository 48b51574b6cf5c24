"""One step of a traced cell, as launch.profile.profiled_pass drew it.

Anybody may have edited the drawing. It is shown as an image: a browser runs nothing in an image and
loads nothing for it.
"""

import base64
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from analysis.report.figure import Figure
from analysis.report.main_point import main_point
from analysis.report.section import Section
from analysis.study.estimates import Findings
from analysis.study.names import run_name
from analysis.study.study import Study
from analysis.text import single_line
from benchmarks.record import CellFolder, RecordError, read, record_paths

NAME = "timeline-1"
MOST_BYTES = 4 * 2**20  # of a drawing on the page
SVG = "http://www.w3.org/2000/svg"
SIZE = re.compile(r"0 0 ([0-9.]+) ([0-9.]+)")


def traces(study: Study, findings: Findings) -> Section | None:
    """Return the timeline of the cell that the finding is about, else of the first traced cell."""
    if not study.trains:
        return None
    headline = main_point(study, findings)
    wanted = headline[1].record_ids if headline else ()
    timelines = _timelines(study)
    traced = [record for record in study.usable if record.record_id in timelines]
    for record in sorted(traced, key=lambda record: record.record_id not in wanted):
        text = _drawing(timelines[record.record_id])
        if text is not None:
            subject = f"One step of {single_line(run_name(record))}"
            caption = f"{subject}, recorded in a separate pass that gives no rate."
            figure = Figure(NAME, caption, _as_image(text), b"", card=True, wide=True)
            return Section("traces", "One step, traced", figures=(figure,))
    return None


def _timelines(study: Study) -> dict[str, Path]:
    """Return {record_id: path of its timeline}."""
    timelines: dict[str, Path] = {}
    for path in record_paths(study.folder) if study.folder else ():
        timeline = CellFolder(path.parent).profile.timeline
        try:
            if timeline.exists():
                timelines.setdefault(read(path).record_id, timeline)
        except RecordError:
            continue  # open_study lists it
    return timelines


def _drawing(path: Path) -> str | None:
    """Return the text of a drawing; None where the file holds no drawing."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
        if "<!" in text:  # entities may grow without bound
            return None
        root = ET.fromstring(text)
    except (OSError, ValueError, ET.ParseError):
        return None
    is_drawing = root.tag == f"{{{SVG}}}svg" and SIZE.fullmatch(root.get("viewBox", ""))
    return text if is_drawing else None


def _as_image(text: str) -> str:
    """Return a drawing as an image inside an SVG of our own."""
    width, height = ET.fromstring(text).get("viewBox", "").split()[2:]
    data = base64.b64encode(text.encode()).decode()
    size = f'width="{width}" height="{height}"'
    return (
        f'<svg xmlns="{SVG}" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {height}" {size}>'
        f'<image {size} xlink:href="data:image/svg+xml;base64,{data}"/></svg>\n'
    )
