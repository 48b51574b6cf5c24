"""The console of every command and of a sweep: a terminal obeys nothing of a foreign text."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from benchmarks.record.safe_text import close_quietly, forgive, visible

_WIDE = 200  # columns in a pipe, where there is no terminal to ask


class SafeConsole(Console):
    """A console that shows control characters as escapes and highlights nothing by itself."""

    def __init__(self, file: TextIO | None = None, width: int | None = None) -> None:
        super().__init__(file=file, width=width, highlight=False)

    def render_str(self, text: str, **how: Any) -> Text:
        """Return a text as rich prints it, escaped before rich measures the width."""
        return super().render_str(visible(text), **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield what rich would print; its own codes (colours, the cursor) are no text and stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Go on in silence, for the exit status counts (rich calls this; its own exits with 1)."""
        close_quietly()


def console() -> SafeConsole:
    """Return the console of a command: the terminal, or plain text in a pipe."""
    forgive(sys.stdout)
    return SafeConsole(width=None if sys.stdout.isatty() else _WIDE)


def print_text(text: str) -> None:
    """Print sentences: a terminal breaks them between words, a pipe not at all."""
    out = console()
    out.print(text, soft_wrap=not out.is_terminal)
