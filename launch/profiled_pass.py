"""Run the profiled pass of a cell, after its timed one: record, read the trace, keep what may be
published.

    <cell>/profile/trace.nsys-rep     what nsys recorded; holds the (scrubbed) environment
    <cell>/profile/trace.sqlite.gz    its export without environment and command line
    <cell>/profile/rank<N>.json.gz    what torch.profiler recorded
    <cell>/profile/timeline.svg       one step

A pass that fails leaves the measured record as it is; the reason is listed as unchecked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from analysis.input_files import UnreadableInput
from analysis.text import count
from analysis.trace.events import Trace
from analysis.trace.scrub import scrub
from analysis.trace.source import of_cell, read_trace
from analysis.trace.steps import within_steps
from analysis.trace.timeline import draw_timeline
from analysis.trace.trace_summary import summarize, trace_metrics
from analysis.validity.nccl_settings import SettingResult
from benchmarks.record import CellFolder, safe_files
from conf.cell import Cell
from launch.nsys import Nsys
from launch.study.study_folder import PROFILED, prepare
from launch.supervision.supervise import Outcome

REPORT = "trace"
PASS = "benchmarks.training.passes.profiled"
Run = Callable[[Cell, CellFolder, Sequence[str]], Outcome]


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
    facts: dict[str, Any] = {"profiler": cell.profiler}
    capture_range = cell.profiler == "nsys" and cell.device == "cuda"
    if cell.runs_script:
        untimed = replace(cell, benchmark={**cell.benchmark, "traced": True})
    else:
        untimed = cell.untimed_pass("profiled_pass", PASS, capture_range=capture_range)
    try:
        if cell.profiler == "torch":
            outcome = run(untimed, prepare(folder.profile, untimed), ())
            if outcome.failure:
                raise UnreadableInput(outcome.failure.message)
            trace = read_trace(str(folder.profile.path))
        else:
            assert nsys is not None  # launch.plan.plan
            facts["capture_range"] = capture_range
            trace = _by_nsys(untimed, folder, nsys, run)
        trace = of_cell(checked(cell, trace), len(cell.every_host))
        summary = summarize(within_steps(trace))
        timeline = draw_timeline(trace)
        safe_files.write_whole(folder.profile.timeline, timeline.encode())
    except Exception as error:  # whatever a trace holds: the timed pass is measured already
        sentence = f"the profiled pass gave no trace: {error}"
        return Profiled(SettingResult(PROFILED, sentence, "unchecked"))
    steps = count(cell.profiler_options["steps"], "step")
    sentence = f"a trace of {steps} was recorded in a separate pass, whose rate is not used"
    if len(cell.every_host) > 1:
        sentence += "; how long ranks wait for those of other hosts is not known"
    return Profiled(
        SettingResult(PROFILED, sentence, "finding"),
        trace_metrics(summary),
        {"trace": summary.to_json()},
        {"trace": {**facts, "source": trace.source}},
    )


def _by_nsys(untimed: Cell, folder: CellFolder, nsys: Nsys, run: Run) -> Trace:
    on_gpu = untimed.device == "cuda"
    inside = prepare(folder.profile, untimed)
    report = inside.path / REPORT
    has_graphs = untimed.compiled or untimed.graphed or untimed.runs_script  # it may have some
    outcome = run(untimed, inside, nsys.command(report, on_gpu, has_graphs))
    failure = outcome.failure
    if failure:
        # nsys may complain of its importer only, which export() looks for.
        complains = failure.cause == "start" and failure.rank is None
        if not (complains and nsys.left(report)):
            last = failure.log_tail.splitlines()[-1:] if complains else []
            raise UnreadableInput(": ".join([failure.message, *last]))
    export = nsys.export(report)
    kept = inside.path / f"{REPORT}.sqlite.gz"
    try:
        scrub(export, kept)
    finally:
        export.unlink()  # as long as the report itself is kept, it can be made again
    return read_trace(str(kept))


def checked(cell: Cell, trace: Trace) -> Trace:
    """Return the trace. Raises UnreadableInput if it has no kernel of a GPU that worked."""
    silent = [str(rank.rank) for rank in trace.ranks if rank.on_host]
    if cell.device == "cuda" and silent:
        raise UnreadableInput(
            f"no GPU kernel was recorded on rank {', '.join(silent)}, so no time on the GPU is "
            f"known (it is not 0 ms); the likely cause: {trace.source} is too old for the "
            "machine's CUDA driver, or may not use the GPU's counters"
        )
    return trace
