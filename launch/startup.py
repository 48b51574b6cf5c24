"""The first half second of a command: when it began, and what Ctrl-C does while all is imported."""

import gc
import signal
import time
from typing import Any

# Before all that takes time is imported: a sweep's seconds count from here.
BEGAN_S = time.monotonic()
INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C


def begin() -> Any:
    """Have Ctrl-C end the process without a traceback, and return the handler of before.

    A job in the background goes on ignoring Ctrl-C. Python collects no garbage: it would walk
    through all that is imported and planned again and again (launch.study.background).
    """
    gc.disable()
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return handler
