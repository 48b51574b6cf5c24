"""Files in /dev/shm that several processes of a cell map, and GPU memory outside torch's allocator.

One process creates a file, the others attach to it, and it is unlinked once all have mapped it: so
nothing is left behind, however they end. What a cell leaves if it ends before that is removed by
its token (benchmarks.agent.processes).
"""

import errno
import mmap
import os
import re
import secrets
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import runtime
from torch import Tensor

from conf.host import SHARED_MEMORY_FOLDER as FOLDER
from conf.host import TOKEN, shared_memory_prefix

MIB = 1 << 20


def new_path() -> Path:
    """Return a path that no other cell has, and no other call."""
    prefix = shared_memory_prefix(os.environ.get(TOKEN, ""))
    return FOLDER / f"{prefix}{secrets.token_hex(8)}"


def named(name: str) -> Path:
    """Return the path of a file that another process of this cell has named by `new_path`.

    Raises ValueError: the cell gives no such name.
    """
    prefix = shared_memory_prefix(os.environ.get(TOKEN, ""))
    if not re.fullmatch(re.escape(prefix) + "[0-9a-f]{16}", name):
        raise ValueError(f"{name!r:.100}: no name of shared memory of this cell")
    return FOLDER / name


def create(path: Path, size_bytes: int) -> mmap.mmap:
    """Create the file and map it. Its bytes are zero, and all its pages are taken at once.

    Raises OSError: not enough shared memory; says how much was needed. The file is removed again.
    """
    # This user's alone: /dev/shm is everybody's.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(file, 0, size_bytes)  # a page that is missing later would be a SIGBUS
        return mmap.mmap(file, size_bytes)
    except OSError as error:
        path.unlink()
        reason = os.strerror(error.errno or 0)
        if error.errno == errno.ENOSPC:
            reason = "there is not that much"
        size = f"{size_bytes} bytes"
        if size_bytes >= MIB:
            size = f"{size_bytes / MIB:.0f} MiB"
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


def checked(call: str, answer: tuple[Any, ...]) -> Any:
    """Return the value of a CUDA call of cuda-bindings; `call` says what it was about.

    Raises RuntimeError: the call failed. The message has `call` and CUDA's name for the error.
    """
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"{call}: {getattr(error, 'name', error)}")
    return values[0] if values else None


class GpuMemory:
    """Memory from cudaMalloc.

    torch may map its own memory for peers in another way, and its segments hold several tensors:
    neither can be given to another process by CUDA IPC or measured as peer access.
    """

    def __init__(self, size_bytes: int, device: torch.device, name: str = "") -> None:
        """Allocate on the current GPU, which is `device`; `name` is its name in messages.

        Raises RuntimeError: there is not that much memory.
        """
        self._name = name or str(device)
        call = f"cudaMalloc of {size_bytes} bytes on {self._name}"
        self.address = int(checked(call, runtime.cudaMalloc(max(1, size_bytes))))
        # torch.as_tensor reads this (CUDA array interface, version 3, of numba's documentation).
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        self.bytes: Tensor = torch.as_tensor(self, device=device)  # (size_bytes,) uint8

    def free(self) -> None:
        """Return the memory to CUDA. Nothing may use it any more."""
        checked(f"cudaFree on {self._name}", runtime.cudaFree(self.address))
