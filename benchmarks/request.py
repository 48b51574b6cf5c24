"""Requests that only their benchmark can refuse, before any process starts.

If options constrain each other, or depend on the number of ranks or on the GPUs' memory, a benchmark checks them in a
function `refuse(cell, memory_bytes)` that needs no torch. Its YAML names the function: `code: {refuse: dotted.name}`.
"""

from conf import groups
from conf.cell import Cell
from conf.targets import called, locate_without_torch


def refuse(cell: Cell, memory_bytes: int | None) -> None:
    """Refuse a cell that its benchmark cannot measure; `memory_bytes` is that of the machine's smallest GPU, None if unknown.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    choice = groups.choice("benchmark", cell.benchmark["name"])
    code = choice.code
    if "derive" in code and not choice.is_ours:
        locate_without_torch(code["derive"])  # a file of the user is tried before its cell is measured, not after
    if "refuse" in code:
        called(code["refuse"], cell, memory_bytes)
