"""The shapes of the tables that a record holds; shapes.py says how they are used."""

from typing import Annotated, Any, TypedDict

from msgspec import Meta

# A number of JSON that fits a double: an integer stays one.
Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Matrix = list[list[Number | None]]


class _CollectiveTime(TypedDict, total=False):
    time_us: Number
    algbw: Number
    busbw: Number
    wrong: Count | None
    slowest_us: Number


class _CollectiveRow(TypedDict, total=False):
    bytes: Count
    out_of_place: _CollectiveTime | None
    in_place: _CollectiveTime | None


class _CollectiveRun(TypedDict, total=False):
    collective: str
    ranks: Count
    rows: list[_CollectiveRow]
    avg_busbw: Number | None


class _CollectiveRuns(TypedDict, total=False):
    runs: list[_CollectiveRun]


class _HostLinkRow(TypedDict, total=False):
    operation: str
    memory: str
    at_once: Count
    gb_per_s: list[Number]
    sum_gb_per_s: Number | None


class _HostLink(TypedDict, total=False):
    rows: list[_HostLinkRow]


class _P2p(TypedDict, total=False):  # rows and columns are GPUs in rank order
    matrices: dict[str, Matrix]
    words: dict[str, str]
    copy: str


class _ConcurrentCopy(TypedDict, total=False):  # of several at the same time
    gb_per_s: Number
    alone_gb_per_s: Number


class _ConcurrentRow(TypedDict, total=False):
    pattern: str
    number: Count
    total_gb_per_s: Number
    copies: list[_ConcurrentCopy]


class _P2pConcurrent(TypedDict, total=False):
    rows: list[_ConcurrentRow]


class _BucketRow(TypedDict, total=False):
    bytes: Count | None
    gradient_bytes: Count
    dtype: str


class _BucketExchangeRow(TypedDict, total=False):
    bytes: Count
    calls: Count
    ms: Number | None
    spread_ms: Number | None


class _ResidualRow(TypedDict, total=False):
    rank: Count
    n: Count
    mean_ms: Number
    sd_ms: Number
    quantiles_ms: list[Number]
    acf: list[Number]


class _TimelineRow(TypedDict, total=False):  # None where a moment was not seen
    rank: Count
    exchange: bool
    steps: Count
    forward_ms: Number | None
    forward_spread_ms: Number | None
    backward_ms: Number | None
    backward_spread_ms: Number | None
    exchange_ms: Number | None
    exchange_spread_ms: Number | None
    update_ms: Number | None
    update_spread_ms: Number | None
    ready_ms: list[Number | None]
    ready_spread_ms: list[Number | None]
    unknown: dict[str, str]


class _Buckets(TypedDict, total=False):
    rows: list[_BucketRow]
    unknown: str


class _BucketExchange(TypedDict, total=False):
    operation: str
    rows: list[_BucketExchangeRow]
    unknown: str


class _Residuals(TypedDict, total=False):
    purpose: str
    probabilities: list[Number]
    rows: list[_ResidualRow]


class _Timeline(TypedDict, total=False):
    rows: list[_TimelineRow]


class _PartSeconds(TypedDict):
    part: str
    seconds: Number


class _Seconds(TypedDict):
    rows: list[_PartSeconds]


Tables = TypedDict(
    "Tables",
    {
        "nccl-tests": _CollectiveRuns,
        "host_link": _HostLink,
        "p2p": _P2p,
        "p2p_concurrent": _P2pConcurrent,
        "buckets": _Buckets,
        "bucket_exchange": _BucketExchange,
        "residuals": _Residuals,
        "timeline": _Timeline,
        "seconds": _Seconds,
        "compiling": _Seconds,
        "ranks/own_ms": list[Number],
        "trace": dict[str, Any],
    },
    total=False,
)
