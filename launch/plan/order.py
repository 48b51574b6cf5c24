"""The order in which cells run, which of the listed cells run at all, and which a second time for
the noise floor (METHOD.md).

A second run is an A/A pair and costs one cell. A list with repeats has enough of them.
"""

import dataclasses
import random
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.study.conditions import primary_rate
from analysis.study.names import BETWEEN
from analysis.study.noise_floor import Scatters, group_of_cell
from conf.cell import SECOND_RUN, Cell
from conf.options import Refused
from conf.schema import Config

PAIRS_ABOVE = 4  # training cells: a list that is no longer has no A/A pairs
CELLS_PER_PAIR = 4  # training cells for which there is one pair
LEAST_BETWEEN = 1  # other cells that run between the first run and the second
ENOUGH_FREEDOM = 12  # a noise group with so many degrees of freedom needs no further pair
Freedom = Mapping[tuple[Any, ...], int]  # degrees of freedom of the noise groups of this host


@dataclass(frozen=True)
class PlannedCell:
    """A cell in its place in the order."""

    cell: Cell
    drift: bool = False  # the first cell once more, at the end of a repeated list
    environment: dict[str, Any] = field(default_factory=dict)  # of a rehearsal: what is planned for

    @property
    def name(self) -> str:
        """The name of the run: the cell's, and which of several measurements of it this is."""
        return BETWEEN.join([self.cell.name, *self.run_suffixes])

    @property
    def run_suffixes(self) -> list[str]:
        """Which of several measurements of the cell it is, in words; empty for the first."""
        return self.cell.run_suffixes(self.drift)


def without_unused_nccl(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells without one-GPU cells that differ from another only in NCCL's settings: one
    GPU does not use NCCL."""
    plain = {cell.key for cell in cells if cell.world_size == 1 and not cell.nccl}
    kept = []
    for cell in cells:
        uses_nccl = cell.world_size > 1 or not cell.nccl
        if uses_nccl or dataclasses.replace(cell, nccl={}).key not in plain:
            kept.append(cell)
    return kept


def one_per_cpu_cell(cells: Sequence[Cell]) -> list[Cell]:
    """On CPU workers keep one of the cells that differ only in NCCL settings: the one with
    fewest."""
    chosen: dict[str, Cell] = {}
    for cell in cells:
        key = cell.key
        if cell.device == "cpu" and cell.nccl:
            key = dataclasses.replace(cell, nccl={}).key
        if key not in chosen or len(cell.nccl) < len(chosen[key].nccl):
            chosen[key] = cell
    return list(chosen.values())


def unique_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells without duplicates, each where the first of its equals stands."""
    return list({cell.key: cell for cell in cells}.values())


def ordered(
    cells: Sequence[Cell],
    repeats: int,
    seed: int,
    twice: Sequence[Cell] = (),
    calibrating: bool = False,
) -> list[PlannedCell]:
    """Return the cells in the order in which they run; those in `twice` a second time, not directly
    after the first.

    One repeat: baselines first, so that an interrupted sweep has them and the efficiency of a cell
    shows at once; otherwise as listed. Several repeats: each repeat is shuffled, so that drift
    falls on all cells alike; only the first has its baselines first. At the end the first cell runs
    again; its repeat is the number of repeats with a minus sign. With `calibrating`, what a
    forecast of the others rests on comes first wherever baselines do.
    """

    def baselines_first(cell: Cell) -> tuple[int, ...]:
        # One GPU, then one host; for a forecast links before training, few GPUs before many, steps
        # without exchange before others; then fewer NCCL settings.
        calibration: tuple[int, ...] = ()
        if calibrating:
            calibration = (cell.trains, cell.world_size, cell.strategy["name"] != "none")
        return cell.world_size > 1, len(cell.hosts) > 1, *calibration, len(cell.nccl)

    if repeats == 1:
        order = insert_replicates(sorted(cells, key=baselines_first), twice, seed)
        return list(map(PlannedCell, order))
    order = []
    for repeat in range(repeats):
        of_repeat = [dataclasses.replace(cell, repeat=repeat) for cell in cells]
        random.Random(f"{seed}/{repeat}").shuffle(of_repeat)
        if repeat == 0:
            of_repeat.sort(key=baselines_first)  # stable: the rest stays shuffled
        order += of_repeat
    again = dataclasses.replace(order[0], repeat=-repeats)
    return [*map(PlannedCell, order), PlannedCell(again, drift=True)]


def known_freedom(scatters: Scatters) -> Freedom:
    """Return what other studies on this host know of the scatter of images per second and of other
    primary rates."""
    host, freedom = socket.gethostname(), Counter[tuple[Any, ...]]()
    for (group, metric), scatter in scatters.items():
        if group.host == host:
            key = (metric, *group.asked)
            freedom[key] += scatter.freedom
    return freedom


def choose_replicates(
    cells: Sequence[Cell], config: Config, earlier: Freedom, was_replicated: Callable[[Cell], bool]
) -> list[Cell]:
    """Choose cells to replicate: those replicated before, then those whose noise group has the
    fewest runs.

    Raises Refused: pairs are asked for in a list with repeats.
    """
    pairs = config.noise_pairs
    if config.repeats > 1:
        if pairs not in ("auto", 0):
            raise Refused(
                f"noise_pairs={pairs}: repeats={config.repeats} already repeats every "
                "configuration; expected auto or 0"
            )
        return []
    candidates = list(cells)
    if pairs == "auto":
        candidates = [cell for cell in cells if cell.trains]
        most = 0
        if len(candidates) > PAIRS_ABOVE:
            most = len(candidates) // CELLS_PER_PAIR
    else:
        most = min(int(pairs), len(candidates))
    random.Random(f"{config.seed}/pairs").shuffle(candidates)
    if not most:
        return []
    freedom = Counter(earlier)  # of each noise group, with the pairs chosen so far
    chosen: list[Cell] = []
    remaining: list[tuple[Cell, tuple[Any, ...]]] = []  # with their noise groups
    for cell in candidates:
        group = (primary_rate(cell).metric, *group_of_cell(cell).asked)
        if len(chosen) < most and was_replicated(replicate(cell)):
            chosen.append(cell)
            freedom[group] += 1
        else:
            remaining.append((cell, group))
    while len(chosen) < most:
        cell, group = min(remaining, key=lambda pair: freedom[pair[1]])
        if chosen and pairs == "auto" and freedom[group] >= ENOUGH_FREEDOM:
            break
        remaining.remove((cell, group))
        freedom[group] += 1
        chosen.append(cell)
    return chosen


def replicate(cell: Cell) -> Cell:
    """Return a cell as it is measured the second time: without a trace, which the first has."""
    return dataclasses.replace(cell, repeat=SECOND_RUN, profiler="none", profiler_options={})


def insert_replicates(order: Sequence[Cell], twice: Sequence[Cell], seed: int) -> list[Cell]:
    """Return an order with second runs behind the first ones: at random places, never directly
    after them.

    Where there is no such place, the first run moves forward.
    """
    order = list(order)
    generator = random.Random(f"{seed}/places")
    for cell in twice:
        first_run = [planned is cell for planned in order].index(True)
        later_places = range(first_run + 1 + LEAST_BETWEEN, len(order) + 1)
        if later_places:
            order.insert(generator.choice(later_places), replicate(cell))
        else:
            order.append(replicate(cell))
            order.insert(max(0, first_run - LEAST_BETWEEN), order.pop(first_run))
    return order
