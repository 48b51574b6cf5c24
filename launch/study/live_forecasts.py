"""Forecast each cell of a sweep before its ranks start (predict=auto).

A forecast takes some hundredths of a second between two cells. What takes longer is done beside the
cells: numpy and scipy are imported while the agent imports torch, and the cells that were measured
are held out, one after the other, while the ranks of the next one start. So the interval of a
forecast comes from all cells but the one that has just ended. Of a LARGE study a forecast may
rest on the records of some cells before.
"""

import contextlib
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from analysis.study.noise_floor import Scatters
from analysis.study.study import Study
from analysis.validity.effective import class_between
from benchmarks.record import Record
from benchmarks.record.lines import now
from conf.cell import Cell
from launch.study.background import Job, Pace

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
                forecast = {"refused": "no cell of the study was measured before it"}
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
        measured, self._newest = (
            self._newest,
            [],
        )  # short cells may end faster than a study is held out
        with contextlib.suppress(Exception):  # `before` says why
            model = importlib.import_module(MODEL)
            if measured and (len(measured) < LARGE or self._scores_pace.is_due):
                with self._scores_pace.making():
                    study = Study.of(measured, scatters=self._scatters)
                    self._scores = model.scores_by_machine(study)


NONE = Forecasts(False, lambda job: None)  # of a sweep that asks for none


def _trained(measured: Sequence[Record]) -> bool:
    """Tell whether a record can say anything of a step."""
    return any(record.cell.trains and record.usable for record in measured)
