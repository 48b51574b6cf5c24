"""Ranks that go on from cell to cell and become slower: planted at the smallest size that is seen, beside clean pools."""

import math

import pytest
from simulated import Truth, changed
from tracked import make_folder, make_sweep
from warmed import SWEEP, WarmSimulator, written

from analysis.findings.next_run.interval import half_width
from analysis.findings.study import Study
from analysis.findings.warm.ends import LEAST_ALLOWED, POOL_END, PoolEnd
from analysis.findings.warm.pools import (
    NO_END,
    POOL_DRIFT,
    drifted,
    judged_by_pools,
    one_of_each_pool,
    place_of,
    was_warm,
)
from analysis.verification.verify import verify
from benchmarks import record as records
from benchmarks.record import CellFolder
from conf.schema import Tracking
from launch.plan.order import PlannedCell, PoolPart
from launch.plan.pool_ends import PoolEnds, about_drift
from launch.tracking.later_values import update_values
from launch.tracking.tracker import Tracker


@pytest.fixture
def quiet():
    return WarmSimulator(Truth(noise=0.0))


def codes(records):
    return [one.validity.verdict for one in records], [POOL_DRIFT in one.validity.codes for one in records]


def test_a_pool_that_became_slower_is_suspect_as_a_whole_and_no_other(quiet):
    slow = quiet.pool("aa", [1.0, 1.0, 1.0], end=0.99)
    sound = quiet.pool("bb", [1.0, 1.0, 1.0], batches=[512, 520, 528], end=0.997)
    assert slow[-1].checks[POOL_END]["change"] == pytest.approx(-0.01)
    assert codes(slow) == (["valid"] * 3 + ["suspect"], [False] * 3 + [True]), "as they were written"
    told = judged_by_pools([*slow, *sound])
    assert codes(told) == (["suspect"] * 4 + ["valid"] * 4, [True] * 4 + [False] * 4)
    assert told[0].validity.codes[POOL_DRIFT] == (
        "warm ranks did not stay as fast as they were: "
        "the first cell's rate changed by -1.0 % until their end, allowed -0.5 % to +0.5 %"
    )
    assert drifted([*slow, *sound]) == {one.record_id for one in slow[:3]}
    study = Study.of([*sound, *slow])
    assert {one.record_id for one in study.records if one.validity.verdict == "suspect"} == {
        one.record_id for one in slow
    }
    assert study.single(slow[0]).records[0].validity.verdict == "suspect", "also for who has the record as written"
    assert all(not one.cell.ends_pool for runs in study.runs for one in runs.records), "an end is no further run"
    assert [record.record_id for record, _ in study.ends] == [one[-1].record_id for one in (slow, sound)]


def test_a_pool_that_became_faster_has_drifted_too(quiet):
    assert POOL_DRIFT in quiet.pool("aa", [1.0, 1.0, 1.0], end=1.006)[-1].validity.codes
    assert quiet.pool("bb", [1.0, 1.0, 1.0], end=1.004)[-1].validity.codes == {}
    assert not PoolEnd("", -0.49, 1.0).drifted and PoolEnd("", -0.51, 1.0).drifted, "a factor of two either way"


def test_the_noise_floor_says_how_far_the_end_may_be():
    simulator = WarmSimulator(Truth(noise=0.01), seed=3)
    repeats = [simulator.cell(repeat=repeat) for repeat in range(8)]
    end = simulator.pool("aa", [1.0, 1.0, 1.0])[-1]
    first = simulator.cell(pool="aa", batch_size=256)
    known = [*repeats, changed(first, record_id=end.checks[POOL_END]["first"])]
    end = written(end, known)
    floor = Study.of([*known, end]).single(end).floor("throughput/images_per_second")
    assert end.checks[POOL_END]["allowed"] == pytest.approx(math.expm1(half_width(floor, 1)))
    assert end.checks[POOL_END]["allowed"] > 4 * LEAST_ALLOWED


def test_runs_in_the_same_ranks_say_nothing_of_the_noise_between_processes(quiet):
    pool = [quiet.cell(pool="aa", place=place, repeat=place) for place in range(3)]
    alone = quiet.cell(repeat=3)
    assert one_of_each_pool([*pool, alone]) == [pool[0], alone]
    study = Study.of([*pool, alone, quiet.cell(repeat=4, factor=1.01)])
    assert sum(scatter.freedom for (_, name), scatter in study.floors.own().items() if "images" in name) == 2


def test_cells_of_a_pool_that_broke_are_unchecked(quiet):
    broken = quiet.pool("aa", [1.0, 1.0, 1.0])[:-1]
    told = judged_by_pools(broken)
    assert [one.validity.unchecked.get(POOL_DRIFT) for one in told] == [None, NO_END, NO_END]
    proof = [quiet.cell(pool="bb", place=place, repeat=place) for place in range(3)]
    assert judged_by_pools(proof) == proof, "one cell alone compares its own runs"
    alone = [quiet.cell(pool="cc"), quiet.cell()]
    assert judged_by_pools(alone) == alone and place_of(alone[1]) is None and not was_warm(alone[0])


WRONG = [
    {"pool": 7, "place": 1},
    {"pool": "aa", "place": "1"},
    {"pool": "aa", "place": True},
    {"pool": "aa", "place": -1},
]


@pytest.mark.parametrize("ranks", [[], *([one] for one in ({}, {"pool": "", "place": 0}, *WRONG))])
def test_what_is_no_place_is_none(quiet, ranks):
    assert place_of(changed(quiet.cell(), ranks=ranks)) is None


def test_an_end_without_its_first_cell_is_unchecked(quiet):
    *others, end = quiet.pool("aa", [1.0, 1.0, 1.0])
    alone = written(end, others[1:])
    assert (
        alone.validity.unchecked[POOL_DRIFT]
        == "the pool had another first cell, or how far its runs may differ is not known"
    )
    assert POOL_END not in alone.checks


def test_verify_finds_an_end_that_states_another_change(quiet, tmp_path):
    pool = quiet.pool("aa", [1.0, 1.0, 1.0], end=0.99)

    def found(end):
        for one in (*pool[:-1], end):
            path = CellFolder(tmp_path / one.cell.folder).record
            path.parent.mkdir(exist_ok=True)
            records.write(CellFolder(path.parent), one)
        return [one.field for one in verify(tmp_path).differences if POOL_END in one.field]

    assert found(pool[-1]) == []
    facts = {**pool[-1].checks[POOL_END], "change": -0.001}
    assert found(changed(pool[-1], checks={**pool[-1].checks, POOL_END: facts})) == [f"checks {POOL_END} change"]


def test_cells_of_a_pool_that_drifted_go_to_new_ranks(quiet):
    pool = quiet.pool("aa", [1.0, 1.0, 1.0], end=0.99)
    parts = [PoolPart.BEGINS, PoolPart.WARM, PoolPart.WARM, PoolPart.ENDS]
    other = quiet.cell(batch_size=512)
    cells = [PlannedCell(one.cell, part=part) for one, part in zip(pool, parts, strict=True)] + [
        PlannedCell(other.cell)
    ]
    ends = PoolEnds(cells)
    assert ends.send_to_new_ranks([*pool, other], [*pool, other]) == [0, 1, 2]
    assert [one.part for one in cells] == [PoolPart.ALONE] * 3 + [PoolPart.ENDS, PoolPart.ALONE]
    again = [quiet.cell(batch_size=one.cell.batch_size) for one in pool[:3]]
    assert ends.send_to_new_ranks([*pool, other, *again], [*pool, other, *again]) == [], "each is measured again once"
    assert ends.unfinished([*pool, *again], {}) == 1 and ends.unfinished([*pool, *again], {4: other}) == 0
    said = about_drift(pool[-1], pool)
    assert said.endswith("; its 3 cells are suspect, and measured again in new ranks at the end")
    assert about_drift(pool[0], pool) == ""


def test_an_end_measures_the_cell_that_really_began_the_pool(quiet):
    pool = quiet.pool("aa", [1.0, 1.0, 1.0])
    cells = [PlannedCell(quiet.cell(batch_size=16).cell.at_pool_end(), part=PoolPart.ENDS)]
    ends = PoolEnds(cells)
    assert ends.needs(0, pool[:3]) and cells[0].cell == pool[0].cell.at_pool_end()
    for measured in ([], pool[:1], pool, [*pool, quiet.cell()]):
        ends = PoolEnds([*cells])
        assert not ends.needs(0, measured) and ends.needless == {0}


def test_the_store_says_that_a_pool_drifted(quiet, output_dir):
    tracker = Tracker.open(Tracking(), output_dir, "scaling")
    pool = [changed(one, study="scaling", sweep_id=SWEEP) for one in quiet.pool("aa", [1.0, 1.0, 1.0], end=0.99)]
    tracker.start_sweep(make_sweep(4))
    for one in pool:
        tracker.log(one, CellFolder(make_folder(output_dir / "scaling", one)))

    def tags(name):
        found = {run.data.tags.get("ringside.record_id"): run.data.tags.get(name)
                 for run in tracker._client.search_runs([tracker._experiment])}  # fmt: skip
        return [found[one.record_id] for one in pool]

    assert tags("validity") == ["valid"] * 3 + ["suspect"] and tags("ranks") == ["new"] + ["warm"] * 3
    update_values(tracker, output_dir / "scaling", pool, {})
    assert tags("validity") == ["suspect"] * 4 and set(tags("validity.codes")) == {POOL_DRIFT}
    assert all("-1.0 %" in note for note in tags("mlflow.note.content"))
