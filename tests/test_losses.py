"""What lower clocks take, and the parts of exposed communication: planted ones are found, unknown ones stay unknown."""

import dataclasses
import math

import pytest
from simulate import STRATEGY, Simulator, Truth, changed

from analysis.findings.waterfall import (
    AT_MOST,
    CLOCKS,
    COMMUNICATION,
    REST,
    SLOWED,
    TAIL,
    waterfalls,
)
from analysis.study.study import Study

TWO = (0, 1)


def parts(made):
    (found,), _ = waterfalls(Study.of(made))
    return found, {one.name: one for one in found.parts}


def test_of_two_members_the_one_that_is_slowed_most_counts():
    def sampled(record):
        alone = record.cell.world_size == 1
        mhz = [1900.0 if alone else {0: 1700.0, 1: 1860.0}[gpu] for gpu in record.cell.gpus]
        return changed(record, checks={"gpu_samples": {"phases": {"timed": {"sm_mhz": mhz}}}})

    truth = Truth(alone_ms=(54.0, 54.3), noise=0.0)
    _, found = parts([sampled(one) for one in Simulator(truth).explained(TWO, repeats=1)])
    assert found[CLOCKS].ms.value == pytest.approx(54.5 * 1900 / 1700 - 54.8)
    assert found[CLOCKS].why == AT_MOST


def moments(tail_ms, slowed_ms, spread_ms=0.01):
    """Rows of `tables.timeline` for ranks that lie 0.3 ms apart when the last gradient is there."""

    def rows(record):
        found = []
        for rank in range(record.cell.world_size):
            waits = 0.3 * rank
            for exchange in (False, True):
                last = 40.0 + (slowed_ms if exchange else 0.0)
                end = last + 0.05 + (tail_ms + waits if exchange else 0.0)
                found.append({
                    "rank": rank, "exchange": exchange, "steps": 5, "ready_ms": [20.0, last], "exchange_ms": end,
                    "update_ms": end + 1.0, "update_spread_ms": spread_ms,
                    "ready_spread_ms": [spread_ms, spread_ms], "exchange_spread_ms": spread_ms,
                })  # fmt: skip
        return {"timeline": {"rows": found}}

    return rows


def test_exposed_communication_is_split_by_the_moments_of_a_step_and_the_rest_is_told():
    truth = Truth(alone_ms=(54.0, 54.3), noise=0.0, exposed_ms=1.5)
    made = []
    for one in Simulator(truth).explained(TWO, repeats=1):
        rows = moments(0.1, 0.2) if one.cell.world_size == 1 else moments(0.1 + 0.6, 0.2 + 0.5)
        made.append(
            changed(one, tables=rows(one)) if one.cell.strategy["name"] == STRATEGY else one
        )
    found, split = parts(made)
    assert COMMUNICATION not in split
    assert split[TAIL].ms.value == pytest.approx(0.6)
    assert split[SLOWED].ms.value == pytest.approx(0.5)
    assert split[REST].ms.value == pytest.approx(1.5 - 0.6 - 0.5), "nothing makes it 0"
    assert split[TAIL].ms.low < 0.6 < split[TAIL].ms.high < 0.65
    lost = sum(part.lost.value for part in found.parts if part.lost and not part.above_ideal)
    assert found.ideal.value - lost - found.residual == pytest.approx(found.measured.value)


@pytest.mark.parametrize("damaged", ["alone", "ready", "rank", "number"])
def test_without_the_moments_of_every_rank_the_parts_stay_unknown(damaged):
    made = []
    for one in Simulator(Truth(alone_ms=(54.0, 54.3), noise=0.0)).explained(TWO, repeats=1):
        tables = moments(0.1, 0.2)(one)
        rows = tables["timeline"]["rows"]
        if damaged == "alone" and one.cell.world_size == 1:
            rows.clear()
        elif damaged == "ready":
            rows[0]["ready_ms"] = [20.0, None]
        elif damaged == "rank" and one.cell.world_size > 1:
            rows.pop()
        elif damaged == "number":
            rows[0] |= {"exchange_ms": math.nan, "unknown": {"exchange_ms": "a replay of a graph"}}
        made.append(dataclasses.replace(one, tables=tables))
    _, found = parts(made)
    assert {TAIL, SLOWED, REST}.isdisjoint(found)
    why = {"alone": "no GPU's steps were traced alone", "number": "a replay of a graph"}.get(
        damaged, "no step was traced"
    )
    assert (
        found[COMMUNICATION].lost is not None
        and f"not split further: {why}" in found[COMMUNICATION].why
    )
