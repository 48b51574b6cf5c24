"""The agent of a host: serves the launcher that holds its standard input and output.

    python -m benchmarks.rank.serve

The end of its input means: end every process of mine, and leave.
"""

import contextlib
import gc
import os
import signal
import sys

from benchmarks.host.environment import with_absolute_path
from benchmarks.host.messages import Inbox, Outbox
from benchmarks.rank import lifetime
from conf.variables import NO_TOKEN, STARTER, TOKEN

# What an agent's environment needs from its beginning: the text that a token takes the place of, and what Python reads.
FROM_THE_BEGINNING = {TOKEN: NO_TOKEN, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def main() -> int:
    """Serve until the input ends. Returns the exit status."""
    environment = with_absolute_path(os.environ) | FROM_THE_BEGINNING
    if environment != dict(os.environ):  # started by ssh, srun or another command
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.rank.serve"], environment)
    if STARTER in os.environ:
        lifetime.die_with_parent()
    answers = os.dup(1)
    inbox = Inbox(os.dup(0))
    os.dup2(2, 1)  # what a library prints is no message
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the cell is ended
    gc.disable()  # until all is imported (Agent): it would walk through it again and again, a quarter of these seconds
    from benchmarks.rank.serving import Agent  # with torch

    with contextlib.suppress(BrokenPipeError):  # the launcher is gone
        return Agent(inbox, Outbox(answers)).serve()
    return 1


if __name__ == "__main__":
    os._exit(main())  # Python's own end takes torch apart, for which the launcher would wait
