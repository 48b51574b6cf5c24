"""Write the records of a study that MLflow's store lacks, and compare what the store has with the records.

Both can be repeated at any time. `compare` writes nothing: a store that does not exist is not made.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.findings.record_values import values_of
from analysis.study.noise_floor import OF_SEVERAL_RECORDS, of_other_studies
from benchmarks.record import CellFolder, Record, RecordError, read, read_study, record_paths
from conf.schema import Tracking
from launch.machine.secrets import without_credentials
from launch.study.background import REPORT
from launch.study.identity import sweep_of
from launch.tracking import store
from launch.tracking.mlflow_run import (
    NOTE,
    RECORD,
    MlflowRun,
    default_params,
    project,
    valid_records,
)
from launch.tracking.tracker import (
    CELLS,
    COMPLETE,
    PROJECTED,
    Tracker,
    experiment_name,
    search_runs,
)

if TYPE_CHECKING:
    from mlflow.entities import Run

ABSENT = "absent"
# Of the next run: it follows the noise floor of every study at that time. Earlier versions wrote
# samples of the machine.
NOT_COMPARED = ("throughput/ci_", "system/")


@dataclass(frozen=True)
class SyncReport:
    """How many records `sync` wrote, found or could not read."""

    projected: int  # records written now
    already: int  # records that the store had
    unreadable: list[str]  # a sentence for each record that could not be read


def sync(study_dir: Path, tracking: Tracking | None = None) -> SyncReport:
    """Write every record of `<output_dir>/<study>` that is not in the store yet, and values that changed.

    Runs of launchers that died are closed.

    Raises:
        ValueError: `study_dir` is no folder with records.
        TrackingUnavailable: as Tracker.open.
    """
    study_dir = study_dir.absolute()
    _refuse_no_study(study_dir)
    folders: dict[str, CellFolder] = {}
    records: list[Record] = []
    unreadable: list[str] = []
    for path in record_paths(study_dir):
        try:
            record = read(path)
            project(record)
        except RecordError as error:
            unreadable.append(str(error))
        except ValueError as error:
            unreadable.append(f"{path}: a damaged record ({error})")
        else:
            records.append(record)
            folders[record.record_id] = CellFolder(path.parent)
    records.sort(key=lambda record: (record.started_at, record.record_id))
    sweeps: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        sweeps[record.sweep_id].append(record)
    tracker = Tracker.open(tracking or Tracking(), study_dir.parent, study_dir.name)
    tracker.close_stale()
    complete = tracker.complete_records()
    values = values_of(records, of_other_studies(study_dir))
    projected = 0
    for own in sweeps.values():
        missing = [record for record in own if record.record_id not in complete]
        if missing:
            tracker.start_sweep(sweep_of(own))
        for record in missing:
            projected += tracker.log(record, folders[record.record_id])
        state = tracker.missing_end(own)
        if state:
            tracker.finish_sweep(sweep_of(own), own, state, values, study_dir / REPORT)
    tracker.write_study(records, values)
    return SyncReport(projected, len(records) - projected, unreadable)


def _refuse_no_study(folder: Path) -> None:
    if not list(record_paths(folder)):
        raise ValueError(f"{folder}: no folder of a study (it has no cell with a record.json)")


def compare(study_dir: Path, tracking: Tracking) -> dict[str, Any]:
    """Compare every complete run of a study with its record, as `sync` writes it now.

    Return plain JSON types: how many `runs` and `values` were compared, their `differences`, ids of
    records that are `missing` in the store, and of runs that are `unknown` to the study.

    Raises:
        ValueError: the folder holds no record.
        WrongUri: there is no such store or experiment.
        TrackingUnavailable: the store cannot be read.
    """
    study_dir = study_dir.absolute()
    _refuse_no_study(study_dir)
    records = valid_records(read_study(study_dir)[0])
    uri = store.store_uri(tracking.uri, study_dir.parent)
    shown, file = without_credentials(uri), store.sqlite_file(uri)
    if file is not None and not file.exists():
        choices = "give its URI, or write it by python -m launch sync"
        raise store.WrongUri(f"{shown}: there is no such store; {choices}")
    runs: dict[str, Run] = {}
    with store.tracking_errors(uri):
        store.silence_mlflow()
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        name = experiment_name(tracking, study_dir.name)
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise store.WrongUri(f"{shown}: has no experiment {name}")
        search = f"{CELLS} AND tags.`{PROJECTED}` = '{COMPLETE}'"
        for run in search_runs(client, experiment.experiment_id, search):
            runs[run.data.tags.get(RECORD, "")] = run
    values, defaults = values_of(records), default_params(records)
    compared = 0
    differences = []
    for record in records:
        record_id = record.record_id
        if record_id not in runs:
            continue
        own_values = values.get(record_id, {})
        recorded = _recorded_fields(project(record), own_values, defaults[record_id])
        stored = _stored_fields(runs[record_id], recorded)
        for field in sorted({*stored, *recorded}):
            compared += 1
            pair = {"stored": stored.get(field, ABSENT), "recorded": recorded.get(field, ABSENT)}
            if pair["stored"] != pair["recorded"]:
                differences.append({"record": record_id, "field": field, **pair})
    unknown = [record_id for record_id in runs if record_id not in defaults]
    return {
        "uri": shown,
        "runs": len(runs) - len(unknown),
        "values": compared,
        "missing": [record_id for record_id in defaults if record_id not in runs],
        "unknown": unknown,
        "differences": differences,
        "right": not differences and not unknown,
    }


def _recorded_fields(
    content: MlflowRun, values: Mapping[str, float], defaults: Mapping[str, str]
) -> dict[str, Any]:
    """Return {field: value} that the run of a record has; of a series its last value."""
    fields: dict[str, Any] = {"name": content.name, "status": content.status}
    for name, text in {**defaults, **content.params}.items():
        fields[f"params {name}"] = text
    for name, text in content.tags.items():
        if name != NOTE:  # a user may write there
            fields[f"tags {name}"] = text
    for name, value, _, _ in content.metrics:
        fields[f"metrics {name}"] = value
    for name in OF_SEVERAL_RECORDS:
        fields.pop(f"metrics {name}", None)
        if math.isfinite(values.get(name, math.nan)):
            fields[f"metrics {name}"] = float(values[name])
    return fields


def _stored_fields(run: "Run", recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same of a run in the store; of its tags those that the record gives it."""
    fields: dict[str, Any] = {"name": run.info.run_name, "status": run.info.status}
    for name, text in run.data.params.items():
        fields[f"params {name}"] = text
    for name, text in run.data.tags.items():
        if f"tags {name}" in recorded:
            fields[f"tags {name}"] = text
    for name, value in run.data.metrics.items():
        if not name.startswith(NOT_COMPARED):
            fields[f"metrics {name}"] = value
    return fields
