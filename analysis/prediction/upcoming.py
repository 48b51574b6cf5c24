"""Forecast a cell that is about to run, from the records of its study (predict=auto).

The forecast is made of plain JSON types: it goes into attempt.json before the ranks start, and from there into the record.
Names are those of Forecast; besides them

    version     of the model: VERSION
    cells       cells that it rests on; `records` names their records
    held_out    of those, cells that its interval comes from
    level       of the interval
    refused     why there is no forecast; it then holds nothing but this, version and cells
"""

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.prediction.asked import workload_here
from analysis.prediction.calibration import Calibrated, calibrate
from analysis.prediction.cells import Question, question_of
from analysis.prediction.forecast import FEWEST_HELD_OUT, LEVEL, forecast, is_scored
from analysis.prediction.holdout import BATCH, CONDITION, HeldOut, hold_out, scores
from analysis.study.study import Study
from conf.cell import Cell

VERSION = (
    6  # another model has another number: a forecast of the same records may then be another one
)


# The scores of held-out cells, by the way of holding out (analysis.prediction.holdout), the machine and the device: errors of
# another machine say nothing of this one's.
ScoreKey = tuple[str, str, str]
Scores = Mapping[ScoreKey, Sequence[float]]


def upcoming(
    cell: Cell, study: Study, machine: str, link_class: str | None, known: Scores
) -> dict[str, Any]:
    """Return the forecast of a cell; `known` is what `scores_by_machine` returned, `link_class` is the farthest between its GPUs.

    `machine` is the one it will run on, as the study names it.
    """
    try:
        calibration = calibrate(study)
    except ValueError:
        return {
            "version": VERSION,
            "cells": 0,
            "refused": "no cell of the study with a step time was measured before it",
        }
    told = {"version": VERSION, "cells": len(calibration.cells)}
    try:
        asked = question_of(cell, workload_here(calibration, cell), link_class, machine)
        like = known.get(_key(_way(calibration, asked), asked), ()) if is_scored(asked) else ()
        found = forecast(calibration, asked, like)
    except ValueError as error:  # NoLink too
        return told | {"refused": str(error)}
    return told | {"held_out": len(like), "level": LEVEL} | found.to_json()


def scores_by_machine(study: Study) -> Scores:
    """Return the scores of the cells of a study that can be held out, in each way that upcoming cells may need.

    Cells that a check casts doubt on count only where the others are too few: their steps scatter as those to come may.
    """
    found: dict[ScoreKey, list[HeldOut]] = defaultdict(list)
    with contextlib.suppress(ValueError):  # nothing was measured, or too little
        calibration = calibrate(study)
        for way in (CONDITION, BATCH):
            for one in hold_out(calibration, way, suspect=True):
                found[_key(way, one.cell.question)].append(one)
    sound = {key: scores(one for one in held if one.cell.valid) for key, held in found.items()}
    return {
        key: sound[key] if len(sound[key]) >= FEWEST_HELD_OUT else scores(held)
        for key, held in found.items()
    }


def _key(way: str, question: Question) -> ScoreKey:
    """Return the key of the scores of a way of holding out, for the machine and device of a question."""
    return way, question.machine, dict(question.workload.rest).get("device", "")


def _way(calibration: Calibrated, asked: Question) -> str:
    """Return the way of holding out that leaves as much unknown as a question does; empty where none does."""
    same = [
        one.question
        for one in calibration.cells
        if one.timed and one.question.workload == asked.workload
    ]
    if not any(one.ranks > 1 for one in same):
        return ""
    return CONDITION if any(one.batch_size == asked.batch_size for one in same) else BATCH
