"""Where throughput is lost: the waterfall, and one step of a cell that launch.profiled_pass traced.

Anybody may have edited a drawing. It is shown as an image: a browser runs nothing in an image and
loads nothing for it.
"""

import base64
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.findings.examine import Findings
from analysis.findings.waterfall import AT_MOST, Waterfall, WaterfallPart
from analysis.report.charts import (
    WATERFALL_LENGTH,
    Axis,
    WaterfallStep,
    truncation_note,
    waterfall_figure,
)
from analysis.report.figure import COLOURS, GREY, HIGHLIGHT, Figure
from analysis.report.main_point import main_point
from analysis.report.numbers import number
from analysis.report.section import Section, about_intervals, words_of
from analysis.report.table import Column, Table
from analysis.study.draws import scaled
from analysis.study.intervals import Estimate
from analysis.study.names import gpu_ids, run_name, short_names
from analysis.study.study import Study
from analysis.text import single_line
from benchmarks.record import CellFolder, Record, RecordError, read, record_paths
from benchmarks.record.safe_files import read_whole

MOST_WATERFALLS = 3  # figures
RESIDUAL = "residual"
GAIN = COLOURS["green"][0]
HATCHES = {GAIN: "////", GREY: "\\\\\\\\"}  # tells them apart in grey


def waterfall(study: Study, findings: Findings) -> Section | None:
    """Return where throughput is lost, part by part; None where most parts are not known."""
    falls = [fall for fall in findings.waterfalls if fall.is_explained]
    if not falls:
        return None
    names = short_names(fall.label for fall in falls)
    rows = []
    for fall in falls:
        for row in waterfall_rows(fall):
            rows.append(row | {"cell": names[fall.label], "gpus": gpu_ids(fall.gpus)})
    table = Table.of(
        "waterfall",
        "From the ideal rate to the measured one; parts and residual add up to the gap."
        f"{about_intervals(study)}",
        (
            Column("part", "part"),
            Column("images_per_second", "images/s", kind="rate", bounded=True),
            Column("share", "of ideal", kind="part"),
            Column("ms", "ms of a step", kind="ms", bounded=True),
            Column("cell", "configuration", shown=len(falls) > 1),
            Column("gpus", "GPUs", shown=len(falls) > 1),
            Column("why", "note"),
        ),
        rows,
    )
    figures = tuple(waterfall_figures(study, falls, names))
    return Section("waterfall", "Where throughput is lost", (), figures, (table,))


def waterfall_rows(fall: Waterfall) -> list[dict[str, Any]]:
    """Return the rows from the top: members alone, the ideal, what is lost, the measured rate; of
    each the `step`, a part or a rate, and `images_per_second`, that rate or what the part adds.
    """
    sum_alone = 0.0
    steps: list[tuple[str, WaterfallPart | Estimate]] = []
    for part in fall.parts:
        if part.above_ideal:
            steps.append((part.name, part))
            sum_alone += part.lost.value if part.lost is not None else 0.0
    if sum_alone:
        steps.insert(0, ("all members alone", Estimate(sum_alone + fall.ideal.value)))
    steps.append((f"ideal, {len(fall.gpus)} × slowest", fall.ideal))
    lost = Estimate(fall.residual, fall.residual_low, fall.residual_high)
    residual = WaterfallPart(RESIDUAL, lost, "not explained by any part")
    for part in (*fall.parts, residual):
        if not part.above_ideal:
            steps.append((part.name, part))
    rows = []
    for name, step in (*steps, ("measured", fall.measured)):
        row: dict[str, Any] = {"part": name, "why": "", "step": step}
        change: Estimate | None = None
        if isinstance(step, Estimate):
            change = step
        else:
            row |= {"ms": step.ms, "why": step.why}
            if step.lost is not None:
                change = scaled(step.lost, -1.0)
        if change is not None and fall.ideal.value:
            row["share"] = change.value / fall.ideal.value
        rows.append(row | {"images_per_second": change})
    return rows


def waterfall_figures(
    study: Study, waterfalls: Sequence[Waterfall], names: Mapping[str, str]
) -> Iterator[Figure]:
    """Yield a figure for each waterfall, with a bar for each known part."""
    words = words_of(study)
    for panel, fall in enumerate(waterfalls[:MOST_WATERFALLS], 1):
        caption = (
            f"{single_line(names[fall.label])}, GPUs {gpu_ids(fall.gpus)}: from {len(fall.gpus)} × "
            f"the slowest GPU alone to the measured rate."
        )
        steps = []
        for row in waterfall_rows(fall):
            name = words(single_line(row["part"], WATERFALL_LENGTH))
            steps.append(_step(row["step"], name, fall.ideal.value))
        if any(step.pale for step in steps):
            caption += " Pale: not significantly different from 0."
        if panel == MOST_WATERFALLS:
            caption += truncation_note(waterfalls, panel, "more waterfall", "waterfall.csv")
        axis = Axis(words("images/s"), "images_per_second")
        yield waterfall_figure(f"waterfall-{panel}", caption, steps, fall.ideal.value, axis)


def _step(part: WaterfallPart | Estimate, name: str, ideal: float) -> WaterfallStep:
    if isinstance(part, Estimate):
        return WaterfallStep(name, level=part, text=number(part.value, "rate"))
    if part.lost is None:
        return WaterfallStep(name, text="not known")
    lost = part.lost.value
    text = number(abs(lost), "rate")
    colour = HIGHLIGHT
    if lost > 0:
        text = f"−{text}"
    elif lost < 0:
        text = f"+{text}"
        colour = GAIN
    if ideal:
        text += f" ({number(abs(lost) / ideal, 'share')})"
    if part.name == RESIDUAL:
        colour = GREY
    is_pale = part.why == AT_MOST
    if part.lost.low is not None and part.lost.high is not None:
        is_pale = is_pale or part.lost.low <= 0 <= part.lost.high
    hatch = HATCHES.get(colour, "")
    return WaterfallStep(name, None, part.lost, text, colour, hatch, is_pale)


MOST_BYTES = 4 * 2**20  # of a drawing on the page
SVG = "http://www.w3.org/2000/svg"
SIZE = re.compile(r"0 0 ([0-9.]+) ([0-9.]+)")


def traces(study: Study, findings: Findings) -> Section | None:
    """Return the timeline of the cell that the finding is about, else of the first traced cell."""
    if not study.folder:
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
    wanted = headline.point.record_ids if headline else ()
    for record in sorted(study.usable, key=lambda record: record.record_id not in wanted):
        drawing = ""
        if record.record_id in timelines:
            drawing = _as_image(timelines[record.record_id])
        if drawing:
            subject = f"One step of {single_line(run_name(record))}"
            caption = f"{subject}, recorded in a separate pass that gives no rate."
            figure = Figure("timeline-1", caption, drawing, b"", card=True, wide=True)
            return Section("traces", "One step, traced", _split(record), (figure,))
    return None


def _split(record: Record) -> tuple[str, ...]:
    means = []
    for name in ("comm", "exposed", "wait"):
        means.append(record.metrics.get(f"trace/{name}_ms_per_step"))
    if None in means:
        return ()
    comm, exposed, wait = map(number, means)
    return (
        f"Communication takes {comm} ms a step; {exposed} ms of it are exposed. In {wait} ms of it "
        "a rank waits for others.",
    )


def _as_image(path: Path) -> str:
    """Return a drawing as an image inside an SVG of our own; empty where the file holds none."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return ""
        text = read_whole(path).decode("utf-8")
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
