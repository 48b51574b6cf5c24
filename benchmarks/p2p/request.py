"""What `benchmark=p2p` refuses: buffers that do not fit, odd sizes, kernels without a GPU."""

from benchmarks.request import Room
from conf.cell import Cell
from conf.host import SHARED_MEMORY_FOLDER
from conf.options import Refused

# Of one GPU or CPU worker: one to send, one that others write into (a worker's is shared memory).
BUFFERS = 2
ROOM_BYTES = 2 << 30  # left free on a GPU, for CUDA itself and to compare what arrived
SHM_ROOM_BYTES = 1 << 20  # left free in /dev/shm, for other files
GRAIN_BYTES = 16  # that a thread of the copy kernel moves at once
BYTES_PER_SECOND = {"cpu": 1e9, "cuda": 50e9}
MATRICES = 4  # one way and both ways, with and without peer access


def seconds(cell: Cell) -> float:
    """Return how long the cell measures, by a rule of thumb."""
    options, ranks = cell.benchmark, cell.world_size
    matrices = MATRICES * int(options["repeats"]) * (1 + bool(options["concurrent"]))
    copies = matrices * ranks * ranks * int(options["iterations"])
    return copies * int(options["bytes"]) / BYTES_PER_SECOND[cell.device]


def refuse(cell: Cell, room: Room) -> None:
    """Refuse a cell that cannot be measured. Raises Refused."""
    options, size = cell.benchmark, cell.benchmark["bytes"]
    for name in ("bytes", "latency_bytes"):
        if options[name] % GRAIN_BYTES:
            accepted = f"expected multiples of {GRAIN_BYTES}"
            raise Refused(f"benchmark.{name}={options[name]}: {accepted}")
    if cell.device == "cpu" and options["copy"] == "sm":
        raise Refused("benchmark.copy=sm: needs a GPU; CPU workers take benchmark.copy=engine")
    limits = {}
    if cell.device == "cuda" and room.gpu_bytes is not None:
        limits["the smallest GPU's memory"] = (room.gpu_bytes - ROOM_BYTES) // BUFFERS
    if cell.device == "cpu" and room.host_bytes is not None:
        limits["the host's free memory"] = room.host_bytes // (BUFFERS * cell.world_size)
    if cell.device == "cpu" and room.shared_bytes is not None:
        limits[str(SHARED_MEMORY_FOLDER)] = (room.shared_bytes - SHM_ROOM_BYTES) // cell.world_size
    for where, most in limits.items():
        if size > most:
            whole = max(0, most // GRAIN_BYTES * GRAIN_BYTES)
            raise Refused(
                f"benchmark.bytes={size}: the buffers do not fit {where}; expected at most {whole}"
            )
