"""The launcher's background queue, one job at a time while cells run, and what is written there.

Jobs come where no rank measures yet: the store of MLflow's is opened while the agent imports torch,
and the run of a cell is written while the ranks of the next one start. The thread has the priority
of any other: a low one would take the same seconds of a busy core from the ranks, later, in windows
that count.

With predict=auto each cell is forecast before its ranks start: numpy and scipy are imported while
the agent imports torch, and measured cells are held out while the ranks of the next one start. So
the interval of a forecast comes from all cells but the one that has just ended; of a LARGE study a
forecast may rest on the records of some cells before.
"""

import contextlib
import gc
import importlib
import os
import queue
import threading
import time
import webbrowser
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from analysis.input_files import gc_paused
from analysis.study.noise_floor import FILE, Scatters, as_json, floors_of
from analysis.study.study import Study
from analysis.validity.effective import class_between
from benchmarks.record import Record, safe_files, write_json
from benchmarks.record.lines import now
from benchmarks.record.safe_files import because
from conf.cell import Cell
from conf.host import usable_cores

Job = Callable[[], object]
LOCK_WAIT_S = 10.0  # for noise_floor.json of output_dir
REPORT = "report"  # the folder in a study's
# What takes more than a second to import, in parts of a few tenths.
NEEDED = ("scipy.special", "scipy.optimize", "analysis.report.build", "matplotlib.figure",
          "matplotlib.backends.backend_svg", "matplotlib.backends.backend_pdf",
          "jinja2")  # fmt: skip

# What is made of thousands of records is not made again for each cell: only after so many times as
# long as it took.
SLOW_S, REST = 0.25, 20


class Pace:
    """Says when something that takes longer with every record is to be made again."""

    def __init__(self) -> None:
        self._due_s = 0.0  # of the monotonic clock

    @property
    def is_due(self) -> bool:
        """Whether enough time has passed since it was made."""
        return time.monotonic() >= self._due_s

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Take the time of what is entered."""
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
        if took_s > SLOW_S:
            self._due_s = began_s + REST * took_s


class BackgroundQueue:
    """Does jobs in their order. Its thread starts with the first, and ends with the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, job: Job) -> None:
        """Have a job done soon, or do it now where no further thread may be started."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="background", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                job()
                return
            self._thread = thread
        self._jobs.put(job)

    def finish(self) -> None:
        """Wait until every job is done. Raises what the first one raised that failed."""
        if self._thread:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._error:
            raise self._error

    def _run(self) -> None:
        for job in iter(self._jobs.get, None):
            try:
                job()
            except Exception as error:
                self._error = self._error or error


def look_for_garbage() -> None:
    """Have Python look for garbage again, which launch.py put off."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def update_noise_floor(
    study_folder: Path, records: Sequence[Record], note: Callable[[str], None]
) -> None:
    """Write what a study shows of the scatter between equal cells to `noise_floor.json`.

    `note` gets the reason where that fails. A study that shows nothing makes no file. A file that
    cannot be read is left as it is.
    """
    path = study_folder.parent.resolve() / FILE  # output_dir may be a link
    shown = Study.of(records).floors.own()
    try:
        with safe_files.locked(path.with_name(f".{FILE}.lock"), LOCK_WAIT_S) as ours:
            if not ours:
                raise OSError(f"another launcher has held its lock for {LOCK_WAIT_S:.0f} s")
            floors = dict(floors_of(path))
            before = floors.pop(study_folder.name, None)
            if shown:
                floors[study_folder.name] = shown
            if shown or before is not None:
                write_json(path, as_json(floors))
    except (OSError, ValueError) as error:
        reason = because(error) if isinstance(error, OSError) else str(error)
        note(f"the noise floor of this study was not added to {path}: {reason}")


class StudyReport:
    """The report of a study, as `report=` asks for it."""

    def __init__(self, study_folder: Path, option: object, note: Callable[[str], None]) -> None:
        """`option` is report=; `note` gets the reason where it cannot be written."""
        self._study_folder, self._option, self._note = study_folder, str(option), note
        self.wanted = self._option != "False"

    def prepare(self, may_go_on: Callable[[], bool]) -> None:
        """Import what it needs, part by part as long as `may_go_on`.

        What fails is told when it is written.
        """
        if not self.wanted or usable_cores() < 2:
            return
        with contextlib.suppress(Exception):
            for name in NEEDED:
                if may_go_on():
                    importlib.import_module(name)

    def write(self, subjects: Collection[tuple[str, ...]]) -> tuple[Path | None, Sequence[str]]:
        """Write it, and open it if asked; return its page, None without one, and its sentences on
        these subjects of cells."""
        if not self.wanted:
            return None, ()
        try:
            with gc_paused():
                from analysis.findings.examine import findings_of  # a second to import
                from analysis.report.build import checked_study, finding_on, report_of
                from analysis.report.figure import ON_PAGE, WIDTHS_IN
                from analysis.report.report_files import write

                width = self._option if self._option in WIDTHS_IN else ON_PAGE
                study = checked_study(self._study_folder)
                content = report_of(study, findings_of(study), width)
                page = write(content, self._study_folder / REPORT)
                finding = finding_on(subjects, study, content)
        except Exception as error:
            # A full disk, a font, a record that nobody thought of: every record is safe already.
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError):
                reason = because(error)
            later = f"python -m analysis report {quote(str(self._study_folder))}"
            self._note(f"the report could not be written: {reason}; to write it later: {later}")
            return None, ()
        # A browser in the terminal would hide the sweep's table.
        desktop = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if self._option == "open" and desktop:
            webbrowser.open(page.absolute().as_uri())
        return page, finding


MODEL = "analysis.prediction.forecast"
LARGE = 500  # records: a study of so many is not looked at before each cell


class Forecasts:
    """Says what the cells of one sweep should give, from the records of their study so far."""

    def __init__(
        self, option: object, submit: Callable[[Job], None], scatters: Scatters | None = None
    ) -> None:
        """`option` is predict=, `submit` has a job done while cells run."""
        self.wanted = str(option) == "auto"
        self._submit, self._scatters = submit, scatters
        self._scores: Mapping[Any, Sequence[float]] = {}
        self._newest: list[Record] = []  # what is to be held out next
        self._study: Study | None = None  # with the record of the cell for which it was made
        self._machine = ""  # of the sweep
        self._study_pace, self._scores_pace = Pace(), Pace()

    def prepare(self, measured: Sequence[Record]) -> None:
        """Import the model beside the first cell, and hold out cells that were measured before."""
        if self.wanted:
            self._submit(self._hold_out)
            self.learn(measured)

    def learn(self, measured: Sequence[Record], more: bool = True) -> None:
        """Hold out the study's cells beside the next one, if there are `more`."""
        if self.wanted and more and _trained(measured):
            self._newest = list(measured)
            self._submit(self._hold_out)

    def before(
        self, cell: Cell, environment: Mapping[str, Any], measured: Sequence[Record]
    ) -> dict[str, Any]:
        """Return what attempt.json says of a cell: its forecast, or in `refused` why there is none.

        It never raises: whatever the model makes of it, the cell is measured.
        """
        if not self.wanted:
            return {}
        began = time.perf_counter()
        try:
            if not cell.trains:
                forecast = {"refused": f"benchmark={cell.benchmark['name']} trains nothing"}
            elif not _trained(measured):
                forecast = {"refused": "no run of the study was measured before it"}
            else:
                at = now()
                # Of what is about to run: it tells machine and links; its numbers enter nothing.
                begun = Record(
                    record_id="",
                    cell_key=cell.key,
                    name=cell.name,
                    cell=cell,
                    study="",
                    sweep_id="",
                    overrides=[],
                    state="interrupted",
                    started_at=at,
                    ended_at=at,
                    environment=dict(environment),
                )
                model = importlib.import_module(MODEL)
                if len(measured) < LARGE or self._study_pace.is_due:
                    with self._study_pace.making():
                        self._study = Study.of([*measured, begun], scatters=self._scatters)
                        self._machine = self._study.single(begun).provenance["machine"]
                        with contextlib.suppress(ValueError):  # nothing was measured
                            model.calibration_of(self._study)
                link_class = None
                if cell.device == "cuda" or len(cell.hosts) > 1:
                    link_class = class_between(begun) or None
                forecast = model.forecast_before(
                    cell, self._study, self._machine, link_class, self._scores
                )
        except Exception as error:  # a record that nobody thought of
            forecast = {"refused": f"the forecast failed ({type(error).__name__}: {error})"}
        return {"made_at": now(), "took_ms": 1e3 * (time.perf_counter() - began), **forecast}

    def _hold_out(self) -> None:
        """Import the model, and hold out the newest records: few scores give no interval."""
        # Short cells may end faster than a study is held out.
        measured, self._newest = self._newest, []
        with contextlib.suppress(Exception):  # `before` says why
            model = importlib.import_module(MODEL)
            if measured and (len(measured) < LARGE or self._scores_pace.is_due):
                with self._scores_pace.making():
                    study = Study.of(measured, scatters=self._scatters)
                    self._scores = model.scores_by_machine(study)


def _trained(measured: Sequence[Record]) -> bool:
    return any(record.cell.trains and record.usable for record in measured)
