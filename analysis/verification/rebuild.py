"""Make a record again from the raw files of its folder. Nothing is run and no file is written."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.cost import TABLE
from analysis.errors import UnreadableInput
from analysis.findings.baselines import BASELINES, HOST_BASELINES, NOISE
from analysis.findings.record_values import COST_ALONE
from analysis.study.noise_floor import OF_SEVERAL_RECORDS
from analysis.trace.source import of_cell, read_trace
from analysis.trace.steps import within_steps
from analysis.trace.summary import summarize, trace_metrics
from analysis.validity.checks import judged, limits_of
from analysis.verification.complete import INCOMPLETE, complete, lines_of_ranks
from benchmarks.derived import FIELDS, IncompleteLines, RankLines, function_of, result_line
from benchmarks.record import CellFolder, Kind, Record, decoded
from benchmarks.record.folder import find_raw, stored

PROFILED = "profiled"  # the code of the finding that a profiled pass leaves
# Metrics of the samples of the GPUs.
SAMPLED = ("gpu/sm_mhz", "gpu/power_w", "gpu/temperature_c", "gpu/power_capped_share")


class NotRecomputable(Exception):
    """There is nothing to derive a record from, and nothing is missing; the message is the reason."""


@dataclass
class Rebuilt:
    """A record as its files give it."""

    record: Record
    parts: tuple[str, ...]  # the fields that were made again
    unknown: set[str]  # values that stay as recorded: their source is not in the folder


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
    lines = _lines(record, folder)
    begun: dict[str, Any] = {}
    environment = dict(record.environment)
    environment.pop("versions", None)
    begun["environment"] = environment
    parts: tuple[str, ...] = (*FIELDS, "ranks", "effective", "validity")
    if folder.attempt.exists():
        begun = decoded(folder.attempt.read_bytes())
        parts += tuple(begun)
    own, _ = complete(dataclasses.replace(record, **begun), folder, lines, known, folder_of)
    if own.failure is not None and own.failure != record.failure:
        raise IncompleteLines(own.failure.message.removeprefix(INCOMPLETE))
    made = Rebuilt(own, parts, set())
    _keep_baselines(made, record)
    _keep_lost_samples(made, record, folder)
    _add_trace(made, record, folder)
    _keep_effective(made, record, folder)
    made.record = judged(made.record, limits_of(record))
    return made


def _lines(record: Record, folder: CellFolder) -> RankLines:
    """Return the lines that a record can be derived from. Raises as `rebuilt`."""
    if not folder.all_rank_lines():
        raise NotRecomputable("no raw samples")
    if not record.raw_sha256:
        raise NotRecomputable("it names no raw file")
    lines = lines_of_ranks(record.cell, folder)
    if record.state == "finished":
        for rank, own in lines.items():
            if not own or own[-1]["kind"] != Kind.DONE:
                raise IncompleteLines(f"ranks/{rank}.jsonl is cut: its last line is not `done`")
    if function_of(record.cell) is None:
        benchmark = record.cell.benchmark["name"]
        raise NotRecomputable(f"benchmark={benchmark} declares no derive function")
    if result_line(lines) is None:
        raise NotRecomputable(f"it has no result: the cell is {record.state}")
    return lines


def _keep_baselines(made: Rebuilt, record: Record) -> None:
    """Add what the record states against its baselines: `verify` compares it, with samples and without."""
    metrics, checks = dict(made.record.metrics), dict(made.record.checks)
    for name in OF_SEVERAL_RECORDS:
        if name in record.metrics:
            metrics[name] = record.metrics[name]
    for name in (BASELINES, HOST_BASELINES, NOISE, COST_ALONE):
        if name in record.checks:
            checks[name] = record.checks[name]
    made.record = dataclasses.replace(made.record, metrics=metrics, checks=checks)


def _keep_lost_samples(made: Rebuilt, record: Record, folder: CellFolder) -> None:
    """Leave as recorded what the samples of a host said whose file is not here: the other hosts do not give it."""
    lost = folder.lost_samples(record.raw_sha256)
    if lost.gpus:
        _keep(made, record, "metrics", SAMPLED)
        _keep(made, record, "checks", ("gpu_samples",))
    if lost.cpu:
        _keep(made, record, "checks", ("cpu_samples",))
    first = folder.gpu_samples
    if TABLE in made.record.tables and first.name in record.raw_sha256 and stored(first) is None:
        _keep(made, record, "tables", (TABLE,))  # the samples tell when the GPUs had settled


def _add_trace(made: Rebuilt, record: Record, folder: CellFolder) -> None:
    """Add what the trace of a profiled pass says."""
    if "trace" not in record.tables:
        return
    path = folder.profile.path
    if record.cell.profiler == "nsys":
        path /= "trace.sqlite.gz"
        is_here = path.is_file()
    else:
        is_here = bool(find_raw(path, "rank*.json"))
    if not is_here:
        _keep(
            made, record, "metrics", [name for name in record.metrics if name.startswith("trace/")]
        )
        _keep(made, record, "tables", ("trace",))
        return
    try:
        trace = of_cell(read_trace(str(path)), len(record.cell.every_host))
    except UnreadableInput as error:
        raise IncompleteLines(f"the trace cannot be read: {error}") from None
    summary = summarize(within_steps(trace))
    metrics = made.record.metrics | trace_metrics(summary)
    tables = made.record.tables | {"trace": summary.to_json()}
    made.record = dataclasses.replace(made.record, metrics=metrics, tables=tables)


def _keep_effective(made: Rebuilt, record: Record, folder: CellFolder) -> None:
    """Leave as recorded what NCCL used where none of its logs is in the folder, and how the profiler was run."""
    recorded = record.effective
    if record.cell.device == "cuda" and not folder.nccl_logs():
        if recorded:
            made.unknown.add("effective")
        made.record = dataclasses.replace(made.record, effective=recorded)
        return
    effective = dict(made.record.effective)
    if "trace" in recorded:
        effective["trace"] = recorded["trace"]
    profiled = [result for result in recorded.get("findings", []) if result["code"] == PROFILED]
    if profiled:
        effective["findings"] = [*effective.get("findings", []), *profiled]
    made.record = dataclasses.replace(made.record, effective=effective)


def _keep(made: Rebuilt, record: Record, part: str, names: Iterable[str]) -> None:
    """Leave values of a field of the record as recorded, and note their names."""
    values = dict(getattr(made.record, part))
    recorded = getattr(record, part)
    for name in names:
        values.pop(name, None)
        if name in recorded:
            values[name] = recorded[name]
            made.unknown.add(f"{part} {name}")
    changes: dict[str, Any] = {part: values}
    made.record = dataclasses.replace(made.record, **changes)
