"""Refuse cells whose memory does not fit, before any process starts."""

from benchmarks.request import Room
from conf.cell import Cell
from conf.options import Refused


def refuse_too_large(cell: Cell, needed_bytes: int, field: str, room: Room) -> None:
    """Refuse a cell whose ranks need more memory than there is; `field` causes it: 'name=value'.

    `needed_bytes` is what one rank needs. CPU workers share the free memory of their host equally.

    Raises:
        Refused: names the field, what each rank needs and what there is.
    """
    available, ranks, limit = room.gpu_bytes, 1, "the smallest GPU has"
    if cell.device == "cpu":
        available, ranks = room.host_bytes, len(cell.gpus)  # on each host
        limit = f"a share of the host's free memory among {ranks} is"
    if available is None or needed_bytes <= available // ranks:
        return
    gib = 2**30
    raise Refused(
        f"{field}: each rank needs {needed_bytes / gib:.1f} GiB, "
        f"{limit} {available // ranks / gib:.1f} GiB; expected less"
    )
