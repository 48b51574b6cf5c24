"""Which cores, threads and memory of the host a process uses, and where its GPU is."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from conf.host import usable_cores

# How many cores this process may use as it starts, before it keeps to those near its GPU.
CORES = usable_cores()
# Parameters of glibc's mallopt(3) and the largest value that it takes for the first one.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 << 20
NEVER = -1
PR_SET_TIMERSLACK = 29  # linux/prctl.h
TIMER_SLACK_NS = 1000  # the default is 50,000: longer than the pauses of those who poll flags


def bus_id(device: torch.device) -> str | None:
    """Return a GPU's PCI bus id as Linux writes it, 0000:65:00.0; None for a CPU."""
    if device.type != "cuda":
        return None
    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def stay_near(device: torch.device) -> None:
    """Keep this thread, and those that it starts later, to the cores near its GPU.

    It does nothing where the kernel does not know them. torchrun does the same from torch 2.9 on,
    before a rank starts, if there are as many ranks as GPUs.
    """
    with contextlib.suppress(OSError, ValueError):
        cpulist = Path(f"/sys/bus/pci/devices/{bus_id(device)}/local_cpulist")
        near: set[int] = set()
        for part in cpulist.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            near.update(range(int(first), int(last or first) + 1))
        near &= os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)


def keep_freed_memory() -> None:
    """Have the C library keep memory that is freed, as torch's allocator does on a GPU.

    By default freed tensors go back to Linux in some steps and not in others, as glibc adapts its
    limits to what it has seen. A step that gets its memory anew meets a page fault for every 4 KiB:
    two windows of one cell would differ by that alone. Single tensors above 32 MiB still come from
    Linux each time (mallopt(3), M_MMAP_THRESHOLD). Without glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(TRIM_THRESHOLD, NEVER)


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Run the calling thread's operators on so many threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sleep_precisely() -> None:
    """Have this thread's sleeps end within a microsecond of their time."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)
