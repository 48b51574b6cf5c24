"""Which GPUs to take for a cell that is about to run, by the forecasts of its study (gpus=advise:4)."""

from collections.abc import Callable

from analysis.prediction.advice.advice import Advice, advise
from analysis.prediction.advice.options import Candidate, farthest, subsets, told_apart
from analysis.prediction.asked import workload_here
from analysis.prediction.calibration import calibrate
from analysis.prediction.cells import question_of
from analysis.prediction.holdout import KnownScores
from analysis.study.estimates import Member
from analysis.study.study import Study
from analysis.topology.model import Topology
from benchmarks.record import Record
from conf.cell import Cell

CellOn = Callable[[tuple[int, ...]], Cell]
_MOST_NAMED = 3


def placement(
    study: Study, topology: Topology, size: int, cell_on: CellOn, is_here: Callable[[Record], bool]
) -> tuple[tuple[int, ...], str]:
    """Return the subset that forecasts put first, and why; of equal ones that of the best links.

    `cell_on` makes the cell of a subset; `is_here` tells whether a record is of this machine. Raises ValueError where no
    forecast is possible.
    """
    calibration = calibrate(study)
    machines = {one.provenance.get("machine", "") for one in study.runs if is_here(one.records[-1])}
    if not machines:
        raise ValueError("the cells of the study are of another machine")
    made = []
    for members in subsets(calibration, topology, size, min(machines)):
        cell, links = (
            cell_on(tuple(one for one in members if isinstance(one, int))),
            farthest(topology, members),
        )
        question = question_of(cell, workload_here(calibration, cell), links, min(machines))
        made.append(Candidate(question, tuple(sorted(cell.nccl.items())), links))
    made = told_apart(calibration, made)
    found = advise(calibration, made, KnownScores(calibration))
    members = found.first.option.question.members
    return tuple(one for one in members if isinstance(one, int)), why_first(
        found, len(calibration.cells)
    )


def why_first(found: Advice, cells: int) -> str:
    """Return why the first subset is first, by so many cells of the study."""
    first = found.first
    question = first.option.question
    interval = f" ({first.low:,.0f} to {first.high:,.0f})" if first.low and first.high else ""
    how = "measured to give" if first.runs else "forecast to give"
    alike = [
        _named(one.option.question.members)
        for one in found.ranked
        if one is not first and one.as_fast
    ]
    said = f"{how} {first.rate:,.0f} images/s{interval} with {question.strategy}, by {cells} cells of the study"
    if not alike:
        return f"{said}; every other subset is slower" if len(found.ranked) > 1 else said
    more = f" and {len(alike) - _MOST_NAMED} more" if len(alike) > _MOST_NAMED else ""
    return f"{said}; {' and '.join(alike[:_MOST_NAMED])}{more} cannot be told from it"


def _named(members: tuple[Member, ...]) -> str:
    return ",".join(map(str, members))
