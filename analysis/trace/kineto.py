"""Read a rank from the Chrome trace JSON that torch.profiler (Kineto) exports, one file per rank.

Times are microseconds with a fraction, counted from `baseTimeNanoseconds` if the file has it, else
from the epoch. On one host they share a clock. GPU events carry device, stream and correlation in
`args`; NCCL's kernels also their process group. Without GPU events the rank runs on the host:
gloo's calls (`gloo:all_reduce`, made on gloo's own threads) communicate, operators compute.
Sources: Kineto's output_json.cpp, traces of torch 2.0 to 2.15.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.input_files import UnreadableInput, gc_paused
from analysis.trace.events import (
    Events,
    Names,
    RankTrace,
    Times,
    Trace,
    covers,
    make_events,
    number_of,
    spans,
    split_nccl,
    union,
)

_CATEGORIES = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "gpu_memset": "memset",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "cpu_op": "operator",
    "user_annotation": "range",
}
# Operators that only start, await or wrap others: c10d's calls return at once, engine and region
# frames include waits.
_NOT_WORK = (
    *("c10d::", "_c10d_functional", "autograd::", "torch::autograd::", "torch.distributed"),
    *("Torch-Compiled", "CompiledF", "## ", "DistributedDataParallel"),
)
_GLOO = "gloo:"
_COPY = re.compile(r"memcpy (\w+)", re.IGNORECASE)  # "HtoD" of `Memcpy HtoD (Pinned -> Device)`
_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d{1,6})", re.IGNORECASE)
_LATEST = 2**61 / 1000  # µs; base, start and length together fit into 64 bits of ns

JsonEvent = dict[str, Any]


def read_kineto(file: str, text: str, names: Names) -> Trace:
    """Return the rank of one file.

    Raises:
        UnreadableInput: the text is cut, is not a trace, or has neither GPU kernels nor operators.
    """
    with gc_paused():
        content = _parse(text)
        events, lost = _events_by_kind(content["traceEvents"])
        base_ns = content.get("baseTimeNanoseconds", 0)
        if not isinstance(base_ns, int) or not 0 <= base_ns < 2**61:
            base_ns = 0
        notes = []
        if lost:
            notes.append(f"{file}: {lost} events without a usable time left out")
        calls, labels = [], []
        for event in events["range"]:
            call = event["name"]
            if call.startswith(_GLOO):  # gloo:all_reduce is AllReduce
                calls.append(event)
                label = call.removeprefix(_GLOO).replace("_", " ").title()
                labels.append(label.replace(" ", ""))
        gloo = _host_events(calls, base_ns, names)
        gloo["name"] = [number_of(label, names) for label in labels]
        ranges = _host_events(events["range"], base_ns, names)
        rank, world_size = _rank_and_world_size(file, content)
        if rank is None:
            notes.append(f"{file} does not say its rank")
        if events["kernel"]:
            rank_trace = _gpu_rank(file, rank or 0, events, base_ns, names, ranges, gloo, notes)
        elif events["operator"] or calls:
            compute = _work_on_host(events["operator"], base_ns, names, gloo)
            none = make_events(0)
            rank_trace = RankTrace(
                rank or 0, None, compute, gloo, none, none, ranges, on_host=True, backend="gloo"
            )
        else:
            raise UnreadableInput(
                "a Chrome trace without GPU kernels and operators: empty, or not from "
                "torch.profiler"
            )
    clock = None
    if isinstance(content.get("host_name"), str):
        clock = f"host {content['host_name']}"
    return Trace(
        "torch.profiler",
        list(names),
        (rank_trace,),
        clock,
        numbered=rank is not None,
        world_size=world_size,
        notes=tuple(notes),
    )


def _parse(text: str) -> JsonEvent:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(
            f"cut or damaged JSON ({error}): did the profiler end before it had written?"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise UnreadableInput("JSON without a list `traceEvents`: not a trace of torch.profiler")
    return content


def _rank_and_world_size(file: str, content: JsonEvent) -> tuple[int | None, int | None]:
    """Return what the trace says of its rank; the rank else from the file's name."""
    info = content.get("distributedInfo")
    if not isinstance(info, dict):
        info = {}
    rank, world_size = info.get("rank"), info.get("world_size")
    name = _RANK_IN_NAME.search(file)
    if "rank" not in info and name:
        rank = int(name[1])
    if not isinstance(rank, int):
        rank = None
    if not isinstance(world_size, int):
        world_size = None
    return rank, world_size


def _events_by_kind(events: Sequence[Any]) -> tuple[dict[str, list[JsonEvent]], int]:
    """Return the complete events by kind, and the number of those without a usable time."""
    kinds: dict[str, list[JsonEvent]] = {kind: [] for kind in _CATEGORIES.values()}
    lost = 0
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        kind = _CATEGORIES.get(str(event.get("cat")))
        if kind is None:
            continue
        usable = isinstance(event.get("name"), str)
        for time_us in (event.get("ts"), event.get("dur")):
            # NaN fails every comparison
            usable &= isinstance(time_us, int | float) and 0 <= time_us < _LATEST
        if usable:
            kinds[kind].append(event)
        else:
            lost += 1
    return kinds, lost


def _gpu_rank(
    file: str,
    rank: int,
    events: dict[str, list[JsonEvent]],
    base_ns: int,
    names: Names,
    ranges: Events,
    gloo: Events,
    notes: list[str],
) -> RankTrace:
    """Return the rank on the device of most of NCCL's kernels; without NCCL, of most kernels."""
    launches = _launch_times(events["launch"], base_ns)
    tables, devices = {}, {}
    for kind in ("kernel", "memcpy", "memset"):
        streams, launch_times, device_ids = [], [], []
        for event in events[kind]:
            streams.append(_argument(event, "stream"))
            launch_times.append(launches.get(_argument(event, "correlation"), -1))
            device_ids.append(_argument(event, "device"))
        tables[kind] = _host_events(events[kind], base_ns, names)
        tables[kind]["lane"], tables[kind]["launch"] = streams, launch_times
        devices[kind] = np.array(device_ids, np.int64)
    kernels, copies, memsets = tables["kernel"], tables["memcpy"], tables["memset"]
    collectives, is_nccl = split_nccl(kernels, names)
    collectives["communicator"] = [_process_group(event, names) for event in events["kernel"]]
    for at, event in enumerate(events["memcpy"]):
        kind = event["name"]
        match = _COPY.match(kind)
        if match:
            kind = match[1]
        copies["name"][at] = number_of(kind, names)
        copies["bytes"][at] = _argument(event, "bytes")
        copies["peer"][at] = kind == "PtoP"

    has_nccl = bool(is_nccl.any())
    candidates = devices["kernel"]
    if has_nccl:
        candidates = candidates[is_nccl]
    numbers, counts = np.unique(candidates, return_counts=True)
    device = int(numbers[counts.argmax()])
    mine = devices["kernel"] == device
    if not mine.all():
        notes.append(
            f"{file}: {(~mine).sum()} kernels on another device than {device}: not counted"
        )
    if len(gloo):
        use = "counted as communication: no NCCL kernel"
        if has_nccl:
            use = "not counted: NCCL's kernels are"
        notes.append(f"{file}: {len(gloo)} calls of gloo on the host, {use}")
    communication, backend = gloo, "gloo"
    if has_nccl:
        communication, backend = collectives[mine & is_nccl], "nccl"
    return RankTrace(
        rank,
        device,
        kernels[mine & ~is_nccl],
        communication,
        copies[devices["memcpy"] == device],
        memsets[devices["memset"] == device],
        ranges,
        backend=backend,
    )


def _launch_times(events: Sequence[JsonEvent], base_ns: int) -> dict[int, int]:
    """Return {correlation: host time of the call in ns}; of several calls the first.

    A call into the runtime calls the driver.
    """
    launches: dict[int, int] = {}
    for event, start in zip(events, (base_ns + _ns(events, "ts")).tolist(), strict=True):
        correlation = _argument(event, "correlation")
        if correlation > 0:
            launches[correlation] = min(start, launches.get(correlation, start))
    return launches


def _work_on_host(
    operators: Sequence[JsonEvent], base_ns: int, names: Names, gloo: Events
) -> Events:
    """Return the operators that compute: not those inside a call of gloo on its own thread."""
    work = [event for event in operators if not event["name"].startswith(_NOT_WORK)]
    compute = _host_events(work, base_ns, names)
    inside = np.zeros(len(compute), dtype=np.bool_)
    for thread in np.unique(gloo["lane"]):
        calls = union(spans(gloo[gloo["lane"] == thread]))
        inside |= (compute["lane"] == thread) & covers(calls, compute["start"])
    return compute[~inside]


def _host_events(events: Sequence[JsonEvent], base_ns: int, names: Names) -> Events:
    rows = make_events(len(events))
    rows["start"] = base_ns + _ns(events, "ts")
    rows["end"] = rows["start"] + _ns(events, "dur")
    rows["name"] = [number_of(event["name"], names) for event in events]
    rows["lane"] = [_integer(event.get("tid")) for event in events]
    return rows


def _ns(events: Sequence[JsonEvent], key: str) -> Times:
    """Convert to ns. Whole µs are exact in a float; multiplied by 1000 they would not be."""
    exact: NDArray[np.float64] = np.array([event[key] for event in events], dtype=np.float64)
    whole = np.floor(exact)
    fraction_ns = np.rint((exact - whole) * 1000)
    ns: Times = whole.astype(np.int64) * 1000 + fraction_ns.astype(np.int64)
    return ns


def _process_group(event: JsonEvent, names: Names) -> int:
    """Return the process group of an NCCL kernel (from torch 2.3), with its ranks (from 2.4)."""
    arguments = event.get("args")
    if not isinstance(arguments, dict) or arguments.get("Process Group Name") in (None, ""):
        return -1
    group = str(arguments["Process Group Name"])
    if arguments.get("Process Group Ranks"):
        group += f" {arguments['Process Group Ranks']}"
    return number_of(group, names)


def _argument(event: JsonEvent, key: str) -> int:
    """Return an integer of the event's `args`, -1 if there is none."""
    arguments = event.get("args")
    if not isinstance(arguments, dict):
        return -1
    return max(_integer(arguments.get(key)), -1)


def _integer(value: Any) -> int:
    if isinstance(value, int) and abs(value) < 2**62:
        return value
    return -1
