"""One invocation: plan, measure every cell, judge it, keep it, show it, project it."""

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from analysis.scaling import efficiency
from analysis.validity import judged
from benchmarks import record as records
from benchmarks.record import Failure, Record
from launch import supervise
from launch.assemble import assemble
from launch.display import Screen
from launch.environment import environment
from launch.machine import facts, variables
from launch.plan import Plan, Planned, Request, plan
from launch.projecting import Projector
from launch.study import Study
from launch.sweeps import Sweep
from launch.tracking_store import without_credentials




class Stopping:
    """Remembers that the user asked to stop: Ctrl-C or SIGTERM, once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        """Whether the user asked."""
        return self.asked

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals set the mark instead of ending this process."""
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = True


def run(requests: Sequence[Request], typed: Sequence[str]) -> int:
    """Run the sweep that was asked for. Exit status: 0 done, 1 a cell failed, 130 interrupted.

    Raises:
        Refused: the request is wrong; nothing was started.
    """
    surrounding = dict(os.environ)
    planned = plan(requests, surrounding)
    console = Console(highlight=False, soft_wrap=True)
    for notice in planned.notices:
        console.print(f"note: {notice}", markup=False)
    if planned.config.dry_run:
        _print_plan(planned, console)
        return 0
    stopping = Stopping()
    with stopping.listening():
        return _Sweep(planned, [without_credentials(text) for text in typed], surrounding, stopping, console).run()


class _Sweep:
    """The state of one invocation."""

    def __init__(
        self, planned: Plan, typed: list[str], surrounding: Mapping[str, str], stopping: Stopping, console: Console
    ) -> None:
        self.plan, self.config, self.surrounding = planned, planned.config, surrounding
        self.stopping, self.console = stopping, console
        self.study = Study(self.config.output_dir, self.config.study)
        self.sweep = Sweep.begin(self.config.study, typed, len(planned.cells))
        self.measured: list[Record] = []  # in this invocation

    def run(self) -> int:
        for record in self.study.recover():
            self.console.print(f"note: {record.name} was left open by a launcher that died; what it measured is kept", markup=False)
        known, unreadable = records.read_study(self.study.folder)
        for error in unreadable:
            self.console.print(f"note: {error}", markup=False)
        done = {number: record for number, planned in enumerate(self.plan.cells)
                if self.config.resume and (record := self.study.finished(planned.cell))}  # fmt: skip
        projector = Projector(self.config.tracking, self.study, self.sweep, self.console)
        if len(done) < len(self.plan.cells):
            projector.open()
        self.study.note("sweep", sweep_id=self.sweep.sweep_id, overrides=self.sweep.overrides, cells=len(self.plan.cells))
        with Screen(self.plan.cells, known, self.console) as screen:
            for number, planned in enumerate(self.plan.cells):
                if number in done:
                    screen.settle(number, "done before", done[number])
                elif not self.stopping():
                    with self.study.lock(planned.cell) as ours:
                        record = self._measure(number, planned, known, screen) if ours else None
                        screen.settle(number, record.state if record else "held elsewhere", record)
                    if record:
                        projector.log(record)
        projector.close(self.measured, done.values(), interrupted=self.stopping())
        self._last_lines(projector)
        if self.stopping():
            return 130
        strict = self.config.validity.strict
        bad = [r for r in self.measured if r.state != "finished" or strict and r.validity.verdict == "invalid"]
        return 1 if bad else 0

    def _measure(self, number: int, planned: Planned, known: list[Record], screen: Screen) -> Record:
        """Measure one cell and write its record."""
        cell, machine = planned.cell, self.plan.machine
        folder = self.study.folder / cell.folder
        details = {
            "study": self.study.name,
            "sweep_id": self.sweep.sweep_id,
            "overrides": self.sweep.overrides,
            "drift": planned.drift,
        }
        token = uuid.uuid4().hex
        variable = environment(cell, machine, folder, token, self.surrounding)
        uuids = [device.uuid for gpu in cell.gpus for device in machine.devices if device.id == gpu and device.uuid]
        about = {**facts(), "planned_uuids": uuids, "variables": variables(variable)}
        attempt = self.study.begin(cell, token, {**details, "environment": about})
        try:
            outcome = supervise.run(
                cell, folder, variable, token, self.config.engine, self.stopping,
                lambda watch: screen.progress(number, watch),
            )  # fmt: skip
        except OSError as error:  # the agent could not be started, or the disk is full
            outcome = supervise.Outcome("failed", Failure("start", None, f"the cell could not be run: {error}"), [])
        if outcome.immortal:
            self.console.print(f"note: processes {outcome.immortal} of {cell.name} survive SIGKILL and may hold their GPUs")
        record = assemble(folder, outcome.state, outcome.failure, time.time())
        record = judged(record, self.config.validity)
        share = efficiency(record, known)
        if share is not None:
            record.metrics["scaling/efficiency"] = share
        self.study.end(attempt, record)
        known.append(record)
        self.measured.append(record)
        return record

    def _last_lines(self, projector: Projector) -> None:
        """Where everything is."""
        bad = [record for record in self.measured if record.state == "failed"]
        for record in bad:
            assert record.failure is not None
            self.console.print(f"failed: {record.name}: {record.failure.message}", markup=False)
            for line in record.failure.log_tail.splitlines()[-5:]:
                self.console.print(f"    {line}", markup=False, style="dim")
        self.console.print(f"records  {self.study.folder}", markup=False)
        for line in projector.where():
            self.console.print(line, markup=False)


def _print_plan(planned: Plan, console: Console) -> None:
    for number, entry in enumerate(planned.cells):
        console.print(f"{number + 1:4d}  {entry.cell.name}{' · drift' if entry.drift else ''}", markup=False)
    console.print(f"{len(planned.cells)} cells; nothing was started (dry_run=true)")
