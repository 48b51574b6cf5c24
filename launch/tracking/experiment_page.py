"""What MLflow shows of an experiment: views with the figures that matter, and a description of the metrics with their units.

A saved view of MLflow's pages (3.16 and later) is a tag of the experiment, `mlflow.sharedViewState.<id>`: JSON with a name and
the state of the page. An address with `viewStateShareKey=<id>` opens it, and the menu "Views" lists it. Without a view
the table of runs has no column of figures, the cells are hidden below their sweep, and charts come by their names.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from analysis.report.cell_numbers import first_metric
from benchmarks.record import Record
from benchmarks.record.metrics import known, place
from conf.cell import counted
from launch.tracking.projection import milliseconds, project
from launch.tracking.run_tags import KIND, NOTE
from launch.tracking.siblings import BEST_CELL, OF_BEST

CELLS, SWEEPS = "ringside-cells", "ringside-sweeps"  # ids of the views
VIEW = "mlflow.sharedViewState."
MOST_COLUMNS, MOST_CHARTS = (
    6,
    6,
)  # parameters that have a column, charts of a section: a tag takes 5000 characters
NAME_WIDTH = 290  # pixels: `resnet50 · nccl_allreduce · gpus 0,1` fits
OF_CELLS = (*OF_BEST, "comm/busbw_gb_per_s")
OF_SWEEPS = (
    "best/images_per_second",
    "best/efficiency",
    "best/exposed_ms",
    "baseline/images_per_second",
)
COUNTS = ("cells/valid", "cells/suspect", "cells/invalid", "cells/failed")
MACHINE = ("gpu", "driver", "nccl", "torch", "commit", "host")
# What follows from other parameters, or from the machine: no column of its own.
FOLLOWING = ("world_size", "repeat", "seed", "image_size", "model.")
ABOUT = "Written by Ringside: a run for each cell, below a run for each sweep."  # a note that begins so may be replaced
TAG_LENGTH, NOTE_LENGTH = 5000, 4500  # characters; of a tag of an experiment
MOST_COMPARED = 50  # runs: a link with more of them is too long for the note
State = dict[str, Any]
# What pages before 3.16 do not add themselves.
OF_OLDER_PAGES: State = {
    "runsExpanded": {}, "runsPinned": [], "runsHidden": [], "runsVisibilityMap": {}, "groupBy": None, "groupsExpanded": {},
    "useGroupedValuesInCharts": True, "hideEmptyCharts": True, "autoRefreshEnabled": True, "globalLineChartConfig": {},
}  # fmt: skip


def tags(records: Sequence[Record], before: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of an experiment with these records; `before` are those that it has. A user's own description stays."""
    if not records:
        return {}
    began = min(milliseconds(record.started_at) for record in records)
    own = before.get(NOTE, "")
    found = {
        VIEW + CELLS: _saved("Ringside: cells, fastest first", cells_view(records), began + 1),
        VIEW + SWEEPS: _saved("Ringside: sweeps, newest first", sweeps_view(), began),
    }
    return found | ({NOTE: description(records)} if not own or own.startswith(ABOUT) else {})


def cells_view(records: Sequence[Record]) -> State:
    """Return the state of a page with every cell, the fastest first: its figures, and what differs between the cells."""
    names = dict.fromkeys(name for record in records for name in record.metrics)
    figures = [name for name in OF_CELLS if name in names or name in OF_BEST[:1]]
    others = dict.fromkeys(name for record in records if (name := first_metric(record)))
    if not names.keys() & OF_CELLS[:1]:
        figures = list(others)[:MOST_COLUMNS] or figures
    varied = _varied(records)
    series = dict.fromkeys(
        row[0]
        for record in records
        for row in project(record).metrics
        if row[3] > 0 and not row[0].startswith("system/")
    )
    columns = [
        *(_column("metrics", name) for name in figures),
        _column("tags", "validity"),
        *(_column("params", name) for name in varied),
        _column("tags", "transport"),
    ]
    charts = {
        "Cells": [_bar(name) for name in figures],
        "Within each run": [_line(name) for name in series],
    }
    if varied:
        charts["What each setting gives"] = [_parallel(varied, figures[:3])]
    return _state("cell", _column("metrics", figures[0]), columns, charts)


def sweeps_view() -> State:
    """Return the state of a page with every sweep, the newest first: its best cell, verdicts and machine."""
    columns = [
        *(_column("metrics", name) for name in (*OF_SWEEPS[:3],)),
        _column("tags", BEST_CELL),
        *(_column("metrics", name) for name in (*OF_SWEEPS[3:], *COUNTS)),
        *(_column("tags", name) for name in MACHINE),
    ]
    return _state(
        "sweep", "attributes.start_time", columns, {"Sweeps": [_bar(name) for name in OF_SWEEPS]}
    )


def description(records: Iterable[Record]) -> str:
    """Return what the metrics of these records are, in Markdown: title, unit, and which way is better."""
    records = list(records)
    things = counted(record.cell for record in records)
    names = sorted(
        {name for record in records for name in (*record.metrics, *record.series)}, key=place
    )
    better = {None: "", True: "less is better", False: "more is better"}
    lines = [ABOUT, "", "| metric | what it is | unit | |", "| --- | --- | --- | --- |"]
    for name in names:
        if found := known(name):
            entry = found.of(things)
            unit = "share of 1" if entry.unit == "%" else entry.unit
            lines.append(f"| {name} | {entry.title} | {unit} | {better[entry.less_is_better]} |")
    text = ""
    for line in lines:
        if len(text) + len(line) < NOTE_LENGTH:
            text += line + "\n"
    return text


def compare_link(experiment: str, runs: Sequence[str]) -> str:
    """Return a paragraph of Markdown that links the page which compares runs; empty for a single run or too many."""
    if not 1 < len(runs) <= MOST_COMPARED:
        return ""
    asked = urlencode({"runs": json.dumps(list(runs)), "experiments": json.dumps([experiment])})
    return f"[Compare these cells](#/compare-runs?{asked})\n\n"


def _varied(records: Sequence[Record]) -> list[str]:
    """Return the names of the parameters in which the records differ; one that a record lacks is another value."""
    params = [project(record).params for record in records]
    every = dict.fromkeys(
        name for of_run in params for name in of_run if not name.startswith(FOLLOWING)
    )
    return [name for name in every if len({of_run.get(name) for of_run in params}) > 1][
        :MOST_COLUMNS
    ]


def _column(kind: str, name: str) -> str:
    """Return how MLflow's pages name a column."""
    return f"{kind}.`{name}`"


def _state(
    kind: str, order: str, columns: Sequence[str], charts: Mapping[str, Sequence[State]]
) -> State:
    shown = list(
        enumerate((title, cards[:MOST_CHARTS]) for title, cards in charts.items() if cards)
    )
    names = [
        {"uuid": f"s{place}", "name": title, "columns": min(2, len(cards))}
        for place, (title, cards) in shown
    ]
    run_name = _column("attributes", "Run Name")
    return {
        "searchFilter": f"tags.`{KIND}` = '{kind}'",
        "orderByKey": order,
        "orderByAsc": False,
        "selectedColumns": list(columns),
        "columnOrder": [run_name, *columns],
        "columnWidths": {run_name: NAME_WIDTH, **{name: _width(name) for name in columns}},
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": [
            {**card, "uuid": f"s{place}c{number}", "metricSectionId": f"s{place}"}
            for place, (_, cards) in shown
            for number, card in enumerate(cards)
        ],
        "compareRunSections": [{**one, "isReordered": True, "display": True} for one in names],
        "isAccordionReordered": True,
    }


def _width(column: str) -> int:
    """Return the width in pixels in which the heading of a column fits, or the name of a cell."""
    name = column.split("`")[1]
    return NAME_WIDTH if name == BEST_CELL else max(90, 7 * len(name) + 20)


def _bar(metric: str) -> State:
    return {"type": "BAR", "metricKey": metric}


def _line(metric: str) -> State:
    return {
        "type": "LINE",
        "metricKey": metric,
        "xAxisKey": "step",
        "yAxisKey": "metric",
        "range": {},
    }


def _parallel(params: Sequence[str], metrics: Sequence[str]) -> State:
    return {
        "type": "PARALLEL",
        "selectedParams": list(params),
        "selectedMetrics": list(metrics),
        "showAllRuns": True,
    }


def _saved(name: str, state: State, created: int) -> str:
    """Return a view as MLflow's pages store it: `name`, `createdAt`, packed `state`. Older pages take the state beside them."""
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    saved = {"name": name, "createdAt": created, "state": f"deflate;{packed}"}
    both = json.dumps({**saved, **OF_OLDER_PAGES, **state}, separators=(",", ":"))
    return both if len(both) <= TAG_LENGTH else json.dumps(saved)
