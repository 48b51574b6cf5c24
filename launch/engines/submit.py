"""Submit the whole command as one job of Slurm, show its log, and wait for its end. submitit writes the job and hands it in.

The job runs the same command with engine.submit=false. Where Slurm requeues it, the command goes on from the journal.
"""

import io
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.record.os_errors import because
from benchmarks.record.own_files import make_folder, open_to_read
from conf.nodes import COUNT, is_name
from conf.options import Refused, path_of
from conf.schema import Config
from launch.engines import slurm
from launch.engines.environment import ROOT

FOLDER = ".slurm"  # in output_dir: the jobs' scripts, commands and logs
WARNED_S = 60  # before the job's limit, or before another job takes its place: time to close a cell
POLL_S = 2.0  # between two questions to Slurm
GRACE_S = 60.0  # for a job that is asked to stop
INTERRUPTED = 130
# States after which a job does not run again, and the exit status where the job's own says nothing.
ENDED = {
    "COMPLETED": 0, "FAILED": 1, "TIMEOUT": INTERRUPTED, "CANCELLED": INTERRUPTED, "PREEMPTED": INTERRUPTED, "NODE_FAIL": 1,
    "OUT_OF_MEMORY": 1, "BOOT_FAIL": 1, "DEADLINE": INTERRUPTED, "REVOKED": INTERRUPTED,
}  # fmt: skip


def submit(
    configs: Sequence[Config],
    typed: Sequence[str],
    surrounding: Mapping[str, str],
    console: Console,
) -> "Followed":
    """Submit the command `typed`, whose checked configurations these are, and return its job.

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
    return Followed(str(job.job_id), Path(job.paths.stdout), surrounding, console)


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
    folder = path_of("output_dir", output_dir) / FOLDER
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


class Followed:
    """A job whose log is shown until it ends."""

    def __init__(
        self, job: str, log: Path, surrounding: Mapping[str, str], console: Console
    ) -> None:
        self._job, self._log, self._surrounding, self._console = job, log, surrounding, console
        self._shown = 0  # bytes of the log
        self._told = ""
        self._tell(f"is submitted; Ctrl-C cancels it; its log is {log}")

    def to_its_end(self, stopping: Callable[[], bool]) -> int:
        """Show the log until the job ends; return the exit status. Cancel the job when the user asks to stop."""
        cancelled_at: float | None = None  # seconds of the monotonic clock
        while True:
            try:
                known = slurm.fields(self._job, self._surrounding)
            except slurm.SlurmSilent as error:
                if "Invalid job id" in str(error):  # minutes after its end
                    self._tell(f"is not known to Slurm any more; how it ended is in {self._log}")
                    return 1
                self._tell(f"is not heard of: {error}")
                known = {}
            state = known.get("JobState", "")
            if state == "PENDING":
                again = ", as Slurm has requeued it" if known.get("Restarts", "0") != "0" else ""
                reason = f" ({known['Reason']})" if known.get("Reason", "None") != "None" else ""
                self._tell(f"waits{again}{reason}")
            elif state == "RUNNING" and cancelled_at is None:
                self._tell(
                    f"runs on {known.get('NodeList')}, until {_clock(known.get('EndTime', ''))} at most"
                )
            self._show_log()
            if state in ENDED:
                return self._ended(state, known["ExitCode"], cancelled_at is not None)
            if stopping() and (cancelled_at is None or time.monotonic() > cancelled_at + GRACE_S):
                self._cancel(asking=state == "RUNNING" and cancelled_at is None)
                cancelled_at = time.monotonic()
            time.sleep(POLL_S)

    def _cancel(self, asking: bool) -> None:
        """Cancel the job, or ask it first to close its cell."""
        how = ["--batch", "--signal=TERM"] if asking else []
        self._tell("is asked to stop" if asking else "is cancelled")
        with suppress(slurm.SlurmSilent):
            slurm.ask(("scancel", *how, self._job), self._surrounding)

    def _ended(self, state: str, exit_code: str, was_cancelled: bool) -> int:
        """Say how the job ended; return the exit status."""
        own, _, signal_number = exit_code.partition(":")
        asked_to_end = was_cancelled or signal_number == str(
            int(signal.SIGTERM)
        )  # the latter before it had begun
        status = (
            int(own)
            if own.isdecimal() and own != "0"
            else INTERRUPTED
            if asked_to_end
            else ENDED[state]
        )
        on = "; the same command continues from there" if status == INTERRUPTED else ""
        how = "" if state in ("COMPLETED", "FAILED") else f"{state.lower().replace('_', ' ')}, "
        self._tell(f"has ended ({how}exit status {status}){on}")
        return status

    def _show_log(self) -> None:
        """Print what the log has got since the last look, in whole lines."""
        with suppress(OSError), open_to_read(self._log) as file:  # it is made when the job starts
            file.seek(self._shown)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._shown += len(whole)
            self._console.print(
                whole.decode(errors="replace"), markup=False, soft_wrap=True, end=""
            )

    def _tell(self, what: str) -> None:
        """Say something new of the job."""
        if what != self._told:
            self._told = what
            self._console.print(f"job {self._job} {what}", markup=False, soft_wrap=True)


def _clock(seconds: str) -> str:
    """Return a time of Slurm's, in seconds since 1970, as people read it."""
    return (
        time.strftime("%H:%M", time.localtime(int(seconds)))
        if seconds.isdecimal()
        else "an unknown time"
    )
