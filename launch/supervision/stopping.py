"""A user who asks to stop: by Ctrl-C, or by SIGTERM, with which Slurm ends a job."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from rich.console import Console


class Stopping:
    """Remembers that the user asked to stop, by Ctrl-C or SIGTERM."""

    def __init__(self, console: Console) -> None:
        self._asked, self._console = False, console

    def __call__(self) -> bool:
        """Return whether the user asked."""
        return self._asked

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Have signals set the mark instead of ending this process. A terminal that goes away (SIGHUP) ends nothing."""
        before = {
            number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)
        }
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            yield
        finally:
            # Asked once, a second Ctrl-C while this process leaves must not change its exit status.
            for number, handler in before.items() if not self._asked else ():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        first, self._asked = not self._asked, True
        # While this thread prints something else, Python forbids a second.
        with contextlib.suppress(RuntimeError):
            if first:
                self._console.print(
                    "stopping: no further cell is started; what was measured is kept"
                )
