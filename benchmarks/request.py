"""What only a benchmark knows to be wrong with a cell that asks for it, found before any process starts.

A benchmark whose options must fit each other, the number of ranks or the GPUs' memory has, beside its YAML,
`benchmarks/NAME/request.py` with `refuse(cell, memory_bytes)`.
"""

import importlib
from pathlib import Path

from conf.cell import Cell

FOLDER = Path(__file__).parent


def refuse(cell: Cell, memory_bytes: int | None) -> None:
    """Refuse a cell that its benchmark cannot measure; `memory_bytes` is that of the machine's smallest GPU, None if unknown.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    name = cell.benchmark["name"]
    if (FOLDER / name / "request.py").exists():
        importlib.import_module(f"benchmarks.{name}.request").refuse(cell, memory_bytes)
