"""Read the files of other tools within limits: what is larger is refused, before it takes the machine's memory.

The limits are far above what the tools write: the topology of 8 GPUs has 20 kB.
"""

import contextlib
import gzip
import sys
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from analysis.errors import UnreadableInput

LARGEST_TOPOLOGY_BYTES = 8 << 20
LARGEST_TEXT_BYTES = 512 << 20  # a log, or a benchmark's output
LARGEST_TRACE_BYTES = 8 << 30  # an SQLite export; it is read from the disk
LARGEST_JSON_BYTES = 1 << 30
MOST_GPUS = 576  # of one NVLink domain; tables of pairs grow with the square
GZIP = b"\x1f\x8b"
CUT = (EOFError, zlib.error, gzip.BadGzipFile)
PIECE = 1 << 20


def read_text(file: str | Path, largest: int = LARGEST_TEXT_BYTES) -> str:
    """Return a file's text; `-` is standard input, and gzip is unpacked.

    Raises:
        OSError: it cannot be opened.
        UnreadableInput: more bytes than `largest`, or a cut gzip file.
    """
    return read_bytes(file, largest).decode("utf-8-sig", errors="replace")


def read_bytes(file: str | Path, largest: int) -> bytes:
    """Return a file's bytes as read_text does. Raises the same."""
    standard_input = contextlib.nullcontext(cast(BufferedReader, sys.stdin.buffer))
    with standard_input if str(file) == "-" else Path(file).open("rb") as stream:
        packed = stream.peek(len(GZIP))[: len(GZIP)] == GZIP
        try:
            return b"".join(pieces(gzip.GzipFile(fileobj=stream) if packed else stream, str(file), largest))
        except CUT:
            raise UnreadableInput(f"{file}: cut or damaged gzip file") from None


def pieces(stream: BinaryIO | gzip.GzipFile, name: str, largest: int) -> Iterator[bytes]:
    """Yield the bytes of a stream in pieces. Raises UnreadableInput if there are more than `largest`."""
    size = 0
    while part := stream.read(PIECE):
        size += len(part)
        if size > largest:
            raise UnreadableInput(f"{name}: more than {largest >> 20} MiB; no file of this kind is so large")
        yield part


def refuse_too_many(gpus: int) -> None:
    """Refuse tables of more GPUs than any machine has. Raises UnreadableInput."""
    if gpus > MOST_GPUS:
        raise UnreadableInput(f"{gpus} GPUs; no machine has more than {MOST_GPUS}")
