"""A user who asks to stop: by Ctrl-C, or by SIGTERM, with which Slurm ends a job."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from rich.console import Console


class Stopping:
    """Remembers that the user asked to stop, by Ctrl-C or SIGTERM."""

    def __init__(self, console: Console) -> None:
        self._requested = False
        self._console = console

    def __call__(self) -> bool:
        """Return whether the user asked."""
        return self._requested

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Have signals set the mark instead of ending this process. SIGHUP ends nothing."""
        handlers = {
            signal.SIGINT: signal.signal(signal.SIGINT, self._request),
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._request),
            signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        }
        try:
            yield
        finally:
            # Asked once, a second Ctrl-C while this process leaves must not change its exit status.
            if not self._requested:
                for signum, handler in handlers.items():
                    signal.signal(signum, handler)

    def _request(self, signum: int, frame: Any) -> None:
        if self._requested:
            return
        self._requested = True
        # While this thread prints something else, Python forbids a second.
        with contextlib.suppress(RuntimeError):
            self._console.print("stopping: no further cell is started; what was measured is kept")
