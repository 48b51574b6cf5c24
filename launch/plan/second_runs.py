"""Which cells a sweep measures a second time, so that the noise floor is known, and where in the list (METHOD.md).

Such an A/A pair costs one cell. A list with repeats has enough of them.
"""

import dataclasses
import random
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from analysis.study.noise_floor import Scatters, group_of_cell
from analysis.study.rates import primary_rate
from conf.cell import SECOND_RUN, Cell
from conf.options import Refused
from conf.schema import Config

FEW = 4  # cells with a model: a list that is no longer has no pairs
EACH = 4  # there is one pair for so many of them
BETWEEN = 1  # other cells that run between the two, at least
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


def measured_twice(
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
    left.sort(key=lambda pair: not was(second_run(pair[0])))  # stable: the rest stays shuffled
    again = sum(was(second_run(cell)) for cell, _ in left)
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


def second_run(cell: Cell) -> Cell:
    """Return a cell as it is measured the second time: without a trace, which the first has."""
    return dataclasses.replace(cell, repeat=SECOND_RUN, profiler="none", profiler_options={})


def _group(cell: Cell) -> tuple[Any, ...]:
    return primary_rate(cell).metric, *group_of_cell(cell).asked


def with_second_runs(order: Sequence[Cell], twice: Sequence[Cell], seed: int) -> list[Cell]:
    """Return an order with second runs behind the first ones: at random places, never directly after them.

    Where there is no such place, the first run moves forward.
    """
    order, generator = list(order), random.Random(f"{seed}/places")
    for cell in twice:
        at = next(place for place, other in enumerate(order) if other is cell)
        behind = range(at + 1 + BETWEEN, len(order) + 1)
        if behind:
            order.insert(generator.choice(behind), second_run(cell))
        else:
            order.append(second_run(cell))
            order.insert(max(0, at - BETWEEN), order.pop(at))
    return order
