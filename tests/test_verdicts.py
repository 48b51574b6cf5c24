"""Verdicts of every benchmark with a headline: on its own rate, within equal work, one family."""

import dataclasses
import math

import numpy as np
import pytest
from build import changed_cell, record, study
from scipy.stats import t as student
from scipy.stats import ttest_rel
from simulate import STRATEGY, Simulator, Truth, changed

from analysis.findings import comparisons as of_comparisons
from analysis.findings.comparisons import drifts
from analysis.report.build import examine
from analysis.study.conditions import primary_rate
from analysis.study.intervals import of_median
from analysis.study.measured_numbers import significant
from analysis.study.study import Study

EXCHANGE = {"name": "exchange", "keys": "all", "per_key": False}
COLLECTIVES = {"name": "collectives", "collective": "all_reduce", "calls": "nccl"}
COLLECTIVES |= {"max_bytes": "1G", "dtype": "float32"}
JACOBI = {"name": "jacobi", "nx": 16384, "exchange": "peer"}
UNTRAINED = {"model": {"name": "none", "builder": "none"}, "labels": []}
VALUES = {"exchange": 0.45, "collectives": 330.0, "jacobi": 0.26}  # of each headline's metric


def comparisons(made):
    return of_comparisons.comparisons(Study.of(made))


class Laboratory:
    """Makes runs of benchmarks that count no images; equal seeds make equal records."""

    def __init__(self, seed=0, noise=0.005):
        self.noise, self.draw = noise, np.random.default_rng(seed)
        self.simulator = Simulator(Truth(noise=0.002), seed)

    def run(self, benchmark, repeat=0, *, factor=1.0, strategy=STRATEGY, **cell):
        """One run on GPUs 0 and 1; its metric is multiplied by `factor`."""
        name = benchmark["name"]
        value = VALUES[name] * factor * math.exp(self.draw.normal(0, self.noise))
        asked = cell if name == "exchange" else UNTRAINED | cell
        made = self.simulator.record((0, 1), strategy, repeat, benchmark=benchmark, **asked)
        cell = changed_cell(
            made.cell, strategy={"name": strategy if name == "exchange" else "none"}
        )
        return changed(made, cell=cell, metrics={primary_rate(cell).metric: value})

    def runs(self, *cells, repeats=5):
        """Repeats of several cells, interleaved; each is what `run` takes."""
        return [self.run(repeat=repeat, **cell) for repeat in range(repeats) for cell in cells]


def exchanges(factor):
    other = {"benchmark": EXCHANGE, "strategy": "kvstore_device", "factor": factor}
    return {"benchmark": EXCHANGE}, other


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_a_planted_difference_of_exchange_times_is_found_and_less_time_is_faster(factor):
    for seed in range(20):
        (found,) = comparisons(Laboratory(seed).runs(*exchanges(factor)))
        assert found.verdict == ("slower" if factor > 1 else "faster"), seed
        assert found.difference.value == pytest.approx(1 / factor - 1, abs=0.02)
        assert (found.asked, found.rate) == ("strategy", "exchanges/s")
        assert (found.gpus, found.runs) == ((0, 1), (5, 5))


def test_equal_exchanges_show_no_difference():
    found = [comparisons(Laboratory(seed).runs(*exchanges(1.0)))[0].verdict for seed in range(60)]
    assert found.count("no difference seen") >= 54  # 95 % each


LOC = {"nccl": {"NCCL_P2P_LEVEL": "LOC"}}


TORCH, HOST = COLLECTIVES | {"calls": "torch"}, JACOBI | {"exchange": "host"}
LARGEST = "busbw of the largest message"


@pytest.mark.parametrize(
    ("first", "other", "asked", "verdict", "rate"),
    [
        (EXCHANGE, {"benchmark": EXCHANGE | {"per_key": True}}, "per_key", "slower", "exchanges/s"),
        (EXCHANGE, {"benchmark": EXCHANGE} | LOC, "NCCL_P2P_LEVEL", "slower", "exchanges/s"),
        (COLLECTIVES, {"benchmark": COLLECTIVES} | LOC, "NCCL_P2P_LEVEL", "faster", LARGEST),
        (COLLECTIVES, {"benchmark": TORCH}, "calls", "faster", LARGEST),
        (JACOBI, {"benchmark": HOST}, "exchange", "slower", "solves/s"),
        (JACOBI, {"benchmark": JACOBI} | LOC, "NCCL_P2P_LEVEL", "slower", "solves/s"),
    ],
)
def test_what_may_differ_and_whether_more_of_the_metric_is_faster(
    first, other, asked, verdict, rate
):
    (found,) = comparisons(Laboratory().runs({"benchmark": first}, other | {"factor": 1.1}))
    assert (found.asked, found.verdict, found.rate) == (asked, verdict, rate)
    assert "none" not in found.second, "a cell without a model has no strategy to name"


def test_another_amount_of_work_or_another_benchmark_is_never_compared():
    cells = [{"benchmark": EXCHANGE}, {"benchmark": EXCHANGE, "precision": "bf16_weights"}]
    cells += [{"benchmark": EXCHANGE | {"keys": "weights"}}]
    cells += [{"benchmark": JACOBI}, {"benchmark": JACOBI | {"nx": 512}}]
    for option in ({}, {"collective": "all_gather"}, {"max_bytes": "64K"}, {"dtype": "bfloat16"}):
        cells.append({"benchmark": COLLECTIVES | option})
    assert comparisons(Laboratory().runs(*cells)) == ()
    # What differs in two things is not compared either.
    both = {"benchmark": TORCH} | LOC
    assert comparisons(Laboratory().runs({"benchmark": COLLECTIVES}, both)) == ()


def test_settings_of_a_preset_are_one_thing():
    """nccl=sharp against nothing; beside a cell with one of its settings that is its own thing."""
    sharp = {"NCCL_COLLNET_ENABLE": "1", "NCCL_SHARP_MAX_COMMS": "1", "SHARP_COLL_ENABLE_SAT": "1"}
    cells = [{"benchmark": COLLECTIVES}, {"benchmark": COLLECTIVES, "nccl": sharp, "factor": 0.9}]
    (found,) = comparisons(Laboratory().runs(*cells))
    assert (found.asked, found.verdict) == ("NCCL_COLLNET_ENABLE and 2 more", "slower")
    assert found.first.endswith("COLLNET_ENABLE and 2 more default")
    assert "default" not in found.second
    cells.append({"benchmark": COLLECTIVES, "nccl": {"NCCL_COLLNET_ENABLE": "1"}})
    found = [one.asked for one in comparisons(Laboratory().runs(*cells))]
    assert found == ["NCCL_COLLNET_ENABLE", "NCCL_SHARP_MAX_COMMS and 1 more"]


def test_all_comparisons_of_a_study_are_one_family():
    laboratory = Laboratory(noise=0.01)
    trained = []
    for repeat in range(5):
        for optimize in ("eager", "compile"):
            made = laboratory.simulator.record((0, 1), optimize=optimize, repeat=repeat)
            trained.append(dataclasses.replace(made, sweep_id="another"))
    alone, others = comparisons(trained), laboratory.runs(*exchanges(1.0), {"benchmark": JACOBI})
    together = comparisons(trained + others)
    assert [one.rate for one in together] == ["exchanges/s", "images/s"]
    assert together[1].smallest > alone[0].smallest, "two tests share the 5 %"


def test_cells_without_a_model_are_named_by_what_they_measure():
    """Not by the model and batch of others, nor by an option that follows from the benchmark."""
    cells = {"benchmark": EXCHANGE}, {"benchmark": JACOBI}, {"benchmark": JACOBI} | LOC
    (found,) = comparisons(Laboratory().runs(*cells))
    assert found.first == "gpus 0,1 · jacobi · P2P_LEVEL default"
    assert found.second == "gpus 0,1 · jacobi · P2P_LEVEL=LOC"


def test_the_drift_of_a_time_is_that_of_its_rate():
    laboratory = Laboratory(noise=0.0)
    made = laboratory.runs({"benchmark": JACOBI})
    last = dataclasses.replace(laboratory.run(JACOBI, repeat=5, factor=1.25), drift=True)
    assert drifts(Study.of([*made, last])) == {"solves/s": pytest.approx(-0.2)}


# The turns.

SETTINGS = [{}, *({"nccl": {"NCCL_PROTO": name}} for name in ("LL", "LL128", "Simple"))]


def in_turns(seed, drift=0.0, planted=0.0, noise=0.0013, repeats=3):
    """Four settings of a pair and two GPUs alone in shuffled turns; the rate drifts."""
    simulator, order = Simulator(Truth(noise=noise), seed), np.random.default_rng(seed)
    cells = [((0, 1), setting) for setting in SETTINGS] + [((0,), {}), ((1,), {})]
    made = []
    for repeat in range(repeats):
        for at in order.permutation(len(cells)):
            gpus, setting = cells[at]
            factor = 1 + drift * len(made) / (repeats * len(cells) - 1)
            factor *= 1 + planted * (at == 0)
            made.append(simulator.record(gpus, repeat=repeat, factor=factor, **setting))
    return made


def test_the_turn_is_a_block_so_that_a_drift_hides_no_difference():
    """0.5 % at 0.13 % noise and 1 % drift: by noise floors, none of these studies shows it."""
    against = []
    for seed in range(12):
        found = comparisons(in_turns(seed, 0.01, 0.005, repeats=5))
        against += [one for one in found if "default" in one.first]
    assert len(against) == 36 and sum(one.verdict == "slower" for one in against) >= 26
    assert not any(one.why for one in against if one.verdict == "slower"), "a block needs no excuse"
    equal = []
    for seed in range(25):
        found = comparisons(in_turns(seed, 0.01, repeats=5))
        equal.append(any(one.verdict != NONE for one in found))
    assert sum(equal) <= 3


NONE = "no difference seen"


def test_missing_and_extra_runs_and_another_sweep_leave_the_difference_right():
    # The cell that drops out of the first turn would seem faster by 1 % if turns did not count.
    made = in_turns(5, 0.03, 0.0, noise=0.0002, repeats=6)
    gone = [one for one in made if one.cell.nccl == {"NCCL_PROTO": "LL"} and one.cell.repeat == 0]
    first = next(one for one in made if one.cell.gpus == (0, 1) and not one.cell.nccl)
    extra = dataclasses.replace(
        first,
        record_id="extra",
        sweep_id="later",
        started_at=first.started_at + 1e6,
        cell=changed_cell(first.cell, seed=7),
        cell_key="extra",
        metrics={name: 2 * value for name, value in first.metrics.items()},
    )
    found = comparisons([*(one for one in made if one not in gone), extra])
    assert len(found) == 6 and {one.verdict for one in found} == {NONE}
    # Neither its turn nor a run of another sweep counts.
    assert all(abs(one.difference.value) < 0.002 for one in found)
    assert {one.runs for one in found} == {(7, 5), (7, 6), (6, 5), (6, 6)}


def test_fewer_than_five_common_turns_are_judged_by_the_noise_floor_of_the_group():
    simulator, made = Simulator(Truth(noise=0.001)), []
    for repeat in range(5):
        for setting in SETTINGS[:2]:
            run = simulator.record((0, 1), repeat=repeat, **setting)
            made.append(dataclasses.replace(run, sweep_id=f"{repeat}{setting}"))
    (found,) = comparisons(made)
    sides = np.array([log_rates(made[::2]), log_rates(made[1::2])])
    error = np.sqrt(sides.var(axis=1, ddof=1).mean() * 2 * of_median(5))
    half, step = student.ppf(0.975, 8) * error, np.median(sides[1]) - np.median(sides[0])
    assert ends(found) == pytest.approx((math.expm1(step - half), math.expm1(step + half)))


def log_rates(records):
    return [math.log(one.metrics["throughput/images_per_second"]) for one in records]


def ends(found):
    return found.difference.low, found.difference.high


def test_two_cells_in_turns_are_the_paired_test():
    made = [one for one in in_turns(3, 0.02, repeats=5) if len(one.cell.gpus) == 2]
    plain = [one for one in made if not one.cell.nccl]
    low_latency = [one for one in made if one.cell.nccl == {"NCCL_PROTO": "LL"}]
    paired = ttest_rel(log_rates(low_latency), log_rates(plain)).confidence_interval()
    (found,) = comparisons([one for one in made if one in plain or one in low_latency])
    assert ends(found) == pytest.approx((math.expm1(paired.low), math.expm1(paired.high)))


def of_strategies(seed, repeats, planted, scatter=0.02):
    """Two strategies, one of them faster by `planted`, and a third that scatters ten times as far."""
    simulator, draw, made = Simulator(Truth(noise=0.002), seed), np.random.default_rng(seed), []
    factors = {STRATEGY: 1.0, "kvstore_device": 1 + planted}
    for repeat in range(repeats):
        for name, factor in (*factors.items(), ("cpu_staged", draw.normal(1, scatter))):
            made.append(simulator.record((0, 1), name, repeat, factor=factor))
    return made


@pytest.mark.parametrize(("repeats", "planted"), [(3, 0.025), (5, 0.015)])
def test_a_strategy_lends_its_scatter_to_no_other(repeats, planted):
    """With the scatter of all strategies pooled, none is seen of the first, and one in five of the
    noisy one's studies has a false verdict.
    """
    seen, wrong = 0, 0
    for seed in range(20):
        for pair in comparisons(of_strategies(seed, repeats, planted)):
            if "cpu_staged" not in pair.first + pair.second:
                seen += pair.verdict == "faster"
        verdicts = {pair.verdict for pair in comparisons(of_strategies(seed, repeats, 0.0))}
        wrong += verdicts != {NONE}
    assert seen >= 18 and wrong <= 2


def test_a_lent_floor_gives_no_verdict_and_says_whose_it_is():
    simulator, made = Simulator(Truth(noise=0.002)), []
    for repeat in range(5):
        made.append(simulator.record((0, 1), STRATEGY, repeat))
        if repeat < 2:
            made.append(simulator.record((0, 1), "cpu_staged", repeat, factor=0.5))
    (found,) = comparisons(made)
    assert (found.verdict, found.smallest, found.difference.low) == ("", None, None)
    assert found.why == (
        "cpu_staged has too few repeats, so its ± comes from other configurations: "
        f"cpu_staged on 2 GPUs and {STRATEGY} on 2 GPUs (repeats=5 gives its own)"
    )


def test_several_tests_are_judged_by_holms_method():
    chances = np.array([0.008, 0.9, 0.0001, 0.026])
    assert significant(chances, 0.05).tolist() == [True, False, True, False]


def written(number, benchmark, metrics, repeat=0, strategy="none"):
    cell = {"benchmark": benchmark, "repeat": repeat, "nccl": {}}
    if benchmark["name"] != "exchange":
        cell |= UNTRAINED
    return record(number, [0, 1], 1.0, strategy=strategy, cell=cell) | {"metrics": metrics}


def shown(folder, records):
    """The finding, the lines on differences, and their table."""
    told, _ = examine(study(folder, records))
    (section,) = [one for one in told.sections if one.anchor == "comparisons"]
    (table,) = section.tables
    lines = [line.replace("\u00a0", " ") for line in section.lines]
    return [line.replace("\u00a0", " ") for line in told.finding], lines, table


def test_the_finding_of_an_exchange_study_is_a_verdict(tmp_path):
    made = []
    for repeat in range(3):
        for slow, (strategy, ms) in enumerate((("nccl_allreduce", 0.87), ("kvstore_device", 1.0))):
            measured = {"comm/exchange_ms": ms * (1 + 0.001 * (repeat - slow) ** 2)}
            made.append(written(2 * repeat + slow, EXCHANGE, measured, repeat, strategy))
    finding, lines, table = shown(tmp_path / "study", made)
    assert finding[1] == "kvstore_device is 13.0 % (12.5 to 13.5) slower than nccl_allreduce."
    assert lines[0] == finding[1]
    assert lines[1] == "Compared: exchanges/s (1 ÷ comm/exchange_ms); more is faster."
    headings = [column.heading for column in table.for_people.columns]
    assert "difference" in headings and "rate" not in headings, "one rate needs no column"


def test_a_study_without_a_model_shows_its_comparisons_and_several_rates_are_a_column(tmp_path):
    cells = [
        (JACOBI, {"jacobi/efficiency": 0.9, "jacobi/seconds": 0.2}),
        (JACOBI | {"exchange": "host"}, {"jacobi/efficiency": 0.8, "jacobi/seconds": 0.3}),
        (COLLECTIVES, {"collectives/busbw_gb_per_s": 300.0}),
        (COLLECTIVES | {"calls": "torch"}, {"collectives/busbw_gb_per_s": 290.0}),
    ]
    made = [written(number, *cell) for number, cell in enumerate(cells)]
    finding, _, table = shown(tmp_path / "study", made)
    rows = table.to_json()
    assert sorted(row["rate"] for row in rows) == ["busbw of the largest message", "solves/s"]
    assert {row["verdict"] for row in rows} == {"not tested"} and not table.for_people.rows
    assert not any(" than " in line for line in finding), "single runs give no verdict"
    assert finding[-1].startswith("To test which differences are significant: ")
