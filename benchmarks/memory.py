"""Whether what a cell allocates fits, asked before any process starts."""

import os

from conf.cell import Cell
from conf.options import Refused


def refuse_too_large(cell: Cell, needed_bytes: int, field: str, memory_bytes: int | None) -> None:
    """Refuse a cell whose ranks need more memory than there is; `field` is what was asked, as 'name=value'.

    `needed_bytes` are those of one rank, `memory_bytes` those of the smallest GPU (None: unknown). CPU workers share the
    host's memory.

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
