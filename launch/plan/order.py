"""The order in which cells run, which of the listed cells run at all, and which a second time for the noise floor (METHOD.md).

A second run is an A/A pair and costs one cell. A list with repeats has enough of them.
"""

import dataclasses
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

from analysis.study.names import BETWEEN
from analysis.study.noise_floor import Scatters, group_of_cell
from analysis.study.rates import primary_rate
from conf.cell import SECOND_RUN, Cell
from conf.options import Refused
from conf.schema import Config


@dataclass(frozen=True)
class PlannedCell:
    """A cell in its place in the order."""

    cell: Cell
    drift: bool = False  # the first cell once more, at the end of a repeated list
    round: int = (
        0  # cells that follow each other with the same number run at the same time; 0: alone
    )

    @property
    def name(self) -> str:
        """The name of the run, for people: the cell's, and which of several measurements of it this is."""
        return BETWEEN.join([self.cell.name, *self.run_suffixes])

    @property
    def run_suffixes(self) -> list[str]:
        """Which of several measurements of the cell it is, for people; empty for the first."""
        return self.cell.run_suffixes(self.drift)


def without_settings_alone(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells without one-GPU cells that differ from another only in NCCL's settings: one GPU does not use NCCL."""
    plain = {
        dataclasses.replace(cell, nccl={}).key
        for cell in cells
        if cell.world_size == 1 and not cell.nccl
    }
    return [
        cell
        for cell in cells
        if not (
            cell.world_size == 1 and cell.nccl and dataclasses.replace(cell, nccl={}).key in plain
        )
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
    calibrating: bool = False,
) -> list[PlannedCell]:
    """Return the cells in the order in which they run; those in `twice` a second time, not directly after the first.

    One repeat: baselines first, so that an interrupted sweep has them and the efficiency of a cell shows at once;
    otherwise as listed. Several repeats: each repeat is shuffled, so that drift falls on all cells alike; only the first
    has its baselines first. At the end the first cell runs again; its repeat is the number of repeats with a minus sign.
    With `calibrating`, what a forecast of the others rests on comes first wherever baselines do.
    """
    first = _calibrating_first if calibrating else _baselines_first
    if repeats == 1:
        return [
            PlannedCell(cell) for cell in insert_replicates(sorted(cells, key=first), twice, seed)
        ]
    order: list[PlannedCell] = []
    for repeat in range(repeats):
        turn = [dataclasses.replace(cell, repeat=repeat) for cell in cells]
        random.Random(f"{seed}/{repeat}").shuffle(turn)
        if repeat == 0:
            turn.sort(key=first)  # stable: the rest stays shuffled
        order += [PlannedCell(cell) for cell in turn]
    return [*order, PlannedCell(dataclasses.replace(order[0].cell, repeat=-repeats), drift=True)]


def parallel_rounds(order: Iterable[PlannedCell], machines: Mapping[str, str]) -> list[PlannedCell]:
    """Return an order in which cells of one rank that follow each other run at the same time, one on each machine.

    `machines` names the machine of each host; it is empty where that is not known, and such a host measures alone. So does a
    cell that reads data, which hosts may share, and one with a trace, which the launcher reads.
    """

    def may(one: PlannedCell) -> bool:
        cell = one.cell
        lone = cell.world_size == 1 and len(cell.every_host) == 1
        return (
            lone and not cell.data and cell.profiler == "none" and bool(machines.get(cell.hosts[0]))
        )

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
    together = groupby(
        enumerate(cells), lambda pair: (pair[1].round, 0 if pair[1].round else pair[0])
    )
    return [[place for place, _ in group] for _, group in together]


def _baselines_first(cell: Cell) -> tuple[bool, bool, int]:
    """Return a sort key: one-GPU cells first, then those on one host, then cells with fewer NCCL settings."""
    return cell.world_size > 1, len(cell.hosts) > 1, len(cell.nccl)


def _calibrating_first(cell: Cell) -> tuple[bool, bool, bool, int, bool, int]:
    """Return a sort key: as above, then links before training, few GPUs before many, and steps without exchange before others."""
    alone, one_host, settings = _baselines_first(cell)
    return alone, one_host, cell.trains, cell.world_size, cell.strategy["name"] != "none", settings


FEW = 4  # cells with a model: a list that is no longer has no pairs
EACH = 4  # there is one pair for so many of them
CELLS_BETWEEN = 1  # other cells that run between the two, at least
ENOUGH = 12  # degrees of freedom; a group that has them needs no further pair

Known = Mapping[tuple[Any, ...], int]  # degrees of freedom of groups of this host


def known_freedom(scatters: Scatters) -> Known:
    """Return what other studies on this host know of the scatter of images per second and of other primary rates."""
    host, found = socket.gethostname(), Counter[tuple[Any, ...]]()
    for (group, metric), scatter in scatters.items():
        if group.host == host:
            key = (metric, *group.asked)
            found[key] += scatter.freedom
    return found


def choose_replicates(
    cells: Sequence[Cell], config: Config, known: Known, was: Callable[[Cell], bool]
) -> list[Cell]:
    """Return the cells that run a second time: those that `was` says did, then those of which least is known.

    Raises:
        Refused: pairs are asked for in a list with repeats.
    """
    asked = config.noise_pairs
    if config.repeats > 1:
        if asked not in ("auto", 0):
            raise Refused(
                f"noise_pairs={asked}: accepted are auto and 0 with repeats={config.repeats}, which runs every cell again"
            )
        return []
    candidates = list(cells)
    if asked == "auto":
        candidates = [cell for cell in cells if cell.trains]
        most = len(candidates) // EACH if len(candidates) > FEW else 0
    else:
        most = min(int(asked), len(candidates))
    random.Random(f"{config.seed}/pairs").shuffle(candidates)
    if not most:
        return []
    left = [(cell, _group(cell)) for cell in candidates]
    left.sort(key=lambda pair: not was(replicate(pair[0])))  # stable: the rest stays shuffled
    again = sum(was(replicate(cell)) for cell, _ in left)
    freedom, chosen = Counter(known), list[Cell]()
    while len(chosen) < most:
        at = (
            0
            if len(chosen) < again
            else min(range(len(left)), key=lambda place: freedom[left[place][1]])
        )
        cell, group = left[at]
        if chosen and len(chosen) >= again and asked == "auto" and freedom[group] >= ENOUGH:
            break
        del left[at]
        freedom[group] += 1
        chosen.append(cell)
    return chosen


def replicate(cell: Cell) -> Cell:
    """Return a cell as it is measured the second time: without a trace, which the first has."""
    return dataclasses.replace(cell, repeat=SECOND_RUN, profiler="none", profiler_options={})


def _group(cell: Cell) -> tuple[Any, ...]:
    return primary_rate(cell).metric, *group_of_cell(cell).asked


def insert_replicates(order: Sequence[Cell], twice: Sequence[Cell], seed: int) -> list[Cell]:
    """Return an order with second runs behind the first ones: at random places, never directly after them.

    Where there is no such place, the first run moves forward.
    """
    order, generator = list(order), random.Random(f"{seed}/places")
    for cell in twice:
        at = next(place for place, other in enumerate(order) if other is cell)
        behind = range(at + 1 + CELLS_BETWEEN, len(order) + 1)
        if behind:
            order.insert(generator.choice(behind), replicate(cell))
        else:
            order.append(replicate(cell))
            order.insert(max(0, at - CELLS_BETWEEN), order.pop(at))
    return order
