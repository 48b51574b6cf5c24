"""How often intervals hold a truth that is simulated, and which faults in time are told.

Everything goes through the product's own functions: warm-up, stopping rule, intervals, checks,
noise floors, matching of cells and verdicts. Seeded: equal calls return equal numbers.
"""

import dataclasses
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from simulate import STRATEGY, Simulator, Truth

from analysis.findings.between_studies import differences
from analysis.study.draws import Sample, next_run
from analysis.study.draws import freedom as freedom_of
from analysis.study.draws import slowest as slowest_of
from analysis.study.intervals import half_width
from analysis.study.measured_numbers import FASTER, SLOWER
from analysis.study.noise_floor import Floor
from analysis.study.study import Study
from analysis.study.study_inputs import StudyInput
from analysis.validity import limits
from benchmarks.timing import statistics
from benchmarks.training import derive, request
from conf.schema import ValidityLimits

# --- within a run: steps of a known mean, by seed

STEP_MS = 55.0  # ResNet-50, batch 256, on one H200: 36 steps a window
OPTIONS = {"min_iterations": 10, "max_iterations": 1000, "max_seconds": 20.0}  # of GPUs
OPTIONS["interval_target"] = 0.0025
STEPS = 400  # the longest timed series: 20 s and a window
ROUNDS, COST_STEPS, COST = 4, 9, 0.01  # A B B A: rounds, steps of a window, what is planted


def white(draw, size, deviation):
    return draw.normal(0, deviation, size)


def autoregressive(draw, size, correlation, deviation):
    values = draw.normal(0, deviation * math.sqrt(1 - correlation**2), size)
    values[0] = draw.normal(0, deviation)
    for number in range(1, size):
        values[number] += correlation * values[number - 1]
    return values


def levels(draw, size, deviation):
    window = request.window_iterations(STEP_MS)
    by_window = draw.normal(0, deviation, size // window + 1)
    return np.repeat(by_window, window)[:size] + white(draw, size, 0.001)


# Deviations from the mean, as shares; their median is 0 too.
SERIES = {
    "iid": partial(white, deviation=0.01),
    "AR 0.5": partial(autoregressive, correlation=0.5, deviation=0.01),
    "power-capped (AR 0.7, 4 %)": partial(autoregressive, correlation=0.7, deviation=0.04),
    "level per window 0.2 %": partial(levels, deviation=0.002),
}


def timed(ms):
    """Return windows of a series of ms until the stopping rule ends it."""
    by_window, size = [], request.window_iterations(STEP_MS)
    while True:
        start = len(by_window) * size
        by_window.append(ms[start : start + size].tolist())
        total = float(ms[: start + size].sum())
        if request.should_stop(by_window, total, OPTIONS) or start + 2 * size > len(ms):
            return by_window


def codes_of_time(ms, device="cuda"):
    checks = {"stationarity": statistics.stationarity(ms), "pauses": statistics.pauses(ms)}
    checks["iterations"] = len(ms)
    metrics = {"step/ms_median": statistics.median(ms)}
    record = SimpleNamespace(checks=checks, metrics=metrics, cell=SimpleNamespace(device=device))
    fired = set()
    for check in (limits.not_stationary, limits.pauses):
        sentence = check.judge(record, ValidityLimits())
        if isinstance(sentence, str) and sentence:
            fired.add(check.code)
    return fired


@dataclasses.dataclass
class Held:
    """Of many runs: whether the truth is held, the half-width, how far the estimate was off."""

    holds: list = dataclasses.field(default_factory=list)
    widths: list = dataclasses.field(default_factory=list)
    errors: list = dataclasses.field(default_factory=list)

    def add(self, truth, estimate, interval):
        low, high = interval
        self.holds.append(low <= truth <= high)
        self.widths.append((high - low) / 2)
        self.errors.append(abs(estimate - truth))


def within_a_run(name, runs):
    """Return {quantity: Held}, and {code: share of the runs that have it}, of a series."""
    held = {what: Held() for what in ("mean", "median", "difference")}
    codes = []
    for seed in range(runs):
        draw = np.random.default_rng([seed, list(SERIES).index(name)])
        windows = timed(STEP_MS * (1 + SERIES[name](draw, STEPS)))
        steps = np.concatenate(windows)
        held["mean"].add(STEP_MS, np.mean(steps), statistics.mean_interval(windows))
        held["median"].add(STEP_MS, np.median(steps), statistics.median_interval(windows))
        abba = STEP_MS * (1 + SERIES[name](draw, 4 * ROUNDS * COST_STEPS))
        abba = abba.reshape(-1, COST_STEPS)
        is_longer = np.isin(np.arange(len(abba)) % 4, (0, 3))
        longer = (abba[is_longer] + COST * STEP_MS).tolist()
        cost, blocks = derive.abba(longer, abba[~is_longer].tolist())
        held["difference"].add(COST * STEP_MS, cost, statistics.difference_interval(cost, blocks))
        codes.append(codes_of_time(steps.tolist()))
    shares = {}
    for code in ("not_stationary", "pauses"):
        shares[code] = float(np.mean([code in of_run for of_run in codes]))
    return held, shares


# --- faults in time, from the first step of a cell on, at the noise of H200s

WARM_UP_STEPS = int(90e3 / STEP_MS) + 1  # in the longest warm-up, 90 s
# How much longer a step is, as a share: by its number, and by that since the timed windows began.
FAULTS = {
    "none": lambda number, since: 0.0 * number,
    "step +5% from iteration 60": lambda number, since: 0.05 * (since >= 60),
    "spell of 30 steps, +5%": lambda number, since: 0.05 * ((since >= 40) & (since < 70)),
    "warm-up: 2% decaying over 10 s": lambda number, since: 0.02 * np.exp(-number * STEP_MS / 1e4),
}


def is_flat(ms):
    return statistics.flat(ms, 10, 2000.0)


def with_fault(fault, seed):
    """Return (steps of the warm-up, whether it was flat, the timed windows) of one cell."""
    noise = 1 + np.random.default_rng(seed).normal(0, 0.001, WARM_UP_STEPS + STEPS)
    number = np.arange(len(noise))
    warm = STEP_MS * (1 + FAULTS[fault](number, np.full(len(noise), -1))) * noise
    done = WARM_UP_STEPS
    for count in range(5, WARM_UP_STEPS, 9):
        if is_flat(warm[:count]):
            done = count
            break
    ms = STEP_MS * (1 + FAULTS[fault](number, number - done)) * noise
    return done, is_flat(warm[:done]), timed(ms[done : done + STEPS])


def with_faults(fault, cells):
    """Return the median seconds of warm-up, error of the step, and the share of each code."""
    warm_ups, means, codes = [], [], []
    for seed in range(cells):
        done, was_flat, windows = with_fault(fault, seed)
        steps = np.concatenate(windows)
        warm_ups.append(done * STEP_MS / 1e3)
        means.append(np.mean(steps))
        codes.append(codes_of_time(steps.tolist()) | (set() if was_flat else {"warmup_not_flat"}))
    shares = {}
    for code in set().union(*codes):
        shares[code] = float(np.mean([code in of_cell for of_cell in codes]))
    return float(np.median(warm_ups)), float(np.median(means)) / STEP_MS - 1, shares


# --- the next run: floors are drawn with their degrees of freedom, and runs from the truth

RATE = "throughput/images_per_second"
DEVIATION = 0.0013  # between runs of H200s


def drawn_floor(draw, freedom, name):
    """Return a noise floor as so many degrees of freedom give it."""
    deviation = DEVIATION * math.sqrt(draw.chisquare(freedom) / freedom)
    return Floor(deviation, freedom, 2 * freedom, name)


def drawn_cell(draw, runs, floor, name, noise=1.0):
    """Return the sample of equal runs around 0, and the next run; both `noise` times the floor."""
    *values, following = draw.normal(0, noise * DEVIATION, runs + 1)
    return Sample(float(np.median(values)), floor, runs, name), float(following)


def holds_rate(draw, runs, freedom, study, noise=1.0):
    floor = drawn_floor(draw, freedom, f"floor {study}")
    sample, following = drawn_cell(draw, runs, floor, f"cell {study}", noise)
    return abs(following - sample.value) <= half_width(floor, runs)


def holds_efficiency(draw, runs, freedom, study, gpus):
    """Return whether an efficiency's interval holds that of a sweep that measures all once more."""
    floor = drawn_floor(draw, freedom, f"together {study}")
    together, next_together = drawn_cell(draw, runs, floor, f"cell {study}")
    floor = drawn_floor(draw, freedom, f"alone {study}")
    alone = [drawn_cell(draw, runs, floor, f"{gpu} {study}") for gpu in range(gpus)]
    samples = [sample for sample, _ in alone]
    value, draws = slowest_of(samples)
    every = freedom_of([together, *samples])
    shown = next_run(together.value - value, together.draws - draws, every)
    return shown.low <= next_together - min(following for _, following in alone) <= shown.high


def share_held(holds, runs, freedom, studies, **more):
    draw = np.random.default_rng([runs, freedom])
    return float(np.mean([holds(draw, runs, freedom, study, **more) for study in range(studies)]))


# --- two studies of six equal cells, whose runs scatter by 0.2 %


def study_of_six(seed, repeats, factor, noise=0.002, verdict="valid"):
    """Return a study of cells in turns; every rate times `factor`."""
    simulator, made = Simulator(Truth(noise=noise), seed), []
    for repeat in range(repeats):
        for gpus in ((0,), (1,), (0, 1)):
            for strategy in ("none", STRATEGY):
                record = simulator.record(gpus, strategy, repeat, factor=factor, verdict=verdict)
                made.append(record)
    return StudyInput(str(seed), Path(), Study.of(made))


def across_studies(repeats, studies, factor=1.0):
    """Return shares: pairs with a verdict, cells called slower, intervals that hold the truth."""
    pairs = []
    for seed in range(studies):
        first = study_of_six(2 * seed, repeats, 1.0)
        second = study_of_six(2 * seed + 1, repeats, factor)
        pairs.append(differences([first], [second]).cells)
    cells = [cell for pair in pairs for cell in pair]
    told = np.mean([any(cell.verdict in (FASTER, SLOWER) for cell in pair) for pair in pairs])
    slower = np.mean([cell.verdict == SLOWER for cell in cells])
    held = np.mean([cell.change.low <= factor - 1 <= cell.change.high for cell in cells])
    return float(told), float(slower), float(held)
