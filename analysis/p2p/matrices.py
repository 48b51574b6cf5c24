"""Read what p2pBandwidthLatencyTest (CUDA samples) prints: GB/s and µs between every ordered pair of GPUs.

Checked against the sample's format strings from 2014 to 2025. Every entry has two decimals, so a cut entry shows. A row
counts only if it has an entry for every column of its matrix. The row is the GPU that runs the copy.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from analysis.errors import UnreadableInput
from analysis.foreign import refuse_too_many

_ACCEPTED = (
    "accepted is the output of p2pBandwidthLatencyTest: a title such as `Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)`, "
    "a line of columns, rows"
)

_TITLE = re.compile(
    r"\s*(?:(Uni|Bi)directional P2P=(Disabled|Enabled) Bandwidth(?: \(P2P (Writes|Reads)\))? Matrix \(GB/s\)"
    r"|P2P=(Disabled|Enabled) Latency(?: \(P2P (Writes|Reads)\))? Matrix \(us\))\s*",
    re.ASCII,
)
_CONNECTIVITY = re.compile(r"\s*P2P Connectivity Matrix\s*")
_COLUMNS = re.compile(r"\s*(D\\D|GPU|CPU)((?:\s+\d{1,4})+)\s*", re.ASCII)
_ROW = re.compile(r"\s*(\d{1,4})((?:\s+(?:\d{1,15}\.\d\d|inf|-?nan))+)\s*", re.ASCII)
_ROW_OF_BITS = re.compile(r"\s*(\d{1,4})((?:\s+[01])+)\s*", re.ASCII)
_ROW_HEAD = re.compile(r"\s*(\d{1,4})\s+\d{1,15}(?:\.\d|\s)", re.ASCII)
# a piece of a torn title or column line: the rows after it may belong to any matrix
_PIECE = re.compile(
    r"directional|P2P=|Bandwidth|Latency|Matrix|D\\D|(?:^|\s)[GC]PU(?:\s|$)|^\S{0,3}(?:\s+\d{1,4})+$",
    re.ASCII,
)
_BANNER = re.compile(r"\s*\[P2P \(Peer-to-Peer\) GPU Bandwidth Latency Test\]\s*")
_HEX = r"([0-9a-fA-F]{1,8})"
_DEVICE = re.compile(
    rf"\s*Device: (\d{{1,4}}), (.+), pciBusID: {_HEX}, pciDeviceID: {_HEX}, pciDomainID: ?{_HEX}\s*",
    re.ASCII,
)
_WORKER = re.compile(r"CPU worker \d{1,4}\s*", re.ASCII)
_ACCESS = re.compile(r"\s*Device=(\d{1,4}) (CAN|CANNOT) Access Peer Device=(\d{1,4})\s*", re.ASCII)


# What every release of the sample since 2014 prints, in this order. Latency of the CPU came later, reads are asked for.
_PRINTED = (
    "unidirectional_disabled", "unidirectional_enabled", "bidirectional_disabled", "bidirectional_enabled",
    "latency_gpu_disabled", "latency_gpu_enabled",
)  # fmt: skip


@dataclass(slots=True)
class Matrices:
    """The output of one run. `entries[name][row, column]` are its numbers by GPU id: GB/s, or µs for latency_….

    Names: unidirectional_, bidirectional_, latency_gpu_ or latency_cpu_, with disabled or enabled (P2P);
    `…_enabled_reads` for what `--p2p_read` adds. `ids[name]` are a matrix's columns. `access` is by ordered pair.
    """

    line: int
    devices: dict[int, dict[str, str]] = field(default_factory=dict)
    access: dict[tuple[int, int], bool] = field(default_factory=dict)
    ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    entries: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the object of `python -m analysis p2p --json`: square matrices over their columns, null for a missing entry."""
        ids = sorted({*self.devices, *(one for columns in self.ids.values() for one in columns)})
        named = [
            {"id": one, "name": None, "bus_id": None} | self.devices.get(one, {}) for one in ids
        ]
        access: dict[str, bool] = {}
        for a, b in self.access:
            if a < b or (b, a) not in self.access:
                key = f"{min(a, b)}-{max(a, b)}"
                access[key] = self.access[a, b] and self.access.get((b, a), True)
        matrices = {
            name: [[self.entries[name].get((row, column)) for column in columns] for row in columns]
            for name, columns in self.ids.items()
        }
        return {"devices": named, "access": access, "matrices": matrices, "notes": self.notes}


def parse_p2p(text: str) -> list[Matrices]:
    """Read every run of the program in one text, in order. Raises UnreadableInput if no matrix has an entry."""
    reader = _MatrixReader()
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], 1):
        reader.read(number, line.rstrip("\r"))
    # A last line without its newline may be cut: only an entry with two decimals is whole.
    if _ROW.fullmatch(lines[-1]):
        reader.read(len(lines), lines[-1])
    reader.close()
    runs = [run for run in reader.runs if any(run.entries.values())]
    if not runs:
        raise UnreadableInput(f"{_ACCEPTED}; {reader.nothing(text)}")
    for run in reader.runs:
        if run not in runs:
            runs[0].notes.append(f"line {run.line}: a run without a matrix, left out")
    return runs


class _MatrixReader:
    """Turns lines into runs. A banner, or a matrix that the run already has, starts another run."""

    def __init__(self) -> None:
        self.runs: list[Matrices] = []
        self._title: tuple[str, str] | None = (
            None  # "bandwidth" or "latency", and what the title says of the name
        )
        self._name: str | None = None  # the matrix whose rows follow; "" is the connectivity
        self._columns: tuple[int, ...] = ()
        self._titled: set[str] = set()  # titles of this run
        self._common: tuple[int, ...] | None = None  # the columns of every matrix of this run
        self._last = -1  # the index in `_columns` of the last row
        self._lost: list[int] = []  # numbers of this run's rows that do not fit
        self._workers = False  # this run is of CPU workers: Ringside's own, in the program's form

    def read(self, number: int, line: str) -> None:
        if _BANNER.fullmatch(line):
            self._start(number)
        elif found := _DEVICE.fullmatch(line):
            bus, device, domain = (int(found[index], 16) for index in (3, 4, 5))
            name = {"name": found[2], "bus_id": f"{domain:04x}:{bus:02x}:{device:02x}"}
            self._run(number).devices[int(found[1])] = name
        elif _WORKER.fullmatch(line):
            self._run(number)
            self._workers = True
        elif found := _ACCESS.fullmatch(line):
            self._allow(number, int(found[1]), int(found[3]), found[2] == "CAN")
        elif found := _TITLE.fullmatch(line):
            reads = "_reads" if "Reads" in (found[3], found[5]) else ""
            if found[1]:
                title = ("bandwidth", f"{found[1].lower()}directional_{found[2].lower()}{reads}")
            else:
                title = ("latency", f"{found[4].lower()}{reads}")
            if title[1] in self._titled:
                self._start(number)
            self._run(number)
            self._titled.add(title[1])
            self._title, self._name = title, None
        elif _CONNECTIVITY.fullmatch(line):
            self._run(number)
            self._title, self._name = ("access", ""), None
        elif found := _COLUMNS.fullmatch(line):
            columns = tuple(map(int, found[2].split()))
            refuse_too_many(len(columns))
            self._head(number, found[1], columns)
        elif "NOTE:" in line:
            self._title, self._name = None, None
        elif (
            self._title is not None
            and _PIECE.search(line.strip())
            and (self._name != "" or not _ROW_OF_BITS.fullmatch(line))
        ):
            self._run(number).notes.append(
                f"line {number}: a torn title or column line; the rows after it are left out"
            )
            self._title, self._name = None, None
        elif self._name is not None:
            self._row(number, line)

    def _head(self, number: int, word: str, columns: tuple[int, ...]) -> None:
        """Read the line of column numbers above the rows. A matrix without a title of its own has no name."""
        kind, rest = self._title or ("", "")
        if not kind or (kind != "latency" and word != "D\\D"):  # in 2014 latency had D\D too
            return  # a line of something else
        if len(set(columns)) != len(columns) or columns != (self._common or columns):
            return
        run, self._name = self._run(number), None
        name = {"access": "", "bandwidth": rest}.get(
            kind, f"latency_{'cpu' if word == 'CPU' else 'gpu'}_{rest}"
        )
        if name in run.ids:
            run.notes.append(f"line {number}: a matrix without its own title, left out")
            return
        self._name, self._columns, self._common, self._last = name, columns, columns, -1
        if name:
            run.ids[name], run.entries[name] = columns, {}

    def _row(self, number: int, line: str) -> None:
        run, name = self.runs[-1], self._name
        found = (_ROW if name else _ROW_OF_BITS).fullmatch(line)
        begun = found or _ROW_HEAD.match(line)
        if begun is None or name is None:
            return
        label = int(begun[1])
        row = self._columns.index(label) if label in self._columns else None
        if (
            row is not None and row <= self._last
        ):  # rows come in order: this one belongs to a matrix whose header is lost
            run.notes.append(
                f"line {number}: row {label} has no header of its own; it and the rows after it are left out"
            )
            self._name = None
            return
        words = found[2].split() if found else []
        if row is None or len(words) != len(self._columns):
            self._lost.append(number)
            return
        self._last = row
        for column, word in zip(self._columns, words, strict=True):
            if not name:
                self._allow(number, label, column, word == "1")
            elif word[-1].isdigit():
                run.entries[name][label, column] = float(word)

    def _allow(self, number: int, a: int, b: int, can: bool) -> None:
        run = self._run(number)
        if a != b and run.access.setdefault((a, b), can) != can:
            run.notes.append(
                f"line {number}: access of {a} to {b} contradicts an earlier line; the earlier one is kept"
            )

    def _run(self, number: int) -> Matrices:
        return self.runs[-1] if self.runs else self._start(number)

    def _start(self, number: int) -> Matrices:
        self.close()
        self._title, self._name, self._common, self._titled = None, None, None, set()
        self.runs.append(Matrices(number))
        return self.runs[-1]

    def close(self) -> None:
        """Note what is missing in the run that ends."""
        if not self.runs:
            return
        run = self.runs[-1]
        if self._lost:
            count, first = len(self._lost), self._lost[0]
            run.notes.append(f"{count} cut or torn row(s) left out, the first in line {first}")
        workers, self._lost, self._workers = self._workers, [], False
        for name, columns in run.ids.items():
            present = {row for row, _ in run.entries[name]}
            if absent := [str(row) for row in columns if row not in present]:
                run.notes.append(f"{name} has no row {', '.join(absent)}")
        if absent := _not_printed(run, workers):
            run.notes.append(f"the text has no {', '.join(absent)}: it is cut or incomplete")

    def nothing(self, text: str) -> str:
        """Say why a text holds no matrix."""
        if not text.strip():
            return "the text is empty"
        titled = [run for run in self.runs if run.ids]
        if titled:
            return f"the matrix {next(iter(titled[0].ids))} has no whole row"
        if self.runs:
            return f"line {self.runs[0].line} looks like this output, but no matrix follows"
        return f"line 1 begins {text.lstrip().splitlines()[0][:60]!r}"


def _not_printed(run: Matrices, workers: bool) -> list[str]:
    """Return the matrices that the program prints after or before those of a run, and that the run lacks.

    CPU workers (`workers`) have no GPU whose clock could time a copy.
    """
    wanted = [*_PRINTED]
    if any(name.startswith("latency_cpu") for name in run.ids):
        wanted += ["latency_cpu_disabled", "latency_cpu_enabled"]
    if any(name.endswith("_reads") for name in run.ids):
        wanted += ["unidirectional_enabled_reads", "latency_gpu_enabled_reads"]
        wanted += ["latency_cpu_enabled_reads"] if "latency_cpu_disabled" in run.ids else []
    return [
        name
        for name in wanted
        if name not in run.ids and not (workers and name.startswith("latency_gpu"))
    ]
