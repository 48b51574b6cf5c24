"""What `benchmark=p2p` refuses: buffers that do not fit, sizes that are no multiple of 16 bytes, kernels without a GPU."""

from benchmarks.request import Room
from conf.cell import Cell
from conf.options import Refused
from conf.process_env import SHARED_MEMORY_FOLDER

BUFFERS = 2  # of one GPU or CPU worker: one to send, one that others write into; a worker's second is shared memory
ROOM_BYTES = 2 << 30  # left free on a GPU, for CUDA itself and to compare what arrived
SHM_ROOM_BYTES = 1 << 20  # left free in /dev/shm, for other files
GRAIN_BYTES = 16  # that a thread of the copy kernel moves at once


RATE = {"cpu": 1e9, "cuda": 50e9}  # bytes a second
MATRICES = 4  # one way and both ways, with and without peer access


def seconds(cell: Cell) -> float:
    """Return how long the cell measures, by a rule of thumb."""
    options, ranks = cell.benchmark, cell.world_size
    matrices = MATRICES * int(options["repeats"]) * (2 if options["concurrent"] else 1)
    return (
        matrices
        * ranks
        * ranks
        * int(options["iterations"])
        * int(options["bytes"])
        / RATE[cell.device]
    )


def refuse(cell: Cell, room: Room) -> None:
    """Refuse a cell that cannot be measured.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    asked = cell.benchmark
    for name in ("bytes", "latency_bytes"):
        if asked[name] % GRAIN_BYTES:
            raise Refused(
                f"benchmark.{name}={asked[name]}: accepted are multiples of {GRAIN_BYTES}"
            )
    if cell.device == "cpu" and asked["copy"] == "sm":
        raise Refused("benchmark.copy=sm: needs a GPU; accepted on CPU workers is engine")
    limits = {}
    if cell.device == "cuda" and room.gpu_bytes is not None:
        limits["the smallest GPU's memory"] = (room.gpu_bytes - ROOM_BYTES) // BUFFERS
    if cell.device == "cpu" and room.host_bytes is not None:
        limits["the host's free memory"] = room.host_bytes // (BUFFERS * cell.world_size)
    if cell.device == "cpu" and room.shared_bytes is not None:
        limits[str(SHARED_MEMORY_FOLDER)] = (room.shared_bytes - SHM_ROOM_BYTES) // cell.world_size
    for where, most in limits.items():
        if asked["bytes"] > most:
            whole = max(0, most // GRAIN_BYTES * GRAIN_BYTES)
            raise Refused(
                f"benchmark.bytes={asked['bytes']}: the buffers do not fit {where}; accepted are at most {whole}"
            )
