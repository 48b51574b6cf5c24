"""Statistics of iteration times: intervals cover what they should, a warm-up is over when it is."""

import math
import time

import numpy as np
import pytest
from build import make_cell
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t

from benchmarks.rank.ranks import Reporter
from benchmarks.record import CellFolder, read_lines
from benchmarks.timing import statistics
from benchmarks.timing.statistics import two_sided_quantile
from benchmarks.training import derive, request
from benchmarks.training.throughput import TrainingBenchmark

TRIALS = 200


@pytest.mark.parametrize("size", [5, 40])
def test_the_intervals_of_the_mean_and_the_median_cover_them(size):
    held = []
    for seed in range(300):
        ms = [np.random.default_rng(seed).normal(100, 3, size)]
        intervals = statistics.mean_interval(ms), statistics.median_interval(ms)
        held.append([low <= 100 <= high for low, high in intervals])
    assert ((np.mean(held, axis=0) >= 0.91) & (np.mean(held, axis=0) <= 0.99)).all()


def autocorrelated(generator, size, correlation):
    """An autoregressive process of mean 100 and deviation 5."""
    noise = generator.normal(0, 5 * math.sqrt(1 - correlation**2), size)
    values = [generator.normal(0, 5)]
    for one in noise[1:]:
        values.append(correlation * values[-1] + one)
    return 100 + np.asarray(values)


def test_correlated_steps_widen_an_interval():
    """Three times as wide: the square root of (1 + 0.8) ÷ (1 − 0.8)."""
    widths = []
    for seed in range(40):
        generator = np.random.default_rng(seed)
        series = [autocorrelated(generator, 400, correlation) for correlation in (0.0, 0.8)]
        widths.append([statistics.mean_half_width([ms]) for ms in series])
    alone, correlated = np.median(widths, axis=0)
    assert 2 * alone < correlated < 4 * alone


def test_levels_of_windows_widen_both_intervals():
    generator = np.random.default_rng(0)
    windows = [generator.normal(level, 0.01, 30) for level in (99.0, 100.0, 101.0)]
    needed = 4.303 / math.sqrt(3)  # Student's t of three windows whose levels deviate by 1
    for low, high in (statistics.mean_interval(windows), statistics.median_interval(windows)):
        assert 0.98 * needed < (high - low) / 2 < 1.6 * needed
    assert statistics.mean_half_width([*windows, [150.0]]) < 5, "one step has no level"


def test_the_interval_of_a_difference_is_students():
    generator, held = np.random.default_rng(0), 0
    for _ in range(400):
        values = generator.normal(0, 1, 4)
        low, high = statistics.difference_interval(float(np.mean(values)), values)
        held += low <= 0 <= high
    assert 0.92 <= held / 400 <= 0.98
    assert statistics.difference_interval(2.0, [2.0, 2.0, 2.0]) == (2.0, 2.0)


@pytest.mark.parametrize("share", [0.05, 0.0005])
def test_quantiles_of_students_t_are_those_of_scipy(share):
    for freedom in (1, 2, 2.5, 3, 4, 7.3, 30, 1000):
        expected = t.isf(share / 2, freedom)
        assert two_sided_quantile(share, freedom) == pytest.approx(expected, rel=2e-5)


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
    for interval, middle in (
        (statistics.mean_interval, np.mean(ms)),
        (statistics.median_interval, np.median(ms)),
    ):
        low, high = interval(windows)
        assert 0 <= low <= middle * (1 + 1e-9) and middle <= high * (1 + 1e-9)
        assert interval(windows) == (low, high)


def test_a_decay_is_flat_only_once_it_has_ended():
    decay = [100 + 400 * math.exp(-step / 5) for step in range(120)]
    ends = next(count for count in range(4, 120) if statistics.flat(decay[:count], 4))
    assert decay[ends - 1] < 100.05
    assert not any(statistics.flat(decay[:count], 4) for count in range(4, ends))


@pytest.mark.parametrize(
    ("ms", "rule", "flat"),
    [
        ([10.0] * 199, (4, 2000.0), False),  # the least time
        ([10.0] * 200, (4, 2000.0), True),
        ([10.1] * 40 + [10.0] * 20, (4,), False),  # three windows that agree
        ([10.1] * 40 + [10.0] * 50, (4,), True),
        ([100.0 + step for step in range(40)], (4,), True),  # it has stopped falling
        ([], (0,), False),  # too few samples
        ([1.0] * 5, (0,), False),
        ([1.0] * 6, (0,), True),
        ([1.0] * 9, (10,), False),
        ([1.0] * 10, (10,), True),
    ],
)
def test_when_a_warm_up_is_flat(ms, rule, flat):
    assert statistics.flat(ms, *rule) == flat


def test_noise_is_flat_most_of_the_time_and_a_fall_in_it_is_not():
    flat, falling = 0, 0
    for seed in range(TRIALS):
        generator = np.random.default_rng(seed)
        flat += statistics.flat(generator.normal(100, 5, 24), 4)
        falling += statistics.flat(np.linspace(200, 100, 40) + generator.normal(0, 2, 40), 4)
    assert flat >= 0.8 * TRIALS and falling <= 0.05 * TRIALS


def test_throughput_is_total_images_over_total_time(alone, tmp_path):
    """19 steps of 10 ms and one of 100 ms at batch 32: 2207 images/s, 3056 as a mean of rates."""
    options = {"min_iterations": 20, "max_iterations": 20, "exposed_rounds": 0, "max_seconds": 60.0}
    folder = CellFolder(tmp_path).make()
    cell = make_cell((0,), batch_size=32, **options)
    benchmark = TrainingBenchmark(cell, alone, Reporter(folder, 0))
    training, steps = benchmark.training, []

    def step():
        steps.append(time.sleep(0.1 if len(steps) == 10 else 0.01))
        training.images += 32

    training.step = step
    benchmark.step_ms = 100.0  # hence one window of 20
    benchmark.timed()
    lines = list(read_lines(folder.rank_lines(0)))
    derived = derive.timed({0: lines})
    metrics, interval = derived.metrics, derived.within_run["throughput/images_per_second"]
    assert (metrics["step/iterations"], metrics["throughput/images"], len(steps)) == (20, 640, 21)
    rate = metrics["throughput/images_per_second"]
    assert rate == pytest.approx(metrics["throughput/images"] / metrics["throughput/seconds"])
    (block,) = [line for line in lines if line["kind"] == "block"]
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
    purposes = [line.get("purpose", "") for line in lines]
    order = [one.split()[0] for one in purposes if one.endswith(" exchange")]
    assert order == ["with", "without", "without", "with"]
    found = derive.throughput({0: lines}, cell)
    assert "strategy/cost_ms" in found.metrics and "strategy/cost_ms" in found.within_run
    assert "comm/exchange_ms" not in found.metrics, "there is nobody to exchange with"
