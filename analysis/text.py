"""Text of records on the page and in files: on one line, cut to a length, escaped for Markdown
(for LaTeX: analysis.report.latex).

Anybody may have edited a record, so no text of one is trusted. launch writes MLflow's notes with
these functions too.
"""

import re
from collections.abc import Iterable

from benchmarks.record.safe_text import LINE_BREAKS, one_line, visible
from conf.secrets import without_secrets

_BREAKS = re.compile(f"[\t{LINE_BREAKS}]")
TEXT_LENGTH = 400  # characters of a text in a table


def redact(text: str) -> str:
    """Return text as one line for terminals and logs: without secrets, controls escaped."""
    return one_line(without_secrets(text))


def single_line(text: object, length: int = TEXT_LENGTH) -> str:
    """Return text on one line, with its control characters as escapes, cut to a length."""
    line = visible(_BREAKS.sub(" ", str(text)), kept="")
    return line if len(line) <= length else line[: length - 1] + "…"


def markdown(text: object, length: int = TEXT_LENGTH) -> str:
    """Return text that Markdown shows as it is.

    It ends no table cell and holds no tag, code, link or emphasis.
    """
    safe = single_line(text, length).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\|`*_\[\]~#!])", r"\\\1", safe)


def split_command(line: str) -> tuple[str, str]:
    """Return a sentence and the command that it ends in, to be copied as it is; "" without one."""
    words, found, rest = line.partition(": python launch.py ")
    return (f"{words}:", f"python launch.py {rest}") if found else (line, "")


def sentence(text: str) -> str:
    """Return text that begins with a capital and ends in a full stop; a name at the beginning stays
    as it is.
    """
    if text.split(" ", 1)[0].isalpha():
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def first_lines(lines: Iterable[str], most: int = 8) -> list[str]:
    """Return the first lines, each once, and a line that counts the others."""
    unique = list(dict.fromkeys(lines))
    if len(unique) <= most:
        return unique
    return [*unique[:most], f"… and {len(unique) - most:,} more of this kind."]


def count(items: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 cell`, `2,000 cells`."""
    if items == 1:
        return f"1 {noun}"
    return f"{items:,} {plural or noun + 's'}"


def join_words(words: list[str], most: int = 6) -> str:
    """Return `a, b and c`, with commas inside `a; b; c`; of many the first, and how many more."""
    if len(words) > most:
        words = [*words[:most], f"{len(words) - most:,} more"]
    if any("," in word for word in words):
        return "; ".join(words)
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def binary_size(size_bytes: int) -> str:
    """Return a size in the largest unit of which it is a whole number: `64 KiB`, `1,000 bytes`."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power} {unit}"
    return f"{size_bytes:,} bytes"
