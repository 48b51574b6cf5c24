"""The last lines of a sweep: what the study shows, what casts doubt on it, why cells failed, what to do next, where it all is."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from analysis.cost import MEASURING, union_seconds
from analysis.prediction.recorded_forecast import about_forecasts
from analysis.report.numbers import THIN
from analysis.text import count, first_lines, join_words, single_line
from benchmarks.record import Record
from launch.plan.estimate import duration
from launch.study.study import StudyFolder
from launch.supervision.failure import few_lines

MESSAGE_LENGTH = 2000  # characters of a sentence on the screen; the record has it whole
MOST_CODES = 3  # of one verdict; the report explains all
LOG_LINES = 5  # of the log of a failed cell
MEASURED_ELSEWHERE = 3  # an exit status
# What a verdict means.
VERDICTS = {
    "invalid": "these numbers are not what was asked for, and take part in no comparison",
    "suspect": "these numbers are used, but a check casts doubt on them",
}


def close(
    console: Console,
    study: StudyFolder,
    measured: Sequence[Record],
    unfinished: int,
    told: Sequence[str],
    where: Sequence[str],
) -> None:
    """Print the end of a sweep.

    `measured` are the records of this sweep, `unfinished` counts its cells that have none that is finished, `told` is the
    finding of the study's report (empty without one), `where` are the lines that say where everything is.
    """
    for line in told:
        _print(console, line.replace(THIN, " "), 0)
    for line in doubts(measured):
        _print(console, line.lstrip(), len(line) - len(line.lstrip()))
    for record in measured:
        if record.state == "failed" and record.failure:
            _print(
                console,
                f"failed: {record.name}: {single_line(record.failure.message, MESSAGE_LENGTH)}",
                0,
            )
            for line in few_lines(record.failure.log_tail, LOG_LINES):
                console.print(f"    {line}", markup=False, style="dim")
            folder, rank = study.folder_of(record), record.failure.rank
            log = folder.agent_log if rank is None else folder.rank_log(rank)
            if log.exists():
                console.print(f"    log: {log}", markup=False, soft_wrap=True)
    for line in (*_next(study.folder, unfinished, bool(told)), f"records  {study.folder}", *where):
        console.print(line, markup=False, soft_wrap=True)  # to be copied whole


def exit_status(
    records: Sequence[Record], stopped: bool, missing: bool, held: int, strict: bool
) -> int:
    """Return the exit status of a sweep: 0 done, 1 a cell failed or is missing, 130 it was stopped, 3 only others hold cells.

    With `strict` an invalid cell is a failed one.
    """
    if stopped:
        return 130
    bad = [
        one
        for one in records
        if one.state != "finished" or (strict and one.validity.verdict == "invalid")
    ]
    return 1 if missing or bad else MEASURED_ELSEWHERE if held else 0


def about_held(held: int) -> str:
    """Return the sentence for cells that other launchers measure."""
    return (
        f"{count(held, 'cell')} of this sweep {'is' if held == 1 else 'are'} measured by other launchers, and wait=false does "
        f"not wait for them (exit status {MEASURED_ELSEWHERE})"
    )


def about_sweep(measured: Sequence[Record], seconds: float) -> list[str]:
    """Return lines on how good the forecasts of a sweep were, and on where its seconds went; none where no cell tells."""
    forecasts = about_forecasts(measured)
    lines = [f"forecast {forecasts}"] if forecasts else []
    told = [record.metrics[MEASURING] for record in measured if MEASURING in record.metrics]
    if not told:
        return lines
    in_cells = sum(record.ended_at - record.started_at for record in measured)
    spans = [(record.started_at, record.ended_at) for record in measured]
    together = ", some at the same time" if union_seconds(spans) < in_cells - 1 else ""
    where = f"{duration(in_cells)} in {count(len(measured), 'cell')}{together}"
    return [
        *lines,
        f"time     {duration(seconds)}: {where}, {duration(sum(told))} of that spent measuring",
    ]


def doubts(records: Sequence[Record]) -> list[str]:
    """Return for each verdict that is not `valid` what it means, and below it what its checks found.

    A check's line is what it said of the first cell, and how many more have it. The last line names checks that could not run.
    """
    finished = [record.validity for record in records if record.state == "finished"]
    lines: list[str] = []
    for word, meaning in VERDICTS.items():
        codes = [*_gathered([one.against for one in finished if one.verdict == word])]
        if codes:
            lines += [
                f"{word}: {meaning}",
                *(f"  {line}" for line in first_lines(codes, MOST_CODES)),
            ]
    missing = dict.fromkeys(code for one in finished for code in one.unchecked)
    reasons = dict.fromkeys(reason for one in finished for reason in one.unchecked.values())
    if missing:
        lines.append(
            f"unchecked: {join_words([*missing], 4)} ({next(iter(reasons))}{', …' if len(reasons) > 1 else ''})"
        )
    return [single_line(line, MESSAGE_LENGTH) for line in lines]


def _gathered(found: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a line for each code."""
    for code in dict.fromkeys(code for codes in found for code in codes):
        said = [codes[code] for codes in found if code in codes]
        yield f"{code}: {said[0]}" + (
            f" (and {count(len(said) - 1, 'more cell')})" if len(said) > 1 else ""
        )


def _next(folder: Path, unfinished: int, is_told: bool) -> Iterator[str]:
    """Yield what to do next where the finding, which ends with it, is not the place: cells are missing, or there is no report."""
    if unfinished:
        yield f"next     the same command measures the {count(unfinished, 'missing cell')}; finished ones stay"
    elif not is_told:
        yield f"next     python -m analysis report {quote(str(folder))}   says what these records show"


def _print(console: Console, text: str, indent: int) -> None:
    """Print a sentence, where the width is known broken between words with every line indented."""
    if console.soft_wrap:
        console.print(Text(" " * indent + text))
    else:
        console.print(Padding(Text(text), (0, 0, 0, indent), expand=False))
