"""Estimate the seconds that a cell will take: by what the same model took before, else by a rule of thumb.

The rule of thumb is the benchmark's own (its YAML's `code.seconds`). What the same model took corrects it: the rule's ratio
between the two cells is taken. No other model's times are used.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from analysis.report.text import count
from benchmarks.record import Record
from conf import groups
from conf.cell import Cell
from conf.options import Refused
from conf.targets import called

# Seconds from the start of the ranks to their first work: import torch, meet, and in the end read and judge what they wrote.
# Seen: 2 to 4 on 2 CPU cores, 7 to 9 on H200s.
START_SECONDS = {"cpu": 3.0, "cuda": 8.0}
SERVERS_SECONDS = 3.0  # more where servers start
COMPILE_SECONDS = 45.0  # seen: ResNet-50 on an H200, 25 to 45
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


def estimates(cells: Sequence[Cell], known: Sequence[Record]) -> list[TimeEstimate]:
    """Return the estimate of each cell; similar cells share one. `known` are records of the same study."""
    found: dict[str, TimeEstimate] = {}
    for cell in cells:
        if (alike := _text(cell)) not in found:
            found[alike] = _estimate(cell, known)
    return [found[_text(cell)] for cell in cells]


def worded(found: Sequence[TimeEstimate]) -> str:
    """Return how long cells will take together, and what that rests on: `2 cells, about 40 s by a rule of thumb …`."""
    measured = sum(one.measured for one in found)
    thumb = "by a rule of thumb for an idle machine"
    taken = "by what the same model took in this study"
    rests = (
        thumb
        if not measured
        else taken
        if measured == len(found)
        else f"{taken} or, of {len(found) - measured}, {thumb}"
    )
    return f"{count(len(found), 'cell')}, about {duration(sum(one.seconds for one in found))} {rests}"


def _estimate(cell: Cell, known: Sequence[Record]) -> TimeEstimate:
    took = [(one.ended_at - one.started_at) / rule_of_thumb(one.cell) for one in _known(cell, known)]
    return TimeEstimate((median(took) if took else 1.0) * rule_of_thumb(cell), bool(took))


def rule_of_thumb(cell: Cell) -> float:
    """Return the seconds that a cell takes on an idle machine, roughly, from what is asked alone."""
    seconds = START_SECONDS[cell.device] + _measuring(cell)
    seconds += SERVERS_SECONDS if cell.servers else 0.0
    seconds += COMPILE_SECONDS if cell.compiled else 0.0
    return seconds + (TRACE_SECONDS[cell.device] if cell.profiler != "none" else 0.0)


def _measuring(cell: Cell) -> float:
    """Return the seconds that the cell's benchmark measures. A rule that fails ends no sweep: the time is unknown."""
    rule = groups.choice("benchmark", cell.benchmark["name"]).code.get("seconds")
    try:
        return float(called(rule, cell)) if rule else UNKNOWN_SECONDS[cell.device]
    except (Refused, TypeError, ValueError):
        return UNKNOWN_SECONDS[cell.device]


def _known(cell: Cell, known: Iterable[Record]) -> list[Record]:
    """Return finished records of the same model and benchmark: those of equal cells, else the latest."""
    finished = [one for one in known if one.state == "finished" and _alike(one.cell, cell)]
    equal = [one for one in finished if all(getattr(one.cell, name) == getattr(cell, name) for name in EQUAL)]
    return (equal or finished)[-LATEST:]


def _alike(one: Cell, other: Cell) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ALIKE)


def _text(cell: Cell) -> str:
    """Return what the estimate depends on."""
    return repr([getattr(cell, name) for name in DEPENDS_ON])


def duration(seconds: float) -> str:
    """Return `48 s`, `6 min 05 s` or `1 h 15 min`."""
    minutes, rest = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
