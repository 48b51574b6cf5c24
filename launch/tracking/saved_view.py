"""What MLflow shows of an experiment: a saved view with the figures that matter, and the metrics with their units.

A saved view of MLflow's pages (3.16 and later) is a tag of the experiment, `mlflow.sharedViewState.<id>`:
JSON with a name and the packed state of the page. An address with `viewStateShareKey=<id>` opens it.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.report.cell_numbers import first_metric
from benchmarks.record import Record
from benchmarks.record.metrics import known, place
from conf.cell import counted
from launch.tracking.mlflow_run import NOTE, milliseconds, project
from launch.tracking.sweep_run import BEST_FIGURES

VIEW_ID = "ringside-cells"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_ID}"
NOTE_LENGTH = 4500  # characters; MLflow's tags of an experiment have 5000
MOST_PARAMS, MOST_CHARTS = 6, 6
NAME_WIDTH = 290  # pixels: `resnet50 · nccl_allreduce · gpus 0,1` fits
# Parameters that follow from others, or from the machine: they have no column.
NO_COLUMN = ("world_size", "repeat", "seed", "image_size", "model.")
# A description that begins so may be replaced; a user's own stays.
WRITTEN_BY = "Written by Ringside: a run for each cell, below a run for each sweep."
State = dict[str, Any]


def experiment_tags(records: Sequence[Record], existing: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of an experiment with these records: the view, and the description of its metrics."""
    packed = base64.b64encode(zlib.compress(json.dumps(view_state(records)).encode(), 9)).decode()
    view = {
        "name": "Ringside: cells, fastest first",
        "createdAt": min(milliseconds(record.started_at) for record in records),
        "state": f"deflate;{packed}",
    }
    tags = {"mlflow.experimentKind": "custom_model_development", VIEW_TAG: json.dumps(view)}
    if existing.get(NOTE, WRITTEN_BY).startswith(WRITTEN_BY):
        tags[NOTE] = description(records)
    return tags


def view_state(records: Sequence[Record]) -> State:
    """Return the state of a page with every cell, the fastest first: its figures, and what differs."""
    runs = [project(record) for record in records]
    metric_names = {name for record in records for name in record.metrics}
    figures = [name for name in (*BEST_FIGURES, "comm/busbw_gb_per_s") if name in metric_names]
    if BEST_FIGURES[0] not in metric_names:
        first_metrics = dict.fromkeys(filter(None, map(first_metric, records)))
        figures = list(first_metrics)[:MOST_PARAMS] or figures or [BEST_FIGURES[0]]
    params = _differing([run.params for run in runs])
    columns = [
        *(f"metrics.`{name}`" for name in figures),
        "tags.`validity`",
        *(f"params.`{name}`" for name in params),
        "tags.`transport`",
    ]
    name_column = "attributes.`Run Name`"
    series = dict.fromkeys(name for run in runs for name, _, _, step in run.metrics if step > 0)
    charts: list[tuple[str, State]] = [
        ("Cells", {"type": "BAR", "metricKey": name}) for name in figures[:MOST_CHARTS]
    ]
    for name in list(series)[:MOST_CHARTS]:
        line = {"metricKey": name, "xAxisKey": "step", "yAxisKey": "metric", "range": {}}
        charts.append(("Within each run", {"type": "LINE", **line}))
    if params:
        axes = {"selectedParams": params, "selectedMetrics": figures[:3], "showAllRuns": True}
        charts.append(("What each setting gives", {"type": "PARALLEL", **axes}))
    return {
        "searchFilter": "tags.`ringside.kind` = 'cell'",
        "orderByKey": f"metrics.`{figures[0]}`",
        "orderByAsc": False,
        "selectedColumns": columns,
        "columnOrder": [name_column, *columns],
        "columnWidths": {name_column: NAME_WIDTH} | {name: 7 * len(name) for name in columns},
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": [
            {**card, "uuid": f"chart{number}", "metricSectionId": section}
            for number, (section, card) in enumerate(charts)
        ],
        "compareRunSections": [
            {"uuid": name, "name": name, "columns": 2, "isReordered": True, "display": True}
            for name in dict.fromkeys(section for section, _ in charts)
        ],
        "isAccordionReordered": True,
    }


def _differing(params: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of the parameters in which runs differ; an absent one is another value."""
    differing = []
    for name in dict.fromkeys(name for own in params for name in own):
        values = {own.get(name) for own in params}
        if len(values) > 1 and not name.startswith(NO_COLUMN):
            differing.append(name)
    return differing[:MOST_PARAMS]


def description(records: Sequence[Record]) -> str:
    """Return a table of the metrics of these records in Markdown: title, unit, which way is better."""
    things = counted(record.cell for record in records)
    names = {name for record in records for name in (*record.metrics, *record.series)}
    better = {None: "", True: "less is better", False: "more is better"}
    text = f"{WRITTEN_BY}\n\n| metric | what it is | unit | |\n| --- | --- | --- | --- |\n"
    for name in sorted(names, key=place):
        metric = known(name)
        if metric is None:
            continue
        entry = metric.of(things)
        unit = "share of 1" if entry.unit == "%" else entry.unit
        line = f"| {name} | {entry.title} | {unit} | {better[entry.less_is_better]} |\n"
        if len(text) + len(line) < NOTE_LENGTH:
            text += line
    return text
