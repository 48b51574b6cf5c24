"""From records to findings: intervals hold the truth of a simulated machine as often as they say,
equal cells show no difference, what cannot be said is refused. Real records: tests/golden/report.
"""

import dataclasses
import math
import random
from itertools import combinations, product

import pytest
from build import changed_cell
from simulate import STRATEGIES_STUDY, STRATEGY, Simulator, Truth, changed, template

from analysis.findings.baselines import control_cells
from analysis.findings.comparisons import comparisons as comparisons_of
from analysis.findings.examine import Findings, findings_of
from analysis.findings.scaling import curves
from analysis.findings.waterfall import (
    CLOCKS,
    COMMUNICATION,
    CONTENTION,
    OVERHEAD,
    SPREAD,
    WAIT,
    WAITING,
)
from analysis.findings.waterfall import waterfalls as waterfalls_of
from analysis.study.conditions import IMAGES_PER_SECOND
from analysis.study.noise_floor import CLOCK
from analysis.study.study import Study
from analysis.topology.readers import read_topology

FOUR = (0, 1, 2, 3)
TRIALS = 60
FEWER = 40  # studies with controls: slower to make
MOST_MISSED = 5  # of 40: 95 % intervals miss 2 on average, more than 5 in one set of a hundred


def study_findings(made):
    return findings_of(Study.of(made))


def scaling(made):
    return curves(Study.of(made))


def waterfalls(made):
    return waterfalls_of(Study.of(made))


def comparisons(made):
    return comparisons_of(Study.of(made))


def holds(interval, truth):
    return interval.low <= truth <= interval.high


def point_of(made, gpus, label=""):
    """The point of a subset, of the one curve that has it."""
    points = []
    for curve in scaling(made).curves:
        if curve.label.startswith(label):
            points += [point for point in curve.points if point.gpus == tuple(gpus)]
    (point,) = points
    return point


@pytest.mark.parametrize(
    ("alone_ms", "repeats"),
    [(Truth().alone_ms, 3), ((54.0,) * 4, 5)],
    ids=["3", "5, all GPUs equal"],
)
def test_intervals_hold_the_true_efficiency_as_often_as_they_say(alone_ms, repeats):
    truth, missed = Truth(alone_ms), 0
    true = truth.rate(STRATEGY, FOUR) / (4 * min(truth.rate(STRATEGY, (gpu,)) for gpu in FOUR))
    for seed in range(FEWER):
        share = point_of(Simulator(truth, seed).explained(FOUR, repeats), FOUR, STRATEGY).efficiency
        missed += not holds(share, true)
        assert abs(share.value - true) < 6 * truth.noise
    assert missed <= MOST_MISSED


def test_more_repeats_narrow_the_interval_down_to_the_scatter_of_one_run():
    widths = []
    for repeats in (3, 5, 15):
        made = [Simulator(seed=seed).explained(FOUR, repeats) for seed in range(4)]
        shares = [point_of(of_seed, FOUR, STRATEGY).efficiency for of_seed in made]
        widths.append(sum(share.high - share.low for share in shares))
    assert widths[0] > widths[1] > widths[2] > 4 * 2 * 1.96 * Truth().noise


def test_equal_records_give_equal_findings_in_any_order():
    made = Simulator().explained(FOUR)
    assert study_findings(made) == study_findings(made[::-1])


def test_members_without_a_baseline_are_named():
    simulator = Simulator()
    made = [simulator.record((0,)), simulator.record(FOUR)]
    assert point_of(made, FOUR).without_baseline == (1, 2, 3)
    assert "not every GPU was measured alone" in next(iter(scaling(made).refusals))


def test_weak_and_strong_scaling_never_mix():
    simulator = Simulator(Truth(noise=0.0))
    weak = [simulator.record(gpus) for gpus in ((0,), (0, 1))]
    strong = [
        simulator.record(gpus, batch_size=1024 // len(gpus), global_batch_size=1024)
        for gpus in ((0,), (0, 1), FOUR)
    ]
    both = scaling(weak + strong)
    points = [(curve.kind, [point.gpus for point in curve.points]) for curve in both.curves]
    assert points == [("weak", [(0,), (0, 1)]), ("strong", [(0,), (0, 1), FOUR])]
    share = simulator.truth.rate(STRATEGY, FOUR) / 4 / (4 * simulator.truth.rate(STRATEGY, (0,)))
    assert both.curves[1].points[2].efficiency.value == pytest.approx(share)
    assert any("weak scaling" in text and "strong scaling" in text for text in both.refusals)
    refusal = next(iter(scaling([weak[0], strong[1]]).refusals))
    assert "the kind of batch (weak scaling, not 1024 images per step)" in refusal


@pytest.mark.parametrize(
    ("sizes", "laws"), [((2,), []), ((2, 4), ["amdahl"]), ((2, 4, 8), ["amdahl", "usl"])]
)
def test_laws_are_fitted_to_enough_points_only(sizes, laws):
    alpha, beta = 0.02, 0.001
    simulator = Simulator(Truth(alone_ms=(54.0,) * 8, noise=0.0))
    truth, made = simulator.truth, [simulator.record((0,))]
    for size in sizes:
        speedup = size / (1 + alpha * (size - 1) + beta * size * (size - 1))
        gpus = tuple(range(size))
        factor = speedup * truth.rate(STRATEGY, (0,)) / truth.rate(STRATEGY, gpus)
        made.append(simulator.record(gpus, factor=factor))
    (curve,) = scaling(made).curves
    assert [fit.law for fit in curve.fits] == laws
    if "usl" in laws:
        amdahl, usl = curve.fits
        assert usl.parameters == pytest.approx({"contention": alpha, "coherency": beta}, rel=1e-6)
        assert usl.error < 1e-9 < amdahl.error


def true_parts(truth, gpus):
    """Images per second of every part, from the truth's step times."""
    slowest, images = max(truth.alone_ms[gpu] for gpu in gpus), len(gpus) * truth.batch_size * 1e3
    alone = sum(truth.batch_size * 1e3 / truth.alone_ms[gpu] for gpu in gpus)
    parts, spent = {SPREAD: alone - images / slowest}, slowest
    for name, ms in (
        (OVERHEAD, truth.overhead_ms),
        (CLOCKS, (slowest + truth.overhead_ms) * (1 / truth.clock_share - 1)),
        (CONTENTION, truth.contention_ms),
        (COMMUNICATION, truth.exposed_ms),
    ):
        parts[name] = images / spent - images / (spent + ms)
        spent += ms
    return parts | {"residual": images / spent - truth.rate(STRATEGY, gpus)}


def waterfall_of(made):
    """The only waterfall, and its parts by name; all of it is one sum."""
    (fall,), _ = waterfalls(made)
    lost = sum(part.lost.value for part in fall.parts if part.lost and not part.above_ideal)
    assert fall.ideal.value - lost - fall.residual == pytest.approx(fall.measured.value, rel=1e-9)
    return fall, {part.name: part for part in fall.parts}


@pytest.mark.parametrize("unexplained_ms", [0.0, 0.6])
def test_every_part_of_the_waterfall_is_recovered_within_its_interval(unexplained_ms):
    truth = Truth(unexplained_ms=unexplained_ms)
    true = true_parts(truth, FOUR)
    hits = dict.fromkeys(true, 0)
    for seed in range(FEWER):
        fall, parts = waterfall_of(Simulator(truth, seed).explained(FOUR, repeats=5))
        for name in true.keys() - {"residual"}:
            hits[name] += holds(parts[name].lost, true[name])
        hits["residual"] += fall.residual_low <= true["residual"] <= fall.residual_high
    assert all(FEWER - count <= MOST_MISSED for count in hits.values()), hits


@pytest.mark.parametrize("clock_share", [1.0, 0.943, 1.02])
def test_without_noise_the_parts_are_exact_and_what_no_control_sees_is_the_residual(clock_share):
    truth = Truth(noise=0.0, unexplained_ms=0.4, clock_share=clock_share)
    fall, parts = waterfall_of(Simulator(truth).explained(FOUR, repeats=1))
    true = true_parts(truth, FOUR)
    residual = true.pop("residual")
    lost = {name: part.lost.value for name, part in parts.items() if part.lost}
    assert lost == pytest.approx(true)
    assert fall.residual == pytest.approx(residual) and residual > 100, "planted"


@pytest.mark.parametrize(
    ("strategy", "gpus", "part", "why"),
    [
        ("none", FOUR, CONTENTION, "subset"),
        (STRATEGY, None, OVERHEAD, "not measured"),
        ("none", (2,), SPREAD, "gpus 2"),
    ],
)
def test_a_missing_control_leaves_its_part_unknown_and_the_waterfall_closed(
    strategy, gpus, part, why
):
    made = []
    for one in Simulator(Truth(noise=0.0)).explained(FOUR, repeats=1):
        is_alone = len(one.cell.gpus) == 1
        is_missing = one.cell.gpus == gpus or (gpus is None and is_alone)
        if one.cell.strategy["name"] != strategy or not is_missing:
            made.append(one)
    _, parts = waterfall_of(made)
    assert parts[part].lost is None and why in parts[part].why
    if part == OVERHEAD:
        assert "the overhead of the strategy on one GPU" in parts[COMMUNICATION].why


def test_without_clocks_or_any_control_there_is_no_part_of_them():
    made = Simulator(Truth(noise=0.0)).explained(FOUR, repeats=1)
    unsampled = [changed(one, metrics={**one.metrics, CLOCK: math.nan}) for one in made]
    _, parts = waterfall_of(unsampled)
    assert parts[CLOCKS].lost is None and "not read" in parts[CLOCKS].why
    falls, missing = waterfalls([one for one in made if one.cell.strategy["name"] != "none"])
    assert falls == () and [*missing.values()] == ["waterfall=true"]


def test_a_strategy_without_exchange_alone_lacks_no_control_runs():
    made = []
    for one in Simulator(Truth(noise=0.0)).explained(FOUR, repeats=1):
        untimed = {**one.metrics, CLOCK: math.nan}
        untimed.pop("strategy/cost_ms", None)
        made.append(changed(one, metrics=untimed))
    (fall,), missing = waterfalls(made)
    assert fall.is_explained and missing == {}
    unknown = {part.name: part.why for part in fall.parts if part.lost is None}
    assert "no exchange_alone" in unknown[COMMUNICATION]


@pytest.mark.parametrize(
    ("waiting_ms", "known"), [(0.3, (True, True)), (2.0, (False, True)), (-0.1, (True, False))]
)
def test_a_trace_tells_waiting_from_communication(waiting_ms, known):
    truth = Truth(noise=0.0)
    # The mean rank waits for the slowest GPU.
    behind_ms = sum(max(truth.alone_ms) - ms for ms in truth.alone_ms) / 4
    made = Simulator(truth).explained(FOUR, repeats=1)
    assert "only a trace" in waterfall_of(made)[1][WAITING].why
    for at, one in enumerate(made):
        if len(one.cell.gpus) > 1:
            made[at] = changed(one, metrics=one.metrics | {WAIT: waiting_ms + behind_ms})
    fall, parts = waterfall_of(made)
    whole = true_parts(truth, FOUR)[COMMUNICATION]
    lost = [parts[name].lost.value for name in (COMMUNICATION, WAITING) if parts[name].lost]
    assert sum(lost) == pytest.approx(whole), "waiting is a share of what is exposed"
    assert (parts[COMMUNICATION].lost is not None, parts[WAITING].lost is not None) == known
    if all(known):
        assert lost[1] / whole == pytest.approx(waiting_ms / truth.exposed_ms, rel=0.02)
    assert fall.residual == pytest.approx(0, abs=1e-6)


def test_controls_are_the_cells_that_a_waterfall_uses():
    cell = changed_cell(template(STRATEGY).cell, nccl={"NCCL_P2P_LEVEL": "LOC"}, labels=["compile"])
    made = control_cells(cell)
    alone = list(product(("none", STRATEGY), [(gpu,) for gpu in FOUR]))
    assert [(one.strategy["name"], one.gpus) for one in made] == [*alone, ("none", FOUR)]
    kept = {(one.seed, one.batch_size, one.repeat, bool(one.nccl)) for one in made}
    assert kept == {(0, 256, 0, False)} and len({one.key for one in made}) == 9
    assert made[-1].key == template("none").cell.key, "a user's own cell is the same cell"
    assert control_cells(made[0]) == control_cells(made[-1]) == []
    assert control_cells(dataclasses.replace(cell, benchmark={"name": "exchange"})) == []
    # Records of these cells explain the cell.
    simulator = Simulator(Truth(noise=0.0))
    ran = [simulator.record(one.gpus, one.strategy["name"], nccl=one.nccl) for one in (cell, *made)]
    _, parts = waterfall_of(ran)
    assert [name for name, part in parts.items() if part.lost is None] == [WAITING]


def test_controls_of_strong_scaling_keep_the_images_of_a_rank():
    cell = dataclasses.replace(template(STRATEGY).cell, batch_size=64, global_batch_size=256)
    controls = control_cells(cell)
    assert {(one.batch_size, one.global_batch_size) for one in controls} == {(64, None)}
    simulator, ran = Simulator(Truth(noise=0.0)), []
    for one in (cell, *controls):
        batch = {"batch_size": one.batch_size, "global_batch_size": one.global_batch_size}
        ran.append(simulator.record(one.gpus, one.strategy["name"], **batch))
    assert len(waterfalls(ran)[0]) == 1


SETTINGS = [{}, {"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}, {"NCCL_PROTO": "LL"}]


def settings_study(seed, repeats, noise, planted=1.0, settings=SETTINGS):
    """NCCL settings, repeats interleaved; the last one's rate is multiplied."""
    simulator, made = Simulator(Truth(noise=noise), seed), []
    for repeat, nccl in product(range(repeats), settings):
        factor = planted if nccl is settings[-1] else 1.0
        made.append(simulator.record((0, 3), repeat=repeat, nccl=nccl, factor=factor))
    return made


def test_a_noisy_setting_among_quiet_ones_makes_no_false_difference():
    """Pooled scatter called one of eight equal settings faster or slower in 16 % of such studies."""
    settings = [{}, *({"NCCL_MAX_NCHANNELS": str(count)} for count in range(1, 8))]
    wrong = 0
    for seed in range(TRIALS):
        simulator, scatter, made = Simulator(Truth(noise=0.001), seed), random.Random(seed), []
        for repeat, nccl in product(range(5), settings):
            factor = math.exp(scatter.gauss(0, 0.005)) if nccl is settings[-1] else 1.0
            made.append(simulator.record((0, 3), repeat=repeat, nccl=nccl, factor=factor))
        wrong += any(one.verdict != "no difference seen" for one in comparisons(made))
    assert wrong <= 0.1 * TRIALS


def proto(*arguments):
    """The comparison of PROTO with and without."""
    (found,) = [one for one in comparisons(settings_study(*arguments)) if "PROTO" in one.asked]
    return found


@pytest.mark.parametrize("repeats", [2, 5])
def test_equal_cells_show_no_difference(repeats):
    clean = 0
    for seed in range(TRIALS):
        found = comparisons(settings_study(seed, repeats, 0.004))
        assert len(found) == 4, "three values of ALGO among each other, PROTO with and without"
        clean += all(one.verdict == "no difference seen" for one in found)
    assert clean >= 0.9 * TRIALS


def test_a_planted_difference_is_found_where_the_noise_allows_it_and_else_refused():
    refused = 0
    for seed in range(TRIALS):
        found, noisy = proto(seed, 5, 0.003, 0.97), proto(seed, 5, 0.03, 0.97)
        assert found.verdict == "slower" and found.smallest < 0.03 < noisy.smallest
        refused += noisy.verdict == "no difference seen"
    assert refused >= 0.8 * TRIALS
    assert found.first.endswith("PROTO default") and found.second.endswith("PROTO=LL")
    assert proto(0, 5, 0.003, 1.03).verdict == "faster"


def test_the_smallest_difference_is_seen_four_times_in_five():
    smallest = 0.0121  # (t(8, 97.5 %) + t(8, 80 %)) · 0.6 % · sqrt(2/5)
    pair, found = [SETTINGS[0], SETTINGS[-1]], []
    for seed in range(100):
        found += comparisons(settings_study(seed, 5, 0.006, 1 - smallest, pair))
    assert 70 <= sum(one.verdict == "slower" for one in found) <= 92
    assert sum(one.smallest for one in found) / 100 == pytest.approx(smallest, rel=0.1)


def test_runs_that_were_not_interleaved_are_qualified_and_single_runs_have_no_verdict():
    simulator, made = Simulator(Truth(noise=0.001)), []
    for nccl, repeat in product((SETTINGS[0], SETTINGS[-1]), range(5)):
        factor = 1 - 0.05 * bool(nccl)
        made.append(simulator.record((0, 3), repeat=repeat, nccl=nccl, factor=factor))
    (found,) = comparisons(made)
    assert found.verdict == "slower" and "one was measured before the other" in found.why
    interleaved = proto(0, 5, 0.001, 0.95)
    assert (interleaved.verdict, interleaved.why) == ("slower", "")
    single = comparisons(settings_study(0, 1, 0.0, 0.5))
    assert {(one.verdict, one.smallest, one.difference.low) for one in single} == {("", None, None)}
    assert all("single run" in one.why for one in single)


def test_what_is_compared_differs_in_one_asked_thing_on_the_same_gpus():
    simulator, made = Simulator(), []
    for repeat in (0, 1):
        for optimize, precision in product(("eager", "compile"), ("bf16", "fp32")):
            asked = {"optimize": optimize, "precision": precision}
            made.append(simulator.record((0, 1), repeat=repeat, **asked))
        made.append(simulator.record((0, 2), optimize="compile", repeat=repeat))
        made.append(simulator.record((0, 1), "none", repeat))
        made.append(simulator.record((0, 1), environment={"host": "other"}, repeat=repeat))
    found = comparisons(made)
    asked = ["optimize", "optimize", "precision", "precision", "strategy"]
    assert sorted(one.asked for one in found) == asked
    assert all(one.gpus == (0, 1) and one.runs == (2, 2) for one in found)
    made = []  # batches, within their kind
    for repeat, size in product((0, 1), (128, 256)):
        for strong in ({}, {"global_batch_size": 2 * size}):
            made.append(simulator.record((0, 1), repeat=repeat, batch_size=size, **strong))
    assert [one.asked for one in comparisons(made)] == ["batch_size", "batch_size"]


def test_options_are_compared_within_their_strategy_and_strategies_with_equal_options():
    simulator, made = Simulator(), []
    for strategy, hook, repeat in product((STRATEGY, "kvstore_device"), ("none", "bf16"), (0, 1)):
        labels = [] if hook == "none" else [f"comm_hook={hook}"]
        one = simulator.record((0, 1), strategy, repeat, labels=labels)
        options = {**one.cell.strategy, "comm_hook": hook}
        made.append(changed(one, cell=changed_cell(one.cell, strategy=options)))
    found = comparisons(made)
    assert sorted(one.asked for one in found) == ["comm_hook", "comm_hook", "strategy", "strategy"]
    name = "gpus 0,1 · nccl_allreduce"
    firsts = {one.first for one in found if one.asked == "strategy"}
    assert firsts == {name, f"{name} · comm_hook=bf16"}


def test_the_noise_floor_is_that_of_equal_cells_and_the_drift_that_of_the_first():
    simulator = Simulator(Truth(noise=0.01))
    made = [simulator.record((gpu,), repeat=repeat) for repeat in range(10) for gpu in range(4)]
    drifted = {name: value * 0.98 for name, value in made[0].metrics.items()}
    made.append(changed(simulator.record((0,), repeat=10, drift=True), metrics=drifted))
    study = Study.of(made)
    assert study.runs[0].floor(IMAGES_PER_SECOND).deviation == pytest.approx(0.01, rel=0.3)
    assert findings_of(study).drifts == {"images/s": pytest.approx(-0.02)}
    assert point_of(made, (0,)).runs == 10, "the drift run is no tenth of a repeat"


def test_a_pair_of_runs_is_no_noise_floor():
    """Of one pair it would be nine times the pair's difference."""
    simulator = Simulator(Truth(noise=0.01))
    found = study_findings([simulator.record((0,), repeat=repeat) for repeat in (0, 1)])
    assert found.unsaid["Run-to-run variation: too few repeated runs"] == "repeats=5"


NEAR = ((0, 1), (2, 3))


def linked_machine(seed=0):
    """Every pair of four GPUs: 0-1 and 2-3 over NV2, the others over SYS with 5 % less rate."""
    simulator, made = Simulator(Truth(alone_ms=(54.0,) * 4, noise=0.002), seed), []
    pairs = list(combinations(range(4), 2))
    links = {f"{a}-{b}": "NV2" if (a, b) in NEAR else "SYS" for a, b in pairs}
    for repeat, pair in product(range(3), pairs):
        factor = 1.0 if pair in NEAR else 0.95
        around = {"environment": {"links": links}, "factor": factor}
        made.append(simulator.record(pair, repeat=repeat, **around))
    return made


def test_the_class_of_a_ring_is_its_worst_link_in_its_best_order():
    topology = read_topology(str(STRATEGIES_STUDY.parent.parent / "topo_dgx1_v100.txt"))
    environment = {"links": topology.to_json()["links"]}
    simulator = Simulator(Truth(alone_ms=(54.0,) * 8))
    subsets = (0, 3), (0, 1, 2, 3), (0, 5), tuple(range(8))
    made = [simulator.record(gpus, environment=environment) for gpus in subsets]
    classes = [one.link_class for one in study_findings(made).wires]
    assert classes == ["NV2", "NV1", "SYS", "NV2"]


def test_measured_links_stand_beside_the_exchange():
    simulator = Simulator()
    enabled = [[0, 40, 10], [38, 0, 40], [11, 41, 0]]
    disabled = [[0, 5, 5], [5, 0, 5], [5, 5, 0]]
    matrices = {"unidirectional_enabled": enabled, "unidirectional_disabled": disabled}
    p2p = simulator.record((3, 0, 1), benchmark={"name": "p2p"})
    made = [changed(p2p, metrics={}, tables={"p2p": {"matrices": matrices}})]
    made += [simulator.record(gpus) for gpus in ((0, 3), (0, 1, 3), (0, 2))]
    made.append(changed(simulator.record((0, 1)), effective={"transport": "SHM/direct/direct"}))
    found = {one.gpus: one.p2p_gb_per_s for one in study_findings(made).wires}
    # A ring of three runs both ways round.
    assert found == {(0, 3): 38.0, (0, 1, 3): 20.0, (0, 1): 5.0, (0, 2): None}


def test_what_a_link_is_worth():
    true, missed = 0.05 * Truth(alone_ms=(54.0,) * 4).rate(STRATEGY, (0, 1)) / 2, 0
    for seed in range(FEWER):
        (value,) = study_findings(linked_machine(seed)).worth
        missed += not holds(value.lost, true)
    assert missed <= MOST_MISSED
    cell = (value.strategy, value.link_class, value.gradient_bytes, value.batch_size)
    assert cell == (STRATEGY, "SYS", 102_228_128, 256) and "NV2 against SYS" in value.label


def test_nothing_only_unusable_records_and_one_cell_say_what_they_cannot():
    assert study_findings([]) == Findings(unsaid={"Anything: there is no record": ""})
    simulator = Simulator()
    made = [simulator.record((0,), verdict="invalid"), simulator.record((0, 1), state="failed")]
    found = study_findings(made)
    assert [why.split(":")[0] for _, why in Study.of(made).left_out] == ["invalid", "failed"]
    assert "Anything: none of its 2 runs is finished and valid" in found.unsaid
    assert not found.scaling.curves and not found.comparisons and not found.wires
    found = study_findings([simulator.record((0, 1))])
    assert len(found.scaling.curves) == 1 and len(found.wires) == 1
    assert [*found.scaling.refusals.values()] == ["gpus=each"]
    assert any("Run-to-run variation" in text for text in found.unsaid)


def test_a_later_attempt_supersedes_an_earlier_one():
    simulator = Simulator(Truth(noise=0.0))
    made = [simulator.record((0,), factor=0.5), simulator.record((0,))]
    left_out = ((made[0], "a later attempt at the same cell counts instead"),)
    assert Study.of(made).left_out == left_out
    assert point_of(made, (0,)).rate.value == pytest.approx(simulator.truth.rate(STRATEGY, (0,)))


def test_two_machines_are_two_curves_and_a_sentence():
    first, second, made = Simulator(), Simulator(), []
    for gpus in ((0,), (0, 1)):
        made.append(first.record(gpus))
        elsewhere = second.record(gpus, environment={"host": "other"})
        made.append(changed(elsewhere, record_id=f"b{gpus}"))
    found = study_findings(made)
    assert [len(curve.points) for curve in found.scaling.curves] == [2, 2]
    assert all(curve.points[1].efficiency for curve in found.scaling.curves)
    assert found.comparisons == ()
    said = "2 runs are not compared with equal requests: different machine"
    assert f"{said} (vm and other)" in found.scaling.refusals


def test_benchmarks_without_a_rate_take_part_where_they_can():
    exchange = Simulator().record((0, 1), benchmark={"name": "exchange"})
    found = study_findings([changed(exchange, metrics={"comm/busbw_gb_per_s": 200.0})])
    assert found.scaling.curves == () and [one.exchange_gb_per_s for one in found.wires] == [200.0]
    assert any("no run measured images per second" in text for text in found.unsaid)


def test_records_that_say_little_are_no_error():
    one, rate = Simulator().record((0, 1)), "throughput/images_per_second"
    bare = changed(one, environment={}, metrics={rate: math.nan})
    ends = {rate: {"low": 1.0, "high": math.inf}}
    metrics = {rate: 5.0, "comm/busbw_gb_per_s": -1.0}
    odd = changed(one, record_id="odd", metrics=metrics, within_run=ends)
    assert study_findings([bare, odd]).scaling.curves[0].points[0].rate.low is None
