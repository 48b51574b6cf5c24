"""Submit the whole command as one job of Slurm. submitit writes the job and hands it in.

The job runs the same command with engine.submit=false. Where Slurm requeues it, the command goes on from the journal.
"""

import io
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

from benchmarks.record.safe_files import because, make_folder
from conf.options import Refused, expand_path
from conf.schema import Config
from conf.subsets import COUNT, is_name
from launch.engines import slurm
from launch.engines.environment import ROOT

FOLDER = ".slurm"  # in output_dir: the jobs' scripts, commands and logs
WARNED_S = 60  # before the job's limit, or before another job takes its place: time to close a cell


def submit(configs: Sequence[Config], typed: Sequence[str], surrounding: Mapping[str, str]) -> str:
    """Submit the command `typed`, whose checked configurations these are; return a sentence with the job's id and its log.

    Raises:
        Refused: Slurm or submitit is not there, or Slurm does not accept the job.
    """
    if inside := surrounding.get(slurm.JOB):
        raise Refused(
            f"engine.submit=true: this is inside job {inside} of Slurm; accepted here is the command without it"
        )
    if not shutil.which("sbatch"):
        raise Refused(
            "engine.submit=true: there is no program sbatch; accepted is a host that has Slurm's commands"
        )
    try:
        import submitit
    except ImportError:
        raise Refused(
            "engine.submit=true: needs submitit; accepted after pip install '.[slurm]'"
        ) from None
    config, parameters = configs[0], job_parameters(configs)
    folder = _own_folder(config.output_dir)
    python = config.engine.python or sys.executable
    command = [
        python,
        str(Path(config.engine.folder or ROOT) / "launch.py"),
        *typed,
        "engine.submit=false",
    ]
    try:
        executor = submitit.SlurmExecutor(folder, python=f"exec {shlex.quote(python)}")
        executor.update_parameters(**parameters)
        # The command takes the place of the job's own process, so that Slurm's signals and its exit status are the command's.
        with redirect_stderr(io.StringIO()):  # submitit prints there what sbatch says
            job: Any = executor.submit(os.execv, python, command)
    except (
        RuntimeError,
        ValueError,
        OSError,
    ) as error:  # submitit has what sbatch said in the last line
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise Refused(f"engine.submit=true: Slurm did not take the job: {said[-1]}") from None
    return f"job {job.job_id} is submitted; its log is {job.paths.stdout}; scancel {job.job_id} cancels it"


def job_parameters(configs: Sequence[Config]) -> dict[str, Any]:
    """Return the parameters of the job as submitit names them. Raises Refused: the number of its hosts is not known."""
    engine, named = configs[0].engine, _named(configs)
    asked: dict[str, Any] = {
        "job_name": f"ringside-{configs[0].study}",
        "nodes": hosts_of_job(configs),
        "nodelist": ",".join(named) or None,
        "time": engine.time_minutes,
        "partition": engine.partition,
        "account": engine.account,
        "gpus_per_node": engine.gpus_per_node,
        "exclusive": True,  # what others do on a host would be measured too
        "use_srun": False,  # the command starts an agent on each host itself
        "stderr_to_stdout": True,
        # B: Slurm warns the launching process alone, which ends the others.
        "additional_parameters": {"requeue": True, "signal": f"B:TERM@{WARNED_S}", **engine.sbatch},
    }
    return {name: value for name, value in asked.items() if value is not None}


def hosts_of_job(configs: Sequence[Config]) -> int:
    """Return how many hosts a submitted job has. Raises Refused: a word of nodes= does not say."""
    counts = [int(text) for config in configs for text in config.nodes if COUNT.fullmatch(text)]
    if most := configs[0].engine.job_nodes or max([len(_named(configs)), *counts]):
        return most
    typed = ",".join(configs[0].nodes)
    raise Refused(
        f"nodes={typed}: does not say how many hosts the job needs; accepted is engine.job_nodes=N beside it"
    )


def _named(configs: Sequence[Config]) -> list[str]:
    """Return the hosts that nodes= names, each once."""
    return list(dict.fromkeys(host for config in configs for host in config.nodes if is_name(host)))


def _own_folder(output_dir: str) -> Path:
    """Return the folder of the jobs, which nobody else may write: a job obeys what lies in it. Raises Refused."""
    folder = expand_path("output_dir", output_dir) / FOLDER
    try:
        make_folder(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = make_folder(folder).stat()
    except OSError as error:
        raise Refused(f"output_dir={output_dir}: cannot be written: {because(error)}") from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Refused(
            f"output_dir={output_dir}: others may write {folder}; accepted is a folder that is yours alone"
        )
    return folder
