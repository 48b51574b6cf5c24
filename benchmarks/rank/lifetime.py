"""What a process of ours does so that none of them outlives its cell. Linux."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# The id of the process that started this one (launch.engines): one that ends before the kernel knows our wish is noticed.
STARTER = "RINGSIDE_STARTER"
# … of the launching process, where a profiler stands between it and the agent, and may outlive it.
LAUNCHER = "RINGSIDE_LAUNCHER"
POLL_SECONDS = 1.0
NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED, cuda.h


def die_with_parent() -> None:
    """Have the kernel kill this process when the process that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.environ.get(STARTER, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)  # it ended while this process was still being loaded


def cuda_initialised() -> bool:
    """Whether this process has initialised CUDA's driver, as the driver says; a process forked from it could not use it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False  # not even loaded
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != NOT_INITIALISED


def die_with_launcher(launcher: int) -> None:
    """Have a thread kill this process when the launching process, which is not its parent, is gone."""

    def watch() -> None:
        while Path(f"/proc/{launcher}").exists():
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
