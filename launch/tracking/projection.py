"""Turn a record into names, parameters, metrics and tags for MLflow, without any access to a store.

MLflow's limits are kept here (mlflow.utils.validation, 3.17). Otherwise MLflow cuts a long value with a warning, or a server
refuses it; a name outside its alphabet is refused; and a number that is not finite comes back as another number.
"""

import json
import math
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.findings.baselines import stated
from analysis.study.names import BETWEEN
from analysis.study.provenance import identity_gpu_names as gpu_names
from analysis.study.provenance import mapping
from analysis.text import count, single_line
from benchmarks.record import Record, finite
from benchmarks.record.metrics import place
from conf.cell import IMAGES, SAMPLES
from launch.tracking.run_tags import EFFICIENCY_OF

NAME_LENGTH = 250  # characters of a key; also what a run's name has in SQL stores
PARAM_LENGTH = 6000  # characters
TAG_LENGTH = 8000  # characters
LAST_STEP = 2**53  # whole numbers up to here are exact in JSON; a store has 64 bits
STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
WINDOW = "/window"  # what a series adds to the name of a metric that the record has too
# Parameters for which a benchmark that trains nothing has no value.
UNTRAINED = (
    "model",
    "strategy",
    "batch_size",
    "global_batch_size",
    "image_size",
    "precision",
    "optimize",
)
DAMAGED = (
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
)  # raised by a record with a field of another type
IDENTIFIER = re.compile(r"[\w-]{1,100}")  # goes into the store's filter strings


@dataclass(frozen=True)
class Projection:
    """The content of a child run. Times are milliseconds since 1970, as in MLflow."""

    name: str
    status: str
    started: int
    ended: int
    params: dict[str, str]
    metrics: list[tuple[str, float, int, int]]  # name, value, time, step
    tags: dict[str, str]


def milliseconds(seconds: float) -> int:
    """Return milliseconds since 1970, never negative. Raises ValueError or TypeError if the time is no finite number."""
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds} is no time")
    return max(0, round(seconds * 1000))


def identifier(text: str) -> str:
    """Return a text that a filter string of the store may hold. Raises ValueError or TypeError for any other."""
    if not IDENTIFIER.fullmatch(text):
        raise ValueError(f"{single_line(text, 50)!r} is no identifier")
    return text


def run_name(record: Record) -> str:
    """Return the record's name with its repeat, if the cell is measured more than once."""
    return BETWEEN.join([single_line(record.name, NAME_LENGTH - 30), *record.run_suffixes])


def project(record: Record) -> Projection:
    """Return the projection of a record; the same record always gives the same.

    Raises:
        ValueError, TypeError, AttributeError, KeyError: the record is damaged (a field has another type).
    """
    for text in (record.record_id, record.sweep_id):
        identifier(text)
    metrics, nonfinite = _metrics(record)
    tags = _tags(record) | ({"ringside.nonfinite": ",".join(nonfinite)} if nonfinite else {})
    return Projection(
        name=run_name(record),
        status=STATUS[record.state],
        started=milliseconds(record.started_at),
        ended=milliseconds(record.ended_at),
        params={_key(name): _text(value) for name, value in _params(record).items()},
        metrics=metrics,
        tags={
            name: value if len(value) <= TAG_LENGTH else value[: TAG_LENGTH - 1] + "…"
            for name, value in tags.items()
        },
    )


def _key(name: str) -> str:
    """Return a name in MLflow's alphabet; one that is in it stays as it is."""
    name = re.sub(r"[^/\w.\- :]", "_", name)[:NAME_LENGTH]
    path = posixpath.normpath(name)
    return name if name == path and not path.startswith((".", "/")) else re.sub(r"[/.]+", "_", name)


def _text(value: Any) -> str:
    """Return a value as text: whole numbers without '.0', lists joined by commas, no control characters."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Mapping):
        value = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if isinstance(value, list | tuple | set):
        value = ",".join(map(str, value))
    return single_line(str(value), PARAM_LENGTH)


def _params(record: Record) -> dict[str, Any]:
    """Return the parameters of a cell. What is not known is absent."""
    cell = record.cell
    params: dict[str, Any] = {
        "model": cell.model.name,
        "strategy": cell.strategy["name"],
        "benchmark": cell.benchmark["name"],
        "gpus": cell.gpus,
        "world_size": cell.world_size,
    }
    if cell.hosts:
        params |= {"nodes": len(cell.hosts), "hosts": cell.hosts}
    if cell.server_hosts:
        params["server_hosts"] = cell.server_hosts
    plainly = (
        "batch_size",
        "global_batch_size",
        "precision",
        "optimize",
        "device",
        "seed",
        "repeat",
    )
    params |= {name: getattr(cell, name) for name in plainly}
    params["repeat"] = max(
        0, cell.repeat
    )  # a drift or second run measures a cell again: the tag `role` says so
    if cell.profiler != "none":
        params["profiler"] = cell.profiler
    params["image_size"] = cell.model.image_size
    if not cell.trains:
        params = {name: value for name, value in params.items() if name not in UNTRAINED}
        params |= {
            f"benchmark.{name}": value for name, value in cell.benchmark.items() if name != "name"
        }
    params |= {
        f"nccl.{name.removeprefix('NCCL_').lower()}": value for name, value in cell.nccl.items()
    }
    params |= {f"strategy.{name}": value for name, value in cell.strategy.items() if name != "name"}
    params |= {f"model.{name}": record.model.get(name) for name in ("parameters", "gradient_bytes")}
    return {name: value for name, value in params.items() if value is not None}


def _metrics(record: Record) -> tuple[list[tuple[str, float, int, int]], list[str]]:
    """Return the rows of metrics and series, and the names of those with a number that is not finite.

    MLflow keeps equal rows once and shows of each name the one with the highest step, so times come from the record
    alone (a second projection changes nothing) and a series never shares its name with a metric.
    """
    started, ended = milliseconds(record.started_at), milliseconds(record.ended_at)
    values = dict(record.metrics)
    if (
        record.cell.model.inputs == SAMPLES
    ):  # the metric's name says images: its rate has a name of its own as well
        values |= {
            name.replace(IMAGES, SAMPLES): value for name, value in values.items() if IMAGES in name
        }
    rows = [(_key(name), float(value), ended, 0) for name, value in values.items()]
    taken = {name for name, _, _, _ in rows}
    for name, points in record.series.items():
        key = _key(name) if _key(name) not in taken else f"{_key(name)}{WINDOW}"
        for number, (step, value) in enumerate(points, 1):
            time = started + (ended - started) * number // len(points)
            rows.append((key, float(value), max(0, time), _step(name, step)))
    finite = [row for row in rows if math.isfinite(row[1])]
    finite.sort(
        key=lambda row: place(row[0].removesuffix(WINDOW))
    )  # MLflow's pages keep the order of writing
    return finite, _unique(name for name, value, _, _ in rows if not math.isfinite(value))


def _step(name: str, step: float) -> int:
    """Return the step of a point of a series. Raises ValueError if it is no number that a store can hold."""
    if not abs(step) <= LAST_STEP:  # NaN fails every comparison
        raise ValueError(f"series {name} has a step {step}")
    return int(step)


def _unique(names: Iterable[str]) -> list[str]:
    """Return each name once, in order of first appearance."""
    return list(dict.fromkeys(names))


def _verdict_tags(record: Record) -> dict[str, str]:
    """Return the tags that say what is thought of a record: its verdict, the codes, what was not checked, and the sentences."""
    tags = {
        "validity": record.validity.said,
        "validity.codes": ",".join(record.validity.codes),
        "validity.unchecked": ",".join(record.validity.unchecked),
    }
    sentences = [record.failure.message] if record.failure else []
    sentences += [f"{code}: {sentence}" for code, sentence in record.validity.codes.items()]
    return tags | (
        {"mlflow.note.content": "\n\n".join(map(escaped, sentences))} if sentences else {}
    )


def _tags(record: Record) -> dict[str, str]:
    """Return the tags in the order in which pages show them: verdict, where, what was used, why it failed, and the ids."""
    tags = (
        _verdict_tags(record)
        | {
            "state": record.state,
            "role": "repeat"
            if record.cell.repeat > 0
            else " ".join(record.run_suffixes) or "first",
        }
        | machine_tags(record)
    )
    if (share := stated(record)) is not None:
        tags[EFFICIENCY_OF] = share.members
    if (basis := record.predicted.get("basis")) and (
        cells := finite(record.predicted.get("cells"))
    ) is not None:
        said = f"{basis}, from {count(int(cells), 'cell')}, model {record.predicted.get('version')}"
        tags["predicted.basis"] = single_line(said, TAG_LENGTH)
    for name in ("transport", "link_class", "channels"):
        if record.effective.get(name):
            tags[name] = _text(record.effective[name])
    if record.failure:
        tags |= {
            "failure.cause": single_line(record.failure.cause, TAG_LENGTH),
            "failure.message": single_line(record.failure.message, TAG_LENGTH),
        }
        if record.failure.rank is not None:
            tags["failure.rank"] = str(record.failure.rank)
    ids = {"ringside.record_id": record.record_id, "ringside.sweep_id": record.sweep_id}
    return tags | {"cell_id": single_line(record.cell_key, TAG_LENGTH)} | ids


def machine_tags(record: Record) -> dict[str, str]:
    """Return what was measured where: GPU, CPU, driver, NCCL, torch, commit, host; what is not known is absent.

    MLflow has a column for the commit, by another name.
    """
    environment, on_gpus = record.environment, record.cell.device == "cuda"
    driver = mapping(environment.get("gpu")).get("driver")
    versions, commit = (
        mapping(environment.get("versions")),
        mapping(environment.get("git")).get("commit"),
    )
    tags = {
        "gpu": ", ".join(gpu_names(record)) if on_gpus else None,
        "cpu": mapping(environment.get("cpu")).get("model"),
        "driver": driver if on_gpus else None,
        "nccl": versions.get("nccl") if on_gpus else None,
        "torch": versions.get("torch"),
        "commit": commit,
        "host": ", ".join(_hosts(record)),
        "mlflow.source.git.commit": commit,
    }
    return {name: single_line(str(value), TAG_LENGTH) for name, value in tags.items() if value}


def _hosts(record: Record) -> list[str]:
    """Return the names of the hosts whose ranks were measured, as they were asked for."""
    if record.cell.hosts:
        return list(record.cell.every_host)
    of_ranks = [str(rank["host"]) for rank in record.ranks if rank.get("host")]
    return _unique(of_ranks or [str(record.environment.get("host", ""))])


def escaped(text: str, length: int = 500) -> str:
    """Return a text that Markdown shows as it is: it ends no table cell and holds no tag, code, link or line break."""
    text = single_line(text, length).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\|`*\[\]])", r"\\\1", text)
