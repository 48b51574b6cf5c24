"""MLflow as a projection of records: written by the launching process, after each cell, in batches; replayable.

A study is an experiment, a sweep a parent run, a record a child run. Every run carries the tag of what it projects
(`ringside.sweep_id`, `ringside.record_id`), so writing twice changes nothing: a run is written when it has ended and
has the tag `ringside.projected`, which comes last; any other is completed.
"""

import contextlib
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.record import FILE_NAME, Record, RecordError, read, read_study
from conf.schema import Tracking
from launch.projection import NAME_LENGTH, STATUS, TAG_LENGTH, Projection, milliseconds, plain, project
from launch.summary import cut_to, summary_markdown
from launch.sweeps import Process, Sweep
from launch.tracking_store import check_writable, connect, reaching, sqlite_file, store_uri, turn, without_credentials

if TYPE_CHECKING:
    from mlflow.entities import Run

PROJECTED = "ringside.projected"
ARTIFACTS = (FILE_NAME, "topology.txt", "*.log", "logs/**/*", "ranks/*.jsonl", "ranks/*.log", "nccl/*.log")
ARTIFACT_LIMIT = 16 << 20  # bytes of one file; a larger one stays in the cell's folder and is named in a tag
PAGE = 1000  # runs of one answer
ACTIVE_ONLY, ALL = 1, 3  # mlflow.entities.ViewType


@dataclass(frozen=True)
class SyncReport:
    """What `sync` did with a study."""

    projected: int  # records written now
    already: int  # records that the store had
    unreadable: list[str]  # a sentence for each record that could not be read


class Tracker:
    """The store of one study, as its launching process writes it. Every method may raise TrackingUnavailable."""

    def __init__(self, uri: str, output_dir: Path, study: str, experiment: str) -> None:
        """Use `Tracker.open`."""
        self._uri, self._study, self._file = uri, study, sqlite_file(uri)
        self._parents: dict[str, str] = {}  # sweep_id: run_id
        artifacts = output_dir.absolute() / "mlartifacts"
        # The lock lies beside the store: launchers with other output folders share it.
        self._lock = self._file.with_name(f".{self._file.name}.lock") if self._file else output_dir / ".mlflow.lock"
        with reaching(uri), turn(self._lock):
            self._client = connect(uri, artifacts)
            self._experiment = self._find_experiment(experiment, artifacts)
            self._close_stale()

    @staticmethod
    def open(tracking: Tracking, output_dir: Path, study: str) -> "Tracker":
        """Open the store, making it and the experiment where they are missing, and close what dead launchers left.

        Raises:
            WrongUri: `tracking.uri` cannot be one.
            TrackingUnavailable: it cannot be reached or written, known within about 30 s (60 s where another launcher
                holds the turn); the message is one sentence without credentials.
        """
        uri = store_uri(tracking.uri, output_dir)
        return Tracker(uri, output_dir, study, plain(tracking.experiment or f"ringside/{study}", 500))

    @property
    def uri(self) -> str:
        """Where it writes, for people: credentials removed."""
        return without_credentials(self._uri)

    def start_sweep(self, sweep: Sweep) -> None:
        """Make the parent run, RUNNING, unless the store has it."""
        with self._writing():
            self._parents[sweep.sweep_id] = self._parent(sweep).info.run_id

    def log(self, record: Record, folder: Path) -> None:
        """Write the child run of a record, with the artifacts of its folder. One already written is left untouched.

        Raises:
            ValueError, TypeError, AttributeError, KeyError: the record is damaged.
        """
        projection = project(record)
        with self._writing():
            found = self._find("ringside.record_id", record.record_id, ALL)
            if found is None or not _complete(found):
                parent = self._parents.get(record.sweep_id)
                if parent is None:
                    parent = self._parent(_sweep_of([record], self._study)).info.run_id
                    self._parents[record.sweep_id] = parent
                self._write(found, projection, parent, folder)

    def finish_sweep(self, sweep: Sweep, records: list[Record], state: str, note_markdown: str) -> None:
        """Close the parent run with its table.

        Args:
            sweep: the sweep.
            records: what the table shows; those of other sweeps (cells resumed from them) are not counted.
            state: finished, failed (a cell failed) or interrupted.
            note_markdown: the table; beyond MLflow's 8000 characters it is cut, and whole in the artifact summary.md.
        """
        from mlflow.entities import Metric

        own = [record for record in records if record.sweep_id == sweep.sweep_id]
        ended = milliseconds(max([record.ended_at for record in own], default=sweep.started_at))
        counts = {f"cells/{state}": sum(record.state == state for record in own) for state in STATUS}
        counts["cells/invalid"] = sum(record.validity.verdict == "invalid" for record in own)
        tags = {
            "mlflow.note.content": cut_to(note_markdown, TAG_LENGTH),
            "ringside.records": str(len(own)),
            "state": state,
        }
        metrics = [Metric(name, float(count), ended, 0) for name, count in counts.items()]
        with self._writing():
            run_id = self._parent(sweep).info.run_id
            self._client.log_text(run_id, note_markdown, "summary.md")
            self._client.log_batch(run_id, metrics=metrics, tags=_entities(tags | {PROJECTED: "true"}))
            self._client.set_terminated(run_id, STATUS[state], ended)

    def sync(self, study_dir: Path) -> SyncReport:
        """Write what the store lacks of a study: child runs, their parents, and the tables of those that have ended."""
        records, errors = read_study(study_dir)
        folders, unreadable = _folders(study_dir), [str(error) for error in errors]
        with reaching(self._uri):
            runs = list(self._runs([self._experiment], "", ALL))
        written = {run.data.tags.get("ringside.record_id") for run in runs if _complete(run)}
        sweeps: dict[str, list[Record]] = {}
        projected = 0
        for record in records:
            sweeps.setdefault(record.sweep_id, []).append(record)
        for record in records:
            if record.record_id in written:
                continue
            if record.sweep_id not in self._parents:
                self._adopt(sweeps[record.sweep_id])
            try:
                self.log(record, folders[record.record_id])
                projected += 1
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                unreadable.append(f"{folders[record.record_id] / FILE_NAME}: a damaged record ({error})")
        for own in sweeps.values():
            self._close_synced(own)
        return SyncReport(projected, len(records) + len(errors) - projected - len(unreadable), unreadable)

    def _adopt(self, records: list[Record]) -> None:
        with contextlib.suppress(ValueError, TypeError):  # damaged ones are reported one by one
            self.start_sweep(_sweep_of(records, self._study))

    def _close_synced(self, records: list[Record]) -> None:
        """Give the parent run its table, unless it has that of all these records or its launcher is still at work."""
        with reaching(self._uri):
            parent = self._find("ringside.sweep_id", records[0].sweep_id, ACTIVE_ONLY, parent=True)
        if parent is None or parent.data.tags.get("ringside.records") == str(len(records)):
            return
        owner = _process(parent)
        if parent.info.status == "RUNNING" and owner != Process.own() and not owner.gone:
            return
        planned = parent.data.tags.get("ringside.cells", "")
        state = "failed" if any(record.state == "failed" for record in records) else "finished"
        cut_short = planned.isdigit() and int(planned) > len(records)
        if cut_short or parent.info.status == "KILLED" or any(record.state == "interrupted" for record in records):
            state = "interrupted"
        self.finish_sweep(_sweep_of(records, self._study), records, state, summary_markdown(records))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """The turn, with a store that can be written."""
        with reaching(self._uri), turn(self._lock):
            if self._file:
                check_writable(self._file)
            yield

    def _find_experiment(self, name: str, artifacts: Path) -> str:
        """The experiment's id; made where missing, on this machine's disk unless a server keeps artifacts itself."""
        found = self._client.get_experiment_by_name(name)
        if found is None:
            location = None if self._uri.lower().startswith(("http", "databricks")) else artifacts.as_uri()
            try:
                return str(self._client.create_experiment(name, artifact_location=location))
            except Exception:  # another machine may have made it since
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise ValueError(f"experiment {name!r} is deleted there: restore it or choose another tracking.experiment")
        return str(found.experiment_id)

    def _close_stale(self) -> None:
        """End as KILLED what launchers of this host that are no more left RUNNING, in every study of the store."""
        ours = self._client.search_experiments(filter_string="name LIKE 'ringside/%'", max_results=PAGE)
        experiments = list({self._experiment, *(experiment.experiment_id for experiment in ours)})
        now = round(time.time() * 1000)
        for run in list(self._runs(experiments, "attributes.status = 'RUNNING'", ACTIVE_ONLY)):
            if "ringside.host" in run.data.tags and _process(run).gone:
                self._client.set_terminated(run.info.run_id, "KILLED", now)

    def _runs(self, experiments: list[str], filter_string: str, view: int) -> "Iterator[Run]":
        token = None
        while True:
            page = self._client.search_runs(experiments, filter_string, view, PAGE, ["attributes.start_time"], token)
            yield from page
            token = page.token
            if not token:
                return

    def _find(self, tag: str, value: str, view: int, parent: bool = False) -> "Run | None":
        """The run with this tag (a child also has its parent's); the written one where a race left two."""
        runs = list(self._runs([self._experiment], f"tags.`{tag}` = '{value}'", view))
        if parent:
            runs = [run for run in runs if "ringside.record_id" not in run.data.tags]
        return max(runs, key=_complete, default=None)

    def _parent(self, sweep: Sweep) -> "Run":
        found = self._find("ringside.sweep_id", sweep.sweep_id, ACTIVE_ONLY, parent=True)
        if found is not None:
            return found
        tags = {
            "ringside.sweep_id": sweep.sweep_id,
            "ringside.cells": str(sweep.cells),
            "ringside.overrides": plain(shlex.join(sweep.overrides), TAG_LENGTH),
            **_process_tags(sweep.process),
        }
        return self._create(plain(sweep.name, NAME_LENGTH), milliseconds(sweep.started_at), tags)

    def _create(self, name: str, started: int, tags: Mapping[str, str]) -> "Run":
        tags = {**tags, "mlflow.source.name": "launch.py"}
        return self._client.create_run(self._experiment, start_time=started, tags=tags, run_name=name)

    def _write(self, run: "Run | None", projection: Projection, parent: str, folder: Path) -> None:
        """Make or complete a child run. Its last tag and its end come when everything else is there."""
        from mlflow.entities import Metric, Param

        if run is None:
            ids = {name: projection.tags[name] for name in ("ringside.record_id", "ringside.sweep_id")}
            tags = {"mlflow.parentRunId": parent, **ids, **_process_tags(Process.own())}
            run = self._create(projection.name, projection.started, tags)
        run_id = run.info.run_id
        left_out = []
        for path in _artifacts(folder):
            if path.stat().st_size > ARTIFACT_LIMIT:
                left_out.append(str(path.relative_to(folder)))
                continue
            below = path.relative_to(folder).parent.as_posix()
            self._client.log_artifact(run_id, str(path), None if below == "." else below)
        tags = projection.tags | ({"ringside.left_out": ",".join(left_out)[:TAG_LENGTH]} if left_out else {})
        # Parameters cannot be changed: of a half-written run those that are there stay.
        params = [Param(*item) for item in projection.params.items() if item[0] not in run.data.params]
        self._client.log_batch(run_id, [Metric(*row) for row in projection.metrics], params, _entities(tags))
        self._client.set_tag(run_id, PROJECTED, "true")
        self._client.set_terminated(run_id, projection.status, projection.ended)


def sync(study_dir: Path, tracking: Tracking | None = None) -> SyncReport:
    """Project every record of `<output_dir>/<study>` that is not in the store yet; twice changes nothing.

    Raises:
        ValueError: `study_dir` is no folder with records.
        TrackingUnavailable: as Tracker.open.
    """
    study_dir = study_dir.absolute()
    if not any(study_dir.glob(f"*/**/{FILE_NAME}")):
        raise ValueError(f"{study_dir}: no folder of a study (it has no cell with a {FILE_NAME})")
    return Tracker.open(tracking or Tracking(), study_dir.parent, study_dir.name).sync(study_dir)


def _complete(run: "Run") -> bool:
    """Whether nothing is to be added: written to the end, or deleted by a user, who is not to be contradicted."""
    return run.info.lifecycle_stage == "deleted" or (run.info.status != "RUNNING" and PROJECTED in run.data.tags)


def _sweep_of(records: list[Record], study: str) -> Sweep:
    """What records say about their sweep, to be written by the calling process."""
    started = min(record.started_at for record in records)
    first = records[0]
    return replace(Sweep.begin(study, first.overrides, len(records)), sweep_id=first.sweep_id, started_at=started)


def _process_tags(process: Process) -> dict[str, str]:
    return {
        "ringside.host": process.host,
        "ringside.pid": str(process.pid),
        "ringside.pid_started": repr(process.started),
        "ringside.boot_id": process.boot_id,
    }


def _process(run: "Run") -> Process:
    """The process that wrote a run. Raises KeyError or ValueError where its tags were tampered with."""
    pid, started = (run.data.tags[f"ringside.{name}"] for name in ("pid", "pid_started"))
    return Process(run.data.tags["ringside.host"], int(pid), float(started), run.data.tags["ringside.boot_id"])


def _entities(tags: Mapping[str, str]) -> list[object]:
    from mlflow.entities import RunTag

    return [RunTag(name, value) for name, value in tags.items()]


def _artifacts(folder: Path) -> list[Path]:
    """The regular files of a cell's folder that belong to its run; links are not followed."""
    found = {path for pattern in ARTIFACTS for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def _folders(study_dir: Path) -> dict[str, Path]:
    """The folder of each readable record."""
    folders = {}
    for path in study_dir.glob(f"*/**/{FILE_NAME}"):
        with contextlib.suppress(RecordError):
            folders[read(path).record_id] = path.parent
    return folders
