"""The saved view of an experiment that the printed address opens: cells, the fastest first.

A saved view of MLflow's pages (3.16 and later) is a tag of the experiment,
`mlflow.sharedViewState.<id>`: JSON with a name and the packed state of the page. An address with
`viewStateShareKey=<id>` opens it.
"""

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

from analysis.report.cell_numbers import first_metric
from benchmarks.record import Record
from launch.tracking.mlflow_run import BEST_FIGURES, milliseconds, project

VIEW_ID = "ringside-cells"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_ID}"
MOST_PARAMS, MOST_CHARTS = 6, 6
NAME_COLUMN = "attributes.`Run Name`"
NAME_WIDTH = 290  # pixels: `resnet50 · nccl_allreduce · gpus 0,1` fits
# Parameters that follow from others, or from the machine: they have no column.
NO_COLUMN = ("world_size", "repeat", "seed", "image_size", "model.")


def experiment_tags(records: Sequence[Record]) -> dict[str, str]:
    """Return the tags of an experiment with these records."""
    packed = base64.b64encode(zlib.compress(json.dumps(view_state(records)).encode(), 9)).decode()
    view = {
        "name": "Ringside: cells, fastest first",
        "createdAt": milliseconds(min([record.started_at for record in records])),
        "state": f"deflate;{packed}",
    }
    return {"mlflow.experimentKind": "custom_model_development", VIEW_TAG: json.dumps(view)}


def view_state(records: Sequence[Record]) -> dict[str, Any]:
    """Return the state of a page with every cell: its figures, and what differs."""
    runs = []
    measured: set[str] = set()
    names: dict[str, None] = {}
    for record in records:
        run = project(record)
        runs.append(run)
        measured |= record.metrics.keys()
        names |= dict.fromkeys(run.params)
    figures = [name for name in (*BEST_FIGURES, "comm/busbw_gb_per_s") if name in measured]
    if BEST_FIGURES[0] not in measured:
        firsts = dict.fromkeys(filter(None, map(first_metric, records)))
        figures = list(firsts)[:MOST_PARAMS] or figures or [BEST_FIGURES[0]]
    columns = [f"metrics.`{name}`" for name in figures]
    columns.append("tags.`validity`")
    params: list[str] = []
    for name in names:
        values = {run.params.get(name) for run in runs}
        if len(values) > 1 and not name.startswith(NO_COLUMN) and len(params) < MOST_PARAMS:
            params.append(name)
            columns.append(f"params.`{name}`")
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
        card |= {"uuid": f"chart{index}", "metricSectionId": "Cells"}
    section = {"uuid": "Cells", "name": "Cells", "columns": 2, "display": True}
    return {
        "searchFilter": "tags.`ringside.kind` = 'cell'",
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
