"""The text of an NCCL log as typed events, in the order of its lines.

A cut, torn or NUL-filled line is lost and counted, never half read. Linear in the length of the text.
"""

import re
from dataclasses import dataclass, field

from analysis.nccl.events import Event, LogProcess, Statement
from analysis.nccl.messages import read_message

# The last line of a torn pair arrives within a few lines; until then a line could be one rank's head, another's tail.
_TORN_WINDOW = 8
_PREFIX = re.compile(r"(\S+?):(\d+):\d+ (?:\[-?\d+\] )?(?:\S+:\d+ (?:\(\w*\) )?)?$")
_VERSION_ROW = re.compile(
    r"(?:\[[^\]]*\] )?NCCL version (\d{1,4}(?:\.\d{1,4})+)\S*\+cuda(\d+\.\d+)\s*$"
)
_SGR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(slots=True)
class LogEvents:
    """The events of one text, and how many of its lines were lost."""

    events: list[Event] = field(default_factory=list)
    processes: set[LogProcess] = field(default_factory=set)  # those whose prefix is known
    nccl: int = 0  # lines by NCCL
    damaged: int = 0  # lines with NUL bytes
    torn: int = 0  # lines of two ranks mixed, and lines that may be such
    unparsed: list[str] = field(default_factory=list)  # lines of a known kind in an unknown form
    truncated: bool = False  # the text ends inside a line

    @property
    def lost(self) -> int:
        """Count the lines of NCCL that could not be used."""
        return self.damaged + self.torn + len(self.unparsed)


def read_events(text: str, number: int = 0, host: str = "") -> LogEvents:
    """Read every event of one text; `number` tells texts apart in `LogProcess`. Raises nothing.

    `host` is that of the text, where it is known; otherwise the lines say it.
    """
    reader = _TextReader(number, host)
    rows = text.split("\n")
    last = rows.pop()
    # Without its newline the last line may have lost its end, a number its last digits, and NCCL's mark may be still to come.
    reader.found.truncated = last.strip() != ""
    for index, row in enumerate(rows):
        reader.read(row, is_first=index == 0)
    return reader.found


class _TextReader:
    """Reads one text line by line; knows whether the tails of torn lines are still to come."""

    def __init__(self, number: int, host: str) -> None:
        self.found = LogEvents()
        self._number, self._host = number, host
        self._waiting = 0  # heads of torn lines whose tail has not come
        self._left = 0  # lines until a tail is no longer awaited

    def read(self, raw: str, is_first: bool) -> None:
        if "\0" in raw:
            self.found.damaged += raw.strip("\0\r ") != ""
            return
        row = _SGR.sub("", raw) if "\x1b" in raw else raw
        row = row.rstrip("\r")
        marks = row.count("NCCL INFO ") + row.count("NCCL WARN ")
        if marks == 0:
            self._read_other(row)
            return
        self.found.nccl += 1
        if marks > 1:
            self.found.torn += 1
            self._waiting = min(self._waiting + marks - 1, _TORN_WINDOW)
            self._left = _TORN_WINDOW
        elif self._waiting:
            self.found.torn += 1
            self._left -= 1
            self._waiting = self._waiting if self._left else 0
        else:
            self._read_whole(row, is_first)

    def _read_other(self, row: str) -> None:
        """Read a line without NCCL's mark: the tail of a torn line, or the version that NCCL_DEBUG=VERSION prints."""
        if row.strip():
            self._waiting = max(0, self._waiting - 1)
        version = _VERSION_ROW.match(row)
        if version:
            self.found.nccl += 1
            nobody = LogProcess(self._number, "", -1)
            self.found.events.append(Statement(nobody, "version", version[1]))
            self.found.events.append(Statement(nobody, "cuda", version[2]))

    def _read_whole(self, row: str, is_first: bool) -> None:
        is_warning = "NCCL WARN " in row
        head, _, body = row.partition("NCCL WARN " if is_warning else "NCCL INFO ")
        process = self._writer(head, is_first)
        if is_warning:
            self.found.events.append(Statement(process, "warning", body.strip()))
            return
        try:
            events = read_message(body, process)
        except ValueError:  # a number of thousands of digits
            events = None
        if events is None:
            self.found.unparsed.append(body)
        else:
            self.found.events += events

    def _writer(self, head: str, is_first: bool) -> LogProcess:
        """Return the process that a line's prefix names; enter it among the known ones."""
        # the first line of a text may have lost the front of its prefix (tail -c): its writer is not known
        prefix = None if is_first else _PREFIX.search(head[-300:])
        if prefix is None:
            return LogProcess(self._number, "", -1)
        process = LogProcess(self._number, self._host or prefix[1], int(prefix[2]))
        self.found.processes.add(process)
        return process
