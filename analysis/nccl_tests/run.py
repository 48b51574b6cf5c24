"""One run of nccl-tests as a reader found it.

Bandwidths are GB/s with GB = 1e9 bytes, times µs. What the output does not say is None.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.collectives.busbw import NCCL_TESTS_COLLECTIVES, NCCL_TESTS_ELEMENT_BYTES

# program of nccl-tests: the collective's name here
PROGRAMS = {one.program: name for name, one in NCCL_TESTS_COLLECTIVES.items()}


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers of one row in one placement; `wrong` counts elements, `error` is the largest difference (to 2.12).

    `per_iteration` holds what `-I` adds: min_us, max_us, p99_us, cv_pct, and more from JSON.
    """

    time_us: float | None
    algbw: float | None
    busbw: float | None
    wrong: int | None = None
    error: float | None = None
    cputime_us: float | None = None
    per_iteration: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON; CPU time and iterations only if the output has them."""
        fields = {
            name: getattr(self, name) for name in ("time_us", "algbw", "busbw", "wrong", "error")
        }
        more = {name: getattr(self, name) for name in ("cputime_us", "per_iteration")}
        return fields | {name: value for name, value in more.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Row:
    """One message size; `redop` and `root` are None if the collective has none. `line` is its line in the file."""

    bytes: int
    count: int
    dtype: str
    redop: str | None
    root: int | None
    out_of_place: Measured | None
    in_place: Measured | None
    timestamp: str | None = None
    line: int | None = None

    def placements(self) -> Iterator[tuple[str, Measured]]:
        """Yield the placements that the row has, by name."""
        for name, one in (("out_of_place", self.out_of_place), ("in_place", self.in_place)):
            if one is not None:
                yield name, one

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON."""
        whole: dict[str, Any] = {
            name: getattr(self, name) for name in ("bytes", "count", "dtype", "redop", "root")
        }
        for name in ("out_of_place", "in_place"):
            one = getattr(self, name)
            whole[name] = None if one is None else one.as_json()
        return whole | ({} if self.timestamp is None else {"timestamp": self.timestamp})


@dataclass(slots=True)
class Run:
    """One program's output; `avg_busbw` is as printed, `line` where the run starts in its file.

    `listed` are (group, rank) in the order listed, `environment` the NCCL_* assignments of the command, `command_ranks`
    the ranks that the command starts. `digits` is half a unit in the last place of a printed bandwidth below 1,000.
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
    rows: list[Row] = field(default_factory=list)
    avg_busbw: float | None = None
    out_of_bounds: int | None = None
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def collective(self) -> str | None:
        """Name the collective: from the program, else from the table if only one program prints such a table."""
        if self.program is not None:
            return PROGRAMS[self.program]
        named = [row for row in self.rows if row.redop is not None]
        if any(row.root is not None for row in named):
            return "reduce"
        factors = self.factors()
        if factors is not None and factors[0] > 1:  # only all_reduce's factor exceeds 1
            return "all_reduce"
        # all_reduce, send_recv and broadcast count all bytes, reduce_scatter, gather and scatter those of one rank
        if any(
            row.bytes > row.count * NCCL_TESTS_ELEMENT_BYTES.get(row.dtype, math.inf) > 0
            for row in named
        ):
            return "reduce_scatter"
        rooted = [row for row in self.rows if row.root is not None and row.bytes]
        if (self.ranks or 0) > 1 and any(
            row.bytes == row.count * NCCL_TESTS_ELEMENT_BYTES.get(row.dtype, 0) for row in rooted
        ):
            return "broadcast"
        return None

    @property
    def ranks(self) -> int | None:
        """Return the listed ranks of one communicator; None where they are not known, or are no whole processes."""
        ranks = self.listed_ranks
        return None if ranks is None or ranks % self.of_a_process else ranks

    @property
    def listed_ranks(self) -> int | None:
        """Count the listed ranks of one communicator; None if the list is absent, cut, or differs by group."""
        groups: dict[int, set[int]] = {}
        for group, rank in self.listed:
            groups.setdefault(group, set()).add(rank)
        sizes = {len(ranks) for ranks in groups.values()}
        whole = all(ranks == set(range(len(ranks))) for ranks in groups.values())
        return sizes.pop() if len(sizes) == 1 and whole and not self.list_cut else None

    @property
    def of_a_process(self) -> int:
        """The number of ranks that each process has, as the settings say; 1 where they do not."""
        return max(1, self.settings.get("nThread", 1) * self.settings.get("nGpus", 1))

    @property
    def mean_busbw(self) -> float | None:
        """Average busbw over the rows found and both placements, unweighted, as nccl-tests does; None without rows."""
        values = [
            one.busbw for row in self.rows for _, one in row.placements() if one.busbw is not None
        ]
        return sum(values) / len(values) if values else None

    @property
    def rows_missing(self) -> bool:
        """Whether rows of the run are missing or added: its average is not printed, or is another one than that of the rows."""
        mean, printed = self.mean_busbw, self.avg_busbw
        return mean is None or printed is None or abs(mean - printed) > 0.006 + 1e-5 * mean

    def factors(self) -> tuple[float, float] | None:
        """Return the lowest and highest busbw/algbw that all rows allow with their rounding; None without such rows.

        The lowest exceeds the highest where rows contradict each other.
        """
        low, high = 0.0, math.inf
        for row in self.rows:
            for _, one in row.placements():
                if not one.algbw or one.busbw is None:
                    continue
                half = [
                    self.digits if value < 999 else max(self.digits, value * 1e-4)
                    for value in (one.algbw, one.busbw)
                ]
                low = max(low, (one.busbw - half[1]) / (one.algbw + half[0]))
                if one.algbw > half[0]:
                    high = min(high, (one.busbw + half[1]) / (one.algbw - half[0]))
        return None if math.isinf(high) else (low, high)

    def as_json(self) -> dict[str, Any]:
        """Return the run as JSON: `collective`, `ranks`, `rows`, `avg_busbw`, and what else the output says."""
        # The average of some rows is another number than that of all.
        mean = None if self.rows_missing else self.mean_busbw
        return {
            "collective": self.collective,
            "ranks": self.ranks,
            "rows": [row.as_json() for row in self.rows],
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


def nccl_version(code: int) -> str | None:
    """Write NCCL_VERSION_CODE as text: 22809 is 2.28.9, and before 2.9 2408 is 2.4.8; None for any other number."""
    if 2000 <= code < 10000:
        return f"{code // 1000}.{code // 100 % 10}.{code % 100}"
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}" if 20000 <= code < 1000000 else None


def _times(number: int, things: str) -> str:
    return f"{number} {things}" if number == 1 else f"{number} {things}s"


def annotate(run: Run) -> None:
    """Add a note for each contradiction inside the run."""
    note = run.notes.append
    ranks = run.listed_ranks
    doubled = len(run.listed) - len(set(run.listed))
    if doubled:
        note(
            f"{_times(doubled, 'rank')} listed more than once: several programs wrote into this text (built without MPI, or "
            "NCCL_TESTS_SPLIT), and their rows cannot be told apart"
        )
    if run.listed and ranks is None:
        note(
            "the list of ranks is cut or its groups differ in size: the number of ranks is not known"
        )
    if ranks is not None and ranks % run.of_a_process:
        note(
            f"{ranks} ranks are listed, but one process has {run.of_a_process} GPUs: not a multiple"
        )
    if None not in (ranks, run.command_ranks) and ranks != run.command_ranks:
        note(f"the list has {ranks} ranks, but the command says {run.command_ranks}")
    mean = run.mean_busbw
    if mean is not None and run.avg_busbw is not None and run.rows_missing:
        note(
            f"the printed average of busbw is {run.avg_busbw:g}, but the rows give {mean:.4f}: rows are missing or added"
        )
    if mean is not None and run.avg_busbw is None:
        note("the output ends without an average of busbw: the run was cut or failed")
    if not run.rows:
        note("no row: the run was cut or failed")
    wrong = sum(1 for row in run.rows if any(one.wrong for _, one in row.placements()))
    if wrong or run.out_of_bounds:
        note(
            f"wrong results: {_times(wrong, 'row')} with wrong elements, {run.out_of_bounds or 0} values out of bounds"
        )
