"""What is typed for `python -m analysis predict` and `advise`: GPUs, NCCL settings, batch sizes."""

from collections.abc import Sequence
from typing import Any

from analysis.prediction.advise import machine_gpus
from analysis.prediction.calibration import CalibrationData
from analysis.prediction.query import Subset
from analysis.study.names import of_unit
from analysis.study.study import Study
from conf.nccl import FIELDS, Nccl, settings, unknown_setting

MOST_GPUS, MOST_BATCH = 1 << 20, 1 << 24
FORM = (
    "GPUs of this machine as 0,1,2,3 (several subsets: 0+1,0+1+2+3), or with --per-node numbers of "
    "GPUs as 16,64,256"
)


def _positive(text: str, most: int) -> int:
    """Return a decimal number from 1 to `most`; 0 for anything else."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return 0
    return int(text) if int(text) <= most else 0


def read_subsets(text: str, per_node: int | None) -> list[Subset]:
    """Read --gpus. Raises ValueError."""
    parts = [part.strip() for part in text.split(",")]
    subsets = []
    if per_node is None:
        groups = [part.split("+") for part in parts] if "+" in text else [parts]
        for group in groups:
            if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in group):
                raise ValueError(f"--gpus {text!r}: accepted are {FORM}")
            members = tuple(int(part) for part in group)
            if len(set(members)) < len(members):
                raise ValueError(
                    f"--gpus {text!r}: a GPU stands twice in a subset; accepted are {FORM}"
                )
            subsets.append(Subset(len(members), members=members))
        return subsets
    if not 1 <= per_node <= MOST_GPUS:
        raise ValueError(
            f"--per-node {per_node}: accepted is a number of GPUs from 1 to {MOST_GPUS}"
        )
    for part in parts:
        gpus = _positive(part, MOST_GPUS)
        if gpus == 0 or (gpus > per_node and gpus % per_node):
            raise ValueError(
                f"--gpus {text!r}: {part!r} is no multiple of --per-node {per_node}; "
                "accepted are multiples, such as 16,64,256"
            )
        subsets.append(Subset(min(gpus, per_node), max(1, gpus // per_node)))
    return subsets


def read_nccl(text: str) -> dict[str, str]:
    """Read --nccl as a study has it: P2P_LEVEL=LOC,ALGO=Ring. Raises ValueError."""
    typed: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        setting = name.lower().removeprefix("nccl_")
        if not value:
            raise ValueError(f"--nccl {part!r}: accepted is NAME=VALUE, such as P2P_LEVEL=LOC")
        if setting not in FIELDS:
            raise ValueError(f"--nccl {part!r}: {unknown_setting(setting, value)}")
        if setting in typed:
            raise ValueError(
                f"--nccl {text!r}: {name} stands there twice; accepted is each setting once"
            )
        is_number = value.isascii() and value.isdigit() and len(value) < 12
        typed[setting] = int(value) if is_number else value
    return settings(Nccl(**typed))[0]


def read_batches(text: str) -> list[int]:
    """Read --batch. Raises ValueError."""
    sizes = [_positive(part, MOST_BATCH) for part in text.split(",")]
    if 0 in sizes:
        raise ValueError(f"--batch {text!r}: accepted are images per GPU, such as 128,256")
    return sizes


def refuse_absent(
    text: str,
    subsets: Sequence[Subset],
    study: Study,
    calibration: CalibrationData,
    hint: str = "",
) -> int:
    """Return how many GPUs the machine of most cells has. Raises ValueError for others."""
    machine, unit = calibration.machine, calibration.unit
    gpus = machine_gpus(study, machine)
    where = "the machine of the study"
    if len({cell.query.machine for cell in calibration.cells}) > 1:
        where = f"{machine}, where most cells of the study ran,"
    for subset in subsets:
        for gpu in subset.members:
            if gpu not in gpus:
                raise ValueError(
                    f"--gpus {text!r}: {where} has no {unit} {gpu}; accepted are "
                    f"{', '.join(map(str, gpus))}{of_unit(hint, unit)}"
                )
    return len(gpus)
