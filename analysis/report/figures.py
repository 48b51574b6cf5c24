"""Figures of rows: the waterfall, bandwidth by link class, strategies and comparisons; and the heat maps of pairs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.findings.model import Comparison, Estimate, Noise, Part, Waterfall, Wire
from analysis.findings.runs import gpu_ids
from analysis.findings.study import BETWEEN
from analysis.p2p.heat_map import squares
from analysis.report.numbers import ABSENT, count, estimate, number
from analysis.report.style import (
    COLOURS,
    INK,
    MUTED,
    RULE,
    Picture,
    colours,
    marker,
    new_figure,
    rendered,
    window,
    within,
)
from analysis.report.tables import plain
from analysis.topology.link_classes import best_first

WIDTH = 4.6  # inches
ROW = 0.4  # inches of a row with its label above
ROW_LENGTH = 68  # characters of that label
WATERFALLS, ROWS, LARGEST_MAP = 3, 20, 16
AGAINST, CUT = " against ", " …"
LEAST_LEFT = 8  # characters, for what two names share; less would tell nothing
LOSS, GAIN, REST = COLOURS["vermillion"][0], COLOURS["green"][0], COLOURS["grey"][0]


@dataclass(frozen=True)
class Level:
    """A rate between the parts of a waterfall."""

    name: str
    rate: Estimate


def waterfall_rows(one: Waterfall) -> list[Level | Part]:
    """From the top down: all members alone where the spread is known, the ideal, what is taken off it, the measured rate."""
    above = [part for part in one.parts if part.above_ideal]
    spread = sum(part.lost.value for part in above if part.lost is not None)
    known = any(part.lost is not None for part in above)
    top: list[Level | Part] = [Level("all members alone", Estimate(one.ideal.value + spread))] if known else []
    residual = Estimate(one.residual, one.residual_low, one.residual_high)
    return [
        *top,
        *above,
        Level(f"ideal, {len(one.gpus)} × slowest", one.ideal),
        *(part for part in one.parts if not part.above_ideal),
        Part("residual", residual, "what no part explains"),
        Level("measured", one.measured),
    ]


def waterfall_figures(waterfalls: Sequence[Waterfall], names: Mapping[str, str], unit: str) -> Iterator[Picture]:
    """From the ideal rate down to the measured one, a bar for each part that a cell tells."""
    for place, one in enumerate(waterfalls[:WATERFALLS], 1):
        more = _more(waterfalls, WATERFALLS, "more waterfall", "waterfall.csv") if place == WATERFALLS else ""
        slowest = f"{len(one.gpus)} × the slowest {unit.removesuffix('s')} alone"
        caption = f"{plain(names[one.label])}, {unit} {gpu_ids(one.gpus)}: from {slowest} to the measured rate."
        yield _waterfall(one, f"waterfall-{place}", f"{caption} The axis does not begin at 0.{more}")


def _more(everything: Sequence[object], most: int, noun: str, file: str) -> str:
    """` 3 more rows are in wires.csv.`; empty where all are drawn."""
    left = len(everything) - most
    return f" {count(left, noun)} {'is' if left == 1 else 'are'} in {file}." if left > 0 else ""


def _waterfall(one: Waterfall, name: str, caption: str) -> Picture:
    rows = waterfall_rows(one)
    figure, axes = new_figure(WIDTH, 0.5 + 0.34 * len(rows))
    axes.set_xlim(*_window(one, rows))
    at = one.ideal.value
    for y, row in enumerate(rows):
        if isinstance(row, Part):
            at = _step(axes, y, at, row, one.ideal.value)
            continue
        at = row.rate.value
        axes.plot(at, y, marker="D", color=INK, markersize=5, zorder=3, clip_on=False)
        if row.rate.low is not None and row.rate.high is not None:
            axes.plot([row.rate.low, row.rate.high], [y, y], color=INK, lw=1.2, zorder=3)
        _beside(axes, max(at, row.rate.high or at), y, number(at, "rate"))
    axes.set_yticks(range(len(rows)), [plain(row.name, 34) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("images/s")
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:g}")
    _bare(axes)
    return rendered(figure, name, caption)


def _window(one: Waterfall, rows: Sequence[Level | Part]) -> tuple[float, float]:
    """Every level and every end of a bar, and intervals that do not dwarf them."""
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


def _step(axes: Any, y: int, at: float, part: Part, ideal: float) -> float:
    """One part as a bar from where the last one ended; returns where it ends."""
    axes.plot([at, at], [y - 1, y + 0.29], color=MUTED, lw=0.7, zorder=1)
    if part.lost is None:
        _beside(axes, at, y, "not told")
        return at
    lost = part.lost.value
    colour = REST if part.name == "residual" else LOSS if lost >= 0 else GAIN
    axes.barh(y, -lost, left=at, height=0.58, color=colour, zorder=2)
    ends = [at, at - lost]
    if part.lost.low is not None and part.lost.high is not None:
        axes.plot([at - part.lost.high, at - part.lost.low], [y, y], color=INK, lw=1.0, zorder=3)
        ends.append(at - part.lost.low)
    _beside(axes, max(ends), y, _loss(lost, ideal))
    axes.plot([at - lost] * 2, [y - 0.29, y + 1], color=MUTED, lw=0.7, zorder=1)
    return at - lost


def _loss(lost: float, ideal: float) -> str:
    """`−88 (0.5 %)`: what is taken off; the share is of the ideal rate."""
    share = f" ({number(abs(lost) / ideal, 'share')})" if ideal else ""
    sign = "−" if lost > 0 else "+" if lost < 0 else ""
    return f"{sign}{number(abs(lost), 'rate')}{share}"


def _beside(axes: Any, x: float, y: float, text: str) -> None:
    axes.annotate(
        text,
        (min(x, axes.get_xlim()[1]), y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        annotation_clip=False,
    )


def _bare(axes: Any) -> None:
    axes.grid(axis="y", visible=False)
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.xaxis.label.set_color(INK)


def _rows(count: int) -> tuple[Any, Any]:
    """A figure whose rows have their label above them: as wide for long labels as for short ones."""
    figure, axes = new_figure(WIDTH, 0.55 + ROW * count)
    axes.set_ylim(count - 0.3, -0.75)
    axes.set_yticks([])
    _bare(axes)
    axes.grid(visible=False)
    axes.hlines(
        [y + 0.08 for y in range(count)], 0, 1, transform=axes.get_yaxis_transform(), color=RULE, lw=0.7, zorder=0
    )
    return figure, axes


def _label(axes: Any, y: float, text: str, right: str = "") -> None:
    """The row's name above it on the left; its number on the right. Both together fit the figure's width."""
    at = axes.get_yaxis_transform()
    axes.text(0.0, y - 0.3, plain(text, max(20, ROW_LENGTH - len(right))), transform=at, va="center", fontsize=8)
    axes.text(1.0, y - 0.3, right, transform=at, va="center", ha="right", fontsize=8, color=MUTED)


def wire_figure(wires: Sequence[Wire], names: Mapping[str, str]) -> Iterator[Picture]:
    """Bandwidth of the exchange by link class and strategy, beside what a peer copy measured."""
    with_rate = [wire for wire in wires if wire.exchange_gb_per_s is not None]
    order = best_first(wire.link_class or ABSENT for wire in with_rate)
    groups: dict[tuple[int, str, str, str], list[Wire]] = {}
    for wire in with_rate:
        name = names[wire.label or wire.strategy]
        key = (order.index(wire.link_class or ABSENT), wire.strategy, name, wire.transport or "")
        groups.setdefault(key, []).append(wire)
    if not groups:
        return
    palette = colours(wire.strategy for wire in wires)
    shown = sorted(groups)[:ROWS]
    transports = {transport for *_, transport in groups}
    figure, axes = _rows(len(shown))
    for y, key in enumerate(shown):
        members = groups[key]
        rates = [wire.exchange_gb_per_s for wire in members if wire.exchange_gb_per_s is not None]
        limits = [wire.p2p_gb_per_s for wire in members if wire.p2p_gb_per_s is not None]
        axes.plot(rates, [y + 0.08] * len(rates), marker(key[1]), color=palette[key[1]], alpha=0.85, zorder=3)
        axes.plot(limits, [y + 0.08] * len(limits), "|", color=INK, markersize=9, markeredgewidth=1.4, zorder=2)
        told = (order[key[0]], key[2], key[3] if len(transports) > 1 else "")
        words = [word for word in told if word and word != ABSENT]
        least, most = (number(end(rates)) for end in (min, max))
        _label(axes, y, " · ".join(words), least if least == most else f"{least} to {most}")
    axes.set_xlim(left=0)
    axes.set_xlabel("exchange, busbw GB/s")
    caption = "Bandwidth of the exchange by link class, a dot for each subset"
    if len(transports) == 1 and any(transports):
        caption += f", all of them {plain(next(iter(transports)))}"
    if any(wire.p2p_gb_per_s for wire in wires):
        caption += "; upright strokes: the measured peer copy over the worst link of the ring"
    yield rendered(figure, "wires", f"{caption}.{_more(list(groups), ROWS, 'more row', 'wires.csv')}")


def strategy_figure(rows: Sequence[tuple[str, str, Estimate]], name: str, what: str) -> Picture:
    """Images per second of (label, strategy, rate) rows, best first."""
    palette = colours(strategy for _, strategy, _ in rows)
    shown = sorted(rows, key=lambda row: (-row[2].value, row[0]))[:ROWS]
    figure, axes = _rows(len(shown))
    for y, (label, strategy, rate) in enumerate(shown):
        _dot(axes, y, rate, palette[strategy], marker(strategy))
        _label(axes, y, label, estimate(rate, "rate"))
    axes.set_xlim(*window([rate for _, _, rate in shown]))
    axes.set_xlabel("images/s")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}")
    caption = f"Images per second, {plain(what)}, with 95 % intervals. The axis does not begin at 0."
    return rendered(figure, name, caption + _more(rows, ROWS, "more row", "strategies.csv"))


def _dot(axes: Any, y: float, value: Estimate, colour: str, form: str) -> None:
    if value.low is not None and value.high is not None:
        axes.plot([value.low, value.high], [y + 0.08] * 2, color=colour, lw=1.6, zorder=2)
    axes.plot(value.value, y + 0.08, form, color=colour, zorder=3)


def comparison_figure(
    comparisons: Sequence[Comparison], noises: Sequence[Noise], names: Mapping[str, str]
) -> Iterator[Picture]:
    """Differences with intervals, largest first, over the band in which equal cells of the study differ."""
    judged = [one for one in comparisons if one.verdict]
    shown = sorted(judged, key=lambda one: (-abs(one.difference.value), one.first, one.second))[:ROWS]
    if not shown:
        return
    rates = {one.rate for one in shown}
    floors = {one.rate: one.floor for one in noises if one.floor and one.rate in rates}
    figure, axes = _rows(len(shown))
    for y, one in enumerate(shown):
        if floor := floors.get(one.rate):
            axes.barh(y + 0.08, 2 * floor, left=-floor, height=0.34, color=RULE, zorder=1)
        axes.plot([0, 0], [y - 0.09, y + 0.25], color=MUTED, lw=0.9, zorder=1)
        colour = {"faster": COLOURS["blue"][0], "slower": COLOURS["vermillion"][0]}.get(one.verdict, REST)
        _dot(axes, y, one.difference, colour, "o")
        size = f"{number(one.difference.value, 'change')}, {one.verdict}"
        _label(axes, y, _pair(one, names, ROW_LENGTH - len(size)), size)
    bands = [0.0, *(end for floor in floors.values() for end in (-floor, floor))]
    axes.set_xlim(*window([one.difference for one in shown], bands))
    axes.set_xlabel(f"difference in {rates.pop() if len(rates) == 1 else 'the rate'}")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{100 * value:{'+.3g' if abs(value) < 1 else '+,.0f'}} %".replace("-", "−") if value else "0"
    )
    band = "; band: how far equal cells of this study differ" if floors else ""
    yield rendered(
        figure, "comparisons",
        f"Differences with 95 % intervals{band}." + _more(judged, ROWS, "more comparison", "comparisons.csv"),
    )  # fmt: skip


def _pair(one: Comparison, names: Mapping[str, str], length: int) -> str:
    """`LOC against NVL · gpus 0,3`: what differs, then what these two share and other comparisons do not.

    Of two long names the shorter keeps what it needs.
    """
    first, second = (names[name].split(BETWEEN) for name in (one.first, one.second))
    shared = [part for part in second if part in first]
    sides = [[part for part in parts if part not in shared] for parts in (second, first)]
    setting = one.asked.removeprefix("NCCL_").partition(" ")[0]
    if all(any(setting in part for part in parts) for parts in sides):  # LOC against untouched: no more is needed
        sides = [[part for part in parts if setting in part] for parts in sides]
    mine, other = (BETWEEN.join(parts) or "the default" for parts in sides)
    room = length - len(AGAINST)
    text = AGAINST.join(
        _cut(name, max(room // 2, room - len(beside))) for name, beside in ((mine, other), (other, mine))
    )
    whole = BETWEEN.join([text, *shared])
    return plain(whole, length) if len(text) < length - LEAST_LEFT else text


def _cut(name: str, length: int) -> str:
    """Its first parts, as many as fit."""
    if len(name) <= length or BETWEEN not in name:
        return plain(name, length)
    parts = name.split(BETWEEN)
    while len(parts) > 1 and len(BETWEEN.join(parts)) > length - len(CUT):
        parts.pop()
    left = BETWEEN.join(parts)
    return left + CUT if len(left + CUT) <= length else plain(left, length)


def heat_map(
    ids: Sequence[int], cells: Sequence[Sequence[float | None]], name: str, caption: str, unit: str
) -> Picture:
    """A square of numbers between devices: row sends to column. Dark is better; the number is in every field."""
    ids = ids[:LARGEST_MAP]
    pairs = {(a, b): value for a, row in zip(ids, cells, strict=False) for b, value in zip(ids, row, strict=False)}
    figure, axes = new_figure(min(WIDTH, 1.2 + 0.5 * len(ids)), min(WIDTH, 1.0 + 0.5 * len(ids)))
    squares(axes, ids, {pair: value for pair, value in pairs.items() if value is not None}, unit)
    axes.tick_params(labelcolor=MUTED)  # which the page changes with its own colours
    axes.xaxis.label.set_color(MUTED)
    axes.grid(visible=False)
    return rendered(figure, name, caption)
