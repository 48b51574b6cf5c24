"""`python -m analysis predict STUDY`: what cells should give before they run, with intervals and beside a null model.

`--holdout condition|size|transport|batch|model` forecasts measured cells from the others and says how far off that was. Several
folders are read as one study. Files of published ladders (tests/data/ladders) are forecast from their first points.
Exit status: 0 done, 2 wrong input or request.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from analysis.commands.predicted import forecasts, held_out, ladders
from analysis.commands.predicted.notes import print_notes
from analysis.prediction.asked import (
    Subset,
    add_arguments,
    gpus_here,
    machine_of,
    questions,
    read_batches,
    read_nccl,
    read_spread,
    read_subsets,
    refuse_absent,
)
from analysis.prediction.calibration import Calibrated, calibrate
from analysis.prediction.cells import Question
from analysis.prediction.forecast import Forecast, forecast
from analysis.prediction.holdout import WAYS, KnownScores, hold_out
from analysis.prediction.ladders import climb, read_ladder
from analysis.prediction.links.network import FORM, read_network
from analysis.prediction.scores import collective_errors
from analysis.study.names import of_unit
from analysis.study.study import Study, open_study

_NUMBERS = "a number of GPUs needs --per-node too, such as --gpus 16 --per-node 8"
_ALONE = f"--gpus {{0}} is GPU {{0}} alone; {_NUMBERS}"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "study",
        metavar="STUDY",
        nargs="+",
        help="the folder of a study; several are read as one; or files of ladders",
    )
    parser.add_argument(
        "--gpus",
        metavar="LIST",
        help="ids of GPUs: 0,1,2,3 is one subset; with --per-node numbers of GPUs: 16,64,256",
    )
    parser.add_argument("--per-node", type=int, metavar="N", help="GPUs of a host")
    parser.add_argument(
        "--net", metavar="NET", help=f"the network between hosts that were not measured: {FORM}"
    )
    parser.add_argument("--nccl", metavar="SETTINGS", help="such as P2P_LEVEL=LOC,ALGO=Ring")
    add_arguments(parser)
    parser.add_argument("--holdout", choices=WAYS, help="forecast measured cells from the others")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print forecasts, or those of held-out cells. Raises OSError, ValueError."""
    _refuse(arguments)
    if all(Path(one).is_file() for one in arguments.study):
        _refuse_of_ladders(arguments)
        climbed = climb([read_ladder(Path(one)) for one in arguments.study])
        if not climbed:
            raise ValueError(
                f"{arguments.study[0]}: a forecast needs three points of a ladder, the first on one host"
            )
        if arguments.json:
            print(json.dumps(ladders.to_json(climbed)))
        else:
            ladders.print_ladders(climbed)
        return 0
    study = _study(arguments.study)
    calibration = calibrate(study)
    if arguments.holdout:
        held = hold_out(calibration, arguments.holdout)
        errors = collective_errors(calibration.known.links)
        if arguments.json:
            print(json.dumps(held_out.to_json(arguments.holdout, held, errors)))
        else:
            held_out.print_held_out(held, errors, calibration)
        return 0
    subsets = None if arguments.gpus is None else read_subsets(arguments.gpus, arguments.per_node)
    gpus_of_host = arguments.per_node
    if arguments.per_node is None and subsets:
        _refuse_absent(arguments.gpus, subsets, study, calibration)
        gpus_of_host = len(gpus_here(study, machine_of(calibration)))
    asked = questions(
        calibration,
        subsets,
        read_nccl(arguments.nccl or ""),
        None if arguments.strategy is None else arguments.strategy.split(","),
        None if arguments.batch is None else read_batches(arguments.batch),
        None if arguments.net is None else read_network(arguments.net),
        None if arguments.gpu_spread is None else read_spread(arguments.gpu_spread),
        gpus_of_host,
    )
    known = KnownScores(calibration)
    made = [(question, *_forecast(calibration, question, known)) for question in asked]
    if not any(found for _, found, _ in made):
        raise ValueError(f"no forecast of {forecasts.where(asked[0])}: {made[0][2]}")
    if arguments.json:
        print(json.dumps(forecasts.to_json(calibration, made, len(known.of(asked[0])))))
    else:
        forecasts.print_forecasts(calibration, made)
        alone = [_ALONE.format(*one.members) for one in subsets or () if len(one.members) == 1]
        print_notes([of_unit(one, calibration.unit) for one in alone])
    return 0


def _refuse(arguments: argparse.Namespace) -> None:
    """Refuse options that would be ignored. Raises ValueError."""
    if arguments.per_node is not None and arguments.gpus is None:
        raise ValueError(
            f"--per-node {arguments.per_node}: accepted together with --gpus, such as --gpus 16,64,256 --per-node 8"
        )
    if arguments.net is not None and arguments.per_node is None:
        raise ValueError(
            f"--net {arguments.net}: accepted together with --gpus and --per-node, such as --gpus 16,64 --per-node 8"
        )
    asked = [
        one
        for one in ("gpus", "net", "nccl", "strategy", "batch", "gpu-spread")
        if _given(arguments, one)
    ]
    if arguments.holdout and asked:
        raise ValueError(f"--holdout forecasts the study's own cells; --{asked[0]} asks for others")


def _refuse_of_ladders(arguments: argparse.Namespace) -> None:
    """Refuse what asks for cells of a study. Raises ValueError."""
    asked = [
        one
        for one in ("gpus", "nccl", "strategy", "batch", "gpu-spread", "holdout")
        if _given(arguments, one)
    ]
    if asked:
        raise ValueError(
            f"--{asked[0]} needs the folder of a study; {arguments.study[0]} is a file"
        )


def _given(arguments: argparse.Namespace, option: str) -> bool:
    return getattr(arguments, option.replace("-", "_")) is not None


def _study(folders: Sequence[str]) -> Study:
    """Return one study, or the records of several as one."""
    opened = [open_study(Path(folder)) for folder in folders]
    if len(opened) == 1:
        return opened[0]
    return Study.of(record for one in opened for record in (*one.records, *one.replaced))


def _refuse_absent(
    text: str, subsets: Sequence[Subset], study: Study, calibration: Calibrated
) -> None:
    """Refuse GPUs that the machine does not have, and say how one asks for a number of them. Raises ValueError."""
    try:
        refuse_absent(text, subsets, study, calibration)
    except ValueError as error:
        raise ValueError(f"{error}; {of_unit(_NUMBERS, calibration.unit)}") from None


def _forecast(
    calibration: Calibrated, question: Question, known: KnownScores
) -> tuple[Forecast | None, str]:
    try:
        return forecast(calibration, question, known.of(question)), ""
    except ValueError as error:
        return None, str(error)
