"""Images per second against the number of GPUs, options that are numbers and forecasts; memory and
energy.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

from analysis.findings.examine import Findings
from analysis.findings.scaling import Curve, Point, in_sentence
from analysis.prediction.recorded_forecast import about_forecasts, recorded_forecast, shown_low_ms
from analysis.report.charts import (
    HOLLOW,
    MARKERS,
    MOST_ROWS,
    Axis,
    DotRow,
    DrawnCurve,
    DrawnPoint,
    curves_figure,
    rows_figure,
    truncation_note,
)
from analysis.report.figure import Figure, colours, for_width
from analysis.report.main_point import CurvePoint, main_point, names_of, points_of
from analysis.report.numbers import NumberFormat, estimate, number
from analysis.report.section import RATE, Section, about_intervals, verdict_of, words_of
from analysis.report.table import Column, Table, columns_of, metric_column
from analysis.study.intervals import Estimate
from analysis.study.names import (
    BETWEEN,
    format_option,
    gpu_ids,
    gpu_list,
    ran_alone,
    run_name,
    short_names,
)
from analysis.study.runs import Runs, named
from analysis.study.study import Study
from analysis.text import single_line
from benchmarks.record import finite
from conf.cell import Member

MOST_FIGURES = 3  # of each kind: a page is read, the tables hold the rest
MOST_CURVES = 6  # of one figure
MOST_LINEAR_SIZE = 16  # GPUs; with more the axis is logarithmic
LAWS = {"amdahl": "Amdahl", "usl": "universal scalability law"}
FEWEST_VALUES = 3  # of an option that is an axis
NO_AXES = ("seed", "model.classes", "global_batch_size")
WIDE_RANGE = 8.0  # times the least value of an option: the axis is logarithmic
RATES = "images_per_second"  # the key of rates


def scaling(study: Study, findings: Findings) -> Section | None:
    """Return curves, their points, the fits, and why some points have no efficiency."""
    curves = findings.scaling.curves
    if not curves:
        return None

    def request_and_batch(curve: Curve) -> tuple[str, int]:
        options = dict(curve.points[0].key)
        options.pop("batch_size", None)
        return str(sorted(options.items())), curve.points[0].batch_size

    if ran_alone(study):
        curves = tuple(sorted(curves, key=request_and_batch))
    names = short_names(curve.label for curve in curves)
    points = points_of(curves)
    if not ran_alone(study):
        points.sort(key=lambda each: (-each.point.world_size, -each.point.rate.value))
    fits = []
    for curve in curves:
        for fit in curve.fits:
            shares = []
            for name, value in fit.parameters.items():
                shares.append(f"{name.replace('_', ' ')} {number(value, 'share')}")
            row = {"curve": names[curve.label], "law": LAWS[fit.law], "error": fit.error}
            fits.append(row | {"parameters": ", ".join(shares)})
    fits_table = Table.of(
        "fits",
        "Scaling laws, fitted where enough GPU counts were measured; error: of the worst point.",
        columns_of(curve="configuration", law="law", parameters="shares")
        + columns_of("share", error="error"),
        fits,
    )
    tables = (_points_table(study, points, names), fits_table)
    return Section("scaling", "Configurations", (), tuple(_figures(study, curves)), tables)


def _points_table(study: Study, points: Sequence[CurvePoint], names: Mapping[str, str]) -> Table:
    by_id = {record.record_id: record for record in study.records}
    kinds = {curve.kind for curve, _ in points}
    scaling = {id(curve) for curve, point in points if point.efficiency is not None}
    hosts, slowest_kind = "", "count"
    if any(isinstance(point.slowest, str) for _, point in points):
        hosts = " (by hosts: the slowest host alone, with as many GPUs)"
        slowest_kind = "text"  # `a:0` is not a number

    def verdict(row: CurvePoint) -> str:
        return verdict_of(map(by_id.__getitem__, row.point.record_ids)) or "valid"

    columns = [
        Column("curve", "configuration", lambda row: names[row.curve.label]),
        Column(RATES, "images/s", "point.rate", "rate", True),
        Column("efficiency", "efficiency", "point.efficiency", "share", True),
        Column("kind", "scaling", "curve.kind", shown=len(kinds) > 1),
        Column("gpus", "GPUs", lambda row: gpu_ids(row.point.gpus)),
        Column("world_size", "how many", "point.world_size", "count", shown=False),
        Column("runs", "runs", "point.runs", "count"),
        Column("mark", "verdict", verdict),
        Column("batch_size", "images per GPU", lambda row: row.point.batch_size or None, "count"),
        Column("node_efficiency", "by hosts", "point.node_efficiency", "share", True),
        Column("efficiency_at_equal_clocks", "at equal clocks", "point.at_equal_clocks", "share"),
        Column("speedup", "speed-up", "point.speedup", "ratio", True),
        Column("baseline", "slowest alone", "point.baseline", "rate", True),
        Column("slowest", "slowest GPU", "point.slowest", slowest_kind),
        Column(
            "without_baseline", "", lambda row: gpu_ids(row.point.without_baseline), shown=False
        ),
    ]
    caption = f"Each configuration: the median of its runs.{about_intervals(study)}"
    if scaling:
        caption += (
            f" Efficiency and speed-up: against the slowest GPU alone{hosts}. At equal clocks: if "
            "step times followed the SM clock; those of memory-bound steps follow it less."
        )
    return Table.of(
        "points",
        caption,
        columns,
        points,
        marked=lambda row: row.point.suspect,
        # A single GPU is in the columns of the others of its curve.
        shown=lambda row: row.point.world_size > 1 or id(row.curve) not in scaling,
    )


def _figures(study: Study, curves: Sequence[Curve]) -> Iterator[Figure]:
    panels: dict[tuple[str, str], list[Curve]] = defaultdict(list)
    for curve in curves:
        if len({point.world_size for point in curve.points}) > 1:
            panels[curve.points[0].key["model.name"], curve.kind].append(curve)
    for panel, ((model, kind), members) in enumerate(list(panels.items())[:MOST_FIGURES], 1):
        order = sorted(members, key=lambda curve: (-len(curve.points), curve.settings))
        drawn = order[:MOST_CURVES]
        notes = about_intervals(study, "Error bars:")
        if any(point.suspect for _, point in points_of(drawn)):
            notes += HOLLOW
        notes += truncation_note(members, len(drawn), "more curve", "points.csv")
        if panel == MOST_FIGURES:
            notes += truncation_note(list(panels), MOST_FIGURES, "more model", "points.csv")
        yield from _panel(study, drawn, panel, f"{single_line(model)}, {kind} scaling", notes)


def _panel(
    study: Study, curves: Sequence[Curve], panel: int, about: str, notes: str
) -> Iterator[Figure]:
    words = words_of(study)
    palette = colours(named(record, "strategy") for record in study.records)
    rates, efficiencies = [], []
    marks: dict[str, str] = {}
    for curve, marker in zip(curves, MARKERS, strict=False):
        look = palette[curve.points[0].key["strategy.name"]], marker
        points, shares, alone = [], [], {}
        for point in curve.points:
            points.append(DrawnPoint(point.world_size, point.rate, point.suspect))
            if point.efficiency and point.world_size > 1:
                shares.append(DrawnPoint(point.world_size, point.efficiency, point.suspect))
                mark = getattr(point.efficiency.value, "mark", "")
                if mark:
                    marks[mark] = f" ‘{mark}’: no other GPU was measured alone."
            if point.baseline is not None:
                alone[point.world_size] = point.baseline.value
        ideal = []
        if alone:
            for size in sorted({1, *alone}):
                ideal.append((size, size * alone.get(size, alone[min(alone)])))
        rates.append(DrawnCurve(curve.label, points, *look, ideal))
        if shares:
            efficiencies.append(DrawnCurve(curve.label, shares, *look))
    yield curves_figure(
        f"scaling-{panel}",
        f"Images per second, {about}. Dashed: N × the slowest GPU alone.{notes}",
        rates,
        sizes_axis(words("GPUs"), rates),
        Axis(words("images/s"), RATES, "rate", from_zero=True),
        _ends(rates, "rate"),
    )
    if efficiencies:
        notes += "".join(marks.values())
        yield curves_figure(
            f"efficiency-{panel}",
            f"Efficiency, {about}: rate ÷ (N × the slowest GPU alone).{notes}",
            efficiencies,
            sizes_axis(words("GPUs"), efficiencies),
            Axis("efficiency", "efficiency", "share", shown=(1.0,)),
            _ends(efficiencies, "share"),
        )


def sizes_axis(label: str, curves: Sequence[DrawnCurve]) -> Axis:
    """Return the axis of numbers of GPUs."""
    sizes: set[int] = set()
    for curve in curves:
        for point in curve.points:
            sizes.add(round(point.x))
        for size, _ in curve.ideal:
            sizes.add(round(size))
    base = 2 if max(sizes) > MOST_LINEAR_SIZE else 0
    ticks: dict[float, str] = {}
    for size in sorted(sizes):
        if not base or size & (size - 1) == 0 or size == max(sizes):
            ticks[size] = str(size)
    return Axis(label, "world_size", ticks=ticks, base=base)


def _ends(curves: Sequence[DrawnCurve], kind: str) -> str:
    """Return the value at the end of each curve: `On 4 GPUs: eager 18,676; compile 25,738.`"""
    by_size: dict[float, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for curve in curves:
        for size, value, _ in curve.points:
            by_size[size][single_line(curve.label)].append(estimate(value, kind))
    most = max(by_size)
    names = short_names(single_line(curve.label) for curve in curves)
    parts = []
    for label, texts in by_size[most].items():
        if len(texts) == 1 and len(curves) > 1:
            parts.append(f"{names[label]} {texts[0]}")
        elif len(texts) == 1:
            parts += texts
    if not parts:
        return ""
    subject = "Efficiency on" if kind == "share" else "On"
    return f"{subject} {most} GPUs: {'; '.join(parts)}."


class OptionLine(NamedTuple):
    """The rates of cells that differ in one option alone, by its value."""

    label: str
    key: Mapping[str, str]  # what was asked of its first cell
    points: Sequence[tuple[float, Point]]


def rates_by_option(study: Study, findings: Findings) -> Section | None:
    """Return a figure for each model and option that is a number; None without three values."""
    by_gpus: dict[tuple[Member, ...], list[CurvePoint]] = defaultdict(list)
    for each in points_of(findings.scaling.curves):
        by_gpus[each.point.gpus].append(each)
    if not by_gpus or not study.trains:
        return None
    gpus, points = max(by_gpus.items(), key=lambda item: (len(item[1]), len(item[0])))
    options: dict[str, None] = {}
    for _, point in points:
        options |= dict.fromkeys(point.key)
    panels: dict[tuple[str, str], list[OptionLine]] = defaultdict(list)
    for option in options:
        for line in _option_lines(option, points):
            panels[option, line.key["model.name"]].append(line)
    figures = []
    for panel, ((option, model), lines) in enumerate(list(panels.items())[:MOST_FIGURES], 1):
        more = ""
        if panel == MOST_FIGURES:
            more = truncation_note(list(panels), MOST_FIGURES, "more figure", "points.csv")
        about = f"{single_line(model)} on {gpu_list(gpus)}"
        figures.append(_option_figure(study, f"by-option-{panel}", option, about, lines, more))
    if not figures:
        return None
    return Section("scaling", "Configurations", figures=tuple(figures))


def _option_lines(option: str, points: Sequence[CurvePoint]) -> list[OptionLine]:
    members: dict[frozenset[tuple[str, str]], dict[float, CurvePoint]] = defaultdict(dict)
    for each in points:
        # It may follow from the number of GPUs.
        follows = option == "batch_size" and "global_batch_size" in each.point.key
        rest = dict(each.point.key)
        try:
            value = float(rest.pop(option, ""))
        except ValueError:
            continue  # no number
        if 0 < value < math.inf and not follows and option not in NO_AXES:
            if option == "accumulate" and "global_batch_size" not in rest:
                rest["batch_size"] = str(each.point.batch_size / value)  # of a micro-step
            members[frozenset(rest.items())][value] = each
    lines = []
    for by_value in members.values():
        if len(by_value) >= FEWEST_VALUES:
            curve, point = next(iter(by_value.values()))
            words = curve.label.split(BETWEEN)
            part = format_option(option, point.key[option])
            while part in words:
                words.remove(part)
            ordered = [(value, by_value[value].point) for value in sorted(by_value)]
            label = BETWEEN.join(words) or point.key["model.name"]
            lines.append(OptionLine(label, ordered[0][1].key, ordered))
    return lines


def _option_figure(
    study: Study, name: str, option: str, about: str, lines: Sequence[OptionLine], more: str
) -> Figure:
    shown = sorted(lines, key=lambda line: -len(line.points))[:MOST_CURVES]
    names = short_names(single_line(line.label) for line in shown)
    palette = colours(line.key["strategy.name"] for line in shown)
    curves, highest = [], []
    values: set[float] = set()
    notes = about_intervals(study, "Error bars:")
    for line, marker in zip(shown, MARKERS, strict=False):
        points = []
        for value, point in line.points:
            points.append(DrawnPoint(value, point.rate, point.suspect))
            values.add(value)
            if point.suspect and HOLLOW not in notes:
                notes += HOLLOW
        curves.append(DrawnCurve(line.label, points, palette[line.key["strategy.name"]], marker))
        _, best = max(line.points, key=lambda pair: pair[1].rate.value)
        text = f"{estimate(best.rate, 'rate')} ({format_option(option, best.key[option])})"
        if len(shown) > 1:
            text = f"{in_sentence(names[single_line(line.label)])} {text}"
        highest.append(text)
    option_words = option.rpartition(".")[2].removeprefix("NCCL_")
    if option == "batch_size":
        option_words = "batch size"
    ordered = sorted(values)
    ticks = {value: f"{value:g}" for value in ordered[:: math.ceil(len(ordered) / for_width(10))]}
    base = 0
    if ordered[-1] / ordered[0] >= WIDE_RANGE:
        base = 2
    notes += truncation_note(lines, len(shown), "more line", "points.csv")
    return curves_figure(
        name,
        f"Images per second by {option_words}, {about}.{notes}{more}",
        curves,
        Axis(option_words, option, ticks=ticks, base=base),
        Axis(words_of(study)("images/s"), RATES, "rate", from_zero=True),
        f"Highest: {'; '.join(highest)}.",
    )


MEMORY, POWER, IMAGES_PER_JOULE = "memory/peak_gib", "gpu/power_w", "energy/images_per_joule"
STEP, LONG_STEP = "step/ms_median", "step/ms_p95"
HEADINGS = {
    RATE: "images/s", MEMORY: "peak GiB", "memory/reserved_gib": "reserved GiB",
    "compute/mfu": "MFU of dense peak", POWER: "W of a GPU",
    IMAGES_PER_JOULE: "images/J of all GPUs", STEP: "step ms", LONG_STEP: "p95 step ms",
}  # fmt: skip
# Against the number of GPUs: name, value, upper end of its bar, unit, caption.
AGAINST_GPUS = (
    ("energy", IMAGES_PER_JOULE, IMAGES_PER_JOULE, "images/J", "Images per joule of all GPUs."),
    ("power", POWER, POWER, "W", "Mean power of a GPU while steps are timed."),
    ("steps", STEP, LONG_STEP, "ms", "Median step; bars end at the 95th percentile of steps."),
)


def resources(study: Study, findings: Findings) -> Section | None:
    """Return memory, energy and steps of every configuration; None without two points."""
    figures = list(_against_gpus(study, findings.scaling.curves))
    main = main_point(study, findings)
    gpus = main.point.gpus if main is not None else ()
    runs = [each for each in study.timed if each.gpus == gpus and each.values(MEMORY)]
    if len(runs) > 1:
        figures.insert(0, _memory(study, runs))
    if not figures:
        return None
    columns = [Column("cell", "configuration", names_of(study, study.timed).__getitem__)]
    for metric, heading in HEADINGS.items():
        median = methodcaller("median", metric)
        columns.append(metric_column(metric.replace("/", "_"), metric, median, heading=heading))
    caption = "The median of the runs of each configuration."
    table = Table.of("resources", caption, columns, study.timed, lambda row: row.suspect)
    title = "Memory, energy and step times"
    return Section("resources", title, (), tuple(figures), (table,))


def _memory(study: Study, runs: Sequence[Runs]) -> Figure:
    shown = sorted(runs, key=lambda each: -(each.median(RATE) or 0.0))[:MOST_ROWS]
    names, palette = names_of(study, shown), colours(each.strategy for each in shown)
    words, rows = words_of(study), []
    for each in shown:
        dot, right = Estimate(each.median(MEMORY) or 0.0), f"{number(each.median(RATE))} images/s"
        colour = palette[each.strategy]
        rows.append(DotRow(names[each], words(right), dot, colour, is_doubtful=each.suspect))
    caption = f"Peak memory of any rank, beside the rate; the fastest first.{HOLLOW}"
    caption += truncation_note(runs, len(rows), "more configuration", "resources.csv")
    return rows_figure("memory", caption, rows, Axis("GiB", "peak_gib", shown=(0.0,)))


def _against_gpus(study: Study, curves: Sequence[Curve]) -> Iterator[Figure]:
    of_ids, words = {runs.record_ids: runs for runs in study.runs}, words_of(study)
    palette = colours(curve.points[0].key["strategy.name"] for curve in curves)
    for name, metric, metric_of_end, unit, caption in AGAINST_GPUS:
        drawn = []
        for curve, marker in zip(curves, MARKERS, strict=False):
            points = []
            for point in curve.points:
                runs = of_ids[point.record_ids]
                value, end = runs.median(metric), runs.median(metric_of_end)
                if value is not None:
                    bar = Estimate(value, value, end)
                    points.append(DrawnPoint(point.world_size, bar, point.suspect))
            if len({point.x for point in points}) > 1:
                look = palette[curve.points[0].key["strategy.name"]], marker
                drawn.append(DrawnCurve(curve.label, points, *look))
        if drawn:
            axes = sizes_axis(words("GPUs"), drawn), Axis(words(unit), name, "rate", from_zero=True)
            yield curves_figure(name, caption, drawn, *axes)


INSIDE = {None: "", True: "yes", False: "no"}
CHANGE = NumberFormat(100.0, "%", 2, sign=True)


def forecasts(study: Study, findings: Findings) -> Section | None:
    """Return the forecasts of a study's cells that were made before they ran; None without any.

    `python -m analysis predict STUDY --holdout condition` forecasts cells afterwards.
    """
    rows: list[dict[str, Any]] = []
    for record in study.usable:
        forecast = recorded_forecast(record)
        if forecast is not None and forecast.in_time:
            step_ms, low = forecast.step_ms, forecast.low
            share = finite(record.predicted.get("efficiency"))
            if share and low is not None:
                low = shown_low_ms(low, step_ms, share, record.cell.world_size)
            shown = {"cell": run_name(record), "gpus": gpu_ids(record.cell.members)}
            step = Estimate(step_ms, low, forecast.high)
            rows.append(shown | {"forecast": forecast, "forecast_ms": step})
    if not rows:
        return None
    names = short_names(row["cell"] for row in rows)
    table = Table.of(
        "forecasts",
        "The measured step of each run, and its forecast from before it ran. The changes say how "
        "much longer the measured step is than the forecast, and than that of the nearest run.",
        (
            Column("cell", "run", lambda row: names[row["cell"]]),
            Column("gpus", "GPUs"),
            Column("step_ms", "step ms", lambda row: row["forecast"].measured_ms, "ms"),
            Column("forecast_ms", "forecast ms", kind="ms", bounded=True),
            Column("error", "vs. forecast", lambda row: row["forecast"].error, CHANGE),
            Column(
                "null_error", "vs. naive forecast", lambda row: row["forecast"].null_error, CHANGE
            ),
            Column("inside", "in interval", lambda row: INSIDE[row["forecast"].inside]),
        ),
        rows,
        lambda row: row["forecast"].inside is False,
    )
    line = f"Forecast: {about_forecasts(study.usable)}."
    return Section("forecasts", "Forecast and measured", (line,), tables=(table,))
