"""The console of all commands: the terminal, or plain text without cut columns if the output is a pipe."""

import sys

from rich.console import Console

_WIDE = 200  # columns in a pipe, where there is no terminal to ask


def console() -> Console:
    """Return a console on standard output that highlights nothing by itself."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
