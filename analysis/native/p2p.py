"""Read GB/s and µs between every ordered pair of GPUs from p2pBandwidthLatencyTest's text.

The text of the program (CUDA samples) is checked against its format strings. Every entry has two
decimals, so a cut entry shows. A row counts only if it has an entry for every column of its matrix.
The row is the GPU that runs the copy.
"""

import json
import re
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

from analysis.input_files import UnreadableInput, read_input, refuse_too_many
from benchmarks.record import finite

_ACCEPTED = (
    "expected the output of p2pBandwidthLatencyTest: a title such as `Unidirectional "
    "P2P=Disabled Bandwidth Matrix (GB/s)`, column headings, then rows"
)
# What every release of the sample prints, in this order.
_PRINTED = (
    *("unidirectional_disabled", "unidirectional_enabled"),
    *("bidirectional_disabled", "bidirectional_enabled"),
    *("latency_gpu_disabled", "latency_gpu_enabled"),
)
_READS = ("unidirectional_enabled_reads", "latency_gpu_enabled_reads")
_LATENCY_CPU = ("latency_cpu_disabled", "latency_cpu_enabled")
_TITLE = re.compile(
    r"\s*(?:(Uni|Bi)directional P2P=(Disabled|Enabled) Bandwidth(?: \(P2P (Writes|Reads)\))? "
    r"Matrix \(GB/s\)"
    r"|P2P=(Disabled|Enabled) Latency(?: \(P2P (Writes|Reads)\))? Matrix \(us\))\s*",
    re.ASCII,
)
_CONNECTIVITY = re.compile(r"\s*P2P Connectivity Matrix\s*")
_COLUMNS = re.compile(r"\s*(D\\D|GPU|CPU)((?:\s+\d{1,4})+)\s*", re.ASCII)
_ROW = re.compile(r"\s*(\d{1,4})((?:\s+(?:\d{1,15}\.\d\d|inf|-?nan))+)\s*", re.ASCII)
_ROW_OF_BITS = re.compile(r"\s*(\d{1,4})((?:\s+[01])+)\s*", re.ASCII)
_ROW_HEAD = re.compile(r"\s*(\d{1,4})\s+\d{1,15}(?:\.\d|\s)", re.ASCII)
# A piece of a torn title or column line: the rows after it may belong to any matrix.
_PIECE = re.compile(
    r"directional|P2P=|Bandwidth|Latency|Matrix|D\\D|(?:^|\s)[GC]PU(?:\s|$)"
    r"|^\S{0,3}(?:\s+\d{1,4})+$",
    re.ASCII,
)
_BANNER = re.compile(r"\s*\[P2P \(Peer-to-Peer\) GPU Bandwidth Latency Test\]\s*")
_HEX = r"([0-9a-fA-F]{1,8})"
_DEVICE = re.compile(
    rf"\s*Device: (\d{{1,4}}), (.+), pciBusID: {_HEX}, pciDeviceID: {_HEX}, "
    rf"pciDomainID: ?{_HEX}\s*",
    re.ASCII,
)
_ACCESS = re.compile(r"\s*Device=(\d{1,4}) (CAN|CANNOT) Access Peer Device=(\d{1,4})\s*", re.ASCII)
_BITS = "connectivity"  # the matrix of bits, which says who can access whom
_BANDWIDTH = "unidirectional_enabled"  # as in a ring's step: one direction, with peer access if any


@dataclass(slots=True)
class Matrices:
    """The output of one run. `entries[name][row, column]` are its numbers by GPU id: GB/s or µs.

    Names: unidirectional_, bidirectional_, latency_gpu_ or latency_cpu_, with disabled or enabled
    (P2P); `…_enabled_reads` for what `--p2p_read` adds. `ids[name]` are a matrix's columns.
    `access` is by ordered pair.
    """

    line: int
    devices: dict[int, dict[str, str]] = field(default_factory=dict)
    access: dict[tuple[int, int], bool] = field(default_factory=dict)
    ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    entries: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the object of `p2p --json`: square matrices, null for a missing entry."""
        ids = set(self.devices).union(*self.ids.values())
        devices = []
        for gpu in sorted(ids):
            devices.append({"id": gpu, "name": None, "bus_id": None} | self.devices.get(gpu, {}))
        access: dict[str, bool] = {}
        for a, b in self.access:
            pair = f"{min(a, b)}-{max(a, b)}"
            access[pair] = self.access[a, b] and self.access.get((b, a), True)
        matrices: dict[str, list[list[float | None]]] = {}
        for name, columns in self.ids.items():
            matrices[name] = []
            for row in columns:
                entries = [self.entries[name].get((row, column)) for column in columns]
                matrices[name].append(entries)
        return {"devices": devices, "access": access, "matrices": matrices, "notes": self.notes}

    def set_access(self, line_number: int, a: int, b: int, can_access: bool) -> None:
        """Enter what a line says; the first line of a pair counts."""
        if a != b and self.access.setdefault((a, b), can_access) != can_access:
            self.notes.append(
                f"line {line_number}: access of {a} to {b} contradicts an earlier line; the "
                "earlier one is kept"
            )


def read_p2p(file: str | Path) -> list[Matrices]:
    """Return every run of the program in a file. Raises OSError, and what parse_matrices does."""
    return read_input(file, parse_matrices)


def parse_matrices(text: str) -> list[Matrices]:
    """Return every run of the program in one text, in order.

    Raises UnreadableInput: no matrix has an entry; the message says what is accepted.
    """
    reader = _MatrixReader()
    *lines, last = text.split("\n")
    for line_number, line in enumerate(lines, 1):
        reader.read_line(line_number, line.rstrip("\r"))
    # A last line without its newline may be cut: only an entry with two decimals is whole.
    if _ROW.fullmatch(last):
        reader.read_line(len(lines) + 1, last)
    reader.note_missing()
    runs, empty = [], []
    names: list[str] = []
    for run in reader.runs:
        names += run.ids
        if any(run.entries.values()):
            runs.append(run)
        else:
            empty.append(run)
    if not runs:
        if not text.strip():
            reason = "the text is empty"
        elif names:
            reason = f"the matrix {names[0]} has no whole row"
        elif reader.runs:
            reason = f"line {reader.runs[0].line} looks like this output, but no matrix follows"
        else:
            reason = f"line 1 begins {text.lstrip().splitlines()[0][:60]!r}"
        raise UnreadableInput(f"{_ACCEPTED}; {reason}")
    for run in reader.runs:
        if not any(run.entries.values()):
            runs[0].notes.append(f"line {run.line}: a run without a matrix, left out")
    return runs


class _MatrixReader:
    """Turns lines into runs. A banner, or a matrix that the run already has, starts another run."""

    def __init__(self) -> None:
        self.runs: list[Matrices] = []
        self.title = ""  # of the matrix that comes; empty: none
        self.name = ""  # of the matrix whose rows follow; empty: none
        self.last_row = -1  # its index in `columns`
        # Of the last run:
        self.titles: set[str] = set()
        self.columns: tuple[int, ...] = ()  # of every matrix
        self.lost: list[int] = []  # numbers of rows that do not fit

    def read_line(self, line_number: int, line: str) -> None:
        title, columns = _TITLE.fullmatch(line), _COLUMNS.fullmatch(line)
        device, access = _DEVICE.fullmatch(line), _ACCESS.fullmatch(line)
        if _BANNER.fullmatch(line):
            self.start_run(line_number)
        elif device:
            bus_id = f"{int(device[5], 16):04x}:{int(device[3], 16):02x}:{int(device[4], 16):02x}"
            self.run(line_number).devices[int(device[1])] = {"name": device[2], "bus_id": bus_id}
        elif access:
            self.run(line_number).set_access(
                line_number, int(access[1]), int(access[3]), access[2] == "CAN"
            )
        elif title:
            self.read_title(line_number, title)
        elif _CONNECTIVITY.fullmatch(line):
            self.run(line_number)
            self.title, self.name = _BITS, ""
        elif columns:
            self.read_columns(line_number, columns[1], tuple(map(int, columns[2].split())))
        elif "NOTE:" in line:
            self.title = self.name = ""
        elif self.name == _BITS and _ROW_OF_BITS.fullmatch(line):
            self.read_row(line_number, line)
        elif self.title and _PIECE.search(line.strip()):
            self.run(line_number).notes.append(
                f"line {line_number}: a torn title or column line; the rows after it are left out"
            )
            self.title = self.name = ""
        elif self.name:
            self.read_row(line_number, line)

    def run(self, line_number: int) -> Matrices:
        if not self.runs:
            self.start_run(line_number)
        return self.runs[-1]

    def start_run(self, line_number: int) -> None:
        self.note_missing()
        self.title, self.name, self.titles, self.columns = "", "", set(), ()
        self.lost = []
        self.runs.append(Matrices(line_number))

    def read_title(self, line_number: int, match: re.Match[str]) -> None:
        direction, bandwidth_state, writes, latency_state, latency_writes = match.groups()
        title = f"latency_{str(latency_state).lower()}"
        if direction:
            title = f"{direction.lower()}directional_{bandwidth_state.lower()}"
        if "Reads" in (writes, latency_writes):
            title += "_reads"
        if title in self.titles:
            self.start_run(line_number)
        self.run(line_number)
        self.titles.add(title)
        self.title, self.name = title, ""

    def read_columns(self, line_number: int, word: str, columns: tuple[int, ...]) -> None:
        refuse_too_many(len(columns))
        is_latency = self.title.startswith("latency")
        if not self.title or is_latency == (word == "D\\D"):
            return  # a line of something else
        if len(set(columns)) != len(columns) or columns != (self.columns or columns):
            return
        run = self.run(line_number)
        name = self.title
        if is_latency:
            name = name.replace("latency", f"latency_{word.lower()}")
        if name in run.ids:
            self.name = ""
            run.notes.append(f"line {line_number}: a matrix without its own title, left out")
            return
        self.name, self.columns, self.last_row = name, columns, -1
        if name != _BITS:
            run.ids[name], run.entries[name] = columns, {}

    def read_row(self, line_number: int, line: str) -> None:
        run = self.runs[-1]
        is_bits = self.name == _BITS
        row = _ROW_OF_BITS.fullmatch(line) if is_bits else _ROW.fullmatch(line)
        head = row or _ROW_HEAD.match(line)
        if head is None:
            return
        label = int(head[1])
        words: list[str] = []
        if row:
            words = row[2].split()
        if label in self.columns and self.columns.index(label) <= self.last_row:
            # Rows come in order: this one belongs to a matrix whose header is lost.
            run.notes.append(
                f"line {line_number}: row {label} has no header of its own; it and the rows after "
                "it are left out"
            )
            self.name = ""
        elif label not in self.columns or len(words) != len(self.columns):
            self.lost.append(line_number)
        else:
            self.last_row = self.columns.index(label)
            for column, word in zip(self.columns, words, strict=True):
                if is_bits:
                    run.set_access(line_number, label, column, word == "1")
                elif word[-1].isdigit():  # neither inf nor nan
                    run.entries[self.name][label, column] = float(word)

    def note_missing(self) -> None:
        if not self.runs:
            return
        run = self.runs[-1]
        if self.lost:
            run.notes.append(
                f"{len(self.lost)} cut or torn row(s) left out, the first in line {self.lost[0]}"
            )
        for name, columns in run.ids.items():
            rows = {row for row, _ in run.entries[name]}
            absent_rows = [str(row) for row in columns if row not in rows]
            if absent_rows:
                run.notes.append(f"{name} has no row {', '.join(absent_rows)}")
        wanted = [*_PRINTED]
        if any(name.startswith("latency_cpu") for name in run.ids):
            wanted += _LATENCY_CPU
        if any(name.endswith("_reads") for name in run.ids):
            wanted += _READS
            if "latency_cpu_disabled" in run.ids:
                wanted.append("latency_cpu_enabled_reads")
        absent = [name for name in wanted if name not in run.ids]
        if absent:
            run.notes.append(f"the text has no {', '.join(absent)}: it is cut or incomplete")


def parse_bandwidths(text: str) -> list[list[float]]:
    """Return a square matrix of GB/s, from the row's GPU to the column's; the diagonal is 0.

    Accepts the object of `p2p --json`, a record that holds its table, and a bare matrix.

    Raises UnreadableInput: anything else, or a pair without a positive number.
    """
    try:
        matrix = json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableInput(
            "not JSON; expected the output of `python -m analysis p2p --json`, or JSON rows of GB/s"
        ) from None
    for key in ("tables", "p2p", "matrices", _BANDWIDTH):
        if isinstance(matrix, dict):
            matrix = matrix.get(key, matrix)
    if not isinstance(matrix, list):
        raise UnreadableInput(
            f"no matrices.{_BANDWIDTH}; expected the JSON of `python -m analysis p2p`"
        )
    size = len(matrix)
    if not size or not all(isinstance(row, list) and len(row) == size for row in matrix):
        raise UnreadableInput("the matrix is not square; expected a row and a column for each GPU")
    bandwidths = [[0.0] * size for _ in range(size)]
    for a, b in permutations(range(size), 2):
        value = finite(matrix[a][b])
        if value is None or value <= 0:
            raise UnreadableInput(
                f"GPU {a} to GPU {b} is {matrix[a][b]!r:.100}; expected GB/s above 0"
            )
        bandwidths[a][b] = float(value)
    return bandwidths
