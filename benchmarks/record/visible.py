"""Text that somebody else wrote, made safe to show: what a terminal or a page would obey is spelled out instead.

An exception, a log or a file may hold ESC sequences, backspaces, NUL or marks that turn the direction of writing. On a terminal
they could hide or fake a line. Standard library only.
"""

import io
import unicodedata
from typing import TextIO

LONGEST = 4000  # characters of one line that is shown
LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def visible(text: str, kept: str = "\n\t") -> str:
    r"""Return a text with escapes (`\x1b`, `\u202e`) for its control characters, its marks of direction and halves of surrogates.

    Spaces of every width stay, and so do the characters of `kept`.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char) or char in kept else _escape(char) for char in text)


def one_line(text: str, longest: int = LONGEST) -> str:
    """Return a text as one line for a terminal, line breaks escaped too. An endless text loses its middle."""
    shown = visible(text, kept="")
    return shown if len(shown) <= longest else f"{shown[: longest // 4]} … {shown[-longest // 2 :]}"


def forgive(stream: TextIO | None) -> None:
    """Have a stream write `?` for a character that its encoding lacks (a terminal of ASCII) in place of raising."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def _is_harmless(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()
