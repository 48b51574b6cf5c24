"""Memory that several processes of a cell share: files in /dev/shm, and GPU memory (CUDA IPC).

To use it on a GPU: copies between raw addresses, flags in host memory that a stream writes or waits
for, page-locking of existing memory.

One process creates a file, the others attach to it, and it is unlinked once all have mapped it: so
nothing is left behind, however they end. What a cell leaves if it ends before that is removed by
its token (benchmarks.agent.processes).
"""

import ctypes
import errno
import mmap
import os
import re
import secrets
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, runtime
from torch import Tensor

from conf.host import SHARED_MEMORY_FOLDER as FOLDER
from conf.host import TOKEN, shared_memory_prefix

MIB = 1 << 20
HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t


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


# cuda_runtime_api.h: cudaHostRegisterPortable | cudaHostRegisterMapped.
PORTABLE_AND_MAPPED = 3
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
ANY_KIND = runtime.cudaMemcpyKind.cudaMemcpyDefault
AT_LEAST = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)


def page_lock(address: int, size_bytes: int) -> None:
    """Let every GPU read and write this host memory directly."""
    answer = runtime.cudaHostRegister(address, size_bytes, PORTABLE_AND_MAPPED)
    checked(f"cudaHostRegister of {size_bytes} bytes", answer)


def device_address(address: int) -> int:
    """Return the address at which GPUs see page-locked host memory."""
    return int(checked("cudaHostGetDevicePointer", runtime.cudaHostGetDevicePointer(address, 0)))


class CopyStream:
    """A stream with copies between any two addresses that CUDA knows, and with flags (int32)."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._runtime = runtime.cudaStream_t(stream.cuda_stream)
        self._driver = driver.CUstream(stream.cuda_stream)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Enqueue a copy."""
        answer = runtime.cudaMemcpyAsync(target, source, size_bytes, ANY_KIND, self._runtime)
        checked("cudaMemcpyAsync", answer)

    def write_flag(self, address: int, value: int) -> None:
        """Enqueue the writing of a flag. Who sees it also sees what the stream wrote before."""
        answer = driver.cuStreamWriteValue32(self._driver, address, value, 0)
        checked("cuStreamWriteValue32", answer)

    def wait_flag(self, address: int, value: int) -> None:
        """Make the stream, not the host, wait until a flag is at least `value`."""
        answer = driver.cuStreamWaitValue32(self._driver, address, value, AT_LEAST)
        checked("cuStreamWaitValue32", answer)


def exported(memory: GpuMemory) -> bytes:
    """Return what another process passes to `imported`."""
    handle = checked("cudaIpcGetMemHandle", runtime.cudaIpcGetMemHandle(memory.address))
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def imported(handle: bytes) -> int:
    """Return the address, in this process, of memory that another process has exported.

    Raises ValueError: the handle has another length.
    """
    if len(handle) != HANDLE_BYTES:
        length = len(handle)
        raise ValueError(f"a handle of GPU memory has {length} bytes; expected {HANDLE_BYTES}")
    opaque = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(opaque.getPtr(), handle, HANDLE_BYTES)
    answer = runtime.cudaIpcOpenMemHandle(opaque, LAZY_PEER_ACCESS)
    return int(checked("cudaIpcOpenMemHandle", answer))
