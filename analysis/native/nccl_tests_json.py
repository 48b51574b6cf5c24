"""Read nccl-tests' JSON, and records of benchmark=collectives.

JSON is that of `-J`, from October 2025, file versions 1 to 3, one document or several in a row. Its
`env` holds the whole environment of the process, secrets included: only NCCL_* is kept of it. Its
`devices` names one rank per process: the number of ranks is processes × threads × GPUs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.errors import UnreadableInput
from analysis.input_files import damage_told, table_of
from analysis.native.nccl_tests_run import (
    PROGRAM_PATTERN,
    NcclTestsRun,
    PlacementNumbers,
    SizeRow,
    nccl_version,
)
from benchmarks.collectives.busbw import NCCL_TESTS_COLLECTIVES

_ACCEPTED = (
    "accepted is the JSON of nccl-tests (`-J file.json`): an object with `args`, `config` and "
    "`results`"
)
_DIGITS = 5e-7
_PROGRAM_FILE = re.compile(PROGRAM_PATTERN + r"(?:\.exe)?")
_SETTING_NAMES = {
    "nthreads": "nThread",
    "ngpus": "nGpus",
    "minimum_bytes": "minBytes",
    "maximum_bytes": "maxBytes",
    "step_factor": "step",
    "step_bytes": "step",
    "warmup_iters": "warmup iters",
    "iterations": "iters",
    "aggregated_iterations": "agg iters",
    "validation": "validation",
    "graph": "graph",
}
_DEVICE_NAMES = {
    "device": "device",
    "hostname": "host",
    "device_hex": "bus_id",
    "device_info": "name",
}
_MOST_RANKS = 1_000_000
_LARGEST = 1e18  # of what is measured in µs, GB/s or elements
_NOT_SPACE = re.compile(r"\S")
_RECORD_ITERATIONS = (
    "min_us",
    "max_us",
    "avg_us",
    "p50_us",
    "p95_us",
    "p99_us",
    "stdev_us",
    "cv_pct",
)
_JSON_ITERATIONS = ("skipped_iterations", *_RECORD_ITERATIONS, "times_us")


def parse_json(text: str) -> list[NcclTestsRun]:
    """Return every run of the documents in a text, without notes on contradictions."""
    decoder = json.JSONDecoder()
    runs: list[NcclTestsRun] = []
    position = _next_document(text, 0)
    line = text.count("\n", 0, position) + 1
    while position < len(text):
        try:
            document, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            reason = f"{error.msg} at line {error.lineno}"
            raise UnreadableInput(f"{_ACCEPTED}; the document is cut or broken: {reason}") from None
        except (ValueError, RecursionError):  # thousands of digits, or of brackets
            raise UnreadableInput(
                f"{_ACCEPTED}; the document is cut or broken: it cannot be decoded"
            ) from None
        try:
            runs.append(_run_of_document(document, line))
        except KeyError as error:
            raise UnreadableInput(
                f"{_ACCEPTED}; in the document of line {line}: {error.args[0]!r} is missing"
            ) from None
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UnreadableInput(f"{_ACCEPTED}; in the document of line {line}: {error}") from None
        following = _next_document(text, end)
        line += text.count("\n", position, following)
        position = following
    if not any(run.rows for run in runs):
        raise UnreadableInput(f"{_ACCEPTED}; there is no result in it")
    return runs


def _next_document(text: str, position: int) -> int:
    """Return where the next document begins; the length of the text where none does."""
    match = _NOT_SPACE.search(text, position)
    return len(text) if match is None else match.start()


def _run_of_document(document: Any, line: int) -> NcclTestsRun:
    if not isinstance(document, dict) or not {"results", "config"} & document.keys():
        raise ValueError("no `results`")
    run = NcclTestsRun(line, digits=_DIGITS)
    for word in document.get("args") or []:
        program = _PROGRAM_FILE.fullmatch(re.split(r"[/\\]", str(word))[-1])
        if program:
            run.program = program[1]
            break
    if document.get("nccl_version") is not None:
        run.nccl_version = nccl_version(int(document["nccl_version"]))
    for assignment in document.get("env") or []:
        name, _, value = str(assignment).partition("=")
        # NVIDIA's container images set NCCL_VERSION, and NCCL does not read it.
        if re.fullmatch(r"NCCL_[A-Z0-9_]+", name) and name != "NCCL_VERSION":
            run.environment[name] = value
    config = document.get("config") or {}
    for key, name in _SETTING_NAMES.items():
        if key in config:
            run.settings[name] = _whole_number(config[key])
    _add_devices(run, config.get("devices") or [])
    run.rows = [_row_of_result(result) for result in document.get("results") or []]
    bounds = document.get("out_of_bounds") or {}
    run.out_of_bounds = _whole_number(bounds["count"]) if "count" in bounds else None
    # Version 1 was printed with a typing error in two names.
    average = document.get("average_bus_bandwidth") or document.get("average_bus_bandwidith") or {}
    run.avg_busbw = _number(average.get("bandwidth", average.get("bandwidith")))
    run.errors = [str(error)[:300] for error in document.get("errors") or [] if error]
    return run


def _add_devices(run: NcclTestsRun, devices: list[dict[str, Any]]) -> None:
    """Enter the named devices and their ranks.

    Each names the first rank of its process, unless all ranks are named.
    """
    ranks_a_process = run.settings.get("nThread", 1) * run.settings.get("nGpus", 1)
    if ranks_a_process * len(devices) > _MOST_RANKS:
        raise ValueError(f"{ranks_a_process} GPUs in one process")
    first_ranks = []
    for device in devices:
        group, rank = _whole_number(device.get("group", 0)), _whole_number(device["rank"])
        first_ranks.append((group, rank))
        content: dict[str, Any] = {"rank": rank, "group": group}
        for key, name in _DEVICE_NAMES.items():
            if isinstance(device.get(key), str | int):
                content[name] = device[key]
        run.devices.append(content)
    distinct = set(first_ranks)
    if any((group, rank + 1) in distinct for group, rank in distinct):
        ranks_a_process = 1
    for group, rank in first_ranks:
        run.listed += [(group, rank + offset) for offset in range(ranks_a_process)]


def _row_of_result(result: dict[str, Any]) -> SizeRow:
    root = _whole_number(result["root"])
    redop = result.get("redop")
    return SizeRow(
        bytes=_whole_number(result["size"]),
        count=_whole_number(result["count"]),
        dtype=str(result["type"]),
        redop=None if redop in (None, "", "none") else str(redop),
        root=None if root == -1 else root,
        out_of_place=_placement_of_result(result, "out_of_place"),
        in_place=_placement_of_result(result, "in_place"),
    )


def _placement_of_result(result: dict[str, Any], name: str) -> PlacementNumbers | None:
    figures = result.get(name)
    if figures is None:
        return None
    wrong = _number(figures.get("nwrong"))
    iterations = result.get(f"{name}_per_iter")
    return PlacementNumbers(
        time_us=_number(figures.get("time")),
        algbw=_number(figures.get("alg_bw")),
        busbw=_number(figures.get("bus_bw")),
        wrong=None if wrong is None else int(wrong),
        cputime_us=_number(figures.get("cpu_time")),
        per_iteration=_iterations(iterations, _JSON_ITERATIONS),
    )


def _iterations(content: dict[str, Any] | None, names: Sequence[str]) -> dict[str, Any] | None:
    if not content:
        return None
    values: dict[str, Any] = {}
    for name in names:
        if name not in content:
            continue
        if name == "times_us" and isinstance(content[name], list):
            values[name] = [_number(time) for time in content[name]]
        else:
            values[name] = _number(content[name])
    return values


def _number(value: Any) -> float | None:
    """Return a number; None for null, nccl-tests' "nan" and what is too large."""
    if value is None or value == "nan":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableInput(f"{value!r} is not a number")
    return float(value) if abs(value) < _LARGEST else None


def _whole_number(value: Any) -> int:
    """Return a whole number, which nccl-tests writes as text for `root`."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,19}\s*", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnreadableInput(f"{value!r} is not a whole number")
    return value


# --- records of benchmark=collectives -------------------------------------------------------------


def record_in(text: str) -> dict[str, Any] | None:
    """Return the record that a text holds; None where it is no record of Ringside's."""
    if '"cell_key"' not in text:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and "cell_key" in content else None


def runs_of_record(record: Mapping[str, Any]) -> list[NcclTestsRun]:
    """Return the runs of a record. Raises UnreadableInput where it has none, or is damaged."""
    table = table_of(record, "nccl-tests")
    with damage_told("nccl-tests"):
        return [_run_of_table(content, record) for content in table["runs"]]


def _run_of_table(content: Mapping[str, Any], record: Mapping[str, Any]) -> NcclTestsRun:
    cell = record["cell"]
    run = NcclTestsRun(1, digits=_DIGITS)
    collective = NCCL_TESTS_COLLECTIVES.get(content["collective"])
    run.program = collective.program if collective else None
    versions = (record.get("environment") or {}).get("versions") or {}
    run.nccl_version = str(versions["nccl"]) if versions.get("nccl") else None
    for name, value in cell["nccl"].items():
        if re.fullmatch(r"NCCL_[A-Z0-9_]+", name):
            run.environment[str(name)] = str(value)
    gpus = cell["gpus"] * max(1, len(cell.get("hosts", ())))
    run.listed = [(0, rank) for rank in range(len(gpus))]
    for number, (gpu, rank) in enumerate(zip(gpus, record["ranks"], strict=False)):
        device: dict[str, Any] = {"rank": number, "device": _whole_number(gpu)}
        if "name" in rank:
            device["name"] = str(rank["name"])
        run.devices.append(device)
    run.rows = [_row_of_record(row) for row in content["rows"]]
    run.avg_busbw = _number(content["avg_busbw"])
    return run


def _row_of_record(row: Mapping[str, Any]) -> SizeRow:
    return SizeRow(
        bytes=_whole_number(row["bytes"]),
        count=_whole_number(row["count"]),
        dtype=str(row["dtype"]),
        redop=None if row["redop"] is None else str(row["redop"]),
        root=None if row["root"] is None else _whole_number(row["root"]),
        out_of_place=_placement_of_record(row["out_of_place"]),
        in_place=_placement_of_record(row["in_place"]),
    )


def _placement_of_record(figures: Mapping[str, Any] | None) -> PlacementNumbers | None:
    if figures is None:
        return None
    wrong = figures.get("wrong")
    return PlacementNumbers(
        time_us=_number(figures["time_us"]),
        algbw=_number(figures["algbw"]),
        busbw=_number(figures["busbw"]),
        wrong=None if wrong is None else _whole_number(wrong),
        per_iteration=_iterations(figures.get("per_iteration"), _RECORD_ITERATIONS),
    )
