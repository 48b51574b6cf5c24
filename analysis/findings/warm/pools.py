"""Pools: records that were measured in the same ranks, one after another, and whether these stayed as fast as they were.

At its end the first cell of a pool is measured once more. If its rate changed by more than noise explains, every record of the
pool is `suspect` (pool_drift). The record of the last cell states the change; the others keep what was written, and whoever
reads the study has them suspect. The launching process imports this module: it needs no numpy.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.record import Record

POOL_DRIFT = "pool_drift"  # the code of validity
NEW, WARM = "new", "warm"  # the ranks of a cell in a pool, for people
NO_END = "its pool ended before its first cell was measured once more"


class PoolPlace(NamedTuple):
    """Which pool of ranks measured a record, and as which of its cells."""

    pool: str  # with its sweep: unique in a study
    number: int  # 0: its ranks were new


def place_of(record: Record) -> PoolPlace | None:
    """Return the place of a record in its pool; None where its ranks were to end with it."""
    first = record.ranks[0] if record.ranks else {}
    pool, number = first.get("pool"), first.get("place")
    if not (isinstance(pool, str) and pool and type(number) is int and number >= 0):
        return None
    return PoolPlace(f"{record.sweep_id} {pool}", number)


def was_warm(record: Record) -> bool:
    """Tell whether the ranks of a record had measured another cell before."""
    place = place_of(record)
    return place is not None and place.number > 0


def ranks_word(record: Record) -> str:
    """Return which ranks measured a record, for people: new or warm ones; empty where they were to end with it."""
    return "" if place_of(record) is None else WARM if was_warm(record) else NEW


def pools_of(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return {pool: its records in their order}, of pools that measured several cells."""
    members: dict[str, list[tuple[int, Record]]] = defaultdict(list)
    for record in records:
        if (place := place_of(record)) is not None:
            members[place.pool].append((place.number, record))
    sorted_ones = {pool: sorted(of_pool, key=lambda one: one[0]) for pool, of_pool in members.items()}
    return {pool: [record for _, record in of_pool] for pool, of_pool in sorted_ones.items() if of_pool[-1][0] > 0}


def one_of_each_pool(records: Sequence[Record]) -> list[Record]:
    """Return runs of one cell without those whose ranks had measured it before: they do not show how processes differ."""
    seen: set[str] = set()
    found = []
    for record in records:
        place = place_of(record)
        if place is None or place.pool not in seen:
            found.append(record)
        if place is not None:
            seen.add(place.pool)
    return found


def judged_by_pools(records: Sequence[Record]) -> list[Record]:
    """Return records with the verdict that the ends of their pools give them, each in its place.

    Those of a pool that drifted are suspect; of a pool without an end, its warm cells are unchecked.
    """
    found = list(records)
    places = {id(record): number for number, record in enumerate(found)}
    for members in pools_of(found).values():
        ends = [one for one in members if one.cell.ends_pool]
        said = next((one.validity.codes[POOL_DRIFT] for one in ends if POOL_DRIFT in one.validity.codes), None)
        same_cell = len({dataclasses.replace(one.cell, repeat=0).key for one in members}) == 1
        for record in members:
            if said is not None:
                found[places[id(record)]] = _suspect(record, said)
            elif not ends and was_warm(record) and not same_cell:
                found[places[id(record)]] = _unchecked(record)
    return found


def _suspect(record: Record, sentence: str) -> Record:
    before = record.validity
    verdict = "suspect" if before.verdict == "valid" else before.verdict
    codes: Mapping[str, str] = {**before.codes, POOL_DRIFT: sentence}
    return dataclasses.replace(record, validity=dataclasses.replace(before, verdict=verdict, codes=dict(codes)))


def _unchecked(record: Record) -> Record:
    before = record.validity
    unchecked = {**before.unchecked, POOL_DRIFT: NO_END}
    return dataclasses.replace(record, validity=dataclasses.replace(before, unchecked=unchecked))


def drifted(records: Sequence[Record]) -> set[str]:
    """Return the ids of the records of pools that drifted, without those that only ended one: they are to be measured again."""
    judged = judged_by_pools(records)
    return {one.record_id for one in judged if POOL_DRIFT in one.validity.codes and not one.cell.ends_pool}
