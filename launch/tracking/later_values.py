"""Keep in the store up to date what rests on several records: a baseline that is measured later changes values of earlier cells.

The record of a cell stays as it was written. The store shows what the terminal and the report show.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.record import Kind, Record, read_lines
from launch.tracking.note import summary_markdown
from launch.tracking.siblings import parent_metrics, sound
from launch.tracking.tracker import Tracker


def update_values(
    tracker: Tracker,
    study: Path,
    records: Sequence[Record],
    values: Mapping[str, Mapping[str, float]],
) -> None:
    """Write what a study's records say together to the runs that have it otherwise; tables and figures of their sweeps follow.

    `values` is what `values_of` returns of the records.

    Raises:
        TrackingUnavailable: as every method of Tracker.
    """
    records = sound(records)
    for sweep_id, runs in tracker.outdated(values).items():
        rows = _rows(study, sweep_id, records)
        own = [record for record in records if record.sweep_id == sweep_id]
        tracker.write_values(
            sweep_id, runs, summary_markdown(rows, values), parent_metrics(own, values)
        )
    tracker.describe(records)


def _rows(study: Path, sweep_id: str, records: Sequence[Record]) -> list[Record]:
    """Return the rows of a sweep's table: cells that were finished before it, in its order, then its own records."""
    own = [record for record in records if record.sweep_id == sweep_id]
    own_cells = {record.cell_key for record in own}
    order, began = _planned(study, sweep_id)
    finished: Mapping[str, Record] = {
        record.cell.folder: record
        for record in sorted(records, key=lambda one: one.ended_at)
        if record.state == "finished"
        and record.ended_at <= began
        and record.cell_key not in own_cells
    }
    return [*(finished[folder] for folder in order if folder in finished), *own]


def _planned(study: Path, sweep_id: str) -> tuple[list[str], float]:
    """Return the folders of a sweep's cells in order, and when it began, by the study's journal; ([], 0.0) without it."""
    for line in read_lines(study / "journal.jsonl"):
        order = line.get("order")  # a damaged line may lack it
        if (
            line["kind"] == Kind.SWEEP
            and line.get("sweep_id") == sweep_id
            and isinstance(order, list)
        ):
            return [folder for folder in order if isinstance(folder, str)], float(line["time"])
    return [], 0.0
