"""Write a sweep to MLflow while it runs; a store that fails costs no measurement."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shlex import quote

from rich.console import Console

from analysis.findings.record_values import values_of
from analysis.study.noise_floor import of_other_studies
from benchmarks.record import Record
from benchmarks.record.safe_files import because
from conf.schema import Tracking
from launch.machine.secrets import without_credentials
from launch.study.background import BackgroundQueue
from launch.study.identity import Sweep
from launch.study.study import StudyFolder
from launch.tracking.store import StoreBusy, TrackingUnavailable, WrongUri, store_uri
from launch.tracking.tracker import Tracker

LAST_WAIT_S = 600.0  # how long the end of a sweep waits for others that write the store


class MlflowWriter:
    """Writes one sweep to MLflow, or prints once why that fails and how to do it later."""

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
        self._busy = False  # another launcher held the store for too long
        self._printed: set[str] = set()

    def open(self) -> None:
        """Open the store and make the parent run."""
        if self._tracking.enabled:
            self._submit(self._open)

    def log(self, record: Record) -> None:
        """Write the child run of a record, unless the store failed or was busy for too long."""

        def write() -> None:
            if self._tracker and not self._failed and not self._busy:
                with self._study.timed_step(record.record_id, "projection"):
                    self._tracker.log(record, self._study.folder_of(record))

        self._submit(write)

    def close(
        self,
        measured: Sequence[Record],
        done_before: Iterable[Record],
        study_records: Sequence[Record],
        stopping: Callable[[], bool],
        report: Path | None,
    ) -> None:
        """Write the parent's table, figures, report and state, and the values that need several records.

        What failed on the way is tried once more. While others are writing the store it waits for
        them, for LAST_WAIT_S or until the user stops it.
        """
        if self._background:
            self._background.finish()
        if self._tracker is None and not self._busy:
            return
        state = "finished"
        if any(record.state == "failed" for record in measured):
            state = "failed"
        if stopping():
            state = "interrupted"

        def finish() -> None:
            tracker = self._open()
            for record in measured:
                tracker.log(record, self._study.folder_of(record))  # complete ones stay as they are
            values = values_of(study_records, of_other_studies(self._study.folder))
            rows = [*done_before, *measured]
            tracker.finish_sweep(self._sweep, rows, state, values, report)
            own_values = {record.record_id: values.get(record.record_id, {}) for record in measured}
            tracker.write_study(study_records, own_values)

        deadline = time.monotonic() + LAST_WAIT_S
        self._failed, self._busy = False, True
        while self._busy and not self._failed:
            self._busy = False
            self._try(finish)
            if self._busy and (stopping() or time.monotonic() > deadline):
                self._failed = True

    def where(self) -> list[str]:
        """Return lines for the user: where the runs are, or how to write them later."""
        sync = f"python -m launch sync {quote(str(self._study.folder))}"
        if not self._tracking.enabled:
            return [f"MLflow   not written (tracking=none); to write it later: {sync}"]
        try:
            uri = store_uri(self._tracking.uri, self._study.folder.parent)
            uri = quote(without_credentials(uri))
        except WrongUri:
            uri = "URI"
        if self._failed:
            return [f"MLflow   incomplete; to complete it: {sync} --uri {uri}"]
        ui = f"mlflow ui --backend-store-uri {uri}"
        lines = [f"MLflow   {ui}   (needs: pip install '.[ui]')"]
        if self._tracker:
            lines.append(f"         then open http://127.0.0.1:5000{self._tracker.page}")
        return lines

    def _open(self) -> Tracker:
        """Return the store, opened by the first call that finds it free."""
        if self._tracker is None:
            folder = self._study.folder
            tracker = Tracker.open(self._tracking, folder.parent, self._study.name)
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
        except StoreBusy as error:
            self._busy = True
            self._note(f"{error}; the sweep goes on, and its runs are written in the end")
        except TrackingUnavailable as error:
            self._failed = True
            self._note(f"{error}; the sweep goes on without MLflow")
        except OSError as error:  # of the study's own files
            self._failed = True
            reason = because(error)
            self._note(f"runs cannot be written to MLflow: {reason}; the sweep goes on without it")

    def _note(self, sentence: str) -> None:
        """Print a note, once: what is tried again in the end may fail again."""
        if sentence not in self._printed:
            self._console.print(f"note: {sentence}", markup=False)
        self._printed.add(sentence)
