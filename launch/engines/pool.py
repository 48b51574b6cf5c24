"""Which cell may go on in the processes that have measured another one: one with the same devices and the same environment."""

from collections.abc import Mapping
from dataclasses import dataclass

from conf.cell import Cell
from conf.variables import READ_AT_EACH_COMMUNICATOR, TOKEN
from launch.engines.compile_caches import INDUCTOR, TRITON

# NCCL_CONF_FILE is empty, one in each cell's own folder, so that nothing of the user's is read. The last two are read at each
# compilation.
MAY_DIFFER = (TOKEN, *READ_AT_EACH_COMMUNICATOR, "NCCL_CONF_FILE", INDUCTOR, TRITON)


@dataclass(frozen=True)
class Needs:
    """What two cells must have in common to be measured by the same processes."""

    device: str
    places: tuple[object, ...]
    environment: frozenset[tuple[str, str]]

    @staticmethod
    def of(cell: Cell, environment: Mapping[str, str]) -> "Needs":
        """Return those of a cell in an environment."""
        kept = frozenset((name, value) for name, value in environment.items() if name not in MAY_DIFFER)
        return Needs(cell.device, tuple(cell.places), kept)
