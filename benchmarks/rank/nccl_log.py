"""Begin NCCL's log again, in a process that measures another cell: NCCL reads NCCL_DEBUG and its kin once otherwise.

NCCL says its version, and most variables that it reads, only once in a process. Those lines of the first cell's log lie in the
folder of every later cell beside the log of its own, so that a reader finds there what the process runs with.
"""

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.record import own_files
from benchmarks.record.cell_folder import ONCE
from conf.variables import READ_AT_EACH_COMMUNICATOR

ONCE_IN_A_PROCESS = re.compile(r"NCCL version |\b(NCCL_\w+) set by environment to ")
LIBRARY = "libnccl.so.2"  # which torch has loaded, if it was built with NCCL as a library of its own


def can_begin_again() -> bool:
    """Return whether NCCL's log can be begun again."""
    return _reset() is not None


def said_once() -> str:
    """Return the lines of this process's log that NCCL writes once in a process; empty without a log."""
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in _own_logs())
    lines = [line for text in texts for line in text.splitlines(True)]
    return "".join(dict.fromkeys(filter(_is_said_once, lines)))


def begin_again(once: str) -> None:
    """Have NCCL read NCCL_DEBUG, NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE again at its next line; write `once` beside its file.

    Source: ncclResetDebugInit, src/debug.cc of NCCL; exported by 2.28.9 and 2.30.7.

    Raises:
        OSError: the lines cannot be written.
    """
    if reset := _reset():
        reset()
    if once:
        own_files.write_whole(_folder() / f"{os.getpid()}{ONCE}", once.encode())


def _is_said_once(line: str) -> bool:
    found = ONCE_IN_A_PROCESS.search(line)
    return found is not None and found[1] not in READ_AT_EACH_COMMUNICATOR


def _folder() -> Path:
    return Path(os.environ.get("NCCL_DEBUG_FILE", "")).parent


def _own_logs() -> list[Path]:
    """Return the log of this process: NCCL puts the host's name before the process's number."""
    return sorted(_folder().glob(f"*.{os.getpid()}.log")) if os.environ.get("NCCL_DEBUG_FILE") else []


def _reset() -> Callable[[], object] | None:
    try:
        found: Callable[[], object] = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD).ncclResetDebugInit
    except (OSError, AttributeError):  # it is not loaded, or is another version
        return None
    return found
