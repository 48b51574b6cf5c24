"""Write the records of a study that MLflow's store does not have yet; it can be repeated at any time."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from analysis.findings.record_values import values_of
from analysis.study.noise_floor import of_other_studies
from benchmarks.record import CellFolder, Record, RecordError, read, read_study, record_paths
from conf.schema import Tracking
from launch.study.background import REPORT
from launch.study.identity import sweep_of
from launch.tracking.later_values import update_values
from launch.tracking.note import summary_markdown
from launch.tracking.projection import DAMAGED
from launch.tracking.tracker import Tracker


@dataclass(frozen=True)
class SyncReport:
    """How many records `sync` wrote, found or could not read."""

    projected: int  # records written now
    already: int  # records that the store had
    unreadable: list[str]  # a sentence for each record that could not be read


def sync(study_dir: Path, tracking: Tracking | None = None) -> SyncReport:
    """Project every record of `<output_dir>/<study>` that is not in the store yet.

    Raises:
        ValueError: `study_dir` is no folder with records.
        TrackingUnavailable: as Tracker.open.
    """
    study_dir = study_dir.absolute()
    if not record_paths(study_dir):
        raise ValueError(f"{study_dir}: no folder of a study (it has no cell with a record.json)")
    records, errors = read_study(study_dir)
    folders, unreadable = _folders(study_dir), [str(error) for error in errors]
    tracker = Tracker.open(tracking or Tracking(), study_dir.parent, study_dir.name)
    written, values = tracker.written(), values_of(records, of_other_studies(study_dir))
    sweeps: dict[str, list[Record]] = {}
    for record in records:
        sweeps.setdefault(record.sweep_id, []).append(record)
    projected = already = 0
    for own in sweeps.values():
        if all(record.record_id in written for record in own):
            already += len(own)
        else:
            with contextlib.suppress(*DAMAGED):  # the damaged one is named below
                tracker.start_sweep(sweep_of(own))
            for record in own:
                try:
                    new = record.record_id not in written and tracker.log(
                        record, folders[record.record_id]
                    )
                    projected, already = projected + new, already + (not new)
                except DAMAGED as error:
                    unreadable.append(
                        f"{folders[record.record_id].record}: a damaged record ({error})"
                    )
        with contextlib.suppress(*DAMAGED):
            _close(tracker, own, study_dir / REPORT, values)
    update_values(tracker, study_dir, records, values)
    return SyncReport(projected, already, unreadable)


def _close(
    tracker: Tracker, records: list[Record], report: Path, values: Mapping[str, Mapping[str, float]]
) -> None:
    """Write the table of a sweep and the study's report, unless the store has them or another process is writing them."""
    sweep = sweep_of(records)
    found = tracker.find_sweep(sweep.sweep_id)
    if found is None or found.at_work or found.records == len(records):
        return
    state = "failed" if any(record.state == "failed" for record in records) else "finished"
    cut_short = found.planned is not None and found.planned > len(records)
    if (
        cut_short
        or found.status == "KILLED"
        or any(record.state == "interrupted" for record in records)
    ):
        state = "interrupted"
    tracker.finish_sweep(sweep, records, state, summary_markdown(records, values), report, values)


def _folders(study_dir: Path) -> dict[str, CellFolder]:
    """Return the folder of each readable record, by record id."""
    folders = {}
    for path in record_paths(study_dir):
        with contextlib.suppress(RecordError):
            folders[read(path).record_id] = CellFolder(path.parent)
    return folders
