"""Supervision without processes (fake_engine): how a cell ends, and that all is ended."""

import pytest
from fake_engine import FakeEngine, becomes, begins, ends, is_done, raises, starts, supervised


def test_a_job_that_ends_well_is_finished_and_stopped_without_grace(tmp_path):
    outcome, job, seconds = supervised(tmp_path, FakeEngine(starts, begins, is_done, ends(0)))
    assert (outcome.state, outcome.failure, outcome.unkillable_pids) == ("finished", None, [])
    assert job.stopped == [0.0] and job.asked == [] and seconds < 1


def hangs(job):
    begins(job, (9, 7))


START = {"start_timeout_s": 20}
HANGS, STAYS = (starts, hangs), (starts, is_done)
GONE, RAISES = (*STAYS, becomes("gone", 0, 1)), (starts, begins, raises(1, "ValueError", "no"))
FAILURES = [
    (
        (),
        START,
        "start",
        0,
        "rank 0, rank 1 did not report within 20 s (engine.start_timeout_s)",
        20,
    ),
    (HANGS, {}, "hang", 1, "rank 1 gave no sign for 12 s, in phase 'timed' after 7 iterations", 12),
    (HANGS, {"cell_timeout_s": 5}, "hang", 1, "was not done after 5 s (engine.cell_timeout_s)", 5),
    (GONE, START, "hang", None, "did not end within 20 s", 20),
    (STAYS, START, "hang", None, "each gave no sign for 20 s in phase 'exit'", 20),
    ((*RAISES, ends(1)), {}, "exception", 1, "rank 1 raised ValueError", 0),
]


@pytest.mark.parametrize(("steps", "limits", "cause", "rank", "says", "after_s"), FAILURES)
def test_a_failure_is_noticed_in_time(tmp_path, steps, limits, cause, rank, says, after_s):
    outcome, job, seconds = supervised(tmp_path, FakeEngine(*steps), **limits)
    failure = outcome.failure
    assert (outcome.state, failure.cause, failure.rank) == ("failed", cause, rank), failure
    assert says in failure.message
    assert len(job.stopped) == 1 and after_s <= seconds < after_s + 3.5
    asked = says.startswith(("rank 1 gave", "was not", "each gave"))
    assert job.asked == [[100, 101]] * asked


def test_a_user_who_stops_gets_an_interrupted_cell_with_grace(tmp_path):
    engine = FakeEngine(starts, begins, survivors=[4711])
    outcome, job, _ = supervised(tmp_path, engine, stopping=lambda: not engine.steps)
    said = outcome.state, outcome.failure.message, outcome.unkillable_pids
    assert said == ("interrupted", "stopped by the user", [4711])
    assert job.stopped == [3.0]


def test_a_job_is_stopped_also_after_an_exception_of_our_own(tmp_path):
    def fails(job):
        raise KeyError("ours")

    engine = FakeEngine(starts, fails)
    with pytest.raises(KeyError):
        supervised(tmp_path, engine)
    assert engine.jobs[0].stopped == [0.0]
