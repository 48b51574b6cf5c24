"""Statistics of iteration times: intervals cover what they should, correlated samples are not taken for independent ones,
and a warm-up is over when it is.
"""

import math
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from build import make_cell
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t

from benchmarks.rank.ranks import Ranks, Reporter
from benchmarks.record import CellFolder, read_lines
from benchmarks.timing import statistics
from benchmarks.timing.statistics import two_sided_quantile
from benchmarks.training import derive, request
from benchmarks.training.throughput import TrainingBenchmark

TRIALS = 200


def share(covers, trials=TRIALS):
    """Share of seeded trials in which `covers(generator)` holds."""
    return sum(covers(np.random.default_rng(seed)) for seed in range(trials)) / trials


def skewed(generator, size):
    """Step times: a floor and a long tail. Median and mean are known."""
    return 100 + generator.exponential(10, size)


@pytest.mark.parametrize("size", [5, 40])
def test_the_intervals_of_the_mean_and_the_median_cover_them(size):
    def covers(generator):
        ms = generator.normal(100, 3, size)
        return [
            low <= 100 <= high
            for low, high in (statistics.mean_interval([ms]), statistics.median_interval([ms]))
        ]

    held = np.mean([covers(np.random.default_rng(seed)) for seed in range(300)], axis=0)
    assert (held >= 0.91).all() and (held <= 0.99).all()


def autocorrelated(generator, size, correlation):
    """An autoregressive process of mean 100 and deviation 5."""
    noise = generator.normal(0, 5 * math.sqrt(1 - correlation**2), size)
    values = [generator.normal(0, 5)]
    for one in noise[1:]:
        values.append(correlation * values[-1] + one)
    return 100 + np.asarray(values)


def test_correlated_steps_widen_an_interval():
    def widths(generator):
        alone, correlated = (autocorrelated(generator, 400, share) for share in (0.0, 0.8))
        return [statistics.mean_half_width([ms]) for ms in (alone, correlated)]

    alone, correlated = np.median(
        [widths(np.random.default_rng(seed)) for seed in range(40)], axis=0
    )
    assert 2 * alone < correlated < 4 * alone, (
        "three times as wide: the square root of (1 + 0.8) ÷ (1 − 0.8)"
    )


def test_levels_of_windows_widen_both_intervals():
    generator = np.random.default_rng(0)
    level = [99.0, 100.0, 101.0]
    windows = [generator.normal(one, 0.01, 30) for one in level]
    needed = 4.303 / math.sqrt(3)  # Student's t of three windows whose levels deviate by 1
    for low, high in (statistics.mean_interval(windows), statistics.median_interval(windows)):
        assert 0.98 * needed < (high - low) / 2 < 1.6 * needed
    assert statistics.mean_half_width([*windows, [150.0]]) < 5, (
        "a last window of one step has no level"
    )


def test_the_interval_of_a_difference_is_students():
    generator = np.random.default_rng(0)
    held = sum(
        abs(mean) <= high
        for mean, high in (_difference(generator.normal(0, 1, 4)) for _ in range(400))
    )
    assert 0.92 <= held / 400 <= 0.98
    assert statistics.difference_interval(2.0, [2.0, 2.0, 2.0]) == (2.0, 2.0)


def _difference(values):
    """The mean of some differences, and the half-width of its interval."""
    mean = float(np.mean(values))
    low, high = statistics.difference_interval(mean, values)
    return mean, (high - low) / 2


@pytest.mark.parametrize("share", [0.05, 0.0005])
def test_quantiles_of_students_t_are_those_of_scipy(share):
    for freedom in (1, 2, 2.5, 3, 4, 7.3, 30, 1000):
        assert two_sided_quantile(share, freedom) == pytest.approx(
            t.isf(share / 2, freedom), rel=2e-5
        )


def test_more_samples_give_a_narrower_interval():
    generator = np.random.default_rng(0)
    narrow, wide = (statistics.mean_half_width([skewed(generator, size)]) for size in (2000, 20))
    assert narrow < wide / 3


def test_constants_have_an_interval_without_width_and_one_value_has_none():
    assert statistics.mean_interval([[5.0] * 30]) == (5.0, 5.0)
    assert statistics.median_interval([[5.0] * 3]) == (5.0, 5.0)
    for low, high in (statistics.mean_interval([[1.0]]), statistics.median_interval([[]])):
        assert math.isnan(low) and math.isnan(high)
    assert all(math.isnan(end) for end in statistics.difference_interval(1.0, [1.0]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(0.01, 1e5), min_size=1, max_size=10), min_size=2, max_size=4))
def test_intervals_hold_their_number_stay_positive_and_repeat_themselves(windows):
    ms = [one for window in windows for one in window]
    for of, middle in (
        (statistics.mean_interval, np.mean(ms)),
        (statistics.median_interval, np.median(ms)),
    ):
        low, high = of(windows)
        assert 0 <= low <= middle * (1 + 1e-9) and middle <= high * (1 + 1e-9)
        assert of(windows) == (low, high)


def test_median_and_percentile():
    assert statistics.median([3.0, 1.0, 2.0, 4.0]) == 2.5
    assert statistics.percentile_95([float(number) for number in range(101)]) == 95.0


def test_a_decay_is_flat_only_once_it_has_ended():
    decay = [100 + 400 * math.exp(-step / 5) for step in range(120)]
    ends = next(count for count in range(4, 120) if statistics.flat(decay[:count], 4))
    assert decay[ends - 1] < 100.05
    assert not any(statistics.flat(decay[:count], 4) for count in range(4, ends))


def warm_up_of(excess, tau_s, noise, seed, step_ms=55.0):
    """Seconds after which a warm-up of at least two seconds ends whose steps are too long by a share that decays."""
    generator = np.random.default_rng(seed)
    times = np.arange(2000) * step_ms / 1e3
    ms = step_ms * (1 + excess * np.exp(-times / tau_s)) * (1 + generator.normal(0, noise, 2000))
    return next(
        times[count] for count in range(9, 1600, 9) if statistics.flat(ms[:count], 10, 2000.0)
    )


def test_two_percent_that_decay_over_ten_seconds_hold_up_a_warm_up():
    ends = [warm_up_of(0.02, 10.0, 0.0005, seed) for seed in range(20)]
    assert min(ends) > 20, "two time constants: 0.3 % are left"
    assert np.median([warm_up_of(0.0, 10.0, 0.0005, seed) for seed in range(20)]) < 2.6, (
        "and nothing holds up a clean one"
    )


def test_a_warm_up_takes_the_least_time_and_three_windows_that_agree():
    assert not statistics.flat([10.0] * 199, 4, 2000.0) and statistics.flat([10.0] * 200, 4, 2000.0)
    assert not statistics.flat([10.1] * 40 + [10.0] * 20, 4) and statistics.flat(
        [10.1] * 40 + [10.0] * 50, 4
    )


def test_noise_is_flat_most_of_the_time_and_a_rise_does_not_hold_up():
    flat = share(lambda generator: statistics.flat(generator.normal(100, 5, 24), 4))
    assert flat >= 0.8
    assert statistics.flat([100.0 + step for step in range(40)], 4), "it has stopped falling"


def test_a_fall_that_noise_does_not_hide_is_not_flat():
    falling = share(
        lambda generator: statistics.flat(np.linspace(200, 100, 40) + generator.normal(0, 2, 40), 4)
    )
    assert falling <= 0.05


def test_too_few_samples_are_never_flat():
    assert not statistics.flat([], 0)
    assert not statistics.flat([1.0] * 5, 0)
    assert not statistics.flat([1.0] * 9, 10)
    assert statistics.flat([1.0] * 6, 0) and statistics.flat([1.0] * 10, 10)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of this process only."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield Ranks(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def test_throughput_is_total_images_over_total_time(alone, tmp_path):
    """19 steps of 0.1 s and one of 1 s at batch 32 are 220.7 images/s, and 305.6 as a mean of rates: here at a tenth."""
    options = {"min_iterations": 20, "max_iterations": 20, "exposed_rounds": 0, "max_seconds": 60.0}
    folder = CellFolder(tmp_path).make()
    benchmark = TrainingBenchmark(
        make_cell((0,), batch_size=32, **options), alone, Reporter(folder, 0)
    )
    training, steps = benchmark.training, []

    def step():
        steps.append(time.sleep(0.1 if len(steps) == 10 else 0.01))
        training.images += 32

    training.step = step
    benchmark.step_ms = 100.0  # hence one window of 20
    benchmark.timed()
    derived = derive.timed({0: list(read_lines(folder.rank_lines(0)))})
    metrics, interval = derived.metrics, derived.within_run["throughput/images_per_second"]
    assert (metrics["step/iterations"], metrics["throughput/images"], len(steps)) == (20, 640, 21)
    rate = metrics["throughput/images_per_second"]
    assert rate == pytest.approx(metrics["throughput/images"] / metrics["throughput/seconds"])
    (block,) = [line for line in read_lines(folder.rank_lines(0)) if line["kind"] == "block"]
    assert rate < 0.95 * np.mean(32e3 / np.array(block["ms"])), "that is the mean of the rates"
    assert rate < 1.001 * 2207
    assert interval["low"] < rate < interval["high"]
    assert metrics["step/ms_p95"] >= metrics["step/ms_median"] > 10


def test_on_one_rank_the_own_work_of_ddp_is_timed(alone, tmp_path, monkeypatch):
    """It makes buckets on one rank too, and sends nothing."""
    monkeypatch.setattr(request, "MOST_PER_ABBA_WINDOW", 3)
    cell = make_cell((0,), min_iterations=3, max_iterations=3, max_seconds=60.0)
    folder = CellFolder(tmp_path).make()
    result = TrainingBenchmark(cell, alone, Reporter(folder, 0)).run()
    assert result.checks["own_work_alone"] is True
    lines = list(read_lines(folder.rank_lines(0)))
    order = [
        line["purpose"].split()[0]
        for line in lines
        if line.get("purpose", "").endswith(" exchange")
    ]
    assert order == ["with", "without", "without", "with"]
    found = derive.throughput({0: lines}, cell)
    assert "strategy/cost_ms" in found.metrics and "strategy/cost_ms" in found.within_run
    assert "comm/exchange_ms" not in found.metrics, "there is nobody to exchange with"
