"""CUDA operations that torch does not offer, for memory that processes share.

Copies between raw addresses, flags in host memory that a stream writes or waits for, page-locking
of existing memory, and GPU memory that another process can address (CUDA IPC).
"""

import ctypes

import torch
from cuda.bindings import driver, runtime

from trainers.kvstore.shared_memory import HANDLE_BYTES
from trainers.memory import GpuMemory, checked

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
