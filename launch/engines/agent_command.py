"""The command that starts the agent of a host: the engine's words, then the agent's own."""

import shlex
import sys
from collections.abc import Mapping

from conf.options import expand_path
from conf.schema import Engine
from launch.engines import slurm
from launch.engines.environment import ROOT

AGENT = ("-m", "benchmarks.rank.host_agent")
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


def agent_command(engine: Engine, host: str, surrounding: Mapping[str, str]) -> list[str]:
    """Return the command that starts the agent of a host.

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
        there = f"cd {shlex.quote(folder)} && exec {shlex.join([python, *AGENT])}"
        return [*command, "--", host, there]
    if engine.name == "slurm":
        command = [*SRUN]
        cores = slurm.cores(host, surrounding)
        if cores:
            # Without it a step may have one core (Slurm 22.05), or as many as one task (24.11).
            command.append(f"--cpus-per-task={cores}")
        return [*command, f"--nodelist={host}", f"--chdir={folder}", python, *AGENT]
    prefix = [word.replace(HOST, host) for word in engine.prefix]
    # Not every such program keeps the working folder.
    return [*prefix, "env", f"--chdir={folder}", python, *AGENT]
