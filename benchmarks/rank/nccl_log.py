"""Begin NCCL's log again, in a process that measures another cell: NCCL reads NCCL_DEBUG and its kin once otherwise."""

import ctypes
import os
from collections.abc import Callable

LIBRARY = "libnccl.so.2"  # which torch has loaded, if it was built with NCCL as a library of its own


def can_begin_again() -> bool:
    """Return whether NCCL's log can be begun again."""
    return _reset() is not None


def begin_again() -> None:
    """Have NCCL read NCCL_DEBUG, NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE again at its next line.

    Source: ncclResetDebugInit, src/debug.cc of NCCL; exported by 2.28.9 and 2.30.7.
    """
    if reset := _reset():
        reset()


def _reset() -> Callable[[], object] | None:
    try:
        found: Callable[[], object] = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD).ncclResetDebugInit
    except (OSError, AttributeError):  # it is not loaded, or is another version
        return None
    return found
