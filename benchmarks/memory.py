"""Refuse cells whose memory does not fit, before any process starts."""

import os

from conf.cell import Cell
from conf.options import Refused


def refuse_too_large(cell: Cell, needed_bytes: int, field: str, memory_bytes: int | None) -> None:
    """Refuse a cell whose ranks need more memory than there is; `field` is the option that causes it, as 'name=value'.

    `needed_bytes` is what one rank needs. `memory_bytes` is what the smallest GPU has; None: unknown. CPU workers share the
    host's memory equally.

    Raises:
        Refused: names the field, what each rank needs and what there is.
    """
    if cell.device == "cpu":
        have: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // cell.world_size
        place = f"a share of the host's memory among {cell.world_size} is"
    else:
        have, place = memory_bytes, "the smallest GPU has"
    if have is not None and needed_bytes > have:
        gib = 2**30
        raise Refused(
            f"{field}: each rank needs {needed_bytes / gib:.1f} GiB, {place} {have / gib:.1f} GiB; accepted is less"
        )
