"""The grid that `benchmark=jacobi` solves, and the requests that it cannot measure. No torch."""

from benchmarks.request import Room, refuse_too_large, refuse_too_little_shared
from conf.cell import Cell
from conf.options import Refused

EXCHANGES = {"cuda": ("peer", "host", "nccl"), "cpu": ("host",)}
# A row in memory has a multiple of this many elements: it starts on a cache line and holds whole
# tiles.
PITCH = {"cuda": 512, "cpu": 1}
ELEMENT_BYTES = 4
OWN_BYTES = {"cuda": 2 << 30, "cpu": 1 << 28}  # room for what is no grid
FLAGS_BYTES = 4096  # of shared memory, before the rows
POINTS_PER_SECOND = {"cpu": 1e8, "cuda": 1e11}
SOLVES_MORE = 3  # the grid is solved once more alone, and to compare


def seconds(cell: Cell) -> float:
    """Return how long the cell measures, by a rule of thumb."""
    options = cell.benchmark
    points = int(options["nx"]) * int(options["ny"]) * int(options["niter"])
    return (int(options["solves"]) + SOLVES_MORE) * points / POINTS_PER_SECOND[cell.device]


def pitch(columns: int, device: str) -> int:
    """Return the elements from the start of one row to the start of the next."""
    unit = PITCH[device]
    return -(-columns // unit) * unit


def shared_bytes(ranks: int, row_bytes: int) -> int:
    """Return the shared memory of flags and rows: of both buffers, the rows to both neighbours."""
    return FLAGS_BYTES + 2 * ranks * 2 * row_bytes


def refuse(cell: Cell, room: Room) -> None:
    """Refuse a cell that cannot be measured. Raises Refused."""
    options = cell.benchmark
    nx, ny, exchange = options["nx"], options["ny"], options["exchange"]
    ranks, device = cell.world_size, cell.device
    if ny - 2 < ranks:
        raise Refused(
            f"benchmark.ny={ny}: too few rows for {ranks} ranks; expected at least {ranks + 2} "
            "(ny is nx where it is not set)"
        )
    if exchange not in EXCHANGES[device]:
        where = "CPU workers" if device == "cpu" else "GPUs"
        possible = " or ".join(EXCHANGES[device])
        raise Refused(f"benchmark.exchange={exchange}: {where} take benchmark.exchange={possible}")
    # Rank 0 holds the whole grid twice, the solution to compare with, and its own rows twice.
    rows = 3 * ny + 2 * (-(-(ny - 2) // ranks) + 2)
    row_bytes = pitch(nx, device) * ELEMENT_BYTES
    needed = rows * row_bytes + OWN_BYTES[device]
    refuse_too_large(cell, needed, f"benchmark.nx={nx} benchmark.ny={ny}", room)
    if ranks > 1 and exchange in ("host", "peer"):
        if exchange == "peer":  # its rows go from GPU to GPU
            row_bytes = 0
        needed = shared_bytes(ranks, row_bytes)
        who = f"benchmark.exchange={exchange} benchmark.nx={nx}: {cell.name}"
        refuse_too_little_shared(needed, room.shared_bytes, who, "fewer columns")
