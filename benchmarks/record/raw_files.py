"""The raw files of a cell: read plain or packed, packed for publication, and the SHA-256 of what they hold.

A file `ranks/0.jsonl` may lie there as `ranks/0.jsonl.gz`: every reader names it by its plain path. Its hash is that of the plain
content, so that packing changes no record.
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from benchmarks.record import own_files

PACKED = ".gz"
# What a file that is damaged raises when it is unpacked.
DAMAGED = (OSError, EOFError, zlib.error)
ABSENT, UNREADABLE = "absent", "unreadable"
_CHUNK = 1 << 20  # bytes


def stored(path: Path) -> Path | None:
    """Return where a raw file lies: at its path or packed beside it; None where it is not there."""
    packed = path.with_name(path.name + PACKED)
    return path if path.exists() else packed if packed.exists() else None


def found(folder: Path, pattern: str) -> list[Path]:
    """Return the plain paths of the raw files that a pattern names, packed ones too, by name."""
    packed = (
        path.with_name(path.name.removesuffix(PACKED)) for path in folder.glob(pattern + PACKED)
    )
    return sorted({*folder.glob(pattern), *packed})


def open_raw(path: Path) -> IO[bytes]:
    """Open a raw file by its plain path. Raises OSError; reading a damaged packed one raises one of DAMAGED."""
    try:
        return own_files.open_to_read(path)
    except FileNotFoundError:
        packed = path.with_name(path.name + PACKED)
        own_files.open_to_read(packed).close()  # to wait for a pipe would be for ever
        return gzip.open(packed, "rb")  # type: ignore[return-value]


def read_text(path: Path) -> str:
    """Return the text of a raw file; bytes that are no UTF-8 are replaced. Raises one of DAMAGED."""
    with open_raw(path) as file:
        return file.read().decode("utf-8", errors="replace")


def sha256(path: Path) -> str:
    """Return the SHA-256 of what a raw file holds, unpacked; ABSENT or UNREADABLE where there is none."""
    digest = hashlib.sha256()
    try:
        with open_raw(path) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except FileNotFoundError:
        return ABSENT
    except DAMAGED:
        return UNREADABLE
    return digest.hexdigest()


def changed(folder: Path, recorded: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each file of a record that does not hold what it held, by its path in the cell's folder, and its hash now."""
    for name, before in recorded.items():
        now = sha256(folder / name)
        if now != before:
            yield name, now


def packed_bytes(path: Path) -> bytes:
    """Return the bytes of a raw file's packed form, by its plain path. Raises OSError.

    The same content gives the same bytes.
    """
    packed = path.with_name(path.name + PACKED)
    with own_files.open_to_read(path if path.exists() else packed) as file:
        content = file.read()
    return gzip.compress(content, mtime=0) if path.exists() else content


def pack(path: Path) -> int:
    """Replace a raw file by a packed one that was read again. Return how many bytes it saved; 0 where it was packed before.

    Raises:
        OSError: it cannot be read or written, or did not come back as it was. The plain file is then still there.
    """
    if not path.exists():
        return 0
    own_files.refuse_other(path)
    data, packed = path.read_bytes(), path.with_name(path.name + PACKED)
    own_files.write_whole(packed, packed_bytes(path))
    if gzip.decompress(packed.read_bytes()) != data:
        packed.unlink()
        raise OSError(f"{packed}: does not hold what {path.name} holds; the plain file was kept")
    path.unlink()
    return len(data) - packed.stat().st_size
