"""Run the profiled pass of a cell, after its timed one: record, read the trace, keep what may be
published.

    <cell>/profile/trace.nsys-rep     what nsys recorded; holds the (scrubbed) environment, so it never leaves the machine
    <cell>/profile/trace.sqlite.gz    its export without environment and command line
    <cell>/profile/rank<N>.json.gz    what torch.profiler recorded
    <cell>/profile/timeline.svg       one step

A pass that fails leaves the measured record as it is; the reason is listed as unchecked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.errors import UnreadableInput
from analysis.text import count
from analysis.trace.model import Trace
from analysis.trace.scrub import scrub
from analysis.trace.source import of_cell, read_trace
from analysis.trace.steps import within_steps
from analysis.trace.summary import summarize, trace_metrics
from analysis.trace.timeline import draw_timeline
from analysis.validity.nccl_settings import SettingResult
from benchmarks.record import CellFolder, safe_files
from conf.cell import Cell
from launch.profile.nsys import Nsys
from launch.study.study import PROFILED, prepare
from launch.supervision.supervise import Outcome

REPORT = "trace"
Run = Callable[[Cell, CellFolder, Sequence[str]], Outcome]


class PassFailed(Exception):
    """The ranks of the pass failed; the message is a sentence."""


@dataclass(frozen=True)
class Profiled:
    """What a profiled pass adds to the record."""

    finding: SettingResult
    metrics: dict[str, float] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    effective: dict[str, Any] = field(default_factory=dict)


def profiled(cell: Cell, folder: CellFolder, nsys: Nsys | None, run: Run) -> Profiled:
    """Run the pass of a finished cell by `run(cell, folder, the profiler's command)`; return what
    it adds to the record."""
    try:
        trace, facts = _recorded(cell, folder, nsys, run)
        trace = of_cell(trace, len(cell.every_host))
        summary = summarize(within_steps(trace))
        safe_files.write_whole(folder.profile.timeline, draw_timeline(trace).encode())
    except Exception as error:  # whatever a trace holds: the timed pass is measured already
        return Profiled(
            SettingResult(PROFILED, f"the profiled pass gave no trace: {error}", "unchecked")
        )
    steps = count(cell.profiler_options["steps"], "step")
    sentence = f"a trace of {steps} was recorded in a pass of its own, which supplied no rate"
    if len(cell.every_host) > 1:
        sentence += "; how long ranks wait for those of other hosts is not known"
    return Profiled(
        SettingResult(PROFILED, sentence, "finding"),
        trace_metrics(summary),
        {"trace": summary.to_json()},
        {"trace": {"profiler": cell.profiler, "source": trace.source, **facts}},
    )


def _recorded(
    cell: Cell, folder: CellFolder, nsys: Nsys | None, run: Run
) -> tuple[Trace, dict[str, Any]]:
    """Return the trace, and how it was recorded. Raises PassFailed, UnreadableInput, OSError."""
    if cell.profiler == "torch":
        _passed(run(*_prepared(cell, folder, capture_range=False), ()))
        return _checked(cell, read_trace(str(folder.profile.path))), {}
    assert nsys is not None  # launch.plan.plan
    if cell.device != "cuda":
        return _by_nsys(cell, folder, nsys, run, capture_range=False), {"capture_range": False}
    try:
        return _by_nsys(cell, folder, nsys, run, capture_range=True), {"capture_range": True}
    except UnreadableInput as error:
        reason = str(error)
    folder.profile.path.rename(folder.profile_in_vain.path)
    try:
        trace = _by_nsys(cell, folder, nsys, run, capture_range=False)
    except UnreadableInput as error:
        raise UnreadableInput(f"{reason}; without a capture range: {error}") from None
    return trace, {"capture_range": False, "with_capture_range": reason}


def _by_nsys(cell: Cell, folder: CellFolder, nsys: Nsys, run: Run, capture_range: bool) -> Trace:
    untimed, inside = _prepared(cell, folder, capture_range)
    report = inside.path / REPORT
    has_graphs = cell.compiled or cell.graphed
    command = nsys.command(report, cell.device == "cuda", has_graphs, capture_range)
    outcome = run(untimed, inside, command)
    # nsys may complain of its importer only, which export() looks for.
    if not (_complains(outcome) and nsys.left(report)):
        _passed(outcome)
    export = nsys.export(report)
    kept = inside.path / f"{REPORT}.sqlite.gz"
    try:
        scrub(export, kept)
    finally:
        export.unlink()  # as long as the report itself is kept, it can be made again
    return _checked(cell, read_trace(str(kept)))


def _prepared(cell: Cell, folder: CellFolder, capture_range: bool) -> tuple[Cell, CellFolder]:
    untimed = cell.untimed_pass(
        "profiled_pass", "benchmarks.training.passes.profiled", capture_range=capture_range
    )
    return untimed, prepare(folder.profile, untimed)


def _passed(outcome: Outcome) -> None:
    """Check how a pass ended: raise PassFailed if a rank failed, UnreadableInput if only nsys
    did."""
    failure = outcome.failure
    if failure is None:
        return
    if not _complains(outcome):
        raise PassFailed(failure.message)
    raise UnreadableInput(": ".join([failure.message, *failure.log_tail.splitlines()[-1:]]))


def _complains(outcome: Outcome) -> bool:
    failure = outcome.failure
    return failure is not None and failure.cause == "start" and failure.rank is None


def _checked(cell: Cell, trace: Trace) -> Trace:
    """Return the trace. Raises UnreadableInput if it has no kernel of a GPU that worked."""
    silent = [str(rank.rank) for rank in trace.ranks if rank.on_host]
    if cell.device == "cuda" and silent:
        raise UnreadableInput(
            f"no GPU kernel was recorded on rank {', '.join(silent)}, so no time on the GPU is "
            f"known (it is not 0 ms); the likely cause: {trace.source} is too old for the "
            "machine's CUDA driver, or may not use the GPU's counters"
        )
    return trace
