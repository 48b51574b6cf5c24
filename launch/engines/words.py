"""Make the command that starts the agent of a host: what the engine puts before it, and the agent's own words."""

import shlex
import sys
from collections.abc import Mapping, Sequence

from conf.options import path_of
from conf.schema import Engine
from launch.engines import slurm
from launch.engines.environment import ROOT

AGENT = ("-m", "benchmarks.rank.serve")
CLEANER = ("-m", "benchmarks.host.scratch")  # removes what a killed agent left
HOST = "{host}"  # in engine.prefix
# No question is ever asked; a host whose key is not known is refused; a dead connection ends after 15 s. An existing shared
# connection (ControlMaster) is used, but none of ours outlives its host's agent, and no port of the user's is forwarded.
SSH = ("ssh", "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ServerAliveInterval=5",
       "-o", "ServerAliveCountMax=3", "-o", "ControlMaster=no", "-o", "ClearAllForwardings=yes")  # fmt: skip
# Beside other steps of the job. Its pipe is not --unbuffered, which would make it a terminal that breaks long lines.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--kill-on-bad-exit=1", "--export=ALL", "--mpi=none")


def command(engine: Engine, host: str, surrounding: Mapping[str, str], program: Sequence[str] = AGENT) -> list[str]:
    """Return the command that starts the agent of a host, or another program there, with its stdin and stdout.

    Raises:
        Refused: engine=slurm outside an allocation.
    """
    python, folder = engine.python or sys.executable, engine.folder or str(ROOT)
    if engine.name == "ssh":
        configured = ["-F", str(path_of("engine.ssh_config", engine.ssh_config))] if engine.ssh_config else []
        there = f"cd {shlex.quote(folder)} && exec {shlex.join([python, *program])}"  # a shell of that host reads it
        return [*SSH, *configured, "--", host, there]
    if engine.name == "slurm":
        # Without it a step may have one core (Slurm 22.05), or as many as one task of the job (24.11).
        cores = [f"--cpus-per-task={of_host}"] if (of_host := slurm.cores(host, surrounding)) else []
        return [*SRUN, *cores, f"--nodelist={host}", f"--chdir={folder}", python, *program]
    # Not every such program keeps the working folder.
    return [*(word.replace(HOST, host) for word in engine.prefix), "env", f"--chdir={folder}", python, *program]
