"""Every metric that a record may hold, once: name, title, unit, digits, what is better, column.

The terminal, MLflow and the report print a metric by its entry here; `launch.py -h NAME` explains
one. A benchmark or strategy of the user's own may log other names: `entry_of` gives them an entry
made from the name.

Name is a pattern where a metric comes in several forms: `{one|all}` is one of these words, `<way>`
any word.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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
# Digits behind the point; other units have three significant digits.
DECIMALS = dict.fromkeys(("images", "tokens", "runs", "iterations", "bytes", "updates"), 0)
DECIMALS |= {"MHz": 0, "W": 0, "°C": 0, "%": 1}


@dataclass(frozen=True)
class Metric:
    """One metric. The value of a metric in % is a share of one: 0.981 is printed as 98.1 %."""

    name: str
    title: str  # a few words; the part of the name before the slash says what they are about
    unit: str = ""
    less_is_better: bool | None = None  # None: neither way is better
    decimals: int | None = None  # None: three significant digits, and all of whole thousands
    formula: str = ""  # where the title does not say it
    column: str = ""  # heading of its column where cells are listed; empty: it has none
    signed: bool = False  # a difference: it may be 0 or less, and its scatter is not a share of it
    # Shown where a benchmark's YAML names no metric as `compared`; of several the first is.
    first: bool = False
    since: int = OLDEST_SCHEMA  # the schema version from which records have it, for `verify`

    def of(self, counted: str) -> "Metric":
        """Return the entry in the words of what cells count: a model of tokens has samples."""
        return replace(
            self,
            title=self.title.replace("images", counted),
            unit=self.unit.replace("images", counted),
            column=self.column.replace("images", counted),
        )


def _plain(name: str, title: str, unit: str | None = None, **more: Any) -> Metric:
    """Return an entry; without a unit it is that of the name's ending, and so are the digits."""
    if unit is None:
        unit = _unit_of(name)[1]
    return Metric(name, title, unit, **{"decimals": DECIMALS.get(unit), **more})


def _less(name: str, title: str, unit: str | None = None, **more: Any) -> Metric:
    return _plain(name, title, unit, less_is_better=True, **more)


def _more(name: str, title: str, unit: str | None = None, **more: Any) -> Metric:
    return _plain(name, title, unit, less_is_better=False, **more)


def _unit_of(name: str) -> tuple[str, str]:
    """Return the ending of a name that says a unit, and the unit; empty where none does."""
    label = name.rpartition("/")[2]
    for ending, unit in UNITS.items():
        if f"_{label}".endswith(ending):
            return ending, unit
    return "", ""


_ACCESS = "enabled, disabled: peer access on, off; enabled_reads: on, and the target GPU reads"
_CLOCKS = "gpu, cpu: timed by the clock of the GPU or of the CPU"
_DIAGONAL = "the diagonal of p2pBandwidthLatencyTest's matrix"
# In the order in which they are shown.
_TABLE = (
    _more(
        "throughput/images_per_second",
        "images per second",
        "images/s",
        column="images/s",
        formula="images of all ranks ÷ time of the slowest rank",
    ),
    _plain(
        "throughput/ci_low",
        "images per second: low end of the 95 % interval for the next run",
        "images/s",
    ),
    _plain(
        "throughput/ci_high",
        "images per second: high end of the 95 % interval for the next run",
        "images/s",
    ),
    _plain("throughput/ci_runs", "repeated runs behind the 95 % interval of the rate", "runs"),
    _more(
        "throughput/images_per_second_per_gpu",
        "images per second per GPU",
        "images/s",
        column="per GPU",
        formula="images per second ÷ GPUs",
    ),
    _plain("throughput/images", "images in all timed steps", "images", formula="of all ranks"),
    _more(
        "throughput/tokens_per_second",
        "tokens per second",
        "tokens/s",
        column="tokens/s",
        formula="tokens of all ranks ÷ time of the slowest rank",
    ),
    _plain("throughput/tokens", "tokens in all timed steps", "tokens", formula="of all ranks"),
    _plain("throughput/seconds", "time that all timed steps took, on the slowest rank"),
    _more(
        "script/printed_per_second",
        "median of the rates that the script prints",
        formula="images, samples or steps, as the script counts them",
    ),
    # Said before the cell was measured (predict=auto): no run of it scatters, and neither way is
    # better.
    _plain("predicted/step_ms", "forecast step time", since=6),
    _plain(
        "predicted/step_ms_low", "forecast step time: low end of the 90 % interval", "ms", since=6
    ),
    _plain(
        "predicted/step_ms_high", "forecast step time: high end of the 90 % interval", "ms", since=6
    ),
    _plain(
        "predicted/images_per_second",
        "forecast images per second",
        "images/s",
        column="predicted",
        since=6,
    ),
    _plain("predicted/efficiency", "forecast efficiency", since=6),
    _plain("predicted/exposed_ms", "forecast of exposed communication", signed=True, since=6),
    _plain(
        "predicted/null_step_ms",
        "step time copied from the most similar run",
        since=6,
        formula="the simplest forecast: as in the run with the nearest number of GPUs",
    ),
    _plain(
        "prediction/error",
        "error of the forecast step time",
        "%",
        signed=True,
        since=6,
        formula="measured step time ÷ forecast − 1",
    ),
    _more(
        "scaling/efficiency",
        "efficiency",
        column="efficiency",
        formula="images per second ÷ (GPUs × images per second of the slowest of them alone)",
    ),
    _more(
        "scaling/node_efficiency",
        "efficiency over hosts",
        formula="images per second ÷ (hosts × images per second of the slowest host alone)",
    ),
    _more(
        "scaling/efficiency_at_equal_clocks",
        "efficiency at equal SM clocks",
        "%",
        formula="efficiency × (SM clock of the slowest GPU when alone ÷ SM clock of this run)",
    ),
    _less(
        "data/cost_share",
        "share of the step time that the loader costs",
        column="data",
        signed=True,
        formula="data/cost_ms ÷ step time",
    ),
    _less(
        "data/cost_ms",
        "time that the loader adds to a step",
        signed=True,
        formula="step time with the loader − step time with batches that are already on the device",
    ),
    _less("data/wait_ms", "time per step that the host waits for the loader"),
    _less("comm/exchange_ms", "time of one exchange, without compute", column="exchange ms"),
    _more(
        "comm/ideal_ratio",
        "speed of the exchange as a share of its reference",
        column="of reference speed",
        formula="comm/ideal_ms ÷ comm/exchange_ms; the reference moves the same bytes at "
        "the rate of large plain collectives or copies",
    ),
    _more(
        "comm/algbw_gb_per_s",
        "algbw of the exchange, all buckets together",
        formula="bytes of the gradient ÷ time of the exchange",
    ),
    _more(
        "comm/busbw_gb_per_s",
        "busbw of the exchange, all buckets together",
        column="exchange GB/s",
        formula="bytes that each rank sends (comm/bytes_moved) ÷ time of the exchange",
    ),
    _less(
        "strategy/cost_ms",
        "time that the strategy adds to a step",
        column="cost ms",
        signed=True,
        formula="step time with the strategy − step time without exchange, in the same processes",
    ),
    _less(
        "comm/exposed_ms",
        "exposed communication",
        column="exposed ms",
        signed=True,
        formula="communication that compute does not hide: strategy/cost_ms of these GPUs − "
        "that of one GPU, where nothing is sent",
    ),
    _more(
        "comm/hidden_share",
        "share of the exchange that compute hides",
        decimals=0,
        column="hidden",
        formula="1 − exposed communication ÷ exchange alone",
    ),
    _plain(
        "comm/ideal_ms",
        "reference: time of the exchange at full bandwidth",
        formula="its bytes at the rate of large plain collectives or copies; if the exchange has "
        "several parts, the longest reference/<way>_ms",
    ),
    _less("comm/pipelined_ms", "time per exchange when each begins before the previous one ends"),
    _more(
        "comm/pipelined_ratio",
        "speed of overlapping exchanges ÷ ideal speed",
        decimals=0,
        formula="comm/ideal_ms ÷ comm/pipelined_ms",
    ),
    _plain("comm/bytes_moved", "bytes that each rank sends in an exchange", "bytes"),
    _less(
        "comm/bytes_per_image",
        "bytes that each rank sends per image",
        "bytes",
        since=8,
        formula="bytes that a rank sends in an exchange ÷ images that it processes per exchange",
    ),
    _less(
        "comm/error",
        "relative error of the first exchange",
        formula="Σ |returned − mean| ÷ Σ |mean| of known gradients",
    ),
    _less("step/ms_median", "median step time", "ms"),
    _less("step/ms_p95", "95th percentile of step times", "ms"),
    _less("step/launch_ms", "host time to enqueue a step"),
    _less("step/first_ms", "time of the first step", formula="before the warm-up"),
    _plain("step/iterations", "timed iterations", "iterations"),
    _plain("warmup/iterations", "warm-up iterations", "iterations"),
    _less(
        "ranks/spread",
        "how much longer the slowest rank takes than the fastest",
        "%",
        formula="time of the slowest rank ÷ time of the fastest − 1",
    ),
    _less(
        "gpu/busy_ms",
        "time per step in which the device is busy",
        formula="measured as the time of a step that is fully queued before the device starts",
    ),
    _less(
        "gpu/idle_share",
        "share of a step in which the GPU idles",
        formula="1 − gpu/busy_ms ÷ step time",
    ),
    _plain("gpu/sm_mhz", "SM clock", "MHz", formula="mean of the GPUs in the timed windows"),
    _plain("gpu/power_w", "power", "W", formula="mean per GPU in the timed windows"),
    _plain(
        "gpu/temperature_c", "temperature", "°C", formula="mean of the GPUs in the timed windows"
    ),
    _less(
        "memory/peak_gib",
        "peak memory that torch allocated in the warm-up",
        "GiB",
        since=8,
        formula="on the rank that needs most",
    ),
    _less(
        "memory/reserved_gib",
        "peak memory that torch reserved in the warm-up",
        "GiB",
        since=8,
        formula="on the rank that needs most",
    ),
    _more(
        "compute/tflops",
        "10¹² operations per second per GPU",
        "TFLOP/s",
        since=8,
        formula="3 × operations of one image's forward pass (in the model's YAML) × images per "
        "second ÷ GPUs",
    ),
    _more(
        "compute/mfu",
        "operations per second as a share of the GPU's dense peak (MFU)",
        "%",
        since=8,
    ),
    _more(
        "energy/images_per_joule",
        "images per joule of the GPUs",
        "images/J",
        since=8,
        formula="images per second ÷ mean power by the GPUs' energy counters, over 3 s or more",
    ),
    _plain(
        "gpu/power_capped_share",
        "share of the time in which the power cap slowed a GPU",
        formula="mean of the GPUs in the timed windows",
    ),
    _plain(
        "reference/<way>_ms",
        "time that plain collectives or copies need for an exchange's bytes",
        formula="<way> says how, such as ring; of several ways the longest is the reference",
    ),
    _less(
        "stage/<name>_ms",
        "time of one stage of the exchange",
        formula="such as the copy to the host",
    ),
    _less(
        "staleness/mean",
        "mean number of updates between a pull and its push",
        "updates",
        decimals=2,
        formula="updates by all workers count",
    ),
    _less("staleness/max", "highest number of updates between a pull and its push", "updates"),
    _plain("staleness/updates", "updates whose staleness was counted", "updates"),
    _less("trace/comm_ms_per_step", "communication per step, hidden or not"),
    _less(
        "trace/exposed_ms_per_step",
        "exposed communication by the trace",
        column="exposed by trace",
        signed=True,
        formula="communication during which no kernel computes",
    ),
    _less(
        "trace/exposed_in_gaps_ms_per_step",
        "exposed communication in gaps between kernels",
        formula="the part in pauses of at most 10 µs between compute kernels",
    ),
    _more("trace/overlapped_ms_per_step", "overlapped communication"),
    _less(
        "trace/wait_ms_per_step",
        "waiting for the last rank",
        signed=True,
        formula="mean time per step that a rank waits in collectives until the last one joins",
    ),
    _less("trace/{nccl|gloo}_avg_us", "mean time of a collective"),
    _less("trace/gpu_idle_share", "share of the traced time in which the GPU idles"),
    _less("trace/gap_us", "median pause between kernels"),
    _plain(
        "trace/exposed_disagreement_ms",
        "exposed communication: trace − measured",
        column="difference",
        signed=True,
        formula="trace/exposed_ms_per_step − comm/exposed_ms",
    ),
    # What a cell costs says nothing of what it measured, and has no noise floor.
    _plain("cell/seconds", "wall time of the run", decimals=1),
    _plain(
        "cell/measuring_seconds",
        "time spent measuring",
        decimals=1,
        formula="all timed windows together, also those of steps without the exchange",
    ),
    _plain(
        "cell/overhead_ratio",
        "wall time per second of measurement",
        "",
        decimals=2,
        formula="cell/seconds ÷ cell/measuring_seconds",
    ),
    _more(
        "collectives/busbw_gb_per_s",
        "busbw",
        formula="of the largest message: algbw × nccl-tests' factor for the collective",
    ),
    _more(
        "collectives/algbw_gb_per_s",
        "algbw",
        formula="of the largest message: bytes ÷ time of a call",
    ),
    _more("collectives/avg_busbw_gb_per_s", "mean busbw of all sizes"),
    _more("collectives/{out_of_place|in_place}_busbw_gb_per_s", "busbw of each size"),
    _less("collectives/latency_us", "time of the smallest message"),
    _less("collectives/alpha_us", "α of time = α + bytes ÷ β, fitted to the small messages"),
    _more("collectives/beta_gb_per_s", "β of time = α + bytes ÷ β, fitted to the large messages"),
    _less(
        "collectives/fit_rms_error",
        "error of the α–β line",
        "%",
        formula="RMS relative error of the line α + bytes ÷ β, over all times",
    ),
    _less("jacobi/seconds", "time of a solve by all GPUs together", formula="median of the solves"),
    _more(
        "jacobi/efficiency",
        "efficiency",
        formula="time of a solve on one GPU ÷ (GPUs × time of a solve)",
    ),
    _more(
        "jacobi/speedup",
        "speed-up",
        decimals=2,
        formula="time of a solve on one GPU ÷ time of a solve",
    ),
    _less("jacobi/one_gpu_seconds", "time of a solve on one GPU", formula="median of the solves"),
    _less("jacobi/solve_seconds", "time of each solve"),
    _less("jacobi/one_gpu_solve_seconds", "time of each solve on one GPU"),
    _plain("jacobi/iterations", "iterations", "iterations", formula="of one solve"),
    _plain("jacobi/norm", "L2 norm of the change of the grid in the last iteration"),
    _more("jacobi/stencil_gb_per_s", "memory bandwidth of the stencil"),
    _more("jacobi/copy_gb_per_s", "memory bandwidth of a copy of the grid"),
    _more("jacobi/copy_share", "memory bandwidth of the stencil ÷ that of a copy"),
    _more(
        "p2p/unidirectional_enabled_gb_per_s",
        "rate of a copy from one GPU to another, with peer access",
        formula="median of the pairs",
        first=True,
    ),
    _more(
        "p2p/unidirectional_disabled_gb_per_s",
        "rate of a copy from one GPU to another, without peer access",
        formula="median of the pairs",
        first=True,
    ),
    _more(
        "p2p/bidirectional_enabled_gb_per_s",
        "rate of copies in both directions at once, with peer access",
        formula="sum of both directions; median of the pairs",
    ),
    _more(
        "p2p/bidirectional_disabled_gb_per_s",
        "rate of copies in both directions at once, without peer access",
        formula="sum of both directions; median of the pairs",
    ),
    _more(
        "p2p/{unidirectional|bidirectional}_enabled_reads_gb_per_s",
        "rate of copies that the target GPU fetches, with peer access",
        formula="one direction, or the sum of both at once; median of the pairs",
    ),
    _more(
        "p2p/{unidirectional|bidirectional}_{enabled|disabled|enabled_reads}_least_gb_per_s",
        "rate of a copy, slowest pair",
        formula=_ACCESS,
    ),
    _less(
        "p2p/latency_{gpu|cpu}_{enabled|disabled|enabled_reads}_us",
        "latency of a copy to another GPU",
        formula=f"a copy of `latency_bytes`; median of the pairs; {_CLOCKS}; {_ACCESS}",
    ),
    _less(
        "p2p/latency_{gpu|cpu}_{enabled|disabled|enabled_reads}_most_us",
        "latency of a copy, slowest pair",
        formula=f"{_CLOCKS}; {_ACCESS}",
    ),
    _more(
        "p2p/local_{unidirectional|bidirectional}_{enabled|disabled|enabled_reads}_gb_per_s",
        "rate of a copy inside GPU 0, as a baseline",
        formula=f"{_DIAGONAL}; bidirectional: two copies at once; {_ACCESS}",
        first=True,
    ),
    _less(
        "p2p/local_latency_{gpu|cpu}_{enabled|disabled|enabled_reads}_us",
        "latency of a copy inside GPU 0, as a baseline",
        formula=f"{_DIAGONAL}; {_CLOCKS}; {_ACCESS}",
    ),
    _less(
        "p2p/{bandwidth|latency_gpu|latency_cpu}_spread_share",
        "spread of repeated measurements, worst pair",
        formula="(largest − smallest) ÷ median",
    ),
    _more(
        "p2p/{matching|one_to_all|all_to_one}_gb_per_s",
        "rate of several copies at the same time, in total",
        formula="each GPU in one pair only (matching), one GPU to all, or all to one",
    ),
    _more(
        "p2p/{matching|one_to_all|all_to_one}_share",
        "slowest of several copies at a time ÷ its rate alone",
    ),
    _more(
        "host_link/all_both_gb_per_s",
        "copies both ways, all GPUs at once",
        formula="between host and GPUs, pinned memory: the sum of both directions and all GPUs",
        first=True,
    ),
    _more(
        "host_link/one_both_gb_per_s",
        "copies both ways, one GPU at a time",
        formula="between host and GPU, pinned memory: the sum of both directions, slowest GPU",
        first=True,
    ),
    _more(
        "host_link/{one|all}_host_{copy|add}_gb_per_s",
        "copy or addition of arrays in host memory",
        formula="one: the slowest of the ranks when each runs alone; all: all ranks at once, "
        "in total",
        first=True,
    ),
    _more(
        "host_link/{one|all}_{to_device|to_host}_gb_per_s",
        "rate of copies between host and GPU, pinned memory",
        formula="one: the slowest of the GPUs when each runs alone; all: all GPUs at once, "
        "in total",
    ),
    _more(
        "host_link/{one|all}_pageable_{to_device|to_host|both}_gb_per_s",
        "rate of copies between host and GPU, pageable memory",
        formula="one: the slowest of the GPUs when each runs alone; all: all GPUs at once, "
        "in total",
    ),
)


METRICS: Mapping[str, Metric] = {entry.name: entry for entry in _TABLE}
COLUMNS = tuple(entry for entry in _TABLE if entry.column)


@functools.cache
def _patterns() -> dict[re.Pattern[str], Metric]:
    """Return a pattern for each entry whose name has several forms."""
    patterns = {}
    for name, entry in METRICS.items():
        if re.search(r"[{<]", name):
            text = re.sub(r"<\w+>", "[a-z0-9_]+", name).replace("{", "(").replace("}", ")")
            patterns[re.compile(text)] = entry
    return patterns


def known(name: str) -> Metric | None:
    """Return the table's entry for a metric; None where it has none."""
    if name in METRICS:
        return METRICS[name]
    for pattern, entry in _patterns().items():
        if pattern.fullmatch(name):
            return entry
    return None


@functools.cache
def entry_of(name: str) -> Metric:
    """Return the entry of a metric; one made from the name where the table has none."""
    entry = known(name)
    if entry is not None:
        return entry
    ending, unit = _unit_of(name)
    words = name.rpartition("/")[2].removesuffix(ending).replace("_", " ")
    return Metric(name, words, unit, decimals=2 if unit == "%" else None)


@functools.cache
def position_of(name: str) -> int:
    """Return a metric's position in the order of the table; those that are not in it come last."""
    entry = known(name)
    if entry is None:
        return len(METRICS)
    return list(METRICS).index(entry.name)
