"""One clock for a sweep: the time of day when its launcher began, plus what a clock that never jumps says since.

The time of day may be set, by hand or by NTP, while a cell runs. A duration would be negative then, and samples would not
match the phases that they are of.
"""

import os
import time

# The launcher's BEGINNING, for the processes of its cells.
VARIABLE = "RINGSIDE_CLOCK"


def now() -> float:
    """Return seconds since 1970. The launcher and all processes of its cells agree, whatever is done to the time of day."""
    return at(time.monotonic())


def at(monotonic_s: float) -> float:
    """Return the moment, in seconds since 1970, at which this host's monotonic clock said so many seconds."""
    return BEGINNING + monotonic_s


def begin_again() -> None:
    """Take the launcher's BEGINNING from the environment, in a process that was forked from one with another."""
    global BEGINNING
    BEGINNING = _beginning()


def _beginning() -> float:
    return float(os.environ.get(VARIABLE) or time.time() - time.monotonic())


# When the monotonic clock was 0, in seconds since 1970. All processes of a host have the same monotonic clock.
BEGINNING = _beginning()
