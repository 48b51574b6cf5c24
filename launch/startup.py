"""The first half second of a command: when it began, and what Ctrl-C does while all is imported."""

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
    """Have Ctrl-C end the process without a traceback, and return the handler of before.

    A job in the background goes on ignoring Ctrl-C. Python collects no garbage: it would walk
    through all that is imported and planned again and again (launch.study.background).
    """
    gc.disable()
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return handler


def run_with_sigint(main: Callable[[], int], handler: Any) -> int:
    """Run `main` with a handler of Ctrl-C, and return its exit status."""
    signal.signal(signal.SIGINT, handler)
    return main()
