"""The order in which cells run, and which of the listed cells run at all."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.findings.labels import BETWEEN
from conf.cell import Cell
from launch.plan.second_runs import with_second_runs


@dataclass(frozen=True)
class PlannedCell:
    """A cell in its place in the order."""

    cell: Cell
    drift: bool = False  # the first cell once more, at the end of a repeated list

    @property
    def name(self) -> str:
        """The name of the run, for people: the cell's, and which of several measurements of it this is."""
        return BETWEEN.join([self.cell.name, *self.marks])

    @property
    def marks(self) -> list[str]:
        """Which of several measurements of the cell it is, for people; empty for the first."""
        return self.cell.marks(self.drift)


def without_settings_alone(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells without one-GPU cells that differ from another only in NCCL's settings: one GPU does not use NCCL."""
    plain = {dataclasses.replace(cell, nccl={}).key for cell in cells if cell.world_size == 1 and not cell.nccl}
    return [
        cell
        for cell in cells
        if not (cell.world_size == 1 and cell.nccl and dataclasses.replace(cell, nccl={}).key in plain)
    ]


def one_of_each_set(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells; of CPU workers' that differ in NCCL's settings only, which have no effect there, one: the plainest."""
    chosen: dict[str, Cell] = {}
    for cell in cells:
        alike = dataclasses.replace(cell, nccl={}).key if cell.device == "cpu" else cell.key
        if alike not in chosen or len(cell.nccl) < len(chosen[alike].nccl):
            chosen[alike] = cell
    return list(chosen.values())


def once_each(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells, of equal ones only one, in the place of the first."""
    return list({cell.key: cell for cell in cells}.values())


def ordered(cells: Sequence[Cell], repeats: int, seed: int, twice: Sequence[Cell] = ()) -> list[PlannedCell]:
    """Return the cells in the order in which they run; those in `twice` a second time, not directly after the first.

    One repeat: baselines first, so that an interrupted sweep has them and the efficiency of a cell shows at once;
    otherwise as listed. Several repeats: each repeat is shuffled, so that drift falls on all cells alike; only the first
    has its baselines first. At the end the first cell runs again; its repeat is the number of repeats with a minus sign.
    """
    if repeats == 1:
        return [PlannedCell(cell) for cell in with_second_runs(sorted(cells, key=_baselines_first), twice, seed)]
    order: list[PlannedCell] = []
    for repeat in range(repeats):
        turn = [dataclasses.replace(cell, repeat=repeat) for cell in cells]
        random.Random(f"{seed}/{repeat}").shuffle(turn)
        if repeat == 0:
            turn.sort(key=_baselines_first)  # stable: the rest stays shuffled
        order += [PlannedCell(cell) for cell in turn]
    return [*order, PlannedCell(dataclasses.replace(order[0].cell, repeat=-repeats), drift=True)]


def _baselines_first(cell: Cell) -> tuple[bool, bool, int]:
    """Return a sort key: one-GPU cells first, then those on one host, then cells with fewer NCCL settings."""
    return cell.world_size > 1, len(cell.hosts) > 1, len(cell.nccl)
