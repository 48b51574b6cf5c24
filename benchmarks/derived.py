"""Values that are computed from the raw lines of a cell's ranks, and how these lines are picked.

A benchmark has one function `derive(lines, cell) -> Derived` without torch, which its YAML names
(`code: {derive: …}`). The launching process calls it when it makes the record, and `python -m
analysis verify` calls it again, perhaps on another machine: floats are added by math.fsum, because
sum() rounds otherwise from Python 3.12 on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf import groups
from conf.cell import Cell
from conf.options import Refused
from conf.targets import locate_without_torch

Line = Mapping[str, Any]
RankLines = Mapping[int, Sequence[Line]]  # what each rank wrote, in its order
# {metric: its 95 % interval inside the run: low, high, and how it was found}
WithinRun = dict[str, dict[str, float]]
FIELDS = ("metrics", "within_run", "series", "tables", "model", "checks")  # of a `result` line


class IncompleteLines(ValueError):
    """Lines of a finished measurement are missing; the message names the rank and the lines."""


@dataclass(frozen=True)
class Derived:
    """What a benchmark's raw lines give. Names and shapes are those of the fields of a Record."""

    metrics: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[list[float]]] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)
    output: str = ""  # what the benchmark prints; empty: nothing
    model: dict[str, float] = field(default_factory=dict)
    within_run: WithinRun = field(default_factory=dict)

    def with_facts(self, result: Line) -> dict[str, Any]:
        """Return FIELDS as the record has them: with the facts of rank 0's `result` line."""
        values: dict[str, Any] = {}
        for name in FIELDS:
            values[name] = {**getattr(self, name), **result.get(name, {})}
        for numbers in (values["metrics"], *values["within_run"].values()):
            for name, value in numbers.items():
                numbers[name] = float(value)
        return values


Derive = Callable[[RankLines, Cell], Derived]


def function_of(cell: Cell) -> Derive | None:
    """Return the derive function that a benchmark's YAML names; None: its `result` line has all.

    Raises Refused: only a record names it, it cannot be imported, or it imports torch.
    """
    dotted = cell.declared.get("benchmark", {}).get("derive")
    if dotted is None:
        return None
    if not groups.declares("derive", dotted):
        raise Refused(f"{dotted!s:.200} is not run ({groups.NOT_DECLARED})")
    derive: Derive = locate_without_torch(dotted)
    return derive


def derived_values(lines: RankLines, cell: Cell) -> dict[str, Any] | None:
    """Return FIELDS and `output` of a cell; None where rank 0 wrote no `result` line.

    Raises IncompleteLines: lines are missing, or nothing can be derived from them.
    """
    result = result_line(lines)
    if result is None:
        return None
    for rank in range(cell.world_size):
        if not lines.get(rank):
            raise IncompleteLines(f"rank {rank} has no lines")
    try:
        derive = function_of(cell)
        derived = Derived()
        if derive is not None:
            derived = derive(lines, cell)
        if not isinstance(derived, Derived):
            raise TypeError(f"derive returned {type(derived).__name__}, not Derived")
        values = derived.with_facts(result)
    except IncompleteLines:
        raise
    # a benchmark of the user may raise anything, and ends only its cell
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}"
        raise IncompleteLines(f"the lines do not fit each other ({cause})") from error
    values["output"] = derived.output
    peers = of_kind(lines[0], "peers", has="rows")
    if peers:
        values["checks"]["peers"] = peers[0]["rows"]
    return values


def reported(lines: Sequence[Line]) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Return what a rank or server said of itself, as `Record.ranks` has it, and its versions.

    None where it did not start.
    """
    start = next(iter(of_kind(lines, "start")), None)
    if start is None:
        return None
    facts = dict(start)
    for line in of_kind(lines, "script_device")[:1]:
        facts |= line
    for name in ("kind", "time", "versions"):
        del facts[name]
    facts["done"] = bool(of_kind(lines, "done"))
    return facts, start["versions"]


def result_line(lines: RankLines) -> Line | None:
    """Return the `result` line of rank 0."""
    return next(iter(of_kind(lines.get(0, ()), "result")), None)


def of_kind(lines: Iterable[Line], kind: str, has: str = "kind", **wanted: Any) -> list[Line]:
    """Return the lines of one kind that have the field `has`, and these values of fields."""
    chosen = []
    for line in lines:
        if line["kind"] != kind or has not in line:
            continue
        if all(line.get(name) == value for name, value in wanted.items()):
            chosen.append(line)
    return chosen


def together(lines: RankLines, kind: str, has: str = "kind", **wanted: Any) -> list[list[Line]]:
    """Return, for every line of a kind of rank 0, the lines of all ranks with the same place.

    Raises IncompleteLines: a rank wrote another number of them.
    """
    by_rank = [of_kind(lines[rank], kind, has, **wanted) for rank in sorted(lines)]
    for rank, own in enumerate(by_rank):
        if len(own) != len(by_rank[0]):
            what = " ".join([kind, *map(str, wanted.values())])
            raise IncompleteLines(
                f"rank {rank} has {len(own)} lines `{what}`, rank 0 has {len(by_rank[0])}"
            )
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


def slowest(of_ranks: Iterable[Sequence[float]]) -> list[float]:
    """Return the element-wise maximum over ranks: an iteration lasts as on its slowest rank."""
    return [max(column) for column in zip(*of_ranks, strict=True)]
