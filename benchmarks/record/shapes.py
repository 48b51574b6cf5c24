"""The shapes of a record's open fields: tables, effective, checks, environment, predicted, ranks.

`read` checks a record against them once, so no reader looks at the type of a value. Of a field that
stands here the value has this type, or the field is absent; None stands only where a type says so.
Benchmarks and strategies of the user's own may add fields, which stay as they are.
"""

from typing import Any, TypedDict

from benchmarks.record.table_shapes import Count, Number

# What was really used


class _SettingFinding(TypedDict):
    code: str
    sentence: str
    severity: str
    setting: str | None


class _Choice(TypedDict):
    function: str | None
    bytes: Count
    algorithm: str
    protocol: str


class _NcclUsed(TypedDict, total=False):
    version: str | None
    channels: dict[str, Count | None]
    settings: dict[str, str]
    transports: dict[str, list[str]]
    warnings: list[str]
    nodes: Count | None
    nics: dict[str, list[str]]


class Effective(TypedDict, total=False):
    """Field effective of a record."""

    link_class: str
    transport: str
    channels: Count
    nccl: _NcclUsed
    findings: list[_SettingFinding]
    choices: list[_Choice]
    trace: dict[str, Any]


# Facts that checks judge


class _Stationarity(TypedDict, total=False):  # empty where too few steps were timed
    drift: Number
    drift_beyond: Number
    change: Number
    change_beyond: Number
    change_at: Number


class _Pauses(TypedDict):
    count: Number
    lost_share: Number
    longest_ms: Number


class _SlowestRank(TypedDict):
    rank: Count
    share: Number
    noise: Number


class _GradientWorst(TypedDict):
    array: str
    error: Number
    tolerance: Number


class _Replay(TypedDict):
    what: str
    exchange: bool
    array: str
    error: Number
    tolerance: Number


class _Arithmetic(TypedDict, total=False):
    autocast: str | None
    tf32: bool
    layers: dict[str, Count]
    compiled_parts: Count


class _GpuPhase(TypedDict):  # lists have an entry for each GPU
    samples: Count
    throttle_reasons: list[str]
    power_capped_share: list[Number | None]
    sm_mhz: list[Number | None]
    free_sm_mhz: list[Number | None]
    most_free_sm_mhz: list[Number | None]
    power_w: list[Number | None]
    grown_bytes: Number | None
    foreign_bytes: Number | None


class _GpuSamples(TypedDict, total=False):
    before_memory_bytes: Number | None
    before_busy_percent: Number | None
    processes_known: bool
    foreign_pids: list[int]
    samples: Count
    phases: dict[str, _GpuPhase]
    throttle_reasons: list[str]
    reasons_known: bool
    hosts: list[dict[str, Any]]


class _CpuSamples(TypedDict, total=False):  # the share of the cores that others used, by phase
    cores: Count
    others_share: dict[str, Number]
    hosts: list[dict[str, Any]]


class Checks(TypedDict, total=False):
    """Field checks of a record."""

    clock_disagreement: Number
    half_width: Number
    iterations: Count
    warmup_flat: bool
    reference: str
    gradient_error: Number
    gradient_spread: Number
    gradient_tolerance: Number
    gradient_worst: _GradientWorst
    replicas_equal: bool
    losses: list[Number]
    solution_difference: Number
    solution_tolerance: Number
    exchange_error: Number
    exchange_tolerance: Number
    exchanged_bytes: Number
    trained_bytes: Number
    wrong_elements: Count
    wrong_bytes: list[Count]
    copies_compared: Count
    copies_wrong: dict[str, Count]
    stationarity: _Stationarity
    pauses: _Pauses
    slowest_rank: _SlowestRank
    unaccounted_share: Number
    between_steps_share: Number
    between_steps_ms: Number
    graphs: Count
    code_from: str
    timed_graphs: Count
    batches_differ: bool
    batches_in_turn: Count
    arithmetic: _Arithmetic
    weights_still: Count
    weights_still_share: Number
    weights_still_first: str
    own_work_alone: bool
    replay: _Replay
    replays: list[list[Count]]
    gpu_samples: _GpuSamples
    cpu_samples: _CpuSamples
    baselines: dict[str, list[str]]
    host_baselines: dict[str, list[str]]
    baseline_noise: Number
    cost_alone: list[str]
    peers: list[list[Any]]


# Who measured


class _Cpu(TypedDict, total=False):
    model: str | None
    cores: Count | None
    logical: Count | None
    memory_bytes: Count | None


class _Gpu(TypedDict, total=False):
    id: Count
    uuid: str | None
    name: str
    bus_id: str
    memory_bytes: Count
    max_sm_mhz: Count | None


class _Gpus(TypedDict, total=False):
    driver: str | None
    gpus: list[_Gpu]


class _Git(TypedDict, total=False):
    commit: str | None
    modified: bool | None


class _Interface(TypedDict, total=False):
    name: str
    mbit_per_s: Number | None


class _HostFacts(TypedDict, total=False):
    name: str
    host: str
    platform: str
    cpu: _Cpu
    gpu: _Gpus
    git: _Git
    code: str
    versions: dict[str, str | None]
    variables: dict[str, str]
    inherited: list[str]
    left_out: list[str]
    links: dict[str, str]
    topology: str | None
    interface: str | None
    interfaces: list[_Interface]


class Environment(_HostFacts, total=False):
    """Field environment of a record: facts of its first host, and of several hosts those of all."""

    planned_uuids: list[str | None]
    fabric: str | None
    hosts: list[_HostFacts]
    servers: list[dict[str, Any]]


class RankFacts(TypedDict):
    """What a rank said of itself."""

    rank: Count


class Predicted(TypedDict, total=False):
    """Field predicted of a record."""

    made_at: Number
    cells: Count
    level: Number | None
    step_ms: Number
    low: Number | None
    high: Number | None
    null_step_ms: Number
    images_per_second: Number
    efficiency: Number | None
    exposed_ms: Number | None
    basis: str
    widest: str
    why: list[str]
    records: list[str]
    refused: str
