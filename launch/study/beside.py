"""What the launching process does beside the cells: jobs that take turns on one thread, so that no cell waits for them.

They come where no rank measures yet: the store of MLflow's is opened while the agent imports torch, and the run of a cell is
written while the ranks of the next one start. The thread has the priority of any other: a low one would take the same seconds
of a busy core from the ranks, later, in windows that count.
"""

import gc
import queue
import threading
from collections.abc import Callable

Job = Callable[[], object]


class BesideCells:
    """Does jobs in the order in which they come. Its thread starts with the first one, and ends with the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def do(self, job: Job) -> None:
        """Have a job done soon, or do it now where no further thread may be started."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="beside", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                job()
                return
            self._thread = thread
        self._jobs.put(job)

    def finish(self) -> None:
        """Wait until every job is done. Raises what the first one raised that failed."""
        if self._thread:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._error:
            raise self._error

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._error = self._error or error


def look_for_garbage() -> None:
    """Have Python look for garbage again where launch.py put it off: among what is made from now on."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
