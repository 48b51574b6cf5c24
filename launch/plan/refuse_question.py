"""Refuse a question (ask=) that its candidates cannot answer. Nothing is started."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import read_study
from conf.cell import Cell
from conf.options import Refused
from conf.question import FASTEST, GAINS, RATES, SCALES, Question
from conf.schema import Config
from launch.plan.estimate import duration, estimates
from launch.plan.order import PlannedCell


def refuse_question(
    question: Question, config: Config, cells: Sequence[Cell], folder: Path
) -> None:
    """Refuse a question that these candidates cannot answer; `folder` is the study's.

    Raises:
        Refused: one candidate, repeats that are asked for too, numbers of GPUs that do not fit the
            question, or a budget that is too short for one run of each.
    """
    ask = f"ask={question.kind}"
    if config.repeats > 1 or config.noise_pairs not in ("auto", 0):
        raise Refused(
            f"{ask} repeats={config.repeats} noise_pairs={config.noise_pairs}: a question chooses "
            "what runs again; expected neither repeats nor noise_pairs beside it"
        )
    if config.waterfall:
        raise Refused(f"{ask} waterfall=true: control runs are not candidates; leave one out")
    first, last = cells[0], cells[-1]
    exchanges = first.strategy != last.strategy or not first.trains
    if question.kind == GAINS and first.world_size < 2 and exchanges:
        raise Refused(
            f"{ask} gpus={','.join(config.gpus)}: a GPU or worker alone exchanges nothing; "
            "expected two or more, as in gpus=0,1"
        )
    if question.kind == GAINS and first.device == "cpu" and not first.trains:
        raise Refused(
            f"{ask} nccl=…: CPU workers use gloo, which has no settings of NCCL; expected GPUs"
        )
    if len(cells) < 2:
        raise Refused(
            f"{ask}: there is one candidate, {cells[0].name}; expected two or more, as in "
            "strategy=nccl_allreduce,kvstore_device"
        )
    sizes = [cell.world_size for cell in cells]
    if question.kind == SCALES:
        alike = {dataclasses.replace(cell, gpus=(0,), labels=()).key for cell in cells}
        if len(set(sizes)) < len(cells) or len(alike) > 1:
            raise Refused(
                f"{ask}: candidates differ in more than their number of GPUs; expected one of each "
                "number, as in gpus=scale"
            )
    elif question.kind in (FASTEST, GAINS) and len(set(sizes)) > 1 and question.rate is None:
        raise Refused(
            f"{ask}: candidates run on {min(sizes)} to {max(sizes)} GPUs or workers; expected "
            f"rate={' or rate='.join(RATES)}, to say which rate counts"
        )
    if question.budget_s is not None:
        records, _ = read_study(folder)
        planned = list(map(PlannedCell, cells))
        once_s = sum(each.seconds for each in estimates(planned, records))
        if once_s > question.budget_s:
            raise Refused(
                f"budget={config.budget}: expected {duration(once_s)} or more, which one run of "
                f"each of {len(cells)} candidates takes"
            )
