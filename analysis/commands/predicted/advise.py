"""`python -m analysis advise STUDY --gpus 4`: which GPUs, strategy and NCCL settings to take, by forecast.

Cells that were measured count by their runs. It says which cells cannot be told from the first, and which few are worth
measuring before one is chosen, each with its command. Exit status: 0 done, 2 wrong input or request.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from analysis.commands.predicted import advice
from analysis.console import console
from analysis.prediction.advice.advice import Advice, advise
from analysis.prediction.advice.options import (
    Settings,
    advised_machine,
    farthest,
    machine_gpus,
    options,
    studied_settings,
    subsets,
    topology_of,
)
from analysis.prediction.asked import (
    add_arguments,
    read_batches,
    read_nccl,
    read_spread,
    read_subsets,
    refuse_absent,
)
from analysis.prediction.calibration import Calibrated, calibrate
from analysis.prediction.holdout import KnownScores
from analysis.study.estimates import Member
from analysis.study.study import Study, open_study

UNTOUCHED = "default"  # of --nccl: no setting at all


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("study", metavar="STUDY", help="the folder of a study with training cells")
    parser.add_argument(
        "--gpus",
        metavar="K",
        required=True,
        help="how many GPUs; or subsets to choose from, such as 0+1,0+3",
    )
    add_arguments(parser)
    parser.add_argument(
        "--nccl",
        metavar="SETTINGS",
        action="append",
        help=f"such as P2P_LEVEL=LOC,ALGO=Ring; again for others to choose from; {UNTOUCHED}: none (default: the study's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the advice for each model of the study. Raises OSError, ValueError."""
    study = open_study(Path(arguments.study))
    calibration = calibrate(study)
    machine = advised_machine(calibration)
    topology = topology_of(study, machine)
    known = KnownScores(calibration)
    found = options(
        calibration,
        [
            (one, farthest(topology, one))
            for one in _subsets(arguments.gpus, study, calibration, machine)
        ],
        [_settings(text) for text in arguments.nccl] if arguments.nccl else studied_settings(study),
        None if arguments.strategy is None else arguments.strategy.split(","),
        None if arguments.batch is None else read_batches(arguments.batch),
        len(machine_gpus(calibration, topology, machine)),
        machine,
        None if arguments.gpu_spread is None else read_spread(arguments.gpu_spread),
    )
    made: list[Advice] = []
    refused: dict[str, str] = {}
    for workload, of_model in found.items():
        try:
            made.append(advise(calibration, of_model, known))
        except ValueError as error:  # NoLink too
            refused[str(workload)] = str(error)
    if not made:
        raise ValueError(next(iter(refused.values())))
    if arguments.json:
        shown = [advice.to_json(study, one, known) for one in made]
        print(json.dumps({"study": study.name, "advice": shown, "refused": refused}))
        return 0
    for one in made:
        advice.print_advice(study, one, known)
    for model, why in refused.items():
        console().print(f"No advice on {model}: {why}", soft_wrap=True, markup=False)
    return 0


def _subsets(
    text: str, study: Study, calibration: Calibrated, machine: str
) -> Sequence[tuple[Member, ...]]:
    """Return the subsets to choose from. Raises ValueError."""
    if text.isascii() and text.isdigit() and len(text) < 8:
        return subsets(calibration, topology_of(study, machine), int(text), machine)
    chosen = read_subsets(text, None)
    refuse_absent(text, chosen, study, calibration, machine)
    if len({one.gpus for one in chosen}) > 1:
        raise ValueError(
            f"--gpus {text!r}: accepted are subsets of one size, so that their rates can be compared"
        )
    return [one.members for one in chosen]


def _settings(text: str) -> Settings:
    return {} if text == UNTOUCHED else read_nccl(text)
