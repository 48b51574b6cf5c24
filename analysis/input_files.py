"""Read the files of other tools, and records that are handed over as files, within limits.

What is larger is refused, before it takes the machine's memory. What cannot be used raises
UnreadableInput, and `said` is what an error says to a person.

The limits are far above what the tools write: the topology of 8 GPUs has 20 kB.
"""

import contextlib
import gc
import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

LARGEST_TOPOLOGY_BYTES = 8 << 20
LARGEST_TEXT_BYTES = 512 << 20  # a log, or a benchmark's output
LARGEST_TRACE_BYTES = 8 << 30  # an SQLite export; it is read from the disk
LARGEST_JSON_BYTES = 1 << 30
MOST_GPUS = 576  # of one NVLink domain; tables of pairs grow with the square
GZIP = b"\x1f\x8b"
CUT = (EOFError, zlib.error, gzip.BadGzipFile)
PIECE = 1 << 20
# A packed file may hold so many bytes, or so many times its own: what tools write packs 5 to 20
# times. Whoever trusts another unpacks it.
PACKED_BYTES = 32 << 20
PACKED_TIMES = 40
Parsed = TypeVar("Parsed")


class UnreadableInput(ValueError):
    """Raised for text that its reader cannot use; the message says what is accepted, and where."""


def read_text(file: str | Path, largest: int = LARGEST_TEXT_BYTES) -> str:
    """Return a file's text; `-` is standard input, and gzip is unpacked.
    Raises OSError, and UnreadableInput: more bytes than `largest`, or a cut gzip file.
    """
    standard_input = contextlib.nullcontext(cast(BufferedReader, sys.stdin.buffer))
    with standard_input if str(file) == "-" else Path(file).open("rb") as stream:
        packed = stream.peek(len(GZIP))[: len(GZIP)] == GZIP
        source: BinaryIO | gzip.GzipFile = stream
        if packed:
            source = gzip.GzipFile(fileobj=stream)
            if str(file) != "-":
                largest = min(largest, most_unpacked(Path(file).stat().st_size))
        try:
            data = b"".join(pieces(source, str(file), largest))
        except CUT:
            raise UnreadableInput(f"{file}: cut or damaged gzip file") from None
    return data.decode("utf-8-sig", errors="replace")


def read_input(
    file: str | Path, parse: Callable[[str], Parsed], largest: int = LARGEST_TEXT_BYTES
) -> Parsed:
    """Return what `parse` makes of a file's text. Raises OSError, and UnreadableInput, which begins
    with the file's name: it is too large, or `parse` refuses it.
    """
    text = read_text(file, largest)
    try:
        return parse(text)
    except UnreadableInput as error:
        raise UnreadableInput(f"{file}: {error}") from None


def most_unpacked(packed_bytes: int) -> int:
    """Return how many bytes a packed file of so many may hold."""
    return max(PACKED_BYTES, PACKED_TIMES * packed_bytes)


def pieces(stream: BinaryIO | gzip.GzipFile, name: str, largest: int) -> Iterator[bytes]:
    """Yield the bytes of a stream in pieces.

    Raises UnreadableInput: there are more than `largest`.
    """
    size = 0
    for part in iter(lambda: stream.read(PIECE), b""):
        size += len(part)
        if size > largest:
            why = "no file of this kind is so large"
            if isinstance(stream, gzip.GzipFile):
                why = "no packed file of its size holds so much (whoever trusts it unpacks it)"
            raise UnreadableInput(f"{name}: more than {largest >> 20} MiB; {why}")
        yield part


def refuse_too_many(gpus: int) -> None:
    """Refuse tables of more GPUs than any machine has. Raises UnreadableInput."""
    if gpus > MOST_GPUS:
        raise UnreadableInput(f"{gpus} GPUs; no machine has more than {MOST_GPUS}")


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector while many objects are made, which it would walk again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def said(error: Exception) -> str:
    """Return what an error says; of one of the operating system the file first, no number."""
    is_numbered = isinstance(error, OSError) and str(error).startswith("[Errno")
    if isinstance(error, IsADirectoryError):
        return f"{error.filename}: is a folder; expected a file"
    if isinstance(error, OSError) and is_numbered and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    return str(error)
