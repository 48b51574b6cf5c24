"""Turn a record into an MLflow run: its name, parameters, metrics, tags and series, without any access to a store.

MLflow's limits are kept here (mlflow.utils.validation, 3.17). Otherwise MLflow cuts a long value
with a warning, a server refuses a name outside its alphabet, and NaN comes back as another number.
"""

import contextlib
import json
import math
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from analysis.study import names
from analysis.study.provenance import gpu_models
from analysis.text import count, single_line
from analysis.validity.gpu_samples import Sample, is_of_cpu, is_of_gpus
from benchmarks.record import CellFolder, Record, read_lines
from benchmarks.record.metrics import place
from conf.cell import IMAGES, SAMPLES, Cell

NAME_LENGTH = 250  # characters of a key; also what a run's name has in SQL stores
PARAM_LENGTH = 6000  # characters
TAG_LENGTH = 8000  # characters
LAST_STEP = 2**53  # whole numbers up to here are exact in JSON; a store has 64 bits
STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
NOTE = "mlflow.note.content"
RECORD, SWEEP = "ringside.record_id", "ringside.sweep_id"
WINDOW = "/window"  # what a series adds to the name of a metric that the record has too
IDENTIFIER = re.compile(r"[\w-]{1,100}")  # goes into the store's filter strings
MOST_POINTS = 100  # of a system series: more say nothing on a page, and each is a row of the store
# {name in a sample: (end of the series' name, factor)}: MLflow's own names and units where it has them.
GPU_SERIES = {
    "busy_percent": ("utilization_percentage", 1.0),
    "memory_bytes": ("memory_usage_megabytes", 1e-6),
    "power_w": ("power_usage_watts", 1.0),
    "sm_mhz": ("clock_mhz", 1.0),
    "temperature_c": ("temperature_celsius", 1.0),
}
# Busy cores between two samples, and how much of it was the cell's own.
CPU_SERIES = {"busy_s": "utilization", "own_s": "of_this_cell"}
Row = tuple[str, float, int, int]  # name, value, milliseconds since 1970, step


@dataclass(frozen=True)
class MlflowRun:
    """The content of a child run. Times are milliseconds since 1970, as in MLflow."""

    name: str
    status: str
    started: int
    ended: int
    params: dict[str, str]
    metrics: list[Row]
    tags: dict[str, str]


def project(record: Record) -> MlflowRun:
    """Return the run of a record; the same record always gives the same.

    Raises:
        ValueError: an id goes into no filter string, or a step is no whole number.
    """
    check_identifier(record.record_id)
    check_identifier(record.sweep_id)
    metrics, nonfinite = _metrics(record)
    tags = _tags(record)
    if nonfinite:
        tags["ringside.nonfinite"] = single_line(",".join(nonfinite), TAG_LENGTH)
    return MlflowRun(
        name=run_name(record),
        status=STATUS[record.state],
        started=milliseconds(record.started_at),
        ended=milliseconds(record.ended_at),
        params={_key(name): _text(value) for name, value in _params(record).items()},
        metrics=metrics,
        tags=tags,
    )


def valid_records(records: Iterable[Record]) -> list[Record]:
    """Return the records that have a run: those that `project` takes."""
    valid = []
    for record in records:
        with contextlib.suppress(ValueError):
            project(record)
            valid.append(record)
    return valid


def run_name(record: Record) -> str:
    """Return the name of a record's run: the cell's, and which of several measurements it is."""
    return single_line(names.run_name(record), NAME_LENGTH)


def milliseconds(seconds: float) -> int:
    """Return milliseconds since 1970."""
    return round(seconds * 1000)


def check_identifier(text: str) -> str:
    """Return a text that a store's filter string may hold. Raises ValueError."""
    if not IDENTIFIER.fullmatch(text):
        raise ValueError(f"{single_line(text, 50)!r} is no identifier")
    return text


def _key(name: str) -> str:
    """Return a name in MLflow's alphabet."""
    name = re.sub(r"[^/\w.\- :]", "_", name)[:NAME_LENGTH]
    if name == posixpath.normpath(name) and not name.startswith((".", "/")):
        return name
    return re.sub(r"[/.]+", "_", name)


def _text(value: Any) -> str:
    """Return a value as text: whole numbers without '.0', lists joined by commas."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Mapping):
        value = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if isinstance(value, list | tuple | set):
        value = ",".join(map(str, value))
    return single_line(str(value), PARAM_LENGTH)


def _params(record: Record) -> dict[str, Any]:
    cell = record.cell
    params: dict[str, Any] = {}
    if cell.trains:
        params |= {"model": cell.model.name, "strategy": cell.strategy["name"]}
    params |= {
        "benchmark": cell.benchmark["name"],
        "gpus": cell.gpus,
        "world_size": cell.world_size,
    }
    if cell.hosts:
        params |= {"nodes": len(cell.hosts), "hosts": cell.hosts}
    if cell.server_hosts:
        params["server_hosts"] = cell.server_hosts
    if cell.trains:
        for name in ("batch_size", "global_batch_size", "precision", "optimize"):
            params[name] = getattr(cell, name)
        params["image_size"] = cell.model.image_size
    else:
        for name, value in cell.benchmark.items():
            if name != "name":
                params[f"benchmark.{name}"] = value
    params |= {"device": cell.device, "seed": cell.seed}
    params["repeat"] = max(0, cell.repeat)  # of a drift or second run the tag `role` tells
    if cell.profiler != "none":
        params["profiler"] = cell.profiler
    for name, value in cell.nccl.items():
        params[f"nccl.{name.removeprefix('NCCL_').lower()}"] = value
    for name, value in cell.strategy.items():
        if name != "name":
            params[f"strategy.{name}"] = value
    for name in ("parameters", "gradient_bytes"):
        params[f"model.{name}"] = record.model.get(name)
    return {name: value for name, value in params.items() if value is not None}


def _metrics(record: Record) -> tuple[list[Row], list[str]]:
    """Return the rows of metrics and series, and the names of those that are not finite.

    MLflow keeps equal rows once, so their times come from the record alone. It shows the row with
    the highest step of a name, so a series never has the name of a metric.
    """
    started, ended = milliseconds(record.started_at), milliseconds(record.ended_at)
    values = dict(record.metrics)
    if record.cell.model.inputs == SAMPLES:  # the metric's name says images
        for name, value in record.metrics.items():
            values[name.replace(IMAGES, SAMPLES)] = value
    rows = [(_key(name), float(value), ended, 0) for name, value in values.items()]
    metric_keys = {row[0] for row in rows}
    for name, points in record.series.items():
        key = _key(name)
        if key in metric_keys:
            key += WINDOW
        for number, (step, value) in enumerate(points, 1):
            if not abs(step) <= LAST_STEP:  # NaN fails every comparison
                raise ValueError(f"series {name} has a step {step}")
            time = started + (ended - started) * number // len(points)
            rows.append((key, float(value), max(0, time), int(step)))
    finite_rows = [row for row in rows if math.isfinite(row[1])]
    finite_rows.sort(key=lambda row: place(row[0].removesuffix(WINDOW)))  # pages show this order
    nonfinite = dict.fromkeys(row[0] for row in rows if not math.isfinite(row[1]))
    return finite_rows, list(nonfinite)


def _tags(record: Record) -> dict[str, str]:
    """Return the tags in the order of MLflow's pages: verdict, machine, what was used, failure, ids."""
    validity, failure = record.validity, record.failure
    sentences = [failure.message] if failure else []
    sentences += [f"{code}: {text}" for code, text in validity.codes.items()]
    tags: dict[str, Any] = {
        "validity": validity.said,
        "validity.codes": ",".join(validity.codes),
        "validity.unchecked": ",".join(validity.unchecked),
        "state": record.state,
        "role": "repeat" if record.cell.repeat > 0 else " ".join(record.run_suffixes) or "first",
        **machine_tags(record),
    }
    basis, cells = record.predicted.get("basis"), record.predicted.get("cells")
    if basis and cells is not None:
        tags["predicted.basis"] = (
            f"{basis}, from {count(cells, 'cell')}, model {record.predicted.get('version')}"
        )
    for name in ("transport", "link_class", "channels"):
        if record.effective.get(name):
            tags[name] = _text(record.effective[name])
    if failure:
        tags |= {"failure.cause": failure.cause, "failure.message": failure.message}
        if failure.rank is not None:
            tags["failure.rank"] = failure.rank
    tags |= {"cell_id": record.cell_key, RECORD: record.record_id, SWEEP: record.sweep_id}
    texts = {name: single_line(value, TAG_LENGTH) for name, value in tags.items()}
    if sentences:
        texts[NOTE] = "\n\n".join(map(escape_markdown, sentences))[:TAG_LENGTH]
    return texts


def machine_tags(record: Record) -> dict[str, str]:
    """Return on what it was measured: GPU, CPU, versions, commit, host; what is unknown is absent."""
    environment = record.environment
    versions = environment.get("versions", {})
    commit = environment.get("git", {}).get("commit")
    tags: dict[str, Any] = {}
    if record.cell.device == "cuda":
        tags["gpu"] = ", ".join(gpu_models(record))
        tags["driver"] = environment.get("gpu", {}).get("driver")
        tags["nccl"] = versions.get("nccl")
    tags["cpu"] = environment.get("cpu", {}).get("model")
    tags["torch"] = versions.get("torch")
    tags["commit"] = commit
    tags["mlflow.source.git.commit"] = commit  # MLflow has a column for it
    tags["host"] = ", ".join(_hosts(record))
    return {name: single_line(str(value), TAG_LENGTH) for name, value in tags.items() if value}


def _hosts(record: Record) -> list[str]:
    if record.cell.hosts:
        return list(record.cell.every_host)
    rank_hosts = dict.fromkeys(str(rank["host"]) for rank in record.ranks if rank.get("host"))
    return list(rank_hosts) or [str(record.environment.get("host", ""))]


def escape_markdown(text: str, length: int = 500) -> str:
    """Return a text that Markdown shows as it is, and that reads well in an artifact too: `_` stays."""
    text = single_line(text, length).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\|`*\[\]])", r"\\\1", text)


def system_series(folder: CellFolder, cell: Cell) -> list[Row]:
    """Return the samples of GPUs and CPU as rows for MLflow's page "System metrics".

    The step is the number of the sample. Of a cell with hosts the host is in the name.
    """
    rows: list[Row] = []
    for number in folder.sampled_hosts():
        host = f"{cell.every_host[number]}/" if number < len(cell.every_host) else ""
        gpu_lines = filter(is_of_gpus, read_lines(folder.gpu_samples_of(number)))
        for step, line in _thin_out(list(gpu_lines)):
            time = round(line["time"] * 1000)
            for gpu, sample in zip(cell.gpus, line["gpus"], strict=False):
                for field in GPU_SERIES.keys() & sample.keys():
                    name, factor = GPU_SERIES[field]
                    value = float(sample[field]) * factor
                    rows.append((f"system/{host}gpu_{gpu}_{name}", value, time, step))
        cpu_lines = filter(is_of_cpu, read_lines(folder.cpu_samples_of(number)))
        for (_, before), (step, line) in pairwise(_thin_out(list(cpu_lines))):
            time, cores_s = (
                round(line["time"] * 1000),
                line["cores"] * (line["time"] - before["time"]),
            )
            if cores_s <= 0:
                continue
            for field, name in CPU_SERIES.items():
                percent = 100 * max(0.0, line[field] - before[field]) / cores_s
                rows.append((f"system/{host}cpu_{name}_percentage", percent, time, step))
    return [row for row in rows if math.isfinite(row[1])]


def _thin_out(samples: Sequence[Sample]) -> list[tuple[int, Sample]]:
    """Return (number, sample) of at most MOST_POINTS samples, evenly spread."""
    stride = max(1, math.ceil(len(samples) / MOST_POINTS))
    return list(enumerate(samples))[::stride]
