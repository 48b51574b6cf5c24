"""The command that starts the agent of a host: the engine's words, then the agent's own."""

import contextlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from conf.options import Refused, expand_path
from conf.schema import Engine
from launch.engines import slurm
from launch.engines.environment import ROOT

AGENT = ("-m", "benchmarks.rank.host_agent")
CLEANER = ("-m", "benchmarks.agent.scratch")  # removes what a killed agent left
CLEANER_S = 10.0  # on a host that may be gone altogether
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # by itself, and as shells and srun have it
HOST = "{host}"  # in engine.prefix
# No question is ever asked; a host whose key is not known is refused; a dead connection ends after
# 15 s. An existing shared connection (ControlMaster) is used, but none of ours outlives its host's
# agent, and no port of the user's is forwarded.
SSH = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes",
       "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no",
       "-o", "ClearAllForwardings=yes")  # fmt: skip
# Beside other steps of the job. Its pipe is not --unbuffered, which would make it a terminal that
# breaks long lines.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--kill-on-bad-exit=1", "--export=ALL",
        "--mpi=none")  # fmt: skip


def agent_command(
    engine: Engine, host: str, surrounding: Mapping[str, str], program: Sequence[str] = AGENT
) -> list[str]:
    """Return the command that starts the agent of a host, or another program there.

    Raises:
        Refused: engine=slurm outside an allocation.
    """
    python = engine.python or sys.executable
    folder = engine.folder or str(ROOT)
    if engine.name == "ssh":
        command = [*SSH]
        if engine.ssh_config:
            command += ["-F", str(expand_path("engine.ssh_config", engine.ssh_config))]
        # A shell of that host reads the last word.
        there = f"cd {shlex.quote(folder)} && exec {shlex.join([python, *program])}"
        return [*command, "--", host, there]
    if engine.name == "slurm":
        command = [*SRUN]
        cores = slurm.cores(host, surrounding)
        if cores:
            # Without it a step may have one core (Slurm 22.05), or as many as one task (24.11).
            command.append(f"--cpus-per-task={cores}")
        return [*command, f"--nodelist={host}", f"--chdir={folder}", python, *program]
    prefix = [word.replace(HOST, host) for word in engine.prefix]
    # Not every such program keeps the working folder.
    return [*prefix, "env", f"--chdir={folder}", python, *program]


def remote_cleanup(
    statuses: Mapping[str, int | None], limits: Engine, surrounding: Mapping[str, str]
) -> None:
    """Remove what killed agents left on hosts; `statuses` are those of the agents' commands.

    What cannot be reached keeps it: the next agent there removes it.
    """

    def clean(name: str) -> None:
        with contextlib.suppress(OSError, Refused, subprocess.TimeoutExpired):
            subprocess.run(
                agent_command(limits, name, surrounding, CLEANER),
                env=surrounding,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CLEANER_S,
                check=False,
            )

    names = [name for name, status in statuses.items() if status in KILLED]
    if names:
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(clean, names))
