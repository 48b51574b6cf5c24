"""Which differences are real: verdicts and the noise floor, as a sentence, a figure and a table."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from analysis.report.figures import REST, ROW_LENGTH, ROWS, dot, more_in, row_label, rows_figure
from analysis.report.numbers import estimate, number
from analysis.report.section import Section
from analysis.report.style import COLOURS, MUTED, RULE, Picture, drawn, for_width, rendered, window
from analysis.report.tables import Column, Table
from analysis.study.draws import scaled
from analysis.study.estimates import Comparison, Estimate, Findings, Noise
from analysis.study.names import NAMES_BETWEEN as BETWEEN
from analysis.study.names import short_names
from analysis.study.rates import is_of_training
from analysis.study.study import Study
from analysis.text import count, join_words, single_line

AGAINST = " against "
CUT = " …"
LEAST_LEFT = 8  # characters, for what two names share; less would tell nothing


def comparison_figure(
    comparisons: Sequence[Comparison], noises: Sequence[Noise], names: Mapping[str, str]
) -> Iterator[Picture]:
    """Yield differences with intervals, largest first, over the band in which equal cells of the study differ."""
    judged = [one for one in comparisons if one.verdict]
    shown = sorted(judged, key=lambda one: (-abs(one.difference.value), one.first, one.second))[
        :ROWS
    ]
    if not shown:
        return
    rates = {one.rate for one in shown}
    floors = {one.rate: one.floor for one in noises if one.floor and one.rate in rates}
    figure, axes = rows_figure(len(shown))
    for y, one in enumerate(shown):
        if floor := floors.get(one.rate):
            axes.barh(y + 0.08, 2 * floor, left=-floor, height=0.34, color=RULE, zorder=1)
        axes.plot([0, 0], [y - 0.09, y + 0.25], color=MUTED, lw=0.9, zorder=1)
        colour = {"faster": COLOURS["blue"][0], "slower": COLOURS["vermillion"][0]}.get(
            one.verdict, REST
        )
        dot(
            axes,
            y,
            one.difference,
            colour,
            {"faster": ">", "slower": "<"}.get(one.verdict or "", "o"),
        )
        size = number(one.difference.value, "change") + (
            f", {one.verdict}" if for_width(ROW_LENGTH) >= ROW_LENGTH else ""
        )
        row_label(axes, y, _pair(one, names, for_width(ROW_LENGTH) - len(size)), size)
    bands = [0.0, *(end for floor in floors.values() for end in (-floor, floor))]
    axes.set_xlim(*window([one.difference for one in shown], bands))
    axes.set_xlabel(f"difference in {rates.pop() if len(rates) == 1 else 'the rate'}")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(
        lambda value, _: (
            f"{100 * value:{'+.3g' if abs(value) < 1 else '+,.0f'}} %".replace("-", "−")
            if value
            else "0"
        )
    )
    band = "; band: how far equal cells of this study differ" if floors else ""
    yield rendered(
        figure, "comparisons",
        f"Differences with 95 % intervals{band}. Arrows: faster, slower; dots: no difference seen."
        + more_in(judged, ROWS, "more comparison", "comparisons.csv"),
        drawn(
            ("first_cell", "second_cell", "rate", "difference", "verdict", "noise_floor"),
            [(one.first, one.second, one.rate, one.difference, one.verdict, floors.get(one.rate)) for one in shown],
        ),
    )  # fmt: skip


def _pair(one: Comparison, names: Mapping[str, str], length: int) -> str:
    """Return `LOC against NVL · gpus 0,3`: what differs, then what these two share and other comparisons do not.

    Of two long names the shorter keeps what it needs.
    """
    first, second = (names[name].split(BETWEEN) for name in (one.first, one.second))
    shared = [part for part in second if part in first]
    sides = [[part for part in parts if part not in shared] for parts in (second, first)]
    setting = one.asked.removeprefix("NCCL_").partition(" ")[0]
    if all(
        any(setting in part for part in parts) for parts in sides
    ):  # LOC against untouched: no more is needed
        sides = [[part for part in parts if setting in part] for parts in sides]
    mine, other = (BETWEEN.join(parts) or "the default" for parts in sides)
    room = length - len(AGAINST)
    text = AGAINST.join(
        _cut(name, max(room // 2, room - len(beside)))
        for name, beside in ((mine, other), (other, mine))
    )
    whole = BETWEEN.join([text, *shared])
    return single_line(whole, length) if len(text) < length - LEAST_LEFT else text


def _cut(name: str, length: int) -> str:
    """Return as many of a name's first parts as fit."""
    if len(name) <= length or BETWEEN not in name:
        return single_line(name, length)
    parts = name.split(BETWEEN)
    while len(parts) > 1 and len(BETWEEN.join(parts)) > length - len(CUT):
        parts.pop()
    left = BETWEEN.join(parts)
    return left + CUT if len(left + CUT) <= length else single_line(left, length)


def differences(findings: Findings) -> str:
    """Return the largest difference that is seen, and of how many; or that none is."""
    judged = [one for one in findings.comparisons if one.verdict]
    real = [one for one in judged if one.verdict in ("faster", "slower")]
    if not findings.comparisons:
        return "No two cells of this study differ in one thing alone."
    if not judged:
        pairs = count(len(findings.comparisons), "pair of cells differs", "pairs of cells differ")
        return f"{pairs} in one thing alone, but single runs give no verdict."
    if not real:
        least = [one.smallest for one in judged if one.smallest is not None]
        could = f"; each could have shown one of {number(max(least), 'share')}" if least else ""
        return f"No difference is seen in {count(len(judged), 'comparison')}{could}."
    one = max(real, key=lambda item: abs(item.difference.value))
    pair = short_names(dict.fromkeys((one.first, one.second)))
    first, second = (single_line(pair[name], 80) for name in (one.first, one.second))
    every = short_names(
        dict.fromkeys(name for each in findings.comparisons for name in (each.first, each.second))
    )
    shared = [
        part for part in every[one.second].split(BETWEEN) if part in every[one.first].split(BETWEEN)
    ]
    where = single_line(f" ({', '.join(shared)})", 120) if shared else ""
    of = (
        f"; {len(real):,} of {len(judged):,} comparisons show a difference"
        if len(judged) > 1
        else ""
    )
    return f"{second} is {_than(one)} {first}{where}{of}."


def _than(one: Comparison) -> str:
    """`13.0 % (11.2 to 14.8) slower than`; `2.51 (2.47 to 2.55) times as fast as` from twice as fast on."""
    value = one.difference.value
    if value >= 1:
        ends = (end for end in (one.difference.low, one.difference.high) if end is not None)
        return f"{estimate(Estimate(1 + value, *(1 + end for end in ends)))} times as fast as"
    return (
        f"{estimate(scaled(one.difference, math.copysign(1, value)), 'share')} {one.verdict} than"
    )


def _in(rate: str, noises: Sequence[Noise]) -> str:
    """Return ` in exchanges/s` if a study has several rates, else nothing."""
    return f" in {rate}" if len(noises) > 1 else ""


def _compared(study: Study, findings: Findings) -> str:
    """Return which rates are compared, and the metric of each; empty for images per second alone."""
    rates = {one.rate for one in findings.comparisons}
    if all(map(is_of_training, rates)):
        return ""
    told = [
        f"{one.name} ({'1 ÷ ' if one.is_time else ''}{one.metric})"
        for one in study.rates
        if one.name in rates
    ]
    return f"Compared: {join_words(told)}; more is faster."


def comparisons(study: Study, findings: Findings) -> Section | None:
    """Return the verdicts, and the noise that they are based on; None where there is nothing to compare."""
    names = short_names(
        dict.fromkeys(name for one in findings.comparisons for name in (one.first, one.second))
    )
    rows = tuple(
        (
            names[one.first], names[one.second], one.asked, one.rate, *one.runs, one.difference, one.smallest,
            one.verdict or "no verdict", one.why,
        )
        for one in findings.comparisons
    )  # fmt: skip
    judged, whys = (
        any(one.verdict for one in findings.comparisons),
        {one.why for one in findings.comparisons},
    )
    single = all(one.runs == (1, 1) for one in findings.comparisons)
    table = Table(
        "comparisons",
        _caption(judged, whys),
        (
            Column("first", "first cell"), Column("second", "second cell"), Column("asked", "differ in"),
            Column("rate", "rate", shown=len(findings.noises) > 1),
            Column("first_runs", "runs of the first", "count", shown=not single),
            Column("second_runs", "runs of the second", "count", shown=not single),
            Column("difference", "difference", "change", True), Column("smallest", "visible from", "share"),
            Column("verdict", "verdict", shown=judged), Column("why", "note", shown=judged or len(whys) > 1),
        ),
        rows,
    )  # fmt: skip
    lines = []
    if compared := _compared(study, findings):
        lines.append(compared)
    for noise in findings.noises:
        rate = _in(noise.rate, findings.noises)
        if noise.floor is not None:
            floor, pairs = number(noise.floor, "share"), count(noise.pairs, "pair")
            lines.append(
                f"The noise floor{rate} is {floor}: 19 of 20 pairs of single runs of equal cells differ by less ({pairs} of runs "
                "measured)."
            )
        if noise.drift is not None:
            drift = number(noise.drift, "change")
            lines.append(
                f"The first cell ran once more at the end: its rate changed by {drift}{rate}."
            )
    if study.trains or rows:
        lines.insert(0, differences(findings))
    if not lines:
        return None
    pictures = tuple(comparison_figure(findings.comparisons, findings.noises, names))
    return Section(
        "comparisons",
        "Which differences are real",
        tuple(single_line(line) for line in lines),
        pictures,
        (table,),
        place=80,
    )


def _caption(judged: bool, whys: Collection[str]) -> str:
    """Return what a table of comparisons shows; what all its rows would say is said once, before it."""
    against = "The second cell against the first"
    if judged:
        visible = "“Visible from” is the smallest difference that these runs could have shown."
        return f"{against}, with the 95 % interval of the difference. {visible}"
    return f"{against}. No pair has a verdict{f': {next(iter(whys))}' if len(whys) == 1 and any(whys) else ''}."


SECTIONS = (comparisons,)
