"""Read GB/s and µs between every ordered pair of GPUs: p2pBandwidthLatencyTest or benchmark=p2p.

The program's text (CUDA samples) is checked against its format strings from 2014 to 2025. Every
entry has two decimals, so a cut entry shows. A row counts only if it has an entry for every column
of its matrix. The row is the GPU that runs the copy.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

from analysis.errors import UnreadableInput
from analysis.input_files import damage_told, read_input, refuse_too_many, table_of
from benchmarks.record import finite

_ACCEPTED_TEXT = (
    "accepted is the output of p2pBandwidthLatencyTest: a title such as `Unidirectional "
    "P2P=Disabled Bandwidth Matrix (GB/s)`, a line of columns, rows"
)
_ACCEPTED_RECORD = "accepted is a record.json of benchmark=p2p"
# What every release of the sample since 2014 prints, in this order. Latency of the CPU came later,
# reads are asked for.
_PRINTED = (
    "unidirectional_disabled",
    "unidirectional_enabled",
    "bidirectional_disabled",
    "bidirectional_enabled",
    "latency_gpu_disabled",
    "latency_gpu_enabled",
)


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
            if a < b or (b, a) not in self.access:
                pair = f"{min(a, b)}-{max(a, b)}"
                access[pair] = self.access[a, b] and self.access.get((b, a), True)
        matrices = {}
        for name, columns in self.ids.items():
            entries = self.entries[name]
            matrices[name] = [[entries.get((row, column)) for column in columns] for row in columns]
        return {"devices": devices, "access": access, "matrices": matrices, "notes": self.notes}


@dataclass(frozen=True, slots=True)
class P2p:
    """The matrices of one file."""

    runs: list[Matrices]  # of the tool, or the medians of a record
    repeats: list[Matrices] = field(default_factory=list)  # every repeat of a record
    topology: str | None = None  # the text in the record
    title: str | None = None  # what a record measured
    words: Mapping[str, str] | None = None  # what enabled and disabled mean in a record


def read_p2p(file: str | Path) -> P2p:
    """Return the matrices of a file.

    Raises:
        OSError: it cannot be opened.
        UnreadableInput: it holds no matrix; the message says what is accepted.
    """
    return read_input(file, parse_p2p)


def parse_p2p(text: str) -> P2p:
    """Return the matrices of a text or of a record. Raises UnreadableInput if there is none."""
    if text.lstrip().startswith("{"):
        return _parse_record(text)
    return P2p(parse_matrices(text))


# --- records of benchmark=p2p ---------------------------------------------------------------------


def _parse_record(text: str) -> P2p:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{_ACCEPTED_RECORD}; the JSON is broken ({error})") from None
    table = table_of(record, "p2p")
    with damage_told("p2p"):
        medians = _matrices_of_table(table, table["matrices"])
        count = max((len(squares) for squares in table["samples"].values()), default=0)
        repeats = []
        for number in range(count):
            squares = {name: repeated[number] for name, repeated in table["samples"].items()}
            repeats.append(_matrices_of_table(table, squares))
        words = {str(state): str(word) for state, word in table["words"].items()}
        topology = (record.get("environment") or {}).get("topology")
        title = record.get("name")
        if not isinstance(topology, str | None) or not isinstance(title, str | None):
            raise UnreadableInput("environment.topology and name must be text")
    return P2p([medians], repeats or [medians], topology, title, words)


def _matrices_of_table(table: Mapping[str, Any], squares: Mapping[str, Any]) -> Matrices:
    """Return a record's matrices. Numbers that are not finite are absent."""
    matrices = Matrices(0)
    refuse_too_many(len(table["devices"]))
    ids = tuple(int(device["id"]) for device in table["devices"])
    for device in table["devices"]:
        if device["name"]:
            names = {"name": str(device["name"]), "bus_id": str(device["bus_id"])}
            matrices.devices[int(device["id"])] = names
    for pair, can_access in table["access"].items():
        a, b = map(int, pair.split("-"))
        matrices.access[a, b] = matrices.access[b, a] = bool(can_access)
    for name, rows in squares.items():
        matrices.ids[name] = ids
        entries = {}
        for a, row in zip(ids, rows, strict=True):
            for b, value in zip(ids, row, strict=True):
                if value is not None and math.isfinite(float(value)):
                    entries[a, b] = float(value)
        matrices.entries[name] = entries
    return matrices


# --- text of p2pBandwidthLatencyTest --------------------------------------------------------------

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
_WORKER = re.compile(r"CPU worker \d{1,4}\s*", re.ASCII)
_ACCESS = re.compile(r"\s*Device=(\d{1,4}) (CAN|CANNOT) Access Peer Device=(\d{1,4})\s*", re.ASCII)
_CONNECTIVITY_NAME = ""  # of the matrix of bits, which says who can access whom


def parse_matrices(text: str) -> list[Matrices]:
    """Return every run of the program in one text, in order.

    Raises:
        UnreadableInput: no matrix has an entry.
    """
    reader = _MatrixReader()
    *lines, last = text.split("\n")
    for number, line in enumerate(lines, 1):
        reader.read_line(number, line.rstrip("\r"))
    # A last line without its newline may be cut: only an entry with two decimals is whole.
    if _ROW.fullmatch(last):
        reader.read_line(len(lines) + 1, last)
    reader.close_run()
    runs = [run for run in reader.runs if any(run.entries.values())]
    if not runs:
        raise UnreadableInput(f"{_ACCEPTED_TEXT}; {_why_empty(text, reader.runs)}")
    for run in reader.runs:
        if run not in runs:
            runs[0].notes.append(f"line {run.line}: a run without a matrix, left out")
    return runs


def _why_empty(text: str, runs: list[Matrices]) -> str:
    """Say why a text holds no matrix."""
    if not text.strip():
        return "the text is empty"
    for run in runs:
        if run.ids:
            return f"the matrix {next(iter(run.ids))} has no whole row"
    if runs:
        return f"line {runs[0].line} looks like this output, but no matrix follows"
    return f"line 1 begins {text.lstrip().splitlines()[0][:60]!r}"


class _MatrixReader:
    """Turns lines into runs. A banner, or a matrix that the run already has, starts another run."""

    def __init__(self) -> None:
        self.runs: list[Matrices] = []
        self._kind: str | None = None  # of the last title: bandwidth, latency or access
        self._title = ""  # what the title says of the name
        self._name: str | None = None  # the matrix whose rows follow
        self._columns: tuple[int, ...] = ()
        self._titles: set[str] = set()  # of this run
        self._run_columns: tuple[int, ...] | None = None  # of every matrix of this run
        self._last_row = -1  # its index in `_columns`
        self._lost: list[int] = []  # numbers of this run's rows that do not fit
        self._has_workers = False  # CPU workers: Ringside's own, in the program's form

    def read_line(self, number: int, line: str) -> None:
        readers: tuple[tuple[re.Pattern[str], Callable[[int, re.Match[str]], None]], ...] = (
            (_BANNER, self._read_banner),
            (_DEVICE, self._read_device),
            (_WORKER, self._read_worker),
            (_ACCESS, self._read_access),
            (_TITLE, self._read_title),
            (_CONNECTIVITY, self._read_connectivity),
            (_COLUMNS, self._read_columns),
        )
        for pattern, read in readers:
            match = pattern.fullmatch(line)
            if match:
                read(number, match)
                return
        if "NOTE:" in line:
            self._kind = self._name = None
        elif self._kind is not None and _PIECE.search(line.strip()) and not self._is_bits(line):
            self._run(number).notes.append(
                f"line {number}: a torn title or column line; the rows after it are left out"
            )
            self._kind = self._name = None
        elif self._name is not None:
            self._read_row(number, line)

    def _read_banner(self, number: int, _: re.Match[str]) -> None:
        self._start_run(number)

    def _read_device(self, number: int, match: re.Match[str]) -> None:
        bus, device, domain = int(match[3], 16), int(match[4], 16), int(match[5], 16)
        bus_id = f"{domain:04x}:{bus:02x}:{device:02x}"
        self._run(number).devices[int(match[1])] = {"name": match[2], "bus_id": bus_id}

    def _read_worker(self, number: int, _: re.Match[str]) -> None:
        self._run(number)
        self._has_workers = True

    def _read_access(self, number: int, match: re.Match[str]) -> None:
        self._add_access(number, int(match[1]), int(match[3]), match[2] == "CAN")

    def _read_connectivity(self, number: int, _: re.Match[str]) -> None:
        self._run(number)
        self._kind, self._title, self._name = "access", "", None

    def _is_bits(self, line: str) -> bool:
        return self._name == _CONNECTIVITY_NAME and _ROW_OF_BITS.fullmatch(line) is not None

    def _read_title(self, number: int, match: re.Match[str]) -> None:
        direction, bandwidth_state, writes, latency_state, latency_writes = match.groups()
        reads = "_reads" if "Reads" in (writes, latency_writes) else ""
        if direction:
            kind = "bandwidth"
            title = f"{direction.lower()}directional_{bandwidth_state.lower()}{reads}"
        else:
            kind, title = "latency", f"{latency_state.lower()}{reads}"
        if title in self._titles:
            self._start_run(number)
        self._run(number)
        self._titles.add(title)
        self._kind, self._title, self._name = kind, title, None

    def _read_columns(self, number: int, match: re.Match[str]) -> None:
        """Read the line of column numbers above the rows."""
        word, columns = match[1], tuple(map(int, match[2].split()))
        refuse_too_many(len(columns))
        if self._kind is None or (self._kind != "latency" and word != "D\\D"):
            return  # a line of something else; in 2014 latency had D\D too
        if len(set(columns)) != len(columns) or columns != (self._run_columns or columns):
            return
        run = self._run(number)
        name = self._title
        if self._kind == "latency":
            name = f"latency_{'cpu' if word == 'CPU' else 'gpu'}_{self._title}"
        if name in run.ids:
            self._name = None
            run.notes.append(f"line {number}: a matrix without its own title, left out")
            return
        self._name, self._columns, self._run_columns, self._last_row = name, columns, columns, -1
        if name != _CONNECTIVITY_NAME:
            run.ids[name], run.entries[name] = columns, {}

    def _read_row(self, number: int, line: str) -> None:
        run, name = self.runs[-1], self._name
        assert name is not None
        is_bits = name == _CONNECTIVITY_NAME
        row = (_ROW_OF_BITS if is_bits else _ROW).fullmatch(line)
        head = row or _ROW_HEAD.match(line)
        if head is None:
            return
        label = int(head[1])
        index = self._columns.index(label) if label in self._columns else None
        if index is not None and index <= self._last_row:
            # Rows come in order: this one belongs to a matrix whose header is lost.
            run.notes.append(
                f"line {number}: row {label} has no header of its own; it and the rows after it "
                "are left out"
            )
            self._name = None
            return
        words = row[2].split() if row else []
        if index is None or len(words) != len(self._columns):
            self._lost.append(number)
            return
        self._last_row = index
        for column, word in zip(self._columns, words, strict=True):
            if is_bits:
                self._add_access(number, label, column, word == "1")
            elif word[-1].isdigit():  # neither inf nor nan
                run.entries[name][label, column] = float(word)

    def _add_access(self, number: int, a: int, b: int, can_access: bool) -> None:
        run = self._run(number)
        if a != b and run.access.setdefault((a, b), can_access) != can_access:
            run.notes.append(
                f"line {number}: access of {a} to {b} contradicts an earlier line; the earlier one "
                "is kept"
            )

    def _run(self, number: int) -> Matrices:
        if not self.runs:
            self._start_run(number)
        return self.runs[-1]

    def _start_run(self, number: int) -> None:
        self.close_run()
        self._kind, self._name, self._run_columns, self._titles = None, None, None, set()
        self.runs.append(Matrices(number))

    def close_run(self) -> None:
        """Note what is missing in the run that ends."""
        if not self.runs:
            return
        run = self.runs[-1]
        if self._lost:
            run.notes.append(
                f"{len(self._lost)} cut or torn row(s) left out, the first in line {self._lost[0]}"
            )
        for name, columns in run.ids.items():
            rows = {row for row, _ in run.entries[name]}
            absent_rows = [str(row) for row in columns if row not in rows]
            if absent_rows:
                run.notes.append(f"{name} has no row {', '.join(absent_rows)}")
        absent = _not_printed(run, self._has_workers)
        if absent:
            run.notes.append(f"the text has no {', '.join(absent)}: it is cut or incomplete")
        self._lost, self._has_workers = [], False


def _not_printed(run: Matrices, has_workers: bool) -> list[str]:
    """Return the matrices that the program prints beside those of a run, and that the run lacks.

    CPU workers have no GPU whose clock could time a copy.
    """
    wanted = list(_PRINTED)
    if any(name.startswith("latency_cpu") for name in run.ids):
        wanted += ["latency_cpu_disabled", "latency_cpu_enabled"]
    if any(name.endswith("_reads") for name in run.ids):
        wanted += ["unidirectional_enabled_reads", "latency_gpu_enabled_reads"]
        if "latency_cpu_disabled" in run.ids:
            wanted.append("latency_cpu_enabled_reads")
    absent = [name for name in wanted if name not in run.ids]
    if has_workers:
        absent = [name for name in absent if not name.startswith("latency_gpu")]
    return absent


# --- bandwidths for placement ---------------------------------------------------------------------

_BANDWIDTH = "unidirectional_enabled"  # as in a ring's step: one direction, with peer access if any


def parse_bandwidths(text: str) -> list[list[float]]:
    """Return a square matrix of GB/s, from the row's GPU to the column's; the diagonal is 0.

    Accepts `{"matrices": {"unidirectional_enabled": …}}` at any depth (the contract's object, or a
    record that holds it) and a bare matrix.

    Raises:
        UnreadableInput: anything else, or a pair without a positive number.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableInput(
            "not JSON; accepted is that of `python -m analysis p2p`, or a matrix"
        ) from None
    matrix = document if isinstance(document, list) else _outermost_bandwidths(document)
    if matrix is None:
        raise UnreadableInput(
            f"no matrices.{_BANDWIDTH}; accepted is the JSON of `python -m analysis p2p`"
        )
    size = len(matrix)
    if not size or not all(isinstance(row, list) and len(row) == size for row in matrix):
        raise UnreadableInput(
            "the matrix is not square; accepted are a row and a column for each GPU"
        )
    bandwidths = [[0.0] * size for _ in range(size)]
    for a, b in permutations(range(size), 2):
        value = finite(matrix[a][b])
        if value is None or value <= 0:
            raise UnreadableInput(
                f"GPU {a} to GPU {b} is {matrix[a][b]!r:.100}; accepted are GB/s above 0"
            )
        bandwidths[a][b] = float(value)
    return bandwidths


def _outermost_bandwidths(document: Any) -> Any:
    """Return the matrix inside nested objects, outermost first; None if there is none."""
    level = [document]
    while level:
        objects = [content for content in level if isinstance(content, dict)]
        for content in objects:
            matrices = content.get("matrices")
            if isinstance(matrices, dict) and isinstance(matrices.get(_BANDWIDTH), list):
                return matrices[_BANDWIDTH]
        level = [value for content in objects for value in content.values()]
    return None
