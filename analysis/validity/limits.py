"""Checks of values against limits: clocks, noise, iterations, reference, baseline, steps.

benchmarks.training.derive computes the facts of the steps from the raw lines.
"""

import math
from collections import Counter
from collections.abc import Mapping

from analysis.findings.baselines import AT_EQUAL_CLOCKS, BASELINES, EFFICIENCY, NOISE
from analysis.findings.communication import COST
from analysis.prediction.recorded_forecast import AS_LONG, recorded_forecast
from analysis.study.intervals import of_median
from analysis.study.names import unit
from analysis.validity.check import (
    Judgement,
    beyond,
    check,
    not_applicable,
    percent_above,
    unchecked,
    unchecked_if_training,
    unchecked_on_gpus,
)
from benchmarks.record import Record
from conf import groups
from conf.options import Refused
from conf.schema import ValidityLimits

RATE, STEP = "throughput/images_per_second", "step/ms_median"
MOST_EFFICIENCY = 1.02  # where the scatter between runs is not known
# Where it is known: standard deviations of the ratio of two rates above 1, and at least this.
MOST_DEVIATIONS, LEAST_MOST_EFFICIENCY = 3.0, 1.005
# An exchange may find data in a cache where its reference does not. Above the second ratio it was
# hardly awaited; METHOD.md says why less is possible.
EXPECTED_OF_REFERENCE, MOST_OF_REFERENCE = 1.05, 1.2
MOST_SLOWER_TOGETHER = 0.01  # than alone; in steady cells of H200s at most 0.2 %
MOST_UNACCOUNTED = 1e-3  # of a window that samples may leave out; on H200s they leave out 5·10⁻⁷
# Of a timed window; at most 0.3 % on H200s where nothing was compiled.
MOST_UNSEEN = 0.015
MOST_SLOWER = 0.03  # than the last warm-up window; on H200s at most 0.9 % in cells that are valid
MOST_OF_GRID = 1e-4  # of a step, to which its samples may be rounded
MOST_ROUNDED = 1e-6  # relative error that floats may leave in images ÷ seconds
MOST_OF_DATA = 0.02  # share of a step that a loader may cost before it is said to limit the rate
OF_NOISE = 2.0  # a slow rank is slower by this many half-widths of the 95 % interval
# Half-widths of its interval, and share of a step, by which a cost may lie below 0.
COST_NOISE, MOST_OF_COST = 1.5, 0.002
# CPU workers share their cores with the system. In 51 cells on idle ones it took at most 9 ms at a
# time and 1.1 % together, and steps changed by at most 4.4 % beyond what correlated noise explains.
CPU_PAUSES, CPU_SLICE_MS, MOST_OF_SLICES = 3.0, 15.0, 0.03
CPU_BEYOND = 2.0  # times what noise explains
# Share of a step that a server may cost the CPU worker with which it shares a core: one without
# work looks for some every 0.2 ms, and cost up to 15 % on two idle cores.
MOST_OF_SHARED_CORE = 0.3
# Share of a step, and ms, that a CPU worker may spend between steps, where it is in no sample.
MOST_BETWEEN, MOST_BETWEEN_MS = 0.02, 0.1
GRAPHS = {"compile": "compile_graph", "max": "max_graph"}  # the same optimize as a CUDA graph


@check("invalid", "the times of the GPU and of the host differ: {}")
def clocks_disagree(record: Record, limits: ValidityLimits) -> Judgement:
    """the GPU's clock and the host's clock disagree on the time of the same steps by more than
    {clock_limit}
    """
    if record.cell.device != "cuda":
        return not_applicable("a CPU worker has one clock")
    share = record.checks.get("clock_disagreement")
    if share is None:
        return unchecked_if_training(record, "no window was timed")
    return beyond(share, limits.clock_limit)


@check("suspect", "time is missing from the timed windows: {}", since=7)
def windows_too_short(record: Record, _: ValidityLimits) -> Judgement:
    """on GPUs: by the timers that give the rate (the GPU's and the host's) every timed window is
    over 1.5 % shorter than by the wall-clock stamps around it, so the rate may be too high
    """
    if record.cell.device != "cuda":
        return not_applicable("a CPU worker has one clock")
    if record.cell.compiled:
        return not_applicable("what a compiler leaves is cleared away between windows")
    share = record.checks.get("unseen_share")
    if share is None:
        return unchecked_if_training(record)
    return beyond(share, MOST_UNSEEN)


@check(
    "invalid",
    "the step times do not add up to the time of their window: {}",
    needs="unaccounted_share",
)
def samples_do_not_fill_window(record: Record, _: ValidityLimits) -> Judgement:
    """the sum of a window's step times differs from the window's length by more than 0.1 %"""
    return beyond(record.checks["unaccounted_share"], MOST_UNACCOUNTED, "% of it differs")


@check("suspect", "the exchange cannot have been complete: {}")
def faster_than_reference(record: Record, _: ValidityLimits) -> Judgement:
    """the exchange was more than 1.2 times as fast as its reference (the same bytes at the rate of
    large plain collectives or copies): its timing probably ended before the exchange did
    """
    ratio = record.metrics.get("comm/ideal_ratio")
    if ratio is not None:
        if ratio <= MOST_OF_REFERENCE:
            return None
        return f"{ratio:.2f} times as fast as its reference {record.checks.get('reference')}"
    if "comm/exchange_ms" not in record.metrics:
        return not_applicable("no exchange was timed")
    if not record.cell.benchmark.get("limit_iterations", 1):
        return not_applicable("benchmark.limit_iterations=0: no reference was asked for")
    return unchecked("no reference was measured")


@check(
    "finding",
    "the exchange was faster than its reference: {} (the reference is simpler code and no limit)",
)
def reference_exceeded(record: Record, _: ValidityLimits) -> Judgement:
    """the exchange was more than 1.05 times as fast as its reference (the same bytes at the rate of
    large plain collectives or copies). This can happen: these are not always faster
    """
    ratio = record.metrics.get("comm/ideal_ratio")
    # above MOST_OF_REFERENCE it is faster_than_reference
    if ratio is None or not EXPECTED_OF_REFERENCE < ratio <= MOST_OF_REFERENCE:
        return None
    return f"{record.checks.get('reference')}, {100 * ratio:.0f} %"


@check("suspect", "the steps vary a lot: the 95 % interval of their mean is {}")
def noisy(record: Record, limits: ValidityLimits) -> Judgement:
    """the 95 % interval of images/s within the run is wider than ±{noise_limit}

    Run on an idle machine, for longer (benchmark.max_seconds) or with repeats=5.
    """
    half = record.checks.get("half_width")
    if half is None or not math.isfinite(half):
        return unchecked_if_training(record, "too few steps for an interval")
    if half <= limits.noise_limit:
        return None
    limit = limits.noise_limit
    return f"±{percent_above(half, limit)} %, allowed ±{100 * limit:.1f} %"


@check("suspect", "the GPU waits for the CPU to launch work: {}")
def cpu_bound(record: Record, limits: ValidityLimits) -> Judgement:
    """the GPU idles for more than {idle_limit} of a step

    Use a larger batch_size, optimize=compile or optimize=graph.
    """
    cell, share = record.cell, record.metrics.get("gpu/idle_share")
    if share is None:
        why = "the idle share of the GPU was not measured"
        if cell.device == "cuda":
            return unchecked_if_training(record, why)
        return unchecked_on_gpus(record, why)
    if share <= limits.idle_limit:
        return None
    detail = f"{100 * share:.0f} % of a step, allowed {100 * limits.idle_limit:.0f} %"
    if cell.graphed or cell.precision == "fp16":
        return detail
    try:
        why_no_graph = groups.choice("strategy", cell.strategy["name"]).why_no_graph(cell.strategy)
    except Refused:  # of the user's own, which is not here
        return detail
    if why_no_graph:
        return detail
    return f"{detail}; optimize={GRAPHS.get(cell.optimize, 'graph')} launches each step at once"


@check("suspect", "some steps were much longer than the others: {}", needs="pauses")
def pauses(record: Record, limits: ValidityLimits) -> Judgement:
    """unusually long steps cost more than {pause_limit} of the time. For CPU workers the limit is
    three times as high, or 3 % where every step stayed within 15 ms of the median step
    """
    facts = record.checks["pauses"]
    lost, allowed = facts["lost_share"], limits.pause_limit
    if record.cell.device == "cpu":
        allowed *= CPU_PAUSES
        if facts["longest_ms"] - record.metrics.get(STEP, 0.0) <= CPU_SLICE_MS:
            allowed = max(allowed, MOST_OF_SLICES)
    if lost <= allowed:
        return None
    return (
        f"{facts['count']:.0f} of {record.checks['iterations']} steps, up to "
        f"{facts['longest_ms']:.4g} ms; they lost {100 * lost:.2f} % of the time, "
        f"allowed {100 * allowed:.2f} %"
    )


@check("suspect", "timed steps were longer than those before them: {}", since=7)
def slower_than_warmup(record: Record, limits: ValidityLimits) -> Judgement:
    """on GPUs, steps slowed when timing began: the median timed step is longer than the median of
    the last warm-up window, by more than 3 % and by more than twice the step-to-step variation
    """
    if record.cell.device != "cuda":
        return not_applicable("steps of CPU workers vary")
    share = record.checks.get("slower_than_warmup")
    if share is None:
        return unchecked_if_training(record, "no warm-up was measured")
    noise = record.checks.get("half_width", math.inf)
    return beyond(share, max(MOST_SLOWER, OF_NOISE * noise))


@check("suspect", "the step time changed during the measurement: {}", needs="stationarity")
def not_stationary(record: Record, limits: ValidityLimits) -> Judgement:
    """during the run the step time changed or drifted by more than {change_limit}, and by more than
    chance explains. On CPU workers: by more than {noise_limit}, and by more than twice what chance
    explains
    """
    facts = record.checks["stationarity"]
    if not facts:
        return unchecked("too few steps were timed")
    return _changes(record, facts, limits)


@check(
    "suspect",
    "the step time changed in the same way in each timed window: {}",
    needs="stationarity_in_windows",
    since=7,
)
def windows_not_stationary(record: Record, limits: ValidityLimits) -> Judgement:
    """the step time depends on the position in the timed window: averaged over all windows, the
    first step, the second and so on differ by more than the check `not_stationary` allows
    """
    facts = record.checks["stationarity_in_windows"]
    if not facts:
        return not_applicable("fewer than two windows of 12 steps were timed")
    return _changes(record, facts, limits)


def _changes(record: Record, facts: Mapping[str, float], limits: ValidityLimits) -> str:
    changes, allowed, noise = [], limits.change_limit, 1.0
    if record.cell.device == "cpu":
        allowed, noise = max(allowed, limits.noise_limit), CPU_BEYOND
    if abs(facts["change"]) > allowed and facts["change_beyond"] > noise:
        share, step = 100 * facts["change"], facts["change_at"]
        changes.append(f"it changed by {share:+.1f} % at iteration {step:.0f}")
    if abs(facts["drift"]) > allowed and facts["drift_beyond"] > noise:
        share = 100 * facts["drift"]
        changes.append(f"it drifted by {share:+.1f} % from the first to the last iteration")
    if not changes:
        return ""
    return f"{' and '.join(changes)}, allowed {100 * allowed:.1f} %"


@check("suspect", "the times of the steps were rounded: {}", needs="grid_ms", since=7)
def samples_rounded(record: Record, _: ValidityLimits) -> Judgement:
    """step times look rounded: all are multiples of one unit, which is at least 0.01 ms and more
    than 0.01 % of the step
    """
    grid_ms, step_ms = record.checks["grid_ms"], record.metrics.get(STEP, math.inf)
    if grid_ms <= MOST_OF_GRID * step_ms:
        return None
    return f"all are multiples of {grid_ms:g} ms, {100 * grid_ms / step_ms:.2g} % of a step"


@check("suspect", "one rank is slower than the others: {}")
def slow_rank(record: Record, limits: ValidityLimits) -> Judgement:
    """one rank's own step time, which does not count waiting for other ranks, is above the median
    of the others by more than {slow_rank_limit} and by more than twice the variation of its own
    steps. With more CPU workers and parameter servers than CPU cores, 30 % applies instead

    Look at that GPU: its clock, temperature and other programs on it.
    """
    facts = record.checks.get("slowest_rank")
    if facts is None:
        if not record.cell.benchmark.get("exposed_rounds", 1):
            why = "benchmark.exposed_rounds=0: no steps without exchange were asked for"
            return not_applicable(why)
        if record.cell.world_size == 1:
            return not_applicable("there is only one rank")
        if COST in record.metrics:
            return unchecked_if_training(record)
        if record.cell.trains and record.cell.strategy["name"] == "none":
            return not_applicable("strategy=none exchanges nothing")
        why = "it needs steps without the exchange, which need exchange_alone (trainers/OWN.md)"
        return unchecked_if_training(record, why)
    share, noise, allowed = facts["share"], facts["noise"], limits.slow_rank_limit
    if not share > allowed:
        return None
    if math.isnan(noise):
        return unchecked("one window does not show the noise")
    if share <= OF_NOISE * noise:
        return None
    slower = f"rank {facts['rank']} by {100 * share:.1f} %"
    if share <= MOST_OF_SHARED_CORE and _shares_cores(record):
        return unchecked(f"{slower}, and a server may share its core")
    return f"{slower}, allowed {100 * allowed:.1f} %"


def _shares_cores(record: Record) -> bool:
    cell, samples = record.cell, record.checks.get("cpu_samples")
    if cell.device != "cpu" or not cell.servers or not samples:
        return False
    processes = Counter(place.host for place in cell.places)
    return max(processes.values()) > int(samples["cores"])


@check("suspect", "steps with the exchange were shorter than steps without it: {}", since=7)
def cost_negative(record: Record, _: ValidityLimits) -> Judgement:
    """steps with the exchange seem shorter than steps without it, by more than 0.2 % of a step and
    by more than 1.5 times the ± of this difference
    """
    ends = record.ends_within_run(COST)
    if ends is None or COST not in record.metrics:
        return None
    cost_ms, half_ms = record.metrics[COST], (ends[1] - ends[0]) / 2
    least_ms = MOST_OF_COST * record.metrics.get(STEP, 0.0)
    if not -cost_ms > max(COST_NOISE * half_ms, least_ms):
        return None
    return f"by {-cost_ms:.3g} ms ± {half_ms:.2g}"


@check("finding", "the data loader limits the rate: {}")
def input_bound(record: Record, _: ValidityLimits) -> Judgement:
    """waiting for the data loader makes a step more than 2 % longer, and the 95 % interval of the
    added time is above 0

    Use more workers in the loader, or keep the data in memory.
    """
    if not record.cell.data:
        return None
    cost_ms, share, wait_ms = (
        record.metrics.get(f"data/{name}") for name in ("cost_ms", "cost_share", "wait_ms")
    )
    ends = record.ends_within_run("data/cost_ms")
    if cost_ms is None or share is None or ends is None:
        return unchecked_if_training(record, "no steps without the loader were timed")
    if share <= MOST_OF_DATA or ends[0] <= 0:
        return None
    return (
        f"with batches that are already on the device, steps are {cost_ms:.3g} ms shorter "
        f"({100 * share:.1f} % of a step, allowed {100 * MOST_OF_DATA:.0f} %). "
        f"In each step the host waits {wait_ms:.3g} ms for data"
    )


@check("suspect", "time between the steps is missing in their times: {}")
def time_between_steps(record: Record, _: ValidityLimits) -> Judgement:
    """on CPU workers: more than 2 % of the time, and more than 0.1 ms a step, passed between one
    step and the next, and is counted in no step
    """
    if record.cell.device == "cuda":
        return not_applicable("on GPUs clocks_disagree checks this")
    share = record.checks.get("between_steps_share")
    ms = record.checks.get("between_steps_ms")
    if share is None or ms is None:
        return unchecked_if_training(record)
    if abs(share) <= MOST_BETWEEN or abs(ms) <= MOST_BETWEEN_MS:
        return None
    return f"{100 * share:.1f} %, {ms:.2g} ms a step"


@check("suspect", "the step lies outside the interval of its forecast: {}")
def unexplained(record: Record, _: ValidityLimits) -> Judgement:
    """the measured step time, with its 95 % interval, lies outside the interval that was forecast
    before the run

    Run again. If it happens again, the forecast leaves out a real effect: the report's table of
    forecasts shows how far it was off.
    """
    if not record.predicted:
        return None
    forecast = recorded_forecast(record)
    if forecast is None:
        return not_applicable("there was no forecast of the step")
    if not forecast.in_time:
        return unchecked("the forecast was not written before the run began")
    low, high = forecast.low, forecast.high
    if low is None or high is None:
        why = "too few runs of this kind could be held out"
        if record.cell.world_size == 1 or record.cell.strategy["name"] == "none":
            device = unit(record.cell.device)
            why = f"runs on one {device}, or without an exchange, are not held out"
        return not_applicable(f"no error was claimed: {why}")
    if forecast.least_ms <= high and forecast.most_ms >= low:
        return None
    decimals = 1 if abs(forecast.error) >= AS_LONG else 3
    word = "slower" if forecast.error > 0 else "faster"
    return (
        f"measured {100 * abs(forecast.error):.{decimals}f} % {word} than forecast: "
        f"{forecast.measured_ms:.4g} ms instead of {forecast.step_ms:.4g} ms "
        f"({low:.4g} to {high:.4g}; without a fault at most 1 run in "
        f"{round(1 / (1 - forecast.level))} lies outside)"
    )


@check("invalid", "the rate is not images ÷ seconds: {}")
def rate_inconsistent(record: Record, _: ValidityLimits) -> Judgement:
    """images/s is not images ÷ seconds, or not n times the rate per GPU"""
    rate = record.metrics.get(RATE)
    per_gpu = record.metrics.get("throughput/images_per_second_per_gpu")
    images = record.metrics.get("throughput/images")
    seconds = record.metrics.get("throughput/seconds")
    if rate is None or images is None or seconds is None:
        return unchecked_if_training(record, "the images or the seconds are missing")
    inputs = record.cell.model.inputs
    if not abs(rate * seconds - images) <= MOST_ROUNDED * images:
        return f"{rate:.6g} {inputs}/s, but {images:.0f} {inputs} in {seconds:.6g} s"
    ranks = record.cell.world_size
    if per_gpu is not None and not abs(per_gpu * ranks - rate) <= MOST_ROUNDED * rate:
        device = unit(record.cell.device)
        return f"{rate:.6g} {inputs}/s of {ranks} {device}s, but {per_gpu:.6g} per {device}"
    return None


@check("suspect", "few steps were measured: {}")
def too_few_iterations(record: Record, _: ValidityLimits) -> Judgement:
    """fewer steps were timed than asked

    Raise benchmark.max_seconds.
    """
    done = record.checks.get("iterations")
    wanted = record.cell.benchmark.get("min_iterations")
    if done is None or wanted is None:
        return unchecked_if_training(record, "the ranks counted no steps")
    if done >= wanted:
        return None
    return f"{done}, at least {wanted} requested"


@check("suspect", "steps still became faster when the warm-up ended")
def warmup_not_flat(record: Record, _: ValidityLimits) -> Judgement:
    """steps still became faster when the warm-up ended

    Raise benchmark.warmup_max_seconds.
    """
    is_flat = record.checks.get("warmup_flat")
    if is_flat is None:
        return unchecked_if_training(record, "no warm-up was measured")
    return None if is_flat else "not flat"


@check("suspect", "the efficiency is too high to be true: {}")
def efficiency_above_one(record: Record, _: ValidityLimits) -> Judgement:
    """the efficiency is above 100 % by more than 0.5 % and by more than 3 of its standard
    deviations. Without repeats: its interval, from this run's steps, lies above 102 %

    Measure each GPU on its own again, with repeats=3: they were probably slow, or clocks
    differed.
    """
    if record.cell.world_size == 1:
        return None  # a baseline is not compared with itself
    share = record.metrics.get(EFFICIENCY)
    if share is None:
        return not_applicable("no efficiency is stated: there is no baseline")
    noise, baselines = record.checks.get(NOISE), record.checks.get(BASELINES)
    rate, ends = record.metrics.get(RATE), record.ends_within_run(RATE)
    most = MOST_EFFICIENCY
    if noise is not None and baselines:
        runs = min(len(ids) for ids in baselines.values())
        deviation = noise * math.sqrt(1 + of_median(max(1, runs)))
        most = max(LEAST_MOST_EFFICIENCY, math.exp(MOST_DEVIATIONS * deviation))
    elif rate and ends and ends[0] > 0:
        most = MOST_EFFICIENCY * rate / ends[0]
    if share <= most:
        return None
    return f"{100 * share:.1f} %, and noise explains at most {100 * most:.1f} %"


@check("finding", "GPUs computed more slowly together than alone: {}", since=7)
def slower_together(record: Record, _: ValidityLimits) -> Judgement:
    """GPUs compute more slowly together than alone. At equal clocks and batch, even their steps
    without exchange were longer than steps of one GPU, by more than 1 % and by more than twice the
    variation of the run's steps

    Measure one GPU again with repeats=3. If the gap stays, the GPUs slow one another down.
    """
    cell, step_ms, cost_ms = record.cell, record.metrics.get(STEP), record.metrics.get(COST)
    share = record.metrics.get(AT_EQUAL_CLOCKS, record.metrics.get(EFFICIENCY))
    if cell.device != "cuda" or cell.global_batch_size or not share:
        return not_applicable("no GPU was measured alone with the same batch")
    if not step_ms or cost_ms is None:
        return not_applicable("no steps without exchange were timed")
    slower = (step_ms - cost_ms) / (share * step_ms) - 1
    noise = record.checks.get("half_width") or 0.0
    return beyond(slower, max(MOST_SLOWER_TOGETHER, OF_NOISE * noise))
