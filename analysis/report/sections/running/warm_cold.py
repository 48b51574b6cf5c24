"""Whether warm ranks measure what new ranks measure: the verdict of warm_cold, as sentences, a figure and a table."""

import math
from collections.abc import Callable, Iterator, Sequence

from analysis.findings.model import Estimate, Findings
from analysis.findings.study import Study
from analysis.findings.warm.proof import EXPOSED_MARGIN_MS, RATE_MARGIN, WarmCold, warm_against_cold
from analysis.report.figures import REST, ROWS, dot, more_in, row_label, rows_figure
from analysis.report.numbers import NumberFormat, estimate, number
from analysis.report.section import Section
from analysis.report.style import COLOURS, MUTED, RULE, Picture, drawn, rendered
from analysis.report.tables import Column, Table
from analysis.report.text import count, single_line
from analysis.statistics.equivalence import DIFFERENT, EQUIVALENT, Equivalence

CHANGE = NumberFormat(100.0, "%", 2, sign=True)
MS = NumberFormat(decimals=3, sign=True)
OF_RATE, OF_EXPOSED = f"±{100 * RATE_MARGIN:g} % of the rate", f"±{EXPOSED_MARGIN_MS:g} ms of exposed communication"
MARGINS = f"{OF_RATE} and {OF_EXPOSED}"
LOOKS = {EQUIVALENT: (COLOURS["blue"][0], "o"), DIFFERENT: (COLOURS["vermillion"][0], "D")}


def verdicts(study: Study) -> tuple[str, ...]:
    """Return a sentence for each cell that was measured in turns of warm and cold."""
    return tuple(_sentence(one) for one in warm_against_cold(study))


def _sentence(one: WarmCold) -> str:
    turns = count(len(one.turns), "turn")
    numbers, margins = f"the rate by {estimate(_share(one.rate), CHANGE)}", OF_RATE if one.cost is None else MARGINS
    if one.cost is not None:
        numbers += f" and exposed communication by {estimate(_ms(one.cost), MS)} ms"
    said = f"{single_line(one.label, 80)}: warm ranks change {numbers} (90 % intervals, {turns} of A B B A)"
    if one.verdict == EQUIVALENT:
        return f"{said}: equivalent to new ranks within {margins}."
    if one.verdict == DIFFERENT:
        return f"{said}: different from new ranks by more than {margins}."
    more = f"; about {one.needed:,} turns would be" if one.needed else ""
    return f"{said}: not enough to say whether that is within {margins}{more}."


def _share(one: Equivalence) -> Estimate:
    """Return a mean difference of logarithms with its interval as a share."""
    ends = [math.expm1(end) if math.isfinite(end) else None for end in (one.low, one.high)]
    return Estimate(math.expm1(one.mean), *ends)


def _ms(one: Equivalence) -> Estimate:
    ends = [end if math.isfinite(end) else None for end in (one.low, one.high)]
    return Estimate(one.mean, *ends)


def warm_cold(study: Study, findings: Findings) -> Section | None:
    """Return the comparison of every cell that was measured in turns of warm and cold; None where none was."""
    found = warm_against_cold(study)
    if not found:
        return None
    rows = tuple(
        (
            single_line(one.label), one.verdict, len(one.turns), one.left_out or None, _share(one.rate), one.rate.chance,
            one.rate.verdict, _ms(one.cost) if one.cost else None, one.cost.chance if one.cost else None,
            one.cost.verdict if one.cost else "", one.needed,
        )
        for one in found
    )  # fmt: skip
    table = Table(
        "warm_cold", f"Warm ranks against new ones, with 90 % intervals; equivalent is within {MARGINS}. "
        "p: the chance of this if they differed by so much.",
        (
            Column("cell", "cell"), Column("verdict", "verdict"), Column("turns", "turns", "count"),
            Column("left_out", "left out", "count"), Column("rate_change", "rate", CHANGE, True),
            Column("rate_p", "p", NumberFormat(decimals=3)), Column("rate_verdict", "by the rate", shown=False),
            Column("exposed_change_ms", "exposed, ms", MS, True), Column("exposed_p", "p", NumberFormat(decimals=3)),
            Column("exposed_verdict", "by exposed communication", shown=False),
            Column("needed", "turns needed", "count"),
        ),
        rows,
    )  # fmt: skip
    lines = [_sentence(one) for one in found]
    if left_out := sum(one.left_out for one in found):
        lines.append(
            f"{count(left_out, 'turn')} {'is' if left_out == 1 else 'are'} left out: some run failed or is invalid, or its ranks "
            "were not those that were planned."
        )
    return Section(
        "warm-cold", "Warm ranks against new ranks", tuple(lines), tuple(_pictures(found)), (table,), place=84
    )


def _pictures(found: Sequence[WarmCold]) -> Iterator[Picture]:
    """Yield each turn's difference and their mean over the band of the margin: of the rate, then of exposed communication."""
    of_rate = [
        (one, [math.expm1(turn.rate) for turn in one.turns], _share(one.rate), one.rate.verdict) for one in found
    ]
    yield _picture("warm-cold-1", of_rate, RATE_MARGIN, "the rate", lambda value: number(value, CHANGE))
    of_cost = [
        (one, [turn.cost_ms for turn in one.turns if turn.cost_ms is not None], _ms(one.cost), one.cost.verdict)
        for one in found
        if one.cost is not None
    ]
    if of_cost:
        yield _picture(
            "warm-cold-2", of_cost, EXPOSED_MARGIN_MS, "exposed communication", lambda value: f"{number(value, MS)} ms"
        )


def _picture(
    name: str,
    every: Sequence[tuple[WarmCold, list[float], Estimate, str]],
    margin: float,
    what: str,
    worded: Callable[[float], str],
) -> Picture:
    shown = every[:ROWS]
    figure, axes = rows_figure(len(shown))
    for y, (one, turns, mean, verdict) in enumerate(shown):
        axes.barh(y + 0.08, 2 * margin, left=-margin, height=0.34, color=RULE, zorder=1)
        axes.plot([0, 0], [y - 0.09, y + 0.25], color=MUTED, lw=0.9, zorder=1)
        axes.plot(turns, [y + 0.08] * len(turns), "|", color=MUTED, ms=6, zorder=2)
        colour, form = LOOKS.get(verdict, (REST, "o"))
        dot(axes, y, mean, colour, form)
        row_label(axes, y, one.label, f"{worded(mean.value)}, {verdict}")
    axes.set_xlabel(f"change of {what}, warm against cold")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: worded(value) if value else "0")
    caption = (
        f"Change of {what} in warm ranks: each turn (strokes), and their mean with its 90 % interval. Band: what counts "
        f"as equal.{more_in(every, ROWS, 'more cell', 'warm_cold.csv')}"
    )
    rows = [(one.label, turn, margin, verdict) for one, turns, _, verdict in shown for turn in turns]
    return rendered(figure, name, caption, drawn(("cell", "change", "margin", "verdict"), rows))


SECTIONS = (warm_cold,)
