"""Write the records of a study that MLflow's store lacks. It can be repeated at any time."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from analysis.findings.record_values import values_of
from analysis.study.noise_floor import of_other_studies
from benchmarks.record import CellFolder, Record, RecordError, read, record_paths
from conf.schema import Tracking
from launch.study.background import REPORT
from launch.study.identity import sweep_of
from launch.tracking.mlflow_run import project
from launch.tracking.tracker import Tracker


@dataclass(frozen=True)
class SyncReport:
    """How many records `sync` wrote, found or could not read."""

    projected: int  # records written now
    already: int  # records that the store had
    unreadable: list[str]  # a sentence for each record that could not be read


def sync(study_dir: Path, tracking: Tracking | None = None) -> SyncReport:
    """Write every record of a study that is not in the store yet, and values that changed.

    Runs of launchers that died are closed.

    Raises:
        ValueError: `study_dir` is no folder with records.
        TrackingUnavailable: as Tracker.open.
    """
    study_dir = study_dir.absolute()
    paths = list(record_paths(study_dir))
    if not paths:
        raise ValueError(f"{study_dir}: no folder of a study (it has no cell with a record.json)")
    folders: dict[str, CellFolder] = {}
    records: list[Record] = []
    unreadable: list[str] = []
    for path in paths:
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
    records.sort(key=Record.order)
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
