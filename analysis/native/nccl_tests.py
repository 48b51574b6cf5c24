"""Read nccl-tests: the text of 2.0 to 2.19, its JSON, or a record of benchmark=collectives.

Text may hold several runs, with log lines in between. It is checked against the format strings of
nccl-tests' release tags (src/common.cu, each collective's print_header; from 2.17.3 src/util.cu). A
row counts only if it has as many numbers as its header names, its size fits its count, and its
algbw is size ÷ time within rounding; any other row is left out and counted, never half read.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from analysis.errors import UnreadableInput
from analysis.input_files import read_input
from analysis.native.nccl_tests_json import parse_json, record_in, runs_of_record
from analysis.native.nccl_tests_run import (
    PROGRAM_PATTERN,
    NcclTestsRun,
    PlacementNumbers,
    SizeRow,
    nccl_version,
)
from benchmarks.collectives.busbw import NCCL_TESTS_ELEMENT_BYTES


def read_nccl_tests(file: str | Path) -> list[NcclTestsRun]:
    """Return every run of a file.

    Raises:
        OSError: it cannot be opened.
        UnreadableInput: it holds no row; the message says what is accepted and where.
    """
    return read_input(file, parse_nccl_tests)


def parse_nccl_tests(text: str) -> list[NcclTestsRun]:
    """Return every run of one text, in order, with notes on contradictions.

    Raises:
        UnreadableInput: the text holds no row; the message says what is accepted and where.
    """
    if not text.lstrip().startswith("{"):
        runs = _parse_tables(text)
    else:
        record = record_in(text)
        runs = parse_json(text) if record is None else runs_of_record(record)
    for run in runs:
        run.add_notes()
    return runs


_LONGEST_COMMAND = 8000  # characters
_ACCEPTED_TEXT = (
    "accepted is nccl-tests' output: a line `# size count type … time algbw busbw …` and rows "
    "below it"
)
# `[1,0]<stdout>:` and `[host@1,0]<stdout>: ` (mpirun --tag-output), `0: ` (srun --label)
_TAG = re.compile(
    r"[ \t]*(?:\[[^\]\s]{0,200}?\d{1,10},(\d{1,7})\]<std(?:out|err)>:? ?|(\d{1,6}): )", re.ASCII
)
_STARTING = re.compile(rf"# Collective test starting: {PROGRAM_PATTERN}\s*", re.ASCII)
_COMMAND = re.compile(rf"(?:^|[\s/'\"]){PROGRAM_PATTERN}(?=\s+-)", re.ASCII)
_LAUNCHER = re.compile(r"(?:^|[\s/])(?:mpirun|mpiexec|srun|orterun|prterun)\s", re.ASCII)
_PROCESSES = re.compile(r"\s(?:--?np|-n|--ntasks)[ =](\d{1,7})(?=\s)", re.ASCII)
_VERSION = re.compile(
    r"# nccl-tests version (\S+) nccl-headers=\d+ nccl-library=(\d{1,9})\s*", re.ASCII
)
_NCCL = re.compile(r"NCCL version (\d{1,4}(?:\.\d{1,4}){1,3})\S*\+cuda", re.ASCII)
_SETTINGS = re.compile(
    r"(nThread|nGpus|minBytes|maxBytes|step|warmup iters|agg iters|iters|validation|graph|unalign)"
    r":? (\d{1,18})",
    re.ASCII,
)
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+\d+ on\s+(\S+) device\s+(\d{1,4}) "
    r"\[([0-9a-fA-Fx:]+)\] (.*\S)\s*"
)
_BOUNDS = re.compile(r"# Out of bounds values\s*: (\d{1,18}) (?:OK|FAILED)\s*", re.ASCII)
_AVERAGE = re.compile(
    r"# Avg bus bandwidth\s*: (\d{1,19}(?:\.\d{1,10})?(?:e[+-]\d\d)?)(?: (?:OK|FAILED)?)?\s*",
    re.ASCII,
)
_FAILURE = re.compile(
    r"Test (?:NCCL |CUDA |CPU )?failure|# error: |: Test timeout |Out of memory", re.ASCII
)
_PREAMBLE = ("# nThread", "# nccl-tests version", "# Collective test starting", "# Using devices")

_ROW_START = re.compile(r"\s*(\d{1,19})\s+(\d{1,19})\s+([a-z]\w*)(\s.*)", re.ASCII)
_NUMBER = re.compile(r"\d{1,19}(?:\.\d{1,6})?(?:e[+-]\d{2,3})?", re.ASCII)
_WORD = re.compile(r"[a-z]\w*", re.ASCII)
_ROOT = re.compile(r"-?\d{1,7}", re.ASCII)
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", re.ASCII)
_PER_ITERATION = {"i_min": "min_us", "i_max": "max_us", "i_p99": "p99_us", "i_cv%": "cv_pct"}
_COLUMNS = {"time", "cputime", "algbw", "busbw", "error", "#wrong", *_PER_ITERATION}


class _TextLine(NamedTuple):
    number: int
    tag: str | None
    text: str


@dataclass(frozen=True, slots=True)
class _TableHeader:
    """The columns left of the numbers, and those of one placement, which stand there twice."""

    has_redop: bool
    has_root: bool
    columns: tuple[str, ...]
    has_timestamp: bool


def _parse_tables(text: str) -> list[NcclTestsRun]:
    """Return every run of one text, in order, without notes on contradictions."""
    lines = []
    # A last line without its newline is left out: its last number may be cut.
    *rows, rest = text.split("\n")
    for number, row in enumerate(rows, 1):
        row = row.rstrip("\r")
        tag = _TAG.match(row)
        if tag:
            lines.append(_TextLine(number, tag[1] or tag[2], row[tag.end() :]))
        else:
            lines.append(_TextLine(number, None, row))
    tags = {line.tag for line in lines if line.tag is not None and _read_header(line.text)}
    streams = [lines]
    if len(tags) > 1:  # several programs, one per process: each tag is a text of its own
        streams = []
        for tag_of_program in sorted(tags, key=lambda tag: (len(tag), tag)):
            streams.append([line for line in lines if line.tag in (None, tag_of_program)])
    readers = [_TableReader(stream) for stream in streams]
    runs = [run for reader in readers for run in reader.runs]
    if not any(run.rows for run in runs):
        raise UnreadableInput(f"{_ACCEPTED_TEXT}; {_why_empty(lines, runs, readers[0])}")
    if rest.lstrip()[:1] in tuple("#0123456789"):
        runs[-1].notes.append(f"the text ends inside line {len(lines) + 1}, which is left out")
    if len(tags) > 1:
        for run in runs:
            run.notes.append(
                f"{len(tags)} processes each printed a table: they are separate programs, not the "
                "ranks of one program"
            )
    return runs


def _why_empty(
    lines: Sequence[_TextLine], runs: Sequence[NcclTestsRun], reader: "_TableReader"
) -> str:
    """Say why a text holds no row."""
    if not lines:
        return "the text is empty, or has no whole line"
    if reader.torn:
        return f"no row fits its table, the first is line {reader.torn[0]}"
    if reader.headless:
        return f"line {reader.headless[0]} looks like a row, but no header names its columns"
    if runs:
        failures = [f": {run.errors[0]}" for run in runs if run.errors]
        reason = failures[-1] if failures else ""
        return f"a run starts in line {runs[-1].line}, but no row follows{reason}"
    return f"line 1 begins {lines[0].text[:60]!r}"


class _TableReader:
    """Turns the lines of one stream into runs.

    A heading line starts another run once the last has rows or a footer.
    """

    def __init__(self, lines: Sequence[_TextLine]) -> None:
        self.runs: list[NcclTestsRun] = []
        self.run: NcclTestsRun | None = None
        self.table: _TableHeader | None = None
        self.torn: list[int] = []  # lines of the rows left out, of the whole stream
        self.headless: list[int] = []  # lines of rows under no header
        self._noted = 0  # how many of `torn` have a note
        self._done = False  # the run has rows or a footer
        self._footed = False
        pending = ""
        for line in lines:
            body = pending + line.text
            if body.endswith("\\") and len(body) < _LONGEST_COMMAND:  # the command goes on
                pending = body[:-1] + " "
            else:
                pending = ""
                self._read_line(line.number, line.text, body)
        self._note_torn_rows()
        if self.runs and self.headless:
            self.runs[0].notes.append(
                f"{len(self.headless)} row(s) without a header left out, the first in line "
                f"{self.headless[0]}"
            )

    def _read_line(self, number: int, text: str, body: str) -> None:
        if _ROW_START.match(text):
            self._read_row(number, text)
            return
        command = _COMMAND.search(body) if "_perf" in body else None
        if command is not None:
            has_begun = self.run is not None and (self.run.settings or self.run.listed)
            run = self._run_of_heading(number, new=bool(has_begun))
            _read_command(run, number, body, command)
            return
        marked = text.lstrip()
        if not marked.startswith("#"):
            self._read_log_line(text)
            return
        header = _read_header(marked)
        if header is not None:
            if self.table is not None and not self._done and self.run is not None:
                self.run.notes.append(
                    f"a second header in line {number}: several programs wrote into this text"
                )
            self._run_of_heading(number)
            self.table = header
        elif "Rank" in marked and marked.startswith("#  "):
            _read_rank(self._run_of_heading(number, new=self.table is not None), marked)
        elif marked.startswith(_PREAMBLE):
            is_listed = self.run is not None and bool(self.run.listed)
            run = self._run_of_heading(number, new=self.table is not None or is_listed)
            _read_preamble(run, marked)
        elif self.run is not None and self.table is not None and _read_footer(self.run, marked):
            self._footed = self._done = True

    def _run_of_heading(self, number: int, new: bool = False) -> NcclTestsRun:
        if self.run is None or self._done or new:
            self._note_torn_rows()
            self.run, self.table = NcclTestsRun(number), None
            self._done = self._footed = False
            self.runs.append(self.run)
        return self.run

    def _read_log_line(self, text: str) -> None:
        if self.run is None:
            return
        if _FAILURE.search(text):
            self.run.errors.append(text.strip()[:300])
            return
        version = _NCCL.search(text)
        if version and not self.run.nccl_version:
            self.run.nccl_version = version[1]

    def _read_row(self, number: int, text: str) -> None:
        if self.table is None or self.run is None or self._footed:
            self.headless.append(number)
            return
        self._done = True
        row = _read_row(text, self.table, self.run.program)
        if row is None:
            self.torn.append(number)
        else:
            self.run.rows.append(row)

    def _note_torn_rows(self) -> None:
        torn = self.torn[self._noted :]
        if self.run is not None and torn:
            self.run.notes.append(
                f"{len(torn)} cut or torn row(s) left out, the first in line {torn[0]}"
            )
        self._noted = len(self.torn)


def _read_preamble(run: NcclTestsRun, text: str) -> None:
    """Read one line above the list of ranks."""
    starting = _STARTING.fullmatch(text)
    version = _VERSION.fullmatch(text)
    if starting:
        run.program = starting[1]
    elif version:
        run.version, run.nccl_version = version[1], nccl_version(int(version[2]))
    elif text.startswith("# nThread"):
        run.settings = {name: int(value) for name, value in _SETTINGS.findall(text)}


def _read_rank(run: NcclTestsRun, text: str) -> None:
    """Read one line of the list of ranks."""
    match = _RANK.fullmatch(text)
    if match is None:
        run.list_cut = True
        return
    rank, group = int(match[1]), int(match[2] or 0)
    run.listed.append((group, rank))
    run.devices.append(
        {
            "rank": rank,
            "group": group,
            "host": match[3],
            "device": int(match[4]),
            "bus_id": match[5],
            "name": match[6],
        }
    )


def _read_footer(run: NcclTestsRun, text: str) -> bool:
    """Read one line below a table; tell whether it belongs to the footer."""
    bounds = _BOUNDS.fullmatch(text)
    average = _AVERAGE.fullmatch(text)
    if bounds:
        run.out_of_bounds = int(bounds[1])
    elif average:
        run.avg_busbw = float(average[1])
    elif _FAILURE.search(text):
        run.errors.append(text.strip()[:300])
    return bool(bounds or average)


def _read_command(run: NcclTestsRun, line: int, text: str, command: re.Match[str]) -> None:
    """Read the command that a shell's log or a person put above a run.

    Only NCCL_* is kept of its environment.
    """
    before, after = text[: command.start(1)], text[command.end() :] + " "
    run.line, run.program = line, command[1]
    run.environment = dict(re.findall(r"(?:^|[\s'\"])(NCCL_\w+)=([^\s'\"]+)", before))
    ranks = 1
    for short, long in (("t", "nthreads"), ("g", "ngpus")):
        given = re.search(rf"\s(?:-{short}\s*|--{long}[ =])(\d{{1,6}})\s", after)
        if given:
            ranks *= int(given[1])
    if not _LAUNCHER.search(before):
        run.command_ranks = ranks
        return
    processes = _PROCESSES.search(before)
    run.command_ranks = ranks * int(processes[1]) if processes else None


def _read_header(text: str) -> _TableHeader | None:
    """Return the columns that a header names; None for any other line."""
    words = text.split()
    if words[:4] != ["#", "size", "count", "type"]:
        return None
    left = [word for word in words[4:6] if word in ("redop", "root")]
    columns = words[4 + len(left) :]
    has_timestamp = columns[-1:] == ["timestamp"]
    if has_timestamp:
        columns.pop()
    half = len(columns) // 2
    placement = columns[:half]
    if placement != columns[half:] or not placement or placement[0] not in ("time", "cputime"):
        return None
    distinct = set(placement)
    if len(distinct) != half or not distinct <= _COLUMNS or {"time", "cputime"} <= distinct:
        return None
    if not {"algbw", "busbw"} <= distinct or not {"error", "#wrong"} & distinct:
        return None
    return _TableHeader("redop" in left, "root" in left, tuple(placement), has_timestamp)


def _read_row(text: str, table: _TableHeader, program: str | None) -> SizeRow | None:
    """Return one row; None if it does not match its table or contradicts itself."""
    match = _ROW_START.fullmatch(text)
    if match is None:
        return None
    size, count, dtype, words = int(match[1]), int(match[2]), match[3], match[4].split()
    stamp = None
    if table.has_timestamp:
        stamp = " ".join(words[-2:])
        words = words[:-2]
        if not _STAMP.fullmatch(stamp):
            return None
    redop = None
    if table.has_redop and words and _WORD.fullmatch(words[0]):
        redop = words.pop(0)
    root = None
    if table.has_root:
        if not words or not _ROOT.fullmatch(words[0]):
            return None
        root = int(words.pop(0))
    width = len(table.columns)
    if len(words) != 2 * width:
        return None
    share = count * NCCL_TESTS_ELEMENT_BYTES.get(dtype, 0)  # bytes of one rank's part
    rest = size % share if share else size
    if rest and dtype in NCCL_TESTS_ELEMENT_BYTES and program != "alltoallv":
        return None
    placements = []
    for placement_words in (words[:width], words[width:]):
        figures = dict(zip(table.columns, placement_words, strict=True))
        placement = _read_placement(figures)
        if placement is None or not _is_plausible(figures, size, size // share if share else 1):
            return None
        placements.append(placement)
    return SizeRow(
        bytes=size,
        count=count,
        dtype=dtype,
        redop=None if redop == "none" else redop,
        root=None if root == -1 else root,
        out_of_place=placements[0],
        in_place=placements[1],
        timestamp=stamp,
    )


def _read_placement(words: Mapping[str, str]) -> PlacementNumbers | None:
    """Return the numbers of one placement; None if one is not a number."""
    values: dict[str, float | None] = {}
    for column, word in words.items():
        if word in ("nan", "-nan", "inf") or (word == "N/A" and column in ("error", "#wrong")):
            values[column] = None
            continue
        if not _NUMBER.fullmatch(word) or float(word) == math.inf:
            return None
        values[column] = float(word)
    wrong = values.get("#wrong")
    if wrong is not None and not wrong.is_integer():
        return None
    per_iteration = {key: values[name] for name, key in _PER_ITERATION.items() if name in values}
    return PlacementNumbers(
        time_us=values.get("time"),
        algbw=values["algbw"],
        busbw=values["busbw"],
        wrong=None if wrong is None else int(wrong),
        error=values.get("error"),
        cputime_us=values.get("cputime"),
        per_iteration=per_iteration or None,
    )


def _half_a_unit(word: str) -> float:
    """Return half a unit in the last place of a printed number."""
    mantissa, _, exponent = word.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return float(f"0.5e{int(exponent or 0) - decimals}")


def _is_plausible(words: Mapping[str, str], size: int, shares: int) -> bool:
    """Tell whether algbw is size ÷ time within rounding.

    `shares` is the size ÷ one rank's part: hypercube counts one part less.
    """
    time, algbw = words.get("time", "nan"), words["algbw"]
    if not (_NUMBER.fullmatch(time) and _NUMBER.fullmatch(algbw)):
        return True
    low_us, high_us = float(time) - _half_a_unit(time), float(time) + _half_a_unit(time)
    slack = _half_a_unit(algbw) * 1.001
    for part in (1.0, (shares - 1) / shares if shares else 1.0):
        slowest = size * part / high_us / 1e3 - slack if high_us > 0 else math.inf
        fastest = size * part / low_us / 1e3 + slack if low_us > 0 else math.inf
        if slowest <= float(algbw) <= fastest:
            return True
    return False
