"""Refuse cells where a limit of this process leaves no room for theirs: torch would wait for minutes, or die without a word."""

import resource
from dataclasses import dataclass

from conf.options import Refused

MIB = 1 << 20


@dataclass(frozen=True)
class Limit:
    """A limit of the kernel, which the processes of a cell inherit, and how little of it is too little."""

    kind: int  # RLIMIT_…
    fewest: int
    command: str  # that shows and sets it, in `unit`
    unit: int
    what: str


LIMITS = (
    Limit(resource.RLIMIT_NOFILE, 128, "ulimit -n", 1, "files that a process may have open"),
    Limit(
        resource.RLIMIT_AS, 4096 * MIB, "ulimit -v", 1024, "KiB of addresses that a process may have"
    ),  # torch alone: 3.4 GB
    Limit(resource.RLIMIT_FSIZE, 4 * MIB, "ulimit -f", 1024, "KiB that a file may have"),  # the store of MLflow: 1 MB
)


def too_small() -> list[str]:
    """Return a sentence for each limit of this process that is too small for any cell: its value and what is accepted."""
    found = ((limit, resource.getrlimit(limit.kind)[0]) for limit in LIMITS)
    return [
        f"{limit.command} is {value // limit.unit} here ({limit.what}), too little for the processes of a cell; "
        f"accepted is {limit.fewest // limit.unit} or more, or unlimited"
        for limit, value in found
        if value != resource.RLIM_INFINITY and value < limit.fewest
    ]


def refuse_small_limits() -> None:
    """Refuse to start any cell under a limit that is too small for it.

    Raises:
        Refused: names the limit, its value and what is accepted.
    """
    for sentence in too_small():
        raise Refused(sentence)
