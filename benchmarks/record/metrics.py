"""Every metric that a record may hold, once: its name, title, unit, decimals, which way is better, and its column.

The terminal, MLflow and the report print a metric by its entry here; REFERENCE.md lists each. A
benchmark or strategy of the user's own may log other names: `metric` gives them an entry made from
the name.

Name is a pattern where a metric comes in several forms: `{one|all}` is one of these words, `<way>`
any word.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.record.record import OLDEST_SCHEMA

# What a name ends in, and its unit.
UNITS = {
    "_gb_per_s": "GB/s",
    "_per_second": "/s",
    "_ms_per_step": "ms",
    "_ms": "ms",
    "_us": "µs",
    "_seconds": "s",
    "_share": "%",
    "_fraction": "%",
    "_ratio": "%",
    "_efficiency": "%",
}


@dataclass(frozen=True)
class Metric:
    """One metric. The value of a metric in % is a share of one: 0.981 is printed as 98.1 %."""

    name: str
    title: str  # a few words; the part of the name before the slash says what they are about
    unit: str = ""
    less_is_better: bool | None = None  # None: neither way is better
    decimals: int | None = None  # None: three significant digits, and all digits of whole thousands
    column: str = ""  # heading of its column where cells are listed; empty: it has none
    signed: bool = False  # a difference: it may be 0 or less, and its scatter is no share of it
    first: bool = False  # shown for a benchmark without columns, if its YAML names no metric that is `compared`
    since: int = OLDEST_SCHEMA  # the schema version from which records have it: `verify` misses it in no older one

    def of(self, counted: str) -> "Metric":
        """Return the entry in the words of what cells count (conf.cell.counted): a model of tokens has samples, no images."""
        told = {
            name: getattr(self, name).replace("images", counted)
            for name in ("title", "unit", "column")
        }
        return replace(self, **told)


def _lower_is_better(name: str, title: str, unit: str, **more: object) -> Metric:
    return Metric(name, title, unit, True, **more)  # type: ignore[arg-type]


def _higher_is_better(name: str, title: str, unit: str, **more: object) -> Metric:
    return Metric(name, title, unit, False, **more)  # type: ignore[arg-type]


# In the order in which they are shown.
_TABLE = (
    _higher_is_better(
        "throughput/images_per_second", "images per second", "images/s", column="images/s"
    ),
    Metric(
        "throughput/ci_low",
        "images per second, low end of the 95 % interval for the next run",
        "images/s",
    ),
    Metric(
        "throughput/ci_high",
        "images per second, high end of the 95 % interval for the next run",
        "images/s",
    ),
    Metric(
        "throughput/ci_runs", "runs of equal cells that this interval rests on", "runs", decimals=0
    ),
    _higher_is_better(
        "throughput/images_per_second_per_gpu",
        "images per second and GPU",
        "images/s",
        column="per GPU",
    ),
    Metric("throughput/images", "images that were counted", "images", decimals=0),
    _higher_is_better(
        "throughput/tokens_per_second", "tokens per second", "tokens/s", column="tokens/s"
    ),
    Metric("throughput/tokens", "tokens that were counted", "tokens", decimals=0),
    Metric("throughput/seconds", "time of the slowest rank", "s"),
    # Said before the cell was measured (predict=auto): no run of it scatters, and neither way is
    # better.
    Metric("predicted/step_ms", "step, as forecast", "ms", since=6),
    Metric(
        "predicted/step_ms_low", "step, as forecast: low end of the 90 % interval", "ms", since=6
    ),
    Metric(
        "predicted/step_ms_high", "step, as forecast: high end of the 90 % interval", "ms", since=6
    ),
    Metric(
        "predicted/images_per_second",
        "images per second, as forecast",
        "images/s",
        column="predicted",
        since=6,
    ),
    Metric("predicted/efficiency", "efficiency, as forecast", "%", decimals=1, since=6),
    Metric(
        "predicted/exposed_ms", "exposed communication, as forecast", "ms", signed=True, since=6
    ),
    Metric("predicted/null_step_ms", "step, as the null model has it", "ms", since=6),
    Metric(
        "prediction/error",
        "measured step against its forecast",
        "%",
        decimals=1,
        signed=True,
        since=6,
    ),
    _higher_is_better("scaling/efficiency", "efficiency", "%", decimals=1, column="efficiency"),
    _higher_is_better("scaling/node_efficiency", "efficiency against whole hosts", "%", decimals=1),
    _higher_is_better(
        "scaling/efficiency_at_equal_clocks", "efficiency at equal clocks", "%", decimals=1
    ),
    _lower_is_better(
        "data/cost_share",
        "share of a step that the loader costs",
        "%",
        decimals=1,
        column="data",
        signed=True,
    ),
    _lower_is_better("data/cost_ms", "cost of the loader in a step", "ms", signed=True),
    _lower_is_better("data/wait_ms", "host's wait for the loader in a step", "ms"),
    _lower_is_better("comm/exchange_ms", "exchange alone", "ms", column="exchange ms"),
    _higher_is_better(
        "comm/ideal_ratio", "share of the reference", "%", decimals=1, column="of reference speed"
    ),
    _higher_is_better("comm/algbw_gb_per_s", "algbw of the exchange, all buckets together", "GB/s"),
    _higher_is_better(
        "comm/busbw_gb_per_s",
        "busbw of the exchange, all buckets together",
        "GB/s",
        column="exchange GB/s",
    ),
    _lower_is_better(
        "strategy/cost_ms", "cost of the strategy in a step", "ms", column="cost ms", signed=True
    ),
    _lower_is_better(
        "comm/exposed_ms", "exposed communication", "ms", column="exposed ms", signed=True
    ),
    _higher_is_better(
        "comm/hidden_share",
        "share of the exchange that compute hides",
        "%",
        decimals=0,
        column="hidden",
    ),
    Metric("comm/ideal_ms", "time that the reference needs", "ms"),
    _lower_is_better("comm/pipelined_ms", "exchange in a stream of exchanges", "ms"),
    _higher_is_better(
        "comm/pipelined_ratio", "share of the reference in a stream", "%", decimals=0
    ),
    Metric("comm/bytes_moved", "bytes that each rank sends", "bytes", decimals=0),
    _lower_is_better("comm/error", "error of the first exchange", ""),
    _lower_is_better("step/ms_median", "median step", "ms"),
    _lower_is_better("step/ms_p95", "95th percentile of steps", "ms"),
    _lower_is_better("step/launch_ms", "host time to enqueue a step", "ms"),
    _lower_is_better("step/first_ms", "first step", "ms"),
    Metric("step/iterations", "timed iterations", "iterations", decimals=0),
    Metric("warmup/iterations", "warm-up iterations", "iterations", decimals=0),
    _lower_is_better("ranks/spread", "slowest rank against the fastest", "%", decimals=1),
    _lower_is_better("gpu/busy_ms", "device time of a step", "ms"),
    _lower_is_better("gpu/idle_share", "idle share of a step", "%", decimals=1),
    Metric("gpu/sm_mhz", "clock", "MHz", decimals=0),
    Metric("gpu/power_w", "power", "W", decimals=0),
    Metric("gpu/temperature_c", "temperature", "°C", decimals=0),
    Metric("gpu/power_capped_share", "share of samples at the power cap", "%", decimals=1),
    Metric("reference/<way>_ms", "time that a reference needs", "ms"),
    _lower_is_better("stage/<name>_ms", "one stage alone", "ms"),
    _lower_is_better("staleness/mean", "mean staleness", "updates", decimals=2),
    _lower_is_better("staleness/max", "largest staleness", "updates", decimals=0),
    Metric("staleness/updates", "updates", "updates", decimals=0),
    _lower_is_better("trace/comm_ms_per_step", "communication", "ms"),
    _lower_is_better(
        "trace/exposed_ms_per_step",
        "exposed communication by the trace",
        "ms",
        column="exposed by trace",
        signed=True,
    ),
    _lower_is_better("trace/exposed_in_gaps_ms_per_step", "exposed in gaps between kernels", "ms"),
    _higher_is_better("trace/overlapped_ms_per_step", "overlapped communication", "ms"),
    _lower_is_better("trace/wait_ms_per_step", "waiting for the last rank", "ms", signed=True),
    _lower_is_better("trace/{nccl|gloo}_avg_us", "mean call of a collective", "µs"),
    _lower_is_better("trace/gpu_idle_share", "idle share of the traced time", "%", decimals=1),
    _lower_is_better("trace/gap_us", "median pause between kernels", "µs"),
    Metric(
        "trace/exposed_disagreement_ms",
        "trace minus difference",
        "ms",
        column="difference",
        signed=True,
    ),
    # Neither way is better: what a cell costs says nothing of what it measured, and has no noise
    # floor.
    Metric("cell/seconds", "wall time of the cell", "s", decimals=1),
    Metric("cell/measuring_seconds", "time spent measuring", "s", decimals=1),
    Metric("cell/overhead_ratio", "wall time for each second of measuring", "", decimals=2),
    _higher_is_better("collectives/busbw_gb_per_s", "busbw", "GB/s"),
    _higher_is_better("collectives/algbw_gb_per_s", "algbw", "GB/s"),
    _higher_is_better("collectives/avg_busbw_gb_per_s", "average busbw", "GB/s"),
    _higher_is_better(
        "collectives/{out_of_place|in_place}_busbw_gb_per_s", "busbw of each size", "GB/s"
    ),
    _lower_is_better("collectives/latency_us", "latency", "µs"),
    _lower_is_better("collectives/alpha_us", "α of the first piece", "µs"),
    _higher_is_better("collectives/beta_gb_per_s", "β of the last piece", "GB/s"),
    _lower_is_better("collectives/fit_rms_error", "error of the α–β line", "%", decimals=1),
    _lower_is_better("jacobi/seconds", "solve", "s"),
    _higher_is_better("jacobi/efficiency", "efficiency", "%", decimals=1),
    _higher_is_better("jacobi/speedup", "speed-up", "", decimals=2),
    _lower_is_better("jacobi/one_gpu_seconds", "solve on one GPU", "s"),
    _lower_is_better("jacobi/solve_seconds", "each solve", "s"),
    _lower_is_better("jacobi/one_gpu_solve_seconds", "each solve on one GPU", "s"),
    Metric("jacobi/iterations", "iterations", "iterations", decimals=0),
    Metric("jacobi/norm", "last norm", ""),
    _higher_is_better("jacobi/stencil_gb_per_s", "stencil", "GB/s"),
    _higher_is_better("jacobi/copy_gb_per_s", "copy of the grid", "GB/s"),
    _higher_is_better("jacobi/copy_share", "stencil against copy", "%", decimals=1),
    _higher_is_better("p2p/unidirectional_enabled_gb_per_s", "copy one way", "GB/s", first=True),
    _higher_is_better(
        "p2p/unidirectional_disabled_gb_per_s",
        "copy one way without peer access",
        "GB/s",
        first=True,
    ),
    _higher_is_better("p2p/bidirectional_enabled_gb_per_s", "copies both ways", "GB/s"),
    _higher_is_better(
        "p2p/bidirectional_disabled_gb_per_s", "copies both ways without peer access", "GB/s"
    ),
    _higher_is_better("p2p/{unidirectional|bidirectional}_enabled_reads_gb_per_s", "reads", "GB/s"),
    _higher_is_better(
        "p2p/{unidirectional|bidirectional}_{enabled|disabled|enabled_reads}_least_gb_per_s",
        "slowest pair",
        "GB/s",
    ),
    _lower_is_better(
        "p2p/latency_{gpu|cpu}_{enabled|disabled|enabled_reads}_us", "latency of a copy", "µs"
    ),
    _lower_is_better(
        "p2p/latency_{gpu|cpu}_{enabled|disabled|enabled_reads}_most_us", "slowest pair", "µs"
    ),
    _higher_is_better(
        "p2p/local_{unidirectional|bidirectional}_{enabled|disabled|enabled_reads}_gb_per_s",
        "copy within one GPU",
        "GB/s",
        first=True,
    ),
    _lower_is_better(
        "p2p/local_latency_{gpu|cpu}_{enabled|disabled|enabled_reads}_us",
        "latency within one GPU",
        "µs",
    ),
    _lower_is_better(
        "p2p/{bandwidth|latency_gpu|latency_cpu}_spread_share",
        "spread of the repeats",
        "%",
        decimals=1,
    ),
    _higher_is_better("p2p/{matching|one_to_all|all_to_one}_gb_per_s", "copies at once", "GB/s"),
    _higher_is_better(
        "p2p/{matching|one_to_all|all_to_one}_share", "kept of the rate alone", "%", decimals=1
    ),
    _higher_is_better("host_link/all_both_gb_per_s", "both ways, all at once", "GB/s", first=True),
    _higher_is_better("host_link/one_both_gb_per_s", "both ways, one alone", "GB/s", first=True),
    _higher_is_better(
        "host_link/{one|all}_host_{copy|add}_gb_per_s", "host memory", "GB/s", first=True
    ),
    _higher_is_better("host_link/{one|all}_{to_device|to_host}_gb_per_s", "pinned memory", "GB/s"),
    _higher_is_better(
        "host_link/{one|all}_pageable_{to_device|to_host|both}_gb_per_s", "pageable memory", "GB/s"
    ),
)


METRICS: Mapping[str, Metric] = {entry.name: entry for entry in _TABLE}
# Tables of a record that came later than the oldest schema, likewise.
TABLES_SINCE = {"residuals": 5}
COLUMNS = tuple(entry for entry in _TABLE if entry.column)


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    """Return a pattern for each entry whose name has several forms."""
    several = [one for one in METRICS.values() if re.search(r"[{<]", one.name)]
    return [
        (
            re.compile(
                re.sub(r"<\w+>", "[a-z0-9_]+", one.name).replace("{", "(").replace("}", ")")
            ),
            one,
        )
        for one in several
    ]


def known(name: str) -> Metric | None:
    """Return the table's entry for a metric; None where it has none."""
    if name in METRICS:
        return METRICS[name]
    return next((one for pattern, one in _patterns() if pattern.fullmatch(name)), None)


@functools.cache
def metric(name: str) -> Metric:
    """Return the entry of a metric; one made from the name where the table has none."""
    if entry := known(name):
        return entry
    label = name.rpartition("/")[2]
    ending = next((ending for ending in UNITS if f"_{label}".endswith(ending)), "")
    words = label.removesuffix(ending).replace("_", " ")
    return Metric(
        name, words, UNITS.get(ending, ""), decimals=2 if UNITS.get(ending) == "%" else None
    )


@functools.cache
def place(name: str) -> int:
    """Return a metric's place in the order of the table; those that are not in it come last."""
    entry = known(name)
    return len(METRICS) if entry is None else list(METRICS).index(entry.name)


def since(part: str, name: str) -> int:
    """Return the schema version from which a part of a record (metrics, tables, …) may have an entry of this name."""
    if part in ("metrics", "within_run", "series"):
        return metric(name).since
    return TABLES_SINCE.get(name, OLDEST_SCHEMA) if part == "tables" else OLDEST_SCHEMA


def interval(
    name: str, within_run: Mapping[str, Mapping[str, float]]
) -> tuple[float, float] | None:
    """Return the ends of a metric's 95 % interval inside its run, of a record's `within_run`; None where it has not both."""
    low, high = (within_run.get(name, {}).get(end) for end in ("low", "high"))
    return None if low is None or high is None else (low, high)
