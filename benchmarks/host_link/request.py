"""What `benchmark=host_link` refuses: buffers that do not fit, or hold a part of a float32."""

from benchmarks.request import Room
from conf.cell import Cell
from conf.options import Refused

# Buffers of one rank. On a GPU: one for each direction. In the host's memory: at most one for each
# direction, pinned and pageable, and the third array of STREAM's sum.
GPU_BUFFERS, HOST_BUFFERS = 2, 5
ELEMENT_BYTES = 4  # the host's arrays are float32
BYTES_PER_SECOND = {"cpu": 3e9, "cuda": 10e9}
OPERATIONS = 20  # copies and sums, alone and at once


def seconds(cell: Cell) -> float:
    """Return how long the cell measures, by a rule of thumb."""
    copied = int(cell.benchmark["iterations"]) * int(cell.benchmark["bytes"])
    return OPERATIONS * copied / BYTES_PER_SECOND[cell.device]


def refuse(cell: Cell, room: Room) -> None:
    """Refuse a cell whose buffers do not fit the smallest GPU or the host, or cannot be summed.

    Raises Refused: names the field, the value and what is accepted.
    """
    size = cell.benchmark["bytes"]
    if size % ELEMENT_BYTES:
        raise Refused(f"benchmark.bytes={size}: expected multiples of {ELEMENT_BYTES}")
    limits = []
    if room.host_bytes is not None:
        host_most = room.host_bytes // (HOST_BUFFERS * cell.world_size)
        limits.append((host_most, "the host's free memory"))
    if cell.device == "cuda" and room.gpu_bytes is not None:
        limits.append((room.gpu_bytes // GPU_BUFFERS, "the smallest GPU's memory"))
    for most, where in sorted(limits):
        if size > most:
            raise Refused(
                f"benchmark.bytes={size}: the buffers of {cell.world_size} ranks do not fit "
                f"{where}; expected at most {most // ELEMENT_BYTES * ELEMENT_BYTES}"
            )
