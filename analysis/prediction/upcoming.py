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
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from analysis.findings.study import Study
from analysis.prediction.asked import workload_here
from analysis.prediction.calibration import Calibrated, calibrate
from analysis.prediction.cells import Question, question_of
from analysis.prediction.forecast import FEWEST_HELD_OUT, LEVEL, forecast
from analysis.prediction.holdout import BATCH, CONDITION, hold_out, scores
from conf.cell import Cell

VERSION = 1  # another model has another number: a forecast of the same records may then be another one
NOT_SCORED = "no error is claimed: cells of one GPU, or without an exchange, are not held out"


Scores = Mapping[str, Sequence[float]]  # of held-out cells, by the way of holding out (analysis.prediction.holdout)


def upcoming(cell: Cell, study: Study, machine: str, link_class: str | None, known: Scores) -> dict[str, Any]:
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
        is_scored = asked.ranks > 1 and asked.strategy != "none"
        like = known.get(_way(calibration, asked), ()) if is_scored else ()
        found = forecast(calibration, asked, like)
    except ValueError as error:  # NoLink too
        return told | {"refused": str(error)}
    if not is_scored:
        found = replace(found, why=(*found.why[:-1], NOT_SCORED))
    return told | {"held_out": len(like), "level": LEVEL} | found.to_json()


def scores_by_machine(study: Study) -> Scores:
    """Return the scores of the cells of a study that can be held out, in each way that upcoming cells may need.

    Cells that a check casts doubt on count only where the others are too few: their steps scatter as those to come may.
    """
    try:
        calibration = calibrate(study)
    except ValueError:
        return {}
    found: dict[str, Sequence[float]] = {}
    for way, suspect in itertools.product((CONDITION, BATCH), (False, True)):
        if len(found.get(way, ())) < FEWEST_HELD_OUT:
            with contextlib.suppress(ValueError):  # there is no such cell
                found[way] = scores(hold_out(calibration, way, suspect))
    return found
