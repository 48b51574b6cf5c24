"""The question of a sweep (launch.py ask=) with its race and its answer, from journal and records.

The launcher writes the question into the study's journal before the first run. Everything else
follows from the records: which candidate runs next, and what the answer is. So a sweep that is
resumed, the report and MLflow say what the launcher said.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from analysis.study.names import BETWEEN, unit
from analysis.study.noise_floor import SIGMA_AT_95, Scatter, Scatters, group_of_cell
from analysis.study.race import (
    ABOVE,
    BELOW,
    EQUAL,
    ERROR,
    FAILED,
    OPEN,
    SLOWER,
    TIED,
    Arm,
    Look,
    Race,
    Standing,
)
from analysis.study.rates import primary_rate
from analysis.text import count, join_words
from benchmarks.record import Kind, Record, metrics, read_lines
from conf.cell import Cell
from conf.question import DIFFERS, FASTEST, SCALES, Question

JOURNAL = "journal.jsonl"
MOST_RUNS = 20  # of a candidate
MOST_NAMED = 4  # candidates of a sentence


@dataclass(frozen=True)
class Asked:
    """A question, its candidates, and what earlier runs showed of their scatter."""

    sweep_id: str
    question: Question
    names: tuple[str, ...]
    keys: tuple[str, ...]  # of the candidates' cells
    sizes: tuple[int, ...]  # number of GPUs
    unit: str  # what they count
    earlier: tuple[Scatter, ...]

    def to_line(self) -> dict[str, Any]:
        """Return the fields of its line in the journal."""
        return dataclasses.asdict(self)

    @staticmethod
    def of(question: Question, sweep_id: str, cells: Sequence[Cell], scatters: Scatters) -> "Asked":
        """Return the question of a sweep whose candidates are some cells; `scatters` is what other
        studies of this machine showed."""
        return Asked(
            sweep_id,
            question,
            names_of_cells(cells),
            tuple(cell.key for cell in cells),
            tuple(cell.world_size for cell in cells),
            f"{unit(cells[0].device)}s",
            tuple(_earlier(cell, scatters) for cell in cells),
        )


def _earlier(cell: Cell, scatters: Scatters) -> Scatter:
    request, metric = group_of_cell(cell)[2:], primary_rate(cell).metric
    total = Scatter()
    for (group, name), scatter in scatters.items():
        if name == metric and group[2:] == request:
            total += scatter
    return total


def names_of_cells(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return a name for each of some cells: the parts in which it differs from others."""
    parts = [cell.name.split(BETWEEN) for cell in cells]
    common = set(parts[0]).intersection(*parts[1:])
    names = []
    for of_cell in parts:
        own = [part for part in of_cell if part not in common]
        names.append(BETWEEN.join(own) or "without settings")
    return tuple(names)


def questions_of(folder: Path) -> dict[str, Asked]:
    """Return the questions of a study's sweeps by sweep_id, the last one last; damaged lines, and a
    journal that is no file, ask nothing."""
    questions: dict[str, Asked] = {}
    try:
        lines = list(read_lines(folder / JOURNAL))
    except OSError:
        return questions
    for line in lines:
        if line["kind"] != Kind.QUESTION:
            continue
        fields = {field.name: line.get(field.name) for field in dataclasses.fields(Asked)}
        try:
            asked = msgspec.convert(fields, Asked)
        except ValueError:
            continue
        columns = (asked.names, asked.keys, asked.sizes, asked.earlier)
        if len(set(map(len, columns))) == 1 and asked.names:
            questions[asked.sweep_id] = asked
    return questions


class RaceState(NamedTuple):
    """A race as far as the records go."""

    race: Race
    pending: tuple[int, ...]  # candidates whose next run is missing; empty: it is over
    records: tuple[tuple[Record, ...], ...]  # of each candidate

    @property
    def last(self) -> Look | None:
        """The last look; None before there is one."""
        return self.race.looks[-1] if self.race.looks else None


def replay(asked: Asked, records: Iterable[Record]) -> RaceState:
    """Return the race of a question, run again from the records of its candidates."""
    runs: list[dict[int, Record]] = [{} for _ in asked.keys]
    for record in records:
        key = dataclasses.replace(record.cell, repeat=0).key
        if key in asked.keys and record.state in ("finished", "failed"):
            runs[asked.keys.index(key)][record.cell.repeat] = record
    candidates = list(map(Arm, asked.names, asked.sizes, asked.earlier))
    race = Race(asked.question, candidates)
    used: list[list[Record]] = [[] for _ in candidates]
    turn = race.first_turn()
    while turn:
        for place, index in enumerate(turn):
            run = runs[index].get(len(used[index]))
            if run is None:
                return RaceState(race, turn[place:], tuple(map(tuple, used)))
            used[index].append(run)
            _learn(candidates[index], run)
        turn = race.look().turn
        if any(len(used[index]) >= MOST_RUNS for index in turn):
            break
    return RaceState(race, (), tuple(map(tuple, used)))


def _learn(candidate: Arm, record: Record) -> None:
    rate = primary_rate(record.cell)
    value = record.metrics.get(rate.metric, math.nan)
    if record.state == "failed":
        candidate.failure = record.failure.cause if record.failure else record.state
    elif not record.usable or not 0 < value < math.inf:
        candidate.failure = ", ".join(record.validity.against) or f"no {rate.metric}"
    if candidate.failure:
        return
    candidate.rates.append(-math.log(value) if rate.is_time else math.log(value))
    ends = metrics.interval(rate.metric, record.within_run)
    error = 0.0
    if ends is not None and 0 < ends[0] <= ends[1] < math.inf:
        error = math.log(ends[1] / ends[0]) / 2 / SIGMA_AT_95
    candidate.errors.append(error)


# --- the answer


def percent(share: float, signed: bool = False) -> str:
    """Return a share in percent with two digits that count."""
    text = f"{100 * share:.2g}" if abs(share) < 0.1 else f"{100 * share:.0f}"
    if signed and share > 0:
        text = f"+{text}"
    return f"{text} %".replace("-", "−")


def answer(asked: Asked, done: RaceState) -> list[str]:
    """Return the answer in sentences, the answer itself first; of an open question what is open."""
    look = done.last
    if look is None:
        return [f"Open: {asked.question.kind} was asked, and not every candidate has run."]
    sentences = {FASTEST: _fastest, DIFFERS: _differs, SCALES: _scales}
    lines = [*sentences[asked.question.kind](asked, look)]
    failed = []
    for name, candidate in zip(asked.names, done.race.candidates, strict=True):
        if candidate.failure:
            failed.append(f"{name} ({candidate.failure})")
    if failed:
        lines.append(f"Without a result: {join_words(failed, MOST_NAMED)}.")
    suspect = []
    for name, records in zip(asked.names, done.records, strict=True):
        if any(record.validity.verdict == "suspect" for record in records):
            suspect.append(name)
    if suspect:
        lines.append(f"Checks cast doubt on runs of {join_words(suspect, MOST_NAMED)}.")
    lines.append(_effort(asked, done))
    return lines


def is_answered(done: RaceState) -> bool:
    """Return whether nothing is left open."""
    return bool(done.last) and not done.pending and not _open(done.last)


def seconds(done: RaceState) -> float:
    """Return how long the runs took, in seconds."""
    return sum(each.ended_at - each.started_at for records in done.records for each in records)


def _open(look: Look | None) -> list[int]:
    standings = look.standings if look else ()
    return [index for index, each in enumerate(standings) if each.state == OPEN]


def _effort(asked: Asked, done: RaceState) -> str:
    runs = sum(map(len, done.records))
    text = f"{count(runs, 'run')} in {seconds(done):,.0f} s"
    if is_answered(done):
        grid = 5 * len(asked.names)
        return f"{text} (a grid with five repeats: {grid} runs); wrong in at most {percent(ERROR)}."
    more = _further_runs(asked, done)
    if more:
        hours = more * seconds(done) / runs / 3600
        rounded = float(f"{more:.2g}")
        text += f"; the answer would take about {rounded:,.0f} more, {hours:.2g} h"
    return f"{text}."


def _further_runs(asked: Asked, done: RaceState) -> int:
    """Return how many runs more would decide what is open, if they scatter as those so far; 0:
    too little is known."""
    question, more, look = asked.question, 0.0, done.last
    for index in _open(look):
        low, high = look.standings[index].logs if look else (-math.inf, math.inf)
        if not math.isfinite(high - low):
            return 0
        middle, half = (low + high) / 2, (high - low) / 2
        needed = question.log_margin - middle  # half the interval that decides
        if question.kind == DIFFERS:
            needed = max(abs(middle), question.log_margin - abs(middle))
        elif question.kind == SCALES:
            above = middle - math.log(question.efficiency)
            needed = max(above + question.log_margin, -above)
        if needed > 0:
            more += 2 * len(done.records[index]) * max(0.0, (half / needed) ** 2 - 1)
    return math.ceil(more)


def _rest(asked: Asked, look: Look, state: str) -> list[tuple[str, Standing]]:
    rest = []
    for index, standing in enumerate(look.standings):
        if standing.state == state and index != look.reference:
            rest.append((asked.names[index], standing))
    return sorted(rest, key=lambda each: -each[1].difference)


def _interval(standing: Standing) -> str:
    if math.isinf(standing.low) or math.isinf(standing.high):
        return "not known before repeats"
    return f"{percent(standing.low, True)} to {percent(standing.high, True)}"


def _fastest(asked: Asked, look: Look) -> Iterator[str]:
    name, margin = asked.names[look.reference], percent(asked.question.margin)
    tied = [each for each, _ in _rest(asked, look, TIED)]
    slower = _rest(asked, look, SLOWER)
    rivals = _rest(asked, look, OPEN)
    if rivals:
        parts = [f"{rival} ({_interval(standing)})" for rival, standing in rivals]
        yield f"Open: {name} leads; {join_words(parts, MOST_NAMED)} may be faster."
    elif tied:
        yield (
            f"Fastest: {name}, tied with {join_words(tied, MOST_NAMED)} (no other is more than "
            f"{margin} faster)."
        )
    else:
        yield f"Fastest: {name}."
    if slower:
        parts = [f"{rival} by {percent(-standing.difference)}" for rival, standing in slower]
        yield f"Slower: {join_words(parts, MOST_NAMED)}."


def _differs(asked: Asked, look: Look) -> Iterator[str]:
    first, margin = asked.names[look.reference], percent(asked.question.margin)
    for index, standing in enumerate(look.standings):
        name, ends = asked.names[index], _interval(standing)
        if index == look.reference or standing.state == FAILED:
            continue
        if standing.state == EQUAL:
            yield f"{name} is as fast as {first} within {margin} ({ends})."
        elif standing.state == OPEN:
            yield f"Open: {name} against {first}: {ends}."
        else:
            by = percent(abs(standing.difference))
            yield f"{name} is {standing.state} than {first} by {by} ({ends})."


def _scales(asked: Asked, look: Look) -> Iterator[str]:
    limit = percent(asked.question.efficiency)
    order = sorted(range(len(asked.sizes)), key=lambda index: asked.sizes[index])
    above = order[0]
    for index in order[1:]:
        standing = look.standings[index]
        if standing.state == ABOVE:
            above = index
        elif standing.state == BELOW:
            break
    size = f"{asked.sizes[above]} {asked.unit}"
    share = 1 + look.standings[above].difference
    if above == order[0]:
        yield f"The efficiency is below {limit} on more than {size}."
    else:
        yield f"The efficiency stays above {limit} up to {size} ({100 * share:.1f} %)."
    for index in order[1:]:
        standing = look.standings[index]
        further, low, high = asked.sizes[index], 1 + standing.low, 1 + standing.high
        ends = f"{100 * low:.1f} to {100 * high:.1f} %"
        if standing.state == BELOW:
            yield f"With {further} it is {100 * (1 + standing.difference):.1f} % ({ends})."
        elif standing.state == OPEN and not math.isnan(standing.difference):
            yield f"Open: with {further} it is {ends}."


def summary(
    asked: Asked | None, records: Iterable[Record]
) -> tuple[dict[str, str], dict[str, float]]:
    """Return tags and metrics of a question, for the parent run of its sweep in MLflow; empty where
    nothing was asked. `records` are the study's."""
    if asked is None:
        return {}, {}
    done = replay(asked, records)
    tags = {"ask": asked.question.kind, "ask.answer": answer(asked, done)[0]}
    return tags, {
        "ask/margin": asked.question.margin,
        "ask/error": ERROR,
        "ask/runs": float(sum(map(len, done.records))),
        "ask/seconds": seconds(done),
        "ask/answered": float(is_answered(done)),
    }
