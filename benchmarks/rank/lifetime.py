"""What a process of a cell does so that it does not outlive the cell, and whether it may be forked. Linux."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

from conf.variables import STARTER
from trainers import prctl

POLL_SECONDS = 1.0  # between two looks for the launching process
CUDA_NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED, cuda.h


def die_with_parent() -> None:
    """End this process when the process that started it ends, however it ends."""
    prctl.die_with_parent()
    if os.environ.get(STARTER, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)  # the parent ended before the kernel had the request above


def cuda_initialised() -> bool:
    """Return whether this process has initialised CUDA's driver. A process forked from it could not use CUDA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False  # not even loaded
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != CUDA_NOT_INITIALISED


def die_with_launcher(launcher: int) -> None:
    """End this process when the launching process (its id; not the parent) is gone. A thread of its own watches."""

    def watch() -> None:
        while Path(f"/proc/{launcher}").exists():
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
