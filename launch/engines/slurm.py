"""Ask Slurm about the job that this process runs in: its hosts, their cores, the time left."""

import contextlib
import functools
import re
import subprocess
import time
from collections.abc import Mapping

from benchmarks.record.safe_text import one_line
from conf.options import Refused

ANSWER_S = 20.0  # that a question to Slurm may take; a controller that restarts can need several
JOB, NODES, CORES = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE"
END = "SLURM_JOB_END_TIME"  # seconds since 1970; since Slurm 23.02


class SlurmSilent(Exception):
    """Slurm gave no answer. The message says what it said instead."""


def ask(words: tuple[str, ...], surrounding: Mapping[str, str]) -> str:
    """Return what a command of Slurm prints; times are seconds since 1970. Raises SlurmSilent."""
    variables = {**surrounding, "SLURM_TIME_FORMAT": "%s"}
    try:
        done = subprocess.run(
            words, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=ANSWER_S,
            check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise SlurmSilent(f"there is no program {words[0]}") from None
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"{words[0]} did not answer in {ANSWER_S:.0f} s") from None
    except OSError as error:
        raise SlurmSilent(f"{words[0]} cannot be started ({error.strerror})") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise SlurmSilent(f"{words[0]}: {one_line(said[-1])}")
    return done.stdout


def host_names(surrounding: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the allocation that this process runs in, in Slurm's order.

    Raises:
        Refused: it runs in none, or Slurm does not name them.
    """
    if not surrounding.get(JOB) or not surrounding.get(NODES):
        raise Refused(
            f"engine=slurm: this is no job of Slurm ({NODES} is not set); start it inside salloc or sbatch, or add "
            "engine.submit=true, which submits it"
        )
    try:
        return _names(surrounding[NODES], tuple(surrounding.items()))
    except SlurmSilent as error:
        raise Refused(
            f"engine=slurm: the hosts of {NODES}={surrounding[NODES]} are not known: {error}"
        ) from None


@functools.lru_cache(maxsize=1)
def _names(listed: str, surrounding: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    return tuple(ask(("scontrol", "show", "hostnames", listed), dict(surrounding)).split())


def cores(host: str, surrounding: Mapping[str, str]) -> int | None:
    """Return how many cores the job has on a host; None if Slurm does not say. Raises Refused outside a job."""
    of_each: list[int] = []
    for part in surrounding.get(CORES, "").split(","):  # 72(x2),36
        if not (found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part, re.ASCII)):
            return None
        of_each += [int(found[1])] * int(found[2] or 1)
    of_host = dict(zip(host_names(surrounding), of_each, strict=False))
    return of_host.get(host)


def time_left_s(surrounding: Mapping[str, str]) -> float | None:
    """Return the seconds until the job ends; None outside one, or if Slurm does not say.

    Slurm is asked each time, as a limit may have been changed since the job began.
    """
    if not (job := surrounding.get(JOB)):
        return None
    end = surrounding.get(END)
    with contextlib.suppress(SlurmSilent):
        end = fields(job, surrounding).get("EndTime", end)
    return float(end) - time.time() if end and end.isdecimal() else None


def fields(job: str, surrounding: Mapping[str, str]) -> dict[str, str]:
    """Return what Slurm says of a job, `JobState` and the like, by name. Raises SlurmSilent: also where it has forgotten it."""
    said = ask(("scontrol", "--oneliner", "show", "job", job), surrounding)
    return dict(word.split("=", 1) for word in said.split() if "=" in word)
