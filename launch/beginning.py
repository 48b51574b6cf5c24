"""The first half second of a command, in which it is imported: when it began, and what Ctrl-C does meanwhile."""

import gc
import signal
import time
from collections.abc import Callable
from typing import Any

BEGAN_S = (
    time.monotonic()
)  # before all that takes time is imported: a sweep's seconds count from here
INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C


def begin() -> Any:
    """Have Ctrl-C end the process without a traceback, and Python collect no garbage. Return what Ctrl-C did before.

    A job in the background goes on ignoring Ctrl-C. While all is imported and planned, Python would walk through it again and
    again for garbage (launch.study.background).
    """
    gc.disable()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return before


def answered(main: Callable[[], int], before: Any) -> int:
    """Return what `main` returns; Ctrl-C does in it what it did `before`: it raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, before)
    return main()
