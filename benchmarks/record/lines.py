"""JSON lines that only grow, and the clock of their times: ranks, servers, samplers, the journal.

A torn line is lost, never half read.
"""

import contextlib
import gzip
import json
import os
import time
import zlib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.record import safe_files
from benchmarks.record.encoding import DEEPEST, encoded, restored
from benchmarks.record.folder import open_raw, stored

MOST_LEVELS = DEEPEST - 20  # of what a line holds; a record has it further inside


class Kind(str, Enum):
    """Names of the kinds of lines. A benchmark may write kinds of its own beside these."""

    # ranks/<rank>.jsonl, in the order in which they first appear
    START = "start"  # where the rank runs, with which versions
    PEERS = "peers"  # number, host, pid, UUID of each rank that met; rank 0 of several hosts
    PHASE = "phase"  # a phase begins
    BEAT = "beat"  # a sign of life inside a phase
    BLOCK = "block"  # one timed window, every sample
    EXCHANGE = "exchange"  # facts of the exchange alone: its bytes, whether ranks wait
    HELD = "held"  # steps whose launches were held back until all were enqueued
    BUCKETS = "buckets"  # what the exchange sends (these three: benchmarks/training/calibration)
    PATHS = "paths"  # facts of the fast paths of one watched update (benchmarks/path_facts)
    TIMELINE = "timeline"  # moments inside a few steps that are not timed
    BUCKET_EXCHANGE = "bucket_exchange"  # collectives of the size of buckets, alone
    DEVICE = "device"  # the device of a rank, as nccl-tests prints it
    WINDOW = "window"  # one timed window of collectives
    WRONG = "wrong"  # wrong elements of one collective
    SOLVES = "solves"  # seconds of Jacobi solves
    GRID_COPIES = "grid_copies"  # copies of the Jacobi grid: what memory allows
    MEMBERS = "members"  # the members of a subset between which copies are timed
    P2P = "p2p"  # one matrix of copies, or one pattern of copies at the same time
    RESULT = "result"  # facts that only a rank knows; rank 0 alone
    ERROR = "error"  # the exception that ended the rank
    DONE = "done"  # the rank came to its end
    # gpus.jsonl
    BEFORE = "before"  # the GPUs before the cell
    SAMPLE = "sample"  # the GPUs while it runs
    # journal.jsonl of a study
    BEGIN = "begin"
    END = "end"
    SWEEP = "sweep"
    SPENT = "spent"  # seconds of the launcher for a cell, beyond those from its start to its end
    CLOSED = "closed"  # the sweep has ended
    QUESTION = "question"  # what a sweep is to answer (analysis/study/asked)


class Lines:
    """Append-only JSON lines. `write` is for every line; `sync` puts all of them on disk.

    Each line is one write to the end of the file, so that two processes can share a journal.
    """

    def __init__(self, path: Path) -> None:
        """Open for appending; the folder exists. Raises OSError, NotOurs."""
        descriptor = safe_files.open_own(path)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        # The file ends within a line, by a crash or a full disk.
        size = os.fstat(descriptor).st_size
        self._torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"

    def write(self, kind: str, time: float, **content: Any) -> None:
        """Append one line; readers see it at once, it is on disk after `sync`. Raises OSError."""
        name = kind.value if isinstance(kind, Kind) else kind
        data = encoded({"kind": name, "time": time, **content})
        if self._torn:  # a line of its own for what comes next
            data = b"\n" + data
        self._torn = True
        while data:
            data = data[self._file.write(data) :]
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def sync(self) -> None:
        """Force what was written to disk. Raises OSError."""
        os.fsync(self._file.fileno())


def read_line(text: str | bytes) -> dict[str, Any] | None:
    """Read one line that Lines wrote; None where it is torn or foreign."""
    try:
        line = json.loads(text)
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            return None
        moment = line.get("time")
        if not isinstance(moment, int | float) or isinstance(moment, bool):
            return None
        return {name: restored(value, MOST_LEVELS) for name, value in line.items()}
    except (ValueError, RecursionError):
        return None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of one writer. Torn or foreign lines are skipped; no file has no lines.

    A packed file that is damaged has the lines before the damage.
    """
    if stored(path) is None:
        return
    with open_raw(path) as file, contextlib.suppress(EOFError, zlib.error, gzip.BadGzipFile):
        for text in file:
            line = read_line(text)
            if line is not None:
                yield line


# One clock for a sweep: the time of day when its launcher began, plus what a clock that never
# jumps says since. The time of day may be set while a cell runs: durations would be negative then.

# The launcher's `beginning`, for the processes of its cells.
CLOCK_VARIABLE = "RINGSIDE_CLOCK"


def now() -> float:
    """Return seconds since 1970, in which the launcher and all processes of its cells agree."""
    return at(time.monotonic())


def at(monotonic_s: float) -> float:
    """Return the seconds since 1970 at which this host's monotonic clock said so many seconds."""
    return _beginning + monotonic_s


def beginning() -> float:
    """Return when the monotonic clock of this host was 0, in seconds since 1970."""
    return _beginning


def begin_again() -> None:
    """Take the launcher's beginning from the environment, in a process forked from another."""
    global _beginning
    _beginning = _read_beginning()


def _read_beginning() -> float:
    return float(os.environ.get(CLOCK_VARIABLE) or time.time() - time.monotonic())


_beginning = _read_beginning()
