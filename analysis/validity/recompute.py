"""Compare the records of a study with what the raw lines of their ranks give when they are derived again."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.findings.baselines import BASELINES, EFFICIENCY, Baselines
from analysis.findings.study import Study
from benchmarks.derived import FIELDS, IncompleteLines, complete, function_of
from benchmarks.record import CellFolder, Kind, Record, RecordError, read, read_lines, record_paths
from benchmarks.record.former import computed_otherwise

# Records of this version and later have lines that hold everything that is derived.
FIRST_SCHEMA = 3
ABSENT = "absent"


class NotRecomputable(Exception):
    """There is nothing to derive a record from, and nothing is missing; the message is the reason."""


@dataclass(frozen=True)
class Difference:
    """One value that the record states otherwise than its lines."""

    record: str  # the folder of the attempt, within the study
    value: str  # metrics step/ms_median; tables p2p.matrices.…
    recorded: Any  # ABSENT where the record lacks it
    recomputed: Any


@dataclass(frozen=True)
class Omission:
    """A record that could not be recomputed."""

    record: str
    reason: str
    wrong: bool  # whether its lines ought to be there: the study is damaged


@dataclass
class Verification:
    """What came of all records of a study."""

    records: int = 0
    recomputed: int = 0
    values: int = 0
    differences: list[Difference] = field(default_factory=list)
    omissions: list[Omission] = field(default_factory=list)
    other_metrics: set[str] = field(default_factory=set)  # of recomputed records, from other sources than the lines

    @property
    def right(self) -> bool:
        """Whether nothing differs and nothing is damaged."""
        return not self.differences and not any(one.wrong for one in self.omissions)


def verify(study: Path) -> Verification:
    """Derive every record of a study again, earlier attempts too, and compare."""
    result, records = Verification(), {}
    for path in record_paths(study):
        result.records += 1
        name = str(path.parent.relative_to(study))
        try:
            records[name] = read(path)
        except RecordError as error:
            result.omissions.append(Omission(name, str(error), wrong=True))
    for name, record in records.items():
        try:
            values = _values(CellFolder(study / name), record)
        except IncompleteLines as error:
            result.omissions.append(Omission(name, str(error), wrong=record.state == "finished"))
            continue
        except NotRecomputable as error:
            result.omissions.append(Omission(name, str(error), wrong=False))
            continue
        _compare(name, record, values, result)
        compare_efficiency(name, record, records.values(), result)
    return result


def _values(folder: CellFolder, record: Record) -> dict[str, Any]:
    """Return FIELDS of a record from its lines.

    Raises:
        IncompleteLines: lines are missing.
        NotRecomputable: there is nothing to derive it from.
    """
    cell = record.cell
    if not folder.all_rank_lines():
        raise NotRecomputable("no raw lines")
    if record.schema_version < FIRST_SCHEMA:
        raise NotRecomputable(f"its lines are of schema {record.schema_version}, which does not hold every sample")
    if function_of(cell) is None:
        raise NotRecomputable(f"benchmark={cell.benchmark['name']} declares no derive function")
    lines = {rank: list(read_lines(folder.rank_lines(rank))) for rank in range(cell.world_size)}
    if record.state == "finished":
        for rank, own in lines.items():
            if not own or own[-1]["kind"] != Kind.DONE:
                raise IncompleteLines(f"ranks/{rank}.jsonl is cut: its last line is not `done`")
    values = complete(lines, cell)
    if values is None:
        raise NotRecomputable(f"it has no result: the cell is {record.state}")
    return values


def compare_efficiency(name: str, record: Record, records: Iterable[Record], result: Verification) -> None:
    """Add the comparison of the efficiency that a record states with that against the baselines that it names."""
    if EFFICIENCY not in record.metrics or BASELINES not in record.checks:
        return
    ids = {one for of_gpu in record.checks[BASELINES].values() for one in of_gpu}
    study = Study.of([record, *(other for other in records if other.record_id in ids)])
    share = Baselines(study).efficiency(record)
    recomputed = ABSENT if share is None else share
    result.values += 1
    if not _same(record.metrics[EFFICIENCY], recomputed):
        result.differences.append(Difference(name, f"metrics {EFFICIENCY}", record.metrics[EFFICIENCY], recomputed))


def _compare(name: str, record: Record, values: Mapping[str, Any], result: Verification) -> None:
    """Add the comparison of one record to a result."""
    result.recomputed += 1
    for part in FIELDS:
        recorded = dict(_leaves(getattr(record, part)))
        for key, value in _leaves(values[part]):
            if computed_otherwise(record.schema_version, f"{part} {key}"):
                continue
            result.values += 1
            before = recorded.get(key, ABSENT)
            if not _same(before, value):
                result.differences.append(Difference(name, f"{part} {key}", before, value))
    named = {EFFICIENCY} if BASELINES in record.checks else set()
    result.other_metrics |= record.metrics.keys() - values["metrics"].keys() - named


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every number, word and empty container of nested JSON, with the path to it."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple) and value:
        yield f"{key}.length", len(value)
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{number}")
    elif key:  # an empty part of a record has no value
        yield key, list(value) if isinstance(value, tuple) else value


def _same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal as JSON has them; NaN equals NaN."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
