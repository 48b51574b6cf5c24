"""How often the interval within a run holds the truth, and which faults in time are told.

Tables of `python -m tests.coverage`. Steps are simulated with a known mean and go through the
product's own warm-up, stopping rule, intervals and checks.
"""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np

from analysis.validity import limits
from benchmarks.timing import statistics
from benchmarks.training import derive, request
from conf.schema import ValidityLimits

STUDIES = 300
STEP_MS = 55.0  # ResNet-50, batch 256, on one H200: 36 steps a window
OPTIONS = {"min_iterations": 10, "max_iterations": 1000, "max_seconds": 20.0}  # of GPUs
OPTIONS["interval_target"] = 0.0025
LEAST_MS, MOST_WARM_UP_S, WARM_UP_ITERATIONS = 2000.0, 90.0, 10
STEPS = 400  # the longest timed series: 20 s and a window
ROUNDS, COST_STEPS, COST = 4, 9, 0.01  # A B B A: rounds, steps of a window, what is planted
LIMITS = ValidityLimits()

# Series: deviations from the mean, as shares, (steps,)


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


def wander(draw, size):
    """Noise of 0.2 % on a level that wanders by as much over 11 s."""
    return white(draw, size, 0.002) + autoregressive(draw, size, math.exp(-1 / 200), 0.002)


def regimes(draw, size, length):
    """Two levels 2 % apart, which last `length` steps on average."""
    switched = np.cumsum(draw.random(size) < 1 / length) + draw.integers(2)
    return np.where(switched % 2, 0.01, -0.01) + white(draw, size, 0.002)


def spikes(draw, size, share, height):
    return white(draw, size, 0.002) + height * ((draw.random(size) < share) - share)


def lognormal(draw, size):
    return 0.005 * (draw.lognormal(0, 1, size) - math.exp(0.5))


SERIES = {
    "iid": partial(white, deviation=0.01),
    **{
        f"AR {share:g}": partial(autoregressive, correlation=share, deviation=0.01)
        for share in (0.1, 0.19, 0.3, 0.5, 0.8, 0.95)
    },
    "power-capped (AR 0.7, 4 %)": partial(autoregressive, correlation=0.7, deviation=0.04),
    "level per window 0.05 %": partial(levels, deviation=0.0005),
    "level per window 0.2 %": partial(levels, deviation=0.002),
    "slow wander": wander,
    "regimes of 50 steps": partial(regimes, length=50),
    "regimes of 300 steps": partial(regimes, length=300),
    "Student t 2.2": lambda draw, size: 0.002 * draw.standard_t(2.2, size),
    "lognormal": lognormal,
    "0.2 % of +500 %": partial(spikes, share=0.002, height=5.0),
    "1 % of +50 %": partial(spikes, share=0.01, height=0.5),
}
# Two equal levels have no median that one could miss; the others' differ from the mean.
MEDIANS = dict.fromkeys(SERIES, 0.0) | {
    "lognormal": 0.005 * (1 - math.exp(0.5)),
    "0.2 % of +500 %": -0.01,
    "1 % of +50 %": -0.005 + 0.002 * 0.01266,
    "regimes of 50 steps": None,
    "regimes of 300 steps": None,
}


def timed(ms):
    """Windows of a series of ms until the stopping rule ends it."""
    by_window, size = [], request.window_iterations(STEP_MS)
    while True:
        start = len(by_window) * size
        by_window.append([float(one) for one in ms[start : start + size]])
        total = float(ms[: start + size].sum())
        if request.should_stop(by_window, total, OPTIONS) or start + 2 * size > len(ms):
            return by_window


def told(ms):
    """The codes that the checks of time give a run of these steps."""
    checks = {"stationarity": statistics.stationarity(ms), "pauses": statistics.pauses(ms)}
    checks["iterations"] = len(ms)
    record = SimpleNamespace(checks=checks, cell=SimpleNamespace(device="cuda"))
    checks_of_time = (limits.not_stationary, limits.pauses)
    return {check.code for check in checks_of_time if check.judge(record, LIMITS) is not None}


@dataclasses.dataclass
class Held:
    """Of many studies: is the truth held, the half-width, how far the estimate was off, windows."""

    holds: list = dataclasses.field(default_factory=list)
    shown: list = dataclasses.field(default_factory=list)
    off: list = dataclasses.field(default_factory=list)
    windows: list = dataclasses.field(default_factory=list)

    def add(self, truth, estimate, interval, windows=0):
        low, high = interval
        self.holds.append(low <= truth <= high)
        self.shown.append((high - low) / 2)
        self.off.append(abs(estimate - truth))
        self.windows.append(windows)

    @property
    def share(self):
        return float(np.mean(self.holds)) if self.holds else math.nan

    @property
    def text(self):
        return f"{100 * self.share:5.1f}" if self.holds else "    –"

    @property
    def widths(self):
        return f"{100 * np.median(self.shown):5.3f} / {100 * np.quantile(self.off, 0.95):5.3f}"


def cost_of(first, second):
    """(Estimate, interval) of what the first windows cost more, as shares of a step."""
    cost, blocks = derive.abba(first, second)
    low, high = statistics.difference_interval(cost, blocks)
    return cost / STEP_MS, (low / STEP_MS, high / STEP_MS)


def cost_apart(abba):
    """The same of A B B A, (windows, steps), where A are planted to cost more."""
    outer = np.isin(np.arange(len(abba)) % 4, (0, 3))
    return cost_of((abba[outer] + COST * STEP_MS).tolist(), abba[~outer].tolist())


def mean_of(windows):
    """(Mean, its interval) of timed windows, as shares of a step."""
    low, high = statistics.mean_interval(windows)
    return np.mean(_ms(windows)) / STEP_MS, (low / STEP_MS, high / STEP_MS)


def study(name, seed, held):
    """Simulate one study; add to {what: Held}. Return (codes, whether the mean was missed)."""
    draw = np.random.default_rng([seed, list(SERIES).index(name)])
    windows = timed(STEP_MS * (1 + SERIES[name](draw, STEPS)))
    held["mean"].add(1, *mean_of(windows), len(windows))
    middle = MEDIANS[name]
    if middle is not None:
        interval = statistics.median_interval(windows)
        held["median"].add(STEP_MS * (1 + middle), np.median(_ms(windows)), interval)
    abba = STEP_MS * (1 + SERIES[name](draw, 4 * ROUNDS * COST_STEPS)).reshape(-1, COST_STEPS)
    held["difference"].add(COST, *cost_apart(abba))
    return told(_ms(windows)), not held["mean"].holds[-1]


def _ms(windows):
    return [one for window in windows for one in window]


def outcome(name, studies=STUDIES):
    """Return ({what: Held}, share of runs by code, share of missed means that are told)."""
    held = {what: Held() for what in ("mean", "median", "difference")}
    runs = [study(name, seed, held) for seed in range(studies)]
    codes = {}
    for code in ("not_stationary", "pauses"):
        codes[code] = float(np.mean([code in told_codes for told_codes, _ in runs]))
    misses = [bool(told_codes) for told_codes, missed in runs if missed]
    return held, codes, float(np.mean(misses)) if misses else math.nan


def tables(studies: int = STUDIES) -> Iterator[str]:
    """Yield the table of series, and that of windows between each other."""
    yield (
        f"Intervals within a run: {studies} runs of each series, steps of {STEP_MS:g} ms, the real "
        "stopping rule. Half-widths\nare in percent of the mean; shown: the median, needed: what "
        "holds 95 % of the runs. A miss is told if a check fires.\n"
    )
    heads = ("mean held", "half-width shown / needed", "windows", "median held", "A B B A held")
    heads += ("change told", "pauses told", "misses told")
    yield f"{'series':27}" + "".join(f"{head:>{len(head) + 2}}" for head in heads)
    for name in SERIES:
        held, codes, misses = outcome(name, studies)
        mean = held["mean"]
        yield (
            f"{name:27}{mean.text:>11}{mean.widths:>27}{np.mean(mean.windows):9.1f}"
            f"{held['median'].text:>13}{held['difference'].text:>14}{codes['not_stationary']:13.1%}"
            f"{codes['pauses']:13.1%}{misses:13.0%}".replace("nan%", "   –")
        )
    yield (
        "\nWhere less than 90 % are held, what moves the mean did not happen in the run: a regime, "
        "a rare pause or a slow\nwander that takes longer than the windows leaves no trace in "
        "them. No interval of one run can hold it; that of the\nnext run, from the noise between "
        "runs, can.\n"
    )
    yield from _between(studies)


def between(ms, rounds=ROUNDS):
    """(timed windows, windows without exchange) of a series of ms, as a cell on GPUs has them.

    Steps with the exchange are longer by COST. The first step of each window counts nowhere.
    """
    timed, without, place = [], [], 0
    size = request.timed_abba_iterations(STEP_MS, OPTIONS, rounds)
    least = request.abba_iterations(STEP_MS)

    def window(steps, longer):
        nonlocal place
        place += 1 + steps
        return [float(one) + longer for one in ms[place - steps : place]]

    while True:
        if len(timed) % 2 and len(timed) < 2 * rounds:
            without += [window(least, 0.0), window(least, 0.0)]
        timed.append(window(size, COST * STEP_MS))
        if request.should_stop(timed, sum(_ms(timed)), OPTIONS, rounds) or place + size >= len(ms):
            return timed, without


def drifting(draw, size, kind, share):
    return SERIES[kind](draw, size) + share * (np.arange(size) / STEPS - 0.5)


DRIFTS = {
    f"{kind}, drift of {share:.0%} in 20 s": partial(drifting, kind=kind, share=share)
    for kind in ("iid", "AR 0.5")
    for share in (0.01, 0.03)
}


def outcomes_between(series, studies):
    """{what: Held} of runs: the timed windows are the A of A B B A, or A has its own."""
    held = {what: Held() for what in ("mean", "cost apart", "cost between")}
    for seed in range(studies):
        ms = STEP_MS * (1 + series(np.random.default_rng([seed, 1]), 2 * STEPS))
        timed, without = between(ms)
        held["mean"].add(1 + COST, *mean_of(timed), len(timed))
        held["cost between"].add(COST, *cost_of(timed[: len(without)], without))
        abba = ms[: 4 * ROUNDS * (COST_STEPS + 1)].reshape(-1, COST_STEPS + 1)[:, 1:]
        held["cost apart"].add(COST, *cost_apart(abba))
    return held


def _between(studies):
    """Yield how the intervals hold where the timed windows are the A of A B B A."""
    yield (
        f"The timed windows as the A of {ROUNDS} rounds of A B B A, and A with windows of its own "
        f"(apart): {studies} runs\n"
    )
    yield (
        f"{'series':32} {'mean held':>9} {'windows':>7} {'cost held, %':^15} "
        f"{'half-width shown / needed, % of a step':^39}"
    )
    yield f"{'':32} {'':>9} {'':>7} {'apart':>7} {'between':>7} {'apart':>19} {'between':>19}"
    for name, series in (SERIES | DRIFTS).items():
        held = outcomes_between(series, studies)
        mean, apart, between = (held[what] for what in ("mean", "cost apart", "cost between"))
        shown = "–" if name in DRIFTS else mean.text  # a step that drifts has no one mean
        yield (
            f"{name:32} {shown:>9} {np.mean(mean.windows):7.1f} {apart.text:>7} "
            f"{between.text:>7} {apart.widths:>19} {between.widths:>19}"
        )
    yield ""
