"""The cells that a sweep leaves for its end: other launchers measure them, or one of their hosts
was lost."""

import time
from collections.abc import Callable, Sequence

from analysis.text import count
from conf.cell import Cell
from launch.display.screen import Screen
from launch.engines.engine import CellEngine
from launch.study.study import StudyFolder

HELD_POLL_S = 1.0  # between two looks at the cells that other launchers hold


class DeferredCells:
    """Places of such cells in the order of a sweep."""

    def __init__(self, cells: Sequence[Cell], note: Callable[[str], None]) -> None:
        """`note` prints a sentence for the user."""
        self._cells, self._note = cells, note
        self.held: list[int] = []  # other launchers measure them
        self.lost: list[int] = []  # one of their hosts is lost

    def wait_for_others(
        self,
        study: StudyFolder,
        look: Callable[[], None],
        may_go_on: Callable[[], bool],
        measure: Callable[[int], None],
    ) -> None:
        """Wait for the cells that others hold: take over what they finish, and measure what they do
        not.

        `look` closes what died; `measure` tries a cell, which may be held again.
        """
        for index in self.held:
            cell = self._cells[index]
            self._note(f"waiting for {cell.name}: {study.who_holds(cell)} (Ctrl-C leaves)")
        while self.held and may_go_on():
            time.sleep(HELD_POLL_S)
            look()
            held, self.held = self.held, []
            for index in held:
                if may_go_on():
                    measure(index)
                else:
                    self.held.append(index)

    def try_lost_hosts(
        self, engine: CellEngine, stopping: Callable[[], bool], measure: Callable[[int], None]
    ) -> None:
        """Measure the cells whose host was lost, if it answers again."""
        if not self.lost or stopping():
            return
        lost, self.lost = self.lost, []
        self._note(
            f"{count(len(lost), 'cell')} left, whose host was lost: in about half a minute it is "
            "tried once more"
        )
        engine.seek([self._cells[index] for index in lost], stopping)
        for index in lost:
            measure(index)

    def settle(self, screen: Screen, engine: CellEngine) -> None:
        """Show which cells were not measured, and say why."""
        for index in self.held:
            screen.settle(index, "measured elsewhere", None)
        for index in self.lost:
            screen.settle(index, "skipped: node_lost", None)
            cell = self._cells[index]
            self._note(f"{cell.name} was not measured: {engine.lost(cell)}")
