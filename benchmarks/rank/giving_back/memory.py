"""Memory that a rank holds for its tensors, and the caches that torch keeps: measured, and dropped.

Calls of CUDA stand alone, each with its page of torch's documentation or its place in torch; a CPU worker makes none of them.
"""

import contextlib
import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.rank.giving_back.graphs import end_compile_workers, has_compiled


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors that are alive: on a GPU what torch's allocator counts, else those that Python knows."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _bytes_of_cpu_tensors()


def reserved_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU that torch's allocator holds (torch.cuda.memory_reserved); None on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def used_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU that anything holds, other processes too (torch.cuda.mem_get_info); None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def pinned_bytes(device: torch.device) -> int | None:
    """Return the bytes of page-locked memory that torch's allocator holds; None on a CPU, and where torch does not tell."""
    if device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def drop_caches(device: torch.device, keep_compiled: bool) -> None:
    """Give back what torch keeps for later: garbage, cached blocks, workspaces, graphs, threads and processes that wait."""
    torch.clear_autocast_cache()
    if not keep_compiled and has_compiled():  # else it would import the compiler, which takes seconds
        torch.compiler.reset()
    end_compile_workers()
    gc.collect()
    if device.type == "cuda":
        _drop_gpu_caches(device)
    _end_openmp_threads()
    _return_free_memory()


def _drop_gpu_caches(device: torch.device) -> None:
    """Give back cuBLAS' workspaces (as torch.cuda.graphs does), free blocks of the GPU, and free page-locked blocks."""
    torch.cuda.synchronize(device)
    private: Any = torch._C
    for name in ("_cuda_clearCublasWorkspaces", "_host_emptyCache"):
        getattr(private, name, lambda: None)()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def _bytes_of_cpu_tensors() -> int:
    """Return the bytes of the storages of all tensors that Python's garbage collection knows, each storage once."""
    storages: dict[int, int] = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # what the compiler traces with has no memory
                storage = one.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _end_openmp_threads() -> None:
    """End OpenMP's idle threads of the calling thread; it starts others when they are needed (OpenMP 5.0, 3.2.44)."""
    with Path("/proc/self/maps").open(errors="replace") as maps:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line}
    for path in loaded:
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            pause = getattr(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW), "omp_pause_resource_all", None)
            if pause is not None:
                pause(2)  # omp_pause_hard


def _return_free_memory() -> None:
    """Return free memory of the C library to Linux, so that what is left is what is held (malloc_trim of glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
