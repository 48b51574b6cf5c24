"""Run one cell to its end, whatever happens in it: start its job, keep deadlines, name the cause, leave no process behind."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.record import CellFolder, Failure
from conf import schema
from conf.cell import Cell
from launch.engines.engine import CellEngine, Job
from launch.supervision.failure import first_cause, hang, left_early, with_log
from launch.supervision.progress import Rank, Watch

POLL_SECONDS = 0.1
STACKS_SECONDS = 0.5  # for the ranks of a hang to write their stacks


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    state: str  # finished, failed, interrupted
    failure: Failure | None
    immortal: list[int]  # ids of processes that survived SIGKILL


def run(
    cell: Cell,
    folder: CellFolder,
    environment: Mapping[str, str],
    engine: CellEngine,
    limits: schema.Engine,
    stopping: Callable[[], bool],
    progress: Callable[[Watch], None],
    profiler: Sequence[str] = (),
) -> Outcome:
    """Run the job of a cell in its prepared folder and return how it ended; none of its processes is left then.

    Args:
        cell: what the ranks are asked.
        folder: the folder of the cell.
        environment: the variables of every process.
        engine: what starts the job.
        limits: deadlines in seconds.
        stopping: called often; true ends the cell as interrupted.
        progress: called often with what the ranks have reported.
        profiler: the command of a profiler that starts the agent.

    Raises:
        OSError: the job cannot be started.
    """
    watch = Watch(folder, cell.world_size, cell.servers)
    opened = time.monotonic()
    job = engine.start(cell, folder, environment, profiler)
    ended: Failure | None = None
    try:
        while job.poll() is None and ended is None:
            watch.update()
            progress(watch)
            ended = _stopped() if stopping() else overdue(watch, opened, limits, job.process_state)
            time.sleep(POLL_SECONDS)
        if ended is not None and ended.cause == "hang":
            job.ask_for_stacks([rank.pid for rank in watch.everyone if rank.pid])
            time.sleep(STACKS_SECONDS)
    finally:
        # Also after an exception of our own: nothing of a cell outlives it.
        immortal = job.stop(limits.stop_grace_s if ended else 0.0)
    watch.update()
    if ended is not None and ended.cause == "interrupted":
        return Outcome("interrupted", ended, immortal)
    failure = ended or _cause(watch, folder, job)
    if failure is None:
        return Outcome("finished", None, immortal)
    return Outcome("failed", with_log(failure, folder), immortal)


def _stopped() -> Failure:
    return Failure("interrupted", None, "stopped by the user")


def _cause(watch: Watch, folder: CellFolder, job: Job) -> Failure | None:
    """Return why a job that ended by itself failed; None if it did not."""
    status = job.poll()
    if status is None:
        return Failure("killed", None, "the agent survives SIGKILL")
    return first_cause(watch, folder, status) if status else left_early(watch)


def overdue(watch: Watch, opened: float, limits: schema.Engine, state: Callable[[int], str]) -> Failure | None:
    """Return a failure if a deadline has passed.

    `opened` is the monotonic time of the start; `state` returns what a process does.
    """
    now = time.monotonic()
    missing = [rank for rank in watch.everyone if rank.pid is None]
    if missing and now - opened > limits.start_timeout_s:
        names = ", ".join(rank.name for rank in missing)
        return Failure("start", missing[0].number, f"{names} did not report within {limits.start_timeout_s:g} s")
    if not missing and any(_silent(rank, now, limits, state) for rank in watch.everyone):
        return hang(watch, f"gave no sign for {limits.silence_timeout_s:g} s", state)
    last_seen = max(rank.last_seen for rank in watch.everyone)
    if all(rank.done for rank in watch.everyone) and now - last_seen > limits.start_timeout_s:
        return Failure(
            "hang", None, f"all ranks are done, and what started them did not end within {limits.start_timeout_s:g} s"
        )
    if now - opened > limits.cell_timeout_s:
        return hang(watch, f"was not done when the cell's {limits.cell_timeout_s:g} s were over", state)
    return None


def _silent(rank: Rank, now: float, limits: schema.Engine, state: Callable[[int], str]) -> bool:
    """Return whether a rank that still exists, done or not, has written nothing for too long."""
    patience_s = limits.silence_timeout_s
    if rank.iterations == 0:  # the first step compiles, tunes and connects without a sign: it has as long as the start
        patience_s = max(patience_s, limits.start_timeout_s)
    if now - rank.last_seen <= patience_s:
        return False
    return not rank.done or (rank.pid is not None and state(rank.pid) not in ("gone", "zombie"))
