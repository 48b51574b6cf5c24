"""The grid that `benchmark=jacobi` solves, and the requests that it cannot measure. Without torch."""

from benchmarks.memory import refuse_too_large
from benchmarks.request import Room, refuse_too_little_shared
from conf.cell import Cell
from conf.options import Refused

KINDS = {"cuda": ("peer", "host", "nccl"), "cpu": ("host", "gloo")}
# A row in memory has a multiple of this many elements, so that every row starts on a cache line and holds whole tiles.
PITCH = {"cuda": 512, "cpu": 1}
ELEMENT_BYTES = 4
OWN_BYTES = {"cuda": 2 << 30, "cpu": 1 << 28}  # room for what is no grid
FLAGS_BYTES = 4096  # of shared memory, before the rows


RATE = {"cpu": 1e8, "cuda": 1e11}  # points of the grid a second
SOLVES_MORE = 3  # the grid is solved once more alone, and to compare


def seconds(cell: Cell) -> float:
    """Return how long the cell measures, by a rule of thumb."""
    nx, ny, niter, solves = (int(cell.benchmark[name]) for name in ("nx", "ny", "niter", "solves"))
    return (solves + SOLVES_MORE) * nx * ny * niter / RATE[cell.device]


def pitch(columns: int, device: str) -> int:
    """Return the elements from the start of one row to the start of the next."""
    unit = PITCH[device]
    return -(-columns // unit) * unit


def shared_bytes(ranks: int, row_bytes: int) -> int:
    """Return the shared memory in which ranks exchange flags and rows: of both buffers, the rows to both neighbours."""
    return FLAGS_BYTES + 2 * ranks * 2 * row_bytes


def refuse(cell: Cell, room: Room) -> None:
    """Refuse a cell that cannot be measured.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    nx, ny, exchange = (cell.benchmark[name] for name in ("nx", "ny", "exchange"))
    if ny - 2 < cell.world_size:
        raise Refused(
            f"benchmark.ny={ny}: has {ny - 2} inner rows for {cell.world_size} ranks; accepted is at least {cell.world_size + 2}"
            + ("; auto is benchmark.nx" if nx == ny else "")
        )
    if exchange not in KINDS[cell.device]:
        where = "GPUs" if cell.device == "cuda" else "CPU workers"
        raise Refused(
            f"benchmark.exchange={exchange}: accepted on {where} are {' and '.join(KINDS[cell.device])}"
        )
    # Rank 0 holds the whole grid twice, the solution to compare with, and its own rows twice.
    rows = 3 * ny + 2 * (-(-(ny - 2) // cell.world_size) + 2)
    needed = rows * pitch(nx, cell.device) * ELEMENT_BYTES + OWN_BYTES[cell.device]
    refuse_too_large(cell, needed, f"benchmark.nx={nx} benchmark.ny={ny}", room)
    row_bytes = {"host": pitch(nx, cell.device) * ELEMENT_BYTES, "peer": 0}.get(exchange)
    if row_bytes is not None and cell.world_size > 1:
        who = f"benchmark.exchange={exchange} benchmark.nx={nx}: {cell.name}"
        refuse_too_little_shared(
            shared_bytes(cell.world_size, row_bytes), room.shared_bytes, who, "fewer columns"
        )
