"""Slurm: ask about the job around this process, and submit the command as a job (submitit).

A submitted job runs the same command with engine.submit=false. Where Slurm requeues it, the command
goes on from the journal.
"""

import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record.safe_files import because, make_folder
from benchmarks.record.safe_text import one_line
from conf.options import Refused, expand_path
from conf.schema import Config
from conf.subsets import COUNT, is_name
from launch.machine.facts import ROOT

ANSWER_S = 20.0  # that a question to Slurm may take; a controller that restarts can need several
JOB, NODES, CORES = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE"
END = "SLURM_JOB_END_TIME"  # seconds since 1970; since Slurm 23.02
FOLDER = ".slurm"  # in output_dir: the jobs' scripts, commands and logs
WARNED_S = 60  # before the job's limit, or before another job takes its place: time to close a cell


def ask(words: tuple[str, ...], surrounding: Mapping[str, str]) -> str:
    """Return what a command of Slurm prints; times are seconds since 1970.

    Raises OSError: it gave no answer; the message is what it said instead.
    """
    try:
        done = subprocess.run(
            words,
            env={**surrounding, "SLURM_TIME_FORMAT": "%s"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
    except FileNotFoundError:
        raise OSError(f"there is no program {words[0]}") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{words[0]} did not answer in {ANSWER_S:.0f} s") from None
    except OSError as error:
        raise OSError(f"{words[0]} cannot be started ({error.strerror})") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise OSError(f"{words[0]}: {one_line(lines[-1])}")
    return done.stdout


def host_names(surrounding: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the allocation that this process runs in, in Slurm's order.

    Raises Refused: it runs in none, or Slurm does not name them.
    """
    if not surrounding.get(JOB) or not surrounding.get(NODES):
        raise Refused(
            f"engine=slurm: this is not inside a Slurm job ({NODES} is not set). What to do: start "
            "it inside salloc or sbatch, or add engine.submit=true to submit it"
        )
    try:
        return _names(surrounding[NODES], tuple(surrounding.items()))
    except OSError as error:
        raise Refused(
            f"engine=slurm: the hosts of {NODES}={surrounding[NODES]} are not known: {error}"
        ) from None


@functools.lru_cache(maxsize=1)
def _names(listed: str, surrounding: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    return tuple(ask(("scontrol", "show", "hostnames", listed), dict(surrounding)).split())


def cores(host: str, surrounding: Mapping[str, str]) -> int | None:
    """Return how many cores the job has on a host; None if unknown.

    Raises Refused outside a job.
    """
    counts: list[int] = []
    for part in surrounding.get(CORES, "").split(","):  # 72(x2),36
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part, re.ASCII)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return dict(zip(host_names(surrounding), counts, strict=False)).get(host)


def time_left_s(surrounding: Mapping[str, str]) -> float | None:
    """Return the seconds until the job ends; None outside one, or if Slurm does not say.

    Slurm is asked each time, as a limit may have been changed since the job began.
    """
    job = surrounding.get(JOB)
    if not job:
        return None
    end = surrounding.get(END) or ""
    with contextlib.suppress(OSError):
        answer = ask(("scontrol", "--oneliner", "show", "job", job), surrounding)
        match = re.search(r"\bEndTime=(\S+)", answer)
        if match:
            end = match[1]
    if not end.isdecimal():
        return None
    return float(end) - time.time()


def submit(configs: Sequence[Config], typed: Sequence[str], surrounding: Mapping[str, str]) -> str:
    """Submit the command `typed`; return a sentence with the job's id and its log.

    Raises Refused: Slurm or submitit is not there, or Slurm does not accept the job.
    """
    if surrounding.get(JOB):
        raise Refused(
            f"engine.submit=true: this is already inside Slurm job {surrounding[JOB]}. What to do: "
            "leave engine.submit out"
        )
    if not shutil.which("sbatch"):
        raise Refused(
            "engine.submit=true: there is no program sbatch. What to do: start it on a machine "
            "with Slurm's commands"
        )
    try:
        import submitit
    except ImportError:
        raise Refused(
            "engine.submit=true: needs submitit. What to do: pip install -e '.[slurm]'"
        ) from None
    engine = configs[0].engine
    parameters = job_parameters(configs)
    folder = _own_folder(configs[0].output_dir)
    python = engine.python or sys.executable
    program = str(Path(engine.folder or ROOT) / "launch.py")
    options = [text for text in typed if not text.startswith("engine.submit=")]
    command = [python, program, *options, "engine.submit=false"]
    try:
        executor = submitit.SlurmExecutor(folder, python=f"exec {shlex.quote(python)}")
        executor.update_parameters(**parameters)
        # The command takes the place of the job's own process, so that Slurm's signals and its exit
        # status are the command's.
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints there what sbatch says
            job: Any = executor.submit(os.execv, python, command)
    except (RuntimeError, ValueError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # submitit has what sbatch said in the last line.
        raise Refused(f"engine.submit=true: Slurm did not take the job: {lines[-1]}") from None
    return (
        f"job {job.job_id} is submitted; its log is {job.paths.stdout}; "
        f"scancel {job.job_id} cancels it"
    )


def job_parameters(configs: Sequence[Config]) -> dict[str, Any]:
    """Return the parameters of the job as submitit names them. Raises Refused."""
    engine = configs[0].engine
    names: dict[str, None] = {}
    for config in configs:
        names |= dict.fromkeys(filter(is_name, config.nodes))
    parameters: dict[str, Any] = {
        "job_name": f"ringside-{configs[0].study}",
        "nodes": hosts_of_job(configs),
        "nodelist": ",".join(names) or None,
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
    return {name: value for name, value in parameters.items() if value is not None}


def hosts_of_job(configs: Sequence[Config]) -> int:
    """Return how many hosts a submitted job has. Raises Refused: a word of nodes= does not say."""
    job_nodes = configs[0].engine.job_nodes
    if job_nodes:
        return job_nodes
    names = set()
    most = 0
    for config in configs:
        for word in config.nodes:
            if is_name(word):
                names.add(word)
            elif COUNT.fullmatch(word):
                most = max(most, int(word))
    most = max(most, len(names))
    if most == 0:
        raise Refused(
            f"nodes={','.join(configs[0].nodes)}: does not say how many hosts the job needs. "
            "What to do: add engine.job_nodes=N"
        )
    return most


def _own_folder(output_dir: str) -> Path:
    """Return the folder of the jobs, which nobody else may write. Raises Refused."""
    folder = expand_path("output_dir", output_dir) / FOLDER
    try:
        make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = make_folder(folder).stat()
    except OSError as error:
        raise Refused(f"output_dir={output_dir}: cannot be written: {because(error)}") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise Refused(
            f"output_dir={output_dir}: other users can write to {folder}. What to do: choose a "
            "folder that only you can write to"
        )
    return folder
