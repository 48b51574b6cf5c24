"""Read and make the content of `noise_floor.json`, which stands in output_dir beside the studies.

It has a row for each study, group and metric, so that a study that is read again counts once. The launching process writes
it when a sweep ends (launch.study.noise_floor).
"""

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from analysis.findings.next_run.floors import FloorGroup, Scatter, Scatters
from benchmarks.record.own_files import open_to_read

FILE = "noise_floor.json"
VERSION = 1
MOST_RUNS = 2**53  # above it is no count of runs


def floors_of(path: Path) -> dict[str, Scatters]:
    """Return {study: what it showed} of a noise_floor.json; empty where there is none. A damaged row counts for nothing.

    Raises:
        OSError, ValueError: it cannot be read, or is none that this version knows.
    """
    if not path.exists():
        return {}
    try:
        with open_to_read(path) as file:
            content = json.loads(file.read().decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is no noise floor: its JSON is nested too deep") from None
    version, studies = (content.get(name) if isinstance(content, dict) else None for name in ("version", "studies"))
    if version != VERSION or not isinstance(studies, dict):
        raise ValueError(f"{path} is no noise floor that this version can read (version={version!r})")
    return {study: dict(_rows(rows)) for study, rows in studies.items() if isinstance(rows, list)}


def _rows(rows: Sequence[Any]) -> Iterator[tuple[tuple[FloorGroup, str], Scatter]]:
    for row in rows:
        try:
            fields = dict(row)
            metric, runs, freedom, squares = (fields.pop(name) for name in ("metric", "runs", "freedom", "squares"))
            group = FloorGroup(**fields)
            types = [type(one) for one in (*group, metric, runs, freedom)]
            squares = float(squares) if type(squares) is int else squares
        except (TypeError, ValueError, KeyError, OverflowError):
            continue
        right = types == [*FloorGroup.__annotations__.values(), str, int, int] and type(squares) is float
        if right and 0 < freedom < runs < MOST_RUNS and 0 <= squares < math.inf:
            yield (group, metric), Scatter(runs, freedom, squares)


def of_other_studies(folder: Path, without: Collection[str] = ()) -> Scatters:
    """Return what the other studies beside a study's folder showed; nothing where the file cannot be read.

    `without` are names of studies that are left out too.
    """
    folder, pooled = folder.absolute(), defaultdict[tuple[FloorGroup, str], Scatter](Scatter)
    try:
        studies = floors_of(folder.parent / FILE)
    except (OSError, ValueError):
        return {}
    for study, rows in studies.items():
        for key, scatter in rows.items() if study != folder.name and study not in without else ():
            pooled[key] += scatter
    return pooled


def as_json(studies: Mapping[str, Scatters]) -> dict[str, Any]:
    """Return the content of noise_floor.json."""
    rows = {
        study: [{**group._asdict(), "metric": metric, **asdict(scatter)} for (group, metric), scatter in shown.items()]
        for study, shown in studies.items()
    }
    return {"version": VERSION, "studies": rows}
