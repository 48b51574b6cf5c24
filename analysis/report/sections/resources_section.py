"""Memory beside the rate, and energy, power and step times against the number of GPUs."""

from collections.abc import Iterator, Sequence
from operator import methodcaller

from analysis.findings.examine import Findings
from analysis.findings.scaling import Curve
from analysis.report import charts
from analysis.report.charts import Axis, DotRow, DrawnCurve, DrawnPoint
from analysis.report.figure import Figure, colours, figure_width, for_screen_and_phone
from analysis.report.main_point import main_point, names_of
from analysis.report.numbers import number
from analysis.report.section import RATE, Section, words_of
from analysis.report.sections.scaling_section import sizes_axis
from analysis.report.table import Column, Table, metric_column
from analysis.study.intervals import Estimate
from analysis.study.runs import Runs
from analysis.study.study import Study

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
    drawn = tuple(for_screen_and_phone(figure, figure_width()) for figure in figures)
    return Section("resources", "Memory, energy and step times", (), drawn, (table,))


def _memory(study: Study, runs: Sequence[Runs]) -> Figure:
    shown = sorted(runs, key=lambda each: -(each.median(RATE) or 0.0))[: charts.MOST_ROWS]
    names, palette = names_of(study, shown), colours(each.strategy for each in shown)
    words, rows = words_of(study), []
    for each in shown:
        dot, right = Estimate(each.median(MEMORY) or 0.0), f"{number(each.median(RATE))} images/s"
        colour = palette[each.strategy]
        rows.append(DotRow(names[each], words(right), dot, colour, is_doubtful=each.suspect))
    caption = f"Peak memory of any rank, beside the rate; the fastest first.{charts.HOLLOW}"
    caption += charts.truncation_note(runs, len(rows), "more configuration", "resources.csv")
    return charts.rows_figure("memory", caption, rows, Axis("GiB", "peak_gib", shown=(0.0,)))


def _against_gpus(study: Study, curves: Sequence[Curve]) -> Iterator[Figure]:
    """Yield a figure for each of AGAINST_GPUS that a curve has of two numbers of GPUs."""
    of_ids, words = {runs.record_ids: runs for runs in study.runs}, words_of(study)
    palette = colours(curve.points[0].key["strategy.name"] for curve in curves)
    for name, metric, metric_of_end, unit, caption in AGAINST_GPUS:
        drawn = []
        for curve, marker in zip(curves, charts.MARKERS, strict=False):
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
            yield charts.curves_figure(name, caption, drawn, *axes)
