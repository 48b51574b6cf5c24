"""Where a GPU is in the machine, and how a process stays near it."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

# Of this process as it started, before it keeps to those near its GPU.
CORES = frozenset(os.sched_getaffinity(0))


def bus_id(device: torch.device) -> str | None:
    """The PCI bus id of a GPU as Linux writes it, 0000:65:00.0; None for a CPU."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def stay_near(device: torch.device) -> None:
    """Keep this thread, and those that it starts from now on, to the cores near its GPU, where the kernel knows them.

    torchrun does the same from torch 2.9 on, before a rank starts, where ranks and GPUs are as many.
    """
    with contextlib.suppress(OSError, ValueError):
        text = Path(f"/sys/bus/pci/devices/{bus_id(device)}/local_cpulist").read_text()
        ranges = [part.partition("-") for part in text.strip().split(",")]
        near = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
        if mine := near & os.sched_getaffinity(0):
            os.sched_setaffinity(0, mine)
