"""The candidates of a question (ask=) while it is measured: how each stands, best first."""

import math

from rich.table import Table
from rich.text import Text

from analysis.study.asked import Asked, RaceState, percent, seconds
from analysis.study.race import (
    ABOVE,
    BELOW,
    EQUAL,
    FAILED,
    FASTER,
    LEADS,
    OPEN,
    SLOWER,
    TIED,
    Arm,
    Standing,
)
from analysis.study.rates import is_of_training, primary_rate

STYLES = {
    **dict.fromkeys((LEADS, FASTER, ABOVE), "green"),
    **dict.fromkeys((SLOWER, BELOW), "dim"),
    **dict.fromkeys((EQUAL, TIED), ""),
    OPEN: "cyan",
    FAILED: "red",
}


def race_table(asked: Asked, race: RaceState, things: str) -> Table:
    """Return the standings as a table; `things` are images or samples."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    title = f"ask={asked.question.kind} margin={percent(asked.question.margin)}"
    table.add_column(title, no_wrap=True, overflow="ellipsis")
    against = "difference"
    if race.last is not None:
        against = f"against {asked.names[race.last.reference]}"
    for name in ("runs", "s", f"{things}/s", against, "interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    order = sorted(
        range(len(asked.names)),
        key=lambda index: -_mean(race.race.candidates[index]),
    )
    for index in order:
        candidate, standing = race.race.candidates[index], Standing(OPEN)
        if race.last is not None:
            standing = race.last.standings[index]
        records = race.records[index]
        rate = ""
        if candidate.rates:
            value = math.exp(_mean(candidate))
            if not is_of_training(primary_rate(records[0].cell).name):
                rate = f"{value:.4g}"
            else:
                rate = f"{value:,.0f}"
        spent = sum(record.ended_at - record.started_at for record in records)
        difference, ends = "", ""
        if not math.isnan(standing.difference) and standing.state != LEADS:
            difference = percent(standing.difference, True)
            if standing.high > standing.low > -1:
                ends = f"{percent(standing.low, True)} to {percent(standing.high, True)}"
        state = candidate.failure or standing.state
        if index in race.pending[:1]:
            state += " ▸"
        style = STYLES[standing.state]
        texts = (asked.names[index], str(len(records)), f"{spent:.0f}", rate, difference, ends)
        table.add_row(*(Text(text, style) for text in (*texts, state)))
    table.caption = f"{seconds(race):,.0f} s of runs"
    table.caption_justify = "left"
    return table


def _mean(candidate: Arm) -> float:
    return candidate.mean if candidate.rates else -math.inf
