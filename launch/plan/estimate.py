"""Estimate the seconds that a cell will take: by what the same model took before, else by a rule of thumb.

The rule of thumb is the benchmark's own (its YAML's `code.seconds`), with the seconds that ranks need to begin and to compile.
What the same model took corrects it: the rule's ratio between the two cells is taken. No other model's times are used.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from analysis.text import count
from benchmarks.record import Record
from conf import groups
from conf.cell import Cell
from conf.options import Refused
from conf.schema import Engine
from conf.targets import call_dotted
from launch.engines import slurm
from launch.plan.order import PlannedCell, rounds

# Seconds beside what is measured. GPUs: ResNet-50 on two H200s, 2026-11-22 and 23, 10 cells (13 to 17 s), 3 first ones of a
# sweep (20 to 32 s), and compiled ones (69 s the first, 25 s with its graph in the study's folder). CPU workers: 2 cores;
# compiling took ResNet-50 154 and 20 s there.
START_SECONDS = {"cpu": 3.0, "cuda": 8.0}  # of ranks: to begin, meet, make a first step, and end
FIRST_SECONDS = {
    "cpu": 2.0,
    "cuda": 7.0,
}  # more in the first cell of a sweep: the agent imports torch
SERVERS_SECONDS = 3.0  # more where servers start
COMPILE_SECONDS = {  # more where the graph is new, and where the study's folder has it
    "cpu": {"new": 150.0, "cached": 20.0},
    "cuda": {"new": 46.0, "cached": 10.0},
}
TRACE_SECONDS = {"cpu": 15.0, "cuda": 20.0}  # of a pass of its own, after the timed one
UNKNOWN_SECONDS = {"cpu": 5.0, "cuda": 10.0}  # that a benchmark without a rule measures
LATEST = 20  # records that are looked at
ALIKE = ("model", "benchmark", "optimize", "device")
EQUAL = ("gpus", "hosts", "strategy", "server_hosts")
DEPENDS_ON = (*ALIKE, *EQUAL, "batch_size", "profiler")


@dataclass(frozen=True)
class TimeEstimate:
    """How long a cell will take, and whether the same model was measured in the study."""

    seconds: float
    measured: bool


@dataclass(frozen=True)
class Beginning:
    """What a cell finds when it begins."""

    first: bool = False  # it is the first of its sweep
    graph: str = "new"  # of a compiled cell: new, cached; empty for another one


@dataclass(frozen=True)
class Taken:
    """What a finished cell took."""

    equal: str  # the text of what EQUAL names
    how: Beginning
    of_rule: float  # its seconds ÷ those of the rule of thumb


def estimates(
    cells: Sequence[PlannedCell], known: Sequence[Record], begun: bool = True
) -> list[TimeEstimate]:
    """Return the estimate of each cell of a sweep, in their order; similar cells share one.

    `known` are records of the same study. `begun`: cells of this sweep ran already.
    """
    taken = _taken(known)
    found: dict[str, TimeEstimate] = {}
    texts = []
    for planned, how in zip(cells, _of_cells(cells, known, begun), strict=True):
        texts.append(repr(how) + _text(planned.cell, DEPENDS_ON))
        if texts[-1] not in found:
            found[texts[-1]] = _estimate(planned.cell, how, taken)
    return [found[text] for text in texts]


def _taken(known: Sequence[Record]) -> dict[str, list[Taken]]:
    """Return what the finished cells took, in the order of the records, by the text of what ALIKE names."""
    found: dict[str, list[Taken]] = {}
    for one, how in zip(known, _of_records(known), strict=True):
        seconds = one.ended_at - one.started_at  # 0 or less where a clock was set back meanwhile
        if one.state == "finished" and seconds > 0:
            taken = Taken(_text(one.cell, EQUAL), how, seconds / rule_of_thumb(one.cell, how))
            found.setdefault(_text(one.cell, ALIKE), []).append(taken)
    return found


def _text(cell: Cell, names: Sequence[str]) -> str:
    """Return equal text for cells that are equal in these fields."""
    return json.dumps([getattr(cell, name) for name in names], sort_keys=True, default=str)


def _of_cells(
    cells: Iterable[PlannedCell], known: Iterable[Record], begun: bool
) -> Iterator[Beginning]:
    """Yield what each of the cells that follow each other will find."""
    cached = {one.cell.graph for one in known if one.state == "finished"}
    for planned in cells:
        graph = planned.cell.graph
        yield Beginning(not begun, _state_of(graph, cached))
        begun = True
        cached.add(graph)


def _of_records(known: Iterable[Record]) -> list[Beginning]:
    """Return what the cell of each record had found, in the order of the records."""
    found: dict[str, Beginning] = {}
    sweeps: set[str] = set()
    cached: set[str] = set()
    for record in sorted(known, key=lambda one: one.started_at):
        graph = record.cell.graph
        found[record.record_id] = Beginning(record.sweep_id not in sweeps, _state_of(graph, cached))
        sweeps.add(record.sweep_id)
        cached.add(graph)
    return [found[one.record_id] for one in known]


def _state_of(graph: str, cached: Iterable[str]) -> str:
    """Return where a compiled graph is; empty for a cell that is not compiled."""
    if not graph:
        return ""
    return "cached" if graph in cached else "new"


def worded(cells: Sequence[PlannedCell], known: Sequence[Record]) -> str:
    """Return how long the cells of a sweep will take, and what that rests on: `2 cells, about 40 s by a rule of thumb …`.

    `known` are records of the same study.
    """
    found = estimates(cells, known, begun=False)
    measured = sum(one.measured for one in found)
    seconds = sum(max(found[place].seconds for place in together) for together in rounds(cells))
    thumb = "by a rule of thumb for an idle machine"
    taken = "by what the same model took in this study"
    rests = (
        thumb
        if not measured
        else taken
        if measured == len(found)
        else f"{taken} or, of {len(found) - measured}, {thumb}"
    )
    return f"{count(len(found), 'cell')}, about {duration(seconds)} {rests}"


def _estimate(cell: Cell, how: Beginning, known: Mapping[str, Sequence[Taken]]) -> TimeEstimate:
    """Return the estimate by the latest cells of the same model and benchmark: equal ones that began alike, else equal ones."""
    alike, asked = known.get(_text(cell, ALIKE), []), _text(cell, EQUAL)
    equal = [one for one in alike if one.equal == asked]
    chosen = [one for one in equal if one.how == how] or equal or alike
    share = median(one.of_rule for one in chosen[-LATEST:]) if chosen else 1.0
    return TimeEstimate(share * rule_of_thumb(cell, how), bool(chosen))


def rule_of_thumb(cell: Cell, how: Beginning = Beginning()) -> float:
    """Return the seconds that a cell takes on an idle machine, roughly, from what is asked alone."""
    seconds = START_SECONDS[cell.device] + _measuring(cell)
    seconds += FIRST_SECONDS[cell.device] if how.first else 0.0
    seconds += SERVERS_SECONDS if cell.servers else 0.0
    seconds += COMPILE_SECONDS[cell.device][how.graph] if cell.compiled else 0.0
    return seconds + (TRACE_SECONDS[cell.device] if cell.profiler != "none" else 0.0)


def _measuring(cell: Cell) -> float:
    """Return the seconds that the cell's benchmark measures. A rule that fails ends no sweep: the time is unknown."""
    rule = groups.choice("benchmark", cell.benchmark["name"]).code.get("seconds")
    try:
        seconds = float(call_dotted(rule, cell)) if rule else UNKNOWN_SECONDS[cell.device]
        return seconds if 0 <= seconds < math.inf else UNKNOWN_SECONDS[cell.device]
    except (
        Refused,
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
    ):  # the options of a damaged record
        return UNKNOWN_SECONDS[cell.device]


def duration(seconds: float) -> str:
    """Return `48 s`, `6 min 05 s` or `1 h 15 min`."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


# Kept for the report and the store, and for a cell that takes longer than estimated; a submitted job is asked to stop then.
RESERVE_S = 60.0


class TimeLeft:
    """Tells of each cell whether it fits, and says the first time that one does not."""

    def __init__(
        self, engine: Engine, surrounding: Mapping[str, str], note: Callable[[str], None]
    ) -> None:
        """`note` prints a sentence for the user. Only engine=slurm asks Slurm."""
        self._surrounding, self._note = (surrounding if engine.name == "slurm" else {}), note
        self.too_short = False  # for some cell

    def fits(self, cell: PlannedCell, known: Sequence[Record]) -> bool:
        """Return whether a cell can end before the job does. `known` are records of the same study."""
        if (left_s := slurm.time_left_s(self._surrounding)) is None:
            return True
        needed_s = estimates([cell], known)[0].seconds
        if needed_s + RESERVE_S <= left_s:
            return True
        if not self.too_short:
            self._note(
                f"{cell.name} is not started, nor any other cell that does not fit: it takes about {duration(needed_s)}, the job "
                f"has {duration(max(0.0, left_s))} left, and {RESERVE_S:.0f} s of that are kept for the report; the same "
                "command in another job continues from here (exit status 130)"
            )
        self.too_short = True
        return False
