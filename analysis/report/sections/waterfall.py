"""Where the rate goes: the waterfall's figure and table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from analysis.findings.waterfall import NOT_TOLD
from analysis.report.figures import REST, bare, more_in, text_right_of
from analysis.report.measured_values import RATE, in_parentheses
from analysis.report.numbers import NumberFormat, number
from analysis.report.section import Section
from analysis.report.style import (
    COLOURS,
    HATCH,
    INK,
    MUTED,
    Picture,
    drawn,
    figure_width,
    for_width,
    new_figure,
    rendered,
    within,
)
from analysis.report.tables import Column, Table
from analysis.study.draws import scaled
from analysis.study.estimates import Estimate, Findings, Waterfall, WaterfallPart
from analysis.study.names import gpu_ids, ran_alone, short_names, things_of, unit_of
from analysis.study.names import names_of_unit as of_unit
from analysis.study.study import Study, middle
from analysis.text import single_line

WATERFALLS = 3
PALE = 0.4
LOSS = COLOURS["vermillion"][0]
GAIN = COLOURS["green"][0]
HATCHES = {GAIN: "////", REST: "\\\\\\\\"}  # tells them apart in grey


def waterfall(study: Study, findings: Findings) -> Section | None:
    """Return where the rate goes, part by part, down to the residual. One GPU alone loses nothing to others."""
    if not study.trains or (study.records and ran_alone(study)):
        return None
    names = short_names(dict.fromkeys(one.label for one in findings.waterfalls))
    rows: list[tuple[Any, ...]] = []
    for one in findings.waterfalls:
        for row in waterfall_rows(one):
            value = row.rate if isinstance(row, Level) else row.lost and scaled(row.lost, -1.0)
            share = value.value / one.ideal.value if value is not None and one.ideal.value else None
            rows.append(
                (
                    names[one.label],
                    gpu_ids(one.gpus),
                    of_unit(row.name, unit_of(study)),
                    value,
                    share,
                    row.ms if isinstance(row, WaterfallPart) else None,
                    row.why if isinstance(row, WaterfallPart) else "",
                )
            )
    table = Table(
        "waterfall", "From the ideal rate to the measured one; parts and residual add up to the gap."
        f"{in_parentheses(study)}",
        (
            Column("cell", "cell"), Column("gpus", unit_of(study)), Column("part", "part"),
            Column("images_per_second", f"{things_of(study)}/s", "rate", True),
            Column("share", "of ideal", "part"), Column("ms", "ms of a step", NumberFormat(decimals=2), True),
            Column("why", "note"),
        ),
        tuple(rows),
    )  # fmt: skip
    lines = []
    if not rows:
        rates = middle(study.usable, RATE) is not None or not study.usable
        known = "To see where the loss comes from, run with waterfall=true." if rates else ""
        lines.append(
            known or f"Not known: no cell that counts measured {things_of(study)} per second."
        )
    return Section(
        "waterfall",
        "Where the rate goes",
        tuple(lines),
        tuple(waterfall_figures(findings.waterfalls, names, unit_of(study), things_of(study))),
        (table,),
        place=20,
    )


@dataclass(frozen=True)
class Level:
    """A rate between the parts of a waterfall."""

    name: str
    rate: Estimate


def waterfall_rows(one: Waterfall) -> list[Level | WaterfallPart]:
    """Return the rows from the top: all members alone if the spread is known, the ideal, what is lost, the measured rate."""
    above = [part for part in one.parts if part.above_ideal]
    spread = sum(part.lost.value for part in above if part.lost is not None)
    known = any(part.lost is not None for part in above)
    top: list[Level | WaterfallPart] = (
        [Level("all members alone", Estimate(one.ideal.value + spread))] if known else []
    )
    residual = Estimate(one.residual, one.residual_low, one.residual_high)
    return [
        *top,
        *above,
        Level(f"ideal, {len(one.gpus)} × slowest", one.ideal),
        *(part for part in one.parts if not part.above_ideal),
        WaterfallPart("residual", residual, "what no part explains"),
        Level("measured", one.measured),
    ]


def waterfall_figures(
    waterfalls: Sequence[Waterfall], names: Mapping[str, str], unit: str, things: str
) -> Iterator[Picture]:
    """Yield a figure for each waterfall: from the ideal rate down to the measured one, a bar for each known part."""
    for place, one in enumerate(waterfalls[:WATERFALLS], 1):
        more = (
            more_in(waterfalls, WATERFALLS, "more waterfall", "waterfall.csv")
            if place == WATERFALLS
            else ""
        )
        how = " with the strategy" if one.with_strategy else ""
        slowest = f"{len(one.gpus)} × the slowest {unit.removesuffix('s')} alone{how}"
        caption = f"{single_line(names[one.label])}, {unit} {gpu_ids(one.gpus)}: from {slowest} to the measured rate."
        pale = " Pale: not told apart from 0." if any(map(_not_told_from_0, one.parts)) else ""
        yield _waterfall(
            one,
            f"waterfall-{place}",
            f"{caption} The axis does not begin at 0.{pale}{more}",
            unit,
            things,
        )


def _waterfall(one: Waterfall, name: str, caption: str, unit: str, things: str) -> Picture:
    rows = waterfall_rows(one)
    figure, axes = new_figure(figure_width(), 0.5 + 0.34 * len(rows))
    axes.set_xlim(*_window(one, rows))
    at = one.ideal.value
    for y, row in enumerate(rows):
        if isinstance(row, WaterfallPart):
            at = _step(axes, y, at, row, one.ideal.value)
            continue
        at = row.rate.value
        axes.plot(at, y, marker="D", color=INK, markersize=5, zorder=3, clip_on=False)
        if row.rate.low is not None and row.rate.high is not None:
            axes.plot([row.rate.low, row.rate.high], [y, y], color=INK, lw=1.2, zorder=3)
        text_right_of(axes, max(at, row.rate.high or at), y, number(at, "rate"))
    axes.set_yticks(
        range(len(rows)),
        [
            fill(of_unit(single_line(row.name, 34), unit), max(18, for_width(34) - 6))
            for row in rows
        ],
    )
    axes.invert_yaxis()
    axes.set_xlabel(f"{things}/s")
    axes.locator_params(axis="x", nbins=4 if for_width(4) >= 4 else 2)
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:g}"
    )
    bare(axes)
    keys = (
        "part",
        f"lost_{things.replace(' ', '_')}_per_second",
        f"{things.replace(' ', '_')}_per_second",
    )
    numbers = [
        (row.name, *((row.lost, None) if isinstance(row, WaterfallPart) else (None, row.rate)))
        for row in rows
    ]
    return rendered(figure, name, caption, drawn(keys, numbers))


def _window(one: Waterfall, rows: Sequence[Level | WaterfallPart]) -> tuple[float, float]:
    """Return the limits of the axis: they show every level and every bar; see `within`."""
    at, values, ends = one.ideal.value, [one.ideal.value], [one.ideal.low, one.ideal.high]
    for row in rows:
        if isinstance(row, Level):
            at = row.rate.value
            ends += [row.rate.low, row.rate.high]
        elif row.lost is not None:
            ends += [None if end is None else at - end for end in (row.lost.low, row.lost.high)]
            at -= row.lost.value
        values.append(at)
    return within(values, [end for end in ends if end is not None])


def _step(axes: Any, y: int, at: float, part: WaterfallPart, ideal: float) -> float:
    """Draw one part as a bar from the end of the one before, and return its own end."""
    axes.plot([at, at], [y - 1, y + 0.29], color=MUTED, lw=0.7, zorder=1)
    if part.lost is None:
        text_right_of(axes, at, y, "not known")
        return at
    lost = part.lost.value
    colour = REST if part.name == "residual" else LOSS if lost >= 0 else GAIN
    hatch = HATCHES.get(colour, "")
    alpha = PALE if _not_told_from_0(part) else 1.0
    axes.barh(
        y,
        -lost,
        left=at,
        height=0.58,
        color=colour,
        hatch=hatch,
        edgecolor=HATCH,
        lw=0,
        alpha=alpha,
        zorder=2,
    )
    ends = [at, at - lost]
    if part.lost.low is not None and part.lost.high is not None:
        axes.plot([at - part.lost.high, at - part.lost.low], [y, y], color=INK, lw=1.0, zorder=3)
        ends.append(at - part.lost.low)
    text_right_of(axes, max(ends), y, _loss(lost, ideal))
    axes.plot([at - lost] * 2, [y - 0.29, y + 1], color=MUTED, lw=0.7, zorder=1)
    return at - lost


def _not_told_from_0(part: WaterfallPart) -> bool:
    """Tell whether an interval holds 0, or whether only a bound is known."""
    low, high = (part.lost.low, part.lost.high) if part.lost else (None, None)
    return NOT_TOLD in part.why or (low is not None and high is not None and low <= 0 <= high)


def _loss(lost: float, ideal: float) -> str:
    """Return a loss and its share of the ideal rate: `−88 (0.5 %)`."""
    share = f" ({number(abs(lost) / ideal, 'share')})" if ideal else ""
    sign = "−" if lost > 0 else "+" if lost < 0 else ""
    return f"{sign}{number(abs(lost), 'rate')}{share}"


SECTIONS = (waterfall,)
