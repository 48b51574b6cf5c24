"""The ends of a sweep's pools: which cell each measures once more, and which cells go to new ranks because theirs drifted.

A plan cannot know it: a cell may be done already, measured by another launcher, or fail, and then another one begins the pool.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from analysis.findings.warm.pools import POOL_DRIFT, drifted, judged_by_pools, place_of
from analysis.report.text import count
from benchmarks.record import Record
from launch.plan.order import PlannedCell, PoolPart


class PoolEnds:
    """Keeps the cells of a sweep up to date with what became of its pools."""

    def __init__(self, cells: list[PlannedCell]) -> None:
        """`cells` are those of the sweep in their order; this changes what runs at a place."""
        self._cells = cells
        self.needless: set[int] = set()  # places of ends in whose ranks no cell was warm
        self.distrusted: set[int] = set()  # places of cells that are measured again

    def needs(self, number: int, measured: Sequence[Record]) -> bool:
        """Tell whether the cell at a place is to be measured; an end is then for the cell that really began the living pool.

        `measured` are the records of this sweep in their order.
        """
        if not self._cells[number].cell.ends_pool:
            return True
        last = place_of(measured[-1]) if measured and not measured[-1].cell.ends_pool else None
        first = next((one for one in measured if last and last.number and place_of(one) == (last.pool, 0)), None)
        if first is None:
            self.needless.add(number)
            return False
        self._cells[number] = dataclasses.replace(self._cells[number], cell=first.cell.at_pool_end())
        return True

    def send_to_new_ranks(self, records: Iterable[Record], known: Sequence[Record]) -> list[int]:
        """Have the cells of `records` whose pools drifted measured again, alone; return their places.

        Of a cell the latest record comes last. `known` are all records of the study.
        """
        wrong, latest = drifted(known), {one.cell_key: one.record_id for one in records}
        again = [number for number, one in enumerate(self._cells) if latest.get(one.cell.key) in wrong]
        for number in again:
            self._cells[number] = dataclasses.replace(self._cells[number], part=PoolPart.ALONE)
        self.distrusted.update(again)
        return again

    def unfinished(self, measured: Iterable[Record], done: Mapping[int, Record]) -> int:
        """Return how many cells have no finished record and need one; `done` are those of before, by their places."""
        finished = {one.cell_key for one in measured if one.state == "finished"}
        others = self.needless | done.keys()
        return sum(number not in others and one.cell.key not in finished for number, one in enumerate(self._cells))


def about_drift(end: Record, measured: Sequence[Record]) -> str:
    """Return a sentence on a pool that drifted, by the record of its end; empty where it did not."""
    place = place_of(end)
    if place is None or POOL_DRIFT not in end.validity.codes:
        return ""
    members = [one for one in map(place_of, measured) if one is not None and one.pool == place.pool]
    cells = len(members) - 1  # without the end
    many = f"its {count(cells, 'cell')} {'is' if cells == 1 else 'are'}"
    return f"{end.validity.codes[POOL_DRIFT]}; {many} suspect, and measured again in new ranks at the end"


def with_verdicts(measured: Iterable[Record], known: Sequence[Record]) -> list[Record]:
    """Return records with the verdicts that the ends of their pools give them; `known` are all records of the study."""
    judged = {one.record_id: one for one in judged_by_pools(known)}
    return [judged[one.record_id] for one in measured]
