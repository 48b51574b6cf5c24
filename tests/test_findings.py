"""From records to findings: on a simulated machine whose truth is known every interval holds it as often as it says, equal
cells show no difference, and what cannot be said is refused with the reason. Real records give the figures of RESULTS.md.
"""

import dataclasses
import math
from itertools import combinations

import pytest
from build import changed_cell
from simulate import STRATEGIES_STUDY, STRATEGY, Simulator, Truth, changed, template

from analysis.findings import comparisons as of_comparisons
from analysis.findings import scaling as of_scaling
from analysis.findings import waterfall as of_waterfall
from analysis.findings.baselines import control_cells
from analysis.findings.clock_loss import NAME as CLOCKS
from analysis.findings.communication_parts import COMMUNICATION
from analysis.findings.examine import findings_of
from analysis.findings.record_values import values_of
from analysis.findings.waterfall import CONTENTION, OVERHEAD, SPREAD, WAIT, WAITING
from analysis.study.estimates import Findings
from analysis.study.noise_floor import CLOCK
from analysis.study.study import Study
from analysis.topology.readers import read_topology
from benchmarks import record as records

FOUR = (0, 1, 2, 3)
TRIALS = 100
FEWER = 60  # studies with controls: slower to make
MOST_MISSED = 6  # of 60: 95 % intervals miss 3 on average, more than 6 in three sets of a hundred


def study_findings(made):
    return findings_of(Study.of(made))


def scaling(made):
    return of_scaling.curves(Study.of(made))


def waterfalls(made):
    return of_waterfall.waterfalls(Study.of(made))


def comparisons(made):
    return of_comparisons.comparisons(Study.of(made))


def wires(made):
    return study_findings(made).wires


def worth(made):
    return study_findings(made).worth


def holds(interval, truth):
    return interval.low <= truth <= interval.high


def together(curves, gpus):
    """The point of a subset, of the one curve that has it."""
    (found,) = [one for curve in curves for one in curve.points if one.gpus == tuple(gpus)]
    return found


# Scaling.


def efficiency_of(made):
    curve = next(curve for curve in scaling(made).curves if curve.label.startswith(STRATEGY))
    return together([curve], FOUR).efficiency


@pytest.mark.parametrize(
    ("alone_ms", "repeats"),
    [((54.0, 54.3, 53.8, 54.1), 3), ((54.0, 54.3, 53.8, 54.1), 5), ((54.0,) * 4, 5)],
    ids=["3", "5", "5, all GPUs equal"],
)
def test_intervals_hold_the_true_efficiency_as_often_as_they_say(alone_ms, repeats):
    truth = Truth(alone_ms)
    true = truth.rate(STRATEGY, FOUR) / (4 * min(truth.rate(STRATEGY, (gpu,)) for gpu in FOUR))
    found = [
        efficiency_of(Simulator(truth, seed).explained(FOUR, repeats)) for seed in range(FEWER)
    ]
    assert sum(not holds(one, true) for one in found) <= MOST_MISSED
    assert max(abs(one.value - true) for one in found) < 6 * truth.noise


def test_more_repeats_narrow_the_interval_down_to_the_scatter_of_one_run():
    widths = []
    for repeats in (3, 5, 15):
        found = [efficiency_of(Simulator(seed=seed).explained(FOUR, repeats)) for seed in range(10)]
        widths.append(sum(one.high - one.low for one in found))
    assert widths[0] > widths[1] > widths[2] > 10 * 2 * 1.96 * Truth().noise


def test_equal_records_give_equal_findings_in_any_order():
    made = Simulator().explained(FOUR)
    assert study_findings(made) == study_findings(made[::-1])


def test_efficiency_is_against_the_slowest_members_median():
    simulator = Simulator(Truth(noise=0.0))
    made = [simulator.record((gpu,)) for gpu in (0, 1)]
    made += [
        simulator.record((1,), repeat=repeat, factor=factor)
        for repeat, factor in ((1, 0.9), (2, 0.9), (3, 0.9))
    ]
    made.append(simulator.record((0, 1)))
    made = [one for one in made if one.cell.gpus != (1,) or one.cell.repeat]
    found = together(scaling(made).curves, (0, 1))
    slowest = simulator.truth.rate(STRATEGY, (1,)) * 0.9
    assert found.slowest == 1
    assert found.baseline.value == pytest.approx(slowest, rel=1e-9)
    assert found.efficiency.value == pytest.approx(
        simulator.truth.rate(STRATEGY, (0, 1)) / (2 * slowest)
    )


def test_weak_and_strong_scaling_never_mix():
    simulator = Simulator(Truth(noise=0.0))
    weak = [simulator.record(gpus) for gpus in ((0,), (0, 1))]
    strong = [
        simulator.record(gpus, batch_size=1024 // len(gpus), global_batch_size=1024)
        for gpus in ((0,), (0, 1), FOUR)
    ]
    found = scaling(weak + strong)
    assert [(curve.kind, [one.gpus for one in curve.points]) for curve in found.curves] == [
        ("weak", [(0,), (0, 1)]),
        ("strong", [(0,), (0, 1), FOUR]),
    ]
    assert found.curves[1].points[2].efficiency.value == pytest.approx(
        simulator.truth.rate(STRATEGY, FOUR) / 4 / (4 * simulator.truth.rate(STRATEGY, (0,)))
    )
    assert any("weak scaling" in one and "strong scaling" in one for one in found.refusals)
    (refusal,) = scaling([weak[0], strong[1]]).refusals[:1]
    assert (
        "differs in" in refusal
        and "the kind of batch (weak scaling, not 1024 images per step)" in refusal
    )


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"gpu": {"driver": "590"}}, "driver (590, not 580)"),
        (
            {"versions": {"torch": "2.12.0", "cuda": "13.0", "nccl": "2.28.9"}},
            "torch (2.12.0, not 2.11.0+cu130)",
        ),
        (
            {"versions": {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.30.1"}},
            "NCCL (2.30.1, not 2.28.9)",
        ),
        (
            {"versions": {"torch": "2.11.0+cu130", "cuda": "12.8", "nccl": "2.28.9"}},
            "CUDA (12.8, not 13.0)",
        ),
        ({"host": "other"}, "machine (other, not vm)"),
        (
            {"planned_uuids": ["GPU-of-another-machine"]},
            "machine (GPUs on vm · GPU-of-anoth, not GPUs on vm · GPU-0)",
        ),
    ],
)
def test_other_surroundings_are_refused_with_the_difference_named(environment, named):
    simulator = Simulator()
    made = [simulator.record((0,), environment=environment), simulator.record((0, 1))]
    found = scaling(made)
    assert [one.efficiency for curve in found.curves for one in curve.points] == [None, None]
    assert any(named in refusal for refusal in found.refusals), found.refusals


def test_how_long_was_measured_does_not_matter():
    simulator = Simulator()
    longer = template(STRATEGY).cell.benchmark | {"max_seconds": 60}
    made = [simulator.record((0,), benchmark=longer), simulator.record((0, 1))]
    assert together(scaling(made).curves, (0, 1)).efficiency is not None
    assert made[1].record_id in values_of(made)


def test_members_without_a_baseline_are_named():
    simulator = Simulator()
    found = scaling([simulator.record((0,)), simulator.record(FOUR)])
    assert together(found.curves, FOUR).without_baseline == (1, 2, 3)
    assert "not every member was measured alone" in found.refusals[0]


def test_laws_are_fitted_to_enough_points_only():
    alpha, beta = 0.02, 0.001
    simulator = Simulator(Truth(alone_ms=(54.0,) * 8, noise=0.0))

    def of(*sizes):
        made = [simulator.record((0,))]
        for size in sizes:
            usl = 1 / (1 + alpha * (size - 1) + beta * size * (size - 1))
            gpus = tuple(range(size))
            ideal = size * simulator.truth.rate(STRATEGY, (0,))
            made.append(
                simulator.record(gpus, factor=usl * ideal / simulator.truth.rate(STRATEGY, gpus))
            )
        (curve,) = scaling(made).curves
        return {fit.law: fit for fit in curve.fits}

    assert of(2) == {}
    assert set(of(2, 4)) == {"amdahl"}
    found = of(2, 4, 8)
    assert found["usl"].parameters == pytest.approx(
        {"contention": alpha, "coherency": beta}, rel=1e-6
    )
    assert found["usl"].error < 1e-9 < found["amdahl"].error


# Waterfall.


def true_parts(truth, gpus):
    """Images per second of every part, from the truth's step times."""
    slowest, images = max(truth.alone_ms[gpu] for gpu in gpus), len(gpus) * truth.batch_size * 1e3
    parts = {
        SPREAD: sum(truth.batch_size * 1e3 / truth.alone_ms[gpu] for gpu in gpus) - images / slowest
    }
    spent = slowest
    for name, ms in (
        (OVERHEAD, truth.overhead_ms),
        (CLOCKS, (slowest + truth.overhead_ms) * (1 / truth.clock_share - 1)),
        (CONTENTION, truth.contention_ms),
        (COMMUNICATION, truth.exposed_ms),
    ):
        parts[name] = images / spent - images / (spent + ms)
        spent += ms
    return parts | {"residual": images / spent - truth.rate(STRATEGY, gpus)}


@pytest.mark.parametrize("unexplained_ms", [0.0, 0.6])
def test_every_part_of_the_waterfall_is_recovered_within_its_interval(unexplained_ms):
    truth = Truth(unexplained_ms=unexplained_ms)
    true = true_parts(truth, FOUR)
    hits = dict.fromkeys(true, 0)
    for seed in range(FEWER):
        (found,), unsaid = waterfalls(Simulator(truth, seed).explained(FOUR, repeats=5))
        assert unsaid == ()
        parts = {part.name: part.lost for part in found.parts if part.lost}
        for name in true.keys() - {"residual"}:
            hits[name] += holds(parts[name], true[name])
        hits["residual"] += found.residual_low <= true["residual"] <= found.residual_high
        assert closes(found)
    assert all(FEWER - count <= MOST_MISSED for count in hits.values()), hits


def closes(found):
    """Ideal, parts, residual and measured rate are one sum."""
    lost = sum(part.lost.value for part in found.parts if part.lost and not part.above_ideal)
    return math.isclose(
        found.ideal.value - lost - found.residual, found.measured.value, rel_tol=1e-9
    )


@pytest.mark.parametrize("clock_share", [1.0, 0.943, 1.02])
def test_without_noise_the_parts_are_exact_and_what_no_control_sees_is_the_residual(clock_share):
    truth = Truth(noise=0.0, unexplained_ms=0.4, clock_share=clock_share)
    (found,), _ = waterfalls(Simulator(truth).explained(FOUR, repeats=1))
    true = true_parts(truth, FOUR)
    assert {part.name: part.lost.value for part in found.parts if part.lost} == pytest.approx(
        {name: true[name] for name in (SPREAD, OVERHEAD, CLOCKS, CONTENTION, COMMUNICATION)}
    )
    assert found.residual == pytest.approx(true["residual"])
    assert found.residual > 100, "planted"


def test_a_missing_control_leaves_its_part_unknown_and_the_waterfall_closed():
    made = Simulator(Truth(noise=0.0)).explained(FOUR, repeats=1)

    def without(unwanted):
        (found,), _ = waterfalls(
            [one for one in made if not unwanted(one.cell.strategy["name"], one.cell.gpus)]
        )
        assert closes(found)
        return {part.name: part for part in found.parts}

    found = without(lambda strategy, gpus: strategy == "none" and len(gpus) > 1)
    assert found[CONTENTION].lost is None and "subset" in found[CONTENTION].why
    found = without(lambda strategy, gpus: strategy != "none" and len(gpus) == 1)
    assert found[OVERHEAD].lost is None
    assert "what the strategy costs on one GPU" in found[COMMUNICATION].why
    found = without(lambda strategy, gpus: strategy == "none" and gpus == (2,))
    assert found[SPREAD].lost is None and "gpus 2" in found[SPREAD].why
    unsampled = [changed(one, metrics={**one.metrics, CLOCK: math.nan}) for one in made]
    (found,), _ = waterfalls(unsampled)
    parts = {part.name: part for part in found.parts}
    assert parts[CLOCKS].lost is None and "not sampled" in parts[CLOCKS].why and closes(found)
    bare = [one for one in made if one.cell.strategy["name"] != "none"]
    assert waterfalls(bare)[0] == ()
    assert "waterfall=true" in waterfalls(bare)[1][0]


@pytest.mark.parametrize(
    ("waiting_ms", "known"), [(0.3, (True, True)), (2.0, (False, True)), (-0.1, (True, False))]
)
def test_a_trace_tells_waiting_from_communication(waiting_ms, known):
    truth = Truth(noise=0.0)
    behind_ms = (
        sum(max(truth.alone_ms) - ms for ms in truth.alone_ms) / 4
    )  # the mean rank waits for the slowest GPU
    made = [
        changed(one, metrics=one.metrics | {WAIT: waiting_ms + behind_ms})
        if len(one.cell.gpus) > 1
        else one
        for one in Simulator(truth).explained(FOUR, repeats=1)
    ]
    (found,), _ = waterfalls(made)
    parts = {part.name: part for part in found.parts}
    whole = true_parts(truth, FOUR)[COMMUNICATION]
    told = [parts[name].lost.value for name in (COMMUNICATION, WAITING) if parts[name].lost]
    assert sum(told) == pytest.approx(whole), "waiting is a share of what is exposed"
    assert (parts[COMMUNICATION].lost is not None, parts[WAITING].lost is not None) == known
    if all(known):
        assert told[1] / whole == pytest.approx(waiting_ms / truth.exposed_ms, rel=0.02)
    assert found.residual == pytest.approx(0, abs=1e-6)
    (found,), _ = waterfalls(Simulator(truth).explained(FOUR, repeats=1))
    assert "no trace" in next(part for part in found.parts if part.name == WAITING).why


def test_controls_are_the_cells_that_a_waterfall_uses():
    cell = changed_cell(template(STRATEGY).cell, nccl={"NCCL_P2P_LEVEL": "LOC"}, labels=["compile"])
    made = control_cells(cell)
    assert [(one.strategy["name"], one.gpus) for one in made] == [
        *(("none", (gpu,)) for gpu in FOUR),
        *((STRATEGY, (gpu,)) for gpu in FOUR),
        ("none", FOUR),
    ]
    assert {(one.seed, one.batch_size, one.repeat, bool(one.nccl)) for one in made} == {
        (0, 256, 0, False)
    }
    assert len({one.key for one in made}) == 9
    asked = template("none")
    assert made[-1].key == asked.cell.key, "a user's own cell is the same cell"
    assert control_cells(made[0]) == control_cells(made[-1]) == []
    assert control_cells(dataclasses.replace(cell, benchmark={"name": "exchange"})) == []
    # Records of these cells explain the cell.
    simulator = Simulator(Truth(noise=0.0))
    ran = [simulator.record(one.gpus, one.strategy["name"], nccl=one.nccl) for one in (cell, *made)]
    (found,), _ = waterfalls(ran)
    assert [part.name for part in found.parts if part.lost is None] == [WAITING]


def test_controls_of_strong_scaling_keep_the_images_of_a_rank():
    cell = template(STRATEGY).cell
    cell = dataclasses.replace(
        cell, batch_size=64, global_batch_size=256, labels=("global batch 256", "compile")
    )
    assert {(one.batch_size, one.global_batch_size) for one in control_cells(cell)} == {(64, None)}
    simulator = Simulator(Truth(noise=0.0))
    ran = [
        simulator.record(
            one.gpus,
            one.strategy["name"],
            batch_size=one.batch_size,
            global_batch_size=one.global_batch_size,
        )
        for one in (cell, *control_cells(cell))
    ]
    assert len(waterfalls(ran)[0]) == 1


# Comparisons.

SETTINGS = [{}, {"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}, {"NCCL_PROTO": "LL"}]


def settings_study(seed, repeats, noise, planted=1.0):
    """Four NCCL settings, repeats interleaved; the last one's rate is multiplied."""
    simulator = Simulator(Truth(noise=noise), seed)
    return [
        simulator.record(
            (0, 3), repeat=repeat, nccl=nccl, factor=planted if nccl is SETTINGS[-1] else 1.0
        )
        for repeat in range(repeats)
        for nccl in SETTINGS
    ]


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_equal_cells_show_no_difference(repeats):
    clean = 0
    for seed in range(TRIALS):
        found = comparisons(settings_study(seed, repeats, noise=0.004))
        assert len(found) == 4, "three values of ALGO among each other, PROTO with and without"
        clean += all(one.verdict == "no difference seen" for one in found)
    assert clean >= 93


def test_a_planted_difference_is_found_where_the_noise_allows_it():
    for seed in range(TRIALS):
        (found,) = [
            one
            for one in comparisons(settings_study(seed, 5, noise=0.003, planted=0.97))
            if "PROTO" in one.asked
        ]
        assert found.verdict == "slower"
        assert found.smallest < 0.03
    assert found.first.endswith("PROTO untouched") and found.second.endswith("PROTO=LL")
    faster = comparisons(settings_study(0, 5, noise=0.003, planted=1.03))
    assert next(one for one in faster if "PROTO" in one.asked).verdict == "faster"


def test_the_same_difference_is_refused_where_the_noise_is_larger():
    refused = 0
    for seed in range(TRIALS):
        (found,) = [
            one
            for one in comparisons(settings_study(seed, 5, noise=0.03, planted=0.97))
            if "PROTO" in one.asked
        ]
        refused += found.verdict == "no difference seen"
        assert found.smallest > 0.03
    assert refused >= 80


def test_the_smallest_difference_is_seen_four_times_in_five():
    pair = [{}, {"NCCL_PROTO": "LL"}]
    seen, told = 0, []
    smallest = 0.0121  # (t(8, 97.5 %) + t(8, 80 %)) · 0.6 % · sqrt(2/5)
    for seed in range(TRIALS):
        simulator = Simulator(Truth(noise=0.006), seed)
        made = [
            simulator.record((0, 3), repeat=repeat, nccl=nccl, factor=1 - smallest * bool(nccl))
            for repeat in range(5)
            for nccl in pair
        ]
        (found,) = comparisons(made)
        seen += found.verdict == "slower"
        told.append(found.smallest)
    assert 70 <= seen <= 92
    assert sum(told) / TRIALS == pytest.approx(smallest, rel=0.1)


def test_runs_that_were_not_interleaved_are_qualified():
    simulator = Simulator(Truth(noise=0.001))
    made = [
        simulator.record((0, 3), repeat=repeat, nccl=nccl, factor=1 - 0.05 * bool(nccl))
        for nccl in ({}, {"NCCL_PROTO": "LL"})
        for repeat in range(5)
    ]
    (found,) = comparisons(made)
    assert found.verdict == "slower" and "one cell was measured before the other" in found.why
    assert not any(
        one.why
        for one in comparisons(settings_study(0, 5, noise=0.001, planted=0.95))
        if one.verdict == "slower"
    )


def test_single_runs_have_no_verdict():
    found = comparisons(settings_study(0, 1, noise=0.0, planted=0.5))
    assert {(one.verdict, one.smallest, one.difference.low) for one in found} == {("", None, None)}
    assert all("single run" in one.why for one in found)


def test_what_is_compared_differs_in_one_asked_thing_on_the_same_gpus():
    simulator = Simulator()
    made = [simulator.record((0, 1), optimize=optimize, precision=precision, repeat=repeat)
            for repeat in (0, 1) for optimize in ("eager", "compile") for precision in ("bf16", "fp32")]  # fmt: skip
    made += [simulator.record((0, 2), optimize="compile", repeat=repeat) for repeat in (0, 1)]
    made += [simulator.record((0, 1), "none", repeat) for repeat in (0, 1)]
    made += [
        simulator.record((0, 1), environment={"host": "other"}, repeat=repeat) for repeat in (0, 1)
    ]
    found = comparisons(made)
    assert sorted(one.asked for one in found) == [
        "optimize",
        "optimize",
        "precision",
        "precision",
        "strategy",
    ]
    assert all(one.gpus == (0, 1) and one.runs == (2, 2) for one in found)


def test_batches_are_compared_within_their_kind():
    simulator = Simulator()
    weak = [{"batch_size": 128}, {"batch_size": 256}]
    strong = [
        {"batch_size": 128, "global_batch_size": 256},
        {"batch_size": 256, "global_batch_size": 512},
    ]
    made = [
        simulator.record((0, 1), repeat=repeat, **batch)
        for repeat in (0, 1)
        for batch in (*weak, *strong)
    ]
    assert [one.asked for one in comparisons(made)] == ["batch_size", "batch_size"]


def test_options_are_compared_within_their_strategy_and_strategies_with_equal_options():
    simulator = Simulator()
    made = []
    for strategy in (STRATEGY, "kvstore_device"):
        for hook in ("none", "bf16"):
            labels = ["comm_hook=bf16"] if hook == "bf16" else []
            for repeat in (0, 1):
                one = simulator.record((0, 1), strategy, repeat, labels=labels)
                made.append(
                    changed(
                        one,
                        cell=changed_cell(
                            one.cell, strategy={**one.cell.strategy, "comm_hook": hook}
                        ),
                    )
                )
    found = comparisons(made)
    assert sorted(one.asked for one in found) == ["comm_hook", "comm_hook", "strategy", "strategy"]
    assert {one.first for one in found if one.asked == "strategy"} == {
        "gpus 0,1 · nccl_allreduce",
        "gpus 0,1 · nccl_allreduce · comm_hook=bf16",
    }


def test_the_noise_floor_is_that_of_equal_cells_and_the_drift_that_of_the_first():
    simulator = Simulator(Truth(noise=0.01))
    made = [simulator.record((gpu,), repeat=repeat) for repeat in range(10) for gpu in range(4)]
    first = made[0]
    made.append(
        changed(
            simulator.record((0,), repeat=10, drift=True),
            metrics={k: v * 0.98 for k, v in first.metrics.items()},
        )
    )
    (found,) = study_findings(made).noises
    assert found.deviation == pytest.approx(0.01, rel=0.3)
    assert found.floor == pytest.approx(0.01 * 2.03 * math.sqrt(2), rel=0.3)
    assert (found.pairs, found.freedom) == (4 * 45, 36)
    assert found.drift == pytest.approx(-0.02)
    assert together(scaling(made).curves, (0,)).runs == 10, "the drift run is no tenth of a repeat"


def test_two_pairs_of_runs_are_no_noise_floor():
    """Of one pair it would be nine times the pair's difference: 106 % for runs that differ by 12 %."""
    simulator = Simulator(Truth(noise=0.01))
    found = study_findings(
        [simulator.record((gpu,), repeat=repeat) for repeat in range(2) for gpu in range(2)]
    )
    (noise,) = found.noises
    assert (noise.floor, noise.pairs, noise.freedom) == (None, 2, 2)
    assert "how far runs differ: too few cells ran twice (repeats=5 does that)" in found.unsaid


# Wires.


def wired_machine(seed=0, noise=0.002, repeats=3):
    """Every pair of a machine of four: 0-1 and 2-3 over NV2, the others over SYS with 20 % less bandwidth and 5 % less rate."""
    simulator = Simulator(Truth(alone_ms=(54.0,) * 4, noise=noise), seed)
    links = {
        f"{a}-{b}": "NV2" if (a, b) in ((0, 1), (2, 3)) else "SYS"
        for a, b in combinations(range(4), 2)
    }
    made = []
    for repeat in range(repeats):
        for pair in combinations(range(4), 2):
            far = links["{}-{}".format(*pair)] == "SYS"
            one = simulator.record(
                pair, repeat=repeat, factor=0.95 if far else 1.0, environment={"links": links}
            )
            busbw = one.metrics["comm/busbw_gb_per_s"] * (0.8 if far else 1.0)
            made.append(changed(one, metrics=one.metrics | {"comm/busbw_gb_per_s": busbw}))
    return made


def test_each_subset_stands_beside_its_links():
    found = wires(wired_machine())
    assert {one.gpus: one.link_class for one in found} == {
        pair: "NV2" if pair in ((0, 1), (2, 3)) else "SYS" for pair in combinations(range(4), 2)
    }
    assert {one.transport for one in found} == {"P2P/CUMEM over NV18"}
    assert found[0].exchange_gb_per_s == pytest.approx(270, rel=0.02)


def test_the_class_of_a_ring_is_its_worst_link_in_its_best_order():
    topology = read_topology(str(STRATEGIES_STUDY.parent.parent / "topo_dgx1_v100.txt"))
    links = {f"{a}-{b}": topology.link_between(a, b) for a, b in combinations(topology.gpus, 2)}
    simulator = Simulator(Truth(alone_ms=(54.0,) * 8))
    subsets = (0, 3), (0, 1, 2, 3), (0, 5), tuple(range(8))
    made = [simulator.record(gpus, environment={"links": links}) for gpus in subsets]
    classes = [one.link_class for one in wires(made)]
    assert classes == ["NV2", "NV1", "SYS", "NV2"]


def test_measured_links_stand_beside_the_exchange():
    simulator = Simulator()
    matrix, without = [[0, 40, 10], [38, 0, 40], [11, 41, 0]], [[0, 5, 5], [5, 0, 5], [5, 5, 0]]
    p2p = changed(
        simulator.record((3, 0, 1), benchmark={"name": "p2p"}),
        metrics={},
        tables={
            "p2p": {
                "matrices": {"unidirectional_enabled": matrix, "unidirectional_disabled": without}
            }
        },
    )
    staged = changed(simulator.record((0, 1)), effective={"transport": "SHM/direct/direct"})
    made = [
        p2p,
        simulator.record((0, 3)),
        simulator.record((0, 1, 3)),
        staged,
        simulator.record((0, 2)),
    ]
    found = {one.gpus: one.p2p_gb_per_s for one in wires(made)}
    assert found == {(0, 3): 38.0, (0, 1, 3): 20.0, (0, 1): 5.0, (0, 2): None}, (
        "a ring of three runs both ways round"
    )


def test_what_a_link_is_worth():
    found = [worth(wired_machine(seed)) for seed in range(FEWER)]
    truth = Truth(alone_ms=(54.0,) * 4)
    true = 0.05 * truth.rate(STRATEGY, (0, 1)) / 2
    assert all(len(one) == 1 for one in found)
    assert sum(not holds(one[0].lost, true) for one in found) <= MOST_MISSED
    (one,) = found[0]
    assert (one.strategy, one.link_class, one.gradient_bytes, one.batch_size) == (
        STRATEGY,
        "SYS",
        102_228_128,
        256,
    )
    assert "NV2 against SYS" in one.label


# What cannot be said.


def test_an_empty_study_says_so():
    assert study_findings([]) == Findings(unsaid=("anything: it has no record",))


def test_only_unusable_records_say_why():
    simulator = Simulator()
    made = [simulator.record((0,), verdict="invalid"), simulator.record((0, 1), state="failed")]
    found = study_findings(made)
    assert [why.split(":")[0] for _, why in found.excluded] == ["invalid", "failed"]
    assert found.unsaid[0] == "anything: none of its 2 records is finished and valid"
    assert not found.scaling.curves and not found.comparisons and not found.wires


def test_one_cell():
    found = study_findings([Simulator().record((0, 1))])
    assert len(found.scaling.curves) == 1 and len(found.wires) == 1
    assert "no cell ran on one GPU" in found.scaling.refusals[0]
    assert any("how far runs differ" in one for one in found.unsaid)


def test_a_later_attempt_supersedes_an_earlier_one():
    simulator = Simulator(Truth(noise=0.0))
    made = [simulator.record((0,), factor=0.5), simulator.record((0,))]
    found = study_findings(made)
    assert found.excluded == ((made[0].name, "a later attempt at the same cell counts instead"),)
    assert together(found.scaling.curves, (0,)).rate.value == pytest.approx(
        simulator.truth.rate(STRATEGY, (0,))
    )


def test_two_machines_are_two_curves_and_a_sentence():
    first, second = Simulator(), Simulator()
    other = {"host": "other"}
    made = [first.record((0,)), first.record((0, 1))]
    made += [
        changed(second.record(gpus, environment=other), record_id=f"b{gpus}")
        for gpus in ((0,), (0, 1))
    ]
    found = study_findings(made)
    assert [len(curve.points) for curve in found.scaling.curves] == [2, 2]
    assert all(curve.points[1].efficiency for curve in found.scaling.curves)
    assert found.comparisons == ()
    assert found.scaling.refusals[-1] == (
        "2 cells are not compared with others that were asked alike: different machine (vm and other)"
    )


def test_benchmarks_without_a_rate_take_part_where_they_can():
    simulator = Simulator()
    exchange = simulator.record((0, 1), benchmark={"name": "exchange"})
    exchange = changed(exchange, metrics={"comm/busbw_gb_per_s": 200.0})
    copies = changed(
        simulator.record((0,), benchmark={"name": "p2p"}), metrics={"p2p/write_gb_per_s": 377.25}
    )
    found = study_findings([exchange, copies])
    assert found.scaling.curves == () and [one.exchange_gb_per_s for one in found.wires] == [200.0]
    assert "no cell measured images per second" in found.unsaid[0]


def test_records_that_say_little_are_no_error():
    one = Simulator().record((0, 1))
    bare = changed(one, environment={}, metrics={"throughput/images_per_second": math.nan})
    odd = changed(one, record_id="odd", metrics={
        "throughput/images_per_second": 5.0, "comm/busbw_gb_per_s": -1.0},
        within_run={"throughput/images_per_second": {"low": 1.0, "high": math.inf}})  # fmt: skip
    found = study_findings([bare, odd])
    assert together(found.scaling.curves, (0, 1)).rate.low is None


# Real records.


def real(name):
    return records.read_study(STRATEGIES_STUDY.parent / name)[0]


def test_real_records_give_the_table_of_the_results():
    found = study_findings(real("scaling"))
    shown = {
        (curve.label, one.gpus): (
            round(one.rate.value),
            one.efficiency and round(100 * one.efficiency.value, 1),
        )
        for curve in found.scaling.curves
        for one in curve.points
    }
    assert shown["resnet50 · eager", (0, 1)] == (9371, 99.9)
    assert shown["resnet50 · eager", FOUR] == (18676, 99.5)
    assert shown["resnet50 · compile", (0, 1)] == (12904, 97.6)
    assert shown["resnet50 · compile", FOUR] == (25738, 97.4)
    assert shown["inception_v3 · eager", FOUR] == (9521, 99.5)
    assert shown["inception_v3 · compile", (0,)] == (4440, None)
    for record in real("scaling"):
        if share := record.metrics.get("scaling/efficiency"):
            (mine,) = [
                one
                for c in found.scaling.curves
                for one in c.points
                if record.record_id in one.record_ids
            ]
            assert mine.efficiency.value == pytest.approx(share)
    assert [name.split(" · ")[0] for name, _ in found.excluded] == ["inception_v3"]


def test_real_records_of_settings_and_strategies():
    settings = study_findings(real("settings"))
    level = {
        one.second: one.difference.value
        for one in settings.comparisons
        if "P2P_LEVEL untouched" in one.first
    }
    assert level["gpus 0,3 · P2P_LEVEL=LOC"] == pytest.approx(-0.025, abs=5e-4)
    assert {one.verdict for one in settings.comparisons} == {""}, "single runs"
    found = study_findings(real("strategies"))
    busbw = {one.label: one.exchange_gb_per_s for one in found.wires}
    assert busbw["nccl_allreduce"] == pytest.approx(277.7, abs=0.1)
    assert busbw["kvstore_device · reduce=owner"] == pytest.approx(118.0, abs=0.1)
    assert {one.link_class for one in found.wires} == {"NV18"}
    assert len(Study.of(real("strategies")).varied_provenance) == 0, "one machine"
