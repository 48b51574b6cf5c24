"""What torch does not offer of CUDA: copies between raw addresses, flags in host memory that a stream writes and waits for,
page-locking of memory that is there already, and GPU memory that another process can address (CUDA IPC).
"""

import ctypes
from typing import Any

import torch
from cuda.bindings import driver, runtime
from torch import Tensor

from trainers.kvstore.shared_regions import HANDLE_BYTES

MAPPED_AND_PORTABLE = 3
LAZY_PEER_ACCESS = 1
ANY_KIND = runtime.cudaMemcpyKind.cudaMemcpyDefault
AT_LEAST = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a CUDA call. Raises RuntimeError with CUDA's name for what went wrong."""
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"CUDA: {getattr(error, 'name', error)}")
    return values[0] if values else None


def page_lock(address: int, size_bytes: int) -> None:
    """Let every GPU read and write host memory directly."""
    _checked(runtime.cudaHostRegister(address, size_bytes, MAPPED_AND_PORTABLE))


def device_address(address: int) -> int:
    """Where a GPU sees page-locked host memory."""
    return int(_checked(runtime.cudaHostGetDevicePointer(address, 0)))


class Lane:
    """A stream with copies between any addresses that CUDA knows, and flags."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._runtime, self._driver = runtime.cudaStream_t(stream.cuda_stream), driver.CUstream(stream.cuda_stream)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Copy in the order of the stream."""
        _checked(runtime.cudaMemcpyAsync(target, source, size_bytes, ANY_KIND, self._runtime))

    def write_flag(self, address: int, value: int) -> None:
        """Set a flag when the stream gets here; what it wrote before is visible with it."""
        _checked(driver.cuStreamWriteValue32(self._driver, address, value, 0))

    def wait_flag(self, address: int, value: int) -> None:
        """Let the stream go on once a flag is at least `value`. The host does not wait."""
        _checked(driver.cuStreamWaitValue32(self._driver, address, value, AT_LEAST))


class Exported:
    """GPU memory of its own allocation, as uint8, that another process can address."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.address = int(_checked(runtime.cudaMalloc(max(1, size_bytes))))
        # What torch.as_tensor reads (numba's CUDA array interface, version 3).
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }
        self.tensor: Tensor = torch.as_tensor(self, device=device)

    def handle(self) -> bytes:
        """What another process passes to `imported`."""
        handle = _checked(runtime.cudaIpcGetMemHandle(self.address))
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def imported(handle: bytes) -> int:
    """The address, in this process, of another process's exported memory."""
    opaque = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(opaque.getPtr(), handle, HANDLE_BYTES)
    return int(_checked(runtime.cudaIpcOpenMemHandle(opaque, LAZY_PEER_ACCESS)))
