"""What the launching process does beside the cells: jobs that take turns on one thread, so that no cell waits for them."""

import os
import queue
import threading
from collections.abc import Callable

# Where ranks keep every core busy, this thread gets about a tenth of what one of theirs gets (sched(7), nice values).
NICENESS = 10

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
        """Wait until every job is done. Raises what the first one raised that failed: jobs tell users what they expect."""
        if self._thread:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._error:
            raise self._error

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread alone
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._error = self._error or error
