"""Read nccl-tests: the text of 2.0 to 2.19.

It may hold several runs, with log lines in between. It is checked against the format strings of
nccl-tests' release tags (src/common.cu, each collective's print_header; from 2.17.3 src/util.cu). A
row counts only if it has as many numbers as its header names, its size fits its count, and its
algbw is size ÷ time within rounding; any other row is left out and counted, never half read.
Bandwidths are GB/s with GB = 1e9 bytes, times µs. What the output does not say is None.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.input_files import UnreadableInput, read_input
from analysis.text import count
from benchmarks.collectives.request import NCCL_TESTS_COLLECTIVES, NCCL_TESTS_ELEMENT_BYTES

Row = dict[str, Any]

_ACCEPTED = (
    "expected nccl-tests' output: a line `# size count type … time algbw busbw …` and rows below it"
)
# program of nccl-tests: the collective's name here
_PROGRAMS = {collective.program: name for name, collective in NCCL_TESTS_COLLECTIVES.items()}
_PROGRAM = "(" + "|".join(sorted(_PROGRAMS, key=len, reverse=True)) + r")_perf(?:[_-]\w+)?"
# `[1,0]<stdout>:` and `[host@1,0]<stdout>: ` (mpirun --tag-output), `0: ` (srun --label)
_TAG = re.compile(
    r"[ \t]*(?:\[[^\]\s]{0,200}?\d{1,10},\d{1,7}\]<std(?:out|err)>:? ?|\d{1,6}: )", re.ASCII
)
_STARTING = re.compile(rf"# Collective test starting: {_PROGRAM}\s*", re.ASCII)
_COMMAND = re.compile(rf"(?:^|[\s/'\"]){_PROGRAM}(?=\s+-)", re.ASCII)
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
_ROW = re.compile(r"\s*(\d{1,19})\s+(\d{1,19})\s+([a-z]\w*)(\s.*)", re.ASCII)
_NUMBER = re.compile(r"\d{1,19}(?:\.\d{1,6})?(?:e[+-]\d{2,3})?", re.ASCII)
_WORD = re.compile(r"[a-z]\w*", re.ASCII)
_ROOT = re.compile(r"-?\d{1,7}", re.ASCII)
_COLUMNS = (["time", "algbw", "busbw", "error"], ["time", "algbw", "busbw", "#wrong"])
# The parts of a run in their order; a line of an earlier part begins another run.
_IN_COMMAND, _IN_PREAMBLE, _IN_RANKS, _IN_TABLE, _IN_ROWS, _IN_FOOTER = range(6)


@dataclass(slots=True)
class NcclTestsRun:
    """One program's output; `line` is where the run starts in its file.

    A row has bytes, count, dtype, redop and root (None if the collective has none), and for each of
    out_of_place and in_place time_us, algbw, busbw, `wrong` elements and `error`, the largest
    difference (to 2.12). `environment` are the NCCL_* assignments of the command, `avg_busbw` is as
    printed.
    """

    line: int
    program: str | None = None
    version: str | None = None
    nccl_version: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, int] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    ranks: int | None = None  # of one communicator
    rows: list[Row] = field(default_factory=list)
    avg_busbw: float | None = None
    out_of_bounds: int | None = None
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # What only the reader of text needs.
    part: int = _IN_COMMAND
    header: tuple[str, ...] = ()
    torn: list[int] = field(default_factory=list)  # lines of rows left out

    @property
    def collective(self) -> str | None:
        """Name the collective: the program's, else all_reduce, whose busbw alone exceeds algbw."""
        if self.program is not None:
            return _PROGRAMS[self.program]
        for numbers in self.placements():
            algbw, busbw = numbers["algbw"] or 0.0, numbers["busbw"] or 0.0
            if busbw * (1 - 1e-4) - 0.005 > algbw * (1 + 1e-4) + 0.005:
                return "all_reduce"
        return None

    @property
    def mean_busbw(self) -> float | None:
        """Average busbw over rows and placements, unweighted, as nccl-tests does."""
        speeds = []
        for numbers in self.placements():
            if numbers["busbw"] is not None:
                speeds.append(numbers["busbw"])
        if not speeds:
            return None
        return float(sum(speeds) / len(speeds))

    @property
    def rows_missing(self) -> bool:
        """Tell whether no average is printed, or not that of the rows: rows are missing."""
        mean, printed = self.mean_busbw, self.avg_busbw
        return mean is None or printed is None or abs(mean - printed) > 0.006 + 1e-5 * mean

    def placements(self) -> list[Row]:
        """Return the numbers of every row out of place and in place."""
        numbers = []
        for row in self.rows:
            numbers += [row["out_of_place"], row["in_place"]]
        return numbers

    def to_json(self) -> dict[str, Any]:
        """Return `collective`, `ranks`, `rows`, `avg_busbw`, and what else the output says."""
        mean = None
        if self.mean_busbw is not None and not self.rows_missing:
            mean = round(self.mean_busbw, 6)
        return {
            "collective": self.collective,
            "ranks": self.ranks,
            "rows": self.rows,
            "avg_busbw": self.avg_busbw,
            "mean_busbw": mean,
            "out_of_bounds": self.out_of_bounds,
            "version": self.version,
            "nccl_version": self.nccl_version,
            "environment": self.environment,
            "settings": self.settings,
            "devices": self.devices,
            "line": self.line,
            "errors": self.errors,
            "notes": self.notes,
        }

    def read_preamble(self, text: str) -> None:
        """Take what a line before the table says."""
        starting = _STARTING.fullmatch(text)
        version = _VERSION.fullmatch(text)
        if starting:
            self.program = starting[1]
        elif version:
            code = int(version[2])  # 22809 is 2.28.9, before 2.9 2408 is 2.4.8
            scale = 1000 if code < 10000 else 10000
            self.version = version[1]
            self.nccl_version = f"{code // scale}.{code // 100 % (scale // 100)}.{code % 100}"
        elif text.startswith("# nThread"):
            self.settings = {name: int(value) for name, value in _SETTINGS.findall(text)}

    def note_contradictions(self) -> None:
        """Count the ranks, and add a note for each contradiction inside the run."""
        ranks_of: dict[int, set[int | None]] = defaultdict(set)  # listed, by group
        for device in self.devices:
            ranks_of[device.get("group", 0)].add(device.get("rank"))
        repeated = len(self.devices) - sum(map(len, ranks_of.values()))
        if repeated:
            self.notes.append(
                f"{count(repeated, 'rank')} listed more than once: several programs wrote into "
                "this text (built without MPI, or NCCL_TESTS_SPLIT), and their rows cannot be told "
                "apart"
            )
        if ranks_of:
            ranks = next(iter(ranks_of.values()))
            are_whole = ranks == set(range(len(ranks)))
            of_process = self.settings.get("nThread", 1) * self.settings.get("nGpus", 1)
            are_whole &= of_process > 0 and len(self.devices) % of_process == 0
            if are_whole and all(group == ranks for group in ranks_of.values()):
                self.ranks = len(ranks)
            else:
                self.notes.append(
                    "the list of ranks is cut or its groups differ in size: the number of ranks is "
                    "not known"
                )
        self.devices = [device for device in self.devices if device]
        mean = self.mean_busbw
        if mean is not None and self.avg_busbw is None:
            self.notes.append(
                "the output ends without an average of busbw: the run was cut or failed"
            )
        elif mean is not None and self.rows_missing:
            self.notes.append(
                f"the printed average of busbw is {self.avg_busbw:g}, but the rows give "
                f"{mean:.4f}: rows are missing or added"
            )
        if not self.rows:
            self.notes.append("no row: the run was cut or failed")
        wrong = 0
        for row in self.rows:
            wrong += bool(row["out_of_place"]["wrong"] or row["in_place"]["wrong"])
        if wrong or self.out_of_bounds:
            self.notes.append(
                f"wrong results: {count(wrong, 'row')} with wrong elements, "
                f"{self.out_of_bounds or 0} values out of bounds"
            )


def read_nccl_tests(file: str | Path) -> list[NcclTestsRun]:
    """Return every run of a file. Raises OSError, and what parse_nccl_tests does."""
    return read_input(file, parse_nccl_tests)


def parse_nccl_tests(text: str) -> list[NcclTestsRun]:
    """Return every run of one text, in order, with notes on contradictions.

    Raises UnreadableInput: the text holds no row; the message says what is accepted and where.
    """
    runs: list[NcclTestsRun] = []
    headless: list[int] = []  # lines of rows under no header
    # A last line without its newline is left out: its last number may be cut.
    *lines, rest = text.split("\n")
    for line_number, line in enumerate(lines, 1):
        line = line.rstrip("\r")
        tag = _TAG.match(line)
        if tag:
            line = line[tag.end() :]
        if _ROW.match(line):
            if not runs or runs[-1].part not in (_IN_TABLE, _IN_ROWS):
                headless.append(line_number)
                continue
            runs[-1].part = _IN_ROWS
            row = _read_row(line, runs[-1].header, runs[-1].program)
            if row is None:
                runs[-1].torn.append(line_number)
            else:
                runs[-1].rows.append(row)
        else:
            _read_line(runs, line_number, line)
    if not any(run.rows for run in runs):
        torn: list[int] = []
        failure = ""
        for run in runs:
            torn += run.torn
            if run.errors:
                failure = f": {run.errors[0]}"
        if not lines:
            reason = "the text is empty, or has no whole line"
        elif torn:
            reason = f"no row fits its table, the first is line {torn[0]}"
        elif headless:
            reason = f"line {headless[0]} looks like a row, but no header names its columns"
        elif runs:
            reason = f"a run starts in line {runs[-1].line}, but no row follows{failure}"
        else:
            reason = f"line 1 begins {lines[0][:60]!r}"
        raise UnreadableInput(f"{_ACCEPTED}; {reason}")
    for run in runs:
        if run.torn:
            run.notes.append(
                f"{len(run.torn)} cut or torn row(s) left out, the first in line {run.torn[0]}"
            )
    if headless:
        runs[0].notes.append(
            f"{len(headless)} row(s) without a header left out, the first in line {headless[0]}"
        )
    if rest.lstrip()[:1] in tuple("#0123456789"):
        runs[-1].notes.append(f"the text ends inside line {len(lines) + 1}, which is left out")
    for run in runs:
        run.note_contradictions()
    return runs


def _read_line(runs: list[NcclTestsRun], line_number: int, line: str) -> None:
    marked = line.lstrip()
    command = None
    if "_perf" in line:
        command = _COMMAND.search(line)
    if command is not None:
        run = _run_in(runs, line_number, _IN_COMMAND)
        run.program = command[1]
        before = line[: command.start(1)]
        run.environment = dict(re.findall(r"(?:^|[\s'\"])(NCCL_\w+)=([^\s'\"]+)", before))
    elif not marked.startswith("#"):
        version = _NCCL.search(line)
        if runs and _FAILURE.search(line):
            runs[-1].errors.append(line.strip()[:300])
        elif runs and version and not runs[-1].nccl_version:
            runs[-1].nccl_version = version[1]
    elif marked.split()[:4] == ["#", "size", "count", "type"]:
        header = _read_header(marked)
        if header and runs and runs[-1].part == _IN_TABLE:
            runs[-1].notes.append(
                f"a second header in line {line_number}: several programs wrote into this text"
            )
        if header:
            _run_in(runs, line_number, _IN_TABLE).header = header
    elif marked.startswith("#  ") and "Rank" in marked:
        run = _run_in(runs, line_number, _IN_RANKS)
        match = _RANK.fullmatch(marked)
        device: dict[str, Any] = {}  # of a line that is cut
        if match is not None:
            device = {"rank": int(match[1]), "group": int(match[2] or 0), "host": match[3]}
            device |= {"device": int(match[4]), "bus_id": match[5], "name": match[6]}
        run.devices.append(device)
    elif marked.startswith(_PREAMBLE):
        _run_in(runs, line_number, _IN_PREAMBLE).read_preamble(marked)
    elif runs and runs[-1].part >= _IN_TABLE:
        run, bounds, average = runs[-1], _BOUNDS.fullmatch(marked), _AVERAGE.fullmatch(marked)
        if bounds:
            run.out_of_bounds = int(bounds[1])
        elif average:
            run.avg_busbw = float(average[1])
        elif _FAILURE.search(marked):
            run.errors.append(marked.strip()[:300])
        if bounds or average:
            run.part = _IN_FOOTER


def _run_in(runs: list[NcclTestsRun], line_number: int, part: int) -> NcclTestsRun:
    if not runs or part < runs[-1].part:
        runs.append(NcclTestsRun(line_number))
    runs[-1].part = part
    return runs[-1]


def _read_header(text: str) -> tuple[str, ...]:
    """Return the columns between the type and the numbers, and those of one placement."""
    columns = text.split()[4:]
    left = []
    for word in columns[:2]:
        if word in ("redop", "root"):
            left.append(word)
    half = (len(columns) - len(left)) // 2
    placement = columns[-half:]
    if columns[len(left) :] != placement * 2 or placement not in _COLUMNS:
        return ()
    return (*left, *placement)


def _read_row(text: str, header: Sequence[str], program: str | None) -> Row | None:
    match = _ROW.fullmatch(text)
    if match is None:
        return None
    size, elements, dtype, words = int(match[1]), int(match[2]), match[3], match[4].split()
    redop = root = None
    if "redop" in header and words and _WORD.fullmatch(words[0]):
        redop = words.pop(0)
    if "root" in header:
        if not words or not _ROOT.fullmatch(words[0]):
            return None
        root = int(words.pop(0))
    columns = header[-4:]
    if len(words) != 2 * len(columns):
        return None
    share = elements * NCCL_TESTS_ELEMENT_BYTES.get(dtype, 0)  # bytes of one rank's part
    if program != "alltoallv" and share and size % share:
        return None
    if redop == "none":
        redop = None
    if root == -1:
        root = None
    row: Row = {"bytes": size, "count": elements, "dtype": dtype, "redop": redop, "root": root}
    for placement, figures in (("out_of_place", words[:4]), ("in_place", words[4:])):
        row[placement] = _read_placement(dict(zip(columns, figures, strict=True)), size)
        if row[placement] is None:
            return None
    return row


def _read_placement(words: Mapping[str, str], size: int) -> Row | None:
    """Return the numbers of one placement; None if they are none, or algbw is not size ÷ time."""
    values: dict[str, float | None] = {}
    for column, word in words.items():
        if word in ("nan", "-nan", "inf") or (word == "N/A" and column in ("error", "#wrong")):
            values[column] = None
        elif _NUMBER.fullmatch(word) and float(word) < math.inf:
            values[column] = float(word)
        else:
            return None
    time_us, algbw, wrong = values["time"], values["algbw"], values.get("#wrong")
    if wrong is not None and not wrong.is_integer():
        return None
    if time_us is not None and algbw is not None:
        half_us, half = _half_a_unit(words["time"]), _half_a_unit(words["algbw"]) * 1.001
        if size > (algbw + half) * (time_us + half_us) * 1e3:
            return None
        if size < (algbw - half) * (time_us - half_us) * 1e3:
            return None
    return {
        "time_us": time_us,
        "algbw": algbw,
        "busbw": values["busbw"],
        "wrong": None if wrong is None else int(wrong),
        "error": values.get("error"),
    }


def _half_a_unit(word: str) -> float:
    mantissa, _, exponent = word.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return float(f"0.5e{int(exponent or 0) - decimals}")
