"""What a process of ours does so that none of them outlives its cell. Linux."""

import ctypes
import os
import signal
from collections.abc import Mapping

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# The id of the process that started this one. A starter that ends before the kernel knows our wish is noticed by it.
STARTER = "RINGSIDE_STARTER"


def started_by_me(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that the calling one starts and that calls die_with_parent."""
    return {**environment, STARTER: str(os.getpid())}


def die_with_parent() -> None:
    """Have the kernel kill this process when the process that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.environ.get(STARTER, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)  # it ended while this process was still being loaded
