"""Refuse cells whose memory does not fit, before any process starts."""

from benchmarks.request import Room
from conf.cell import Cell
from conf.options import Refused


def refuse_too_large(cell: Cell, needed_bytes: int, field: str, room: Room) -> None:
    """Refuse a cell whose ranks need more memory than there is; `field` is the option that causes it, as 'name=value'.

    `needed_bytes` is what one rank needs. CPU workers share the free memory of their host equally.

    Raises:
        Refused: names the field, what each rank needs and what there is.
    """
    have, place = room.gpu_bytes, "the smallest GPU has"
    if cell.device == "cpu":
        ranks = len(cell.gpus)  # on each host
        have = None if room.host_bytes is None else room.host_bytes // ranks
        place = f"a share of the host's free memory among {ranks} is"
    if have is not None and needed_bytes > have:
        gib = 2**30
        raise Refused(
            f"{field}: each rank needs {needed_bytes / gib:.1f} GiB, {place} {have / gib:.1f} GiB; accepted is less"
        )
