"""What a sweep prints beside its table: the plan of a dry run, the last lines, its status."""

from collections.abc import Collection, Sequence
from shlex import quote

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from analysis.cost import MEASURING
from analysis.prediction.recorded_forecast import about_forecasts
from analysis.report.numbers import THIN
from analysis.text import count, first_lines, join_words, single_line
from benchmarks.record import Record, read_study
from launch.plan.estimate import duration, worded
from launch.plan.plan import Plan
from launch.study.run_environment import RunEnvironment
from launch.study.study_folder import StudyFolder, find_finished
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


def print_plan(planned: Plan, here: RunEnvironment, console: Console) -> None:
    """Print the cells of a dry run in their order, which are done before, and how long the rest
    takes."""
    config = planned.config
    study = StudyFolder(config.output_dir, config.study, only_read=True)
    records, _ = read_study(study.folder)
    done: Collection[int] = ()
    # what is around the cells of other machines is not known here
    if config.resume and records and config.topology is None and not config.nodes:
        cells = [entry.cell for entry in planned.cells]
        done = find_finished(
            cells, study, here, lambda line: console.print(f"note: {line}", markup=False)
        )
    rest = []
    for index, entry in enumerate(planned.cells):
        mark = ""
        if index in done:
            mark = " (done before)"
        else:
            rest.append(entry)
        console.print(f"{index + 1:4d}  {entry.name}{mark}", markup=False)
    if planned.cells and planned.cells[-1].drift:
        drift = "the first cell once more at the end, to show what changed on the machine meanwhile"
        console.print(f"note: drift: {drift}")
    about = f"{count(len(done), 'cell')} done before"
    if rest or not done:
        time = worded(rest, records)
        about = f"{about}; {time}" if done else time
    console.print(f"{about}; nothing was started (dry_run=true)")


def print_summary(
    console: Console,
    study: StudyFolder,
    measured: Sequence[Record],
    unfinished: int,
    finding: Sequence[str],
    where: Sequence[str],
) -> None:
    """Print the end of a sweep: what the study shows, what casts doubt on it, failures, and where
    it all is.

    `unfinished` is how many cells have no finished record; `finding` are the sentences of the
    study's report; `where` are the lines that say where everything is.
    """
    for line in [*finding, *doubts(measured)]:
        _print_indented(console, line.replace(THIN, " "))
    for record in measured:
        failure = record.failure
        if record.state != "failed" or not failure:
            continue
        message = single_line(failure.message, MESSAGE_LENGTH)
        _print_indented(console, f"failed: {record.name}: {message}")
        for line in few_lines(failure.log_tail, LOG_LINES):
            console.print(f"    {line}", markup=False, style="dim")
        folder = study.folder_of(record)
        log = folder.agent_log
        if failure.rank is not None:
            log = folder.rank_log(failure.rank)
        if log.exists():
            console.print(f"    log: {log}", markup=False, soft_wrap=True)
    lines = [f"records  {study.folder}", *where]
    if unfinished:
        missing = count(unfinished, "missing cell")
        lines.insert(0, f"next     the same command measures the {missing}; finished ones stay")
    elif not finding:
        report = f"python -m analysis report {quote(str(study.folder))}"
        lines.insert(0, f"next     {report}   says what these records show")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)  # to be copied whole


def _print_indented(console: Console, line: str) -> None:
    """Print a sentence; where the width is known, with every line indented alike."""
    if console.soft_wrap:
        console.print(Text(line))
        return
    text = line.lstrip()
    console.print(Padding(Text(text), (0, 0, 0, len(line) - len(text)), expand=False))


def exit_status(
    records: Sequence[Record], stopped: bool, missing: bool, locked: int, strict: bool
) -> int:
    """Return the exit status of a sweep; with `strict` an invalid cell is a failed one.

    0 done, 1 a cell failed or is missing, 130 it was stopped, 3 other launchers hold the rest.
    """
    if stopped:
        return 130
    for record in records:
        if record.state != "finished" or (strict and record.validity.verdict == "invalid"):
            return 1
    if missing:
        return 1
    if locked:
        return MEASURED_ELSEWHERE
    return 0


def locked_cells_note(locked: int) -> str:
    """Return the sentence for cells that other launchers measure."""
    are = "are"
    if locked == 1:
        are = "is"
    cells = f"{count(locked, 'cell')} of this sweep {are} measured by other launchers"
    return f"{cells}, and wait=false does not wait for them (exit status {MEASURED_ELSEWHERE})"


def sweep_note(measured: Sequence[Record], sweep_s: float) -> list[str]:
    """Return lines on how good the forecasts of a sweep were, and on where its seconds went."""
    lines = []
    forecasts = about_forecasts(measured)
    if forecasts:
        lines.append(f"forecast {forecasts}")
    cells_s = measuring_s = 0.0
    for record in measured:
        cells_s += record.ended_at - record.started_at
        measuring_s += record.metrics.get(MEASURING, 0.0)
    if measuring_s:
        cells = f"{duration(cells_s)} in {count(len(measured), 'cell')}"
        measuring = f"{duration(measuring_s)} of that spent measuring"
        lines.append(f"time     {duration(sweep_s)}: {cells}, {measuring}")
    return lines


def doubts(records: Sequence[Record]) -> list[str]:
    """Return for each verdict but `valid` what it means, and below it what its checks found.

    The line of a check is what it said of the first cell, and how many more have it. The last line
    names checks that could not run.
    """
    finished = [record.validity for record in records if record.state == "finished"]
    lines: list[str] = []
    for verdict, meaning in VERDICTS.items():
        texts: dict[str, list[str]] = {}  # by code
        for validity in finished:
            if validity.verdict == verdict:
                for code, text in validity.against.items():
                    texts.setdefault(code, []).append(text)
        codes = []
        for code, of_cells in texts.items():
            line = f"{code}: {of_cells[0]}"
            if len(of_cells) > 1:
                line += f" (and {count(len(of_cells) - 1, 'more cell')})"
            codes.append(line)
        if codes:
            lines.append(f"{verdict}: {meaning}")
            for line in first_lines(codes, MOST_CODES):
                lines.append(f"  {line}")
    unchecked: dict[str, str] = {}
    for validity in finished:
        for code, why in validity.unchecked.items():
            unchecked.setdefault(code, why)
    if unchecked:
        reasons = list(dict.fromkeys(unchecked.values()))
        more = ""
        if len(reasons) > 1:
            more = ", …"
        lines.append(f"unchecked: {join_words(list(unchecked), 4)} ({reasons[0]}{more})")
    return [single_line(line, MESSAGE_LENGTH) for line in lines]
