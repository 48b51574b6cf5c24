"""Run one invocation: plan, measure every cell, write its record, show it, project it to MLflow."""

import atexit
import contextlib
import gc
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

from analysis.console import SafeConsole
from analysis.study.asked import Asked, answer, is_answered, replay
from analysis.study.noise_floor import of_other_studies
from analysis.study.rehearsal import conclusion
from analysis.study.study import Study
from analysis.text import count, single_line
from benchmarks import record as records
from benchmarks.record import CellFolder, Kind, Record
from benchmarks.record.lines import at, now
from benchmarks.record.safe_files import NotOurs, because
from conf import nccl
from conf.options import Refused
from conf.question import GAINS
from conf.resolve import checked
from conf.schema import Request
from conf.secrets import argument_without_secrets
from launch.compose import cpu_preset_note
from launch.display.closing_summary import (
    MEASURED_ELSEWHERE,
    MESSAGE_LENGTH,
    all_doubtful,
    exit_status,
    print_plan,
    print_summary,
    sweep_note,
)
from launch.display.screen import SKIPPED, ResilientStream, Screen
from launch.engines import inside_job
from launch.engines.engine import CellEngine
from launch.engines.hosts import HostsEngine
from launch.engines.local import LocalEngine
from launch.engines.slurm import submit
from launch.machine.facts import nccl_configuration
from launch.machine.fleet import compare, refuse_two_names
from launch.plan.estimate import does_not_fit, duration, estimates, worded
from launch.plan.expand import wanted_hosts
from launch.plan.order import PlannedCell
from launch.plan.plan import Plan, plan, refuse_wrong_options
from launch.plan.refusals import refuse_nested, refuse_requests
from launch.run_cell import CellRunner
from launch.study.background import (
    BackgroundQueue,
    Forecasts,
    StudyReport,
    look_for_garbage,
    update_noise_floor,
)
from launch.study.run_environment import HostsEnvironment, RunEnvironment
from launch.study.study_folder import StudyFolder, Sweep, find_finished
from launch.study.tuned_files import write_tuned
from launch.supervision.supervise import INTERRUPTED, Stopping
from launch.supervision.watch import Watch
from launch.tracking.tracker import MlflowWriter

PIPE_WIDTH = 120  # characters
HELD_POLL_S = 1.0  # between two looks at the cells that other launchers hold


def run(
    requests: Sequence[Request], typed: Sequence[str], began_s: float, preset: Sequence[str] = ()
) -> int:
    """Run the sweep of some requests; `typed` is the command as it was typed.

    `began_s` is what the monotonic clock said as launch.py began; `preset` are the options of the
    study's CPU preset.

    Exit status: 0 done, 1 a cell failed, 3 other launchers are measuring cells of it (wait=false)
    or its question is open, health too, 130 interrupted or out of the job's time.

    Raises Refused: the request is wrong; nothing was started.
    """
    first = requests[0].config
    job = None
    if first.engine.name == "env":
        job = inside_job.place(os.environ, first.engine)
        if job.local_rank or (first.dry_run and not job.is_first):
            return 0  # one process a node measures
        if not first.dry_run:
            refuse_wrong_options(requests)  # before any node is waited for
        if not job.is_first:
            inside_job.become_agent(job, first.engine)
    else:
        refuse_nested(os.environ)
    # Or Python would search all that was imported for garbage as it ends: a second.
    atexit.register(gc.freeze)
    console = SafeConsole(cast(TextIO, ResilientStream(sys.stdout)))
    # A file, a pipe or a dumb terminal has no known width to wrap at.
    console.soft_wrap = not console.is_terminal or console.is_dumb_terminal
    if console.soft_wrap:
        console.width = PIPE_WIDTH  # of tables
    stopping = Stopping(console)
    if first.engine.submit and not first.dry_run:
        configs = [checked(request.config)[0] for request in requests]
        refuse_requests(configs)
        console.print(submit(configs, typed, os.environ), markup=False, soft_wrap=True)
        return 0
    surrounding = nccl.with_configuration_files(os.environ, nccl_configuration(os.environ))
    joined: dict[str, socket.socket] = {}
    if job:
        names = [f"node{index}" for index in range(job.nodes)]
        if not first.dry_run:
            names, joined = inside_job.gather(job, first.engine, console)
        surrounding[inside_job.NODES] = " ".join(names)
    with _refused("the request could not be planned"):
        planned, engine, here = prepared(requests, surrounding, joined)
    if preset:
        planned.notices.append(cpu_preset_note(preset, planned.config.study))
    if planned.config.dry_run:
        for notice in planned.notices:
            console.print(f"note: {notice}", markup=False)
        print_plan(planned, here, console)
        return 0
    words = list(map(argument_without_secrets, typed))
    cannot_write = f"output_dir={planned.config.output_dir}: cannot be written"
    with contextlib.closing(engine), stopping.listening(), _refused(cannot_write):
        return SweepRun(planned, words, at(began_s), engine, here, stopping, console).run()


def prepared(
    requests: Sequence[Request], surrounding: Mapping[str, str], joined: Mapping[str, socket.socket]
) -> tuple[Plan, CellEngine, RunEnvironment]:
    """Return the plan of a sweep, the engine that runs it, and what is around its cells. A dry run
    starts nothing. `joined` are connections to the other nodes of this job.

    Raises Refused: the request is wrong, or a host cannot do its part. No process of ours is left.
    """
    first = requests[0].config
    if first.dry_run or not any(request.config.nodes for request in requests):
        planned = plan(requests, surrounding)
        local = LocalEngine(planned.machine, surrounding, first.engine)
        return planned, local, RunEnvironment(planned.machine, surrounding)
    refuse_wrong_options(requests)  # before any host is asked
    names = wanted_hosts([request.config for request in requests], surrounding)
    engine = HostsEngine(first.engine, surrounding, joined)
    try:
        fleet = engine.open_on(names, first.device)
        # Slurm knows its nodes, and two of them may be one machine, as in tests.
        if first.engine.name != "slurm":
            refuse_two_names(fleet)
        notices = compare(fleet)
        planned = plan(requests, surrounding, fleet)
        engine.meet([entry.cell for entry in planned.cells])
    except BaseException:
        engine.close()
        raise
    planned.notices[:0] = notices
    return planned, engine, HostsEnvironment(planned.machine, surrounding, fleet, engine.variables)


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """Have an OSError outside a cell be a sentence that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise Refused(f"{what}: {because(error)}") from None


class SweepRun:
    """One invocation: its cells, what measures them, and what was measured so far."""

    def __init__(
        self,
        planned: Plan,
        typed: list[str],
        began_at: float,
        engine: CellEngine,
        here: RunEnvironment,
        stopping: Stopping,
        console: Console,
    ) -> None:
        """`began_at` is the time of the first line of launch.py, in seconds since 1970."""
        self.cells, self.config = planned.cells, planned.config
        self.notices = planned.notices
        self.engine, self.here, self.stopping, self.console = engine, here, stopping, console
        self.began_at = began_at
        self.study = StudyFolder(self.config.output_dir, self.config.study)
        self.sweep = Sweep.begin(self.config.study, typed, len(self.cells))
        self.background = BackgroundQueue()
        self.other_studies = of_other_studies(self.study.folder)
        self.asked: Asked | None = None
        if planned.question is not None:
            cells = [entry.cell for entry in planned.cells]
            sweep_id = self.sweep.sweep_id
            self.asked = Asked.of(
                planned.question, sweep_id, cells, self.other_studies, planned.training
            )
        self.training = planned.training
        self.forecasts = Forecasts(self.config.predict, self.background.submit, self.other_studies)
        self.runner = CellRunner(
            config=self.config,
            here=here,
            study=self.study,
            sweep=self.sweep,
            engine=engine,
            nsys=planned.nsys,
            stopping=stopping,
            note=self._note,
            forecasts=self.forecasts,
        )
        self.mlflow = MlflowWriter(
            self.config.tracking, self.study, self.sweep, console, self.background
        )
        self.report = StudyReport(self.study.folder, self.config.report, self._note)
        self.known: list[Record] = []  # records of the study, those of this invocation too
        self.measured: list[Record] = []  # in this invocation
        self.done: dict[int, Record] = {}  # earlier, or by others; by the cell's index
        self.held: list[int] = []  # cells that other launchers measure
        self._quiet = False  # ranks need it: nothing further is imported
        self._writable = True
        self._too_short = False  # the job of Slurm, for some cell
        self._incomplete = False  # a cell could not be measured: its folder, or a host is lost

    def run(self) -> int:
        """Measure every cell that is not done, then write the report and close the sweep; return
        the exit status.

        Raises OSError: the study's folder cannot be written; nothing was started.
        """
        with self.stopping.at_once():
            self._begin()
        if self.stopping():
            with contextlib.suppress(OSError):
                self.study.note(Kind.CLOSED, sweep_id=self.sweep.sweep_id)
            self.mlflow.close((), (), (), self.stopping, None)
            return INTERRUPTED
        self.screen = Screen(self.cells, self.known, self.console, self.other_studies)
        with self.screen:
            with self.stopping.at_once():
                self.screen.settle_done(self.done)
            for index in self._order():
                planned = self.cells[index]
                if index in self.done or not self._writable or self.stopping():
                    continue
                why = does_not_fit(planned, self.known, self.config.engine, self.here.surrounding)
                if not why:
                    self._try_cell(index)
                elif not self._too_short:
                    self._note(why)
                    self._too_short = True
            if self.config.wait:
                self._wait_for_others()
            for index in self.held:
                self.screen.settle(index, "measured elsewhere", None)
        return self._end()

    def _order(self) -> Iterator[int]:
        """Yield the cells by index: those of the plan, or as a question needs them."""
        if self.asked is None:
            yield from range(len(self.cells))
            return
        indices = {planned.cell.key: index for index, planned in enumerate(self.cells)}
        candidates = {cell.key: cell for cell in self.training}
        candidates |= {planned.cell.key: planned.cell for planned in self.cells}
        budget_s = self.asked.question.budget_s
        while True:
            race = replay(self.asked, filter(None, self.screen.records))
            self.screen.show_race(self.asked, race)
            if not race.pending or self.stopping() or not self._writable:
                return
            chosen = race.pending[0]
            cell = candidates[race.keys[chosen]]
            run = PlannedCell(replace(cell, repeat=len(race.records[chosen])))
            (needed,) = estimates([run], self.known)
            if budget_s is not None and now() - self.began_at + needed.seconds > budget_s:
                used = duration(now() - self.began_at)
                self._note(
                    f"budget={duration(budget_s)}: {used} are used, and the next run would take "
                    "longer than the rest"
                )
                return
            if run.cell.key not in indices:
                indices[run.cell.key] = len(self.cells)
                self.screen.add(run)
            index = indices[run.cell.key]
            yield index
            record = self.screen.records[index]
            if record is None or record.state == "interrupted":
                return  # another launcher has it, its host is lost, or a signal came

    def _begin(self) -> None:
        cells = [planned.cell for planned in self.cells]
        self.study.note(
            "sweep",
            sweep_id=self.sweep.sweep_id,
            overrides=self.sweep.overrides,
            began=self.began_at,
            order=[cell.folder for cell in cells],
        )
        if self.asked is not None:
            self.study.note(Kind.QUESTION, **asdict(self.asked))
        self._close_abandoned()
        for cell in cells:
            if not CellFolder(self.study.folder / cell.folder).record.exists():
                # It imports torch while earlier records are compared and the store is opened.
                self.engine.open(cell)
                break
        earlier, unreadable = records.read_study(self.study.folder)
        self.known += earlier
        for error in unreadable:
            self._note(str(error))
        if self.config.resume:
            by_id = {record.record_id: record for record in self.known}
            self.done = find_finished(cells, self.study, self.here, self._note, by_id)
        open_cells = self._open_cells()
        work = "nothing is left to measure"
        if open_cells:
            work = worded(open_cells, self.known)
        self.console.print(f"{self.config.intro}{work}", markup=False)
        for notice in self.notices:
            self._note(notice)
        if not open_cells:
            look_for_garbage()
            return
        self.engine.open(open_cells[0].cell)
        self.forecasts.prepare(self.known)
        self.mlflow.open()
        self.background.submit(lambda: self.report.prepare(may_go_on=lambda: not self._quiet))
        self.background.submit(look_for_garbage)

    def _open_cells(self) -> list[PlannedCell]:
        return [planned for index, planned in enumerate(self.cells) if index not in self.done]

    def _end(self) -> int:
        """Write the report, close the sweep and print its end; return the exit status."""
        self.background.submit(self.engine.close)  # it waits for processes to end
        page: Path | None = None
        findings: Sequence[str] = ()
        was_stopped = self.stopping()
        has_news = bool(self.measured) or not was_stopped
        subjects = {planned.cell.subject for planned in self.cells}

        def of_study() -> list[Record]:
            """Nothing once a signal comes meanwhile: the user waits, and `sync` writes the rest."""
            return self.known if has_news and was_stopped == self.stopping() else []

        if was_stopped and self.measured:
            self.console.print("writing the report and MLflow; a second signal leaves them out")
        if self._writable and has_news:
            try:
                # The folder may be gone, as after an unmount while the last cell was tracked.
                self.study.check_still_mounted()
            except OSError as error:
                self._stop_writing(error)
        if self._writable and has_news:
            with self.stopping.at_once():
                update_noise_floor(self.study.folder, self.known, self._note)
                page, findings = self.report.write(subjects)
        with self.stopping.at_once():
            self.mlflow.close(
                self.measured, self.done.values(), of_study(), self.stopping, page and page.parent
            )
        where = [*sweep_note(self.measured, now() - self.began_at)]
        if page:
            where.append(f"report   {page}")
        where += self.mlflow.where()
        with contextlib.suppress(OSError):
            self.study.note(Kind.CLOSED, sweep_id=self.sweep.sweep_id)
        finished = {record.cell_key for record in self.measured if record.state == "finished"}
        unfinished = 0
        if self.asked is None:
            unfinished = sum(planned.cell.key not in finished for planned in self._open_cells())
        slow: list[str] = []
        is_open = False
        every_run = [*self.done.values(), *self.measured]
        if self.config.health:
            from analysis.findings.health import health  # needs numpy

            limit = self.config.validity.slow_rank_limit
            slow, compared, is_judged = health(Study.of(every_run), limit)
            is_open = not is_judged
            for line in slow:
                self.console.print(line, markup=False, style="bold red")
            self.console.print(compared, markup=False)
        if self.cells[0].environment and every_run:
            line, fails = conclusion(every_run)
            findings, self._incomplete = [line], self._incomplete or fails
        if self.asked is not None:
            race = replay(self.asked, filter(None, self.screen.records))
            is_open = not is_answered(race)
            if is_open and race.pending and not all_doubtful(every_run):
                where.append("next     rerun the same command: the question goes on")
            if self._writable and self.asked.question.kind == GAINS:
                where += [f"tuned    {path}" for path in write_tuned(self.study, self.asked, race)]
            findings = answer(self.asked, race)
        with self.stopping.at_once():
            records = [record for record in of_study() if record.cell.subject in subjects]
            shown = Study.of(records, scatters=self.other_studies)
            print_summary(self.console, self.study, shown, every_run, unfinished, findings, where)
        status = exit_status(
            every_run,
            self.stopping() or self._too_short,
            self._incomplete or not self._writable or bool(slow),
            len(self.held) + is_open,
            self.config.validity.strict,
        )
        if self.held and status == MEASURED_ELSEWHERE:
            runs = count(len(self.held), "run of this sweep is", "runs of this sweep are")
            self._note(
                f"{runs} measured by other launchers, and wait=false does not wait for them (exit "
                f"status {MEASURED_ELSEWHERE})"
            )
        return status

    def _wait_for_others(self) -> None:
        """Wait for cells that others hold: take over what they finish, measure what they do not."""
        for index in self.held:
            cell = self.cells[index].cell
            self._note(f"waiting for {cell.name}: {self.study.who_holds(cell)} (Ctrl-C leaves)")
        while self.held and self._writable and not self.stopping():
            time.sleep(HELD_POLL_S)
            try:
                self.known += self._close_abandoned()
            except OSError as error:
                self._stop_writing(error)
                return
            held, self.held = self.held, []
            for index in held:
                if self._writable and not self.stopping():
                    self._try_cell(index)
                else:
                    self.held.append(index)

    def _close_abandoned(self) -> list[Record]:
        closed = self.study.recover()
        for record in closed:
            self._note(
                f"{record.name}: an earlier launcher died while it ran; what was measured is kept "
                "as interrupted"
            )
        return closed

    def _try_cell(self, index: int) -> None:
        """Measure a cell unless another launcher measures or has finished it; show it.

        It fails where its folder holds a file of somebody else or is lost.
        """
        planned = self.cells[index]
        try:
            lost = self.engine.lost(planned.cell)
            if lost:
                self._skip(index, SKIPPED, lost)
                return
            with self.study.lock(planned.cell) as is_locked:
                if not is_locked:
                    self.held.append(index)
                    self.screen.hold(index)
                    return
                # Another launcher may have finished it while this one was at other cells.
                earlier = None
                if self.config.resume:
                    earlier = self.study.finished(planned.cell, self.here)
                if earlier:
                    self.done[index] = earlier
                    self.known.append(earlier)
                    self.screen.settle(index, "done before", earlier)
                    return

                def progress(watch: Watch) -> None:
                    self._quiet = self._quiet or watch.needs_quiet
                    self.screen.progress(index, watch)

                record = self.runner.measure(planned, [*self.known], progress)
            self.known.append(record)
            self.measured.append(record)
            self.screen.settle(index, record.state, record)
            with contextlib.suppress(OSError):
                output = self.study.folder_of(record).output
                text = output.read_text(encoding="utf-8", errors="replace")
                if not planned.environment:  # what a benchmark prints are times
                    self.console.print(text, markup=False, soft_wrap=True, end="")
            self.mlflow.log(record)
            self.forecasts.learn(self.known, more=index + 1 < len(self.cells))
        except NotOurs as error:
            self._skip(index, "failed", str(error))
        except OSError as error:
            self.screen.settle(index, "failed", None)
            self._stop_writing(error)

    def _skip(self, index: int, state: str, why: str) -> None:
        self._incomplete = True
        self.screen.settle(index, state, None)
        self._note(f"{self.cells[index].cell.name} was not measured: {why}")

    def _stop_writing(self, error: OSError) -> None:
        self._writable = False
        self._note(
            f"the sweep ends here: {self.study.folder} can no longer be written: {because(error)}"
        )

    def _note(self, text: str) -> None:
        self.console.print(f"note: {single_line(text, MESSAGE_LENGTH)}", markup=False)
