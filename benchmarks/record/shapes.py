"""The shapes of what a record holds, and of lines of samples: what is there, of which type.

`read` checks a record against RECORD_FIELDS once, so no reader looks at the type of a value. Of a
field that stands here the value has this type, or the field is absent; None stands only where a
type says so. Benchmarks and strategies of the user's own may add fields, which stay as they are.
"""

import sys
from typing import Annotated, Any, TypedDict

from msgspec import Meta

# A number of JSON that fits a double: an integer stays one.
Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float
LARGEST = sys.float_info.max
Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]  # also no NaN
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Matrix = list[list[Number | None]]


def optional(**shapes: Any) -> Any:
    """Return the shape of an object of which every field may be absent."""
    return TypedDict("Optional", shapes, total=False)  # type: ignore[operator]


def required(**shapes: Any) -> Any:
    """Return the shape of an object whose fields are all there."""
    return TypedDict("Required", shapes)  # type: ignore[operator]


def rows(**shapes: Any) -> Any:
    """Return the shape of a list of objects of which every field may be absent."""
    return list[optional(**shapes)]  # type: ignore[misc]


def whole_rows(**shapes: Any) -> Any:
    """Return the shape of a list of objects whose fields are all there."""
    return list[required(**shapes)]  # type: ignore[misc]


EFFECTIVE = optional(
    link_class=str,
    transport=str,
    channels=Count,
    nccl=optional(
        version=str | None,
        channels=dict[str, Count | None],
        settings=dict[str, str],
        transports=dict[str, list[str]],
        warnings=list[str],
        paths=list[str],
        nodes=Count | None,
        nics=dict[str, list[str]],
    ),
    findings=whole_rows(code=str, sentence=str, severity=str, setting=str | None),
    choices=whole_rows(function=str | None, bytes=Count, algorithm=str, protocol=str),
    trace=dict[str, Any],
)


STATIONARITY = optional(  # empty where too few steps were timed
    drift=Number, drift_beyond=Number, change=Number, change_beyond=Number, change_at=Number
)
GPU_PHASE: Any = required(  # lists have an entry for each GPU
    samples=Count,
    throttle_reasons=list[str],
    power_capped_share=list[Number | None],
    sm_mhz=list[Number | None],
    free_sm_mhz=list[Number | None],
    most_free_sm_mhz=list[Number | None],
    power_w=list[Number | None],
    grown_bytes=Number | None,
    foreign_bytes=Number | None,
)

STEP_FACTS: dict[str, Any] = dict(  # found before the timed windows, and after them
    gradients_equal=bool,
    gradient_error=Number,
    gradient_spread=Number,
    gradient_tolerance=Number,
    gradient_worst=required(array=str, error=Number, tolerance=Number),
    batches_differ=bool,
    batches_in_turn=Count,
    arithmetic=optional(
        autocast=str | None,
        tf32=bool,
        layers=dict[str, Count],
        compiled_parts=Count,
        elements=Count,
        images=Count,
        evaluating=Count,
        passes=Count,
        calls=Count,
    ),
    sent=optional(collectives=Count, bytes=Count, order=str, early=Count),
)
CHECKS = optional(
    **STEP_FACTS,
    after=optional(**STEP_FACTS, updates=Count, steps=Count),
    counted=dict[str, dict[str, Count]],
    communicators=required(count=Count, timed=list[str]),
    equal_longest=Count,
    clock_disagreement=Number,
    half_width=Number,
    iterations=Count,
    warmup_flat=bool,
    reference=str,
    replicas_equal=bool,
    average_worst=optional(array=str, error=Number, tolerance=Number),  # empty: none was equal
    losses=list[Number],
    solution_difference=Number,
    solution_tolerance=Number,
    exchange_error=Number,
    exchange_tolerance=Number,
    exchanged_bytes=Number,
    trained_bytes=Number,
    wrong_elements=Count,
    wrong_bytes=list[Count],
    copies_compared=Count,
    copies_wrong=dict[str, Count],
    stationarity=STATIONARITY,
    stationarity_in_windows=STATIONARITY,
    windows_repeated=Count,
    iterations_missing=Count,
    slower_than_warmup=Number,
    unseen_share=Number,
    grid_ms=Number,
    versions_differ=dict[str, list[str]],
    pauses=required(count=Number, lost_share=Number, longest_ms=Number),
    slowest_rank=required(rank=Count, share=Number, noise=Number),
    unaccounted_share=Number,
    between_steps_share=Number,
    between_steps_ms=Number,
    graphs=Count,
    code_from=str,
    timed_graphs=Count,
    weights_still=Count,
    weights_still_share=Number,
    weights_still_first=str,
    own_work_alone=bool,
    replay=required(what=str, exchange=bool, array=str, error=Number, tolerance=Number),
    replays=list[list[Count]],  # of each rank: how many it asked for, how many its GPU counted
    gpu_samples=optional(
        before_memory_bytes=Number | None,
        before_busy_percent=Number | None,
        processes_known=bool,
        foreign_pids=list[int],
        samples=Count,
        phases=dict[str, GPU_PHASE],
        throttle_reasons=list[str],
        reasons_known=bool,
        counted_power_w=Number,
        hosts=list[dict[str, Any]],
    ),
    gpu_windows=list[dict[str, Number | None]],  # of each host
    cpu_samples=optional(  # the share of the cores that others used, by phase
        cores=Count, others_share=dict[str, Number], hosts=list[dict[str, Any]]
    ),
    baselines=dict[str, list[str]],
    host_baselines=dict[str, list[str]],
    baseline_noise=Number,
    cost_alone=list[str],
    peers=list[list[Any]],  # rank, host, process ID and GPU UUID (None: a CPU) of each that met
)

# Who measured: facts of a host. A record has those of its first, and of several hosts of all.
HOST: dict[str, Any] = dict(
    name=str,
    host=str,
    platform=str,
    cpu=optional(
        model=str | None, cores=Count | None, logical=Count | None, memory_bytes=Count | None
    ),
    gpu=optional(
        driver=str | None,
        gpus=rows(
            id=Count,
            uuid=str | None,
            name=str,
            bus_id=str,
            memory_bytes=Count,
            max_sm_mhz=Count | None,
        ),
    ),
    git=optional(commit=str | None, modified=bool | None),
    code=str,
    versions=dict[str, str | None],
    variables=dict[str, str],
    inherited=list[str],
    left_out=list[str],
    links=dict[str, str],
    topology=str | None,
    interface=str | None,
    interfaces=rows(name=str, mbit_per_s=Finite | None),
    infiniband=rows(device=str, rate=str),
)

ENVIRONMENT = optional(
    **HOST, planned_uuids=list[str | None], hosts=rows(**HOST), servers=list[dict[str, Any]]
)

PREDICTED = optional(
    made_at=Number,
    cells=Count,
    level=Number | None,
    step_ms=Number,
    low=Number | None,
    high=Number | None,
    null_step_ms=Number,
    images_per_second=Number,
    efficiency=Number | None,
    exposed_ms=Number | None,
    basis=str,
    widest=str,
    why=list[str],
    records=list[str],
    refused=str,
)


SECONDS = required(rows=whole_rows(part=str, seconds=Number))

COLLECTIVE_TIME = optional(
    time_us=Number, algbw=Number, busbw=Number, wrong=Count | None, slowest_us=Number
)

TABLES = optional(
    **{
        "nccl-tests": optional(
            runs=rows(
                collective=str,
                ranks=Count,
                rows=rows(
                    bytes=Count,
                    out_of_place=COLLECTIVE_TIME | None,
                    in_place=COLLECTIVE_TIME | None,
                ),
                avg_busbw=Number | None,
            )
        ),
        "host_link": optional(
            rows=rows(
                operation=str,
                memory=str,
                at_once=Count,
                gb_per_s=list[Number],
                sum_gb_per_s=Number | None,
            )
        ),
        "p2p": optional(  # rows and columns are GPUs in rank order
            matrices=dict[str, Matrix], words=dict[str, str], copy=str
        ),
        "p2p_concurrent": optional(
            rows=rows(
                pattern=str,
                number=Count,
                total_gb_per_s=Number,
                copies=rows(  # of several at the same time
                    gb_per_s=Number, alone_gb_per_s=Number
                ),
            )
        ),
        "buckets": optional(
            rows=rows(bytes=Count | None, gradient_bytes=Count, dtype=str), unknown=str
        ),
        "bucket_exchange": optional(
            operation=str,
            rows=rows(bytes=Count, calls=Count, ms=Number | None, spread_ms=Number | None),
            unknown=str,
        ),
        "residuals": optional(
            purpose=str,
            probabilities=list[Number],
            rows=rows(
                rank=Count,
                n=Count,
                mean_ms=Number,
                sd_ms=Number,
                quantiles_ms=list[Number],
                acf=list[Number],
            ),
        ),
        "timeline": optional(
            rows=rows(  # None where a moment was not seen
                rank=Count,
                exchange=bool,
                steps=Count,
                forward_ms=Number | None,
                forward_spread_ms=Number | None,
                backward_ms=Number | None,
                backward_spread_ms=Number | None,
                exchange_ms=Number | None,
                exchange_spread_ms=Number | None,
                update_ms=Number | None,
                update_spread_ms=Number | None,
                ready_ms=list[Number | None],
                ready_spread_ms=list[Number | None],
                unknown=dict[str, str],
            )
        ),
        "seconds": SECONDS,
        "compiling": SECONDS,
        "fast_paths": required(rows=whole_rows(rank=Count)),
        "exchanges": required(rows=whole_rows(kind=str, bytes=Count)),
        "ranks/own_ms": list[Number],
        "trace": dict[str, Any],
    }
)

RECORD_FIELDS = optional(
    tables=TABLES,
    effective=EFFECTIVE,
    checks=CHECKS,
    environment=ENVIRONMENT,
    predicted=PREDICTED,
    ranks=whole_rows(rank=Count),
)
# What a benchmark derives from the lines of its ranks.
DERIVED_FIELDS = optional(
    metrics=dict[str, float],
    within_run=dict[str, dict[str, float]],
    series=dict[str, list[list[Number]]],
    tables=TABLES,
    checks=CHECKS,
    model=dict[str, Number],
    output=str,
)
