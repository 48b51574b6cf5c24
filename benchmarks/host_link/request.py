"""What `benchmark=host_link` refuses: buffers that do not fit, or that do not hold a whole number of float32."""

from benchmarks.request import Room
from conf.cell import Cell
from conf.options import Refused

# Buffers of one rank. On a GPU: one for each direction. In the host's memory: at most one for each direction, pinned and
# pageable, and the third array of STREAM's sum.
GPU_BUFFERS = 2
HOST_BUFFERS = 5
ELEMENT_BYTES = 4  # the host's arrays are float32


RATE = {"cpu": 3e9, "cuda": 10e9}  # bytes a second
COPIES = 20  # kinds of copies and sums, alone and at once


def seconds(cell: Cell) -> float:
    """Return how long the cell measures, by a rule of thumb."""
    return (
        COPIES
        * int(cell.benchmark["iterations"])
        * int(cell.benchmark["bytes"])
        / RATE[cell.device]
    )


def refuse(cell: Cell, room: Room) -> None:
    """Refuse a cell whose buffers do not fit the smallest GPU or the host, or cannot be summed.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    asked = cell.benchmark["bytes"]
    if asked % ELEMENT_BYTES:
        raise Refused(f"benchmark.bytes={asked}: accepted are multiples of {ELEMENT_BYTES}")
    limits = {}
    if room.host_bytes is not None:
        limits["the host's free memory"] = room.host_bytes // (HOST_BUFFERS * cell.world_size)
    if cell.device == "cuda" and room.gpu_bytes is not None:
        limits["the smallest GPU's memory"] = room.gpu_bytes // GPU_BUFFERS
    for where, most in sorted(limits.items(), key=lambda limit: limit[1]):
        if asked > most:
            raise Refused(
                f"benchmark.bytes={asked}: the buffers of {cell.world_size} ranks do not fit {where}; accepted are at most "
                f"{most // ELEMENT_BYTES * ELEMENT_BYTES}"
            )
