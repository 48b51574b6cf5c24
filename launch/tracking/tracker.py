"""Write records to MLflow: from the launching process, after each cell.

A study is an experiment, a sweep a parent run, a record a child run. Every run has the tag of what
it shows (`ringside.sweep_id`, `ringside.record_id`), so writing twice changes nothing. The tag
`ringside.projected` is written last: a run without it is completed, also one that a dead launcher
left. Values that need other records are written when a sweep ends, and by `sync`. A store that
fails costs no measurement.
"""

import math
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from analysis.findings.baselines import EFFICIENCY, Efficiency
from analysis.findings.communication import values_of
from analysis.study import asked
from analysis.study.noise_floor import OF_SEVERAL_RECORDS, of_other_studies
from analysis.text import single_line
from benchmarks.record import CellFolder, Record, RecordError, read, record_paths
from benchmarks.record.safe_files import because
from conf.schema import Tracking
from conf.secrets import without_credentials
from launch.study.background import REPORT, BackgroundQueue
from launch.study.study_folder import ProcessIdentity, StudyFolder, Sweep, sweep_of
from launch.tracking import mlflow_run, store
from launch.tracking.mlflow_run import NOTE, RECORD, SWEEP, TAG_LENGTH, Row, Values, milliseconds
from launch.tracking.store import TrackingUnavailable

if TYPE_CHECKING:
    from mlflow.entities import Run


PROJECTED, KIND = "ringside.projected", "ringside.kind"
CELLS = f"tags.`{KIND}` = 'cell'"
COMPLETE = "2"  # the value of PROJECTED; "true" was an earlier version's, whose runs lack tags
EFFICIENCY_OF = "efficiency.of"  # the GPUs that the efficiency is against: GPU 0, or every GPU
PLANNED, TABLED = "ringside.cells", "ringside.records"  # of a sweep; records in its table
ARTIFACT_LIMIT = 16 << 20  # bytes of one file; a larger one is named in a tag instead
START = "attributes.start_time"
REFUSED = "INVALID_PARAMETER_VALUE"  # MLflow's error code: the record is wrong, not the store
RECORDS = 50  # that `sync` writes while it holds the store's lock
BATCH = 800  # metrics: MLflow takes 1000 of metrics, parameters and tags together
PAGE = 1000  # runs of one answer
ACTIVE_ONLY, ALL = 1, 3  # mlflow.entities.ViewType


class Tracker:
    """Writes the records of one study to its store. Every method may raise TrackingUnavailable."""

    def __init__(self, tracking: Tracking, output_dir: Path, study: str) -> None:
        """Open the store; make it and the experiment if they are missing.

        Raises:
            WrongUri: `tracking.uri` cannot be one.
            TrackingUnavailable: it cannot be reached or written. This is known within about 30 s
                (60 s if another launcher holds the lock).
        """
        self._uri = uri = store.store_uri(tracking.uri, output_dir)
        experiment = experiment_name(tracking, study)
        self._parents: dict[str, str] = {}  # {sweep_id: run_id}
        artifacts = output_dir.absolute() / store.ARTIFACTS
        self._lock = output_dir / ".mlflow.lock"
        file = store.sqlite_file(uri)
        if file is not None:  # beside the store: launchers with other output folders share it
            self._lock = file.with_name(f".{file.name}.lock")
        with store.tracking_errors(uri), store.store_lock(self._lock):
            self._client = store.connect(uri, artifacts)
            existing = self._client.get_experiment_by_name(experiment)
            if existing is None:
                location: str | None = artifacts.as_uri()
                if uri.lower().startswith(("http", "databricks")):  # a server keeps them
                    location = None
                self._experiment = str(
                    self._client.create_experiment(experiment, artifact_location=location)
                )
            elif existing.lifecycle_stage != "active":
                choices = "restore it or choose another tracking.experiment"
                raise ValueError(f"experiment {experiment!r} is deleted there: {choices}")
            else:
                self._experiment = str(existing.experiment_id)

    def start_sweep(self, sweep: Sweep) -> None:
        """Make the parent run, with the status RUNNING, unless the store has it."""
        mlflow_run.check_identifier(sweep.sweep_id)
        with store.writing(self._uri, self._lock):
            self._parents[sweep.sweep_id] = self._parent(sweep).info.run_id

    def log(
        self,
        records: Sequence[Record],
        folder_of: Callable[[Record], CellFolder],
        values: Values = MappingProxyType({}),
    ) -> tuple[int, list[str]]:
        """Write the child runs of records, with the artifacts of their folders.

        A complete run is left as it is. `values` are of several records, by record id.

        Returns:
            How many were written, and a sentence for each record that MLflow does not take.
        """
        written, refused = 0, []
        with store.writing(self._uri, self._lock):
            started = [milliseconds(record.started_at) for record in records]
            since, until = f"{START} >= {min(started)}", f"{START} <= {max(started)}"
            runs: dict[str, Run] = {}
            for run in self._runs(f"{CELLS} AND {since} AND {until}", ALL):
                record_id = run.data.tags.get(RECORD, "")
                if record_id not in runs or _is_complete(run):  # two machines made two at once
                    runs[record_id] = run
            for record in records:
                existing = runs.get(record.record_id)
                if existing is not None and _is_complete(existing):
                    continue
                own = values.get(record.record_id, {})
                try:
                    self._log_record(record, existing, folder_of(record), own)
                    written += 1
                except Exception as error:  # to import MlflowException takes a second
                    if type(error) is not ValueError and vars(error).get("error_code") != REFUSED:
                        raise
                    refused.append(f"record {record.name} cannot be written to MLflow: {error}")
        return written, refused

    def _log_record(
        self, record: Record, run: "Run | None", folder: CellFolder, values: Mapping[str, float]
    ) -> None:
        content = mlflow_run.project(record)
        if record.sweep_id not in self._parents:
            self._parents[record.sweep_id] = self._parent(sweep_of([record])).info.run_id
        if run is None:
            # MLflow's pages show tags in the order of their writing: the verdict comes first.
            tags = {
                "mlflow.parentRunId": self._parents[record.sweep_id],
                **content.tags,
                KIND: "cell",
                **_process_tags(ProcessIdentity.own()),
            }
            run = self._create(content.name, content.started, tags)
        tags = dict(content.tags)
        too_large = []
        for path in folder.artifacts():
            relative = path.relative_to(folder.path)
            if path.stat().st_size > ARTIFACT_LIMIT:
                too_large.append(str(relative))
                continue
            below: str | None = relative.parent.as_posix()
            if below == ".":
                below = None
            self._client.log_artifact(run.info.run_id, str(path), below)
        if too_large:
            tags["ringside.left_out"] = ",".join(too_large)[:TAG_LENGTH]
        rows = [row for row in content.metrics if row[0] not in OF_SEVERAL_RECORDS]
        new_rows, new_tags = _of_several(run, values)
        self._client.set_terminated(run.info.run_id, content.status, content.ended)
        tags |= {**new_tags, PROJECTED: COMPLETE}
        self._log(run, [*rows, *new_rows], content.params, tags)

    def log_observed(self, content: Mapping[str, Any], folder: Path) -> None:
        """Write what `observe` saw of a command as a run, with the files of its folder."""
        name = single_line(content["command"], mlflow_run.NAME_LENGTH)
        tags = {NOTE: "\n\n".join(content["said"])[:TAG_LENGTH]}
        with store.writing(self._uri, self._lock):
            run_id = self._create(name, milliseconds(content["started_at"]), tags).info.run_id
            for metric in ("samples_per_s", "step_ms"):
                if math.isfinite(content[metric]):
                    self._client.log_metric(run_id, f"observed/{metric}", content[metric])
            self._client.log_artifacts(run_id, str(folder))
            self._client.set_terminated(run_id, "FAILED" if content["status"] else "FINISHED")

    def write_study(self, records: Sequence[Record], values: Values) -> None:
        """Write what rests on all records of the study: values, default parameters and the view.

        `values` are those that runs are to have, by record id.
        """
        records = mlflow_run.valid_records(records)
        if not records:
            return
        defaults = mlflow_run.default_params(records)
        colors = mlflow_run.run_colors(records)
        with store.writing(self._uri, self._lock):
            for run in self._runs(CELLS):
                record_id = run.data.tags.get(RECORD, "")
                if not _is_complete(run) or record_id not in defaults:
                    continue
                rows, tags = _of_several(run, values.get(record_id, {}))
                tags[mlflow_run.COLOR] = colors[record_id]
                self._log(run, rows, defaults[record_id], tags)
            existing = self._client.get_experiment(self._experiment).tags
            for name, text in mlflow_run.experiment_tags(records).items():
                if existing.get(name) != text:
                    self._client.set_experiment_tag(self._experiment, name, text)

    def finish_sweep(
        self,
        sweep: Sweep,
        records: Sequence[Record],
        state: str,
        values: Values,
        report: Path | None = None,
        question: tuple[Mapping[str, str], Mapping[str, float]] = ({}, {}),
    ) -> None:
        """Close the parent run with its figures, its table, its report and its question's answer.

        `records` are the rows of its table; those of other sweeps (resumed cells) are not counted.
        `state` is finished, failed (a cell failed) or interrupted; `report` is a folder.
        """
        own = [record for record in records if record.sweep_id == sweep.sweep_id]
        ended = milliseconds(max([record.ended_at for record in own], default=sweep.started_at))
        summary = mlflow_run.summary_markdown(records, values)
        tags = {
            **question[0],
            **mlflow_run.parent_tags(own),
            TABLED: str(len(own)),
            PROJECTED: COMPLETE,
            "state": state,
            NOTE: mlflow_run.cut_note(summary, TAG_LENGTH),
        }
        figures = {**mlflow_run.parent_metrics(own, values), **question[1]}
        rows = [(name, value, ended, 0) for name, value in figures.items()]
        with store.writing(self._uri, self._lock):
            parent = self._parent(sweep)
            self._client.log_text(parent.info.run_id, summary, "summary.md")
            if report is not None and report.is_dir():
                self._client.log_artifacts(parent.info.run_id, str(report), "report")
            self._log(parent, rows, mlflow_run.parent_params(own), tags)
            self._client.set_terminated(parent.info.run_id, mlflow_run.STATUS[state], ended)

    # --- what `sync` needs

    def close_stale(self) -> None:
        """Set runs of the study to KILLED that dead launchers of this host left RUNNING."""
        with store.writing(self._uri, self._lock):
            for run in list(self._runs("attributes.status = 'RUNNING'")):
                process = _process_of(run)
                if process is not None and process.gone:
                    ended = milliseconds(time.time())
                    self._client.set_terminated(run.info.run_id, "KILLED", ended)

    def complete_records(self) -> set[str]:
        """Return the ids of the records whose runs are complete."""
        with store.tracking_errors(self._uri):
            runs = self._runs(CELLS, ALL)
            return {run.data.tags.get(RECORD, "") for run in runs if _is_complete(run)}

    def missing_end(self, records: Sequence[Record]) -> str | None:
        """Return how the sweep of these records ended (finished, failed, interrupted).

        None if nothing is to be written: the store has its end, a user deleted it, or another
        process that may live is writing it.
        """
        with store.tracking_errors(self._uri):
            run = self._find(records[0].sweep_id)
        if run is None:
            return None
        writer = _process_of(run)
        is_alive = writer is not None and not writer.gone
        if run.info.status == "RUNNING" and is_alive and writer != ProcessIdentity.own():
            return None
        tags = run.data.tags
        if _is_complete(run) and tags.get(TABLED) == str(len(records)):
            return None
        states = {record.state for record in records}
        cut_short = int(tags.get(PLANNED, "0")) > len(records)
        if cut_short or run.info.status == "KILLED" or "interrupted" in states:
            return "interrupted"
        if "failed" in states:
            return "failed"
        return "finished"

    # --- runs

    def _runs(self, search: str, view: int = ACTIVE_ONLY) -> "Iterator[Run]":
        """Yield the runs of the study that a filter finds, oldest first, page by page."""
        token = None
        while True:
            experiments = [self._experiment]
            page = self._client.search_runs(experiments, search, view, PAGE, [START], token)
            yield from page
            token = page.token
            if not token:
                return

    def _find(self, sweep_id: str) -> "Run | None":
        """Return the run of a sweep; of two that two machines made at once, the complete one."""
        runs = self._runs(f"tags.`{SWEEP}` = '{sweep_id}' AND tags.`{KIND}` = 'sweep'")
        return max(runs, key=_is_complete, default=None)

    def _parent(self, sweep: Sweep) -> "Run":
        run = self._find(sweep.sweep_id)
        if run is not None:
            return run
        tags = {
            KIND: "sweep",
            SWEEP: sweep.sweep_id,
            PLANNED: str(sweep.cells),
            "ringside.overrides": single_line(shlex.join(sweep.overrides), TAG_LENGTH),
            **_process_tags(sweep.process),
        }
        name = single_line(sweep.name, mlflow_run.NAME_LENGTH)
        return self._create(name, milliseconds(sweep.started_at), tags)

    def _create(self, name: str, started: int, tags: Mapping[str, str]) -> "Run":
        tags = {**tags, "mlflow.source.name": "launch.py"}
        return self._client.create_run(
            self._experiment, start_time=started, tags=tags, run_name=name
        )

    def _log(
        self, run: "Run", rows: Sequence[Row], params: Mapping[str, str], tags: Mapping[str, str]
    ) -> None:
        """Write metrics, and parameters and tags that a run lacks: MLflow changes no parameter."""
        from mlflow.entities import Metric, Param, RunTag

        existing = run.data
        new_params = []
        for name, value in params.items():
            if name not in existing.params:
                new_params.append(Param(name, value))
        new_tags = []
        for name, value in tags.items():
            if existing.tags.get(name) != value:
                new_tags.append(RunTag(name, value))
        metrics = [Metric(*row) for row in rows]
        while len(metrics) > BATCH:
            self._client.log_batch(run.info.run_id, metrics[:BATCH])
            del metrics[:BATCH]
        if metrics or new_params or new_tags:  # of tags PROJECTED is the last
            self._client.log_batch(run.info.run_id, metrics, new_params, new_tags)


def experiment_name(tracking: Tracking, study: str) -> str:
    """Return the name of a study's experiment."""
    return single_line(tracking.experiment or f"ringside/{study}", 500)


def _of_several(run: "Run", values: Mapping[str, float]) -> tuple[list[Row], dict[str, str]]:
    """Return the metrics and tags of a run that rest on several records, where they changed."""
    now = milliseconds(time.time())  # later than the run's value: MLflow shows the latest
    rows = []
    for name, value in values.items():
        if run.data.metrics.get(name) != value and math.isfinite(value):
            rows.append((name, float(value), now, 0))
    tags = {}
    efficiency = values.get(EFFICIENCY)
    if isinstance(efficiency, Efficiency):
        tags[EFFICIENCY_OF] = efficiency.members
    return rows, tags


def _is_complete(run: "Run") -> bool:
    return run.data.tags.get(PROJECTED) == COMPLETE or run.info.lifecycle_stage == "deleted"


def _process_tags(process: ProcessIdentity) -> dict[str, str]:
    return {
        "ringside.host": process.host,
        "ringside.pid": str(process.pid),
        "ringside.pid_started": repr(process.started),
        "ringside.boot_id": process.boot_id,
    }


def _process_of(run: "Run") -> ProcessIdentity | None:
    tags = run.data.tags
    try:
        return ProcessIdentity(
            tags["ringside.host"],
            int(tags["ringside.pid"]),
            float(tags["ringside.pid_started"]),
            tags["ringside.boot_id"],
        )
    except (KeyError, ValueError):
        return None


class MlflowWriter:
    """Writes one sweep to MLflow, or prints once why that fails and how to do it later.

    After a failure nothing is written until the end, where all of it is tried once more.
    """

    def __init__(
        self,
        tracking: Tracking,
        study: StudyFolder,
        sweep: Sweep,
        console: Console,
        background: BackgroundQueue | None = None,
    ) -> None:
        """With `background`, the store is written there while cells run; without, at once."""
        self._tracking, self._study, self._sweep = tracking, study, sweep
        self._console, self._background = console, background
        self._tracker: Tracker | None = None
        self._failed = False
        self._printed: set[str] = set()

    def open(self) -> None:
        """Open the store and make the parent run."""
        if self._tracking.enabled:
            self._submit(self._open)

    def log(self, record: Record) -> None:
        """Write the child run of a record, unless the store failed."""

        def write() -> None:
            if self._tracker and not self._failed:
                with self._study.timed_step(record.record_id, "projection"):
                    self._log(self._tracker, [record])

        self._submit(write)

    def close(
        self,
        measured: Sequence[Record],
        done_before: Iterable[Record],
        study_records: Sequence[Record],
        stopping: Callable[[], bool],
        report: Path | None,
    ) -> None:
        """Write the parent's table, figures, report and state, and what needs several records.

        What failed on the way is tried once more.
        """
        state = "finished"
        if any(record.state == "failed" for record in measured):
            state = "failed"
        if stopping():
            state = "interrupted"

        def finish() -> None:
            if self._background:
                self._background.finish()
            self._failed = False
            if not self._tracking.enabled or (stopping() and not self._tracker):
                return
            tracker = self._open()
            values = values_of(study_records, of_other_studies(self._study.folder))
            if measured:
                self._log(tracker, measured)  # complete ones stay as they are
            own_values = {each.record_id: values.get(each.record_id, {}) for each in measured}
            rows = mlflow_run.valid_records([*done_before, *measured])
            questions = asked.questions_of(self._study.folder)
            question = asked.summary(questions.get(self._sweep.sweep_id), rows)
            tracker.finish_sweep(self._sweep, rows, state, values, report, question)
            tracker.write_study(study_records, own_values)

        self._try(finish)

    def where(self) -> list[str]:
        """Return lines for the user: where the runs are, or how to write them later."""
        what = shlex.quote(str(self._study.folder))
        if not self._tracking.enabled:
            later = f"to write it later: python -m launch sync {what}"
            return [f"MLflow   not written (tracking=none); {later}"]
        if self._tracking.uri is not None:
            what += f" --uri {shlex.quote(without_credentials(self._tracking.uri))}"
        if self._tracking.experiment:
            what += f" --experiment {shlex.quote(self._tracking.experiment)}"
        if self._failed:
            return [f"MLflow   incomplete; to complete it: python -m launch sync {what}"]
        missing = store.missing_pages()
        needs = f"   (needs: {missing})" if missing else ""
        return [f"MLflow   python -m launch ui {what}{needs}"]

    def _log(self, tracker: Tracker, records: Sequence[Record]) -> None:
        _, refused = tracker.log(records, self._study.folder_of)
        for sentence in refused:
            self._note(sentence)

    def _note(self, sentence: str) -> None:
        if sentence not in self._printed:
            self._console.print(f"note: {sentence}", markup=False)
        self._printed.add(sentence)

    def _open(self) -> Tracker:
        """Return the store, opened by the first call that finds it free."""
        if self._tracker is None:
            tracker = Tracker(self._tracking, self._study.folder.parent, self._study.name)
            tracker.start_sweep(self._sweep)
            self._tracker = tracker
        return self._tracker

    def _submit(self, action: Callable[[], object]) -> None:
        if self._background:
            self._background.submit(lambda: self._try(action))
        else:
            self._try(action)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except KeyboardInterrupt:
            self._failed = True
            raise
        except (TrackingUnavailable, OSError) as error:
            self._failed = True
            reason = str(error)
            if isinstance(error, OSError):  # of the study's own files
                reason = f"runs cannot be written to MLflow: {because(error)}"
            self._note(f"{reason}; the sweep goes on without MLflow")


# Write the records of a study that MLflow's store lacks. It can be repeated at any time.
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
        ValueError: `study_dir` is not a folder with records.
        TrackingUnavailable: as Tracker.
    """
    study_dir = study_dir.absolute()
    paths = list(record_paths(study_dir))
    if not paths:
        raise ValueError(f"{study_dir}: no folder of a study (it has no run with a record.json)")
    folders: dict[str, CellFolder] = {}
    records: list[Record] = []
    unreadable: list[str] = []
    for path in paths:
        try:
            record = read(path)
            mlflow_run.project(record)
        except RecordError as error:
            unreadable.append(str(error))
        except ValueError as error:
            unreadable.append(f"{path}: record {record.name} cannot be written to MLflow: {error}")
        else:
            records.append(record)
            folders[record.record_id] = CellFolder(path.parent)
    records.sort(key=Record.order)
    sweeps: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        sweeps[record.sweep_id].append(record)
    tracker = Tracker(tracking or Tracking(), study_dir.parent, study_dir.name)
    tracker.close_stale()
    complete = tracker.complete_records()
    values = values_of(records, of_other_studies(study_dir))
    questions = asked.questions_of(study_dir)
    projected, already = 0, len(records)
    for own in sweeps.values():
        missing = [record for record in own if record.record_id not in complete]
        if missing:
            tracker.start_sweep(sweep_of(own))
            already -= len(missing)
        for start in range(0, len(missing), RECORDS):
            part = missing[start : start + RECORDS]
            written, refused = tracker.log(part, lambda each: folders[each.record_id], values)
            projected += written
            unreadable += refused
        state = tracker.missing_end(own)
        if state:
            question = asked.summary(questions.get(own[0].sweep_id), records)
            tracker.finish_sweep(sweep_of(own), own, state, values, study_dir / REPORT, question)
    tracker.write_study(records, values)
    return SyncReport(projected, already, unreadable)
