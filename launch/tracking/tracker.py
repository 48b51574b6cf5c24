"""Write records to MLflow: from the launching process, after each cell, in batches. It can be repeated at any time.

A study is an experiment, a sweep a parent run, a record a child run. Every run has the tag of what it projects
(`ringside.sweep_id`, `ringside.record_id`), so writing twice changes nothing. The tag `ringside.projected` is written last:
a child run with it is complete, any other one is completed, also one that a dead launcher left.
"""

import contextlib
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from analysis.text import single_line
from benchmarks.record import CellFolder, Record
from conf.cell import Cell
from conf.schema import Tracking
from launch.machine.secrets import without_credentials
from launch.study.identity import ProcessIdentity, Sweep, sweep_of
from launch.tracking import experiment_page, run_tags, siblings
from launch.tracking.experiment import ACTIVE_ONLY, ALL, Experiment
from launch.tracking.note import cut_to
from launch.tracking.projection import (
    NAME_LENGTH,
    STATUS,
    TAG_LENGTH,
    Projection,
    identifier,
    milliseconds,
    project,
)
from launch.tracking.run_tags import COMPLETE, KIND, NOTE, PROJECTED, RECORD, SWEEP, TABLED
from launch.tracking.store import (
    ARTIFACTS,
    check_writable,
    connect,
    sqlite_file,
    store_lock,
    store_uri,
    tracking_errors,
)
from launch.tracking.system_series import Row, system_series

if TYPE_CHECKING:
    from mlflow.entities import Run

ARTIFACT_LIMIT = (
    16 << 20
)  # bytes of one file; a larger one stays in the cell's folder and is named in a tag
BATCH = 800  # metrics that are written at once: MLflow takes 1000 of metrics, parameters and tags together


class Tracker:
    """Writes the records of one study to its store. Every method may raise TrackingUnavailable."""

    def __init__(self, uri: str, output_dir: Path, experiment: str) -> None:
        """Open the store. Use `Tracker.open`."""
        self._uri, self._file = uri, sqlite_file(uri)
        self._parents: dict[str, str] = {}  # sweep_id: run_id
        artifacts = output_dir.absolute() / ARTIFACTS
        # The lock lies beside the store: launchers with other output folders share it.
        self._lock = (
            self._file.with_name(f".{self._file.name}.lock")
            if self._file
            else output_dir / ".mlflow.lock"
        )
        with tracking_errors(uri), store_lock(self._lock):
            self._client = connect(uri, artifacts)
            served = uri.lower().startswith(("http", "databricks"))
            self._own = Experiment(self._client, experiment, None if served else artifacts.as_uri())
            self._own.close_stale()
        self._experiment = self._own.id

    @staticmethod
    def open(tracking: Tracking, output_dir: Path, study: str) -> "Tracker":
        """Return the open store; make it and the experiment if they are missing, and close what dead launchers left.

        Raises:
            WrongUri: `tracking.uri` cannot be one.
            TrackingUnavailable: it cannot be reached or written. This is known within about 30 s (60 s if another launcher
                holds the lock); the message is one sentence without credentials.
        """
        uri = store_uri(tracking.uri, output_dir)
        return Tracker(
            uri, output_dir, single_line(tracking.experiment or f"ringside/{study}", 500)
        )

    @property
    def uri(self) -> str:
        """The address of the store, for people: credentials removed."""
        return without_credentials(self._uri)

    @property
    def page(self) -> str:
        """The page of the experiment's cells, which follows the address that `mlflow ui` prints: its first page shows no run."""
        return f"/#/experiments/{self._experiment}/runs?workflowType=machine_learning&viewStateShareKey={experiment_page.CELLS}"

    def describe(self, records: Sequence[Record]) -> None:
        """Give the experiment its views and its description, and runs their short names, by all records of the study."""
        names, left_alone = siblings.names(records), siblings.left_alone(records)
        with self._writing():
            for run in self._own.runs(f"tags.`{KIND}` = 'cell'"):
                own = run.data.tags.get(RECORD, "")
                if own in names and run_tags.is_complete(run):
                    if left_alone[own].keys() - run.data.params.keys():
                        self._log(run, [], left_alone[own], {})
                    if run.info.run_name != names[own]:
                        self._client.update_run(run.info.run_id, name=names[own])
            self._own.set_tags(experiment_page.tags(records, self._own.tags()))

    def start_sweep(self, sweep: Sweep) -> None:
        """Make the parent run, with the status RUNNING, unless the store has it."""
        identifier(sweep.sweep_id)
        with self._writing():
            self._parents[sweep.sweep_id] = self._parent(sweep).info.run_id

    def log(self, record: Record, folder: CellFolder) -> bool:
        """Write the child run of a record, with the artifacts of its folder.

        Returns:
            Whether anything was written: a complete run is left as it is.

        Raises:
            ValueError, TypeError, AttributeError, KeyError: the record is damaged.
        """
        projection = project(record)
        with self._writing():
            found = self._own.find(RECORD, record.record_id, "cell", ALL)
            if found is not None and run_tags.is_complete(found):
                return False
            if record.sweep_id not in self._parents:
                self._parents[record.sweep_id] = self._parent(sweep_of([record])).info.run_id
            self._write(found, projection, self._parents[record.sweep_id], folder, record.cell)
            return True

    def finish_sweep(
        self,
        sweep: Sweep,
        records: list[Record],
        state: str,
        note_markdown: str,
        report: Path | None = None,
        values: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> None:
        """Close the parent run with its figures, its table and its report.

        Args:
            sweep: the sweep.
            records: what the table shows; those of other sweeps (cells resumed from them) are not counted.
            state: finished, failed (a cell failed) or interrupted.
            note_markdown: the table; beyond MLflow's 8000 characters it is cut, and whole in the artifact summary.md.
            report: a folder that becomes the artifact `report`.
            values: those that need several records, by record id.
        """
        own = [record for record in records if record.sweep_id == sweep.sweep_id]
        ended = milliseconds(max([record.ended_at for record in own], default=sweep.started_at))
        counts = {state: sum(record.state == state for record in own) for state in STATUS}
        invalid = sum(record.state == "finished" and not record.usable for record in own)
        said = [f"{count} {state}" for state, count in counts.items() if count]
        tags = {
            **siblings.parent_tags(own),
            "cells": ", ".join(said) + (f" ({invalid} of them invalid)" if invalid else ""),
            TABLED: str(len(own)),
            PROJECTED: COMPLETE,
            "state": state,
        }
        figures = [
            (name, value, ended, 0) for name, value in siblings.parent_metrics(own, values).items()
        ]
        with self._writing():
            parent = self._parent(sweep)
            run_id = parent.info.run_id
            self._client.log_text(run_id, note_markdown, "summary.md")
            if report is not None and report.is_dir():
                self._client.log_artifacts(run_id, str(report), "report")
            tags |= self._note(sweep.sweep_id, note_markdown)
            self._log(parent, figures, siblings.parent_params(own), tags)
            self._client.set_terminated(run_id, STATUS[state], ended)

    def outdated(
        self, values: Mapping[str, Mapping[str, float]]
    ) -> dict[str, dict[str, dict[str, float]]]:
        """Return the complete child runs that lack a value of `values`, {record_id: {metric: value}}, or have another.

        Returns {sweep_id: {run_id: {metric: value}}} with the values to write.
        """
        found: dict[str, dict[str, dict[str, float]]] = {}
        with tracking_errors(self._uri):
            for run in self._own.runs(f"tags.`{KIND}` = 'cell'", ACTIVE_ONLY):
                wanted = values.get(run.data.tags.get(RECORD, ""), {})
                new = {
                    name: value
                    for name, value in wanted.items()
                    if not run_tags.has(run, name, value)
                }
                if new and PROJECTED in run.data.tags:
                    found.setdefault(run.data.tags.get(SWEEP, ""), {})[run.info.run_id] = new
        return found

    def write_values(
        self,
        sweep_id: str,
        values: Mapping[str, Mapping[str, float]],
        note_markdown: str,
        figures: Mapping[str, float],
    ) -> None:
        """Give child runs of a sweep other values, {run_id: {metric: value}}; a closed parent run gets this table and figures."""
        from mlflow.entities import Metric

        identifier(sweep_id)
        now = round(
            time.time() * 1000
        )  # later than the value that the run has: MLflow shows the latest
        with self._writing():
            parent = self._own.find(SWEEP, sweep_id, "sweep", ACTIVE_ONLY)
            if parent is not None and TABLED in parent.data.tags:
                self._client.log_text(parent.info.run_id, note_markdown, "summary.md")
                new = [
                    (name, one, now, 0)
                    for name, one in figures.items()
                    if parent.data.metrics.get(name) != one
                ]
                self._log(parent, new, {}, self._note(sweep_id, note_markdown))
            for (
                run_id,
                of_run,
            ) in values.items():  # last: a run that has its values is not visited again
                metrics = [Metric(name, float(value), now, 0) for name, value in of_run.items()]
                self._client.log_batch(
                    run_id, metrics, tags=run_tags.entities(run_tags.of_values(of_run))
                )

    def written(self) -> set[str]:
        """Return the ids of the records whose runs are complete."""
        with tracking_errors(self._uri):
            runs = self._own.runs(f"tags.`{KIND}` = 'cell'", ALL)
            return {run.data.tags.get(RECORD, "") for run in runs if run_tags.is_complete(run)}

    def find_sweep(self, sweep_id: str) -> run_tags.Written | None:
        """Return the parent run of a sweep; None if the store has none, or a user deleted it."""
        identifier(sweep_id)
        with tracking_errors(self._uri):
            run = self._own.find(SWEEP, sweep_id, "sweep", ACTIVE_ONLY)
        return None if run is None else run_tags.written(run)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock of the store, which can be written."""
        with tracking_errors(self._uri), store_lock(self._lock, self._file):
            if self._file:
                check_writable(self._file)
            yield

    def _parent(self, sweep: Sweep) -> "Run":
        """Return the parent run of a sweep, made if it is missing."""
        found = self._own.find(SWEEP, sweep.sweep_id, "sweep", ACTIVE_ONLY)
        if found is not None:
            return found
        tags = {
            KIND: "sweep",
            SWEEP: sweep.sweep_id,
            "ringside.cells": str(sweep.cells),
            "ringside.overrides": single_line(shlex.join(sweep.overrides), TAG_LENGTH),
            **run_tags.process_tags(sweep.process),
        }
        return self._create(
            single_line(sweep.name, NAME_LENGTH), milliseconds(sweep.started_at), tags
        )

    def _create(self, name: str, started: int, tags: Mapping[str, str]) -> "Run":
        tags = {**tags, "mlflow.source.name": "launch.py"}
        return self._client.create_run(
            self._experiment, start_time=started, tags=tags, run_name=name
        )

    def _write(
        self, run: "Run | None", projection: Projection, parent: str, folder: CellFolder, cell: Cell
    ) -> None:
        """Make or complete a child run; the tag that says so is written last."""
        if run is None:
            ids = {name: projection.tags[name] for name in (RECORD, SWEEP)}
            # MLflow's pages show tags in the order of their writing: the verdict comes before our own.
            tags = {
                "mlflow.parentRunId": parent,
                **projection.tags,
                KIND: "cell",
                **ids,
                **run_tags.process_tags(ProcessIdentity.own()),
            }
            run = self._create(projection.name, projection.started, tags)
        run_id = run.info.run_id
        left_out = []
        for path in folder.artifacts():
            if path.stat().st_size > ARTIFACT_LIMIT:
                left_out.append(str(path.relative_to(folder.path)))
                continue
            below = path.relative_to(folder.path).parent.as_posix()
            self._client.log_artifact(run_id, str(path), None if below == "." else below)
        tags = projection.tags | (
            {"ringside.left_out": ",".join(left_out)[:TAG_LENGTH]} if left_out else {}
        )
        rows = [*projection.metrics, *system_series(folder, cell)]
        self._log(run, rows, projection.params, tags)
        self._client.set_terminated(run_id, projection.status, projection.ended)
        self._client.set_tag(run_id, PROJECTED, COMPLETE)

    def _note(self, sweep_id: str, markdown: str) -> dict[str, str]:
        """Return a sweep's note with a link above its table to the page that compares its cells."""
        cells = self._own.runs(
            f"tags.`{SWEEP}` = '{identifier(sweep_id)}' AND tags.`{KIND}` = 'cell'"
        )
        link = experiment_page.compare_link(self._experiment, [run.info.run_id for run in cells])
        return {NOTE: cut_to(link + markdown, TAG_LENGTH)}

    def _log(
        self, run: "Run", rows: Sequence[Row], params: Mapping[str, str], tags: Mapping[str, str]
    ) -> None:
        """Write rows of metrics, tags, and the parameters that a run does not have: MLflow changes none."""
        from mlflow.entities import Metric, Param

        params = {name: value for name, value in params.items() if name not in run.data.params}
        metrics, known = [Metric(*row) for row in rows], run_tags.entities(tags)
        self._client.log_batch(
            run.info.run_id, metrics[:BATCH], [Param(*item) for item in params.items()], known
        )
        for start in range(BATCH, len(metrics), BATCH):
            self._client.log_batch(run.info.run_id, metrics[start : start + BATCH])
