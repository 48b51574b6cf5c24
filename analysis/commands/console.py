"""Where commands print their tables: the terminal, or plain text without cut columns when the output is a pipe."""

import sys

from rich.console import Console

_WIDE = 200  # columns in a pipe, where there is no terminal to ask


def console() -> Console:
    """A console on standard output that highlights nothing by itself."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
