"""Turn records into the content of MLflow's runs, without any access to a store.

A record is a child run, with a name, parameters, metrics, tags and series; a sweep is their parent,
with figures and a table. MLflow's limits are kept here (mlflow.utils.validation, 3.17). Otherwise
MLflow cuts a long value with a warning, a server refuses a name outside its alphabet, and NaN comes
back as another number.
"""

import base64
import contextlib
import json
import math
import posixpath
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.findings.baselines import EFFICIENCY
from analysis.findings.communication import EXPOSED
from analysis.report import cell_numbers
from analysis.report.cell_numbers import first_metric
from analysis.report.figure import COLOURS
from analysis.report.table import Column, Table
from analysis.study import names
from analysis.study.conditions import IMAGES_PER_SECOND
from analysis.study.provenance import gpu_models
from analysis.text import count, markdown, single_line
from analysis.validity.checks import verdict_words
from benchmarks.record import Record
from benchmarks.record.metrics import entry_of, position_of
from benchmarks.record.record import STATES, VERDICTS
from conf.cell import CONNECTIONS, IMAGES, SAMPLES, counted

NAME_LENGTH = 250  # characters of a key; also what a run's name has in SQL stores
PARAM_LENGTH = 6000  # characters
TAG_LENGTH = 8000  # characters
TEXT_LENGTH = 200  # characters of a text in the table of a sweep
MOST_ROWS = 100_000  # metrics and points of series of a run: a store takes 20 s for them
LAST_STEP = 2**53  # whole numbers up to here are exact in JSON; a store has 64 bits
STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
NOTE = "mlflow.note.content"
RECORD, SWEEP = "ringside.record_id", "ringside.sweep_id"
WINDOW = "/window"  # what a series adds to the name of a metric that the record has too
IDENTIFIER = re.compile(r"[\w-]{1,100}")  # goes into the store's filter strings
# What a run without a parameter says beside runs that have it; `n/a` for other parameters.
DEFAULTS = {
    "global_batch_size": names.UNTOUCHED,
    CONNECTIONS: names.UNTOUCHED,
    "profiler": "none",
    "nodes": "1",
    "hosts": "this machine",
}
BEST_FIGURES = (IMAGES_PER_SECOND, EFFICIENCY, EXPOSED, "comm/exchange_ms")
LINK_CLASS, VALIDITY = "link class", "validity"
TEXT_COLUMNS = (cell_numbers.RESULT, cell_numbers.TRANSPORT, LINK_CLASS, VALIDITY)
Row = tuple[str, float, int, int]  # name, value, milliseconds since 1970, step
Values = Mapping[str, Mapping[str, float]]  # {record_id: {metric: value}} that need several records


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

    Raises ValueError: an id goes into no filter string, a step is not a whole number, or there are
    more than MOST_ROWS.
    """
    check_identifier(record.record_id)
    check_identifier(record.sweep_id)
    finite = []
    nonfinite: dict[str, None] = {}
    for row in _metrics(record):
        name, value, *_ = row
        if math.isfinite(value):
            finite.append(row)
        else:
            nonfinite[name] = None
    finite.sort(key=lambda row: position_of(row[0].removesuffix(WINDOW)))  # as pages show them
    tags = _tags(record)
    if nonfinite:
        tags["ringside.nonfinite"] = single_line(",".join(nonfinite), TAG_LENGTH)
    return MlflowRun(
        name=run_name(record),
        status=STATUS[record.state],
        started=milliseconds(record.started_at),
        ended=milliseconds(record.ended_at),
        params={_key(name): _text(value) for name, value in _params(record).items()},
        metrics=finite,
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
        raise ValueError(f"{single_line(text, 50)!r} is not an identifier")
    return text


def _key(name: str) -> str:
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
    params[CONNECTIONS] = cell.cuda_device_max_connections
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


def _metrics(record: Record) -> list[Row]:
    """Return the rows of metrics and series.

    MLflow keeps equal rows once, so their times come from the record alone. It shows the row with
    the highest step of a name, so a series never has the name of a metric.
    """
    started, ended = milliseconds(record.started_at), milliseconds(record.ended_at)
    values = dict(record.metrics)
    if record.cell.model.inputs == SAMPLES:  # the metric's name says images
        for name, value in record.metrics.items():
            values[name.replace(IMAGES, SAMPLES)] = value
    number = len(values) + sum(map(len, record.series.values()))
    if number > MOST_ROWS:
        most = f"at most {MOST_ROWS:,} are written"
        raise ValueError(f"it has {number:,} metrics and points of series; {most}")
    rows = []
    metric_keys = set()
    for name, value in values.items():
        rows.append((_key(name), float(value), ended, 0))
        metric_keys.add(_key(name))
    for name, points in record.series.items():
        key = _key(name)
        if key in metric_keys:
            key += WINDOW
        for index, (step, value) in enumerate(points, 1):
            if not abs(step) <= LAST_STEP:  # NaN fails every comparison
                raise ValueError(f"series {name} has a step {step}")
            time = started + (ended - started) * index // len(points)
            rows.append((key, float(value), max(0, time), int(step)))
    return rows


def _tags(record: Record) -> dict[str, str]:
    validity, failure = record.validity, record.failure
    role = "repeat"
    if record.cell.repeat <= 0:
        role = " ".join(record.cell.run_suffixes(record.drift)) or "first"
    tags: dict[str, Any] = {
        "validity": verdict_words(record) if record.state == "finished" else record.state,
        "validity.codes": ",".join(validity.codes),
        "validity.unchecked": ",".join(validity.unchecked),
        "state": record.state,
        "role": role,
        **machine_tags(record),
    }
    basis, cells = record.predicted.get("basis"), record.predicted.get("cells")
    if basis and cells is not None:
        tags["predicted.basis"] = (
            f"{basis}, from {count(cells, 'run')}, model {record.predicted.get('version')}"
        )
    for name in ("transport", "link_class", "channels"):
        if record.effective.get(name):
            tags[name] = _text(record.effective[name])
    sentences = []
    if failure:
        sentences.append(failure.message)
        tags |= {"failure.cause": failure.cause, "failure.message": failure.message}
        if failure.rank is not None:
            tags["failure.rank"] = failure.rank
    tags |= {"cell_id": record.cell_key, RECORD: record.record_id, SWEEP: record.sweep_id}
    texts = {name: single_line(value, TAG_LENGTH) for name, value in tags.items()}
    for code, text in validity.codes.items():
        sentences.append(f"{code}: {text}")
    if sentences:
        texts[NOTE] = "\n\n".join(map(markdown, sentences))[:TAG_LENGTH]
    return texts


def machine_tags(record: Record) -> dict[str, str]:
    """Return on what it was measured (GPU, CPU, versions, commit, host), as far as it is known."""
    environment = record.environment
    versions = environment.get("versions", {})
    commit = environment.get("git", {}).get("commit")
    hosts = dict.fromkeys(record.cell.every_host)
    if not record.cell.hosts:
        for rank in record.ranks:
            if rank.get("host"):
                hosts[str(rank["host"])] = None
    if not hosts:
        hosts[str(environment.get("host", ""))] = None
    tags: dict[str, Any] = {}
    if record.cell.device == "cuda":
        tags["gpu"] = ", ".join(gpu_models(record))
        tags["driver"] = environment.get("gpu", {}).get("driver")
        tags["nccl"] = versions.get("nccl")
    tags["cpu"] = environment.get("cpu", {}).get("model")
    tags["torch"] = versions.get("torch")
    tags["commit"] = commit
    tags["mlflow.source.git.commit"] = commit  # MLflow has a column for it
    tags["host"] = ", ".join(hosts)
    texts = {}
    for name, value in tags.items():
        if value:
            texts[name] = single_line(str(value), TAG_LENGTH)
    return texts


def default_params(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """Return {record_id: {parameter: value}} that a run lacks and others of its benchmark have.

    MLflow's pages show `unknown` for a parameter that is absent. The size of a model that was
    never built is unknown, and stays absent.
    """
    own_params = {}
    of_benchmark: dict[str, set[str]] = defaultdict(set)
    for record in records:
        params = project(record).params
        own_params[record.record_id] = params
        for name in params:
            if not name.startswith("model."):
                of_benchmark[params["benchmark"]].add(name)
    defaults: dict[str, dict[str, str]] = {}
    for record_id, params in own_params.items():
        defaults[record_id] = {}
        for name in sorted(of_benchmark[params["benchmark"]] - set(params)):
            text = DEFAULTS.get(name, "n/a")
            if name.startswith("nccl."):
                text = names.UNTOUCHED
            defaults[record_id][name] = text
    return defaults


def best_record(records: Iterable[Record]) -> Record | None:
    """Return the usable record with the best images/s, else the best of its benchmark's metric.

    Cells without an exchange do not train together; they count only where there is no other.
    """
    usable = [record for record in records if record.usable]
    trained = [record for record in usable if IMAGES_PER_SECOND in record.metrics]
    if trained:
        together = [record for record in trained if record.cell.strategy["name"] != "none"]
        return max(together or trained, key=lambda record: record.metrics[IMAGES_PER_SECOND])
    first_metrics = [name for name in map(first_metric, usable) if name]
    if not first_metrics:
        return None
    shown_first = min(first_metrics, key=position_of)
    rated = [record for record in usable if shown_first in record.metrics]
    rated.sort(key=lambda record: record.metrics[shown_first])
    if entry_of(shown_first).less_is_better:
        return rated[0]
    return rated[-1]


def parent_metrics(records: Sequence[Record], values: Values) -> dict[str, float]:
    """Return how many cells have which verdict, and figures of the best cell and its baseline."""
    metrics: dict[str, float] = {}
    for outcome in (*VERDICTS, *STATES):
        if outcome != "finished":
            metrics[f"cells/{outcome}"] = 0.0
    for record in records:
        outcome = record.validity.verdict if record.state == "finished" else record.state
        metrics[f"cells/{outcome}"] += 1
    best = best_record(records)
    if best is None:
        return metrics
    figures = best.metrics | dict(values.get(best.record_id, {}))
    shown = [name for name in BEST_FIGURES if name in figures]
    shown_first = first_metric(best)
    if not shown and shown_first:
        shown = [shown_first]
    for name in shown:
        metrics[f"best/{name.partition('/')[2]}"] = float(figures[name])
    if EFFICIENCY in figures:  # efficiency = rate ÷ (N × rate of the slowest member alone)
        ideal_rate = figures[IMAGES_PER_SECOND] / figures[EFFICIENCY]
        metrics["baseline/images_per_second"] = ideal_rate / best.cell.world_size
    return metrics


def parent_params(records: Sequence[Record]) -> dict[str, str]:
    """Return the parameters of the cells, `25 | 50` where they differ."""
    defaults = default_params(records)
    params = []
    for record in records:
        params.append(project(record).params | defaults[record.record_id])
    return {name: single_line(value, PARAM_LENGTH) for name, value in _join(params).items()}


def parent_tags(records: Sequence[Record]) -> dict[str, str]:
    """Return the machines and software of the cells, how many ended how, and which was the best."""
    tags = _join(map(machine_tags, records))
    best = best_record(records)
    if best is not None:
        tags["best.cell"] = run_name(best)
    counts = dict.fromkeys(STATUS, 0)
    invalid = 0
    for record in records:
        counts[record.state] += 1
        if record.state == "finished" and record.validity.verdict == "invalid":
            invalid += 1
    cells = ", ".join([f"{count} {state}" for state, count in counts.items() if count])
    if invalid:
        cells += f" ({invalid} of them invalid)"
    return {**tags, "cells": cells}


def _join(mappings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    values: dict[str, dict[str, None]] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            values.setdefault(name, {})[value] = None
    return {name: " | ".join(several) for name, several in values.items()}


def summary_markdown(records: Sequence[Record], values: Values) -> str:
    """Return a table with a row for each record; what a record lacks is '–', never 0.

    What all names share stands once above the table.
    """
    if not records:
        return "No run has ended.\n"
    run_names = list(map(run_name, records))
    shared, short = names.shared_name(run_names), names.short_names(run_names)
    cells = [record.cell for record in records]
    things, unit = counted(cells), names.unit_of_cells(cells)
    columns = [Column("cell", "cell")]
    for name in dict.fromkeys((cell_numbers.RESULT, *cell_numbers.COLUMNS, *TEXT_COLUMNS)):
        kind = "text" if name in TEXT_COLUMNS else "number"
        columns.append(Column(name, cell_numbers.heading(name, things, unit), kind=kind))
    rows = []
    several_values = []
    for record, name in zip(records, run_names, strict=True):
        of_several = values.get(record.record_id, {})
        several_values.append(of_several)
        row = {"cell": short[name], VALIDITY: record.state}
        failure = record.failure
        if record.state == "finished":
            verdict = [verdict_words(record), ", ".join(record.validity.codes)]
            row[VALIDITY] = ": ".join(filter(None, verdict))
            row |= cell_numbers.cell_numbers(record, of_several)
        elif failure:
            rank = ""
            if failure.rank is not None:
                rank = f" of rank {failure.rank}"
            row[VALIDITY] = f"{record.state}: {failure.cause}{rank}, {failure.message}"
        link_class = record.effective.get("link_class")
        if link_class:
            row[LINK_CLASS] = _text(link_class)
        rows.append({key: single_line(text, TEXT_LENGTH) for key, text in row.items()})
    table = Table.of("cells", "", columns, rows)
    text = table.to_markdown(len(rows)) + "\n"
    if shared:
        text = f"Every run: {markdown(shared, TEXT_LENGTH)}\n\n{text}"
    margins = cell_numbers.about_margins(several_values)
    shown = [column.key for column in table.for_people.columns]
    for sentence in (margins, cell_numbers.about_columns(shown)):
        if sentence:
            text += f"\n{sentence}\n"
    return text


def cut_note(text: str, length: int) -> str:
    """Return a note of at most `length` characters; where it is cut, its last line says so."""
    if len(text) <= length:
        return text
    last = "\n… the rest is in the artifact summary.md\n"
    whole, _, _ = text[: length - len(last)].rpartition("\n")
    return f"{whole}\n{last}"


# The saved view of an experiment that `python -m launch ui` opens: runs, the fastest first.
VIEW_ID = "ringside-cells"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_ID}"
MOST_PARAMS, MOST_CHARTS = 6, 6
NAME_COLUMN = "attributes.`Run Name`"
NAME_WIDTH = 290  # pixels: `resnet50 · nccl_allreduce · gpus 0,1` fits
PALETTE = [on_paper for on_paper, _ in COLOURS.values()]
COLOR = "mlflow.runColor"
# Parameters that follow from others, or from the machine: they have no column.
NO_COLUMN = ("world_size", "repeat", "seed", "image_size", "model.")


def experiment_tags(records: Sequence[Record]) -> dict[str, str]:
    """Return the tags of an experiment with these records."""
    packed = base64.b64encode(zlib.compress(json.dumps(view_state(records)).encode(), 9)).decode()
    view = {
        "name": "Ringside: runs, fastest first",
        "createdAt": milliseconds(min([record.started_at for record in records])),
        "state": f"deflate;{packed}",
    }
    return {"mlflow.experimentKind": "custom_model_development", VIEW_TAG: json.dumps(view)}


def varied_params(records: Sequence[Record]) -> list[str]:
    """Return the parameters in which runs differ, as far as there are columns for them."""
    every = [project(record).params for record in records]
    names: dict[str, None] = {}
    for params in every:
        names |= dict.fromkeys(params)
    varied = []
    for name in names:
        if len({params.get(name) for params in every}) > 1 and not name.startswith(NO_COLUMN):
            varied.append(name)
    return varied[:MOST_PARAMS]


def run_colors(records: Sequence[Record]) -> dict[str, str]:
    """Return the colour of each run in charts, by record_id: one for a strategy, or a value of what
    was varied first."""
    names = varied_params(records)
    names.sort(key=lambda name: name != "strategy")
    first = next(iter(names), "")
    colors: dict[str | None, str] = {}
    of_records = {}
    for record in records:
        value = project(record).params.get(first)
        if value not in colors:
            colors[value] = PALETTE[len(colors) % len(PALETTE)]
        of_records[record.record_id] = colors[value]
    return of_records


def view_state(records: Sequence[Record]) -> dict[str, Any]:
    """Return the state of a page with every run: its validity, its figures, and what differs."""
    measured: set[str] = set()
    for record in records:
        measured |= record.metrics.keys()
    figures = [name for name in (*BEST_FIGURES, "comm/busbw_gb_per_s") if name in measured]
    if BEST_FIGURES[0] not in measured:
        firsts = dict.fromkeys(filter(None, map(first_metric, records)))
        figures = list(firsts)[:MOST_PARAMS] or figures or [BEST_FIGURES[0]]
    params = varied_params(records)
    columns = ["tags.`validity`", *[f"metrics.`{name}`" for name in figures]]
    columns += [f"params.`{name}`" for name in params]
    columns.append("tags.`transport`")
    widths = {NAME_COLUMN: NAME_WIDTH}
    for name in columns:
        widths[name] = 7 * len(name)
    cards: list[dict[str, Any]] = []
    for name in figures[:MOST_CHARTS]:
        cards.append({"type": "BAR", "metricKey": name})
    if params:
        axes = {"selectedParams": params, "selectedMetrics": figures[:3], "showAllRuns": True}
        cards.append({"type": "PARALLEL", **axes})
    for index, card in enumerate(cards):
        card |= {"uuid": f"chart{index}", "metricSectionId": "Runs"}
    section = {"uuid": "Runs", "name": "Runs", "columns": 2, "display": True}
    return {
        # not those that were interrupted
        "searchFilter": "tags.`ringside.kind` = 'cell' AND attributes.status != 'KILLED'",
        "orderByKey": f"metrics.`{figures[0]}`",
        "orderByAsc": False,
        "selectedColumns": columns,
        "columnOrder": list(widths),
        "columnWidths": widths,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": cards,
        "compareRunSections": [section],
        "isAccordionReordered": True,
    }


def page_of(experiment: str) -> str:
    """Return the page of an experiment's runs, below the address of a server."""
    view = f"workflowType=machine_learning&viewStateShareKey={VIEW_ID}"
    return f"/#/experiments/{experiment}/runs?{view}"
