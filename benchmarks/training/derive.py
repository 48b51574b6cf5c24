"""The numbers of `benchmark=throughput`, `exchange` and `overhead`, from the raw lines of the ranks. METHOD.md defines them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.derived import Derived, Line, RankLines, WithinRun, of_kind, slowest, together
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.timing import statistics as intervals
from benchmarks.timing import statistics as stationarity
from benchmarks.training import derive_calibration as calibration
from benchmarks.training import request as stopping
from benchmarks.training.costs import data_cost, slowest_ms, strategy_cost
from benchmarks.training.steadiness import steadiness
from conf.cell import Cell

# A held step that takes longer than this share of a free one overfilled the launch queue: it says nothing of launch gaps.
MOST_BUSY = 1.1
Metrics = dict[str, float]


# benchmark=throughput


def throughput(lines: RankLines, cell: Cell) -> Derived:
    """Return every derived value of `benchmark=throughput`."""
    windows = timed(lines)
    metrics = warm_up(lines) | windows.metrics | busy(lines, windows.metrics)
    steady = steadiness(lines, cell, slowest_ms(together(lines, Kind.BLOCK, purpose="timed")))
    within_run, checks = (
        windows.within_run,
        windows.checks | steady.checks | warm_up_checks(lines, cell),
    )
    if cell.device != "cuda":
        checks |= between_steps(lines)
    exchanged = exchange_alone(lines)
    if exchanged is not None:
        metrics |= exchanged.metrics
        within_run |= exchanged.within_run
        checks["reference"] = exchanged.reference
    for cost in (data_cost(lines), strategy_cost(lines)):
        metrics |= cost.metrics
        within_run |= cost.within_run
    tables = steady.tables | calibration.tables(lines, cell)
    return Derived(metrics, windows.series, tables=tables, checks=checks, within_run=within_run)


def warm_up(lines: RankLines) -> Metrics:
    """Return the time of the first step, which compiles and connects, and the number of warm-up iterations."""
    (first,) = together(lines, Kind.BLOCK, purpose="first")
    iterations = len(slowest_ms(together(lines, Kind.BLOCK, purpose="warm-up")))
    return {
        "step/first_ms": max(block["lead_in_ms"] for block in first),
        "warmup/iterations": iterations,
    }


def warm_up_checks(lines: RankLines, cell: Cell) -> dict[str, Any]:
    """Return whether the step time had stopped falling when the warm-up ended."""
    windows = together(lines, Kind.BLOCK, purpose="warm-up")
    asked_ms = 1e3 * float(cell.benchmark.get("warmup_min_seconds", 0.0))
    least_ms = min(
        (float(block.get("least_ms", asked_ms)) for window in windows for block in window),
        default=asked_ms,
    )
    return {"warmup_flat": warmed_up(slowest_ms(windows), cell, least_ms)}


def warmed_up(ms: Sequence[float], cell: Cell, least_ms: float) -> bool:
    """Return whether a warm-up that took these ms, and should take `least_ms` at least, has ended; a rank ends it by this."""
    return statistics.flat(ms, int(cell.benchmark["warmup_iterations"]), least_ms)


def timed(lines: RankLines) -> Derived:
    """Return the rate and the step times of the timed windows, with a series over the windows."""
    windows = together(lines, Kind.BLOCK, purpose="timed")
    ranks = len(windows[0])
    ms: list[float] = []  # of each iteration, its slowest rank
    by_window = [slowest_ms([window]) for window in windows]
    totals = [0.0] * ranks  # ms of each rank
    images, tokens, disagreement, launch_ms = 0, 0, 0.0, []
    rates, medians = [], []
    for window, window_ms in zip(windows, by_window, strict=True):
        ms += window_ms
        own = [math.fsum(block["ms"]) for block in window]
        totals = [total + one for total, one in zip(totals, own, strict=True)]
        disagreement = max(
            disagreement,
            *(
                statistics.clock_disagreement(block["device_ms"], block["host_ms"])
                for block in window
            ),
        )
        launch_ms.append(max(block["launch_ms"] for block in window))
        window_images = sum(int(block["images"]) for block in window)
        images += window_images
        tokens += sum(int(block.get("tokens", 0)) for block in window)
        rates.append([len(ms), window_images / (max(own) / 1e3)])
        medians.append([len(ms), statistics.median(window_ms)])
    low_ms, high_ms = intervals.mean_interval(by_window)
    mean_ms = math.fsum(ms) / len(ms)
    rate = images / (max(totals) / 1e3)
    metrics: Metrics = {
        "throughput/images_per_second": rate,
        "throughput/images_per_second_per_gpu": rate / ranks,
        "throughput/images": images,
        "throughput/seconds": max(totals) / 1e3,
        "step/ms_median": statistics.median(ms),
        "step/ms_p95": statistics.percentile_95(ms),
        "step/launch_ms": statistics.median(launch_ms),
        "step/iterations": len(ms),
        "ranks/spread": max(totals) / min(totals) - 1,
    }
    if tokens:
        metrics |= {
            "throughput/tokens_per_second": tokens / (max(totals) / 1e3),
            "throughput/tokens": tokens,
        }
    facts = _facts(by_window)
    within_run = {
        "throughput/images_per_second": _ends(rate * mean_ms / high_ms, rate * mean_ms / low_ms)
        | facts,
        "step/ms_median": _ends(*intervals.median_interval(by_window)) | facts,
    }
    checks = {
        "clock_disagreement": disagreement,
        "half_width": stopping.half_width(by_window),
        "iterations": len(ms),
    }
    series = {"throughput/images_per_second": rates, "step/ms_median": medians}
    return Derived(metrics, series, checks=checks, within_run=within_run)


def between_steps(lines: RankLines) -> Metrics:
    """Return the time of a CPU worker between its steps, as a share of the window and in ms a step.

    Of the rank with most, in the timed window with least: what is there in every window, and not a pause in one.
    """
    windows = []
    for window in together(lines, Kind.BLOCK, purpose="timed"):
        of_ranks = [(block["host_ms"] - block["device_ms"], block) for block in window]
        between_ms, block = max(of_ranks, key=lambda one: abs(one[0]) / one[1]["host_ms"])
        windows.append(
            (between_ms / block["host_ms"], between_ms / (len(block["ms"]) + 1))
        )  # with the lead-in
    share, ms = min(windows, key=lambda one: abs(one[0]))
    return {"between_steps_share": share, "between_steps_ms": ms}


def _ends(low: float, high: float) -> dict[str, float]:
    """Return an interval as records have it."""
    return {"low": low, "high": high}


def _facts(by_window: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return what an interval rests on: windows, correlation of neighbours, drift of the mean as a share of it."""
    ms = [one for window in by_window for one in window]
    return {
        "groups": len(by_window),
        "correlation": intervals.correlation(ms),
        "drift": stationarity.drift(ms),
    }


def busy(lines: RankLines, of_steps: Metrics) -> Metrics:
    """Return how long a GPU computes in a step, and its idle share: what the step loses to launch gaps."""
    held = together(lines, Kind.HELD)
    if not held:
        return {}
    busy_ms = statistics.median(slowest(line["ms"] for line in held[0]))
    metrics, step_ms = {"gpu/busy_ms": busy_ms}, of_steps["step/ms_median"]
    if busy_ms <= MOST_BUSY * step_ms:
        metrics["gpu/idle_share"] = max(0.0, 1 - busy_ms / step_ms)
    return metrics


# The exchange alone: a phase of benchmark=throughput, and benchmark=exchange


@dataclass(frozen=True)
class Exchanged:
    """The exchange alone."""

    metrics: Metrics
    within_run: WithinRun
    ms: list[float]  # of each iteration
    reference: str  # the slowest of its references; empty: none was measured


def exchange_alone(lines: RankLines) -> Exchanged | None:
    """Return the exchange alone and its references; None where none was measured."""
    facts = of_kind(lines[0], Kind.EXCHANGE)
    if not facts:
        return None
    synchronous = facts[0]["synchronous"]
    (blocks,) = together(lines, Kind.BLOCK, purpose="exchange")
    ms = exchange_ms(blocks, synchronous)
    milliseconds = statistics.median(ms)
    within_run = {"comm/exchange_ms": _ends(*intervals.median_interval([ms])) | _facts([ms])}
    metrics: Metrics = {
        "comm/exchange_ms": milliseconds,
        "comm/algbw_gb_per_s": facts[0]["gradient_bytes"] / milliseconds / 1e6,
    }
    if pipelined := together(lines, Kind.BLOCK, purpose="pipelined"):
        metrics["comm/pipelined_ms"] = statistics.median(exchange_ms(pipelined[0], synchronous))
    moved = facts[0]["bytes_moved"]
    if moved == moved:  # NaN: a strategy that cannot say what it moves has no busbw
        metrics |= {"comm/busbw_gb_per_s": moved / milliseconds / 1e6, "comm/bytes_moved": moved}
    found, reference = references(lines, metrics, synchronous)
    return Exchanged(metrics | found, within_run, ms, reference)


def exchange_ms(blocks: Sequence[Line], synchronous: bool) -> list[float]:
    """Return the time of each iteration of one window: that of its slowest rank.

    Iterations of asynchronous ranks are not the same exchange: there it is the rank that took longest for all.
    """
    by_rank: list[list[float]] = [block["ms"] for block in blocks]
    return slowest(by_rank) if synchronous else max(by_rank, key=sum)


def references(lines: RankLines, measured: Metrics, synchronous: bool) -> tuple[Metrics, str]:
    """Return what simpler operations need for the bytes of an exchange: (metrics, the slowest reference).

    Metrics: ms of each reference (`reference/…_ms`) and each stage alone (`stage/…_ms`), the largest reference
    (`comm/ideal_ms`), and what share of it the exchange reached (`comm/ideal_ratio`).
    """
    metrics: Metrics = {}
    for blocks in together(lines, Kind.BLOCK, has="probe"):
        probe = blocks[0]["probe"]
        is_reference = probe.get(
            "reference", probe.get("limit")
        )  # which lines of schema 3 call a limit
        name = f"{'reference' if is_reference else 'stage'}/{probe['name']}_ms"
        ms = statistics.median(exchange_ms(blocks, synchronous)) * probe["share"]
        metrics[name] = min(ms, metrics.get(name, ms))  # the fastest way tells what is possible
    found = {name: value for name, value in metrics.items() if name.startswith("reference/")}
    if not found:
        return metrics, ""
    binding = max(found, key=lambda name: found[name])
    ideal_ms = found[binding]
    metrics |= {
        "comm/ideal_ms": ideal_ms,
        "comm/ideal_ratio": ideal_ms / measured["comm/exchange_ms"],
    }
    if "comm/pipelined_ms" in measured:
        metrics["comm/pipelined_ratio"] = ideal_ms / measured["comm/pipelined_ms"]
    return metrics, binding.removeprefix("reference/").removesuffix("_ms")


def exchange(lines: RankLines, cell: Cell) -> Derived:
    """Return every derived value of `benchmark=exchange`, and the lines of measure.py where they are asked for."""
    exchanged = exchange_alone(lines)
    assert exchanged is not None  # the benchmark refuses a strategy that exchanges nothing
    series = {"comm/exchange_ms": [[number + 1, ms] for number, ms in enumerate(exchanged.ms)]}
    output = ""
    if cell.benchmark["format"] == "mxnet":
        facts: Any = of_kind(lines[0], Kind.RESULT)[0]
        output = "\n".join(
            mxnet_lines(cell, facts["model"], facts["metrics"]["comm/error"], exchanged.ms)
        )
    checks = {"reference": exchanged.reference}
    return Derived(
        exchanged.metrics, series, checks=checks, output=output, within_run=exchanged.within_run
    )


# benchmark=overhead


def overhead(lines: RankLines, cell: Cell) -> Derived:
    """Return every derived value of `benchmark=overhead`: an instrumented step against a bare one."""
    instrumented = [
        [
            block["host_ms"] / (len(block["ms"]) + 1) for block in blocks
        ]  # the lead-in is part of the window
        for blocks in together(lines, Kind.BLOCK, purpose="instrumented")
    ]
    slow = [max(of_ranks) for of_ranks in instrumented]
    fast = [max(line["ms"] for line in of_ranks) for of_ranks in together(lines, Kind.BARE)]
    step_ms = statistics.median(fast)
    more_ms = statistics.median(slow) - step_ms
    low, high = intervals.difference_interval(
        more_ms, [one - other for one, other in zip(slow, fast, strict=True)]
    )
    metrics = warm_up(lines) | {
        "overhead/share": more_ms / step_ms,
        "overhead/bare_step_ms": step_ms,
    }
    within_run = {"overhead/share": _ends(low / step_ms, high / step_ms) | {"groups": len(slow)}}
    return Derived(metrics, checks=warm_up_checks(lines, cell), within_run=within_run)


# The lines of MXNet's tools/bandwidth/measure.py, for scripts that read them.


# Our strategies by measure.py's names of its stores.
MXNET_NAMES = {"nccl_allreduce": "nccl", "cpu_staged": "local"}


def mxnet_lines(
    cell: Cell, model: Mapping[str, float], error: float, exchange_ms: Sequence[float]
) -> list[str]:
    """Return what measure.py prints. GB/s is size · 2(n−1)/n ÷ time; `error` is that of one exchange, of every line."""
    count, name = cell.world_size, cell.strategy["name"]
    numbered = re.fullmatch(r"([a-z]+)(\d+)", cell.model.name)  # resnet, 200; but inception_v3
    kind, layers = numbered.groups() if numbered else (cell.model.name, "0")
    size_mb = model["gradient_bytes"] / 1e6
    shape = f"{cell.model.channels},{cell.model.image_size},{cell.model.image_size}"
    head = (
        f"INFO:root:Namespace(disp_batches=1, gpus='{','.join(map(str, cell.gpus))}', image_shape='{shape}', "
        f"kv_store='{MXNET_NAMES.get(name, name.removeprefix('kvstore_'))}', network='{kind}', "
        f"num_batches={len(exchange_ms)}, num_classes={cell.model.classes}, num_layers={layers}, "
        f"optimizer='None', test_results=1)"
    )
    lines = [
        head,
        f"INFO:root:num of arrays = {model['arrays']:.0f}, total size = {size_mb:.6f} MB",
    ]
    for number, ms in enumerate(exchange_ms):
        rate = size_mb * 2 * (count - 1) / count / ms  # MB per ms is GB/s
        lines.append(
            f"INFO:root:iter {number + 1}, {ms / 1e3:.6f} sec, {rate:.6f} GB/sec per gpu, error {error:.6f}"
        )
    return lines
