"""Run one cell to its end, whatever happens in it: start the ranks, keep deadlines, leave no process behind."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.record import CellFolder, Failure
from conf.cell import Cell
from conf.schema import Engine
from launch.engines import processes
from launch.engines.environment import ROOT, arguments
from launch.supervision.failure import first_cause, hang, left_early, with_log
from launch.supervision.progress import Rank, Watch

POLL_SECONDS = 0.1
# For the ranks of a hang to write where they stand.
STACKS_SECONDS = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a cell ended."""

    state: str  # finished, failed, interrupted
    failure: Failure | None
    immortal: list[int]  # processes that survived SIGKILL


def run(
    cell: Cell,
    folder: CellFolder,
    environment: Mapping[str, str],
    token: str,
    engine: Engine,
    stopping: Callable[[], bool],
    progress: Callable[[Watch], None],
    profiler: Sequence[str] = (),
) -> Outcome:
    """Run the ranks of a cell in its prepared folder; no process with its token is left when this returns.

    `stopping` is asked often and true means: close the cell as interrupted. `progress` is told of news and of time passing.
    `profiler` is the command of one that starts the agent; it has `engine.stop_grace_s` to write what it recorded. It
    follows processes that start anew, not forks.
    """
    watch = Watch(folder, cell.world_size, cell.servers)
    opened = time.monotonic()
    with folder.agent_log.open("ab") as log:
        agent = subprocess.Popen(
            [*profiler, *arguments(folder, cell, "exec" if profiler else engine.start)], cwd=ROOT,
            env=processes.started_by_me(environment, bool(profiler)),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    ended: Failure | None = None
    try:
        while agent.poll() is None and ended is None:
            watch.update()
            progress(watch)
            ended = (
                Failure("interrupted", None, "stopped by the user") if stopping() else _overdue(watch, opened, engine)
            )
            time.sleep(POLL_SECONDS)
        if ended is not None and ended.cause == "hang":
            processes.ask_for_stacks(token, [rank.pid for rank in watch.everyone if rank.pid])
            time.sleep(STACKS_SECONDS)
    finally:
        # Also after an exception of our own: nothing of a cell outlives it.
        grace_s = engine.stop_grace_s if ended else 0.0
        if profiler and agent.poll() is None:
            agent.terminate()  # it alone: it ends what it started, and loses its report if it is killed
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(timeout=engine.stop_grace_s)
        immortal = processes.end(token, grace_s)
        processes.remove_shared_memory(token)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(timeout=5)
    watch.update()
    if ended is not None and ended.cause == "interrupted":
        return Outcome("interrupted", ended, immortal)
    failure = ended or (first_cause(watch, folder, agent.returncode) if agent.returncode != 0 else left_early(watch))
    if failure is None:
        return Outcome("finished", None, immortal)
    return Outcome("failed", with_log(failure, folder), immortal)


def _overdue(watch: Watch, opened: float, engine: Engine) -> Failure | None:
    """The deadline that has passed, if one has."""
    now = time.monotonic()
    missing = [rank for rank in watch.everyone if rank.pid is None]
    if missing and now - opened > engine.start_timeout_s:
        names = ", ".join(rank.name for rank in missing)
        return Failure("start", missing[0].number, f"{names} did not report within {engine.start_timeout_s:g} s")
    if not missing and any(_silent(rank, now, engine) for rank in watch.everyone):
        return hang(watch, f"gave no sign for {engine.silence_timeout_s:g} s")
    last_seen = max(rank.last_seen for rank in watch.everyone)
    if all(rank.done for rank in watch.everyone) and now - last_seen > engine.start_timeout_s:
        return Failure(
            "hang", None, f"what started the ranks did not end within {engine.start_timeout_s:g} s after them"
        )
    if now - opened > engine.cell_timeout_s:
        return hang(watch, f"was not done when the cell's {engine.cell_timeout_s:g} s were over")
    return None


def _silent(rank: Rank, now: float, engine: Engine) -> bool:
    """Whether a rank that still exists, done or not, has written nothing for too long."""
    patience_s = engine.silence_timeout_s
    if rank.iterations == 0:  # the first step compiles, tunes and connects without a sign: it has as long as the start
        patience_s = max(patience_s, engine.start_timeout_s)
    if now - rank.last_seen <= patience_s:
        return False
    return not rank.done or (rank.pid is not None and processes.state(rank.pid) not in ("gone", "zombie"))
