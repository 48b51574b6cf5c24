"""Which cells of a list may be measured in the same ranks, one after another (engine.start=warm). METHOD.md, "Warm ranks".

A plan knows what was asked. Whether ranks really are warm is decided where they run: the engine compares whole environments.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from conf import groups
from conf.cell import Cell

# A pool's first cell needs new ranks and is measured twice. So two cells in a pool take as long as each in ranks of its own.
FEWEST = 3
# Doubt about a pool is doubt about all its cells. With ten, new ranks and the second look at the first cell cost each of them
# about a second on two H200s; more cells would not save much more.
MOST = 10
LOT = 10  # of so many cells that could be warm, one is measured in new ranks
# What NCCL reads again for each communicator: cells that differ in it only may share ranks.
FREE = ("NCCL_ALGO", "NCCL_PROTO")


@dataclass(frozen=True)
class Stretch:
    """Cells that run directly after each other: several are a pool, one has ranks of its own."""

    cells: tuple[Cell, ...]
    by_lot: bool = False  # it could have been in a pool

    @property
    def is_pool(self) -> bool:
        """Whether the cells share ranks."""
        return len(self.cells) > 1


def why_not_warm(cell: Cell) -> str:
    """Return why no ranks may go on with or after a cell, as a part of a sentence; empty where they may."""
    strategy = str(cell.strategy["name"])
    if not cell.trains:
        return f"benchmark={cell.benchmark['name']} trains nothing"
    if cell.hosts:
        return "nodes= has ranks begin anew for every cell"
    if cell.servers:
        return f"strategy={strategy} has servers"
    if cell.profiler == "nsys":
        return "profiler=nsys starts ranks itself"
    return (
        "" if groups.choice("strategy", strategy).warm else f"strategy={strategy} does not say that it gives all back"
    )


def pool_key(cell: Cell) -> Hashable:
    """Return what is equal for cells that may share ranks; None for a cell that needs ranks of its own."""
    if why_not_warm(cell):
        return None
    settings = tuple(sorted((name, value) for name, value in cell.nccl.items() if name not in FREE))
    return cell.device, cell.hosts, cell.gpus, settings


def with_pools(cells: Sequence[Cell], may_join: Callable[[Cell], bool], seed: str) -> list[Stretch]:
    """Return the cells of one round of a list as stretches, each in the place of its first cell.

    `may_join` tells of a cell whether it is to be measured at all: one that is finished is in no pool. One in LOT of the cells
    that could be in a pool is drawn by `seed` and stays alone; a pool of FEWEST loses none.

    In pools, cells with equal compiled graphs stand side by side: ranks keep one graph, and another one takes seconds to compile.
    A shuffled list keeps what it is shuffled for. Which graph comes first, and the order of its cells, are drawn anew in each
    repeat. So what drifts falls on all of them alike, over the repeats.
    """
    alike: dict[Hashable, list[Cell]] = defaultdict(list)
    for cell in cells:
        if (key := pool_key(cell)) is not None:
            alike[key].append(cell)
    could = [cell for members in alike.values() if len(members) > FEWEST for cell in members]
    lot = {cell.key for cell in _drawn(could, seed)}
    pool_of: dict[str, tuple[Cell, ...]] = {}
    for members in alike.values():
        left = _by_graph([cell for cell in members if cell.key not in lot and may_join(cell)])
        for pool in _split(left) if len(left) >= FEWEST else ():
            pool_of |= dict.fromkeys((cell.key for cell in pool), pool)
    found: list[Stretch] = []
    for cell in cells:
        pool = pool_of.get(cell.key, (cell,))
        if pool[0] is cell:
            found.append(Stretch(pool, by_lot=cell.key in lot))
    return found


def _drawn(cells: Sequence[Cell], seed: str) -> list[Cell]:
    """Return one in LOT of the cells; where that is no whole number, the lot decides about one more."""
    generator = random.Random(f"{seed}/lot")
    whole, rest = divmod(len(cells), LOT)
    return generator.sample(cells, whole + (generator.random() * LOT < rest))


def _by_graph(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells; those that equal an earlier one in their compiled graph come directly after it."""
    graphs = [cell.graph or cell.key for cell in cells]  # a cell that is not compiled stays where it is
    return [cell for _, cell in sorted(zip(graphs, cells, strict=True), key=lambda pair: graphs.index(pair[0]))]


def _split(cells: Sequence[Cell]) -> list[tuple[Cell, ...]]:
    """Return cells as pools of nearly equal sizes, none larger than MOST."""
    pools = -(-len(cells) // MOST)
    ends = [len(cells) * number // pools for number in range(pools + 1)]
    return [tuple(cells[start:end]) for start, end in pairwise(ends)]
