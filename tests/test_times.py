"""Changes, pauses, a slow rank and wrong sums in the times of a cell are seen, planted into the raw lines of real H200 cells, at
the smallest size that each check claims; the clean lines have none of these codes.
"""

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from coverage import FAULTS, SERIES, codes_of_time, with_faults, within_a_run

from analysis.validity.checks import judge
from benchmarks.derived import derived_values
from benchmarks.record import CellFolder, read, read_lines
from benchmarks.timing import statistics
from conf.schema import ValidityLimits

DATA = Path(__file__).parent / "data" / "raw_lines"
TRAINED = sorted(
    path
    for path in DATA.glob("*/resnet50-*")
    if "throughput/seconds" in read(path / "record.json").metrics
)
PAIR = DATA / "h200_x4" / "resnet50-nccl_allreduce-gpus0-1-1320f9f3be"
CODES = {"not_stationary", "pauses", "slow_rank", "samples_do_not_fill_window", "rate_inconsistent"}


def lines_of(folder):
    """The cell of a folder, and the lines of its ranks."""
    record = read(folder / "record.json")
    return record, {
        rank: list(read_lines(CellFolder(folder).rank_lines(rank)))
        for rank in range(record.cell.world_size)
    }


def codes(record, lines):
    """The codes of time that a record of these lines has."""
    values = derived_values(lines, record.cell)
    made = dataclasses.replace(
        record, metrics=values["metrics"], checks=values["checks"], effective={}
    )
    return CODES & set(judge(made, ValidityLimits()).codes)


def blocks(lines, purpose, ranks=(0, 1)):
    return [line for rank in ranks for line in lines[rank] if line.get("purpose") == purpose]


def plant(lines, purpose, longer, ranks=(0, 1)):
    """Make steps longer, `longer(place among the steps of a rank)`, and their windows with them."""
    lines = copy.deepcopy(lines)
    for rank in ranks:
        place = 0
        for block in blocks(lines, purpose, [rank]):
            ms = [one * (1 + longer(place + number)) for number, one in enumerate(block["ms"])]
            block["device_ms"] += sum(ms) - sum(block["ms"])
            place += len(ms)
            block["ms"] = ms
    return lines


@pytest.mark.parametrize(
    "folder", TRAINED, ids=lambda path: f"{path.parent.name}-{path.name[-10:]}"
)
def test_clean_cells_of_h200s_have_no_code_of_time(folder):
    assert codes(*lines_of(folder)) == set()


def test_every_strategy_has_a_clean_cell():
    assert len(TRAINED) >= 8


PLANTED = {
    "a step of 5 % from the middle on": ("not_stationary", lambda place: 0.05 * (place >= 36)),
    "a trend of 2 %": ("not_stationary", lambda place: 0.02 * place / 71),
    "a pause of 0.25 s in every 25th step": ("pauses", lambda place: 250 / 55 * (place % 25 == 24)),
    "one step in 72 of +500 %": ("pauses", lambda place: 5.0 * (place == 50)),
    "one step in 72 of +50 %": ("pauses", lambda place: 0.5 * (place == 5)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_in_the_timed_steps_has_its_code(name):
    code, longer = PLANTED[name]
    record, lines = lines_of(PAIR)
    assert codes(record, plant(lines, "timed", longer)) == {code}


def test_a_slow_rank_is_unchecked_where_no_steps_without_exchange_were_timed():
    """Its steps without exchange are not timed, so nothing says how fast each rank is alone."""
    record, lines = lines_of(PAIR)
    values = derived_values(lines, record.cell)
    checks, metrics = values["checks"], values["metrics"]
    del checks["slowest_rank"]
    without = {name: value for name, value in metrics.items() if name != "strategy/cost_ms"}
    for had, why in ((without, "which need exchange_alone"), (metrics, "did not report it")):
        made = dataclasses.replace(record, metrics=had, checks=checks, effective={})
        assert why in judge(made, ValidityLimits()).unchecked["slow_rank"]


def test_a_rank_that_computes_five_percent_slower_is_named():
    record, lines = lines_of(PAIR)
    slow = plant(lines, "without exchange", lambda place: 0.05, ranks=[1])
    assert codes(record, slow) == {"slow_rank"}
    values = derived_values(slow, record.cell)
    assert values["checks"]["slowest_rank"]["rank"] == 1
    alone, slowed = values["tables"]["ranks/own_ms"]
    assert slowed / alone == pytest.approx(1.05, abs=0.005)
    # Steps with the exchange wait for the slowest rank.
    assert values["metrics"]["ranks/spread"] < 1e-4


@pytest.mark.parametrize("purpose", ["timed", "exchange", "with exchange"])
def test_samples_that_leave_out_a_thousandth_of_their_window_are_seen(purpose):
    record, lines = lines_of(PAIR)
    for share, found in ((0.9975, {"samples_do_not_fill_window"}), (0.9995, set())):
        cut = copy.deepcopy(lines)
        for block in blocks(cut, purpose, [1]):
            block["ms"] = [share * one for one in block["ms"]]
        assert codes(record, cut) == found
    dropped = copy.deepcopy(lines)
    del blocks(dropped, purpose, [0])[0]["ms"][3]
    del blocks(dropped, purpose, [1])[0]["ms"][3]
    assert "samples_do_not_fill_window" in codes(record, dropped)


def test_few_steps_have_no_facts_of_a_change_and_constants_none_that_matter():
    assert statistics.stationarity([1.0] * 11) == {}
    steady = statistics.stationarity([1.0] * 12)
    names = ("change", "drift", "change_beyond", "drift_beyond")
    assert [steady[name] for name in names] == [0, 0, 0, 0]
    jumped = statistics.stationarity([1.0] * 20 + [1.05] * 20)
    assert (jumped["change_at"], jumped["change_beyond"]) == (20, statistics.MOST_BEYOND)
    assert statistics.stationarity(np.linspace(1, 2, 30).tolist())["drift"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", SERIES)
def test_intervals_hold_the_truth_and_clean_series_have_no_code(name):
    """95 % intervals, in 60 runs: 90 % less two standard errors."""
    held, codes = within_a_run(name, runs=60)
    for what in ("mean", "median", "difference"):
        assert np.mean(held[what].holds) >= 0.84, what
    assert max(codes.values()) <= 1 / 60
    assert np.median(held["mean"].widths) < 2 * np.quantile(held["mean"].errors, 0.95)


# 51 clean cells of fmnist_cnn, five strategies, on two idle cores: their timed steps, by window.
IDLE = [
    json.loads(line) for line in (DATA.parent / "idle_cpu_steps.jsonl").read_text().splitlines()
]
QUIET = [cell for cell in IDLE if cell["half_width"] < 0.02]
ON_CPU = {
    "a pause of 50 ms": ("pauses", lambda ms: ms + 50 * (np.arange(len(ms)) == len(ms) // 3)),
    "80 ms in short pauses": ("pauses", lambda ms: ms + 13 * (np.arange(len(ms)) % (len(ms) // 6) == 5)),
    "a step of 30 %": ("not_stationary", lambda ms: ms * (1 + 0.3 * (np.arange(len(ms)) > len(ms) / 2))),
    "a trend of 40 %": ("not_stationary", lambda ms: ms * np.linspace(1, 1.4, len(ms))),
}  # fmt: skip


def test_clean_cells_on_idle_cores_have_no_code_of_time():
    assert len(IDLE) == 51 and len(QUIET) >= 12
    for cell in IDLE:
        assert codes_of_time(statistics.joined(cell["ms"]), "cpu") == set(), cell["strategy"]


@pytest.mark.parametrize("name", ON_CPU)
def test_what_is_planted_into_steps_of_cpu_workers_is_told(name):
    code, planted = ON_CPU[name]
    told = 0
    for cell in QUIET:
        told += code in codes_of_time(planted(np.concatenate(cell["ms"])).tolist(), "cpu")
    assert told >= 0.9 * len(QUIET)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_cell_is_told_what_time_did_to_it_from_its_first_step_on(fault):
    warm_up_s, error, codes = with_faults(fault, cells=10)
    if fault == "none":
        assert codes == {} and warm_up_s < 3
    elif "warm-up" in fault:
        assert abs(error) < 0.002
    else:
        assert codes == {"not_stationary": 1.0}
