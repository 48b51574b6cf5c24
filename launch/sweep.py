"""Run one invocation: plan, measure every cell, write its record, show it, project it to MLflow."""

import atexit
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO, cast

from rich.console import Console

from analysis.console import SafeConsole
from analysis.study.noise_floor import of_other_studies
from analysis.text import single_line
from benchmarks import record as records
from benchmarks.record import CellFolder, Kind, Record
from benchmarks.record.lines import at, now
from benchmarks.record.safe_files import NotOurs, because
from conf import nccl
from conf.options import Refused
from conf.resolve import checked
from conf.schema import Request
from launch.cli.compose import cpu_preset_note
from launch.deferred_cells import DeferredCells
from launch.display.resilient_stream import ResilientStream
from launch.display.screen import Screen
from launch.display.summary import (
    MEASURED_ELSEWHERE,
    MESSAGE_LENGTH,
    exit_status,
    locked_cells_note,
    print_plan,
    print_summary,
    sweep_note,
)
from launch.engines.engine import CellEngine
from launch.engines.hosts import HostsEngine
from launch.engines.local import LocalEngine
from launch.engines.submit import submit
from launch.machine.devices import refuse_several
from launch.machine.facts import nccl_configuration
from launch.machine.fleet import compare
from launch.machine.secrets import argument_without_secrets
from launch.plan.estimate import TimeLeft, worded
from launch.plan.expand import wanted_hosts
from launch.plan.order import rounds
from launch.plan.plan import Plan, plan, refuse_wrong_options
from launch.plan.refusals import refuse_engines
from launch.run_cell import CellRunner
from launch.study.background import BesideCells, StudyReport, look_for_garbage, update_noise_floor
from launch.study.forecasts import Forecasts
from launch.study.identity import Sweep
from launch.study.provenance import HostsAround, Surroundings
from launch.study.study import StudyFolder, done_before
from launch.supervision.progress import Watch
from launch.supervision.stopping import Stopping
from launch.tracking.mlflow_writer import MlflowWriter


def run(
    requests: Sequence[Request], typed: Sequence[str], began_s: float, preset: Sequence[str] = ()
) -> int:
    """Run the sweep of some requests; `typed` is the command as it was typed.

    `began_s` is what the monotonic clock said as launch.py began; `preset` are the options of the study's CPU preset.

    Exit status: 0 done, 1 a cell failed, 3 other launchers are measuring cells of it (wait=false), 130 interrupted or out of
    the job's time.

    Raises:
        Refused: the request is wrong; nothing was started.
    """
    refuse_several(os.environ)
    atexit.register(
        gc.freeze
    )  # or Python would search all that was imported for garbage as it ends: a second
    console = SafeConsole(cast(TextIO, ResilientStream(sys.stdout)))
    # A file, a pipe or a dumb terminal has no known width to wrap at.
    console.soft_wrap = not console.is_terminal or console.is_dumb_terminal
    stopping = Stopping(console)
    if requests[0].config.engine.submit and not requests[0].config.dry_run:
        configs = [checked(request.config)[0] for request in requests]
        refuse_engines(configs)
        console.print(submit(configs, typed, os.environ), markup=False, soft_wrap=True)
        return 0
    surrounding = nccl.with_configuration_files(os.environ, nccl_configuration(os.environ))
    with _refused("the request could not be planned"):
        planned, engine, here = prepared(requests, surrounding)
    for notice in [
        *planned.notices,
        *([cpu_preset_note(preset, planned.config.study)] if preset else []),
    ]:
        console.print(f"note: {notice}", markup=False)
    if planned.config.dry_run:
        print_plan(planned, console)
        return 0
    words = [argument_without_secrets(text) for text in typed]
    cannot_write = f"output_dir={planned.config.output_dir}: cannot be written"
    with contextlib.closing(engine), stopping.listening(), _refused(cannot_write):
        return SweepRun(planned, words, at(began_s), engine, here, stopping, console).run()


def prepared(
    requests: Sequence[Request], surrounding: Mapping[str, str]
) -> tuple[Plan, CellEngine, Surroundings]:
    """Return the plan of a sweep, the engine that runs it, and what is around its cells. A dry run starts nothing.

    Raises:
        Refused: the request is wrong, or a host cannot do its part. No process of ours is left.
    """
    first = requests[0].config
    limits = first.engine
    if first.dry_run or not any(request.config.nodes for request in requests):
        planned = plan(requests, surrounding)
        local = LocalEngine(planned.machine, surrounding, limits.start, limits.stop_grace_s)
        return planned, local, Surroundings(planned.machine, surrounding)
    refuse_wrong_options(requests)  # before any host is asked
    names = wanted_hosts([request.config for request in requests], surrounding)
    engine = HostsEngine(limits, surrounding)
    try:
        fleet = engine.open_on(names, first.device)
        notices = compare(fleet)
        planned = plan(requests, surrounding, fleet)
        engine.meet([one.cell for one in planned.cells])
    except BaseException:
        engine.close()
        raise
    planned.notices[:0] = notices
    return planned, engine, HostsAround(planned.machine, surrounding, fleet, engine.variables)


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
        self, planned: Plan, typed: list[str], began_at: float, engine: CellEngine, here: Surroundings, stopping: Stopping,
        console: Console,
    ) -> None:  # fmt: skip
        self.cells, self.config, self.stopping, self.console = (
            planned.cells,
            planned.config,
            stopping,
            console,
        )
        self.study = StudyFolder(self.config.output_dir, self.config.study)
        self.sweep = Sweep.begin(self.config.study, typed, len(self.cells))
        self.began_at = began_at  # seconds since 1970: the first line of launch.py
        self.engine, self.here, self.beside = engine, here, BesideCells()
        self.forecasts = Forecasts(
            self.config.predict, self.beside.do, of_other_studies(self.study.folder)
        )
        parts = self.study, self.sweep, engine, planned.nsys, stopping, self._note, self.forecasts
        self.runner = CellRunner(self.config, here, *parts)
        self.mlflow = MlflowWriter(
            self.config.tracking, self.study, self.sweep, console, self.beside
        )
        self.report = StudyReport(self.study.folder, self.config.report, self._note)
        self.time_left = TimeLeft(self.config.engine, here.surrounding, self._note)
        self.measured: list[Record] = []  # in this invocation
        self.done: dict[int, Record] = {}  # earlier, or by others; by the cell's place in the order
        self.left = DeferredCells([one.cell for one in self.cells], self._note)
        self._settling = threading.Lock()  # for cells that run at the same time
        self._quiet = False  # ranks need it: nothing further is imported
        self._writable = True
        self._refused = False  # a cell's folder was not ours to write

    def run(self) -> int:
        """Measure every cell that is not done, then write the report and close the sweep; return the exit status.

        Raises:
            OSError: the study's folder cannot be written; nothing was started.
        """
        cells = [one.cell for one in self.cells]
        told = {
            "sweep_id": self.sweep.sweep_id,
            "overrides": self.sweep.overrides,
            "began": self.began_at,
        }
        self.study.note("sweep", **told, order=[cell.folder for cell in cells])
        self._close_left()
        if new := [
            cell
            for cell in cells
            if not CellFolder(self.study.folder / cell.folder).record.exists()
        ]:
            self.engine.open(
                new[0]
            )  # imports torch while earlier records are compared and the store is opened
        known, unreadable = records.read_study(self.study.folder)
        for one in unreadable:
            self._note(str(one))
        if self.config.resume:
            self.done = done_before(cells, self.study, self.here, self._note)
        if len(self.done) < len(self.cells):
            open_cells = [one for number, one in enumerate(self.cells) if number not in self.done]
            self.console.print(worded(open_cells, known), markup=False)
            self.engine.open(open_cells[0].cell)
            self.forecasts.prepare(known)
            self.mlflow.open()
            self.beside.do(lambda: self.report.prepare(may_go_on=lambda: not self._quiet))
            self.beside.do(look_for_garbage)
        with Screen(self.cells, known, self.console, of_other_studies(self.study.folder)) as screen:
            for numbers in rounds(self.cells):
                self._round(numbers, known, screen)
            if self.config.wait:
                self.left.wait_for_others(
                    self.study,
                    lambda: self._look_at_others(known),
                    lambda: self._writable and not self.stopping(),
                    lambda number: self._try_cell(number, known, screen),
                )
            self.left.try_lost_hosts(
                self.engine, self.stopping, lambda number: self._measure(number, known, screen)
            )
            self.left.settle(screen, self.engine)
        self.beside.do(self.engine.close)  # it waits for processes to end
        if self._writable:
            self._refuse_another_folder()
        if self._writable:
            update_noise_floor(self.study.folder, known, self._note)
        page, finding = self.report.write() if self._writable else (None, ())
        self.mlflow.close(
            self.measured, self.done.values(), known, self.stopping, page and page.parent
        )
        spent = sweep_note(self.measured, now() - self.began_at)
        where = [*spent, *([f"report   {page}"] if page else []), *self.mlflow.where()]
        with contextlib.suppress(OSError):
            self.study.note(Kind.CLOSED, sweep_id=self.sweep.sweep_id)
        finished = {one.cell_key for one in self.measured if one.state == "finished"}
        open_cells = [one for number, one in enumerate(self.cells) if number not in self.done]
        unfinished = sum(one.cell.key not in finished for one in open_cells)
        print_summary(self.console, self.study, self.measured, unfinished, finding, where)
        stopped = self.stopping() or self.time_left.too_short
        missing = bool(self._refused or self.left.lost) or not self._writable
        every = [*self.done.values(), *self.measured]
        status = exit_status(
            every, stopped, missing, len(self.left.held), self.config.validity.strict
        )
        if status == MEASURED_ELSEWHERE:
            self._note(locked_cells_note(len(self.left.held)))
        return status

    def _round(self, numbers: Sequence[int], known: list[Record], screen: Screen) -> None:
        """Measure cells at the same time, those that were not done before."""
        left = [number for number in numbers if number not in self.done]
        for number in numbers:
            if number in self.done:
                screen.settle(number, "done before", self.done[number])
        if len(left) == 1:
            self._measure(left[0], known, screen)
        elif left:
            with ThreadPoolExecutor(len(left), "cell") as together:
                for ended in [
                    together.submit(self._measure, number, known, screen) for number in left
                ]:
                    ended.result()

    def _measure(self, number: int, known: list[Record], screen: Screen) -> None:
        if (
            not self.stopping()
            and self._writable
            and self.time_left.fits(self.cells[number], known)
        ):
            self._try_cell(number, known, screen)

    def _close_left(self) -> list[Record]:
        """Close what launchers left that died, and return their records."""
        closed = self.study.recover()
        for left in closed:
            self._note(
                f"{left.name}: an earlier launcher died while it ran; what was measured is kept as interrupted"
            )
        return closed

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
            screen.settle(number, "failed", None)
            self._end_here(error)

    def _refuse_another_folder(self) -> None:
        """Write nothing more if the study's folder is gone, as after an unmount while the last cell was tracked."""
        try:
            self.study.refuse_another()
        except OSError as error:
            self._end_here(error)

    def _end_here(self, error: OSError) -> None:
        """Start no further cell: the study's folder can no longer be written."""
        self._writable = False
        self._note(
            f"the sweep ends here: {self.study.folder} can no longer be written: {because(error)}"
        )

    def _cell(self, number: int, known: list[Record], screen: Screen) -> None:
        """Measure a cell unless another launcher measures it or has finished it; show and project its record."""
        planned = self.cells[number]
        if self.engine.lost(planned.cell):
            self.left.lost.append(number)
            return
        with self.study.lock(planned.cell) as ours:
            if not ours:
                self.left.held.append(number)
                screen.hold(number)
                return
            # Another launcher may have finished it while this one was at other cells.
            earlier = self.study.finished(planned.cell, self.here) if self.config.resume else None
            if earlier:
                self.done[number] = earlier
                known.append(earlier)
                screen.settle(number, "done before", earlier)
                return
            record = self.runner.measure(
                planned, [*known], lambda watch: self._progress(number, watch, screen)
            )
        with self._settling:
            known.append(record)
            self.measured.append(record)
            screen.settle(number, record.state, record)
            self._print_output(record)
            self.mlflow.log(record)
            self.forecasts.learn(known, more=number + 1 < len(self.cells))

    def _progress(self, number: int, watch: Watch, screen: Screen) -> None:
        self._quiet = self._quiet or watch.needs_quiet
        screen.progress(number, watch)

    def _look_at_others(self, known: list[Record]) -> None:
        """Close what other launchers left that died meanwhile."""
        try:
            known += self._close_left()
        except OSError as error:
            self._end_here(error)

    def _print_output(self, record: Record) -> None:
        """Print the text of the benchmark, for scripts that read it."""
        with contextlib.suppress(OSError):
            text = self.study.folder_of(record).output.read_text(encoding="utf-8", errors="replace")
            self.console.print(text, markup=False, soft_wrap=True, end="")

    def _note(self, text: str) -> None:
        self.console.print(f"note: {single_line(text, MESSAGE_LENGTH)}", markup=False)
