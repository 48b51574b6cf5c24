"""Calls of cuda-bindings that raise, and GPU memory outside torch's allocator."""

from typing import Any

import torch
from cuda.bindings import runtime
from torch import Tensor


def checked(what: str, answer: tuple[Any, ...]) -> Any:
    """Return the value of a CUDA call; `what` names the call and what it was about.

    Raises:
        RuntimeError: the call failed. The message has `what` and CUDA's name for the error.
    """
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"{what}: {getattr(error, 'name', error)}")
    return values[0] if values else None


class GpuMemory:
    """Memory from cudaMalloc.

    torch may map its own memory for peers in another way, and its segments hold several tensors: neither can be given to
    another process by CUDA IPC or measured as peer access.
    """

    def __init__(self, size_bytes: int, device: torch.device, name: str = "") -> None:
        """Allocate on the current GPU, which is `device`; `name` is the GPU's name in messages.

        Raises:
            RuntimeError: there is not that much memory.
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
