"""The numbers of `benchmark=throughput` and `exchange` from the raw lines of the ranks.

METHOD.md defines them. Without torch.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.derived import Derived, Line, RankLines, of_kind, slowest, together
from benchmarks.record import Kind
from benchmarks.timing import statistics
from benchmarks.training import request
from conf.cell import Cell

PROBABILITIES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
MOST_LAGS = 10
STAGES = ("forward", "backward", "exchange", "update")
Table = dict[str, Any]


def calibration_tables(lines: RankLines, cell: Cell) -> dict[str, Table]:
    """Return every table of a calibration that the lines give, and the residuals."""
    every = {
        "buckets": table_of(lines, Kind.BUCKETS),  # of rank 0: all ranks have the same
        "timeline": timeline(lines),
        "bucket_exchange": bucket_exchange(lines),
        "residuals": residuals(lines, cell),
    }
    return {name: table for name, table in every.items() if table}


def table_of(lines: RankLines, kind: str) -> Table:
    """Return the line of one kind of rank 0 as a table; empty where there is none."""
    written = of_kind(lines[0], kind)
    if not written:
        return {}
    table: Table = dict(written[0])
    for name in ("kind", "time"):
        table.pop(name, None)
    return table


def timeline(lines: RankLines) -> Table:
    """Return when the moments of a step come on each rank, without the exchange and with it."""
    rows = []
    for rank, own in sorted(lines.items()):
        for line in sorted(of_kind(own, Kind.TIMELINE), key=lambda line: bool(line["exchange"])):
            row: Table = {"rank": rank, "exchange": line["exchange"], "steps": line["steps"]}
            for stage in STAGES:
                median_ms, spread_ms = _median_and_spread(line[f"{stage}_ms"])
                row |= {f"{stage}_ms": median_ms, f"{stage}_spread_ms": spread_ms}
            row |= {"ready_ms": [], "ready_spread_ms": []}
            for bucket_ms in line["ready_ms"]:
                median_ms, spread_ms = _median_and_spread(bucket_ms)
                row["ready_ms"].append(median_ms)
                row["ready_spread_ms"].append(spread_ms)
            row["unknown"] = line["unknown"]
            rows.append(row)
    if not rows:
        return {}
    return {"rows": rows}


def bucket_exchange(lines: RankLines) -> Table:
    """Return how long one collective takes by itself, by its bytes: as on its slowest rank."""
    table = table_of(lines, Kind.BUCKET_EXCHANGE)
    if not table:
        return {}
    rows = []
    rows_by_rank = [line["rows"] for line in together(lines, Kind.BUCKET_EXCHANGE)[0]]
    for of_ranks in zip(*rows_by_rank, strict=True):
        ms = slowest(row["ms"] for row in of_ranks)
        median_ms, spread_ms = _median_and_spread(ms)
        row = {"bytes": of_ranks[0]["bytes"], "dtype": of_ranks[0]["dtype"]}
        rows.append(row | {"calls": len(ms), "ms": median_ms, "spread_ms": spread_ms})
    return table | {"rows": rows}


def residuals(lines: RankLines, cell: Cell) -> Table:
    """Return how the steps of each rank scatter where they wait for nobody.

    `acf` is the autocorrelation at lags 1, 2, …, of pairs inside one window; the last lag is half
    of the longest window at most.
    """
    purpose = "without exchange"
    if cell.world_size == 1 or cell.strategy["name"] == "none":
        purpose = "timed"
    rows = []
    windows_by_rank = zip(*together(lines, Kind.BLOCK, purpose=purpose), strict=True)
    for rank, blocks in enumerate(windows_by_rank):
        windows = [np.asarray(block["ms"], dtype=float) for block in blocks]
        ms = np.concatenate(windows)
        mean = math.fsum(ms) / len(ms)
        variance = math.fsum((ms - mean) ** 2) / len(ms)
        lags = min(MOST_LAGS, max(map(len, windows)) // 2)
        acf = []
        for lag in range(1, lags + 1):
            correlation = 0.0
            if variance:
                pairs = [(window[:-lag] - mean) * (window[lag:] - mean) for window in windows]
                products = np.concatenate(pairs)
                correlation = math.fsum(products) / len(products) / variance
            acf.append(correlation)
        row = {
            "rank": rank,
            "n": len(ms),
            "mean_ms": mean,
            "sd_ms": variance**0.5,
            "quantiles_ms": np.quantile(ms, PROBABILITIES).tolist(),
            "acf": acf,
        }
        rows.append(row)
    if not rows:
        return {}
    return {"purpose": purpose, "probabilities": list(PROBABILITIES), "rows": rows}


def _median_and_spread(ms: Sequence[float]) -> tuple[float | None, float | None]:
    if not len(ms):
        return None, None
    low, high = np.quantile(ms, [0.25, 0.75])
    return statistics.median(ms), float(high - low)


# A held step that takes longer than this share of a free one overfilled the launch queue: it says
# nothing of launch gaps.
MOST_BUSY = 1.1
# Steps of a window, and their share, that no clock gives the same time as its longest.
FEWEST_EQUAL, MOST_EQUAL = 3, 0.05
FEWEST_ROUNDS = 3  # of A B B A, of which each is a block of its own
OWN_MS = "ranks/own_ms"  # in tables: ms of a step without waiting for others, by rank
Metrics = dict[str, float]
Windows = list[list[float]]  # ms of each iteration, by window


def throughput(lines: RankLines, cell: Cell) -> Derived:
    """Return every derived value of `benchmark=throughput`."""
    first = together(lines, Kind.BLOCK, purpose="first")[0]
    warm_up = together(lines, Kind.BLOCK, purpose="warm-up")
    ms = slowest_ms(warm_up, cell.period)
    requested_ms = 1e3 * float(cell.benchmark.get("warmup_min_seconds", 0.0))
    least_ms = []
    for window in warm_up:
        for block in window:
            least_ms.append(float(block.get("least_ms", requested_ms)))
    windows = timed(lines, cell.period)
    metrics: Metrics = {
        "step/first_ms": max(block["lead_in_ms"] for block in first),
        "warmup/iterations": len(ms),
    }
    metrics |= windows.metrics | busy(lines, windows.metrics["step/ms_median"])
    within_run = windows.within_run
    stability_checks, tables = _stability(lines, cell)
    checks = windows.checks | stability_checks
    last_ms = slowest_ms(warm_up[-1:], cell.period)
    if last_ms:
        of_warm_up = windows.metrics["step/ms_median"] / statistics.median(last_ms)
        checks["slower_than_warmup"] = of_warm_up - 1
    checks["warmup_flat"] = warmed_up(ms, cell, min(least_ms, default=requested_ms))
    if cell.device != "cuda":
        checks |= _between_steps(lines)
    exchanged = exchange(lines, cell)
    if exchanged is not None:
        metrics |= exchanged.metrics
        within_run |= exchanged.within_run
        checks |= exchanged.checks
    for cost in (data_cost(lines, cell.period), strategy_cost(lines, cell.period)):
        metrics |= cost.metrics
        within_run |= cost.within_run
    tables |= calibration_tables(lines, cell) | path_tables(lines)
    return Derived(metrics, windows.series, tables=tables, checks=checks, within_run=within_run)


def path_tables(lines: RankLines) -> dict[str, Any]:
    """Return the table of what ranks saw of fast paths, a row each; empty where none looked."""
    rows = []
    for rank in sorted(lines):
        for line in of_kind(lines[rank], Kind.PATHS)[:1]:
            facts = {name: line[name] for name in line if name not in ("kind", "time")}
            rows.append({"rank": rank, **facts})
    return {"fast_paths": {"rows": rows}} if rows else {}


def warmed_up(ms: Sequence[float], cell: Cell, least_ms: float) -> bool:
    """Return whether a warm-up that took these ms, and should take `least_ms`, has ended.

    A rank ends it by this.
    """
    return statistics.flat(ms, int(cell.benchmark["warmup_iterations"]), least_ms)


def timed(lines: RankLines, period: int = 1) -> Derived:
    """Return the rate and the step times of the timed windows, with a series over the windows."""
    windows = together(lines, Kind.BLOCK, purpose="timed")
    ranks = len(windows[0])
    ms: list[float] = []  # of each iteration, its slowest rank
    by_window: Windows = []
    totals_ms = [0.0] * ranks
    images = tokens = equal_longest = 0
    disagreement = 0.0
    launch_ms, rates, medians = [], [], []
    for window in windows:
        by_window.append(slowest_ms([window], period))
        ms += by_window[-1]
        window_images, lasted_ms, launched_ms = 0, 0.0, 0.0
        for rank, block in enumerate(window):
            own_ms = math.fsum(block["ms"])
            totals_ms[rank] += own_ms
            lasted_ms = max(lasted_ms, own_ms)
            off = statistics.clock_disagreement(block["device_ms"], block["host_ms"])
            disagreement = max(disagreement, off)
            equal, steps = len(block["ms"]) - len(set(block["ms"])) + 1, len(block["ms"])
            is_longest = equal == block["ms"].count(max(block["ms"])) <= steps / 2
            if is_longest and equal >= max(FEWEST_EQUAL, MOST_EQUAL * steps):
                equal_longest = max(equal_longest, equal)
            window_images += int(block["images"])
            tokens += int(block.get("tokens", 0))
            launched_ms = max(launched_ms, block["launch_ms"])
        launch_ms.append(launched_ms)
        images += window_images
        rates.append([len(ms), window_images / (lasted_ms / 1e3)])
        medians.append([len(ms), statistics.median(by_window[-1])])
    seconds = max(totals_ms) / 1e3
    rate = images / seconds
    metrics: Metrics = {
        "throughput/images_per_second": rate,
        "throughput/images_per_second_per_gpu": rate / ranks,
        "throughput/images": images,
        "throughput/seconds": seconds,
        "step/ms_median": statistics.median(ms),
        "step/ms_p95": statistics.percentile_95(ms),
        "step/launch_ms": statistics.median(launch_ms),
        "step/iterations": len(ms),
        "ranks/spread": max(totals_ms) / min(totals_ms) - 1,
    }
    if tokens:
        metrics["throughput/tokens_per_second"] = tokens / seconds
        metrics["throughput/tokens"] = tokens
    mean_ms = math.fsum(ms) / len(ms)
    low_ms, high_ms = statistics.mean_interval(by_window)
    facts = _interval_facts(by_window)
    rate_interval = _interval(rate * mean_ms / high_ms, rate * mean_ms / low_ms)
    within_run = {
        "throughput/images_per_second": rate_interval | facts,
        "step/ms_median": _interval(*statistics.median_interval(by_window)) | facts,
    }
    checks = {
        "clock_disagreement": disagreement,
        "half_width": request.half_width(by_window),
        "iterations": len(ms),
    }
    if equal_longest:
        checks["equal_longest"] = equal_longest
    series = {"throughput/images_per_second": rates, "step/ms_median": medians}
    return Derived(metrics, series, checks=checks, within_run=within_run)


def _between_steps(lines: RankLines) -> Metrics:
    """Return the time of a CPU worker between its steps, as a share of the window and in ms a step.

    Of the rank with most, in the timed window with least: what is there in every window, and not a
    pause in one.
    """
    windows = []
    for window in together(lines, Kind.BLOCK, purpose="timed"):
        of_ranks = []
        for block in window:
            between_ms = block["host_ms"] - block["device_ms"]
            iterations = len(block["ms"]) + 1  # with the lead-in
            of_ranks.append((between_ms / block["host_ms"], between_ms / iterations))
        windows.append(max(of_ranks, key=lambda row: abs(row[0])))
    share, ms = min(windows, key=lambda row: abs(row[0]))
    return {"between_steps_share": share, "between_steps_ms": ms}


def busy(lines: RankLines, step_ms: float) -> Metrics:
    """Return how long a GPU computes in a step, and its idle share: what launch gaps cost."""
    held = together(lines, Kind.HELD)
    if not held:
        return {}
    busy_ms = statistics.median(slowest(line["ms"] for line in held[0]))
    metrics = {"gpu/busy_ms": busy_ms}
    if busy_ms <= MOST_BUSY * step_ms:
        metrics["gpu/idle_share"] = max(0.0, 1 - busy_ms / step_ms)
    return metrics


def slowest_ms(windows: Sequence[Sequence[Line]], period: int = 1) -> list[float]:
    """Return the time of each iteration of some windows: that of its slowest rank, as levelled."""
    ms: list[float] = []
    for window in windows:
        ms += statistics.levelled(slowest(block["ms"] for block in window), period)
    return ms


def _interval(low: float, high: float) -> dict[str, float]:
    return {"low": low, "high": high}


def _interval_facts(by_window: Sequence[Sequence[float]]) -> dict[str, float]:
    ms = statistics.joined(by_window)
    return {
        "groups": len(by_window),
        "correlation": statistics.correlation(ms),
        "drift": statistics.drift(ms),
    }


# What something costs a step: steps with it against steps without it, in the order A B B A.
def strategy_cost(lines: RankLines, period: int = 1) -> Derived:
    """Return what the strategy costs a step: steps with it against steps without exchange.

    Where steps without exchange stood between the timed windows, these are the steps with it;
    those beyond the rounds have no partner.
    """
    without_it = _windows(lines, "without exchange")
    with_it = _windows(lines, "with exchange", period)
    if not with_it:
        with_it = _windows(lines, "timed", period)[: len(without_it)]
    return _cost(with_it, without_it, "strategy/cost_ms")


def data_cost(lines: RankLines, period: int = 1) -> Derived:
    """Return what a data loader costs a step, and how long the host waits for it."""
    waits = together(lines, Kind.BLOCK, purpose="timed", has="wait_ms")
    if not waits:
        return Derived()
    wait_ms = []
    for window in waits:
        wait_ms += slowest(block["wait_ms"] for block in window)
    with_it = _windows(lines, "with loader", period)
    cost = _cost(with_it, _windows(lines, "without loader", period), "data/cost_ms")
    share = cost.metrics["data/cost_ms"] / _median_of(with_it)
    metrics = {"data/wait_ms": statistics.median(wait_ms), "data/cost_share": share}
    return Derived(cost.metrics | metrics, within_run=cost.within_run)


def abba(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> tuple[float, list[float]]:
    """Return median(first) − median(second) of windows A B B A, and the difference in each block.

    A whole round is a block, in which drift cancels; of few rounds each half is one.
    """
    halves = []
    for with_it, without_it in zip(first, second, strict=True):
        halves.append(statistics.median(with_it) - statistics.median(without_it))
    blocks = halves
    if len(halves) >= 2 * FEWEST_ROUNDS:
        blocks = []
        for left, right in zip(halves[::2], halves[1::2], strict=True):
            blocks.append((left + right) / 2)
    return _median_of(first) - _median_of(second), blocks


def _cost(with_it: Windows, without_it: Windows, name: str) -> Derived:
    if not without_it:
        return Derived()
    cost_ms, blocks = abba(with_it, without_it)
    interval = _interval(*statistics.difference_interval(cost_ms, blocks))
    return Derived({name: cost_ms}, within_run={name: interval | {"groups": len(blocks)}})


def _windows(lines: RankLines, purpose: str, period: int = 1) -> Windows:
    windows = together(lines, Kind.BLOCK, purpose=purpose)
    return [slowest_ms([window], period) for window in windows]


def _median_of(windows: Sequence[Sequence[float]]) -> float:
    return statistics.median(statistics.joined(windows))


# Whether the step stayed the same; analysis.validity.limits judges it.
def _stability(lines: RankLines, cell: Cell) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (checks, tables): did the step stay the same, and what does it cost each rank alone?

    Also whether samples fill their windows.
    """
    unaccounted = []  # shares of a window that its samples leave out, or count too much
    for own in lines.values():
        for block in of_kind(own, Kind.BLOCK):
            samples_ms = math.fsum([block["lead_in_ms"], *block["ms"]])
            unaccounted.append(abs(samples_ms / float(block["device_ms"]) - 1))
    timed_windows = _windows(lines, "timed", cell.period)
    ms = statistics.joined(timed_windows)
    checks: dict[str, Any] = {
        "stationarity": statistics.stationarity(ms),
        "stationarity_in_windows": statistics.stationarity(statistics.folded(timed_windows)),
        "pauses": statistics.pauses(ms),
        "unaccounted_share": max(unaccounted),
        "windows_repeated": max(map(_repeated, lines.values())),
        "iterations_missing": max(map(_missing, lines.values())),
        "unseen_share": min(map(_unseen_share, lines.values())),
        "grid_ms": statistics.grid(statistics.joined(_windows(lines, "timed"))),
    }
    # Steps that wait for no other rank: those without exchange; every step of strategy=none.
    purpose = "timed" if cell.strategy["name"] == "none" else "without exchange"
    windows = together(lines, Kind.BLOCK, purpose=purpose)
    if cell.world_size == 1 or not windows:
        return checks, {}
    by_rank = []
    for rank in range(cell.world_size):
        by_rank.append(_median_of([window[rank]["ms"] for window in windows]))
    # Which rank is slowest alone, and by what share of the median of the others. Its noise is the
    # half-width of the 95 % interval from window to window; nan for a single window.
    slowest_rank = by_rank.index(max(by_rank))
    shares = []
    for window in windows:
        medians = [statistics.median(block["ms"]) for block in window]
        shares.append(_excess(medians, slowest_rank))
    share = _excess(by_rank, slowest_rank)
    low, high = statistics.difference_interval(share, shares)
    checks["slowest_rank"] = {"rank": slowest_rank, "share": share, "noise": (high - low) / 2}
    return checks, {OWN_MS: by_rank}


def _repeated(own: Sequence[Line]) -> int:
    """Return how many timed windows of a rank have the samples of another, or its moment."""
    windows = of_kind(own, Kind.BLOCK, purpose="timed")
    samples = {(window["device_ms"], *window["ms"]) for window in windows}
    moments = {window["time"] for window in windows}
    return len(windows) - min(len(samples), len(moments))


def _unseen_share(own: Sequence[Line]) -> float:
    """Return the least share of a timed window of a rank that passed and is in no sample.

    What passes from the line before a window to its own, beyond what its clock says, less the least
    of that at windows of the warm-up: the time of a line itself. 0 without either.
    """
    unseen: dict[str, list[float]] = {"warm-up": [], "timed": []}
    timed_ms: list[float] = []
    before = own[0]
    for line in own:
        if line["kind"] == Kind.BLOCK and line["purpose"] in unseen:
            passed_ms = 1e3 * (line["time"] - before["time"])
            unseen[line["purpose"]].append(passed_ms - line["host_ms"])
            if line["purpose"] == "timed":
                timed_ms.append(line["host_ms"])
        if line["kind"] in (Kind.BLOCK, Kind.PHASE):
            before = line
    if not unseen["warm-up"] or not timed_ms:
        return 0.0
    of_lines_ms = max(0.0, min(unseen["warm-up"]))
    shares = [(ms - of_lines_ms) / of for ms, of in zip(unseen["timed"], timed_ms, strict=True)]
    return min(shares)


def _missing(own: Sequence[Line]) -> int:
    """Return how many iterations the windows of a rank lack, or have too many, by its heartbeats.

    A heartbeat says how many iterations were begun. Inside the window that is written next, it lies
    between those of all windows before and those with this window; what ranks begin outside of
    windows, which no heartbeat may see, shifts all alike.
    """
    iterations = 0  # of the windows so far
    least_shift, most_shift = -math.inf, math.inf
    begun: list[int] = []  # as the heartbeats since the last window say
    for line in own:
        if line["kind"] == Kind.BEAT:
            begun.append(line["iterations"])
        elif line["kind"] == Kind.BLOCK:
            after = iterations + len(line["ms"]) + 1  # with the lead-in
            for count in begun:
                least_shift = max(least_shift, count - after)
                most_shift = min(most_shift, count - iterations)
            iterations, begun = after, []
        elif line["kind"] == Kind.PHASE and line["phase"] == "compare":
            break
    for count in begun:  # of a window that is not there
        least_shift = max(least_shift, count - iterations)
    return int(max(0, least_shift - most_shift))


def _excess(values: Sequence[float], rank: int) -> float:
    """Return by what share of the median of the others the value of a rank exceeds it."""
    return values[rank] / statistics.median([*values[:rank], *values[rank + 1 :]]) - 1


# The exchange alone: a phase of benchmark=throughput, and benchmark=exchange.
def exchange(lines: RankLines, cell: Cell) -> Derived | None:
    """Return the exchange alone and its references; None where none was measured.

    `checks` has the slowest of its references; empty: none was measured.
    """
    facts = of_kind(lines[0], Kind.EXCHANGE)
    if not facts:
        return None
    synchronous, moved = facts[0]["synchronous"], facts[0]["bytes_moved"]
    ms = _exchange_ms(together(lines, Kind.BLOCK, purpose="exchange")[0], synchronous)
    median_ms = statistics.median(ms)
    metrics: Metrics = {
        "comm/exchange_ms": median_ms,
        "comm/algbw_gb_per_s": facts[0]["gradient_bytes"] / median_ms / 1e6,
    }
    pipelined = together(lines, Kind.BLOCK, purpose="pipelined")
    if pipelined:
        metrics["comm/pipelined_ms"] = statistics.median(_exchange_ms(pipelined[0], synchronous))
    if not math.isnan(moved):  # a strategy that cannot say what it moves has no busbw
        metrics["comm/busbw_gb_per_s"] = moved / median_ms / 1e6
        metrics["comm/bytes_moved"] = moved
        metrics["comm/bytes_per_image"] = moved / cell.batch_size / cell.period
    reference_metrics, reference = references(lines, metrics, synchronous)
    interval = _interval(*statistics.median_interval([ms])) | _interval_facts([ms])
    by_iteration = [[iteration, value] for iteration, value in enumerate(ms, 1)]
    return Derived(
        metrics | reference_metrics,
        {"comm/exchange_ms": by_iteration},
        checks={"reference": reference},
        within_run={"comm/exchange_ms": interval},
    )


def _exchange_ms(blocks: Sequence[Line], synchronous: bool) -> list[float]:
    """Return the time of each iteration of one window: that of its slowest rank.

    Iterations of asynchronous ranks are not the same exchange: there it is the rank that took
    longest for all.
    """
    by_rank: list[list[float]] = [block["ms"] for block in blocks]
    return slowest(by_rank) if synchronous else max(by_rank, key=sum)


def references(lines: RankLines, measured: Metrics, synchronous: bool) -> tuple[Metrics, str]:
    """Return what simpler operations need for the bytes of an exchange: (metrics, the slowest).

    Metrics: ms of each reference (`reference/…_ms`) and each stage alone (`stage/…_ms`), the
    largest reference (`comm/ideal_ms`), and what share of it the exchange reached
    (`comm/ideal_ratio`).
    """
    metrics: Metrics = {}
    names = []  # of references
    for blocks in together(lines, Kind.BLOCK, has="probe"):
        probe = blocks[0]["probe"]
        name = f"stage/{probe['name']}_ms"
        if probe.get("reference", probe.get("limit")):  # a limit in lines of schema 3
            name = f"reference/{probe['name']}_ms"
            names.append(name)
        ms = statistics.median(_exchange_ms(blocks, synchronous)) * probe["share"]
        metrics[name] = min(ms, metrics.get(name, ms))  # the fastest way tells what is possible
    if not names:
        return metrics, ""
    binding = max(names, key=lambda name: metrics[name])
    ideal_ms = metrics[binding]
    metrics["comm/ideal_ms"] = ideal_ms
    metrics["comm/ideal_ratio"] = ideal_ms / measured["comm/exchange_ms"]
    if "comm/pipelined_ms" in measured:
        metrics["comm/pipelined_ratio"] = ideal_ms / measured["comm/pipelined_ms"]
    return metrics, binding.removeprefix("reference/").removesuffix("_ms")
