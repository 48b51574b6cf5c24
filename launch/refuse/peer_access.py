"""Refuse cells that need peer access between GPUs that have none, by what the driver says (NVML)."""

from itertools import combinations

from conf.cell import Cell
from conf.options import Refused
from launch.machine.devices import Machine

READ, WRITE = 0, 1  # NVML_P2P_CAPS_INDEX_…: nvidia-ml-py has a tuple where the first should be


def refuse_without_peers(cell: Cell, machine: Machine) -> None:
    """Refuse a cell that requires peer access (`benchmark.p2p=required`) where the driver says that a pair has none.

    A pair of which the driver says nothing passes: the cell asks CUDA again before it measures.

    Raises:
        Refused: names the pairs.
    """
    if machine.kind != "cuda" or cell.benchmark.get("p2p") != "required":
        return
    uuids = {device.id: device.uuid for device in machine.devices if device.uuid}
    without = [
        f"{a}-{b}"
        for a, b in combinations(sorted(cell.gpus), 2)
        if a in uuids and b in uuids and _refused(uuids[a], uuids[b])
    ]
    if without:
        raise Refused(
            f"benchmark.p2p=required: the driver gives GPUs {', '.join(without)} no peer access; accepted there are both, "
            "enabled and disabled"
        )


def _refused(a: str, b: str) -> bool:
    """Return whether the driver says that one of two GPUs may not read or write the other's memory."""
    import pynvml

    try:
        first, second = (pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in (a, b))
        answers = [
            pynvml.nvmlDeviceGetP2PStatus(one, other, what)
            for one, other in ((first, second), (second, first))
            for what in (READ, WRITE)
        ]
    except pynvml.NVMLError:
        return False
    return any(answer != pynvml.NVML_P2P_STATUS_OK for answer in answers)
