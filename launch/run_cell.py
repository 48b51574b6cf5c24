"""Measure one cell, from its plan to its record: prepare the folder, run the ranks, observe what
was used, judge, write."""

import dataclasses
import errno
import uuid
from collections.abc import Callable, Sequence

from analysis.findings.communication import disagreement, with_values
from analysis.validity.checks import judged
from analysis.validity.effective import observe
from analysis.validity.fast_paths import NEED_TUNING, asked_of_nccl
from benchmarks import record as records
from benchmarks.record import CellFolder, Failure, Record, RecordError, safe_files
from benchmarks.record.lines import now
from benchmarks.record.safe_files import because
from conf.cell import Cell
from conf.question import GAINS
from conf.schema import Config
from conf.secrets import without_secrets
from launch.engines.agent_channel import AgentGone
from launch.engines.engine import CellEngine, CellPass, Job
from launch.engines.environment import NCCL_SUBSYSTEMS, compile_cache_variables
from launch.nsys import Nsys
from launch.plan.order import PlannedCell
from launch.study.background import Forecasts
from launch.study.run_environment import RunEnvironment
from launch.study.study_folder import StudyFolder, Sweep, assemble, prepare
from launch.supervision import supervise
from launch.supervision.failure import ResourceSnapshot
from launch.supervision.supervise import Outcome
from launch.supervision.watch import Watch

TUNING_PASS = "benchmarks.training.passes.tuning"
# Of an untimed pass: a line for every collective, with NCCL's choice.
CHOICES = {"NCCL_DEBUG_SUBSYS": f"{NCCL_SUBSYSTEMS},TUNING,REG"}


@dataclasses.dataclass(frozen=True)
class CellRunner:
    """Measures the cells of a sweep; holds what is the same for all of them."""

    config: Config
    here: RunEnvironment
    study: StudyFolder
    sweep: Sweep
    engine: CellEngine
    nsys: Nsys | None
    stopping: Callable[[], bool]
    note: Callable[[str], None]  # prints a sentence for the user
    forecasts: Forecasts

    def measure(
        self, planned: PlannedCell, study_records: list[Record], progress: Callable[[Watch], None]
    ) -> Record:
        """Run one cell and write its record, whatever happens in it.

        `study_records` are the study's records so far.

        Raises OSError: the study's folder cannot be written any more.
        """
        cell, folder = planned.cell, CellFolder(self.study.folder / planned.cell.folder)
        token = uuid.uuid4().hex
        caches = compile_cache_variables(cell, self.study.folder.parent, self.here.surrounding)
        environment = self.here.facts(cell, folder, caches) | planned.environment
        predicted = self.forecasts.before(cell, environment, study_records)
        details = {
            "study": self.study.name,
            "sweep_id": self.sweep.sweep_id,
            "overrides": self.sweep.overrides,
            "drift": planned.drift,
            "environment": environment,
        }
        if predicted:
            details["predicted"] = predicted
        self.study.begin(cell, token, details)
        timed = CellPass(cell, folder, token, caches, sampled=self.config.sample_gpus)
        outcome = self._run(timed, progress)
        ended_at = now()
        if outcome.unkillable_pids:
            held = "GPUs" if cell.device == "cuda" else "memory and cores"
            self.note(
                f"processes {outcome.unkillable_pids} of {cell.name} survive SIGKILL and may still "
                f"hold their {held}"
            )
        wants_tuning = self.config.tuning_pass in (True, "True")
        if self.config.tuning_pass == "auto":
            wants_tuning = not NEED_TUNING.isdisjoint(asked_of_nccl(cell))
        if cell.repeat and self.config.ask == GAINS:
            wants_tuning = False  # its files need one log of each candidate
        exchanges = cell.device == "cuda" and cell.world_size > 1
        exchanges = exchanges and (cell.trains or cell.benchmark["name"] == "collectives")
        if outcome.state == "finished" and wants_tuning and exchanges:
            with self.study.timed_step(token, "tuning pass"):
                self._tuning_pass(timed)
        try:
            record = assemble(
                folder,
                outcome.state,
                outcome.failure,
                ended_at,
                study_records,
                self.study.folder_of,
            )
            record = with_values(record, study_records)
        except RecordError as error:  # the files that this launcher made are gone, or changed
            code = errno.EIO if folder.cell.exists() else errno.ENOENT
            raise OSError(code, str(error), str(folder.cell)) from None
        if outcome.state == "finished" and cell.profiler != "none":
            # The record is written first: whatever happens in the pass, what was measured is safe.
            records.write(folder, judged(record, self.config.validity))
            with self.study.timed_step(token, "profiled pass"):
                record = self._profiled(record, timed, progress, study_records)
        record = judged(record, self.config.validity)
        self.study.end(folder, record)
        return record

    def _run(self, cell_pass: CellPass, progress: Callable[[Watch], None]) -> Outcome:
        limits, before = self.config.engine, ResourceSnapshot.take()
        cell, folder = cell_pass.cell, cell_pass.folder

        def start() -> Job:
            try:
                return self.engine.start(cell_pass)
            except AgentGone as error:
                self.note(f"{error}; another takes its place")
                return self.engine.start(cell_pass)

        try:
            outcome = supervise.run(cell, folder, start, limits, self.stopping, progress)
        except OSError as error:  # the agent could not be started, or the disk is full
            failure = Failure("start", None, f"it could not be run: {because(error)}")
            return Outcome("failed", failure, [])
        if outcome.state != "failed" or outcome.failure is None:
            return outcome
        failure = before.explain(outcome.failure, folder.path)
        # What ranks and agents print may hold anything.
        failure = dataclasses.replace(
            failure,
            message=without_secrets(failure.message),
            log_tail=without_secrets(failure.log_tail),
        )
        return dataclasses.replace(outcome, failure=failure)

    def _tuning_pass(self, timed: CellPass) -> None:
        """Run a few untimed steps in which NCCL logs each choice. A failure costs no number."""
        cell = timed.cell
        try:
            untimed = cell.untimed_pass("tuning_pass", TUNING_PASS)
            if not cell.trains:
                once = {"iterations": 1, "warmup": 0, "percentiles": False, "verify": False}
                untimed = dataclasses.replace(cell, benchmark=cell.benchmark | once)
            inside = prepare(timed.folder.tuning, untimed)
        except OSError as error:
            self.note(f"the tuning pass of {cell.name} could not be run: {because(error)}")
            return
        tuning = CellPass(cell, inside, timed.token, {**timed.added, **CHOICES})
        outcome = self._run(tuning, lambda watch: None)
        if outcome.failure:
            self.note(f"the tuning pass of {cell.name} failed: {outcome.failure.message}")

    def _profiled(
        self,
        record: Record,
        timed: CellPass,
        progress: Callable[[Watch], None],
        study_records: Sequence[Record],
    ) -> Record:
        """Return the record with what the profiled pass gave; as it is if the user stopped it.

        The pass of a script is its tuning pass too.
        """
        from launch.profiled_pass import profiled  # with numpy, which a plan does not need

        tunes = record.cell.runs_script and record.cell.device == "cuda"
        tunes = tunes and self.config.tuning_pass not in (False, "False")
        added = {**timed.added, **CHOICES} if tunes else timed.added
        folder = timed.folder

        def run(untimed: Cell, inside: CellFolder, command: Sequence[str]) -> Outcome:
            return self._run(CellPass(untimed, inside, timed.token, added, command), progress)

        trace = profiled(record.cell, folder, self.nsys, run)
        if trace.finding.severity == "unchecked":
            if self.stopping():
                return record
            self.note(f"{record.cell.name}: {trace.finding.sentence}")
        if tunes and folder.profile.nccl_logs():
            safe_files.make_folder(folder.tuning.path)
            folder.profile.nccl_conf.parent.rename(folder.tuning.nccl_conf.parent)
            effective = observe(record, folder, study_records, self.study.folder_of)
            record = dataclasses.replace(record, effective=effective)
        metrics = record.metrics | trace.metrics
        findings = [*record.effective.get("findings", []), dataclasses.asdict(trace.finding)]
        return dataclasses.replace(
            record,
            metrics=metrics | disagreement(metrics),
            tables=record.tables | trace.tables,
            effective=record.effective | trace.effective | {"findings": findings},
            raw_sha256=folder.raw_sha256(),
        )
