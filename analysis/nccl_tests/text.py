"""Read the text of nccl-tests 2.0 to 2.19: tables with their headers and footers, several runs, log lines in between.

Checked against the format strings of nccl-tests' release tags. A row that does not fit its table is left out and counted.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from analysis.errors import UnreadableInput
from analysis.nccl_tests.rows import ROW_START, TableHeader, read_header, read_row
from analysis.nccl_tests.run import PROGRAMS, Run, nccl_version

_LONGEST_COMMAND = 8000  # characters
_ACCEPTED = "accepted is nccl-tests' output: a line `# size count type … time algbw busbw …` and rows below it"

# `[1,0]<stdout>:` and `[host@1,0]<stdout>: ` (mpirun --tag-output), `0: ` (srun --label)
_TAG = re.compile(
    r"[ \t]*(?:\[[^\]\s]{0,200}?\d{1,10},(\d{1,7})\]<std(?:out|err)>:? ?|(\d{1,6}): )", re.ASCII
)
_PROGRAM = "(" + "|".join(sorted(PROGRAMS, key=len, reverse=True)) + r")_perf(?:[_-]\w+)?"
_STARTING = re.compile(rf"# Collective test starting: {_PROGRAM}\s*", re.ASCII)
_COMMAND = re.compile(rf"(?:^|[\s/'\"]){_PROGRAM}(?=\s+-)", re.ASCII)
_LAUNCHER = re.compile(r"(?:^|[\s/])(?:mpirun|mpiexec|srun|orterun|prterun)\s", re.ASCII)
_PROCESSES = re.compile(r"\s(?:--?np|-n|--ntasks)[ =](\d{1,7})(?=\s)", re.ASCII)
_VERSION = re.compile(
    r"# nccl-tests version (\S+) nccl-headers=\d+ nccl-library=(\d{1,9})\s*", re.ASCII
)
_NCCL = re.compile(r"NCCL version (\d{1,4}(?:\.\d{1,4}){1,3})\S*\+cuda", re.ASCII)
_SETTINGS = re.compile(
    r"(nThread|nGpus|minBytes|maxBytes|step|warmup iters|agg iters|iters|validation|graph|unalign):? (\d{1,18})",
    re.ASCII,
)
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+\d+ on\s+(\S+) device\s+(\d{1,4}) \[([0-9a-fA-Fx:]+)\] (.*\S)\s*"
)
_BOUNDS = re.compile(r"# Out of bounds values\s*: (\d{1,18}) (?:OK|FAILED)\s*", re.ASCII)
_AVERAGE = re.compile(
    r"# Avg bus bandwidth\s*: (\d{1,19}(?:\.\d{1,10})?(?:e[+-]\d\d)?)(?: (?:OK|FAILED)?)?\s*",
    re.ASCII,
)
_FAILURE = re.compile(
    r"Test (?:NCCL |CUDA |CPU )?failure|# error: |: Test timeout |Out of memory", re.ASCII
)


class _Line(NamedTuple):
    number: int
    tag: str | None
    text: str


def read_tables(text: str) -> list[Run]:
    """Read every run of one text, in order, not yet annotated. Raises UnreadableInput if it holds no row."""
    lines = list(_lines(text))
    heads = {
        line.tag for line in lines if line.tag is not None and read_header(line.text) is not None
    }
    streams = [lines]
    if len(heads) > 1:  # several programs, one per process: each tag is a text of its own
        ordered = sorted(heads, key=lambda tag: (len(tag), tag))
        streams = [[line for line in lines if line.tag in (None, head)] for head in ordered]
    readers = [_RunReader() for _ in streams]
    for reader, stream in zip(readers, streams, strict=True):
        reader.read(stream)
    runs = [run for reader in readers for run in reader.runs]
    if not any(run.rows for run in runs):
        raise UnreadableInput(_nothing(lines, runs, readers[0]))
    if text.rpartition("\n")[2].lstrip()[:1] in tuple("#0123456789"):
        runs[-1].notes.append(f"the text ends inside line {len(lines) + 1}, which is left out")
    if len(heads) > 1:
        for run in runs:
            run.notes.append(
                f"{len(heads)} processes each printed a table: they are separate programs, not the ranks of one program"
            )
    return runs


def _lines(text: str) -> Iterator[_Line]:
    """Yield whole lines without their tags. A last line without its newline is left out: its last number may be cut."""
    rows = text.split("\n")
    rows.pop()
    for number, row in enumerate(rows, 1):
        row = row.rstrip("\r")
        found = _TAG.match(row)
        yield (
            _Line(number, found[1] or found[2], row[found.end() :])
            if found
            else _Line(number, None, row)
        )


def _nothing(lines: Sequence[_Line], runs: Sequence[Run], reader: "_RunReader") -> str:
    """Say why a text holds no row."""
    if not lines:
        return f"{_ACCEPTED}; the text is empty, or has no whole line"
    if reader.torn:
        return f"{_ACCEPTED}; no row fits its table, the first is line {reader.torn[0]}"
    if reader.headless:
        return f"{_ACCEPTED}; line {reader.headless[0]} looks like a row, but no header names its columns"
    if runs:
        failures = [f": {run.errors[0]}" for run in runs if run.errors]
        return f"{_ACCEPTED}; a run starts in line {runs[-1].line}, but no row follows{failures[-1] if failures else ''}"
    return f"{_ACCEPTED}; line 1 begins {lines[0].text[:60]!r}"


class _RunReader:
    """Turns the lines of one stream into runs. A heading line starts another run once the last has rows or a footer."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.run: Run | None = None
        self.table: TableHeader | None = None
        self.torn: list[int] = []  # lines of the rows left out, of the whole stream
        self.headless: list[int] = []  # lines of rows under no header
        self._noted = 0  # how many of `torn` have a note
        self._done = False  # the run has rows or a footer
        self._footed = False

    def read(self, lines: Iterable[_Line]) -> None:
        """Read a whole stream; afterwards `runs` holds its runs."""
        pending = ""
        for number, _, text in lines:
            body = pending + text
            continued = body.endswith("\\") and len(body) < _LONGEST_COMMAND
            pending = body[:-1] + " " if continued else ""
            if not continued:
                self._line(number, text, body)
        self._close()
        if self.runs and self.headless:
            count, first = len(self.headless), self.headless[0]
            self.runs[0].notes.append(
                f"{count} row(s) without a header left out, the first in line {first}"
            )

    def _line(self, number: int, text: str, body: str) -> None:
        marked = text.lstrip()
        command = _COMMAND.search(body) if "_perf" in body else None
        if ROW_START.match(text):
            self._row(number, text)
        elif command is not None:
            started = self.run is not None and (self.run.settings or self.run.listed)
            _command(self._head(number, anew=bool(started)), number, body, command)
        elif not marked.startswith("#"):
            if self.run is not None and _FAILURE.search(text):
                self.run.errors.append(text.strip()[:300])
            elif self.run is not None and (said := _NCCL.search(text)):
                self.run.nccl_version = self.run.nccl_version or said[1]
        elif (columns := read_header(marked)) is not None:
            if self.table is not None and not self._done and self.run is not None:
                self.run.notes.append(
                    f"a second header in line {number}: several programs wrote into this text"
                )
            self._head(number)
            self.table = columns
        elif "Rank" in marked and marked.startswith("#  "):
            _rank(self._head(number, anew=self.table is not None), marked)
        elif marked.startswith(
            ("# nThread", "# nccl-tests version", "# Collective test starting", "# Using devices")
        ):
            listed = self.run is not None and bool(self.run.listed)
            _preamble(self._head(number, anew=self.table is not None or listed), marked)
        elif self.run is not None and self.table is not None:
            self._footed |= _foot(self.run, marked)
            self._done |= self._footed

    def _head(self, number: int, anew: bool = False) -> Run:
        """Return the run that a heading line belongs to."""
        if self.run is None or self._done or anew:
            self._close()
            self.run, self.table = Run(number), None
            self._done = self._footed = False
            self.runs.append(self.run)
        return self.run

    def _row(self, number: int, text: str) -> None:
        if self.table is None or self.run is None or self._footed:
            self.headless.append(number)
            return
        self._done = True
        row = read_row(text, self.table, number, self.run.program)
        if row is None:
            self.torn.append(number)
        else:
            self.run.rows.append(row)

    def _close(self) -> None:
        torn = self.torn[self._noted :]
        if self.run is not None and torn:
            self.run.notes.append(
                f"{len(torn)} cut or torn row(s) left out, the first in line {torn[0]}"
            )
        self._noted = len(self.torn)


def _preamble(run: Run, text: str) -> None:
    """Read one line above the list of ranks."""
    if found := _STARTING.fullmatch(text):
        run.program = found[1]
    elif found := _VERSION.fullmatch(text):
        run.version, run.nccl_version = found[1], nccl_version(int(found[2]))
    elif text.startswith("# nThread"):
        run.settings = {name: int(value) for name, value in _SETTINGS.findall(text)}


def _rank(run: Run, text: str) -> None:
    """Read one line of the list of ranks."""
    found = _RANK.fullmatch(text)
    if found is None:
        run.list_cut = True
        return
    rank, group = int(found[1]), int(found[2] or 0)
    run.listed.append((group, rank))
    device: dict[str, Any] = {
        "rank": rank,
        "group": group,
        "host": found[3],
        "device": int(found[4]),
    }
    run.devices.append(device | {"bus_id": found[5], "name": found[6]})


def _foot(run: Run, text: str) -> bool:
    """Read one line below a table; tell whether it belongs to the footer."""
    if found := _BOUNDS.fullmatch(text):
        run.out_of_bounds = int(found[1])
    elif found := _AVERAGE.fullmatch(text):
        run.avg_busbw = float(found[1])
    else:
        if _FAILURE.search(text):
            run.errors.append(text.strip()[:300])
        return False
    return True


def _command(run: Run, line: int, text: str, found: re.Match[str]) -> None:
    """Read the command that a shell's log or a person put above a run. Only NCCL_* is kept of its environment."""
    before, after = text[: found.start(1)], text[found.end() :] + " "
    run.line, run.program = line, found[1]
    run.environment = dict(re.findall(r"(?:^|[\s'\"])(NCCL_\w+)=([^\s'\"]+)", before))
    ranks = 1
    for short, long in (("t", "nthreads"), ("g", "ngpus")):
        given = re.search(rf"\s(?:-{short}\s*|--{long}[ =])(\d{{1,6}})\s", after)
        ranks *= int(given[1]) if given else 1
    if _LAUNCHER.search(before):
        processes = _PROCESSES.search(before)
        run.command_ranks = ranks * int(processes[1]) if processes else None
    else:
        run.command_ranks = ranks
