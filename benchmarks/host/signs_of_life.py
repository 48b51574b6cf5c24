"""Signs of life of an agent that imports: it has one thread, so a child gives them. Their end tells that its host is gone."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from benchmarks.host.messages import Outbox, Say
from trainers import prctl

EVERY_S = 1.0


@contextlib.contextmanager
def given(outbox: Outbox, every_s: float = EVERY_S) -> Iterator[None]:
    """Have a child give a sign of life every so many seconds until the block ends, or until this process does.

    There are none where an earlier message is not written yet. Nothing else may be written meanwhile.
    """
    if outbox.waiting_bytes:
        yield
        return
    mine = os.getpid()
    if (child := os.fork()) == 0:
        with contextlib.suppress(OSError):  # the launcher is gone
            prctl.die_with_parent()
            while os.getppid() == mine:
                outbox.send({"say": Say.BEAT.value})
                time.sleep(every_s)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
