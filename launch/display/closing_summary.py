"""What a sweep prints beside its table: the plan of a dry run, the last lines, its status."""

import math
import statistics
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from shlex import quote
from typing import TypeAlias

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from analysis.cost import MEASURING
from analysis.findings.communication import SeveralRecords
from analysis.prediction.recorded_forecast import about_forecasts
from analysis.report.cell_numbers import COLUMNS, MARGIN, ONE_RUN, cell_numbers, heading
from analysis.report.numbers import THIN, number
from analysis.study.conditions import IMAGES_PER_SECOND
from analysis.study.intervals import WORDS
from analysis.study.names import BETWEEN, of_unit, unit_of_cells
from analysis.study.noise_floor import is_suspect
from analysis.study.provenance import short_hardware
from analysis.study.runs import Runs, grouped
from analysis.study.study import Study
from analysis.text import count, join_words, single_line, split_command
from analysis.validity.checks import LOADED, serious
from benchmarks.record import REHEARSAL, Record, read_study
from conf.cell import counted
from launch.display.columns import (
    ABOUT_DRIFT,
    BAR,
    COST,
    GPUS,
    STYLES,
    VALIDITY,
    fitted_table,
    request_columns,
)
from launch.plan.estimate import duration, worded
from launch.plan.order import PlannedCell
from launch.plan.plan import Plan
from launch.study.run_environment import RunEnvironment
from launch.study.study_folder import StudyFolder, find_finished
from launch.supervision.failure import few_lines

MESSAGE_LENGTH = 2000  # characters of a sentence on the screen; the record has it whole
LOG_LINES = 5  # of the log of a failed cell
MEASURED_ELSEWHERE = 3  # an exit status
MOST_REASONS = 5  # of doubt
MOST_SUBJECTS = 3  # models, scripts or benchmarks; of more the number is given
NOT_RELIABLE = "Not reliable"
DOUBTFUL = (NOT_RELIABLE, "Checks cast doubt")  # how the report begins to say the same
BAR_LENGTH = 10  # characters, of the highest rate
AGAINST = "against fastest"
FASTEST_REPEATED = "fastest repeated"  # one with too few runs to be compared has a higher rate
# How a configuration stands and its difference to the fastest, a share; by its records' ids.
Standings: TypeAlias = dict[tuple[str, ...], tuple[str, float]]
FIRST_COLUMNS = ("images/s", MARGIN, "efficiency", BAR, AGAINST)


def print_plan(planned: Plan, here: RunEnvironment, console: Console) -> None:
    """Print the cells of a dry run in their order, which are done before, and how long the rest
    takes."""
    config = planned.config
    study = StudyFolder(config.output_dir, config.study, only_read=True)
    records, _ = read_study(study.folder)
    done: Collection[int] = ()
    provided = ""
    cells = [entry.cell for entry in planned.cells]
    if config.resume and records and (config.topology is not None or config.nodes):
        done = [index for index, cell in enumerate(cells) if study.finished(cell)]
        provided = " (if their machine has not changed: a dry run does not ask it)"
    elif config.resume and records:
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
        console.print(f"note: {ABOUT_DRIFT}")
    about = f"{count(len(done), 'run')} done before{provided}"
    if rest or not done:
        time = worded(rest, records)
        about = f"{about}; {time}" if done else time
    console.print(f"{about}; nothing was started (dry_run=true)")


def print_summary(
    console: Console,
    study: StudyFolder,
    shown: Study,
    runs: Sequence[Record],
    unfinished: int,
    finding: Sequence[str],
    where: Sequence[str],
) -> None:
    """Print the end of a sweep: its configurations, what casts doubt on runs, failures, what the
    study shows, and where it all is.

    `shown` is the study; `runs` are those of this sweep, `unfinished` how many are missing;
    `finding` are the sentences of the study's report; `where` are the lines that say where
    everything is.
    """
    print_configurations(console, shown, runs)
    against = doubts(runs, " ".join(finding).replace(THIN, " "))
    for line, style in against:
        _print_indented(console, line, style)
    for record in runs:
        failure = record.failure
        if record.state != "failed" or not failure:
            continue
        message = single_line(failure.message, MESSAGE_LENGTH)
        _print_indented(console, f"✗ failed: {record.name}: {message}", "red")
        for line in few_lines(failure.log_tail, LOG_LINES):
            console.print(f"    {line}", markup=False, style="dim")
        folder = study.folder_of(record)
        log = folder.agent_log
        if failure.rank is not None:
            log = folder.rank_log(failure.rank)
        if log.exists():
            console.print(f"    log: {log}", markup=False, soft_wrap=True)
    console.print()
    is_doubtful = all_doubtful(runs)
    if finding and finding[0].startswith(NOT_RELIABLE):
        is_doubtful = any(record.validity.against for record in runs)
    if finding and len(shown.records) > len(runs):
        subjects = dict.fromkeys(" ".join(record.cell.subject) for record in shown.records)
        runs_of = f"{len(shown.records):,} runs of {join_words(list(subjects), MOST_SUBJECTS)}"
        drift = sum(record.drift for record in shown.records)
        among = f" ({count(drift, 'drift run')} among them)" if drift else ""
        _print_indented(console, f"All {runs_of} in study {study.folder.name}{among}:")
    for line in finding:
        sentence, command = split_command(line)
        _, _, reason = line.replace(THIN, " ").removesuffix(".").partition(" is invalid: ")
        repeated = line.startswith(DOUBTFUL) or any(reason in text for text, _ in against if reason)
        if repeated or (command and (is_doubtful or unfinished)):
            continue  # `doubts` said it; these runs are measured, or measured again, before others
        _print_indented(console, sentence.replace(THIN, " "), "dim" if is_doubtful else "")
        if command:
            if sys.argv[0].endswith("/launch.py"):  # it was started from another folder
                command = command.replace("launch.py", quote(sys.argv[0]), 1)
            console.print(f"  {command}", markup=False, soft_wrap=True)
    lines = [*where, f"records  {study.folder}"]
    if unfinished:
        missing = count(unfinished, "missing run")
        first = "rerun the same command: it"
        if any(record.state == "failed" for record in runs):
            first = "see above what failed; then the same command"
        lines.append(f"next     {first} measures the {missing}")
    elif is_doubtful:
        lines.append(f"next     {_remedy(runs)}")
    elif not finding:
        lines.append(f"next     python -m analysis report {quote(str(study.folder))}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)  # to be copied whole


def all_doubtful(runs: Sequence[Record]) -> bool:
    """Return whether a check is against every finished run."""
    finished = [record for record in runs if record.state == "finished"]
    return bool(finished) and all(record.validity.against for record in finished)


def _remedy(runs: Sequence[Record]) -> str:
    """Return what to do about doubtful runs: wrong results first, then other programs."""
    codes, wrong = list[str](), list[str]()
    again = "the same command with resume=false measures again"
    for record in runs:
        codes += record.validity.against
        if record.validity.verdict == "invalid":
            wrong += [code for code in record.validity.against if code not in LOADED]
            if any("sha256" in declared for declared in record.cell.declared.values()):
                again = "the same command measures changed code again"
    if not wrong and not LOADED.isdisjoint(codes):
        return "stop other programs; the same command with resume=false measures again"
    explain = f"python -m analysis explain {(wrong or codes)[0]}"
    return f"remove the cause ({explain} says more); {again}"


def print_configurations(console: Console, study: Study, records: Sequence[Record]) -> None:
    """Print a line for each configuration of these records, the highest rate first, in a table for
    each benchmark."""
    ids = {record.record_id for record in records}
    shown = [runs for runs in study.runs if not ids.isdisjoint(runs.record_ids)]
    if not shown:
        return
    standings = _standings(study)
    for members in grouped(shown, lambda runs: runs.cell.benchmark["name"]).values():
        _print_table(console, study, members, standings)


def _print_table(console: Console, study: Study, members: list[Runs], standings: Standings) -> None:
    members.sort(key=lambda runs: -statistics.median(runs.log_rates or [-math.inf]))
    cells = [replace(runs.cell, repeat=0) for runs in members]
    things, unit = counted(cells), unit_of_cells(cells)
    common, columns = request_columns([PlannedCell(cell) for cell in cells])
    columns.pop("run", None)
    title = [common[name] for name in ("model", "strategy", "benchmark") if name in common]
    if "throughput" in title:
        title.remove("throughput")
    if unit == "GPUs":
        title.append(short_hardware(members[0].records[0]))
    if len(set(columns[GPUS])) == 1:
        title.append(of_unit(f"{GPUS} {columns.pop(GPUS)[0]}", unit))
    sizes = sorted({len(runs.records) for runs in members})
    if sizes[-1] > 1:
        fewest = f"{sizes[0]} to " if len(sizes) > 1 else ""
        title.append(f"{fewest}{sizes[-1]} runs each")
    texts = {name: list(map(Text, values)) for name, values in columns.items()}
    rows = _rows(study, members, standings)
    for name in FIRST_COLUMNS + COLUMNS + (VALIDITY,):
        if any(name in row for row in rows):
            texts.setdefault(name, [row.get(name, Text()) for row in rows])
    titles = {name: heading(name, things, unit) for name in texts} | {BAR: "", VALIDITY: ""}
    console.print(Text(f"\n{BETWEEN.join(title)}", "bold"))
    table = fitted_table(texts, titles, console.width, [VALIDITY, *columns])
    console.print(table, soft_wrap=False)


def _standings(study: Study) -> Standings:
    # They need numpy.
    from analysis.findings.comparisons import FASTEST, comparisons, rank_configurations

    standings = {}
    for ranking in rank_configurations(study, comparisons(study)):
        if ranking.suspect_leader:
            continue
        first_word = FASTEST if ranking.fastest_leads else FASTEST_REPEATED
        for ranked in ranking.configurations:
            word = first_word if ranked.standing == FASTEST else ranked.standing
            standings[ranked.runs.record_ids] = (word, ranked.behind.value)
    return standings


def _rows(study: Study, members: Sequence[Runs], standings: Standings) -> list[dict[str, Text]]:
    from analysis.findings.comparisons import FASTEST, TIED  # they need numpy
    from analysis.study.measured_numbers import SLOWER

    singles, medians = dict(study.singles), []
    for runs in members:
        # A record with the medians of all runs, for it is shown as that of one run is.
        metrics = {}
        for name in runs.records[-1].metrics:
            metrics[name] = runs.median(name) or 0.0
        medians.append(replace(runs.records[-1], metrics=metrics))
        singles[id(medians[-1])] = runs
    several = SeveralRecords(replace(study, singles=singles))
    highest = max(record.metrics.get(IMAGES_PER_SECOND, 0.0) for record in medians)
    rows = []
    for runs, record in zip(members, medians, strict=True):
        standing, behind = standings.get(runs.record_ids, ("", 0.0))
        rate = record.metrics.get(IMAGES_PER_SECOND, 0.0)
        texts = cell_numbers(record, several.shown(record))
        texts.pop(COST, "")  # there is little room
        if len(runs.records) > 1 and texts.get(MARGIN) == ONE_RUN:
            texts[MARGIN] = "needs 3 runs"
        if rate:
            texts[BAR] = "━" * max(1, round(BAR_LENGTH * rate / highest))
        style = ""
        if runs.all_suspect:
            style = "dim"
            if rate:
                texts[COLUMNS[0]] = f"~{texts[COLUMNS[0]]}"
        elif standing in (TIED, SLOWER):
            texts[AGAINST] = f"{number(behind, 'change')}, {standing}"
        elif standing in (FASTEST, FASTEST_REPEATED):
            texts[AGAINST], style = standing, "green"
        row = {}
        for name, text in texts.items():  # every ± of the table is that of the next run
            row[name] = Text(text.replace(THIN, " ").replace(f" {WORDS})", ")"), style)
        rows.append(row | {VALIDITY: _doubt(runs)})
    return rows


def _doubt(runs: Runs) -> Text:
    """Return `✓`, or which codes make how many of some runs suspect."""
    suspects = [run for run in runs.records if is_suspect(run)]
    if not suspects:
        return Text("✓", STYLES["valid"])
    some = "suspect"
    if len(suspects) < len(runs.records):
        some = f"{len(suspects)} of {len(runs.records)} suspect"
    return Text(f"{some}: {', '.join(runs.doubts)}", STYLES["suspect"])


def _print_indented(console: Console, line: str, style: str = "") -> None:
    """Print a sentence; where the width is known, with every line indented alike."""
    if console.soft_wrap:
        console.print(Text(line))
        return
    text = line.lstrip()
    padding = (0, 0, 0, len(line) - len(text))
    console.print(Padding(Text(text, style), padding, expand=False))


def exit_status(
    records: Sequence[Record], stopped: bool, missing: bool, locked: int, strict: bool
) -> int:
    """Return the exit status of a sweep; with `strict` an invalid cell is a failed one.

    0 done, 1 a cell failed or is missing, or none has a number that can be used, 130 it was
    stopped, 3 other launchers hold the rest.
    """
    if stopped:
        return 130
    if missing or any(record.state != "finished" for record in records):
        return 1
    invalid = sum(record.validity.verdict == "invalid" for record in records)
    if invalid and (strict or invalid == len(records)):
        return 1
    if locked:
        return MEASURED_ELSEWHERE
    return 0


def sweep_note(measured: Sequence[Record], sweep_s: float) -> list[str]:
    """Return lines on how good the forecasts of a sweep were, and on where its seconds went."""
    lines = []
    forecasts = about_forecasts(measured)
    if forecasts:
        lines.append(f"forecast {forecasts}")
    measuring_s = sum(record.metrics.get(MEASURING, 0.0) for record in measured)
    if measuring_s:
        rest = f"{duration(sweep_s - measuring_s)} starting and checking"
        lines.append(f"time     {duration(sweep_s)} ({duration(measuring_s)} measuring, {rest})")
    return lines


def doubts(records: Sequence[Record], finding: str = "") -> list[tuple[str, str]]:
    """Return (sentence, style): how many runs are valid, why each invalid one is not, and what
    made others suspect, as `finding` has it; the last names checks that could not run.
    """
    finished = [record for record in records if record.state == "finished"]
    if any(record.validity.verdict == REHEARSAL for record in finished):
        return []
    verdicts = Counter(record.validity.verdict for record in finished)
    reasons: dict[tuple[str, str], list[str]] = {}  # by style, and run or code
    unchecked: dict[str, str] = {}
    for record in finished:
        unchecked |= record.validity.unchecked
        for code, text in record.validity.against.items():
            reason = STYLES["suspect"], code
            if record.validity.verdict == "invalid" and code in serious(record.validity):
                reason = STYLES["invalid"], f"invalid: {record.name}: {code}"
            reasons.setdefault(reason, []).append(text)
    lines = []
    words = [f"{verdicts[verdict]} {verdict}" for verdict in STYLES if verdicts[verdict]]
    if finished:
        text = f"{count(len(finished), 'run')}: {', '.join(words)}"
        has_drift = any(record.drift for record in finished)
        if len(finished) == 1:
            text = f"the run is {finished[0].validity.verdict}"
        elif len(words) == 1:
            every = "both" if len(finished) == 2 else f"all {len(finished):,}"
            text = f"{every} runs {next(iter(verdicts))}"
            if has_drift:
                text += " (with the drift run)"
        elif has_drift:
            text = text.replace(":", ", the drift run among them:", 1)
        is_reliable = verdicts["valid"] and not finding.startswith(NOT_RELIABLE)
        reliable = "" if is_reliable else "NOT RELIABLE: "
        mark = "✓" if verdicts["valid"] == len(finished) else "✗"
        style = next(style for verdict, style in STYLES.items() if verdicts[verdict])
        lines.append((f"{mark} {reliable}{text}", style))
    for (style, name), texts in sorted(reasons.items())[:MOST_REASONS]:
        more = f" (and {count(len(texts) - 1, 'more run')})" if len(texts) > 1 else ""
        of_any = finding.replace(" a run ", " this run ")
        text = next((text for text in texts if text[1:] in of_any), texts[0])
        lines.append((f"  {name}: {text}{more}", style))
    if len(reasons) > MOST_REASONS:
        lines.append((f"  … and {len(reasons) - MOST_REASONS} more (the report has all)", ""))
    if unchecked:
        why = next(iter(unchecked.values()))
        lines.append((f"  not checked: {join_words(list(unchecked), 4)} ({why})", "dim"))
    return [(single_line(line, MESSAGE_LENGTH), style) for line, style in lines]
