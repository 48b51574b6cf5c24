"""Who started this process: under torchrun, srun -n 8 or mpirun every rank would start the whole study."""

from collections.abc import Mapping

from conf.options import Refused

# What of each program says which of several processes this is, how many there are, and what to write in its place.
_COUNTED = {
    # A batch script has no step, and one task of a step may launch.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "without srun, or with srun --ntasks=1"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "without mpirun"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "without mpiexec"),
}
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def refuse_several(environment: Mapping[str, str]) -> None:
    """Refuse to be one of several processes that one program started. Raises Refused.

    Launchers that people start one by one may share a study.
    """
    if all(name in environment for name in _TORCHRUN):
        _refuse("torchrun", _TORCHRUN, "without torchrun", environment)
    for program, (rank, size, instead) in _COUNTED.items():
        if _number(environment, rank) > 0 or _number(environment, size) > 1:
            _refuse(program, (rank, size), instead, environment)


def _refuse(program: str, names: tuple[str, ...], instead: str, environment: Mapping[str, str]) -> None:
    said = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
    raise Refused(
        f"{said}: launch.py was started by {program}, and starts the processes on the GPUs itself; write python launch.py gpus=… "
        f"{instead}"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
