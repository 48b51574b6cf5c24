"""The end of the log that says most about a failed cell."""

import contextlib
import os
from pathlib import Path

from benchmarks.record import CellFolder, Failure

MOST_BYTES = 1 << 20  # of a log's end that are read
TAIL_LINES = 20
TAIL_CHARACTERS = 500  # of a line
STACK = ("Current thread", "Fatal Python error")  # how a tail begins that is faulthandler's


def end_of(path: Path) -> str:
    """Return the end of a log as text, '' where there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
        return file.read().decode("utf-8", errors="replace")
    return ""


def with_log(failure: Failure, folder: CellFolder) -> Failure:
    """Return the failure with the end of the log that says most about it."""
    if failure.cause == "node_lost":  # no log says more
        return failure
    rank, agent = folder.rank_log(failure.rank or 0), folder.agent_log
    paths = [agent, rank] if failure.rank is None else [rank, agent]
    if failure.cause == "hang":  # we ended the cell, and the agent's log only says that
        paths = [rank]
    for path in paths:
        if lines := _tail(end_of(path).splitlines()):
            tail = "\n".join(line[:TAIL_CHARACTERS] for line in lines)
            return Failure(failure.cause, failure.rank, failure.message, tail)
    return failure


def few_lines(log_tail: str, most: int) -> list[str]:
    """Return the lines of a failure's log tail to show where all are too many: a stack has its newest call first."""
    lines = log_tail.splitlines()
    return lines[:most] if lines and lines[0].startswith(STACK) else lines[-most:]


def _tail(lines: list[str]) -> list[str]:
    """Return the last lines; if faulthandler wrote last, the top of the main thread's stack, which has the call that matters."""
    current = max((number for number, line in enumerate(lines) if line.startswith("Current thread")), default=None)
    if current is None or any(line.startswith("Traceback") for line in lines[current:]):
        return lines[-TAIL_LINES:]
    fatal = [line for line in lines[:current] if line.startswith("Fatal Python error")][-1:]
    return [*fatal, *lines[current:]][:TAIL_LINES]
