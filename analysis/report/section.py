"""The sections of a report: sentences, figures and tables on each question that a study answers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.findings.model import Curve, Estimate, Findings, Part, Point
from analysis.findings.runs import gpu_ids
from analysis.findings.study import Study, middle, named, short_names
from analysis.report.figures import Level, strategy_figure, waterfall_figures, waterfall_rows, wire_figure
from analysis.report.numbers import count, number
from analysis.report.sections.scaling import scaling_figures, unit_of
from analysis.report.style import Picture
from analysis.report.tables import Column, Table, plain
from analysis.trace.metrics import DISAGREEMENT, TRACE_EXPOSED
from benchmarks.record import Record

STRATEGY_FIGURES = 2
WITHOUT_EFFECT = "setting_no_effect"  # a code of analysis.validity.checks
RATE = "throughput/images_per_second"


@dataclass(frozen=True)
class Section:
    """One question. `anchor` is its place on the page."""

    anchor: str
    title: str
    lines: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    commands: tuple[str, ...] = ()


def sentence(text: str) -> str:
    """Beginning with a capital and ending in a full stop; a name at the beginning stays as it is."""
    first = text.split(" ", 1)[0]
    text = text[:1].upper() + text[1:] if first.isalpha() else text
    return text if text.endswith((".", "!", "?")) else f"{text}."


def few(lines: Iterable[str], most: int = 8) -> list[str]:
    """The first lines, each once, and how many more there are."""
    each = list(dict.fromkeys(lines))
    return each[:most] + ([f"… and {len(each) - most:,} more of this kind."] if len(each) > most else [])


def scaling(study: Study, found: Findings) -> Section:
    """Curves, their points, the fits, and what was not compared."""
    curves, one = found.scaling.curves, unit_of(study).removesuffix("s")
    names = short_names(dict.fromkeys(curve.label for curve in curves))
    rows = tuple(
        (
            names[curve.label], curve.kind, gpu_ids(p.gpus), p.world_size, p.runs, p.batch_size, p.rate, p.baseline,
            p.slowest, p.speedup, p.efficiency, gpu_ids(p.without_baseline), "suspect" if p.suspect else "",
        )
        for curve in curves for p in curve.points
    )  # fmt: skip
    table = Table(
        "points", "Every subset, with 95 % intervals; efficiency and speed-up are over the slowest member alone.",
        (
            Column("curve", "curve"), Column("kind", "scaling"), Column("gpus", unit_of(study)),
            Column("world_size", "n", "count"),
            Column("runs", "runs", "count"), Column("batch_size", "batch", "count"),
            Column("images_per_second", "images/s", "rate", True), Column("baseline", "slowest alone", "rate", True),
            Column("slowest", f"slowest {one}", "count"), Column("speedup", "speed-up", "ratio", True),
            Column("efficiency", "efficiency", "share", True), Column("without_baseline", "not measured alone"),
            Column("mark", "mark"),
        ),
        rows, frozenset(place for place, row in enumerate(rows) if row[-1]),
    )  # fmt: skip
    lines = few([sentence(text) for text in found.scaling.refusals])
    if not curves:
        lines.insert(0, "No usable cell measured images per second.")
    pictures = tuple(scaling_figures(study, curves))
    return Section("scaling", "Scaling", tuple(lines), pictures, (table, _fits(curves, names)))


def _fits(curves: Sequence[Curve], names: Mapping[str, str]) -> Table:
    def shares(parameters: Mapping[str, float]) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {number(value, 'share')}" for name, value in parameters.items())

    laws = {"amdahl": "Amdahl", "usl": "universal scalability law"}
    return Table(
        "fits", "Laws fitted to the curves that have points enough; no point is missed by more than the error.",
        (Column("curve", "curve"), Column("law", "law"), Column("parameters", "shares"), Column("error", "error", "share")),
        tuple(
            (names[curve.label], laws.get(fit.law, fit.law), shares(fit.parameters), fit.error)
            for curve in curves for fit in curve.fits
        ),
    )  # fmt: skip


def waterfall(study: Study, found: Findings) -> Section:
    """Where the rate goes, part by part, down to the residual."""
    names = short_names(dict.fromkeys(one.label for one in found.waterfalls))
    rows: list[tuple[Any, ...]] = []
    for one in found.waterfalls:
        for row in waterfall_rows(one):
            value = row.rate if isinstance(row, Level) else _taken_off(row.lost)
            share = value.value / one.ideal.value if value is not None and one.ideal.value else None
            rows.append(
                (names[one.label], gpu_ids(one.gpus), row.name, value, share, row.why if isinstance(row, Part) else "")
            )
    table = Table(
        "waterfall", "From the ideal rate to the measured one; parts and residual add up to the gap.",
        (
            Column("cell", "cell"), Column("gpus", unit_of(study)), Column("part", "part"),
            Column("images_per_second", "images/s", "rate", True), Column("share", "of ideal", "part"), Column("why", "note"),
        ),
        tuple(rows),
    )  # fmt: skip
    lines = []
    if not rows:
        rates = middle(study.usable, RATE) is not None or not study.usable
        adds = "it takes the control cells that waterfall=true adds to a sweep"
        lines.append(f"Not told: {adds if rates else 'no usable cell measured images per second'}.")
    return Section(
        "waterfall",
        "Where the rate goes",
        tuple(lines),
        tuple(waterfall_figures(found.waterfalls, names, unit_of(study))),
        (table,),
    )


def _taken_off(lost: Estimate | None) -> Estimate | None:
    if lost is None:
        return None
    known = lost.low is not None and lost.high is not None
    return Estimate(-lost.value, *((-lost.high, -lost.low) if known else ()))  # type: ignore[operator]


def wires(study: Study, found: Findings) -> Section:
    """The exchange beside the links that it had, and what a link is worth."""
    names = short_names(dict.fromkeys(w.label or w.strategy for w in found.wires))
    rows = tuple(
        (
            names[w.label or w.strategy], w.strategy, gpu_ids(w.gpus), w.link_class, w.transport, w.exchange_gb_per_s,
            w.p2p_gb_per_s, w.efficiency, w.stands_out,
        )
        for w in found.wires
    )  # fmt: skip
    table = Table(
        "wires", "Each subset's exchange (busbw) beside its worst link and the peer copy measured over it.",
        (
            Column("cell", "cell"), Column("strategy", "strategy", shown=False), Column("gpus", unit_of(study)),
            Column("link_class", "link class"), Column("transport", "transport"),
            Column("exchange_gb_per_s", "exchange GB/s", "number"),
            Column("p2p_gb_per_s", "peer copy GB/s", "number"), Column("efficiency", "efficiency", "share"),
            Column("stands_out", "stands out"),
        ),
        rows, frozenset(place for place, row in enumerate(rows) if row[-1]),
    )  # fmt: skip
    one = unit_of(study).removesuffix("s")
    worth = Table(
        "worth", f"What a link is worth: images per second and {one} lost with a class instead of the best one.",
        (
            Column("cell", "cell"), Column("strategy", "strategy"), Column("link_class", "link class"),
            Column("lost", f"lost images/s per {one}", "number", True), Column("gradient_bytes", "gradient bytes", "count"),
            Column("batch_size", "batch", "count"),
        ),
        tuple((w.label, w.strategy, w.link_class, w.lost, w.gradient_bytes, w.batch_size) for w in found.worth),
    )  # fmt: skip
    lines = few(sentence(w.stands_out) for w in found.wires if w.stands_out)
    if not rows:
        lines.append(f"No cell of several {unit_of(study)} with known links measured its exchange.")
    return Section("wires", "Bandwidth and links", tuple(lines), tuple(wire_figure(found.wires, names)), (table, worth))


def strategies(study: Study, found: Findings) -> Section:
    """Every set of equal cells with its exchange: what it takes, what the machine allows, what of it is exposed."""
    curves = {one: (curve, p) for curve in found.scaling.curves for p in curve.points for one in p.record_ids}
    groups = [group for group in study.groups if len(group[0].cell.gpus) > 1 and _measured(group)]
    groups.sort(key=lambda group: (-len(group[0].cell.gpus), -(middle(group, RATE) or 0.0)))
    labels = [
        curves[group[0].record_id][0].label if group[0].record_id in curves else group[0].name for group in groups
    ]
    names = short_names(dict.fromkeys(labels))
    rows = [
        _strategy_row(group, names[label], curves[group[0].record_id][1] if group[0].record_id in curves else None)
        for group, label in zip(groups, labels, strict=True)
    ]
    unit = unit_of(study)
    table = Table(
        "strategies",
        f"Sets of equal cells on several {unit}, medians over runs. "
        f"GB/s per {unit[:-1]} is gradient bytes · 2(n−1)/n ÷ exchange.",
        (
            Column("cell", "cell"), Column("model", "model", shown=False), Column("strategy", "strategy", shown=False),
            Column("gpus", unit), Column("runs", "runs", "count"),
            Column("images_per_second", "images/s", "rate", True),
            Column("exchange_ms", "exchange ms", "number", True),
            Column("gb_per_second_per_gpu", f"GB/s per {unit[:-1]}", "number"),
            Column("of_limit", "of limit", "share"), Column("limit", "limit"),
            Column("exposed_ms", "exposed ms", "number", True),
            Column("exposed_by_trace_ms", "exposed by trace", "number"), Column("difference_ms", "difference", "number"),
            Column("mark", "mark"),
        ),
        tuple(rows), frozenset(place for place, row in enumerate(rows) if row[-1]),
    )  # fmt: skip
    lines = _without_effect(study) if rows else (f"No usable cell ran on several {unit}.",)
    return Section("strategies", "Strategies and settings", lines, tuple(_strategy_figures(study, rows)), (table,))


def _without_effect(study: Study) -> tuple[str, ...]:
    """The settings that changed nothing, as NCCL's log shows, and in how many cells."""
    told = Counter(
        str(record.validity.codes[WITHOUT_EFFECT]) for record in study.usable if WITHOUT_EFFECT in record.validity.codes
    )
    return tuple(few(f"Changed nothing: {plain(said, 300)} ({count(cells, 'cell')})." for said, cells in told.items()))


def _measured(group: Sequence[Record]) -> bool:
    return any(middle(group, metric) is not None for metric in (RATE, "comm/exchange_ms"))


def _strategy_figures(study: Study, rows: Sequence[tuple[Any, ...]]) -> Iterator[Picture]:
    """For each model that has several settings on its largest number of GPUs."""
    place = 0
    for model in dict.fromkeys(row[1] for row in rows):
        mine = [row for row in rows if row[1] == model and row[5] is not None]
        most = max((row[3].count(",") for row in mine), default=0)
        mine = [row for row in mine if row[3].count(",") == most]
        if len({row[0] for row in mine}) < 2 or place == STRATEGY_FIGURES:
            continue
        place += 1
        labels = short_names(dict.fromkeys(row[0] for row in mine))
        subsets = len({row[3] for row in mine}) > 1
        drawn = [(labels[row[0]] + (f" · gpus {row[3]}" if subsets else ""), row[2], row[5]) for row in mine]
        yield strategy_figure(drawn, f"strategies-{place}", f"{model} on {most + 1} {unit_of(study)}")


def _strategy_row(group: Sequence[Record], label: str, point: Point | None) -> tuple[Any, ...]:
    first = group[0]
    gpus, exchange = first.cell.gpus, bounded(group, "comm/exchange_ms")
    size = first.model.get("gradient_bytes")
    per_gpu = None
    if size and exchange is not None and exchange.value > 0:
        per_gpu = size * 2 * (len(gpus) - 1) / len(gpus) / (exchange.value / 1000) / 1e9
    limits = sorted({str(record.checks["limit"]) for record in group if record.checks.get("limit")})
    return (
        label, named(first, "model"), named(first, "strategy"), gpu_ids(gpus), len(group),
        point.rate if point else bounded(group, RATE), exchange, per_gpu, middle(group, "comm/ideal_ratio"),
        ", ".join(limits), bounded(group, "comm/exposed_ms"),
        middle(group, TRACE_EXPOSED), middle(group, DISAGREEMENT),
        "suspect" if any(record.validity.verdict != "valid" for record in group) else "",
    )  # fmt: skip


def bounded(group: Sequence[Record], metric: str) -> Estimate | None:
    """The median over runs; a single run has its own interval."""
    value = middle(group, metric)
    if value is None:
        return None
    prefix = "throughput/ci_" if metric == RATE else f"{metric}_ci_"
    low, high = (group[0].metrics.get(f"{prefix}{end}") if len(group) == 1 else None for end in ("low", "high"))
    return Estimate(value, low, high)
