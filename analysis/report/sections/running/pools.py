"""Warm ranks: which pools there were, whether they drifted, and how warm compares with cold."""

import dataclasses

from analysis.findings.labels import gpu_ids
from analysis.findings.model import Findings
from analysis.findings.study import Study
from analysis.findings.warm.ends import stated
from analysis.findings.warm.lots import both_ways
from analysis.findings.warm.pools import POOL_DRIFT, place_of, pools_of, was_warm
from analysis.report.names import run_name, unit_of
from analysis.report.numbers import NumberFormat, estimate, number
from analysis.report.section import Section
from analysis.report.tables import Column, Table, Value
from analysis.report.text import count
from benchmarks.record import Record

CHANGE = NumberFormat(100.0, "%", 2, sign=True)


def pools(study: Study, findings: Findings) -> Section | None:
    """Return the pools of a study with what their ends state; None where every cell had ranks of its own."""
    every = sorted([*study.records, *study.replaced], key=lambda one: one.started_at)
    found = {pool: members for pool, members in pools_of(every).items() if _several_cells(members)}
    if not found:
        return None
    rows = tuple(_row(number, members) for number, members in enumerate(found.values(), 1))
    marked = frozenset(at for at, members in enumerate(found.values()) if _drifted(members))
    table = Table(
        "pools", "Each pool of ranks, and the rate of its first cell when it was measured once more at the end.",
        (
            Column("pool", "pool", "count"), Column("gpus", unit_of(study)), Column("first", "its first cell"),
            Column("cells", "cells", "count"), Column("change", "change at the end", CHANGE),
            Column("least", "allowed from", CHANGE), Column("most", "to", CHANGE), Column("verdict", "verdict"),
            Column("ranks", "ranks", shown=False),
        ),
        rows, marked,
    )  # fmt: skip
    warm = sum(map(was_warm, study.records))
    lines = [f"{count(warm, 'run')} used the ranks of the run before, in {count(len(found), 'pool')}."]
    if marked:
        cells = sum(not one.cell.ends_pool for one in every if POOL_DRIFT in one.validity.codes)
        lines.append(
            f"{count(len(marked), 'pool')} did not stay as fast as it was, so {count(cells, 'run')} of these ranks "
            f"{'is' if cells == 1 else 'are'} suspect."
        )
    if (both := both_ways(study)) is not None:
        of_cells = "The cell that was" if both.cells == 1 else f"The {both.cells:,} cells that were"
        most = f"; the largest change of one cell is {number(both.largest, CHANGE)}" if both.cells > 1 else ""
        changed = "changed on average by" if both.cells > 1 else "changed by"
        lines.append(
            f"{of_cells} measured both ways: in warm ranks the rate {changed} {estimate(both.change, CHANGE)} "
            f"against new ranks{most}."
        )
    return Section("pools", "Warm ranks", tuple(lines), tables=(table,), place=106)


def _row(number: int, members: list[Record]) -> tuple[Value, ...]:
    first, end = members[0], next(filter(None, map(stated, members)), None)
    place = place_of(first)
    verdict = "drifted" if _drifted(members) else "no change seen" if end else "not checked"
    return (
        number, gpu_ids(first.cell.members), run_name(first), sum(not one.cell.ends_pool for one in members),
        *((end.change, end.least, end.allowed) if end else (None, None, None)), verdict, place.pool if place else "",
    )  # fmt: skip


def _several_cells(members: list[Record]) -> bool:
    """Tell whether a pool measured more than one cell; of the turns of warm_cold another section tells."""
    return (
        any(one.cell.ends_pool for one in members)
        or len({dataclasses.replace(one.cell, repeat=0).key for one in members}) > 1
    )


def _drifted(members: list[Record]) -> bool:
    return any(POOL_DRIFT in one.validity.codes for one in members)


SECTIONS = (pools,)
