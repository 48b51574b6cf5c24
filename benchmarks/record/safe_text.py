"""Text that somebody else wrote, made safe to show, and the streams that show it.

An exception, a log or a file may hold ESC sequences, backspaces, NUL or marks that turn the
direction of writing. On a terminal they could hide or fake a line. Standard library only.
"""

import contextlib
import io
import os
import signal
import sys
import unicodedata
from typing import NoReturn, TextIO

INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C
LONGEST = 4000  # characters of one line that is shown
LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def visible(text: str, kept: str = "\n\t") -> str:
    r"""Return a text with escapes (`\x1b`, `\u202e`) for what a terminal would obey.

    These are control characters, marks of direction and halves of surrogates. Spaces of every
    width stay, and so do the characters of `kept`.
    """
    if text.isprintable():
        return text
    safe = []
    for char in text:
        if char.isprintable() or unicodedata.category(char) == "Zs" or char in kept:
            safe.append(char)
        else:
            safe.append(char.encode("unicode_escape").decode())
    return "".join(safe)


def one_line(text: str, longest: int = LONGEST) -> str:
    """Return a text as one line for a terminal. An endless text loses its middle."""
    line = visible(text, kept="")
    if len(line) <= longest:
        return line
    return f"{line[: longest // 4]} … {line[-longest // 2 :]}"


def forgive(stream: TextIO | None) -> None:
    """Have a stream write `?` for a character that its encoding lacks in place of raising."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def close_quietly() -> None:
    """Flush stdout and stderr; one that fails is pointed to nowhere: Python's exit is silent."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def end_process(status: int) -> NoReturn:
    """End the process with an exit status, in silence where nobody reads what it printed.

    After an interruption it ends at once: Python would take seconds to give back thousands of
    records, and another signal meanwhile must not change the exit status.
    """
    if status != INTERRUPTED:
        close_quietly()
        sys.exit(status)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    close_quietly()
    os._exit(INTERRUPTED)
