"""Statistics of iteration times: intervals cover what they should, correlated samples are not taken for independent ones,
and a warm-up is over when it is.
"""

import math
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cells import make_cell
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rank.group import Ranks
from benchmarks.rank.reporter import Reporter
from benchmarks.record import CellFolder, read_lines
from benchmarks.timing import statistics
from benchmarks.training import derive
from benchmarks.training.throughput import TrainingBenchmark

TRIALS = 200


def share(covers, trials=TRIALS):
    """Share of seeded trials in which `covers(generator)` holds."""
    return sum(covers(np.random.default_rng(seed)) for seed in range(trials)) / trials


def skewed(generator, size):
    """Step times: a floor and a long tail. Median and mean are known."""
    return 100 + generator.exponential(10, size)


def test_the_interval_of_the_median_covers_it():
    truth = 100 + 10 * math.log(2)

    def covers(generator):
        low, high = statistics.median_interval(skewed(generator, 40))
        return low <= truth <= high

    assert 0.90 <= share(covers) <= 0.99


def test_the_interval_of_the_mean_covers_it():
    def covers(generator):
        low, high = statistics.mean_interval(skewed(generator, 60))
        return low <= 110 <= high

    assert 0.88 <= share(covers) <= 0.99


def autocorrelated(generator, size, correlation):
    """An autoregressive process of mean 100 and deviation 5."""
    noise = generator.normal(0, 5 * math.sqrt(1 - correlation**2), size)
    values = [generator.normal(0, 5)]
    for one in noise[1:]:
        values.append(correlation * values[-1] + one)
    return 100 + np.asarray(values)


def test_batch_means_keep_the_coverage_under_autocorrelation():
    def covers(generator):
        low, high = statistics.mean_interval(autocorrelated(generator, 400, 0.8))
        return low <= 100 <= high

    def covers_if_taken_for_independent(generator):
        low, high = statistics.interval([autocorrelated(generator, 400, 0.8)], np.mean)
        return low <= 100 <= high

    joined, naive = share(covers, 120), share(covers_if_taken_for_independent, 120)
    assert joined >= 0.80
    assert naive < 0.65, "the planted correlation is too weak to tell"


def test_independent_samples_are_not_joined_and_correlated_ones_keep_their_mean():
    generator = np.random.default_rng(1)
    independent = generator.normal(100, 5, 64)
    assert statistics.joined(independent) == independent.tolist()
    correlated = autocorrelated(generator, 256, 0.9)
    groups = statistics.joined(correlated)
    assert statistics.FEWEST_GROUPS <= len(groups) < 256
    assert np.mean(groups) == pytest.approx(np.mean(correlated))


def test_the_interval_of_a_difference_covers_it():
    def covers(generator):
        low, high = statistics.difference_interval(generator.normal(110, 4, 40), generator.normal(100, 8, 30))
        return low <= 10 <= high

    assert 0.90 <= share(covers, 100) <= 0.995


def test_more_samples_give_a_narrower_interval():
    generator = np.random.default_rng(0)
    narrow, wide = (statistics.mean_interval(skewed(generator, size)) for size in (1000, 20))
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 3


def test_constants_have_an_interval_without_width():
    assert statistics.mean_interval([5.0] * 30) == (5.0, 5.0)
    assert statistics.median_interval([5.0] * 3) == (5.0, 5.0)
    assert statistics.difference_interval([7.0] * 4, [5.0] * 4) == (2.0, 2.0)
    low, high = statistics.difference_interval([7.0, 7.0, 7.0], [5.0, 5.5, 6.0])
    assert 1.0 <= low <= high <= 2.0


def test_two_samples_have_an_interval_and_one_has_none():
    low, high = statistics.mean_interval([1.0, 3.0])
    assert (low, high) == (1.0, 3.0)
    assert all(math.isnan(end) for end in statistics.mean_interval([1.0]))
    assert all(math.isnan(end) for end in statistics.median_interval([]))
    assert all(math.isnan(end) for end in statistics.difference_interval([1.0, 2.0], [1.0]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 1e5), min_size=2, max_size=30))
def test_intervals_lie_within_the_samples_and_repeat_themselves(ms):
    for of in (statistics.mean_interval, statistics.median_interval):
        low, high = of(ms)
        assert min(ms) * (1 - 1e-9) <= low <= high <= max(ms) * (1 + 1e-9)
        assert of(ms) == (low, high)


def test_median_and_percentile():
    assert statistics.median([3.0, 1.0, 2.0, 4.0]) == 2.5
    assert statistics.percentile_95([float(number) for number in range(101)]) == 95.0


def test_a_decay_is_flat_only_once_it_has_ended():
    decay = [100 + 400 * math.exp(-step / 5) for step in range(80)]
    assert not any(statistics.flat(decay[:count], 4) for count in range(4, 20))
    assert statistics.flat(decay, 4)
    ends = next(count for count in range(4, 80) if statistics.flat(decay[:count], 4))
    assert decay[ends - 1] < 103


def test_a_step_down_is_noticed_while_it_is_in_the_second_half():
    before, after = [200.0] * 20, [100.0] * 20
    for more in (2, 3, 4, 5, 6, 7, 8):
        assert not statistics.flat([*before[:16], *after[:more]], 4) or more < 3
    assert not statistics.flat([*before[:8], *after[:2]], 4)
    assert statistics.flat([*before[:4], *after], 4)


def test_noise_is_flat_most_of_the_time_and_a_rise_does_not_hold_up():
    flat = share(lambda generator: statistics.flat(generator.normal(100, 5, 24), 4))
    assert flat >= 0.8
    assert statistics.flat([100.0 + step for step in range(40)], 4), "it has stopped falling"


def test_a_fall_that_noise_does_not_hide_is_not_flat():
    falling = share(lambda generator: statistics.flat(np.linspace(200, 100, 40) + generator.normal(0, 2, 40), 4))
    assert falling <= 0.05


def test_too_few_samples_are_never_flat():
    assert not statistics.flat([], 0)
    assert not statistics.flat([1.0] * 3, 0)
    assert not statistics.flat([1.0] * 9, 10)
    assert statistics.flat([1.0] * 4, 0) and statistics.flat([1.0] * 10, 10)


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
    benchmark = TrainingBenchmark(make_cell((0,), batch_size=32, **options), alone, Reporter(folder, 0))
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
    assert 0.8 * 2207 < rate < 1.001 * 2207, "3056 would be the mean of the rates"
    assert interval["low"] < rate < interval["high"]
    assert metrics["step/ms_median"] < 12 and metrics["step/ms_p95"] > 10
