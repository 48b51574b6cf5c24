"""The grid that `benchmark=jacobi` solves, and requests that it cannot measure."""

from benchmarks.memory import refuse_too_large
from conf.cell import Cell
from conf.options import Refused

KINDS = {"cuda": ("peer", "host", "nccl"), "cpu": ("host", "gloo")}
# Columns in memory are a multiple of these, so that every row starts on a cache line and whole tiles fit into it.
PITCH = {"cuda": 512, "cpu": 1}
ELEMENT_BYTES = 4
OWN_BYTES = {"cuda": 2 << 30, "cpu": 1 << 28}  # beside the grids


def pitch(columns: int, device: str) -> int:
    """Elements from one row to the next in memory."""
    unit = PITCH[device]
    return -(-columns // unit) * unit


def refuse(cell: Cell, memory_bytes: int | None) -> None:
    """Refuse what cannot be measured. Raises Refused."""
    nx, ny, exchange = (cell.benchmark[name] for name in ("nx", "ny", "exchange"))
    if ny - 2 < cell.world_size:
        raise Refused(
            f"benchmark.ny={cell.benchmark['ny']}: has {ny - 2} inner rows for {cell.world_size} ranks; accepted is at least "
            f"{cell.world_size + 2}"
        )
    if exchange not in KINDS[cell.device]:
        where = "GPUs" if cell.device == "cuda" else "CPU workers"
        raise Refused(f"benchmark.exchange={exchange}: accepted on {where} are {' and '.join(KINDS[cell.device])}")
    # Rank 0 has the whole grid twice, the solution to compare with, and twice its own rows.
    rows = 3 * ny + 2 * (-(-(ny - 2) // cell.world_size) + 2)
    needed = rows * pitch(nx, cell.device) * ELEMENT_BYTES + OWN_BYTES[cell.device]
    refuse_too_large(cell, needed, f"benchmark.nx={nx} benchmark.ny={ny}", memory_bytes)
