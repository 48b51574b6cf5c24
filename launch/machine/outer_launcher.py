"""Refuse to run under a launcher of ranks, which would start the whole study once a rank."""

from collections.abc import Mapping

from conf.options import Refused

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# The variables with which process this is and with how many there are, and what to write instead.
LAUNCHERS = {
    # A batch script has no step, and one task of a step may launch.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "without srun, or with srun --ntasks=1"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "without mpirun"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "without mpiexec"),
}


def refuse_nested(environment: Mapping[str, str]) -> None:
    """Refuse to be one of several processes that one program started. Raises Refused.

    Launchers that people start one by one may share a study.
    """
    if all(name in environment for name in TORCHRUN):
        raise _refusal("torchrun", TORCHRUN, "without torchrun", environment)
    for program, (rank, size, instead) in LAUNCHERS.items():
        if _number(environment, rank) > 0 or _number(environment, size) > 1:
            raise _refusal(program, (rank, size), instead, environment)


def _refusal(
    program: str, names: tuple[str, ...], instead: str, environment: Mapping[str, str]
) -> Refused:
    values = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
    return Refused(
        f"{values}: launch.py was started by {program}, and starts the processes on the GPUs "
        f"itself; write python launch.py gpus=… {instead}"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if text.isascii() and text.isdigit():
        return int(text)
    return 0
