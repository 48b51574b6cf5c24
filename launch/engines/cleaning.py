"""Remove from hosts what agents left there that were killed.

Elsewhere a process beside the agent does it (benchmarks.host.sample). Slurm ends every process of a step whose task was killed.
"""

import contextlib
import signal
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from conf import schema
from conf.options import Refused
from launch.engines.words import CLEANER, command

LONGEST_S = 10.0  # on a host that may be gone altogether
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # by itself, and as shells and srun have it


def clean(statuses: Mapping[str, int | None], limits: schema.Engine, surrounding: Mapping[str, str]) -> None:
    """Remove what is left on hosts, at the same time; `statuses` has for each how its agent's command had ended.

    Nothing is done where it was not killed. What cannot be reached keeps it: the next agent there removes it.
    """

    def on(name: str) -> None:
        with contextlib.suppress(OSError, Refused, subprocess.TimeoutExpired):
            words = command(limits, name, surrounding, CLEANER)
            subprocess.run(
                words, env=surrounding, stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST_S, check=False
            )

    if names := [name for name, status in statuses.items() if status in KILLED]:
        with ThreadPoolExecutor(len(names)) as cleaning:
            list(cleaning.map(on, names))
