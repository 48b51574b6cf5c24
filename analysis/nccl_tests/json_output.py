"""Read the JSON of nccl-tests (`-J`, from October 2025; file versions 1 to 3), one document or several in a row.

Its `env` holds the whole environment of the process, secrets included: only NCCL_* is kept of it. Its `devices` names
one rank per process: the number of ranks is processes × threads × GPUs.
"""

import json
import re
from typing import Any

from analysis.errors import UnreadableInput
from analysis.nccl_tests.run import PROGRAMS, Measured, Row, Run, nccl_version

_ACCEPTED = "accepted is the JSON of nccl-tests (`-J file.json`): an object with `args`, `config` and `results`"
_PROGRAM = re.compile(
    "(" + "|".join(sorted(PROGRAMS, key=len, reverse=True)) + r")_perf(?:[_-]\w+)?(?:\.exe)?"
)
_SETTINGS = {
    "nthreads": "nThread", "ngpus": "nGpus", "minimum_bytes": "minBytes", "maximum_bytes": "maxBytes",
    "step_factor": "step", "step_bytes": "step", "warmup_iters": "warmup iters", "iterations": "iters",
    "aggregated_iterations": "agg iters", "validation": "validation", "graph": "graph",
}  # fmt: skip
_OF_IMAGES = ("NCCL_VERSION",)  # which NVIDIA's container images set, and NCCL does not read
_MOST_RANKS = 1_000_000
_LARGEST = 1e18  # of what is measured in µs, GB/s or elements
_NOT_SPACE = re.compile(r"\S")
_ITERATION = (
    "skipped_iterations",
    "min_us",
    "max_us",
    "avg_us",
    "p50_us",
    "p95_us",
    "p99_us",
    "stdev_us",
    "cv_pct",
    "times_us",
)


def read_json(text: str) -> list[Run]:
    """Read every run of the text, not yet annotated. Raises UnreadableInput for foreign, cut or empty documents."""
    decoder = json.JSONDecoder()
    runs: list[Run] = []
    position = _begin(text, 0)
    line = text.count("\n", 0, position) + 1
    while position < len(text):
        try:
            whole, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:  # thousands of digits are a ValueError too
            reason = (
                f"{error.msg} at line {error.lineno}"
                if isinstance(error, json.JSONDecodeError)
                else "it cannot be decoded"
            )
            raise UnreadableInput(f"{_ACCEPTED}; the document is cut or broken: {reason}") from None
        try:
            runs.append(_run(whole, line))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise UnreadableInput(f"{_ACCEPTED}; in the document of line {line}: {what}") from None
        following = _begin(text, end)
        line += text.count("\n", position, following)
        position = following
    if not any(run.rows for run in runs):
        raise UnreadableInput(f"{_ACCEPTED}; there is no result in it")
    return runs


def _begin(text: str, position: int) -> int:
    """Return where the next document begins; the length of the text where none does."""
    found = _NOT_SPACE.search(text, position)
    return len(text) if found is None else found.start()


def _run(whole: Any, line: int) -> Run:
    if not isinstance(whole, dict) or not {"results", "config"} & whole.keys():
        raise ValueError("no `results`")
    run = Run(line, digits=5e-7)
    program = next(
        (found for word in whole.get("args") or [] if (found := _PROGRAM.fullmatch(_base(word)))),
        None,
    )
    run.program = None if program is None else program[1]
    run.nccl_version = (
        nccl_version(int(whole["nccl_version"])) if whole.get("nccl_version") is not None else None
    )
    pairs = [str(word).partition("=") for word in whole.get("env") or []]
    run.environment = {
        name: value
        for name, _, value in pairs
        if re.fullmatch(r"NCCL_[A-Z0-9_]+", name) and name not in _OF_IMAGES
    }
    config = whole.get("config") or {}
    run.settings = {
        name: whole_number(config[key]) for key, name in _SETTINGS.items() if key in config
    }
    _devices(run, config.get("devices") or [])
    run.rows = [_row(one) for one in whole.get("results") or []]
    bounds = whole.get("out_of_bounds") or {}
    run.out_of_bounds = whole_number(bounds["count"]) if "count" in bounds else None
    # version 1 was printed with a typing error in two names
    average = whole.get("average_bus_bandwidth") or whole.get("average_bus_bandwidith") or {}
    run.avg_busbw = number(average.get("bandwidth", average.get("bandwidith")))
    run.errors = [str(one)[:300] for one in whole.get("errors") or [] if one]
    return run


def _base(word: Any) -> str:
    return re.split(r"[/\\]", str(word))[-1]


def _devices(run: Run, devices: list[dict[str, Any]]) -> None:
    """Enter the named devices and their ranks. Each names the first rank of its process, unless all ranks are named."""
    each = run.settings.get("nThread", 1) * run.settings.get("nGpus", 1)
    if each * len(devices) > _MOST_RANKS:
        raise ValueError(f"{each} GPUs in one process")
    names = {"device": "device", "hostname": "host", "device_hex": "bus_id", "device_info": "name"}
    named = [(whole_number(one.get("group", 0)), whole_number(one["rank"])) for one in devices]
    for (group, rank), one in zip(named, devices, strict=True):
        device: dict[str, Any] = {"rank": rank, "group": group}
        run.devices.append(
            device
            | {name: one[key] for key, name in names.items() if isinstance(one.get(key), str | int)}
        )
    firsts = set(named)
    if any((group, rank + 1) in firsts for group, rank in named):
        each = 1
    run.listed = [(group, rank + more) for group, rank in named for more in range(each)]


def _row(one: dict[str, Any]) -> Row:
    root, redop = whole_number(one["root"]), one.get("redop")
    out, within = (
        _measured(one.get(name), one.get(f"{name}_per_iter"))
        for name in ("out_of_place", "in_place")
    )
    named = None if redop in (None, "", "none") else str(redop)
    return Row(
        whole_number(one["size"]),
        whole_number(one["count"]),
        str(one["type"]),
        named,
        None if root == -1 else root,
        out,
        within,
    )


def _measured(one: dict[str, Any] | None, iterations: dict[str, Any] | None) -> Measured | None:
    if one is None:
        return None
    wrong = number(one.get("nwrong"))
    time, algbw, busbw, cpu_time = (
        number(one.get(name)) for name in ("time", "alg_bw", "bus_bw", "cpu_time")
    )
    kept = (
        {name: _numbers(iterations[name]) for name in _ITERATION if name in iterations}
        if iterations
        else None
    )
    return Measured(time, algbw, busbw, None if wrong is None else int(wrong), None, cpu_time, kept)


def _numbers(value: Any) -> Any:
    return [number(one) for one in value] if isinstance(value, list) else number(value)


def number(value: Any) -> float | None:
    """Return a number; None for null, nccl-tests' "nan" and what is too large. Raises UnreadableInput for anything else."""
    if value is None or value == "nan":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableInput(f"{value!r} is not a number")
    return float(value) if abs(value) < _LARGEST else None


def whole_number(value: Any) -> int:
    """Return a whole number, which nccl-tests writes as text for `root`. Raises UnreadableInput for anything else."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,19}\s*", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnreadableInput(f"{value!r} is not a whole number")
    return value
