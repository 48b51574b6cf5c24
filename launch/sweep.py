"""Run one invocation: plan, measure every cell, write its record, show it, project it to MLflow."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console

from analysis.findings.labels import BETWEEN
from analysis.findings.next_run.floor_file import of_other_studies
from benchmarks import record as records
from benchmarks.record import Record
from benchmarks.record.os_errors import because
from benchmarks.record.own_files import NotOurs
from conf import nccl
from conf.options import Refused
from launch.display.columns import explained
from launch.display.lasting_output import LastingOutput
from launch.display.screen import Screen, duration
from launch.machine.facts import nccl_configuration
from launch.plan.plan import Plan, Request, plan
from launch.plan.time_estimate import estimate
from launch.run_cell import CellRunner
from launch.study.identity import Sweep
from launch.study.noise_floor import update_noise_floor
from launch.study.report import show, write_report
from launch.study.study import StudyFolder, study_folder
from launch.tracking.projector import Projector
from launch.tracking.store import without_credentials


class Stopping:
    """Remembers that the user asked to stop, by Ctrl-C or SIGTERM."""

    def __init__(self, console: Console) -> None:
        self._asked, self._console = False, console

    def __call__(self) -> bool:
        """Return whether the user asked."""
        return self._asked

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Have signals set the mark instead of ending this process. A terminal that goes away (SIGHUP) ends nothing."""
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if not self._asked:
            self._console.print("stopping: no further cell is started; what was measured is kept")
        self._asked = True


def run(requests: Sequence[Request], typed: Sequence[str]) -> int:
    """Run the sweep that was asked for. Exit status: 0 done, 1 a cell failed, 130 interrupted.

    Raises:
        Refused: the request is wrong; nothing was started.
    """
    surrounding = nccl.with_configuration_files(os.environ, nccl_configuration(os.environ))
    with _refused("the request could not be planned"):
        planned = plan(requests, surrounding)
    console = Console(file=cast(TextIO, LastingOutput(sys.stdout)), highlight=False)
    console.soft_wrap = not console.is_terminal  # a file or a pipe has no width to wrap at
    for notice in planned.notices:
        console.print(f"note: {notice}", markup=False)
    if planned.config.dry_run:
        _print_plan(planned, console)
        return 0
    stopping = Stopping(console)
    with stopping.listening(), _refused(f"output_dir={planned.config.output_dir}: cannot be written"):
        return SweepRun(planned, [without_credentials(text) for text in typed], surrounding, stopping, console).run()


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """Have an error of the operating system outside a cell be one sentence that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise Refused(f"{what}: {because(error)}") from None


class SweepRun:
    """One invocation: its cells, what measures them, and what was measured so far."""

    def __init__(
        self, planned: Plan, typed: list[str], surrounding: Mapping[str, str], stopping: Stopping, console: Console
    ) -> None:
        self.cells, self.config, self.stopping, self.console = planned.cells, planned.config, stopping, console
        self.study = StudyFolder(self.config.output_dir, self.config.study)
        self.sweep = Sweep.begin(self.config.study, typed, len(self.cells))
        self.runner = CellRunner(
            self.config, planned.machine, self.study, self.sweep, surrounding, planned.nsys, stopping, self._note
        )
        self.projector = Projector(self.config.tracking, self.study, self.sweep, console)
        self.measured: list[Record] = []  # in this invocation
        self._writable = True
        self._refused = False  # a cell's folder was not ours to write

    def run(self) -> int:
        """Measure every cell that is not done, then write the report and close the sweep; return the exit status."""
        for left in self.study.recover():
            self._note(f"{left.name}: an earlier launcher died while it ran; what was measured is kept as interrupted")
        known, unreadable = records.read_study(self.study.folder)
        for error in unreadable:
            self._note(str(error))
        done = self._done_before()
        if len(done) < len(self.cells):
            self.projector.open()
        self.study.note(
            "sweep",
            sweep_id=self.sweep.sweep_id,
            overrides=self.sweep.overrides,
            order=[c.cell.folder for c in self.cells],
        )
        with Screen(self.cells, known, self.console, of_other_studies(self.study.folder)) as screen:
            for number in range(len(self.cells)):
                if number in done:
                    screen.settle(number, "done before", done[number])
                elif not self.stopping() and self._writable:
                    self._try_cell(number, known, screen)
        if self._writable:
            update_noise_floor(self.study.folder, known, self._note)
        page = self._report()
        report = page.parent if page else None
        self.projector.close(self.measured, done.values(), known, interrupted=self.stopping(), report=report)
        self._last_lines(page)
        if self.stopping():
            return 130
        if self._refused or not self._writable:
            return 1
        strict = self.config.validity.strict
        every = [*done.values(), *self.measured]
        bad = [r for r in every if r.state != "finished" or (strict and r.validity.verdict == "invalid")]
        return 1 if bad else 0

    def _done_before(self) -> dict[int, Record]:
        """Return the records of cells that an earlier invocation finished, by their place in the order."""
        if not self.config.resume:
            return {}
        finished = {number: self.study.finished(planned.cell) for number, planned in enumerate(self.cells)}
        return {number: record for number, record in finished.items() if record}

    def _try_cell(self, number: int, known: list[Record], screen: Screen) -> None:
        """Measure a cell, or fail it where somebody else's file or link stands in its folder.

        If its folder can no longer be written (a full disk), the sweep ends; every record so far is kept.
        """
        try:
            self._cell(number, known, screen)
        except NotOurs as error:
            self._refused = True
            screen.settle(number, "failed", None)
            self._note(f"{self.cells[number].cell.name} was not measured: {error}")
        except OSError as error:
            self._writable = False
            screen.settle(number, "failed", None)
            self._note(f"the sweep ends here: {self.study.folder} can no longer be written: {because(error)}")

    def _cell(self, number: int, known: list[Record], screen: Screen) -> None:
        """Measure a cell unless another launcher measures it or has finished it; show and project its record."""
        planned = self.cells[number]
        with self.study.lock(planned.cell) as ours:
            if not ours:
                screen.settle(number, "measured elsewhere", None)
                return
            # Another launcher may have finished it while this one was at other cells.
            earlier = self.study.finished(planned.cell) if self.config.resume else None
            if earlier:
                screen.settle(number, "done before", earlier)
                return
            record = self.runner.measure(planned, known, lambda watch: screen.progress(number, watch))
        known.append(record)
        self.measured.append(record)
        screen.settle(number, record.state, record)
        self._print_output(record)
        self.projector.log(record)

    def _print_output(self, record: Record) -> None:
        """Print the text of the benchmark, for scripts that read it."""
        with contextlib.suppress(OSError):
            text = self.study.folder_of(record).output.read_text()
            self.console.print(text, markup=False, soft_wrap=True, end="")

    def _note(self, text: str) -> None:
        self.console.print(f"note: {text}", markup=False)

    def _report(self) -> Path | None:
        """Write the study's report and return its page; None without a report."""
        if self.config.report in (False, "False") or not self._writable:
            return None
        page = write_report(self.study.folder, self._note)
        if page and self.config.report == "open":
            show(page)
        return page

    def _last_lines(self, page: Path | None) -> None:
        """Print why cells failed or are not valid, and where records, report and MLflow runs are."""
        for line in explained(self.measured):
            self.console.print(line, markup=False)
        for record in self.measured:
            if record.failure and record.state == "failed":
                self.console.print(f"failed: {record.name}: {record.failure.message}", markup=False)
                for line in record.failure.log_tail.splitlines()[-5:]:
                    self.console.print(f"    {line}", markup=False, style="dim")
                folder, rank = self.study.folder_of(record), record.failure.rank
                log = folder.agent_log if rank is None else folder.rank_log(rank)
                if log.exists():
                    self.console.print(f"    log: {log}", markup=False, soft_wrap=True)
        report = [f"report   {page}"] if page else []
        for line in (f"records  {self.study.folder}", *report, *self.projector.where()):
            self.console.print(line, markup=False, soft_wrap=True)  # to be copied whole


def _print_plan(planned: Plan, console: Console) -> None:
    """Print the cells in their order, and the time that they will take."""
    known, _ = records.read_study(study_folder(planned.config.output_dir, planned.config.study))
    seconds = 0.0
    for number, entry in enumerate(planned.cells):
        seconds += estimate(entry.cell, known)
        console.print(f"{number + 1:4d}  {BETWEEN.join(filter(None, [entry.cell.name, entry.mark]))}", markup=False)
    cells = "1 cell" if len(planned.cells) == 1 else f"{len(planned.cells)} cells"
    console.print(f"{cells}, about {duration(seconds)}; nothing was started (dry_run=true)")
