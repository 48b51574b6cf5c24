"""What lower clocks take, and the parts of exposed communication: planted ones are found, unknown ones stay unknown."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from simulate import STRATEGY, Simulator, Truth, changed

from analysis.findings.clock_loss import NAME, ClockPart, exponent
from analysis.findings.communication_parts import COMMUNICATION, REST, SLOWED, TAIL
from analysis.findings.waterfall import waterfalls
from analysis.study.study import Study, open_study

DATA = Path(__file__).parent / "data"
TWO = (0, 1)


def parts(made):
    (found,), _ = waterfalls(Study.of(made))
    return found, {one.name: one for one in found.parts}


@pytest.mark.parametrize("true", [0.0, 0.4, 1.0])
def test_how_far_steps_follow_clocks_is_found_although_both_are_measured_with_errors(true):
    hits = 0
    for seed in range(20):
        generator = np.random.default_rng(seed)
        clocks = [generator.normal(0, 0.03, 6) for _ in range(8)]
        windows = [
            (one + generator.normal(0, 0.008, 6), 4 - true * one + generator.normal(0, 0.002, 6))
            for one in clocks
        ]
        found = exponent(windows, str(seed))
        hits += found.estimate.low - 0.01 <= true <= found.estimate.high + 0.01
    assert hits >= 17


def test_clocks_that_stand_still_say_nothing_of_how_steps_follow_them():
    generator = np.random.default_rng(1)
    still = [(generator.normal(0, 1e-4, 6), generator.normal(4, 0.002, 6)) for _ in range(8)]
    few = [(generator.normal(0, 0.03, 2), generator.normal(4, 0.002, 2)) for _ in range(3)]
    for windows in (still, few, []):
        found = exponent(windows, "x")
        assert not found.measured and (found.estimate.low, found.estimate.high) == (0.0, 1.0)


def test_the_power_cap_of_two_compiled_gpus_is_told_apart_from_the_wires():
    """97.9 % on two GPUs: lower clocks by far the largest part; records without raw samples have a bound instead."""
    (found,), _ = waterfalls(open_study(DATA / "h200_x2" / "compiled_b"))
    (part,) = [one for one in found.parts if isinstance(one, ClockPart)]
    assert found.with_strategy and part.samples > 50
    assert 0.2 < part.exponent.low < part.exponent.value < part.exponent.high < 0.6
    (member,) = part.members
    assert (member.gpu, round(member.alone_mhz), round(member.together_mhz)) == (0, 1950, 1877)
    step_ms = 2 * 256e3 / found.measured.value
    assert part.ms.value == pytest.approx(
        (1950 / 1877) ** part.exponent.value * step_ms - step_ms, rel=0.05
    )
    assert part.at_equal_clocks.value == pytest.approx(512e3 / (step_ms - part.ms.value))
    exposed = next(one for one in found.parts if one.name == COMMUNICATION)
    assert part.lost.value > 2 * exposed.lost.value
    assert part.lost.low < 0 < part.lost.high and "not told apart from 0" in part.why, (
        "five samples a window"
    )
    bound, _ = waterfalls(open_study(DATA / "h200_x4" / "scaling"))
    for one in bound:
        (part,) = [part for part in one.parts if part.name == NAME]
        assert not part.samples and "at most" in part.why and "not told apart from 0" in part.why
        assert part.lost.value > one.ideal.value - one.measured.value, (
            "all of the loss may be the clocks'"
        )


def test_of_two_members_the_one_that_is_slowed_most_counts():
    def sampled(record):
        alone = record.cell.world_size == 1
        mhz = [1900.0 if alone else {0: 1700.0, 1: 1860.0}[gpu] for gpu in record.cell.gpus]
        return changed(record, checks={"gpu_samples": {"phases": {"timed": {"sm_mhz": mhz}}}})

    truth = Truth(alone_ms=(54.0, 54.3), noise=0.0)
    _, found = parts([sampled(one) for one in Simulator(truth).explained(TWO, repeats=1)])
    assert found[NAME].ms.value == pytest.approx(54.5 * 1900 / 1700 - 54.8)
    assert [(one.gpu, one.together_mhz) for one in found[NAME].members] == [
        (0, 1700.0),
        (1, 1860.0),
    ]


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
    assert split[TAIL].ms.value == pytest.approx(0.6) and split[SLOWED].ms.value == pytest.approx(
        0.5
    )
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
    why = {"alone": "no GPU's steps were observed alone", "number": "a replay of a graph"}.get(
        damaged, "no step was observed"
    )
    assert (
        found[COMMUNICATION].lost is not None
        and f"its parts are not known: {why}" in found[COMMUNICATION].why
    )
