"""Write the records of a study that MLflow's store lacks, and compare what the store has with the records.

Both can be repeated at any time. `compare` writes nothing: a store that does not exist is not made.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from launch.tracking.mlflow_run import NOTE, RECORD, MlflowRun, project, valid_records
from launch.tracking.sweep_run import default_params
from launch.tracking.tracker import COMPLETE, KIND, PROJECTED, Tracker, experiment_name, search_runs

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

ABSENT = "absent"
# Of the next run, which follows the noise floor of every study at that time; and samples of the machine.
NOT_COMPARED = ("throughput/ci_", "system/")


@dataclass(frozen=True)
class SyncReport:
    """How many records `sync` wrote, found or could not read."""

    projected: int  # records written now
    already: int  # records that the store had
    unreadable: list[str]  # a sentence for each record that could not be read


def sync(study_dir: Path, tracking: Tracking | None = None) -> SyncReport:
    """Write every record of `<output_dir>/<study>` that is not in the store yet, and values that changed.

    Raises:
        ValueError: `study_dir` is no folder with records.
        TrackingUnavailable: as Tracker.open.
    """
    study_dir = study_dir.absolute()
    folders: dict[str, CellFolder] = {}
    records: list[Record] = []
    unreadable: list[str] = []
    _refuse_no_study(study_dir)
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
    tracker = Tracker.open(tracking or Tracking(), study_dir.parent, study_dir.name)
    complete = tracker.complete_records()
    values = values_of(records, of_other_studies(study_dir))
    projected = 0
    for own in _by_sweep(records).values():
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


def _by_sweep(records: list[Record]) -> dict[str, list[Record]]:
    sweeps: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        sweeps[record.sweep_id].append(record)
    return sweeps


@dataclass(frozen=True)
class StoreDifference:
    """One value of a run that the record has otherwise."""

    record: str  # the record's id
    field: str
    stored: Any
    recorded: Any


@dataclass
class StoreComparison:
    """What came of all runs of a study."""

    uri: str
    runs: int = 0
    values: int = 0
    missing: list[str] = field(default_factory=list)  # ids of records without a complete run
    unknown: list[str] = field(default_factory=list)  # ids that runs name and no record has
    differences: list[StoreDifference] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether the store says of every run what its record says."""
        return not self.differences and not self.unknown


def compare(study_dir: Path, tracking: Tracking) -> StoreComparison:
    """Compare every complete run of a study with its record, as `sync` writes it now.

    Raises:
        ValueError: the folder holds no record.
        WrongUri: there is no such store or experiment.
        TrackingUnavailable: the store cannot be read.
    """
    study_dir = study_dir.absolute()
    _refuse_no_study(study_dir)
    records = valid_records(read_study(study_dir)[0])
    uri = store.store_uri(tracking.uri, study_dir.parent)
    file, result = store.sqlite_file(uri), StoreComparison(without_credentials(uri))
    if file is not None and not file.exists():
        choices = "give its URI, or write it by python -m launch sync"
        raise store.WrongUri(f"{result.uri}: there is no such store; {choices}")
    values = values_of(records)
    defaults = default_params(records)
    expected: dict[str, dict[str, Any]] = {}
    for record in records:
        record_id = record.record_id
        own_values = values.get(record_id, {})
        expected[record_id] = _recorded_fields(project(record), own_values, defaults[record_id])
    with store.tracking_errors(uri):
        store.silence_mlflow()
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        name = experiment_name(tracking, study_dir.name)
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise store.WrongUri(f"{result.uri}: has no experiment {name}")
        search = f"tags.`{KIND}` = 'cell' AND tags.`{PROJECTED}` = '{COMPLETE}'"
        runs = {
            run.data.tags.get(RECORD, ""): run
            for run in search_runs(client, [experiment.experiment_id], search)
        }
        result.unknown = [record_id for record_id in runs if record_id not in expected]
        for record_id, recorded in expected.items():
            if record_id not in runs:
                result.missing.append(record_id)
                continue
            result.runs += 1
            stored = _stored_fields(runs[record_id], recorded, client)
            for field_name in sorted({*stored, *recorded}):
                pair = stored.get(field_name, ABSENT), recorded.get(field_name, ABSENT)
                result.values += 1
                if pair[0] != pair[1]:
                    result.differences.append(StoreDifference(record_id, field_name, *pair))
    return result


def _recorded_fields(
    content: MlflowRun, values: Mapping[str, float], defaults: Mapping[str, str]
) -> dict[str, Any]:
    """Return {field: value} that the run of a record has: name, status, params, tags, metrics, series."""
    fields: dict[str, Any] = {"name": content.name, "status": content.status}
    for name, text in {**defaults, **content.params}.items():
        fields[f"params {name}"] = text
    for name, text in content.tags.items():
        if name != NOTE:  # a user may write there
            fields[f"tags {name}"] = text
    series = {name for name, _, _, step in content.metrics if step > 0}
    for name, value, _, step in content.metrics:
        fields[f"metrics {name}"] = value
        if name in series:
            fields[f"series {name} step {step}"] = value
    for name in OF_SEVERAL_RECORDS:
        fields.pop(f"metrics {name}", None)
        if math.isfinite(values.get(name, math.nan)):
            fields[f"metrics {name}"] = float(values[name])
    return fields


def _stored_fields(
    run: "Run", recorded: Mapping[str, Any], client: "MlflowClient"
) -> dict[str, Any]:
    """Return the same of a run in the store; of its tags those that the record gives it."""
    fields: dict[str, Any] = {"name": run.info.run_name, "status": run.info.status}
    for name, text in run.data.params.items():
        fields[f"params {name}"] = text
    for name, text in run.data.tags.items():
        if f"tags {name}" in recorded:
            fields[f"tags {name}"] = text
    for name, value in run.data.metrics.items():
        if name.startswith(NOT_COMPARED):
            continue
        fields[f"metrics {name}"] = value
        if any(field_name.startswith(f"series {name} step ") for field_name in recorded):
            for point in client.get_metric_history(run.info.run_id, name):
                fields[f"series {name} step {point.step}"] = point.value
    return fields
