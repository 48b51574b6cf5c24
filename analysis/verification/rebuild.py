"""Make a record again from the raw files of its folder, by the functions that made it. Nothing is run and no file is written."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.cost import TABLE, to_record
from analysis.errors import UnreadableInput
from analysis.findings.baselines import BASELINES, HOST_BASELINES, NOISE
from analysis.findings.record_values import COST_ALONE
from analysis.prediction.recorded_forecast import with_forecast
from analysis.study.noise_floor import OF_SEVERAL_RECORDS
from analysis.trace.metrics import trace_metrics
from analysis.trace.source import load_trace, of_cell
from analysis.trace.steps import within_steps
from analysis.trace.summary import summarize
from analysis.validity.checks import judged, limits_of
from analysis.validity.effective import observe
from analysis.validity.gpu_samples import summary
from benchmarks.derived import FIELDS, IncompleteLines, RankLines, complete, function_of, reported
from benchmarks.record import CellFolder, Kind, Record, decoded, read_lines
from benchmarks.record.raw_files import found, stored

PROFILED = "profiled"  # the code of the finding that a profiled pass leaves


class NotRecomputable(Exception):
    """There is nothing to derive a record from, and nothing is missing; the message is the reason."""


@dataclass
class Rebuilt:
    """A record as its files give it."""

    record: Record
    parts: tuple[str, ...]  # the fields that were made again
    unknown: set[str] = field(
        default_factory=set
    )  # values that stay as recorded: their source is not in the folder


def rebuilt(
    record: Record,
    folder: CellFolder,
    known: Sequence[Record],
    folder_of: Callable[[Record], CellFolder],
) -> Rebuilt:
    """Return a record as its raw files give it. `known` are the records of its study that ended before it.

    Raises:
        IncompleteLines: lines are missing.
        NotRecomputable: there is nothing to derive it from.
    """
    lines = _lines(folder, record)
    values = _values(lines, record)
    made = Rebuilt(record, (*FIELDS, "ranks", "effective", "validity"))
    changes: dict[str, Any] = {name: dict(values[name]) for name in FIELDS}
    own = dataclasses.replace(record, **changes)
    own = _with_seconds(_with_samples(own, folder, made), folder, lines, made)
    own = _with_baselines(_with_trace(own, folder, made), record)
    own = _with_reports(own, folder, made)
    own = dataclasses.replace(own, effective=_effective(own, folder, known, folder_of, made))
    made.record = judged(with_forecast(own), limits_of(record))
    return made


def _lines(folder: CellFolder, record: Record) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of every rank. Raises as `rebuilt`."""
    if not folder.all_rank_lines():
        raise NotRecomputable("no raw samples")
    if not record.raw_sha256:
        raise NotRecomputable("it names no raw file")
    lines = {
        rank: list(read_lines(folder.rank_lines(rank))) for rank in range(record.cell.world_size)
    }
    if record.state == "finished":
        for rank, own in lines.items():
            if not own or own[-1]["kind"] != Kind.DONE:
                raise IncompleteLines(f"ranks/{rank}.jsonl is cut: its last line is not `done`")
    return lines


def _values(lines: RankLines, record: Record) -> Mapping[str, Any]:
    """Return FIELDS of a record from its lines. Raises as `rebuilt`."""
    if function_of(record.cell) is None:
        raise NotRecomputable(
            f"benchmark={record.cell.benchmark['name']} declares no derive function"
        )
    values = complete(lines, record.cell)
    if values is None:
        raise NotRecomputable(f"it has no result: the cell is {record.state}")
    return values


def _with_samples(own: Record, folder: CellFolder, made: Rebuilt) -> Record:
    """Add what the samples of the GPUs and of the CPU say."""
    before, (metrics, checks) = made.record, summary(folder)
    lost = folder.lost_samples(own.raw_sha256)
    if lost.gpus:  # of one host: what the others show is not what the record states
        metrics, checks = (
            {},
            {name: value for name, value in checks.items() if name != "gpu_samples"},
        )
    if lost.cpu:
        checks = {name: value for name, value in checks.items() if name != "cpu_samples"}
    own = dataclasses.replace(own, metrics=own.metrics | metrics, checks=own.checks | checks)
    if lost.gpus:
        names = {
            name for name in before.metrics if name.startswith("gpu/") and name not in own.metrics
        }
        own = _as_recorded(own, made, metrics=names, checks={"gpu_samples"} & before.checks.keys())
    if lost.cpu:
        own = _as_recorded(own, made, checks={"cpu_samples"} & before.checks.keys())
    return own


def _with_seconds(own: Record, folder: CellFolder, lines: RankLines, made: Rebuilt) -> Record:
    """Add what the cell cost, if it is a cell whose lines tell it; when the GPUs had settled is told by their samples."""
    cost = to_record(folder, lines, own.started_at, own.ended_at)
    if cost is None:
        return own
    own = dataclasses.replace(
        own, metrics=own.metrics | (cost.metrics if own.state == "finished" else {})
    )
    if folder.gpu_samples.name in own.raw_sha256 and stored(folder.gpu_samples) is None:
        return _as_recorded(own, made, tables={TABLE} & made.record.tables.keys())
    return dataclasses.replace(own, tables=own.tables | cost.tables)


def _with_trace(own: Record, folder: CellFolder, made: Rebuilt) -> Record:
    """Add what the trace of a profiled pass says."""
    before = made.record
    if "trace" not in before.tables:
        return own
    inside = folder.profile.path
    path = inside / "trace.sqlite.gz" if before.cell.profiler == "nsys" else inside
    if not (path.exists() and (path.is_file() or found(path, "rank*.json"))):
        names = {name for name in before.metrics if name.startswith("trace/")}
        return _as_recorded(own, made, metrics=names, tables={"trace"})
    try:
        told = summarize(within_steps(of_cell(load_trace(str(path)), len(before.cell.every_host))))
    except UnreadableInput as error:
        raise IncompleteLines(f"the trace cannot be read: {error}") from None
    return dataclasses.replace(
        own,
        metrics=own.metrics | trace_metrics(told),
        tables=own.tables | {"trace": told.as_json()},
    )


def _with_reports(own: Record, folder: CellFolder, made: Rebuilt) -> Record:
    """Add what was written when the attempt began, and what ranks and servers said of themselves."""
    ranks, every = own.cell.world_size, own.cell.world_size + own.cell.servers
    told = {
        number: reported(list(read_lines(folder.rank_lines(number)))) for number in range(every)
    }
    started = {number: one for number, one in told.items() if one is not None}
    begun: dict[str, Any] = {
        "environment": {
            name: value for name, value in own.environment.items() if name != "versions"
        }
    }
    if folder.attempt.exists():
        begun = decoded(folder.attempt.read_bytes())
        made.parts += tuple(begun)
    if started:
        begun["environment"].setdefault("versions", next(iter(started.values())).versions)
    if servers := [one.facts for number, one in started.items() if number >= ranks]:
        begun["environment"]["servers"] = servers
    return dataclasses.replace(
        own, ranks=[one.facts for number, one in started.items() if number < ranks], **begun
    )


def _effective(
    own: Record,
    folder: CellFolder,
    known: Sequence[Record],
    folder_of: Callable[[Record], CellFolder],
    made: Rebuilt,
) -> dict[str, Any]:
    """Return what was really used, from NCCL's logs; as recorded where no log is in the folder."""
    before = made.record.effective
    if own.cell.device == "cuda" and not folder.nccl_logs():
        if before:
            made.unknown.add("effective")
        return before
    effective = observe(own, folder, known, folder_of)
    traced = {"trace": before["trace"]} if "trace" in before else {}  # how the profiler was run
    profiled = [one for one in before.get("findings", []) if one["code"] == PROFILED]
    findings = [*effective.get("findings", []), *profiled]
    return (
        effective | traced | ({"findings": findings} if findings or "findings" in effective else {})
    )


def _with_baselines(own: Record, record: Record) -> Record:
    """Add what the record states against its baselines: `verify` compares it, with samples and without."""
    stated = {name: record.metrics[name] for name in OF_SEVERAL_RECORDS if name in record.metrics}
    named = {
        name: record.checks[name]
        for name in (BASELINES, HOST_BASELINES, NOISE, COST_ALONE)
        if name in record.checks
    }
    return dataclasses.replace(own, metrics=own.metrics | stated, checks=own.checks | named)


def _as_recorded(own: Record, made: Rebuilt, **names: Iterable[str]) -> Record:
    """Leave values of some fields as they are recorded where they were not made again, and note their names."""
    changes: dict[str, Any] = {}
    for part, wanted in names.items():
        now, before = getattr(own, part), getattr(made.record, part)
        kept = {name: before[name] for name in wanted if name not in now}
        made.unknown |= {f"{part} {name}" for name in kept}
        changes[part] = now | kept
    return dataclasses.replace(own, **changes)
