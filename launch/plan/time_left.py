"""Which cells still fit into the job of Slurm that this process runs in."""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.record import Record
from conf.schema import Engine
from launch.engines import slurm
from launch.plan.order import PlannedCell
from launch.plan.time_estimate import duration, estimates

# Kept for the report and the store, and for a cell that takes longer than estimated; a submitted job is asked to stop then.
RESERVE_S = 60.0


class TimeLeft:
    """Tells of each cell whether it fits, and says the first time that one does not."""

    def __init__(
        self, engine: Engine, surrounding: Mapping[str, str], note: Callable[[str], None]
    ) -> None:
        """`note` prints a sentence for the user. Only engine=slurm asks Slurm."""
        self._surrounding, self._note = (surrounding if engine.name == "slurm" else {}), note
        self.too_short = False  # for some cell

    def fits(self, cell: PlannedCell, known: Sequence[Record]) -> bool:
        """Return whether a cell can end before the job does. `known` are records of the same study."""
        if (left_s := slurm.time_left_s(self._surrounding)) is None:
            return True
        needed_s = estimates([cell], known)[0].seconds
        if needed_s + RESERVE_S <= left_s:
            return True
        if not self.too_short:
            self._note(
                f"{cell.name} is not started, nor any other cell that does not fit: it takes about {duration(needed_s)}, the job "
                f"has {duration(max(0.0, left_s))} left, and {RESERVE_S:.0f} s of that are kept for the report; the same "
                "command in another job continues from here (exit status 130)"
            )
        self.too_short = True
        return False
