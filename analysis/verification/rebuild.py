"""Make a record again from the raw files of its folder. Nothing is run and no file is written."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from analysis.cost import TABLE
from analysis.findings.baselines import BASELINES, HOST_BASELINES, NOISE
from analysis.findings.communication import COST_ALONE
from analysis.input_files import UnreadableInput
from analysis.study.noise_floor import OF_SEVERAL_RECORDS
from analysis.text import single_line
from analysis.trace.source import of_cell, read_trace
from analysis.trace.steps import within_steps
from analysis.trace.trace_summary import summarize, trace_metrics
from analysis.validity.checks import judged, limits_of
from analysis.validity.gpu_samples import OF_SAMPLES
from analysis.verification.complete import INCOMPLETE, complete, lines_of_ranks
from benchmarks.derived import FIELDS, IncompleteLines, RankLines, function_of, result_line
from benchmarks.record import CellFolder, Kind, Record, decoded
from benchmarks.record.folder import find_raw, stored
from benchmarks.record.safe_files import read_whole
from conf.options import Refused

PROFILED = "profiled"  # the code of the finding that a profiled pass leaves


class NotRecomputable(Exception):
    """There is nothing to derive a record from, and nothing is missing; the message says why."""


class Rebuilt(NamedTuple):
    """A record as its files give it."""

    record: Record
    parts: tuple[str, ...]  # the fields that were made again
    unknown: set[str]  # values that stay as recorded: their source is not in the folder


def rebuilt(
    record: Record,
    folder: CellFolder,
    known: Iterable[Record],
    folder_of: Callable[[Record], CellFolder],
) -> Rebuilt:
    """Return a record as its raw files give it. `known` are the records of its study that ended
    before it.

    Raises:
        IncompleteLines: lines are missing.
        NotRecomputable: there is nothing to derive it from.
    """
    lines = _lines(record, folder)
    environment = dict(record.environment)
    environment.pop("versions", None)
    begun: dict[str, Any] = {"environment": environment}
    parts: tuple[str, ...] = (*FIELDS, "ranks", "effective", "validity")
    if folder.attempt.exists():
        begun = decoded(read_whole(folder.attempt))
        parts += tuple(begun)
    own, _ = complete(dataclasses.replace(record, **begun), folder, lines, known, folder_of)
    if own.failure is not None and own.failure != record.failure:
        raise IncompleteLines(own.failure.message.removeprefix(INCOMPLETE))
    fields: dict[str, Any] = {}
    # What rests on other records: `verify` compares it, with samples and without.
    for part, names in (
        ("metrics", OF_SEVERAL_RECORDS),
        ("checks", (BASELINES, HOST_BASELINES, NOISE, COST_ALONE)),
        ("tables", ()),
    ):
        fields[part] = dict(getattr(own, part))
        recorded = getattr(record, part)
        for name in names:
            if name in recorded:
                fields[part][name] = recorded[name]
    unknown: set[str] = set()

    def keep(part: str, names: Iterable[str]) -> None:
        recorded = getattr(record, part)
        for name in names:
            fields[part].pop(name, None)
            if name in recorded:
                fields[part][name] = recorded[name]
                unknown.add(f"{part} {name}")

    # Samples of a host whose file is not here: the other hosts do not give what they said.
    lost_gpus, lost_cpu = folder.lost_samples(record.raw_sha256)
    if lost_gpus:
        for sampled_part, sampled_names in OF_SAMPLES.items():
            keep(sampled_part, sampled_names)
    if lost_cpu:
        keep("checks", ("cpu_samples",))
    first = folder.gpu_samples
    if TABLE in fields["tables"] and first.name in record.raw_sha256 and stored(first) is None:
        keep("tables", (TABLE,))  # the samples tell when the GPUs had settled
    if "trace" in record.tables:
        trace = _trace(record, folder)
        if trace is None:
            keep("metrics", [name for name in record.metrics if name.startswith("trace/")])
            keep("tables", ("trace",))
        else:
            fields["metrics"] |= trace[0]
            fields["tables"]["trace"] = trace[1]
    own = dataclasses.replace(own, **fields, effective=_effective(own, record, folder, unknown))
    return Rebuilt(judged(own, limits_of(record)), parts, unknown)


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
    try:
        derive = function_of(record.cell)
    except Refused as error:
        raise NotRecomputable(single_line(error)) from None
    if derive is None:
        benchmark = record.cell.benchmark["name"]
        raise NotRecomputable(f"benchmark={benchmark} declares no derive function")
    if result_line(lines) is None:
        raise NotRecomputable(f"it has no result: the cell is {record.state}")
    return lines


def _trace(record: Record, folder: CellFolder) -> tuple[dict[str, float], dict[str, Any]] | None:
    path = folder.profile.path
    if record.cell.profiler == "nsys":
        path /= "trace.sqlite.gz"
        is_here = path.is_file()
    else:
        is_here = bool(find_raw(path, "rank*.json"))
    if not is_here:
        return None
    try:
        trace = of_cell(read_trace(str(path)), len(record.cell.every_host))
    except UnreadableInput as error:
        raise IncompleteLines(f"the trace cannot be read: {error}") from None
    summary = summarize(within_steps(trace))
    return trace_metrics(summary), summary.to_json()


def _effective(
    own: Record, record: Record, folder: CellFolder, unknown: set[str]
) -> dict[str, Any]:
    """Return what NCCL used; without its logs as recorded. How a profiler ran is recorded only."""
    recorded = record.effective
    if record.cell.device == "cuda" and not folder.nccl_logs():
        if recorded:
            unknown.add("effective")
        return recorded
    effective = dict(own.effective)
    if "trace" in recorded:
        effective["trace"] = recorded["trace"]
    profiled = [result for result in recorded.get("findings", []) if result["code"] == PROFILED]
    if profiled:
        effective["findings"] = [*effective.get("findings", []), *profiled]
    return effective
