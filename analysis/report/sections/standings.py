"""How the candidates of a question (ask=) stand, best first, on terminals and in the report."""

import math

from analysis.report.table import Table, columns_of
from analysis.study.asked import Asked, RaceState, percent, seconds
from analysis.study.conditions import primary_rate
from analysis.study.race import LEADS, OPEN, UNTRIED, Arm, Standing
from analysis.text import binary_size

DIFFERENCE = (
    *columns_of("change", difference="difference", low="at least", high="at most"),
    *columns_of(state="state"),
)


def standings_table(asked: Asked, race: RaceState) -> Table:
    """Return the table of a race, with a row for each candidate."""
    caption = f"ask={asked.question.kind} margin={percent(asked.question.margin)}"
    if race.last is not None:
        caption += f", against {asked.names[race.last.reference]}"
    rows = []
    arms = race.race.candidates
    by_rate = {index: arm.mean if arm.rates else -math.inf for index, arm in enumerate(arms)}
    for index in sorted(by_rate, key=by_rate.__getitem__, reverse=True):
        candidate = arms[index]
        standing = race.last.standings[index] if race.last else Standing(OPEN)
        if standing.state == UNTRIED and not candidate.rates:
            continue  # training is measured with what won a search alone
        state = candidate.failure or standing.state
        if index in race.pending[:1]:
            state += ", runs next"
        row = {
            "candidate": asked.names[index],
            "runs": len(race.records[index]),
            "seconds": sum(record.ended_at - record.started_at for record in race.records[index]),
            "rate": _rate(candidate),
            "state": state,
        }
        if standing.state != LEADS:
            row |= {"difference": standing.difference, "low": standing.low, "high": standing.high}
        rows.append(row)
    names = [primary_rate(record.cell).name for record in race.runs[:1]]
    heading = "busbw, GB/s" if race.size_bytes else "".join(names)
    columns = (
        *columns_of(candidate="candidate"),
        *columns_of("count", runs="runs", seconds="s"),
        *columns_of("rate", rate=heading),
        *DIFFERENCE,
    )
    caption += f"; {seconds(race):,.0f} s of runs."
    return Table.of("question", caption, columns, rows)


def _rate(candidate: Arm) -> float | None:
    return math.exp(candidate.mean) if candidate.rates else None


def sizes_table(asked: Asked, race: RaceState) -> Table | None:
    """Return a table with a row for each message size that was searched; None without any."""
    rows = []
    for stage in race.stages:
        if stage.size_bytes is None or stage.last is None:
            continue
        leader = stage.race.confirmed[-1] if stage.race.confirmed else stage.last.reference
        standing = stage.last.standings[leader]
        row: dict[str, object] = {
            "size": binary_size(stage.size_bytes),
            "leader": asked.names[leader],
            "runs": len(stage.records[leader]),
            "rate": _rate(stage.race.candidates[leader]),
            "first": _rate(stage.race.candidates[0]),
            "state": standing.state,
        }
        if leader:
            row |= {"difference": standing.difference, "low": standing.low, "high": standing.high}
        rows.append(row)
    columns = (
        *columns_of(size="message", leader="fastest of the search"),
        *columns_of("count", runs="runs"),
        *columns_of("rate", rate="busbw, GB/s", first=f"{asked.names[0]}, GB/s"),
        *DIFFERENCE,
    )
    caption = "All-reduce alone: the fastest of each search, and its new runs against the default."
    return Table.of("question_sizes", caption, columns, rows) if rows else None
