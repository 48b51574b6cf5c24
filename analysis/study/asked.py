"""The question of a sweep (launch.py ask=) with its race and its answer, from journal and records.

The launcher writes the question into the study's journal before the first run. Everything else
follows from the records: which candidate runs next, and what the answer is. So a sweep that is
resumed, the report and MLflow say what the launcher said.
"""

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from analysis.study.conditions import primary_rate
from analysis.study.names import BETWEEN, UNTOUCHED, unit, varying
from analysis.study.noise_floor import SIGMA_AT_95, Scatter, Scatters, group_of_cell, is_suspect
from analysis.study.race import (
    ABOVE,
    BELOW,
    EQUAL,
    ERROR,
    FAILED,
    FASTER,
    MOST_RUNS,
    OPEN,
    SLOWER,
    TIED,
    Arm,
    Look,
    Race,
    Standing,
)
from analysis.text import binary_size, count, join_words
from benchmarks.collectives.request import sizes as message_sizes
from benchmarks.record import Kind, Record, read_lines
from conf.cell import Cell
from conf.question import DIFFERS, FASTEST, GAINS, PER_GPU, SCALES, Question

JOURNAL = "journal.jsonl"
BUSBW = "collectives/out_of_place_busbw_gb_per_s"  # by size in bytes
FEWEST_TRIED = 5  # new runs of both before a message size that no number of runs decides is left
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
    settings: tuple[dict[str, str], ...] = ()  # by which each differs from the first
    sizes_bytes: tuple[int, ...] = ()  # of messages: each has a search and a confirmation
    training_keys: tuple[str, ...] = ()  # of the cells that confirm in training what wins there

    @staticmethod
    def of(
        question: Question,
        sweep_id: str,
        cells: Sequence[Cell],
        scatters: Scatters,
        training: Sequence[Cell] = (),
    ) -> "Asked":
        """Return the question of a sweep whose candidates are some cells; `scatters` is what other
        studies of this machine showed, `training` the same candidates in training."""
        return Asked(
            sweep_id,
            question,
            names_of_cells(cells),
            tuple(cell.key for cell in cells),
            tuple(cell.world_size for cell in cells),
            f"{unit(cells[0].device)}s",
            tuple(_earlier_scatter(cell, {} if training else scatters) for cell in cells),
            settings_of(cells),
            tuple(message_sizes(cells[0])) if training else (),
            tuple(cell.key for cell in training),
        )


RunsByCell: TypeAlias = defaultdict[str, dict[int, Record]]  # by cell key, then repeat


def settings_of(cells: Sequence[Cell]) -> tuple[dict[str, str], ...]:
    """Return the options by which each of some cells differs from the first, as they are typed."""
    differing = varying(cells)
    settings = []
    for options in differing:
        changed = {}
        for name, value in options.items():
            if value != differing[0].get(name):
                typed = name.removesuffix(".name").replace("NCCL_", "").lower()
                changed[typed] = "null" if value == UNTOUCHED else value
        settings.append(changed)
    return tuple(settings)


def _earlier_scatter(cell: Cell, scatters: Scatters) -> Scatter:
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
        names.append(BETWEEN.join(own) or "default")
    return tuple(names)


def questions_of(folder: Path) -> dict[str, Asked]:
    """Return the questions of a study's sweeps by sweep_id, the last one last; damaged lines, and a
    journal that is not a file, ask nothing."""
    questions: dict[str, Asked] = {}
    try:
        lines = list(read_lines(folder / JOURNAL))
    except OSError:
        return questions
    for line in lines:
        if line["kind"] != Kind.QUESTION:
            continue
        try:
            asked = msgspec.convert(line, Asked)
        except ValueError:
            continue
        columns = [asked.names, asked.keys, asked.sizes, asked.earlier]
        # Older lines have no settings, and most questions no training.
        columns += filter(None, (asked.settings, asked.training_keys))
        if asked.names and len(set(map(len, columns))) == 1:
            questions[asked.sweep_id] = asked
    return questions


class RaceState(NamedTuple):
    """A race as far as the records go."""

    race: Race
    pending: tuple[int, ...]  # candidates whose next run is missing; empty: it is over
    records: tuple[tuple[Record, ...], ...]  # of each candidate
    keys: tuple[str, ...]  # of the cells that run
    size_bytes: int | None = None  # of the messages whose rate counts; None: the cells' own rate
    before: "tuple[RaceState, ...]" = ()  # the searches that this one confirms in training

    @property
    def last(self) -> Look | None:
        """The last look; None before there is one."""
        return self.race.looks[-1] if self.race.looks else None

    @property
    def stages(self) -> "tuple[RaceState, ...]":
        """This race, and those before it."""
        return (self, *self.before)

    @property
    def runs(self) -> list[Record]:
        """The runs of all stages, each once."""
        by_id: dict[str, Record] = {}
        for stage in self.stages:
            for record in itertools.chain(*stage.records):
                by_id[record.record_id] = record
        return list(by_id.values())

    @property
    def winner(self) -> int | None:
        """The candidate with the largest gain that was shown."""
        standings = self.last.standings if self.last else ()
        faster = [index for index, shown in enumerate(standings) if shown.state == FASTER]
        return max(faster, key=lambda index: standings[index].difference, default=None)


def replay(asked: Asked, records: Iterable[Record]) -> RaceState:
    """Return the race of a question, run again from the records of its candidates. Of several
    stages, the largest messages first, it is the first that is not over, else the last."""
    runs: RunsByCell = defaultdict(dict)
    for record in records:
        if record.state in ("finished", "failed"):
            key = dataclasses.replace(record.cell, repeat=0).key
            runs[key][record.cell.repeat] = record
    before: tuple[RaceState, ...] = ()
    for size_bytes in sorted(asked.sizes_bytes, reverse=True) or (None,):
        stage = _run_again(asked, runs, size_bytes)._replace(before=before)
        before = stage.stages
        if stage.pending:
            return stage
    winners = sorted({stage.winner for stage in before if stage.winner is not None})
    if not (asked.training_keys and winners):
        return stage
    in_training = dataclasses.replace(asked, keys=asked.training_keys)
    return _run_again(in_training, runs, confirmed=(0, *winners))._replace(before=before)


def _run_again(
    asked: Asked, runs: RunsByCell, size_bytes: int | None = None, confirmed: Sequence[int] = ()
) -> RaceState:
    candidates = list(map(Arm, asked.names, asked.sizes, asked.earlier))
    race = Race(asked.question, candidates, confirmed)
    used: list[list[Record]] = [[] for _ in candidates]
    turn = race.first_turn()
    while turn:
        index = turn[0]
        run = runs[asked.keys[index]].get(len(used[index]))
        if run is None:
            break
        used[index].append(run)
        _add_run(asked, race.candidates[index], run, size_bytes)
        turn = turn[1:] or race.look().turn
        if size_bytes is not None and race.confirmed:
            fewest = min(len(race.candidates[index].rates) for index in race.confirmed)
            if fewest >= FEWEST_TRIED and _runs_to_decide(asked, race) is None:
                turn = ()
    return RaceState(race, turn, tuple(map(tuple, used)), asked.keys, size_bytes)


def _add_run(asked: Asked, candidate: Arm, record: Record, size_bytes: int | None) -> None:
    rate = primary_rate(record.cell)
    value = record.metrics.get(rate.metric, math.nan)
    if size_bytes is not None:
        points = record.series.get(BUSBW, ())
        value = next((busbw for size, busbw in points if size == size_bytes), math.nan)
    failure = ""
    if record.state == "failed":
        failure = record.failure.cause if record.failure else record.state
    elif not record.usable or not 0 < value < math.inf:
        failure = ", ".join(record.validity.against) or f"no {rate.metric}"
    if failure and record.cell.repeat and not candidate.failed_repeats:
        candidate.failed_repeats += 1  # it ran before: once more
        return
    candidate.failure = candidate.failure or failure
    if candidate.failure:
        return
    candidate.suspect |= is_suspect(record)
    sign = -1 if rate.is_time else 1
    gpus = candidate.size if asked.question.rate == PER_GPU else 1
    candidate.rates.append(sign * math.log(value) - math.log(gpus))
    ends, error = record.ends_within_run(rate.metric), 0.0
    if size_bytes is None and ends is not None and 0 < ends[0] <= ends[1] < math.inf:
        error = math.log(ends[1] / ends[0]) / 2 / SIGMA_AT_95
    candidate.errors.append(error)


# --- the answer


def percent(share: float, signed: bool = False) -> str:
    """Return a share in percent with two digits that count, no finer than 0.001 %."""
    form = ".2g" if abs(share) < 0.1 else ".0f"
    if signed:
        form = f"+{form}"
    shown = 100 * round(share, 5) + 0.0  # never −0
    return f"{shown:{form}} %".replace("-", "−")


def answer(asked: Asked, state: RaceState) -> list[str]:
    """Return the answer in sentences, the answer itself first; of an open question what is open."""
    lines: list[str] = []
    failed, suspect, codes = {}, dict[str, None](), dict[str, None]()
    for stage in state.stages:
        lines += _stage_sentences(asked, stage)
        for index, name in enumerate(asked.names):
            failure = stage.race.candidates[index].failure
            if failure:
                failed[name] = f"{name} ({failure})"
            for record in filter(is_suspect, stage.records[index]):
                suspect[name] = None
                codes |= dict.fromkeys(record.validity.codes)
    options = recommended(asked, state)
    if options:
        typed = " ".join(f"{name}={value}" for name, value in options.items())
        variables = re.sub(r"\bnccl\.(\w+)", lambda name: f"NCCL_{name[1].upper()}", typed)
        exported = "" if variables == typed else f" ({variables})"
        lines.insert(0, f"Use {typed}{exported}.")
    elif state.before and is_answered(state) and not any(stage.winner for stage in state.stages):
        margin = percent(asked.question.margin)
        lines.insert(0, f"Nothing to gain: no setting is more than {margin} faster.")
    if failed:
        lines.append(f"Without a result: {join_words(list(failed.values()), MOST_NAMED)}.")
    if suspect:
        names, checks = join_words(list(suspect), MOST_NAMED), join_words(list(codes), MOST_NAMED)
        if all(map(is_suspect, state.runs)):
            lines.insert(0, f"Not known: every run is suspect ({checks}).")
        else:
            lines.insert(1, f"Checks cast doubt on runs of {names} ({checks}).")
    lines.append(_effort(asked, state))
    return lines


def _stage_sentences(asked: Asked, stage: RaceState) -> list[str]:
    sentences = {FASTEST: _fastest, DIFFERS: _differs, SCALES: _scales, GAINS: _gains}
    where = "Training: " if stage.before else ""
    if stage.size_bytes is not None:
        where = f"{binary_size(stage.size_bytes)}: "
    if stage.last is None:
        return [f"{where}Undecided: not every candidate has run."]
    return [where + line for line in sentences[asked.question.kind](asked, stage.last)]


def is_answered(state: RaceState) -> bool:
    """Return whether nothing is left open."""
    for stage in state.stages:
        if stage.last is None or _open_candidates(stage.last):
            return False
        if _is_unconfirmed(stage.race.question, stage.last):
            return False
    return not state.pending


def _is_unconfirmed(question: Question, look: Look) -> bool:
    """Return whether what leads a search, or the first candidate, has no result of new runs."""
    if question.kind != GAINS:
        return False
    states = [standing.state for standing in look.standings]
    confirmed = {EQUAL, FASTER, OPEN} & {*states[1:]}
    return look.reference != 0 or states[0] == FAILED or (states[0] == EQUAL and not confirmed)


def seconds(state: RaceState) -> float:
    """Return how long the runs took, in seconds."""
    return sum(record.ended_at - record.started_at for record in state.runs)


def _open_candidates(look: Look | None) -> list[int]:
    standings = look.standings if look else ()
    return [index for index, standing in enumerate(standings) if standing.state == OPEN]


def _effort(asked: Asked, state: RaceState) -> str:
    runs = len(state.runs)
    text = f"{count(runs, 'run')} in {seconds(state):,.0f} s"
    if is_answered(state):
        grid = 5 * len(asked.names)
        text += f"; five runs of each configuration would have been {count(grid, 'run')}"
        each = " for each size" if len(state.stages) > 1 else ""
        text += f". Stopping early gives a wrong answer in at most {percent(ERROR)} of cases"
        return f"{text}{each}."
    more = _runs_to_decide(asked, state.race)
    if more is None:
        text += f"; {MOST_RUNS} runs of each would not answer it"
    elif more:
        minutes = math.ceil(more * seconds(state) / runs / 60)
        text += f"; the answer would take about {more} more, {count(minutes, 'minute')}"
    return f"{text}."


def _runs_to_decide(asked: Asked, race: Race) -> int | None:
    """Return how many runs more would decide what is open, if they scatter as those so far; None:
    more than are allowed; 0: too little is known."""
    question, total = asked.question, 0
    look = race.looks[-1] if race.looks else None
    if look is None or (question.kind == GAINS and look.reference):
        return 0  # the search has ended, and no new run confirms its leader yet
    for index in _open_candidates(look):
        low, high = look.standings[index].logs
        if not math.isfinite(high - low):
            return 0
        middle, half_width = (low + high) / 2, (high - low) / 2
        deciding_half_width = question.log_margin - middle
        if question.kind == DIFFERS:
            deciding_half_width = max(abs(middle), question.log_margin - abs(middle))
        elif question.kind == GAINS:
            deciding_half_width = abs(deciding_half_width)
        elif question.kind == SCALES:
            above = middle - math.log(question.efficiency)
            deciding_half_width = max(above + question.log_margin, -above)
        allowed = 2 * (MOST_RUNS - len(race.candidates[index].rates))
        for more in range(2, allowed + 1, 2):
            if half_width * race.narrowed(index, more) <= deciding_half_width:
                total += more
                break
        else:
            return None
    return total


def _others(asked: Asked, look: Look, state: str) -> list[tuple[str, Standing]]:
    others = []
    for index, standing in enumerate(look.standings):
        if standing.state == state and index != look.reference:
            others.append((asked.names[index], standing))
    return sorted(others, key=lambda named: -named[1].difference)


def _interval(standing: Standing) -> str:
    if math.isinf(standing.low) or math.isinf(standing.high):
        return "too few runs for an interval"
    return f"{percent(standing.low, True)} to {percent(standing.high, True)}"


def _fastest(asked: Asked, look: Look) -> Iterator[str]:
    name, margin = asked.names[look.reference], percent(asked.question.margin)
    tied = _others(asked, look, TIED)
    slower = _others(asked, look, SLOWER)
    rivals = _others(asked, look, OPEN)
    parts = [f"{rival} ({_interval(standing)})" for rival, standing in rivals or tied]
    if rivals:
        rest = join_words(parts, MOST_NAMED)
        yield f"Undecided: {name} leads; these may be faster (rate compared with it): {rest}."
    elif tied:
        yield (
            f"Fastest: {name}, tied with {join_words(parts, MOST_NAMED)}. No other is more than "
            f"{margin} faster than it."
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
            yield f"Undecided: {name} against {first}: {ends}."
        else:
            by = percent(abs(standing.difference))
            least, most = sorted((abs(standing.low), abs(standing.high)))
            inside = f"{percent(least)} to {percent(most)}"
            way = "higher" if standing.difference > 0 else "lower"
            yield f"{name} is {standing.state} than {first}: its rate is {by} {way} ({inside})."


def _gains(asked: Asked, look: Look) -> Iterator[str]:
    first, margin = asked.names[0], percent(asked.question.margin)
    states = [standing.state for standing in look.standings]
    if states[0] == FAILED:
        yield f"Undecided: {first} has no result, so nothing is compared with it."
    elif look.reference:
        yield f"Undecided: {asked.names[look.reference]} leads the search."
    elif _is_unconfirmed(asked.question, look):
        yield "Undecided: the fastest of the search failed in new runs."
    elif OPEN not in states and FASTER not in states:
        shown = "is shown to be" if EQUAL in states[1:] else "is"
        yield f"Nothing to gain: no setting {shown} more than {margin} faster than {first}."
    for index, standing in enumerate(look.standings):
        if look.reference or not index or not math.isfinite(standing.low):
            continue
        name, ends = asked.names[index], f"({_interval(standing)})"
        if standing.state == FASTER:
            by = percent(standing.difference)
            yield f"{name} is {by} faster than {first} {ends} in new runs."
        elif standing.state == EQUAL:
            yield f"{name}, the fastest of the search, is not in new runs {ends}."
        elif standing.state == OPEN:
            yield f"Undecided: {name} against {first} {ends}."


def recommended(asked: Asked, state: RaceState) -> dict[str, str]:
    """Return the options that were shown to be faster than the first candidate, in training where
    the question has that; empty without any."""
    if asked.question.kind != GAINS or state.winner is None or state.size_bytes is not None:
        return {}
    return asked.settings[state.winner]


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
            yield f"Undecided: with {further} it is {ends}."


def summary(
    asked: Asked | None, records: Iterable[Record]
) -> tuple[dict[str, str], dict[str, float]]:
    """Return tags and metrics of a question, for the parent run of its sweep in MLflow; empty where
    nothing was asked. `records` are the study's."""
    if asked is None:
        return {}, {}
    state = replay(asked, records)
    tags = {"ask": asked.question.kind, "ask.answer": answer(asked, state)[0]}
    return tags, {
        "ask/margin": asked.question.margin,
        "ask/error": ERROR,
        "ask/runs": float(len(state.runs)),
        "ask/seconds": seconds(state),
        "ask/answered": float(is_answered(state)),
    }
