"""Estimate the seconds that a cell will take: by what the same model took before, else by a rule of
thumb.

The rule of thumb is the benchmark's own (its YAML's `code.seconds`), with the seconds that ranks
need to begin and to compile. What the same model took corrects it: the rule's ratio between the two
cells is taken. No other model's times are used.
"""

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from analysis.text import count
from benchmarks.record import Record
from conf import groups
from conf.cell import Cell
from conf.options import Refused
from conf.schema import Engine
from conf.targets import call_dotted
from launch.engines import slurm
from launch.plan.order import PlannedCell

# Seconds beside what is measured. GPUs: ResNet-50 on two H200s, 2026-11-22 and 23, 10 cells (13 to
# 17 s), 3 first ones of a sweep (20 to 32 s), and compiled ones (69 s the first, 25 s with its
# graph in the study's folder). CPU workers: 2 cores; compiling took ResNet-50 154 and 20 s there.
START_SECONDS = {"cpu": 3.0, "cuda": 8.0}  # of ranks: to begin, meet, make a first step, and end
FIRST_SECONDS = {"cpu": 2.0, "cuda": 7.0}  # more in the first cell of a sweep: torch is imported
SERVERS_SECONDS = 3.0  # more where servers start
COMPILE_SECONDS = {  # more where the graph is new, and where the study's folder has it
    "cpu": {"new": 150.0, "cached": 20.0},
    "cuda": {"new": 46.0, "cached": 10.0},
}
TRACE_SECONDS = {"cpu": 15.0, "cuda": 20.0}  # of a pass of its own, after the timed one
UNKNOWN_SECONDS = {"cpu": 5.0, "cuda": 10.0}  # that a benchmark without a rule measures
LATEST = 20  # records that are looked at
SAME_WORK = ("model", "benchmark", "optimize", "device")
SAME_WORK_AND_PLACE = (*SAME_WORK, "gpus", "hosts", "strategy", "server_hosts")
# Kept for the report and the store, and for a cell that takes longer than estimated; a submitted
# job is asked to stop then.
RESERVE_S = 60.0


@dataclass(frozen=True)
class TimeEstimate:
    """How long a cell will take, and whether the same model was measured in the study."""

    seconds: float
    measured: bool


def estimates(
    cells: Sequence[PlannedCell], records: Sequence[Record], begun: bool = True
) -> list[TimeEstimate]:
    """Return the estimate of each cell of a sweep, in their order.

    `records` are records of the same study. `begun`: cells of this sweep ran already.
    """
    # Seconds ÷ those of the rule of finished cells.
    of_work: dict[str, list[float]] = defaultdict(list)
    of_work_and_place: dict[str, list[float]] = defaultdict(list)
    sweeps: set[str] = set()
    compiled: set[str] = set()
    for record in sorted(records, key=lambda record: record.started_at):
        cell = record.cell
        seconds = record.ended_at - record.started_at  # 0 or less where a clock was set back
        if record.state == "finished" and seconds > 0:
            ratio = seconds / rule_of_thumb(cell, record.sweep_id not in sweeps, compiled)
            of_work[_key(cell, SAME_WORK)].append(ratio)
            of_work_and_place[_key(cell, SAME_WORK_AND_PLACE)].append(ratio)
        sweeps.add(record.sweep_id)
        if record.state == "finished":  # what failed may have compiled nothing
            compiled.add(cell.graph)
    result = []
    for planned in cells:
        cell = planned.cell
        seconds = rule_of_thumb(cell, not begun, compiled)
        same_place = of_work_and_place.get(_key(cell, SAME_WORK_AND_PLACE), [])
        latest = (same_place or of_work.get(_key(cell, SAME_WORK), []))[-LATEST:]
        if latest:
            seconds *= median(latest)
        result.append(TimeEstimate(seconds, bool(latest)))
        begun = True
        compiled.add(cell.graph)
    return result


def _key(cell: Cell, names: Sequence[str]) -> str:
    return json.dumps(attrgetter(*names)(cell), sort_keys=True, default=str)


def worded(cells: Sequence[PlannedCell], records: Sequence[Record]) -> str:
    """Return how long the runs of a sweep will take, and what that rests on.

    `2 runs, about 40 s (rough estimate)`; `records` are records of the same study.
    """
    times = estimates(cells, records, begun=False)
    seconds = sum(time.seconds for time in times)
    unmeasured = sum(not time.measured for time in times)
    basis = "based on earlier runs of this model"
    if unmeasured == len(times):
        basis = "rough estimate"
    elif unmeasured:
        basis += f"; a rough estimate for {unmeasured}"
    runs = count(len(times), "run")
    if cells and cells[-1].drift:
        runs += " (the last repeats the first)"
    return f"{runs}, about {duration(seconds)} ({basis})"


def rule_of_thumb(cell: Cell, first: bool = False, cached: Collection[str] = ()) -> float:
    """Return the seconds that a cell takes on an idle machine, roughly, from what is asked alone.

    `first`: of its sweep; `cached`: the compiled graphs that the study's folder has.
    """
    seconds = UNKNOWN_SECONDS[cell.device]
    # What fails ends no sweep, as of a damaged record, or of a benchmark of another installation.
    with contextlib.suppress(Refused, TypeError, ValueError, LookupError, ArithmeticError):
        rule = groups.choice("benchmark", cell.benchmark["name"]).code.get("seconds")
        by_rule = math.inf
        if rule:
            by_rule = float(call_dotted(rule, cell))
        if 0 <= by_rule < math.inf:
            seconds = by_rule
    seconds += START_SECONDS[cell.device]
    if first:
        seconds += FIRST_SECONDS[cell.device]
    if cell.servers:
        seconds += SERVERS_SECONDS
    if cell.compiled:
        graph = "new"
        if cell.graph in cached:
            graph = "cached"
        seconds += COMPILE_SECONDS[cell.device][graph]
    if cell.profiler != "none":
        seconds += TRACE_SECONDS[cell.device]
    return seconds


def duration(seconds: float) -> str:
    """Return `48 s`, `6 min 05 s` or `1 h 15 min`."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if minutes:
        return f"{minutes} min {rest:02d} s"
    return f"{rest} s"


def does_not_fit(
    cell: PlannedCell, records: Sequence[Record], engine: Engine, surrounding: Mapping[str, str]
) -> str:
    """Return why a cell is not started, where the job of engine=slurm ends before it can; else ''.

    `records` are records of the same study.
    """
    if engine.name != "slurm":
        return ""
    left_s = slurm.time_left_s(surrounding)
    needed_s = estimates([cell], records)[0].seconds
    if left_s is None or needed_s + RESERVE_S <= left_s:
        return ""
    return (
        f"{cell.name} is not started, nor any other run that does not fit: it takes about "
        f"{duration(needed_s)}, the job has {duration(max(0.0, left_s))} left, and the report "
        f"needs {RESERVE_S:.0f} s; the same command in another job continues from here (exit "
        "status 130)"
    )
