"""Sweeps whose pools drift, break or go on after a stop: the launcher is real, its ranks are records of a known truth."""

import uuid

import pytest
from simulated import changed
from warmed import WarmSimulator, written

from analysis.findings.warm.pools import POOL_DRIFT, judged_by_pools, place_of
from benchmarks.record import Failure, read_study
from benchmarks.record.clock import now
from launch.engines.local import LocalEngine
from launch.run_cell import CellRunner

BATCHES = (2, 4, 8, 16)
COMMAND = ("-m", "model=fmnist_cnn", "gpus=0", "batch_size=2,4,8,16", "engine.start=warm", "noise_pairs=0", "tracking=none",
           "report=false", "seed=3")  # fmt: skip


class Ranks:
    """Measure cells as ranks would that go on: a rate that a test scripts, and the place in a pool."""

    def __init__(self):
        self.simulator, self.measured = WarmSimulator(), []
        self.pool, self.place = "", 0
        self.factor = lambda cell, place: 1.0
        self.state = lambda cell, place: "finished"

    def measure(self, runner, planned, known, progress):
        cell, token = planned.cell, uuid.uuid4().hex
        goes_on = not planned.fresh and bool(self.pool)
        self.pool, self.place = (self.pool, self.place + 1) if goes_on else (token[:8], 0)
        details = {"study": runner.study.name, "sweep_id": runner.sweep.sweep_id, "overrides": [], "drift": planned.drift,
                   "environment": runner.here.around(cell, runner.here.variables(cell, runner.study.folder, token))}  # fmt: skip
        attempt = runner.study.begin(cell, token, details)
        state = self.state(cell, self.place)
        made = self.simulator.record((0,), factor=1.0, state=state)
        rate = {"throughput/images_per_second": 1000.0 * cell.batch_size * self.factor(cell, self.place)}
        stays = planned.stays or not planned.fresh
        record = changed(
            made, **details, record_id=token, cell=cell, cell_key=cell.key, name=cell.name, started_at=now(), ended_at=now(),
            metrics=rate if state == "finished" else {}, within_run={name: {"low": 0.999 * one, "high": 1.001 * one}
                                                                     for name, one in rate.items()},
            ranks=[{"rank": 0, "started": "warm" if goes_on else "fork"}
                   | ({"pool": self.pool, "place": self.place} if stays else {})],
            failure=Failure("exception", 0, "planted") if state == "failed" else None,
        )  # fmt: skip
        record = written(record, known)
        runner.study.end(attempt, record)
        self.measured.append((cell.batch_size, planned.part.value, record))
        if not planned.stays or state != "finished":
            self.pool = ""
        return record


@pytest.fixture
def ranks(monkeypatch):
    fake = Ranks()
    monkeypatch.setattr(CellRunner, "measure", lambda *given: fake.measure(*given))
    monkeypatch.setattr(LocalEngine, "open", lambda engine, first: None)
    return fake


@pytest.fixture
def sweep(launch, tmp_path):
    def run(*more):
        code, out, err = launch(*COMMAND, f"output_dir={tmp_path}", *more)
        assert err == "", err
        return code, out, read_study(tmp_path / "default")[0]

    return run


def verdicts(records):
    return {(one.cell.batch_size, one.cell.ends_pool): one.validity.verdict for one in judged_by_pools(records)}


def test_a_clean_pool_is_measured_once(ranks, sweep):
    code, out, records = sweep()
    assert code == 0 and "pool_drift" not in out and len(records) == 5
    assert [one[:2] for one in ranks.measured] == [
        (2, "new ranks"), (4, "warm"), (8, "warm"), (16, "warm"), (2, "warm, for the last time")
    ]  # fmt: skip
    assert "5 of 5 cells in" in out and out.count("ranks warm") == 4
    assert sweep()[0] == 0 and len(ranks.measured) == 5, "everything is done"


def test_the_cells_of_a_pool_that_drifted_are_measured_again_in_new_ranks(ranks, sweep):
    ranks.factor = lambda cell, place: 0.98 if cell.ends_pool else 1.0
    code, out, records = sweep()
    assert code == 0 and "changed by -2.0 % until their end, allowed -0.5 % to +0.5 %; its 4 cells are suspect" in out
    assert [one[:2] for one in ranks.measured[5:]] == [(batch, "") for batch in BATCHES]
    latest = {one.cell_key: one for one in sorted(records, key=lambda one: one.started_at)}
    assert len(records) == 9 and len(latest) == 5
    assert verdicts(latest.values()) == {(2, True): "suspect"} | {(batch, False): "valid" for batch in BATCHES}
    assert [one.validity.verdict for one in judged_by_pools(records)].count("suspect") == 5
    assert "next     the same command" not in out, "nothing is missing"
    assert sweep()[0] == 0 and len(ranks.measured) == 9


def test_a_sweep_that_was_stopped_after_the_drift_measures_them_when_it_goes_on(ranks, sweep, monkeypatch):
    ranks.factor = lambda cell, place: 0.98 if cell.ends_pool else 1.0
    with monkeypatch.context() as stopped:
        stopped.setattr("launch.plan.pool_ends.PoolEnds.send_to_new_ranks", lambda *given: [])
        assert len(sweep()[2]) == 5
    code, _, records = sweep()
    assert code == 0 and len(records) == 9
    assert [one[:2] for one in ranks.measured[5:]] == [(batch, "") for batch in BATCHES]
    assert sweep()[0] == 0 and len(ranks.measured) == 9


def test_a_first_cell_that_fails_leaves_the_end_to_the_one_that_began_the_ranks(ranks, sweep):
    ranks.state = lambda cell, place: "failed" if cell.batch_size == 2 else "finished"
    code, _, records = sweep()
    assert code == 1
    (end,) = [one for one in records if one.cell.ends_pool]
    assert end.cell.batch_size == 4 and end.validity.codes == {} and POOL_DRIFT not in end.validity.unchecked
    assert place_of(end).pool == place_of(next(one for one in records if one.cell.batch_size == 16)).pool


def test_a_pool_in_which_nothing_went_on_has_no_end(ranks, sweep):
    ranks.state = lambda cell, place: "failed" if cell.batch_size != 16 else "finished"
    _, out, records = sweep()
    assert len(records) == 4 and not any(one.cell.ends_pool for one in records)
    assert "not needed" in out


def test_what_a_stop_left_of_a_pool_is_too_little_for_another(ranks, sweep, monkeypatch):
    ranks.state = lambda cell, place: "finished" if cell.batch_size < 8 and not cell.ends_pool else "interrupted"
    sweep()
    count = len(ranks.measured)
    ranks.state = lambda cell, place: "finished"
    code, _, records = sweep()
    assert code == 0 and [one[:2] for one in ranks.measured[count:]] == [(8, ""), (16, "")]
    told = {one.cell.batch_size: POOL_DRIFT in one.validity.unchecked for one in judged_by_pools(records)}
    assert told[4], "nobody looked whether its ranks drifted"
