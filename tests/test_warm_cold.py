"""The proof that warm ranks measure what new ranks measure: the two one-sided tests, its turns, its report."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from own_user import QUIET, SHORT, user
from scipy.stats import t as student
from simulated import Truth, changed
from warmed import SWEEP, WarmSimulator

from analysis.findings.examine import findings_of
from analysis.findings.model import Findings
from analysis.findings.study import Study
from analysis.findings.warm.lots import both_ways
from analysis.findings.warm.pools import POOL_DRIFT
from analysis.findings.warm.proof import EXPOSED_MARGIN_MS, RATE_MARGIN, is_turn, warm_against_cold
from analysis.report.contents import section_functions
from analysis.report.finding.sentences import sentences
from analysis.report.numbers import THIN
from analysis.report.sections.running.pools import pools
from analysis.report.sections.running.warm_cold import warm_cold
from analysis.report.style import style
from analysis.statistics.equivalence import DIFFERENT, EQUIVALENT, NOT_ENOUGH, equivalence
from benchmarks.record import read_study
from launch.plan.order import cold_and_warm

# Of Schuirmann's two tests by hand: mean 0.1, standard deviation 0.2, 9 pairs, margin 0.25.
BY_HAND = [0.1 + 0.2 * z for z in (-1.5, -1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 1.5)]


def test_a_case_by_hand():
    values = np.array(BY_HAND)
    error = values.std(ddof=1) / 3
    found = equivalence(BY_HAND, 0.25)
    assert found.mean == pytest.approx(0.1) and found.pairs == 9
    assert (found.low, found.high) == pytest.approx((0.1 - 1.859548 * error, 0.1 + 1.859548 * error))
    assert found.chance == pytest.approx(float(student.sf((0.25 - 0.1) / error, 8)))
    assert found.verdict == EQUIVALENT and found.needed is None


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.0, 0.001, -0.001, 0.0005] * 2, EQUIVALENT),
        ([-0.025, -0.024, -0.026, -0.0251] * 2, DIFFERENT),
        ([0.025, 0.024, 0.026], DIFFERENT),
        ([-0.02, 0.02, 0.01, -0.01], NOT_ENOUGH),
        ([-0.006, -0.004, -0.0055, -0.0045], NOT_ENOUGH),
        ([0.004] * 8, EQUIVALENT),
        ([0.006] * 8, DIFFERENT),
        ([0.0], NOT_ENOUGH),
        ([], NOT_ENOUGH),
    ],
)
def test_the_verdict(values, verdict):
    assert equivalence(values, 0.005).verdict == verdict


numbers = some.lists(some.floats(-1, 1), min_size=2, max_size=20)


@settings(max_examples=40, deadline=None)
@given(numbers, some.floats(0.01, 2))
def test_the_interval_and_the_two_tests_say_the_same(values, margin):
    found = equivalence(values, margin)
    assume(abs(found.chance - 0.05) > 1e-6 and min(abs(abs(found.low) - margin), abs(abs(found.high) - margin)) > 1e-9)
    assert (found.verdict == EQUIVALENT) == (found.chance < 0.05)
    mirrored = equivalence([-one for one in values], margin)
    assert mirrored.verdict == found.verdict and mirrored.chance == pytest.approx(found.chance, abs=1e-9)
    assert equivalence([1000 * one for one in values], 1000 * margin).verdict == found.verdict


def test_two_that_differ_by_the_margin_are_called_equivalent_once_in_twenty():
    generator = np.random.default_rng(11)
    found = [equivalence(generator.normal(0.005, 0.003, 8), 0.005).verdict for _ in range(400)]
    assert all(8 < found.count(verdict) < 32 for verdict in (EQUIVALENT, DIFFERENT))


def test_as_many_pairs_as_are_said_to_be_needed_are_enough():
    few = [0.01, -0.008, 0.004, -0.006, 0.002, -0.002]
    found = equivalence(few, 0.005)
    spread = np.resize(np.array(few) - np.mean(few), found.needed)
    spread = (spread - spread.mean()) / spread.std(ddof=1) * np.std(few, ddof=1)
    assert found.verdict == NOT_ENOUGH and 6 < found.needed < 40
    assert equivalence(spread + np.mean(few), 0.005).verdict == EQUIVALENT
    assert equivalence(spread[:-1] + np.mean(few), 0.005).needed is not None
    assert equivalence([0.004999999, 0.005000001, 0.005], 0.005).needed is None, "the mean is the margin"


def proof(simulator, turns=8, warm=1.0, cost_ms=0.0, **cell):
    """The records of a proof; `warm` is planted into the rate of warm ranks, `cost_ms` into the strategy's cost."""
    template = simulator.cell(**cell).cell
    made = []
    for number, planned in enumerate(cold_and_warm([template], turns)):
        place = (0, 1, 2, 0)[number % 4]
        pool = f"{number - place:08x}" if number % 4 < 3 else f"alone{number:03d}"
        one = simulator.cell(pool=pool, place=place, factor=warm if place else 1.0, repeat=planned.cell.repeat, **cell)
        cost = one.metrics["strategy/cost_ms"] + (cost_ms if place else 0.0)
        made.append(changed(one, metrics=one.metrics | {"strategy/cost_ms": cost}))
    return made


def found_of(*records):
    return warm_against_cold(Study.of(records))


@pytest.mark.parametrize(
    ("warm", "cost_ms", "rate", "cost", "whole"),
    [
        (1.0, 0.0, EQUIVALENT, EQUIVALENT, EQUIVALENT),
        (0.975, 0.0, DIFFERENT, EQUIVALENT, DIFFERENT),
        (1.003, 0.0, EQUIVALENT, EQUIVALENT, EQUIVALENT),
        (1.0, 0.2, EQUIVALENT, DIFFERENT, DIFFERENT),
        (1.0, 0.05, EQUIVALENT, NOT_ENOUGH, NOT_ENOUGH),
    ],
)
def test_a_planted_difference_is_found(warm, cost_ms, rate, cost, whole):
    (one,) = found_of(*proof(WarmSimulator(Truth(noise=0.0002), seed=1), warm=warm, cost_ms=cost_ms))
    assert (one.rate.verdict, one.cost.verdict, one.verdict) == (rate, cost, whole)
    assert len(one.turns) == 8 and one.left_out == 0
    assert math.expm1(one.rate.mean) == pytest.approx(warm - 1, abs=3e-4)
    assert one.cost.mean == pytest.approx(cost_ms, abs=0.02)


def test_a_drift_of_the_machine_takes_no_part():
    simulator = WarmSimulator(Truth(noise=0.0))
    records = proof(simulator)
    slower = [
        changed(one, metrics=one.metrics | {"throughput/images_per_second": 10_000 * math.exp(-1e-3 * number)})
        for number, one in enumerate(records)
    ]
    (one,) = found_of(*slower)
    assert one.rate.mean == pytest.approx(0.0, abs=1e-12)


def test_a_turn_whose_ranks_were_not_as_planned_is_left_out():
    simulator = WarmSimulator(Truth(noise=0.0002))
    ordinary = [changed(simulator.cell(repeat=repeat), sweep_id="6" * 32) for repeat in range(40, 48)]
    records = proof(simulator)
    cold = [{**records[1].ranks[0], "place": 0, "pool": "another1"}]
    records[1] = changed(records[1], ranks=cold)
    records[6] = changed(records[6], state="failed")
    (one,) = found_of(*records)
    assert (len(one.turns), one.left_out) == (6, 2)
    assert found_of(*ordinary) == () and found_of(*ordinary, *records)[0].left_out == 2


def test_the_report_has_the_verdict_as_a_sentence_a_figure_and_a_table():
    study = Study.of(proof(WarmSimulator(Truth(noise=0.0002), seed=1)))
    findings = findings_of(study)
    first, *others = sentences(study, findings, {})[1:]
    text = first.replace(THIN, " ")
    assert "warm ranks change the rate by" in text and not others
    margins = f"±{100 * RATE_MARGIN:g} % of the rate and ±{EXPOSED_MARGIN_MS:g} ms of exposed communication"
    assert text.endswith(f"equivalent to new ranks within {margins}.")
    with style():
        told = warm_cold(study, findings)
    assert [one.name for one in told.pictures] == ["warm-cold-1", "warm-cold-2"]
    assert len(told.pictures[0].data.rows) == 8 and told.tables[0].rows[0][1] == EQUIVALENT
    assert pools(study, findings) is None, "its pools are the turns"
    few = Study.of(proof(WarmSimulator(Truth(noise=0.02), seed=1), turns=3))
    (sentence,) = sentences(few, findings_of(few), {})[1:]
    assert "not enough to say whether" in sentence and "turns would be" in sentence
    other = Study.of(proof(WarmSimulator(Truth(noise=0.0002)), warm=0.975))
    assert "different from new ranks by more than" in sentences(other, findings_of(other), {})[1]


def test_the_named_study_measures_turns_on_cpu_workers(tmp_path):
    options = [one for one in SHORT if not one.startswith(("device=", "model="))]
    done = user(tmp_path)("+experiment=warm_cold", "warm_cold=1", "gpus=0", *options, *QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    records, _ = read_study(tmp_path / "outputs" / "warm_cold")
    by_repeat = sorted(records, key=lambda one: one.cell.repeat)
    assert [one.ranks[0]["started"] for one in by_repeat] == ["fork", "warm", "warm", "fork"]
    assert is_turn(by_repeat) and not any(POOL_DRIFT in one.validity.unchecked for one in Study.of(records).records)
    (found,) = warm_against_cold(Study.of(records))
    assert found.verdict == NOT_ENOUGH and len(found.turns) == 1
    assert ["ranks warm" in line for line in done.stdout.splitlines() if "  finished  " in line] == [
        False,
        True,
        True,
        False,
    ]


def test_cells_that_were_measured_both_ways_are_compared():
    simulator = WarmSimulator(Truth(noise=0.0))
    batches = (256, 264, 272)
    cold = [simulator.cell(pool="aa", batch_size=batches[0])] + [simulator.cell(batch_size=one) for one in batches[1:]]
    warm = [
        simulator.cell(pool="bb", place=place, batch_size=one, repeat=1, factor=factor)
        for place, (one, factor) in enumerate(zip(batches, (1.001, 1.002, 1.003), strict=True), 1)
    ]
    assert both_ways(Study.of(cold)) is None and both_ways(Study.of(warm)) is None
    one = both_ways(Study.of([*cold, *warm]))
    assert one.cells == 3 and one.change.value == pytest.approx(0.002, abs=1e-6) and one.largest == pytest.approx(0.003)
    assert one.change.low < 0.001 < 0.003 < one.change.high
    assert both_ways(Study.of([cold[0], warm[0]])).change.low is None


def test_a_study_with_pools_has_a_section_of_them():
    simulator = WarmSimulator(Truth(noise=0.0))
    records = [*simulator.pool("aa", [1.0, 1.0, 1.0], end=0.99), *simulator.pool("bb", [1.0, 1.0], batches=[512, 520])]
    study = Study.of([changed(one, sweep_id=SWEEP) for one in records])
    told = pools(study, Findings())
    assert [(row[3], row[7]) for row in told.tables[0].rows] == [(3, "drifted"), (2, "no change seen")]
    assert told.tables[0].marked == {0}
    assert told.lines[0] == "5 runs used the ranks of the run before, in 2 pools."
    assert told.lines[1] == "1 pool did not stay as fast as it was, so 3 runs of these ranks are suspect."
    plain = Study.of([simulator.cell()])
    assert pools(plain, Findings()) is None and warm_cold(plain, Findings()) is None
    assert {pools, warm_cold} <= {*section_functions()}
