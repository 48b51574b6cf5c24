"""Files in /dev/shm that several processes of a cell map.

One process creates the file, the others attach to it, and it is unlinked once all have mapped it: so nothing is left
behind, however they end. What a cell leaves if it ends before that is removed by its token (remove_shared_memory of
benchmarks.host.processes).
"""

import errno
import mmap
import os
import re
import secrets
from pathlib import Path

from conf.variables import SHARED_MEMORY_FOLDER as FOLDER
from conf.variables import TOKEN, shared_memory_prefix


def new_path() -> Path:
    """Return a path that no other cell has, and no other call."""
    return FOLDER / f"{_prefix()}{secrets.token_hex(8)}"


def named(name: str) -> Path:
    """Return the path of a file that another process of this cell and host has named by `new_path`.

    Raises:
        ValueError: the cell gives no such name.
    """
    if not re.fullmatch(re.escape(_prefix()) + "[0-9a-f]{16}", name):
        raise ValueError(f"{name!r:.100}: no name of shared memory of this cell")
    return FOLDER / name


def _prefix() -> str:
    return shared_memory_prefix(os.environ.get(TOKEN, ""))


def create(path: Path, size_bytes: int) -> mmap.mmap:
    """Create the file and map it. Its bytes are zero, and all its pages are taken at once.

    Raises:
        OSError: not enough shared memory; says how much was needed. The file is removed again.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)  # this user's: /dev/shm is everybody's
    try:
        os.posix_fallocate(file, 0, size_bytes)  # a page that is missing later would be a SIGBUS
        return mmap.mmap(file, size_bytes)
    except OSError as error:
        path.unlink()
        reason = "there is not that much" if error.errno == errno.ENOSPC else os.strerror(error.errno or 0)
        size = f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 2**20 else f"{size_bytes} bytes"
        raise OSError(error.errno, f"{size} of shared memory in {FOLDER}: {reason}") from None
    finally:
        os.close(file)


def attach(path: Path, size_bytes: int) -> mmap.mmap:
    """Map a file that another process has created."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return mmap.mmap(file, size_bytes)
    finally:
        os.close(file)
