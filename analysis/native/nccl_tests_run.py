"""One run of nccl-tests as a reader found it, and what contradicts itself in it.

Bandwidths are GB/s with GB = 1e9 bytes, times µs. What the output does not say is None.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.collectives.busbw import NCCL_TESTS_COLLECTIVES, NCCL_TESTS_ELEMENT_BYTES

# program of nccl-tests: the collective's name here
PROGRAMS = {collective.program: name for name, collective in NCCL_TESTS_COLLECTIVES.items()}
PROGRAM_PATTERN = "(" + "|".join(sorted(PROGRAMS, key=len, reverse=True)) + r")_perf(?:[_-]\w+)?"


@dataclass(frozen=True, slots=True)
class PlacementNumbers:
    """The numbers of one row in one placement.

    `wrong` counts elements, `error` is the largest difference (to 2.12). `per_iteration` holds what
    `-I` adds: min_us, max_us, p99_us, cv_pct, and more from JSON.
    """

    time_us: float | None
    algbw: float | None
    busbw: float | None
    wrong: int | None = None
    error: float | None = None
    cputime_us: float | None = None
    per_iteration: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the numbers; CPU time and iterations only if the output has them."""
        content: dict[str, Any] = {
            "time_us": self.time_us,
            "algbw": self.algbw,
            "busbw": self.busbw,
            "wrong": self.wrong,
            "error": self.error,
        }
        if self.cputime_us is not None:
            content["cputime_us"] = self.cputime_us
        if self.per_iteration is not None:
            content["per_iteration"] = self.per_iteration
        return content


@dataclass(frozen=True, slots=True)
class SizeRow:
    """One message size; `redop` and `root` are None if the collective has none."""

    bytes: int
    count: int
    dtype: str
    redop: str | None
    root: int | None
    out_of_place: PlacementNumbers | None
    in_place: PlacementNumbers | None
    timestamp: str | None = None

    def placements(self) -> list[PlacementNumbers]:
        """Return the placements that the row has."""
        return [numbers for numbers in (self.out_of_place, self.in_place) if numbers is not None]

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON."""
        content: dict[str, Any] = {
            "bytes": self.bytes,
            "count": self.count,
            "dtype": self.dtype,
            "redop": self.redop,
            "root": self.root,
            "out_of_place": self.out_of_place.to_json() if self.out_of_place else None,
            "in_place": self.in_place.to_json() if self.in_place else None,
        }
        if self.timestamp is not None:
            content["timestamp"] = self.timestamp
        return content


@dataclass(slots=True)
class NcclTestsRun:
    """One program's output; `avg_busbw` is as printed, `line` where the run starts in its file.

    `listed` are (group, rank) in the order listed, `environment` the NCCL_* assignments of the
    command, `command_ranks` the ranks that the command starts. `digits` is half a unit in the last
    place of a printed bandwidth below 1,000.
    """

    line: int
    digits: float = 0.005
    program: str | None = None
    version: str | None = None
    nccl_version: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    command_ranks: int | None = None
    settings: dict[str, int] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    listed: list[tuple[int, int]] = field(default_factory=list)
    list_cut: bool = False
    rows: list[SizeRow] = field(default_factory=list)
    avg_busbw: float | None = None
    out_of_bounds: int | None = None
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def collective(self) -> str | None:
        """Name the collective: the program's, else the only one that prints such a table."""
        if self.program is not None:
            return PROGRAMS[self.program]
        reducing = [row for row in self.rows if row.redop is not None]
        if any(row.root is not None for row in reducing):
            return "reduce"
        if self._least_factor() > 1:  # only all_reduce's factor exceeds 1
            return "all_reduce"
        # all_reduce, send_recv and broadcast count all bytes, reduce_scatter, gather and scatter
        # those of one rank.
        for row in reducing:
            if row.bytes > _bytes_of_elements(row, unknown=math.inf) > 0:
                return "reduce_scatter"
        for row in self.rows:
            counts_all = row.bytes == _bytes_of_elements(row, unknown=0)
            if row.root is not None and row.bytes and counts_all and (self.ranks or 0) > 1:
                return "broadcast"
        return None

    @property
    def ranks(self) -> int | None:
        """Return the listed ranks of one communicator; None if unknown, or no whole processes."""
        ranks = self.listed_ranks
        return None if ranks is None or ranks % self.ranks_a_process else ranks

    @property
    def listed_ranks(self) -> int | None:
        """Count the listed ranks; None if the list is absent, cut, or differs by group."""
        groups: dict[int, set[int]] = {}
        for group, rank in self.listed:
            groups.setdefault(group, set()).add(rank)
        sizes = {len(ranks) for ranks in groups.values()}
        if len(sizes) != 1 or self.list_cut:
            return None
        size = sizes.pop()
        if any(ranks != set(range(size)) for ranks in groups.values()):
            return None
        return size

    @property
    def ranks_a_process(self) -> int:
        """Return the ranks of each process by the settings; 1 where they do not say it."""
        return max(1, self.settings.get("nThread", 1) * self.settings.get("nGpus", 1))

    @property
    def mean_busbw(self) -> float | None:
        """Average busbw over rows and placements, unweighted, as nccl-tests does."""
        speeds = []
        for placement in self._all_placements():
            if placement.busbw is not None:
                speeds.append(placement.busbw)
        return sum(speeds) / len(speeds) if speeds else None

    @property
    def rows_missing(self) -> bool:
        """Tell whether no average is printed, or not that of the rows: rows are missing."""
        mean, printed = self.mean_busbw, self.avg_busbw
        return mean is None or printed is None or abs(mean - printed) > 0.006 + 1e-5 * mean

    def _all_placements(self) -> Iterator[PlacementNumbers]:
        for row in self.rows:
            yield from row.placements()

    def _least_factor(self) -> float:
        """Return the lowest busbw/algbw that all rows allow with their rounding; 0 without any."""
        low, is_bounded = 0.0, False
        for placement in self._all_placements():
            algbw, busbw = placement.algbw, placement.busbw
            if not algbw or busbw is None:
                continue
            half_algbw = self.digits if algbw < 999 else max(self.digits, algbw * 1e-4)
            half_busbw = self.digits if busbw < 999 else max(self.digits, busbw * 1e-4)
            low = max(low, (busbw - half_busbw) / (algbw + half_algbw))
            is_bounded = is_bounded or algbw > half_algbw
        return low if is_bounded else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return `collective`, `ranks`, `rows`, `avg_busbw`, and what else the output says."""
        # The average of some rows is another number than that of all.
        mean = None if self.rows_missing else self.mean_busbw
        return {
            "collective": self.collective,
            "ranks": self.ranks,
            "rows": [row.to_json() for row in self.rows],
            "avg_busbw": self.avg_busbw,
            "mean_busbw": None if mean is None else round(mean, 6),
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

    def add_notes(self) -> None:
        """Add a note for each contradiction inside the run."""
        note = self.notes.append
        ranks = self.listed_ranks
        doubled = len(self.listed) - len(set(self.listed))
        if doubled:
            note(
                f"{_counted(doubled, 'rank')} listed more than once: several programs wrote into "
                "this text (built without MPI, or NCCL_TESTS_SPLIT), and their rows cannot be told "
                "apart"
            )
        if self.listed and ranks is None:
            note(
                "the list of ranks is cut or its groups differ in size: the number of ranks is not "
                "known"
            )
        if ranks is not None and ranks % self.ranks_a_process:
            note(
                f"{ranks} ranks are listed, but one process has {self.ranks_a_process} GPUs: not a "
                "multiple"
            )
        if None not in (ranks, self.command_ranks) and ranks != self.command_ranks:
            note(f"the list has {ranks} ranks, but the command says {self.command_ranks}")
        mean = self.mean_busbw
        if mean is not None and self.avg_busbw is None:
            note("the output ends without an average of busbw: the run was cut or failed")
        elif mean is not None and self.rows_missing:
            note(
                f"the printed average of busbw is {self.avg_busbw:g}, but the rows give "
                f"{mean:.4f}: rows are missing or added"
            )
        if not self.rows:
            note("no row: the run was cut or failed")
        wrong = 0
        for row in self.rows:
            wrong += any(placement.wrong for placement in row.placements())
        if wrong or self.out_of_bounds:
            note(
                f"wrong results: {_counted(wrong, 'row')} with wrong elements, "
                f"{self.out_of_bounds or 0} values out of bounds"
            )


def _bytes_of_elements(row: SizeRow, unknown: float) -> float:
    """Return the bytes of a row's count of elements; that of an `unknown` type for others."""
    return row.count * NCCL_TESTS_ELEMENT_BYTES.get(row.dtype, unknown)


def nccl_version(code: int) -> str | None:
    """Write NCCL_VERSION_CODE as text: 22809 is 2.28.9, before 2.9 2408 is 2.4.8; else None."""
    if 2000 <= code < 10000:
        return f"{code // 1000}.{code // 100 % 10}.{code % 100}"
    if 20000 <= code < 1000000:
        return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    return None


def _counted(number: int, things: str) -> str:
    return f"{number} {things}" if number == 1 else f"{number} {things}s"
