"""The order in which cells run, and which of the listed cells run at all."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count, groupby

from analysis.findings.labels import BETWEEN
from conf.cell import Cell
from launch.plan.pools import Stretch, with_pools
from launch.plan.second_runs import with_second_runs


class PoolPart(Enum):
    """The part of a cell in a pool of ranks; the value is for people."""

    ALONE = ""  # in new ranks, which end with it
    BEGINS = "new ranks"  # these measure the next cell too
    WARM = "warm"  # in the ranks of the cell before, which measure the next one too
    ENDS = "warm, for the last time"  # the pool's first cell once more: the ranks end with it
    LOT = "new ranks, at random"  # it could have been warm


@dataclass(frozen=True)
class PlannedCell:
    """A cell in its place in the order."""

    cell: Cell
    drift: bool = False  # the first cell once more, at the end of a repeated list
    part: PoolPart = PoolPart.ALONE
    round: int = 0  # cells that follow each other with the same number run at the same time; 0: alone

    @property
    def fresh(self) -> bool:
        """Whether it needs new ranks."""
        return self.part not in (PoolPart.WARM, PoolPart.ENDS)

    @property
    def stays(self) -> bool:
        """Whether the ranks may go on with another cell after it."""
        return self.part in (PoolPart.BEGINS, PoolPart.WARM)

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


def ordered(
    cells: Sequence[Cell],
    repeats: int,
    seed: int,
    twice: Sequence[Cell] = (),
    may_join: Callable[[Cell], bool] | None = None,
    calibrating: bool = False,
) -> list[PlannedCell]:
    """Return the cells in the order in which they run; those in `twice` a second time, not directly after the first.

    One repeat: baselines first, so that an interrupted sweep has them and the efficiency of a cell shows at once;
    otherwise as listed. Several repeats: each repeat is shuffled, so that drift falls on all cells alike; only the first
    has its baselines first. At the end the first cell runs again; its repeat is the number of repeats with a minus sign.
    `may_join` tells which cells may be in pools (launch.plan.pools); without it none is. A pool lies within one repeat.
    With `calibrating`, what a forecast of the others rests on comes first wherever baselines do.
    """
    first = _calibrating_first if calibrating else _baselines_first
    if repeats == 1:
        stretches = _stretches(sorted(cells, key=first), may_join, f"{seed}/0")
        return _flat(with_second_runs(stretches, twice, seed))
    order: list[PlannedCell] = []
    for repeat in range(repeats):
        turn = [dataclasses.replace(cell, repeat=repeat) for cell in cells]
        generator = random.Random(f"{seed}/{repeat}")
        generator.shuffle(turn)
        if repeat == 0:
            turn.sort(key=first)  # stable: the rest stays shuffled
        stretches = _stretches(turn, may_join, f"{seed}/{repeat}")
        if repeat and len(stretches) < len(turn):
            generator.shuffle(stretches)  # in the places of their first cells, large pools would come early
        order += _flat(stretches)
    return [*order, PlannedCell(dataclasses.replace(order[0].cell, repeat=-repeats), drift=True)]


def _stretches(cells: Sequence[Cell], may_join: Callable[[Cell], bool] | None, seed: str) -> list[Stretch]:
    return [Stretch((cell,)) for cell in cells] if may_join is None else with_pools(cells, may_join, seed)


def _flat(stretches: Sequence[Stretch]) -> list[PlannedCell]:
    """Return the cells of stretches in order, each with its part in its pool."""
    order: list[PlannedCell] = []
    for stretch in stretches:
        first, *others = stretch.cells
        if stretch.is_pool:
            order.append(PlannedCell(first, part=PoolPart.BEGINS))
            order += [PlannedCell(cell, part=PoolPart.WARM) for cell in others]
            order.append(PlannedCell(first.at_pool_end(), part=PoolPart.ENDS))
        else:
            order.append(PlannedCell(first, part=PoolPart.LOT if stretch.by_lot else PoolPart.ALONE))
    return order


def cold_and_warm(cells: Sequence[Cell], turns: int) -> list[PlannedCell]:
    """Return the order of a proof that warm ranks measure what new ones do: A B B A, in so many turns of each cell.

    A begins with new ranks and B goes on in them, so that every B is warm. The repeats of a turn are 4 × turn to 4 × turn + 3.
    """
    parts = (PoolPart.BEGINS, PoolPart.WARM, PoolPart.WARM, PoolPart.ALONE)
    return [
        PlannedCell(dataclasses.replace(cell, repeat=len(parts) * turn + place), part=part)
        for turn in range(turns)
        for cell in cells
        for place, part in enumerate(parts)
    ]


def side_by_side(order: Iterable[PlannedCell], machines: Mapping[str, str]) -> list[PlannedCell]:
    """Return an order in which cells of one rank that follow each other run at the same time, one on each machine.

    `machines` names the machine of each host; it is empty where that is not known, and such a host measures alone. So does a
    cell that reads data, which hosts may share, and one with a trace, which the launcher reads.
    """

    def may(one: PlannedCell) -> bool:
        cell = one.cell
        lone = cell.world_size == 1 and len(cell.every_host) == 1 and one.part is PoolPart.ALONE
        return lone and not cell.data and cell.profiler == "none" and bool(machines.get(cell.hosts[0]))

    numbers = count(1)
    found: list[PlannedCell] = []
    for can, stretch in groupby(order, may):
        waiting = list(stretch)
        while can and waiting:
            of_each: dict[str, PlannedCell] = {}
            for one in waiting:
                of_each.setdefault(machines[one.cell.hosts[0]], one)
            together = list(of_each.values())
            waiting = [one for one in waiting if one not in together]
            number = next(numbers) if len(together) > 1 else 0
            found += [dataclasses.replace(one, round=number) for one in together]
        found += waiting
    return found


def rounds(cells: Iterable[PlannedCell]) -> list[list[int]]:
    """Return the places of cells, those together that run at the same time."""
    together = groupby(enumerate(cells), lambda pair: (pair[1].round, 0 if pair[1].round else pair[0]))
    return [[place for place, _ in group] for _, group in together]


def _baselines_first(cell: Cell) -> tuple[bool, bool, int]:
    """Return a sort key: one-GPU cells first, then those on one host, then cells with fewer NCCL settings."""
    return cell.world_size > 1, len(cell.hosts) > 1, len(cell.nccl)


def _calibrating_first(cell: Cell) -> tuple[bool, bool, bool, int, bool, int]:
    """Return a sort key: as above, then links before training, few GPUs before many, and steps without exchange before others."""
    alone, one_host, settings = _baselines_first(cell)
    return alone, one_host, cell.trains, cell.world_size, cell.strategy["name"] != "none", settings
